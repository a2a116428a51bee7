"""Short causal convolution of each channel over the tokens of its document, with SiLU after it or without.

output_t = silu(bias + sum over back of weight[taps - 1 - back] * input_(t - back)), where a token of an earlier
document counts as zero. Sums are in fp32 or wider, over the taps in order from the token itself, so that the bits of
the output do not depend on where a sample is cut. Backward keeps the input, and computes what SiLU was given again.
Both go through the tokens in blocks that a processor's cache can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite_kernels.chunks import Segment
from megalite_kernels.implementation import current
from megalite_kernels.launch import chunk_elements


def short_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Sequence[Segment] | None = None,
    halos: Sequence[Tensor] | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """Compute the convolution over the tokens of all segments, which stand one after another.

    Args:
        input: [tokens, batch, channels].
        weight: [channels, taps]. The last tap is that of the token itself.
        bias: [channels].
        segments: the tokens' places in the samples; None for the indices 0, 1, 2, ... of samples of one document.
        halos: for each segment, the taps - 1 tokens before it, [taps - 1, batch, channels], with zeros before the
            sample; None for zeros.
        silu: take SiLU of the sum.

    Returns:
        [tokens, batch, channels], in the dtype of the input.
    """
    segments = [Segment(range(len(input)), None)] if segments is None else segments
    if halos is None:
        halos = [input.new_zeros(weight.shape[1] - 1, *input.shape[1:])] * len(segments)
    forms: tuple[Callable[..., Tensor], Callable[..., Any]] = _forward_reference, _backward_reference
    if current().runs_triton("short_convolution", input, weight, bias, *halos):
        from megalite_kernels.convolution_kernels import launch_convolution, launch_convolution_backward

        forms = launch_convolution, launch_convolution_backward
    output: Tensor = _Convolution.apply(forms, input, weight, bias, segments, silu, *halos)
    return output


def convolution_step(
    input: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute the convolution for one token. The document's earlier tokens are in the tail.

    Args:
        input: [1, batch, channels].
        weight, bias, silu: as in `short_convolution`.
        tail: the taps - 1 tokens before it, [taps - 1, batch, channels], with zeros before the document.

    Returns:
        The output [1, batch, channels], and the new tail.
    """
    rows = torch.cat([tail, input])
    wide = torch.promote_types(input.dtype, torch.float32)
    total = _Block(slice(0, 1), rows.to(wide), None).sum(*_wide(wide, weight, bias))
    return (_silu_(total) if silu else total).to(input.dtype), rows[1:]


