"""Detection of NaN and infinity in weights: such a model computes nothing useful, and no other check would notice."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from megalite.checkpoint.source import Kind, Source
from megalite.parallel.sharding import Box

_NAMED = 8


class Watched:
    """Source that remembers which of its tensors had NaN or infinities (a `Source`)."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: set[str] = set()
        self.tensors: Mapping[str, Kind] = source.tensors

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Fill `values`, as in `Source`."""
        self._source.fill(name, box, values)
        if values.numel() and not all(math.isfinite(end.item()) for end in values.aminmax()):
            self._found.add(name)

    def note(self) -> str | None:
        """Return a note on all that was read; None if there is nothing to say."""
        if not self._found:
            return None
        names = sorted(self._found)
        more = ", ..." if len(names) > _NAMED else ""
        return (
            f"WARNING: {len(names):,} of {len(self.tensors):,} tensors hold NaN or infinities: "
            f"{', '.join(names[:_NAMED])}{more}"
        )
