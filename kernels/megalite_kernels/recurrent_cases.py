"""Operations of recurrent layers at the shapes used in training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.case import Case, dtype_names
from megalite_kernels.chunks import Segment
from megalite_kernels.convolution import short_convolution


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


def recurrent_cases() -> Iterator[Case]:
    return _convolutions()
