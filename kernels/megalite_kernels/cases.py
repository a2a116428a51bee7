"""Every operation at the shapes used in training, on any device.

The table has three users: `selftest` runs it on a GPU, `make compile-kernels` compiles it on the meta device, and
benchmarks/kernels.py measures its time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.activation import (
    GATED,
    activation,
    exact_geglu,
    exact_gelu,
    geglu,
    gelu,
    quick_geglu,
    squared_relu,
    swiglu,
)
from megalite_kernels.case import Case, dtype_names
from megalite_kernels.compression import compact, dequantize_rows, quantize_rows
from megalite_kernels.cross_entropy import gradient_, statistics
from megalite_kernels.digits import DIGIT_BITS, UNIT_BITS
from megalite_kernels.dropout import drop
from megalite_kernels.dropout_mask import DropoutMask
from megalite_kernels.exact_sum import exact_digits, exact_digits_reference, sums_of_squares
from megalite_kernels.expert_cases import expert_cases
from megalite_kernels.formats import FORMATS
from megalite_kernels.loss_options import Columns, LossOptions
from megalite_kernels.master_weights import keep_weights_, wide_weights
from megalite_kernels.moments import BLOCK, Quantized
from megalite_kernels.norm import norm, residual_norm
from megalite_kernels.optimizer import update_
from megalite_kernels.quantization import dequantize, quantize
from megalite_kernels.recurrent_cases import recurrent_cases
from megalite_kernels.rotary import rotary_embedding
from megalite_kernels.tile_cases import tile_cases
from megalite_kernels.updates import SGD, AdamW, Flat, Moment

HIDDEN = (2048, 4096, 5120, 8192, 16384)
CENTERED_HIDDEN = (2048, 4096, 5120, 8192, 12288, 16384)  # 12288 is GPT-3's: its backward has the most sums per program
HEAD = 128
EVERY_TERM = LossOptions(label_smoothing=0.1, z_loss=1e-4, soft_cap=30.0)
# Logits: width, columns, dtype and options. A large vocabulary, a small one, and the last of 8 ranks, with padding.
LOGITS = (
    (131072, Columns(0, 131072, 131072), torch.bfloat16, LossOptions()),
    (131072, Columns(0, 131072, 131072), torch.bfloat16, EVERY_TERM),
    (131072, Columns(0, 131072, 131072), torch.float32, LossOptions()),
    (131072, Columns(0, 131072, 131072), torch.float32, EVERY_TERM),
    (32000, Columns(0, 32000, 32000), torch.bfloat16, LossOptions()),
    (6288, Columns(44016, 6241, 50257), torch.bfloat16, EVERY_TERM),
)
ROTARY_HEADS, ROTARY_GROUPS = 32, 8
# Dtypes of activations and of weights. A weight of 1 + w (`apply_layernorm_1p`) is fp32 for every activation dtype.
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
)
# Dtypes of parameters, masters (int16 for remainders, None for no separate masters), gradients and both moments.
KEPT = (
    (torch.float32, None, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.int16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int16, torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.int16, torch.bfloat16, torch.float8_e4m3fn),
)
FLAT = 4096  # elements per token of flat buffers, which have no rows
ADAMW = AdamW(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, step=2, factor=0.5)
MOMENTUM = SGD(rate=1e-2, decay=0.1, momentum=0.9, factor=0.5)


def _rows_and_vectors(
    width: int, tensors: int, vectors: int, dtypes: tuple[torch.dtype, torch.dtype], tokens: int, device: str
) -> list[Tensor]:
    found = [torch.randn(tokens, width, dtype=dtypes[0], device=device) for _ in range(tensors)]
    found += [torch.randn(width, dtype=dtypes[1], device=device) for _ in range(vectors)]
    return [tensor.requires_grad_() for tensor in found]


def _norms() -> Iterator[Case]:
    """Yield RMSNorm and LayerNorm, with and without a residual, by width and by dtypes of rows and vectors."""
    for name, tensors, vectors, widths, kinds in (
        ("rms_norm", 1, 1, (HEAD, *HIDDEN), DTYPES),
        ("layer_norm", 1, 2, CENTERED_HIDDEN, DTYPES),
        ("residual_rms_norm", 2, 1, HIDDEN, DTYPES[::3]),
        ("residual_layer_norm", 2, 2, CENTERED_HIDDEN, DTYPES[::3]),
    ):
        for width, dtypes in itertools.product(widths, kinds):
            inputs = partial(_rows_and_vectors, width, tensors, vectors, dtypes)
            case = Case("norm", f"{name} {width} {dtype_names(*dtypes)}", width, inputs, _normed)
            if tensors == 2:
                case = replace(case, operation="residual_norm", run=_normed_sum, traffic=_residual_traffic)
            yield case


def _normed(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return norm(input, weight, bias, 1e-5)


def _normed_sum(input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return residual_norm(input, residual, weight, bias, 1e-5)


def _residual_traffic(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Count four tensors: backward reads both gradients and the saved sum, and writes one gradient for both inputs."""
    return 4 * outputs[0].nbytes, 4 * outputs[0].nbytes


