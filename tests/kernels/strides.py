"""Ways in which the elements of an input lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda whole: whole[:, :, :24],  # rows stand apart
    "steps": lambda whole: whole[::2, 1],  # likewise, and begin inside
    "swapped": lambda whole: whole.transpose(0, 1),  # no two dimensions are one
    "columns": lambda whole: whole.transpose(0, 2),  # the elements of a row stand apart
    "one row": lambda whole: whole[:1, :1].expand(4, 3, 40),  # rows that are one
    "one element": lambda whole: whole[:, :, :1].expand(4, 3, 40),  # elements that are one
}
"""Views of a tensor [4, 3, 40]."""
