"""Numbers drawn from a key: functions of it and of an index, the same on every rank and device."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND, _STEP = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


def mixed(indices: Tensor, key: int) -> Tensor:
    """Return 63 random bits for each index, in int64: SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits = (indices + 1) * _signed(_STEP) + _signed(mixed_key(key))
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    return _shifted(bits ^ _shifted(bits, 31), 1)


def mixed_key(key: int) -> int:
    """Return 64 random bits for one number of any size."""
    bits = key + _STEP & 2**64 - 1
    bits = (bits ^ bits >> 30) * _FIRST & 2**64 - 1
    bits = (bits ^ bits >> 27) * _SECOND & 2**64 - 1
    return bits ^ bits >> 31


def positions(length: int, count: int, key: int, device: torch.device) -> Tensor:
    """Draw `count` different positions below `length`, in int64 and ascending, one from each of equal strata."""
    bounds = torch.arange(count + 1, device=device) * length // count
    return bounds[:-1] + mixed(torch.arange(count, device=device), key) % bounds.diff()


def _shifted(bits: Tensor, by: int) -> Tensor:
    return bits >> by & (1 << 64 - by) - 1  # what int64 fills up with its sign is zero


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
