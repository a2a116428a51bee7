"""Updates of flat buffers as `cases` has them: what is kept of the weights, in which precision.

Apart from what it takes to pack the state, so that the update can be timed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.master_weights import keep_weights_, wide_weights
from megalite_kernels.moments import BLOCK, Quantized
from megalite_kernels.optimizer import SGD, AdamW, Flat, Moment, adamw_, sgd_
from megalite_kernels.quantization import FORMATS

# Of parameters, of masters beside them (int16: remainders), of gradients and of both moments.
KEPT = (
    (torch.float32, None, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.int16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int16, torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.int16, torch.bfloat16, torch.float8_e4m3fn),
)
FLAT = 4096  # elements a token of what has no rows
ADAMW = AdamW(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, step=2, factor=0.5)


@dataclass(frozen=True)
class Update:
    """A step of AdamW, or of SGD with a momentum."""

    parameters: torch.dtype
    kept: torch.dtype | None
    gradients: torch.dtype
    moments: torch.dtype
    momentum: float | None = None
    """Momentum of SGD; None: AdamW."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        kept = (self.parameters,) if self.kept is None else (self.parameters, self.kept)
        return *kept, self.gradients, self.moments

    def make_inputs(self, tokens: int, device: str) -> list[Tensor]:
        """Weights, gradients, their average and the average of their squares; moments in 8 bits as their values."""
        weights, gradients, average = (torch.randn(tokens * FLAT, device=device) for _ in range(3))
        squares = average.square()
        if self.moments in FORMATS:
            average, squares = (moment.read(0, len(weights)) for moment in _quantized(average, squares, self.moments))
        else:
            average, squares = average.to(self.moments), squares.to(self.moments)
        return [weights, gradients.to(self.gradients), average, squares]

    def outputs(self, weights: Tensor, gradients: Tensor, average: Tensor, squares: Tensor) -> tuple[Tensor, ...]:
        """The weights after it, and the moments but those in 8 bits; on copies."""
        parts = weights.clone(), gradients, average.clone(), squares.clone()
        flat, state = self._packed(*parts) if weights.dtype != torch.float64 else (Flat(parts[0], parts[1]), parts[2:])
        self._step(flat, state)
        changed = state[:1] if self.momentum is not None else state
        moments = [moment for moment in changed if isinstance(moment, Tensor)] if self.moments not in FORMATS else []
        return wide_weights(flat.parameters, flat.master), *moments

    def alone(self, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Itself, on what is packed before."""
        return partial(self._step, *self._packed(*inputs))

    def traffic(self, inputs: Sequence[Tensor], _: Sequence[Tensor]) -> tuple[int, int]:
        """All that is kept is read and written, but for parameters that are rounded from masters: these are written."""
        element = self.gradients.itemsize + 2 * self.parameters.itemsize
        if self.kept is not None:
            element += 2 * self.kept.itemsize - (self.parameters.itemsize if self.kept == torch.float32 else 0)
        moments, count = 1 if self.momentum is not None else 2, len(inputs[0])
        scales = 4 * -(-count // BLOCK) if self.moments in FORMATS else 0
        return element * count + 2 * moments * (self.moments.itemsize * count + scales), 0

    def _packed(
        self, weights: Tensor, gradients: Tensor, average: Tensor, squares: Tensor
    ) -> tuple[Flat, Sequence[Moment]]:
        flat = Flat(weights, gradients)
        if self.kept is not None:
            master = torch.empty_like(weights, dtype=self.kept)
            flat = Flat(weights.to(self.parameters), gradients, master)
            keep_weights_(weights, flat.parameters, master)
        return flat, _quantized(average, squares, self.moments) if self.moments in FORMATS else (average, squares)

    def _step(self, flat: Flat, state: Sequence[Moment]) -> None:
        if self.momentum is None:
            adamw_(flat, state[0], state[1], ADAMW)
        else:
            sgd_(flat, state[0], SGD(1e-2, 0.1, self.momentum, 0.5))


def updates() -> Iterator[tuple[str, Update]]:
    """Yield the updates with their names."""
    for parameters, kept, gradients, moments in KEPT:
        yield "adamw", Update(parameters, kept, gradients, moments)
        if moments in (torch.bfloat16, torch.int8):
            yield "sgd", Update(parameters, kept, gradients, moments, momentum=0.9)


def _quantized(average: Tensor, squares: Tensor, format: torch.dtype) -> tuple[Quantized, Quantized]:
    kept = [Quantized.zeros(len(average), format, average.device, root=root) for root in (False, True)]
    for moment, values in zip(kept, (average, squares), strict=True):
        moment.set(values, 0)
    return kept[0], kept[1]
