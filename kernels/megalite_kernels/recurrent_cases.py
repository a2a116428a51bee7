"""Operations of recurrent layers at the shapes used in training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalite_kernels.case import Case, dtype_names
from megalite_kernels.chunks import Segment
from megalite_kernels.convolution import short_convolution
from megalite_kernels.recurrence import recurrence


def _first_tokens(tokens: int, device: str) -> Tensor:
    """Return the first token of each token's document, of documents of a third of the sample."""
    third = max(tokens // 3, 1)
    return (torch.arange(tokens, device=device) // third * third).unsqueeze(0)


def _convolution_inputs(channels: int, dtype: torch.dtype, bias: bool, tokens: int, device: str) -> list[Tensor]:
    """Make what a layer convolves, as a part of a wider projection, the weight and perhaps the bias."""
    projected = torch.randn(tokens, 1, 2 * channels, dtype=dtype, device=device)
    shapes = [(channels, 4), (channels,)][: 1 + bias]
    own = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    return [each.requires_grad_() for each in (projected[..., :channels], *own)]


def _convolve(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool, documents: bool) -> Tensor:
    first = _first_tokens(len(input), str(input.device)) if documents else None
    return short_convolution(input, weight, bias, [Segment(range(len(input)), first)], silu=silu)


def _convolutions() -> Iterator[Case]:
    """Yield those of Qwen3-Next, Nemotron-H and LFM2."""
    for channels, dtype, bias, silu, documents in (
        (8192, torch.bfloat16, False, True, True),
        (10240, torch.bfloat16, True, True, False),
        (2048, torch.float32, False, False, True),
    ):
        name = f"short_convolution {channels} {dtype_names(dtype)}{' with documents' * documents}"
        inputs = partial(_convolution_inputs, channels, dtype, bias)
        yield Case("short_convolution", name, channels, inputs, partial(_convolve, silu=silu, documents=documents))


class _Heads(NamedTuple):
    """Sizes of a recurrence."""

    key_heads: int
    heads: int
    key_width: int
    width: int
    chunk: int
    delta: bool

    def make_inputs(self, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
        """Make query, key of length 1, value, decay and step."""
        query, key = torch.randn(2, tokens, 1, self.key_heads, self.key_width, device=device)
        value = torch.randn(tokens, 1, 2 * self.heads, self.width, dtype=dtype, device=device)[:, :, : self.heads]
        step, decay = torch.rand(2, tokens, 1, self.heads, device=device)
        key = key / key.norm(dim=-1, keepdim=True)
        found = query.to(dtype), key.to(dtype), value, decay * -0.1, step
        return [each.requires_grad_() for each in found]

    def run(self, *inputs: Tensor, documents: bool) -> tuple[Tensor, Tensor]:
        """Return the output, and the last state."""
        tokens = len(inputs[0])
        first = _first_tokens(tokens, str(inputs[0].device)) if documents else None
        segments = [Segment(range(tokens), first)]
        return recurrence(*inputs, delta=self.delta, chunk=self.chunk, segments=segments)


def _recurrences() -> Iterator[Case]:
    """Yield those of Qwen3-Next and of Nemotron-H. A head's decays and steps are single numbers that stand apart."""
    for kind, sizes, documents in (
        ("delta rule", _Heads(16, 32, 128, 128, 64, True), True),
        ("additive", _Heads(8, 128, 128, 64, 128, False), False),
    ):
        sized = f"{sizes.heads} of {sizes.key_width}x{sizes.width}"
        name = f"recurrence {kind} {sized} {dtype_names(torch.bfloat16)}{' with documents' * documents}"
        inputs, run = partial(sizes.make_inputs, torch.bfloat16), partial(sizes.run, documents=documents)
        width = sizes.heads * sizes.width
        yield Case("recurrence", name, width, inputs, run, tolerance=4e-3, indexed=True)


def recurrent_cases() -> Iterator[Case]:
    return itertools.chain(_convolutions(), _recurrences())
