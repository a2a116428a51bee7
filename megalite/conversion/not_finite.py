"""Telling of weights that are no numbers: a model that has them computes nothing, and nothing else would say so."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from megalite.checkpoint.source import Kind, Source
from megalite.parallel.sharding import Box

_NAMED = 8


class Watched:
    """A source that remembers in which of its tensors it found NaN or infinities (a `Source`)."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: set[str] = set()
        self.tensors: Mapping[str, Kind] = source.tensors

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """As in `Source`."""
        self._source.fill(name, box, values)
        if values.numel() and not all(math.isfinite(end.item()) for end in values.aminmax()):
            self._found.add(name)

    def note(self) -> str | None:
        """What to tell of all that was read; None where there is nothing to tell."""
        if not self._found:
            return None
        names = sorted(self._found)
        more = ", ..." if len(names) > _NAMED else ""
        return (
            f"WARNING: {len(names):,} of {len(self.tensors):,} tensors hold NaN or infinities: "
            f"{', '.join(names[:_NAMED])}{more}"
        )