def _activations() -> Iterator[Case]:
    """Yield activations at the FFN sizes of known models, with and without a bias."""
    for function, ffn, biases, kinds in (
        (swiglu, 5632, 0, DTYPES[::3]),
        (swiglu, 14336, 0, DTYPES[:1]),
        (swiglu, 28672, 1, DTYPES[:1]),
        (geglu, 14336, 0, DTYPES[:1]),
        (exact_geglu, 14336, 1, DTYPES[::3]),
        (quick_geglu, 2880, 1, DTYPES[:1]),
        (gelu, 12288, 1, DTYPES[:1]),
        (exact_gelu, 20480, 1, DTYPES[::3]),
        (squared_relu, 24576, 0, DTYPES[:1]),
    ):
        gated = function.__name__ in GATED
        run = activation("quick_geglu", limit=7.0, offset=1.0) if function is quick_geglu else function
        for dtypes in kinds:
            name = f"{function.__name__} {ffn}{' bias' * biases} {dtype_names(*dtypes)}"
            inputs = partial(_rows_and_vectors, ffn * (1 + gated), 1, biases, dtypes)
            yield Case("swiglu" if gated else "gelu", name, ffn * (1 + gated), inputs, run)


def _logits(width: int, columns: Columns, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    """Make logits, labels, and a log-sum-exp and a gradient of the loss per token."""
    logits = torch.randn(tokens, width, dtype=dtype, device=device)
    labels = torch.randint(columns.vocab_size, (tokens,), device=device)
    log_sums = torch.full((tokens,), math.log(columns.vocab_size) + 0.5, device=device)
    return [logits, labels, log_sums, torch.rand(tokens, device=device)]


def _statistics(columns: Columns, options: LossOptions, *inputs: Tensor) -> Tensor:
    return statistics(inputs[0], inputs[1], columns, options)


def _gradient(columns: Columns, options: LossOptions, *inputs: Tensor) -> Tensor:
    """Return the gradient, which overwrites the logits."""
    logits, labels, log_sums, scales = inputs
    gradient_(logits, labels, log_sums, scales, columns, options)
    return logits


def _cross_entropies() -> Iterator[Case]:
    for width, columns, dtype, options in LOGITS:
        inputs = partial(_logits, width, columns, dtype)
        what = f"{'every term' if options is EVERY_TERM else 'plain'} {width} {dtype_names(dtype)}"
        for name, run in (("statistics", _statistics), ("gradient_", _gradient)):
            # The logits nearly cancel in their sum, so its relative error is many times that of each logit.
            tolerance = 3e-4 if name == "statistics" and options is EVERY_TERM else None
            run = partial(run, columns, options)
            yield Case("cross_entropy", f"{name} {what}", width, inputs, run, tolerance=tolerance)


@dataclass(frozen=True)
class Update:
    """A step of AdamW or of SGD, and the dtypes of what it keeps."""

    parameters: torch.dtype
    kept: torch.dtype | None
    gradients: torch.dtype
    moments: torch.dtype
    by: AdamW | SGD

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        kept = (self.parameters,) if self.kept is None else (self.parameters, self.kept)
        return *kept, self.gradients, self.moments

    def make_inputs(self, tokens: int, device: str) -> list[Tensor]:
        """Make weights, gradients and the moments. Moments in 8 bits are returned as their dequantized values."""
        weights, gradients, average = (torch.randn(tokens * FLAT, device=device) for _ in range(3))
        moments = [average, average.square()] if isinstance(self.by, AdamW) else [average]
        if self.moments in FORMATS:
            moments = [moment.read(0, len(weights)) for moment in _quantized(moments, self.moments)]
        else:
            moments = [moment.to(self.moments) for moment in moments]
        return [weights, gradients.to(self.gradients), *moments]

    def outputs(self, weights: Tensor, gradients: Tensor, *moments: Tensor) -> tuple[Tensor, ...]:
        """Update copies of the inputs. Return the weights and the moments, but no moments in 8 bits."""
        weights, copies = weights.clone(), [moment.clone() for moment in moments]
        exact = weights.dtype == torch.float64
        flat, state = (Flat(weights, gradients), copies) if exact else self._packed(weights, gradients, *copies)
        update_(flat, state, self.by)
        return wide_weights(flat.parameters, flat.master), *([] if self.moments in FORMATS else copies)

    def packed_step(self, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Pack the inputs and return the function that only updates them, to be timed."""
        return partial(update_, *self._packed(*inputs), self.by)

    def traffic(self, inputs: Sequence[Tensor], _: Sequence[Tensor]) -> tuple[int, int]:
        """Count all state as read and written, except parameters rounded from fp32 masters, which are only written."""
        element = self.gradients.itemsize + 2 * self.parameters.itemsize
        if self.kept is not None:
            element += 2 * self.kept.itemsize - (self.parameters.itemsize if self.kept == torch.float32 else 0)
        moments, count = len(inputs) - 2, len(inputs[0])
        scales = 4 * -(-count // BLOCK) if self.moments in FORMATS else 0
        return element * count + 2 * moments * (self.moments.itemsize * count + scales), 0

    def _packed(self, weights: Tensor, gradients: Tensor, *moments: Tensor) -> tuple[Flat, Sequence[Moment]]:
        flat = Flat(weights, gradients)
        if self.kept is not None:
            master = torch.empty_like(weights, dtype=self.kept)
            flat = Flat(weights.to(self.parameters), gradients, master)
            keep_weights_(weights, flat.parameters, master)
        return flat, _quantized(moments, self.moments) if self.moments in FORMATS else moments


def _quantized(moments: Sequence[Tensor], format: torch.dtype) -> list[Quantized]:
    """Quantize the average and, if there is one, the average of squares."""
    kept = [Quantized.zeros(each, format, root=at == 1) for at, each in enumerate(moments)]
    for moment, values in zip(kept, moments, strict=True):
        moment.set(values, 0)
    return kept


def _optimizer_cases() -> Iterator[Case]:
    """Yield updates by AdamW and SGD for all ways to keep the state, then sums of squares and exact sums."""
    for parameters, kept, gradients, moments in KEPT:
        # SGD with one kind of moment in bf16 and one in 8 bits; AdamW with all.
        for by in (ADAMW, MOMENTUM) if moments in (torch.bfloat16, torch.int8) else (ADAMW,):
            step = Update(parameters, kept, gradients, moments, by)
            name = f"{type(by).__name__.lower()} {dtype_names(*step.dtypes)}"
            run, packed = step.outputs, step.packed_step
            yield Case("optimizer", name, FLAT, step.make_inputs, run, traffic=step.traffic, timed=packed)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"sums_of_squares {dtype_names(dtype)}"
        yield Case("optimizer", name, FLAT, partial(_flat_inputs, FLAT, dtype), _norm_of)

    name = f"exact_digits {dtype_names(torch.float64)}"
    inputs = partial(_flat_inputs, FLAT, torch.float32)
    case = Case("optimizer", name, FLAT, inputs, _exact_sum, traffic=_exact_sum_traffic, timed=_exact_sum_alone)
    yield replace(case, tolerance=1e-14)


def _exact_sum(values: Tensor) -> Tensor:
    """Return the sum of squares, by the reference if the values are in float64."""
    squares = [values.double().square_()]
    digits = exact_digits_reference(squares) if values.dtype == torch.float64 else exact_digits(squares)
    of_any_size = digits[0, 2:42].double()  # with the higher ones, factors would overflow
    places = torch.arange(len(of_any_size), dtype=torch.float64, device=values.device)
    return (of_any_size * torch.exp2(DIGIT_BITS * places - UNIT_BITS)).sum()


def _exact_sum_alone(inputs: Sequence[Tensor]) -> Callable[[], object]:
    return partial(exact_digits, [inputs[0].double().square_()])


def _exact_sum_traffic(inputs: Sequence[Tensor], _: Sequence[Tensor]) -> tuple[int, int]:
    return 2 * inputs[0].nbytes, 0


def _norm_of(values: Tensor) -> Tensor:
    return sums_of_squares(values).sum().sqrt()


def _rotary_inputs(width: int, rotated: int, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    """Make the fused projection of queries, keys and values, as in attention, and the tables."""
    projected = torch.randn(tokens, 1, (ROTARY_HEADS + 2 * ROTARY_GROUPS) * width, dtype=dtype, device=device)
    angles = torch.randn(tokens, 1, 1, rotated // 2, device=device)
    return [projected.requires_grad_(), angles.cos(), angles.sin()]


def _rotate(projected: Tensor, cosine: Tensor, sine: Tensor, *, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    query, key_value = projected.split([ROTARY_HEADS * width, 2 * ROTARY_GROUPS * width], dim=-1)
    key, _ = key_value.unflatten(-1, (ROTARY_GROUPS, 2, width)).unbind(dim=-2)
    return rotary_embedding(query.unflatten(-1, (ROTARY_HEADS, width)), key, cosine, sine, interleaved=interleaved)


def _rotations() -> Iterator[Case]:
    """Yield rotations of all or the first columns of a head, of pairs in halves and of interleaved ones."""
    for width, rotated, dtype, interleaved in (
        (HEAD, HEAD, torch.bfloat16, False),
        (HEAD, HEAD, torch.float16, True),
        (HEAD, HEAD, torch.float32, False),
        (HEAD, HEAD // 4, torch.bfloat16, False),
        (80, 80, torch.bfloat16, True),
        (256, 256, torch.bfloat16, False),
    ):
        name = f"rotary_embedding {rotated}/{width} {dtype_names(dtype)}{' interleaved' if interleaved else ''}"
        inputs = partial(_rotary_inputs, width, rotated, dtype)
        run = partial(_rotate, width=width, interleaved=interleaved)
        yield Case("rotary", name, (ROTARY_HEADS + 2 * ROTARY_GROUPS) * width, inputs, run, keeps_inputs=False)


def _flat_inputs(width: int, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    return [torch.randn(tokens * width, dtype=dtype, device=device)]


def _quantized_and_back(values: Tensor, *, format: torch.dtype, block: int, seed: int | None) -> Tensor:
    return dequantize(*quantize(values, format, block, seed=seed), block, values.dtype)


def _quantizations() -> Iterator[Case]:
    """Yield quantization and back, by format, dtype and block, rounded to nearest and at random."""
    for format, dtype, block, seed in (
        (torch.int8, torch.float32, 256, None),
        (torch.int8, torch.float32, 256, 1),
        (torch.int8, torch.bfloat16, 2048, 1),
        (torch.float8_e4m3fn, torch.float32, 256, 1),
        (torch.float8_e5m2, torch.float32, 256, 1),
    ):
        name = f"quantize {block} {dtype_names(dtype, format)} {'to nearest' if seed is None else 'stochastic'}"
        run = partial(_quantized_and_back, format=format, block=block, seed=seed)
        inputs = partial(_flat_inputs, 2048, dtype)
        yield Case("quantization", name, 2048, inputs, run, traffic=_quantization_traffic)


def _quantization_traffic(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Count both directions: quantizing reads values and writes 1-byte codes, and dequantizing does the opposite."""
    return 2 * (inputs[0].nbytes + inputs[0].numel()), 0


def _compress(values: Tensor, *, format: torch.dtype, back: bool) -> tuple[Tensor, ...]:
    """Quantize two parts, and return what is restored and what is left out."""
    parts = values.view(2, -1)
    codes, scales, residual = _compressed(parts, format)
    if not back:
        quantize_rows(parts, codes, scales, residual)
        return (residual,)
    quantize_rows(parts, codes, scales)
    restored = torch.empty_like(parts)
    dequantize_rows(codes, scales, restored)
    return (restored,)


def _compressed(parts: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(parts.shape, dtype=format, device=parts.device)
    scales = torch.empty(len(parts), -(-parts.shape[1] // BLOCK), device=parts.device)
    return codes, scales, torch.empty_like(parts)


def _compression_alone(inputs: Sequence[Tensor], *, format: torch.dtype, back: bool) -> Callable[[], object]:
    parts = inputs[0].view(2, -1)
    codes, scales, residual = _compressed(parts, format)
    if not back:
        return partial(quantize_rows, parts, codes, scales, residual)
    quantize_rows(parts, codes, scales)
    return partial(dequantize_rows, codes, scales, residual)


def _compression_traffic(inputs: Sequence[Tensor], _: Sequence[Tensor], *, back: bool) -> tuple[int, int]:
    """Count values that are read and residuals, or restored values, and codes of 1 byte."""
    return (1 if back else 2) * inputs[0].nbytes + inputs[0].numel(), 0


def _compact(values: Tensor) -> tuple[Tensor, ...]:
    parts = values.view(2, -1)
    indices, kept = compact(parts, parts.new_full((2,), 2.5), max(parts.shape[1] // 100, 1))
    return indices.double(), kept


def _compressions() -> Iterator[Case]:
    for format, back in itertools.product((torch.int8, torch.float8_e4m3fn), (False, True)):
        name = f"{'dequantize' if back else 'quantize'}_rows {dtype_names(torch.float32, format)}"
        inputs, run = partial(_flat_inputs, 4096, torch.float32), partial(_compress, format=format, back=back)
        alone, traffic = partial(_compression_alone, format=format, back=back), partial(_compression_traffic, back=back)
        yield Case("compression", name, 4096, inputs, run, traffic=traffic, timed=alone)
    inputs = partial(_flat_inputs, 4096, torch.float32)
    yield Case("compression", f"compact {dtype_names(torch.float32)}", 4096, inputs, _compact, indexed=True)


def _dropped(values: Tensor) -> Tensor:
    """Drop from the second half of a sample."""
    tokens = len(values)
    mask = DropoutMask(0.1, seed=1, layer=2, site=3, samples=(4,), rows=(range(tokens, 2 * tokens),))
    return drop(values.unsqueeze(1), mask, dimension=1)


def _dropouts() -> Iterator[Case]:
    for width, dtypes in itertools.product((4096, 12288), DTYPES[::3]):
        inputs = partial(_rows_and_vectors, width, 1, 0, dtypes)
        yield Case("dropout", f"drop {width} {dtype_names(*dtypes)}", width, inputs, _dropped, keeps_inputs=False)


def cases() -> Iterator[Case]:
    kinds = (
        *(_norms, _optimizer_cases, _cross_entropies, _activations, _rotations, _dropouts, _quantizations),
        *(expert_cases, _compressions, recurrent_cases, tile_cases),
    )
    return itertools.chain.from_iterable(kind() for kind in kinds)
