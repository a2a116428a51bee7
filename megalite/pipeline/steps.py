"""The lists of a run: every step's, for any number of micro-batches, lowered and proved before it is first run."""

from __future__ import annotations

import functools

from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import FORWARD_ONLY, SCHEDULES, Action
from megalite.pipeline.stages import Stages


class Steps:
    """What the rank of a pipeline does in a step of training and of evaluation."""

    def __init__(
        self,
        stages: Stages | None = None,
        rank: int = 0,
        *,
        schedule: str = "1f1b",
        group: int | None = None,
        reductions: Reductions | None = None,
        overlap: bool = True,
    ) -> None:
        """`schedule`: a name in SCHEDULES; `group`: see there. `overlap`: messages travel beside computations."""
        self.stages, self.rank = stages if stages is not None else Stages(), rank
        self.schedule_name, self.schedule, self.group = schedule, SCHEDULES[schedule], group
        self.reductions, self.overlap = reductions if reductions is not None else Reductions(), overlap

    @functools.cache  # noqa: B019  (it lives as long as the run)
    def training(self, micro_batches: int) -> list[Action]:
        """This rank's list. Raises ScheduleError for a step that is not right, which is a defect."""
        orders = self.schedule.orders(self.stages, micro_batches, self.group)
        return lower(self.stages, orders, self.reductions, overlap=self.overlap)[self.rank]

    @functools.cache  # noqa: B019
    def evaluation(self, micro_batches: int) -> list[Action]:
        """This rank's list for forward alone."""
        orders = FORWARD_ONLY.orders(self.stages, micro_batches, self.group)
        return lower(self.stages, orders, overlap=self.overlap)[self.rank]
