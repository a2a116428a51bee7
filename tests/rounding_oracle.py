"""Products of rounded operands, for the oracle: codes from tables of all of them, found by search, in float64.

It imports nothing of megalite. A recipe's rule is written down in `ROUNDERS`; docs/fp8_tables.md has it in words.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from tests.oracle import Oracle

ROUNDED = re.compile(
    r"layers\.(\d+)\.(attention\.(query|gate|key_value|output)|(mlp|moe\.shared)\.(up|gate_up|down)"
    r"|moe\.(latent_up|latent_down|up|gate_up|down)|short_convolution\.(B|C|x|output))"
)
TOGETHER = (("query", "gate", "key_value"), ("B", "C", "x"))
"""Last parts of the names of weights of which each layer multiplies its input with all as one matrix."""


@functools.cache
def table(exponents: int, mantissa: int, left_out: int) -> Tensor:
    """All numbers from zero on of a format without infinities, in the order of their codes; the last ones are left
    out."""
    bias = 2 ** (exponents - 1) - 1
    found = []
    for code in range(2 ** (exponents + mantissa) - left_out):
        exponent, fraction = divmod(code, 2**mantissa)
        share = fraction / 2**mantissa
        found.append(2.0 ** (1 - bias) * share if exponent == 0 else 2.0 ** (exponent - bias) * (1 + share))
    return torch.tensor(found, dtype=torch.float64)


FORMATS = {"e4m3": (4, 3, 1), "e5m2": (5, 2, 4), "e2m1": (2, 1, 0)}


def nearest(values: Tensor, format: str) -> Tensor:
    """The closest number of a format, of two that are as close the one with the even code."""
    numbers = table(*FORMATS[format])
    size = values.double().abs().clamp(max=float(numbers[-1])).contiguous()
    above = torch.searchsorted(numbers, size).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - size, size - numbers[below]
    chosen = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return numbers[chosen] * torch.where(values < 0, -1.0, 1.0)


def tensorwise(values: Tensor, format: str) -> Tensor:
    """One scale for all values, [tokens, channels]."""
    most = values.float().abs().max()
    factor = torch.tensor(float(table(*FORMATS[format])[-1])) / most
    return nearest(values.float() * factor, format) * (1 / factor).double()


def blockwise(values: Tensor, format: str) -> Tensor:
    """A power of two for 128 channels of a token: the largest with which none exceeds the largest code."""
    parts = []
    for part in values.float().split(128, dim=-1):
        most = part.abs().amax(-1, keepdim=True)
        quotient = torch.tensor(float(table(*FORMATS[format])[-1])) / most
        factor = torch.where(most > 0, 2.0 ** quotient.double().log2().floor(), 1.0)
        parts.append(nearest(part.double() * factor, format) / factor)
    return torch.cat(parts, dim=-1)


def squares(values: Tensor, format: str) -> Tensor:
    """A power of two for each square of 128 x 128."""
    rows = []
    for row in values.float().split(128):
        parts = []
        for part in row.split(128, dim=1):
            most = part.abs().max()
            quotient = torch.tensor(float(table(*FORMATS[format])[-1])) / most
            factor = 2.0 ** math.floor(math.log2(float(quotient))) if most > 0 else 1.0
            parts.append(nearest(part.double() * factor, format) / factor)
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


def mxfp8(values: Tensor, format: str) -> Tensor:
    """A power of two for 32 channels of a token: that of the largest one over 2^8, that of the largest code."""
    parts = []
    for part in values.float().double().split(32, dim=-1):
        most = part.abs().amax(-1, keepdim=True)
        scale = 2.0 ** (most.log2().floor() - 8).clamp(min=-127)
        parts.append(nearest(part / scale, format) * scale)
    return torch.cat(parts, dim=-1)


def nvfp4(values: Tensor, format: str) -> Tensor:
    """An fp32 number for each row, and an e4m3 number for 16 channels of it."""
    narrow, six = values.float(), torch.tensor(6.0)
    outer = (narrow.abs().amax(-1, keepdim=True) / torch.tensor(6.0 * 448.0)).clamp(min=2.0**-120)
    parts = []
    for part in narrow.split(16, dim=-1):
        wanted = part.abs().amax(-1, keepdim=True) / six / outer
        scale = nearest(wanted.clamp(2.0**-6, 448.0), "e4m3").float()
        parts.append(nearest(part * (1 / outer / scale), format) * scale.double() * outer.double())
    return torch.cat(parts, dim=-1)


Rounder = Callable[[Tensor, str], Tensor]
Activation = Callable[[Tensor], Tensor]
ROUNDERS: dict[str, tuple[Rounder, Rounder]] = {
    "tensorwise": (tensorwise, tensorwise),
    "blockwise": (blockwise, squares),
    "mxfp8": (mxfp8, mxfp8),
    "nvfp4": (nvfp4, nvfp4),
}
"""Functions of each recipe that round rows of tokens along channels, and weights."""


@dataclass(frozen=True)
class Rule:
    """Products that are rounded, and the recipe.

    Attributes:
        recipe: a name in `ROUNDERS`.
        hybrid: True if gradients are e5m2.
        weight_gradients: True if operands of weight gradients are rounded, too, along the tokens of a sample.
        plain_layers: layers whose products are not.
        stores_activations: True if backward has rounded inputs of activations.
    """

    recipe: str
    hybrid: bool = False
    weight_gradients: bool = False
    plain_layers: tuple[int, ...] = ()
    stores_activations: bool = False

    def of_tokens(self, values: Tensor, *, gradient: bool) -> Tensor:
        """Round [samples, tokens, channels] along channels; each sample is a micro-batch."""
        format = "e2m1" if self.recipe == "nvfp4" else "e5m2" if gradient and self.hybrid else "e4m3"
        return torch.stack([ROUNDERS[self.recipe][0](sample, format) for sample in values])

    def of_weight(self, weight: Tensor) -> Tensor:
        return ROUNDERS[self.recipe][1](weight, "e2m1" if self.recipe == "nvfp4" else "e4m3")

    def rounds(self, name: str) -> bool:
        """Tell whether the product with a weight is rounded."""
        found = ROUNDED.fullmatch(name)
        if self.recipe == "tensorwise" and name.rpartition(".")[0].endswith(".moe") and "latent" not in name:
            return False
        return found is not None and int(found[1]) not in self.plain_layers


class _Linear(torch.autograd.Function):
    """A product. `again`: its input as backward computes it again; None: the rounded one is kept."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, again: Tensor | None, rule: Rule) -> Tensor:
        rounded = rule.of_tokens(input, gradient=False)
        if again is not None and rule.weight_gradients:
            again = rule.of_tokens(again, gradient=False)
        ctx.save_for_backward(rounded if again is None else again, weight)
        ctx.rule = rule
        return rounded @ rule.of_weight(weight).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), (gradient,), rule = ctx.saved_tensors, gradients, ctx.rule
        of_input = rule.of_tokens(gradient, gradient=True) @ rule.of_weight(weight.t()).t()
        if rule.weight_gradients:
            # With one scale of a tensor, the rounded input has the same codes again.
            turned = input.mT if rule.recipe == "tensorwise" else rule.of_tokens(input.mT, gradient=False)
            of_weight = torch.einsum("bot,bit->oi", rule.of_tokens(gradient.mT, gradient=True), turned)
            return of_input, of_weight, None, None
        return of_input, torch.einsum("bto,bti->oi", gradient, input), None, None


