"""Micro-batches on the device, from the arrays that the loader reads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from megalite.data.loader import MicroBatchArrays
from megalite.model.batch import MicroBatch, first_keys
from megalite.parallel.randomness import RandomKey


def to_micro_batches(
    arrays: Iterable[MicroBatchArrays], seed: int, dtype: torch.dtype, device: torch.device
) -> list[MicroBatch]:
    """Return micro-batches on the device. The loss mask has `dtype` promoted to at least fp32, so that losses are not
    rounded."""

    def moved(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return [
        MicroBatch(
            tokens=moved(fields["tokens"]),
            positions=moved(fields["positions"]),
            first_keys=None if fields["document_ids"] is None else first_keys(moved(fields["document_ids"])),
            labels=moved(fields["labels"]),
            loss_mask=moved(fields["loss_mask"]).to(torch.promote_types(dtype, torch.float32)),
            padding=None if fields["padding"] is None else moved(fields["padding"]),
            replayed=None if fields["replayed"] is None else moved(fields["replayed"]),
            key=RandomKey(seed, tuple(fields["sample_ids"])),
        )
        for fields in arrays
    ]
