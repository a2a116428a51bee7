"""The lists of a run: every step's, for any number of micro-batches, lowered and proved before it is first run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.pipeline.checker import Collective, check
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import FORWARD_ONLY, SCHEDULES, Action, Kind, Schedule
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
        copies: int = 1,
        inside: Mapping[Kind, Sequence[str]] | None = None,
        behind: Sequence[Sequence[Collective]] = (),
    ) -> None:
        """`schedule`: a name in SCHEDULES; `group`: see there. `overlap`: messages travel beside computations.

        What else the step communicates, for the proof: `copies` of the pipeline, data-parallel, do together what is
        `inside` actions; the pipeline's ranks what is `behind` the list of each (see `check`).
        """
        self.stages, self.rank = stages if stages is not None else Stages(), rank
        self._schedule, self._group, self._overlap = SCHEDULES[schedule], group, overlap
        self._reductions = reductions if reductions is not None else Reductions()
        self._copies, self._inside, self._behind = min(copies, 2), inside, behind  # two stand for any number
        self._training: dict[int, list[Action]] = {}
        self._evaluation: dict[int, list[Action]] = {}

    def training(self, micro_batches: int) -> list[Action]:
        """This rank's list. Raises ScheduleError for a step that is not right, which is a defect."""
        if micro_batches not in self._training:
            lists = self._lower(self._schedule, micro_batches, self._reductions)
            check(self.stages, lists, micro_batches, self._reductions, behind=self._behind)
            if self._copies > 1:
                every = lists * self._copies
                check(self.stages, every, micro_batches, self._reductions, inside=self._inside)
            self._training[micro_batches] = lists[self.rank]
        return self._training[micro_batches]

    def evaluation(self, micro_batches: int) -> list[Action]:
        """This rank's list for forward alone."""
        if micro_batches not in self._evaluation:
            lists = self._lower(FORWARD_ONLY, micro_batches, None)
            check(self.stages, lists * self._copies, micro_batches, backward=False, inside=self._inside)
            self._evaluation[micro_batches] = lists[self.rank]
        return self._evaluation[micro_batches]

    def _lower(self, schedule: Schedule, micro_batches: int, reductions: Reductions | None) -> list[list[Action]]:
        orders = schedule.orders(self.stages, micro_batches, self._group)
        return lower(self.stages, orders, reductions, overlap=self._overlap)
