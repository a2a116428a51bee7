"""Handwritten digits of 8 x 8 pixels, which scikit-learn ships: 1,540 to train on, and 257 others."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from None


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to train on and the others, as pairs of an image [1, 8, 8] and its number."""
    found = load_digits()
    images, numbers = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    others = torch.arange(len(numbers)) % 7 == 0
    return TensorDataset(images[~others], numbers[~others]), TensorDataset(images[others], numbers[others])
