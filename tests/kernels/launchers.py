"""What `make compile-kernels` compiles: each operation, forward and backward, at the shapes that models train with.

An operation joins by a function here that runs it on empty tensors of the meta device, and its lines in `launchers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.norm import layer_norm, rms_norm

HIDDEN = (2048, 4096, 5120, 8192, 16384)
HEAD = 128
# of the activations and of the weights; a weight around one is fp32 beside every activation
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def norm(width: int, dtypes: tuple[torch.dtype, torch.dtype], bias: bool, tokens: int) -> None:
    input = empty(tokens, width, dtype=dtypes[0])
    vectors = [empty(width, dtype=dtypes[1]) for _ in range(1 + bias)]
    output = layer_norm(input, *vectors, 1e-5) if bias else rms_norm(input, *vectors, 1e-5)
    output.backward(torch.empty_like(output))


def launchers() -> Iterator[tuple[str, Callable[[int], None]]]:
    """A name and shape, and a function of the number of tokens."""
    for bias, name in ((False, "rms_norm"), (True, "layer_norm")):
        for width in (HEAD, *HIDDEN) if not bias else HIDDEN:
            for dtypes in DTYPES:
                label = "/".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
                yield f"{name} {width} {label}", partial(norm, width, dtypes, bias)
