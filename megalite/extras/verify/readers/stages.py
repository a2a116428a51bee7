"""Numbers of layers in the whole network, for traces in which each pipeline stage's chunk numbers its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megalite.errors import DataError

MOST_CHUNKS = 100_000
"""Largest number of chunks of all stages."""
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})(?=\.|$)")


def layers_of(names: Iterable[str]) -> int:
    """Return the number of layers that names of modules or parameters of one chunk show."""
    return max((int(match[1]) + 1 for match in map(_LAYER.match, names) if match), default=0)


def layers_before(layers: Mapping[tuple[int, int], int], stages: int) -> dict[tuple[int, int], int]:
    """Return the number of layers before each chunk of each stage, by (stage, chunk).

    A microbatch goes through chunk 0 of all stages, then through chunk 1 of all, and so on. A stage of which nothing is
    known is taken to have as many layers as the longest.

    Args:
        layers: the number of layers of each (stage, chunk) that is there.

    Raises:
        DataError: there are more than `MOST_CHUNKS`.
    """
    chunks = 1 + max((chunk for _, chunk in layers), default=0)
    if stages * chunks > MOST_CHUNKS:
        raise DataError(f"a trace of {stages:,} pipeline stages of {chunks} chunks: at most {MOST_CHUNKS:,} are read")
    known = {stage for stage, _ in layers}
    before, total = {}, 0
    for chunk in range(chunks):
        usual = max((count for (_, each), count in layers.items() if each == chunk), default=0)
        for stage in range(stages):
            before[stage, chunk] = total
            total += layers.get((stage, chunk), 0) if stage in known else usual
    return before


def with_layers_before(name: str, before: int) -> str:
    """Return the name of a layer's module or parameter with the number of the layer in the whole network."""
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + before}", name, count=1)
