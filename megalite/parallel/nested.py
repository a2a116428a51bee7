"""Nested values with tensors in them, such as a batch that a collate function has made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return `values` with `function` applied to each tensor in mappings, tuples, lists and dataclasses."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, Mapping):
        return {name: map_tensors(function, value) for name, value in values.items()}
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(map_tensors(function, value) for value in values))
    if isinstance(values, tuple | list):
        return type(values)(map_tensors(function, value) for value in values)
    if is_dataclass(values) and not isinstance(values, type):
        return replace(
            values, **{each.name: map_tensors(function, getattr(values, each.name)) for each in fields(values)}
        )
    return values


def in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Return nested values whose floating-point tensors have the dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)
