"""Time of compressing a bucket of gradients on a GPU, in copies of the bucket."""

from __future__ import annotations

from functools import partial

import torch

from megalite.extras.synchronization.methods import make_compressor
from megalite_kernels.measure import Step, time_interleaved

COPIES = {"int8 pack": 3.0, "int8 restore": 3.0, "threshold pack": 3.0, "threshold restore": 3.0}
"""The most that each may take."""
RATIO, PARTS = 0.01, 8


def compare_with_copy(device: str) -> dict[str, float]:
    """Return for each step how many times as long it takes as one copy of the bucket; packing leaves a residual."""
    length = 2**26 // PARTS if device == "cuda" else 2**14
    values = torch.randn(PARTS, length, device=device)
    target = torch.empty_like(values)
    steps: dict[str, Step] = {"copy": lambda mark: target.copy_(values)}
    for name in ("int8", "fp8", "threshold", "topk"):
        method = make_compressor(name, RATIO)
        pack = method.pack_with_residual if name in ("int8", "fp8") else method.pack
        packed = method.pack(values, 1)
        steps[f"{name} pack"] = _step(partial(pack, values, 1))
        steps[f"{name} restore"] = _step(partial(method.restore, packed, length, values.dtype, 1))
    seconds = dict(zip(steps, time_interleaved(list(steps.values()), values.device), strict=True))
    return {name: parts[0] / seconds["copy"][0] for name, parts in seconds.items() if name != "copy"}


def _step(run: partial[object]) -> Step:
    return lambda mark: run()