class _Activated(torch.autograd.Function):
    """An activation of `[batch, tokens, ...]`, whose gradient is that at the rounded input; also computed there."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, activation: Activation, rule: Rule) -> tuple[Tensor, Tensor]:
        rounded = rule.of_tokens(input.flatten(2), gradient=False).view_as(input)
        ctx.save_for_backward(rounded)
        ctx.activation = activation
        again = activation(rounded)
        ctx.mark_non_differentiable(again)
        return activation(input), again

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rounded,) = ctx.saved_tensors
        with torch.enable_grad():
            output = ctx.activation(rounded.requires_grad_())
        return torch.autograd.grad(output, rounded, gradients[0])[0], None, None


class _Weighted(torch.autograd.Function):
    """A share of an expert's activation, with the gradient of the share from the one that is computed again."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, activated: Tensor, again: Tensor) -> Tensor:
        ctx.save_for_backward(share, again)
        return share * activated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (share, again), (gradient,) = ctx.saved_tensors, gradients
        return (gradient * again).sum_to_size(share.shape), gradient * share, None


class RoundedLinears(TorchFunctionMode):
    """Products with named weights, as one for weights that are multiplied together; those of experts one by one."""

    def __init__(self, weights: Mapping[str, Tensor], rule: Rule) -> None:
        """Watch for products with these weights."""
        super().__init__()
        self._rule, self._made = rule, dict[int, Tensor]()
        self._again: dict[int, tuple[Tensor, Tensor]] = {}
        """Pairs of an activation and of what backward computes, by the address of the activation."""
        self._behind_activations: set[int] = set()
        """Addresses of matrices of experts, whose activations backward always computes again."""
        self._is_rounded = False
        """True if the last product was."""
        activate = Oracle.activate
        self._patch = mock.patch.object(
            Oracle, "activate", lambda oracle, up: self._activated(up, functools.partial(activate, oracle))
        )
        self._together: dict[int, list[Tensor]] = {}
        """Matrices that are multiplied together, by the address of each."""
        rounded = [name for name in weights if rule.rounds(name)]
        for name in rounded:
            begin, _, last = name.rpartition(".")
            if begin.endswith(".moe") and not last.startswith("latent"):
                for expert in weights[name]:
                    self._together[expert.data_ptr()] = [_matrix(last, expert)]
                    if last == "down":
                        self._behind_activations.add(expert.data_ptr())
                continue
            parts = next((those for those in TOGETHER if last in those), (last,))
            names = [each for part in parts if (each := f"{begin}.{part}") in rounded]
            matrices = [_matrix(part.rpartition(".")[2], weights[part]) for part in names]
            self._together[weights[name].data_ptr()] = matrices

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.mul and isinstance(args[1], Tensor) and args[1].data_ptr() in self._again:
            activated, again = self._again[args[1].data_ptr()]
            weighted = _Weighted.apply(args[0], activated, again)
            self._again[weighted.data_ptr()] = weighted, args[0].detach() * again
            return weighted
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        address = args[1].data_ptr()
        self._is_rounded = address in self._together
        if not self._is_rounded:
            return func(*args, **(kwargs or {}))
        if address not in self._made:
            matrices = self._together[address]
            values = args[0].detach() if address in self._behind_activations else None
            _, again = self._again.get(args[0].data_ptr(), (None, values))
            output = _Linear.apply(args[0], torch.cat(matrices), again, self._rule)
            parts = output.split([len(each) for each in matrices], dim=-1)
            self._made |= dict(zip([each.data_ptr() for each in matrices], parts, strict=True))
        output, bias = self._made.pop(address), args[2] if len(args) > 2 else None
        return output if bias is None else output + bias

    def __enter__(self) -> Any:
        """Put activations in the oracle's place, too."""
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Undo it."""
        super().__exit__(*error)
        self._patch.stop()

    def _activated(self, up: Tensor, activation: Activation) -> Tensor:
        """The activation behind the last product."""
        if not (self._rule.stores_activations and self._is_rounded):
            return activation(up)
        with DisableTorchFunction():
            output, again = _Activated.apply(up, activation, self._rule)
        self._again[output.data_ptr()] = output, again
        return output


def _matrix(last: str, weight: Tensor) -> Tensor:
    """Return a weight as a matrix, by the last part of its name."""
    return weight.flatten(1) if last in ("output", "down") else weight.flatten(0, -2)
