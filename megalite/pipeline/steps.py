"""The lists of a run: every step's, for any number of micro-batches, proved before any is run."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

from megalite.parallel.collectives import all_gather_text
from megalite.parallel.inside import Inside
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.checker import Collective, check
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import FORWARD_ONLY, SCHEDULES, Action, Kind
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages

_MOST_NAMED = 8
"""Ranks in an error."""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Lists and proofs are a million objects without circles: looking for those would take as long as the proof."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Step(NamedTuple):
    micro_batches: int
    backward: bool

    def __str__(self) -> str:
        return f"{'step' if self.backward else 'evaluation'} of {self.micro_batches} micro-batches"


class Steps:
    """The lists of a pipeline's rank for steps of training and of evaluation."""

    def __init__(
        self,
        stages: Stages | None = None,
        rank: int = 0,
        *,
        schedule: str = "1f1b",
        group: int | None = None,
        reductions: Reductions | None = None,
        overlap: bool = True,
        inside: Mapping[Kind, Sequence[Inside]] | None = None,
        behind: Sequence[Sequence[Collective]] = (),
    ) -> None:
        """`schedule`: a name in SCHEDULES; `group`: see there. `overlap`: messages travel beside computations.

        What else the step communicates, for the proof: copies of the pipeline do together what is `inside` actions of
        a kind, in order; the pipeline's ranks what is `behind` the list of each (see `check`).
        """
        self.stages, self.rank = stages if stages is not None else Stages(), rank
        self._schedule, self._group, self._overlap = SCHEDULES[schedule], group, overlap
        self._reductions = reductions if reductions is not None else Reductions()
        self._inside, self._behind = inside if inside is not None else {}, behind
        self._proved: dict[_Step, str] = {}
        """The digest of this rank's list."""
        self._lists: dict[_Step, list[Action]] = {}

    def training(self, micro_batches: int) -> list[Action]:
        """This rank's list. Raises ScheduleError where it has not been proved, which is a defect."""
        return self._list(_Step(micro_batches, backward=True))

    def evaluation(self, micro_batches: int) -> list[Action]:
        """This rank's list for forward alone. Raises ScheduleError where it has not been proved."""
        return self._list(_Step(micro_batches, backward=False))

    def prove(
        self, training: Collection[int] = (), evaluation: Collection[int] = (), mesh: ParallelMesh | None = None
    ) -> Steps:
        """Prove steps of these numbers of micro-batches; returns itself.

        All ranks of `mesh` call it together: those of a pipeline share the steps out, and tell each other the digests
        of the lists that they have proved. Without, this rank proves all of them.

        Raises ScheduleError for a step that is not right, on all ranks of the pipeline, and where ranks that hold the
        same stages do not find the same, on all ranks; either is a defect.
        """
        steps = sorted({_Step(number, True) for number in training} | {_Step(number, False) for number in evaluation})
        steps.sort(key=lambda step: step.micro_batches * (3 if step.backward else 1), reverse=True)
        # The last rank begins: the first has a screen to write to, too.
        mine = steps if mesh is None else steps[self.stages.ranks - 1 - self.rank :: self.stages.ranks]
        found: dict[str, object] = {}
        try:
            found["digests"] = [(*step, self._digests(step)) for step in mine]
        except ScheduleError as error:
            found["error"] = str(error)
        text = json.dumps(found)
        texts = [text] if mesh is None else all_gather_text(text, mesh.group("pp"), mesh.device)
        for told in map(json.loads, texts):
            if "error" in told:
                raise ScheduleError(told["error"])
            for micro_batches, backward, digests in told["digests"]:
                self._proved[_Step(micro_batches, backward)] = digests[self.rank]
        if mesh is not None:
            self._compare_copies([self._proved.get(step) for step in steps], mesh)
        return self

    @_without_garbage_collection()
    def _digests(self, step: _Step) -> list[str]:
        """Prove the lists of a step, and give their digests."""
        lists = self._lowered(step, range(self.stages.ranks))
        reductions = self._reductions if step.backward else None
        behind = self._behind if step.backward else ()
        check(self.stages, lists, step.micro_batches, reductions, backward=step.backward, behind=behind)
        return [_digest(actions) for actions in lists]

    @_without_garbage_collection()
    def _list(self, step: _Step) -> list[Action]:
        if step not in self._lists:
            if step not in self._proved:
                raise ScheduleError(f"no {step} was proved before the first step")
            (own,) = self._lowered(step, [self.rank])
            if _digest(own) != self._proved[step]:
                raise ScheduleError(
                    f"rank {self.rank} of the pipeline: its list of the {step} is not the one that was proved. Do all "
                    "ranks run the same megalite?"
                )
            self._lists[step] = own
        return self._lists[step]

    def _lowered(self, step: _Step, ranks: Sequence[int]) -> list[list[Action]]:
        schedule = self._schedule if step.backward else FORWARD_ONLY
        orders = schedule.orders(self.stages, step.micro_batches, self._group)
        reductions = self._reductions if step.backward else None
        return lower(self.stages, orders, reductions, overlap=self._overlap, ranks=ranks)

    def _compare_copies(self, digests: Sequence[str | None], mesh: ParallelMesh) -> None:
        """Tell whose list, or what is done inside it, is another than on most ranks that hold the same stages."""
        own = f"{self.rank} {_hashed([*digests, self._inside])}"
        texts = all_gather_text(own, mesh.world(), mesh.device)
        most: dict[str, str] = {}
        for text, _ in Counter(texts).most_common():
            most.setdefault(text.split()[0], text)
        others = [rank for rank, text in enumerate(texts) if text != most[text.split()[0]]]
        if others:
            more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
            raise ScheduleError(
                f"rank {', '.join(map(str, others[:_MOST_NAMED]))}{more}: the steps, or what is done together inside "
                "them, are not those of the other ranks with the same stages. Do all ranks run the same megalite?"
            )


def _digest(actions: Sequence[Action]) -> str:
    return _hashed(list(zip(*actions, strict=True)))


def _hashed(value: object) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
