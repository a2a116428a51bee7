"""Compressors by the names of `--gradient-compression`."""

from __future__ import annotations

import torch

from megalite.extras.synchronization.blockwise import BFloat16, Blockwise, Float16, Sign
from megalite.extras.synchronization.compressor import Compressor
from megalite.extras.synchronization.count_sketch import CountSketch
from megalite.extras.synchronization.sparse import RandomK, Threshold, TopK


def make_compressor(name: str, ratio: float, dtype: torch.dtype = torch.float32) -> Compressor:
    """Return the compressor of this name for gradients of this dtype.

    Args:
        ratio: share of the elements that sparse methods send, above 0 and at most 1.

    Raises:
        ValueError: there is no such compressor, or no such ratio. powersgd has functions of its own, in `power`.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"a compression ratio of {ratio}: must be above 0 and at most 1")
    found: dict[str, Compressor] = {
        "fp16": Float16(),
        "bf16": BFloat16(),
        "int8": Blockwise(torch.int8),
        "fp8": Blockwise(torch.float8_e4m3fn),
        "signsgd": Sign(),
        "onebit-adam": Sign(),  # of the momentum
        "topk": TopK(ratio, dtype),
        "threshold": Threshold(ratio, dtype),
        "dgc": Threshold(ratio, dtype),  # of the corrected momentum
        "randomk": RandomK(ratio, dtype),
        "count-sketch": CountSketch(ratio, dtype),
    }
    if name not in found:
        raise ValueError(f"no compressor is named {name!r}; choose one of {', '.join(found)}")
    return found[name]