class _Block(NamedTuple):
    """Some consecutive tokens of a segment.

    Attributes:
        tokens: their places among the tokens of the segment.
        rows: inputs of these tokens and of the taps - 1 before them, [taps - 1 + tokens, batch, channels], wide.
        age: for each token, how many tokens of its document come before it, [tokens, batch, 1]; None: enough.
    """

    tokens: slice
    rows: Tensor
    age: Tensor | None

    def before(self, back: int, taps: int) -> Tensor:
        """Return for each token the input of the token that is so many tokens before it."""
        rows = self.rows[taps - 1 - back : len(self.rows) - back]
        return self.seen(rows, back)

    def seen(self, rows: Tensor, back: int) -> Tensor:
        """Return rows of these tokens, with zeros for a token whose document has none so many tokens before it."""
        return rows if self.age is None or not back else rows * (self.age >= back)

    def sum(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum of all taps, [tokens, batch, channels]. `weight` is [taps, channels]."""
        taps = len(weight)
        total = self.before(0, taps) * weight[-1]
        if bias is not None:
            total += bias
        for back in range(1, taps):
            total.addcmul_(self.before(back, taps), weight[-1 - back])
        return total

    def add_gradients(self, gradient: Tensor, weight: Tensor, grad_rows: Tensor, grad_weight: Tensor) -> None:
        """Add to the gradients of the segment's rows, as they are in `rows`, and of the weight, those of these tokens.

        Args:
            gradient: of the sum of all taps.
            weight, grad_weight: [taps, channels].
        """
        taps = len(weight)
        for back in range(taps):
            seen = self.seen(gradient, back)
            shift = taps - 1 - back
            grad_rows[self.tokens.start + shift : self.tokens.stop + shift].addcmul_(seen, weight[-1 - back])
            grad_weight[-1 - back] += (seen * self.rows[shift : shift + len(seen)]).sum(dim=(0, 1))


def _wide(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weights as [taps, channels] and the bias, in this dtype."""
    return weight.t().to(dtype).contiguous(), None if bias is None else bias.to(dtype)


def _silu_(input: Tensor) -> Tensor:
    """Compute SiLU in place. The bits of torch's own depend on an element's place in the tensor."""
    return input.div_(input.neg().exp_().add_(1))


def _blocks(input: Tensor, halo: Tensor, segment: Segment, dtype: torch.dtype) -> Iterator[_Block]:
    """Go through the tokens of a segment in blocks."""
    size = max(1, chunk_elements(input.device) // (input.shape[1] * input.shape[2]))
    for start in range(0, len(input), size):
        stop = min(start + size, len(input))
        rows = input[max(start - len(halo), 0) : stop]
        if start < len(halo):
            rows = torch.cat([halo[start:], rows])
        age = None
        if segment.first is not None:
            own = torch.arange(segment.tokens.start + start, segment.tokens.start + stop, device=input.device)
            age = (own - segment.first[:, start:stop]).t().unsqueeze(2)
        yield _Block(slice(start, stop), rows.to(dtype), age)


def _slope(input: Tensor) -> Tensor:
    """Return the derivative of SiLU."""
    share = input.sigmoid()
    return share * (1 + input * (1 - share))


def _forward_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Sequence[Segment],
    halos: Sequence[Tensor],
    silu: bool,
) -> Tensor:
    """Compute the outputs of all segments, block by block."""
    wide = torch.promote_types(input.dtype, torch.float32)
    factors = _wide(wide, weight, bias)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    for segment, halo, own, target in zip(segments, halos, *_by_segment(segments, input, output), strict=True):
        for block in _blocks(own, halo, segment, wide):
            total = block.sum(*factors)
            target[block.tokens] = _silu_(total) if silu else total
    return output


def _backward_reference(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Sequence[Segment],
    halos: Sequence[Tensor],
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Add up the gradients block by block, after the sums of the taps are computed again.

    Returns:
        The gradients of the input, the weight, the bias and the halos.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    factors = _wide(wide, weight, bias)
    grad_weight, grad_bias = torch.zeros_like(factors[0]), factors[0].new_zeros(len(weight))
    of_halos, of_inputs = [], []
    for segment, halo, own, incoming in zip(segments, halos, *_by_segment(segments, input, grad_output), strict=True):
        grad_rows = own.new_zeros(len(halo) + len(own), *own.shape[1:], dtype=wide)
        for block in _blocks(own, halo, segment, wide):
            gradient = incoming[block.tokens].to(wide)
            if silu:
                gradient = gradient * _slope(block.sum(*factors))
            block.add_gradients(gradient, factors[0], grad_rows, grad_weight)
            grad_bias += gradient.sum(dim=(0, 1))
        of_halo, of_input = grad_rows.to(input.dtype).split([len(halo), len(own)])
        of_halos.append(of_halo)
        of_inputs.append(of_input)
    of_bias = None if bias is None else grad_bias.to(bias.dtype)
    return torch.cat(of_inputs), grad_weight.t().to(weight.dtype), of_bias, of_halos


class _Convolution(torch.autograd.Function):
    """Convolution that saves only its inputs. `forms`: forward and backward, the references or launchers of kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        forms: tuple[Callable[..., Tensor], Callable[..., Any]],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        segments: Sequence[Segment],
        silu: bool,
        *halos: Tensor,
    ) -> Tensor:
        """Compute the outputs of all segments."""
        ctx.save_for_backward(input, weight, bias, *halos)
        ctx.segments, ctx.silu, (compute, ctx.go_back) = segments, silu, forms
        return compute(input, weight, bias, segments, halos, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, *halos = ctx.saved_tensors
        *grads, of_halos = ctx.go_back(grad_output, input, weight, bias, ctx.segments, halos, ctx.silu)
        return None, *grads, None, None, *of_halos


def _by_segment(segments: Sequence[Segment], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut tensors of all tokens into those of each segment."""
    return [tensor.split([len(tokens) for tokens, _ in segments]) for tensor in tensors]
