"""Pipelines to test: every schedule with the sizes that it supports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from megalite.config.parallel import SHAPES
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import SCHEDULES, Action, forward_only, orders_of
from megalite.pipeline.stages import Stages

CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved-1f1b": (1, 2, 3, 4), "zb-h1": (1,), "zb-v": (2,)}
REDUCTIONS = (
    None,
    Reductions(),
    Reductions(per_micro_batch=True),
    *(Reductions(overlap=overlap, align_ranks=True) for overlap in (False, True)),
    Reductions(overlap=True),
)


@dataclass(frozen=True)
class Pipeline:
    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    group: int | None = None
    backward: bool = True

    @property
    def stages(self) -> Stages:
        return Stages(self.ranks, self.chunks, SHAPES[self.schedule].v_shaped)

    def orders(self) -> list[list[Action]]:
        schedule = SCHEDULES[self.schedule] if self.backward else forward_only
        return orders_of(schedule, self.stages, self.micro_batches, self.group)

    def lists(self, reductions: Reductions | None = None) -> list[list[Action]]:
        return lower(self.stages, self.orders(), reductions)


def every_pipeline(schedule: str, most_micro_batches: int = 32) -> Iterator[Pipeline]:
    """Yield pipelines of up to 8 ranks, 4 chunks and `most_micro_batches` micro-batches."""
    for ranks in range(1, 9):
        for chunks in CHUNKS[schedule]:
            for micro_batches in range(1, most_micro_batches + 1):
                yield Pipeline(schedule, ranks, chunks, micro_batches)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    schedule = draw(st.sampled_from(sorted(CHUNKS)))
    ranks = draw(st.integers(1, 8))
    chunks = draw(st.sampled_from(CHUNKS[schedule]))
    group = draw(st.none() | st.integers(ranks, 3 * ranks))
    return Pipeline(schedule, ranks, chunks, draw(st.integers(1, 32)), group, draw(st.booleans()))
