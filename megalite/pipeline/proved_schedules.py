"""The action lists of a run: those of all steps are proved first, and each rank runs only lists that were proved."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import zip_longest
from typing import NamedTuple

from megalite.parallel.collectives import all_gather_text
from megalite.parallel.inside import Inside
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm
from megalite.pipeline.checker import Collective, check
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import FORWARD_ONLY, SCHEDULES, Action, Kind
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages

_MOST_NAMED = 8
"""Ranks in an error."""
_LONGEST = 2000
"""Characters of an error that travel to other ranks."""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Lists and proofs are a million objects without reference cycles: looking for them takes as long as the proof."""
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


class ProvedSchedules:
    """The lists of a pipeline's rank for steps of training and of evaluation, compared with those that were proved."""

    def __init__(
        self,
        stages: Stages | None = None,
        rank: int = 0,
        *,
        schedule: str = "1f1b",
        group_size: int | None = None,
        reductions: Reductions | None = None,
        overlap: bool = True,
        inside_actions: Mapping[Kind, Sequence[Inside]] | None = None,
        after_list: Sequence[Sequence[Collective]] = (),
        terms: Sequence[LossTerm] = (),
        copied: Sequence[str] = (),
    ) -> None:
        """Take what a step consists of.

        Args:
            schedule: a name in SCHEDULES; for `group_size` see `Schedule.orders`.
            overlap: messages travel during computations.
            inside_actions: collectives inside actions, by kind, in order; data-parallel pipelines run them together.
            after_list: collectives after each rank's list (see `check`).
            terms: of the loss, the same on all ranks.
            copied: text, in order, that must be the same on all ranks with the same stages and the same
                tensor-parallel rank.
        """
        self.stages, self.rank = stages if stages is not None else Stages(), rank
        self._schedule, self._group_size, self._overlap = SCHEDULES[schedule], group_size, overlap
        self._reductions = reductions if reductions is not None else Reductions()
        self._inside_actions, self._after_list = inside_actions if inside_actions is not None else {}, after_list
        self._declared, self._copied = _declared(self.stages, terms), list(copied)
        self._proved: dict[_Step, str] = {}
        """The digest of this rank's list."""
        self._lists: dict[_Step, list[Action]] = {}

    def training(self, micro_batches: int) -> list[Action]:
        """This rank's list. Raises ScheduleError if it has not been proved, which is a defect."""
        return self._list(_Step(micro_batches, backward=True))

    def evaluation(self, micro_batches: int) -> list[Action]:
        """This rank's list for forward alone. Raises ScheduleError if it has not been proved."""
        return self._list(_Step(micro_batches, backward=False))

    def prove(
        self, training: Collection[int] = (), evaluation: Collection[int] = (), mesh: ParallelMesh | None = None
    ) -> ProvedSchedules:
        """Prove steps of these numbers of micro-batches; returns itself.

        All ranks of `mesh` call it together: those of a pipeline share the steps out, and tell each other the digests
        of the lists that they have proved. Without, this rank proves all of them.

        Raises ScheduleError, on all ranks, for a step that is not right or cannot be proved, where ranks declare other
        messages or terms of the loss, and where those that hold the same stages do not find or have the same: all are
        defects.
        """
        steps = sorted({_Step(number, True) for number in training} | {_Step(number, False) for number in evaluation})
        steps.sort(key=lambda step: step.micro_batches * (3 if step.backward else 1), reverse=True)
        # The last rank begins: the first has a screen to write to, too.
        mine = steps if mesh is None else steps[self.stages.ranks - 1 - self.rank :: self.stages.ranks]
        own: list[tuple[int, bool, list[str]]] = []
        failure: Exception | None = None
        try:
            own = [(*step, self._digests(step)) for step in mine]
        except Exception as error:  # whatever it is, the other ranks wait for this one below
            if mesh is None:
                raise
            failure = error
        text = json.dumps(own)
        for told in [text] if mesh is None else all_gather_text(text, mesh.group("pp"), mesh.device):
            for micro_batches, backward, digests in json.loads(told):
                self._proved[_Step(micro_batches, backward)] = digests[self.rank]
        if mesh is not None:
            self._agree([self._proved.get(step) for step in steps], failure, mesh)
        return self

    @_without_garbage_collection()
    def _digests(self, step: _Step) -> list[str]:
        """Prove the lists of a step, and give their digests."""
        lists = self._lowered(step, range(self.stages.ranks))
        reductions = self._reductions if step.backward else None
        after_list = self._after_list if step.backward else ()
        check(self.stages, lists, step.micro_batches, reductions, backward=step.backward, after_list=after_list)
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
        orders = schedule.orders(self.stages, step.micro_batches, self._group_size)
        reductions = self._reductions if step.backward else None
        return lower(self.stages, orders, reductions, overlap=self._overlap, ranks=ranks)

    def _agree(self, digests: Sequence[str | None], failure: Exception | None, mesh: ParallelMesh) -> None:
        """Tell all ranks of all pipelines whose proof has failed, and which ranks differ from the others."""
        why = ""
        if failure is not None:
            why = str(failure)
            if not isinstance(failure, ScheduleError):
                why = f"rank {mesh.rank} could not prove its steps: {type(failure).__name__}: {failure}"
        place = [self.rank, mesh.coordinate("tp")]
        hashes = map(_hashed, (self._declared, self._copied, [*digests, self._inside_actions]))
        own = json.dumps([place, *hashes, why[:_LONGEST]])
        told = [json.loads(text) for text in all_gather_text(own, mesh.world(), mesh.device)]
        for *_, error in told:
            if error:
                raise ScheduleError(error) from failure
        everyone = [("", declared) for _, declared, *_ in told]
        copies = [(tuple(place), copied) for place, _, copied, *_ in told]
        for found, words in ((everyone, self._declared), (copies, self._copied)):
            if others := _unlike_most(found):
                raise ScheduleError(
                    f"{_named(others)}: {_difference(found, others, words, mesh)}. Do all ranks run the same megalite?"
                )
        if others := _unlike_most([(rank, lists) for (rank, _), *_, lists, _ in told]):
            raise ScheduleError(
                f"{_named(others)}: the steps, or what is done together inside them, are not those of the other ranks "
                "with the same stages. Do all ranks run the same megalite?"
            )


def _difference(
    found: Sequence[tuple[Hashable, str]], others: Sequence[int], words: Sequence[str], mesh: ParallelMesh
) -> str:
    """Say what the first of the others declares otherwise than its kind, given this rank's words; all ranks call it
    together."""
    declared = [json.loads(text) for text in all_gather_text(json.dumps(words), mesh.world(), mesh.device)]
    other = others[0]
    usual = next(rank for rank, (kind, _) in enumerate(found) if kind == found[other][0] and rank not in others)
    pairs = zip_longest(declared[other], declared[usual], fillvalue="nothing more")
    theirs, expected = next((one, two) for one, two in pairs if one != two)
    return f"declares {theirs[:_LONGEST]}, but rank {usual} declares {expected[:_LONGEST]}"


def _declared(stages: Stages, terms: Sequence[LossTerm]) -> list[str]:
    """Describe what must be the same on all ranks: the tensors that stages pass on, the terms of the loss."""
    borders = range(stages.count - 1)
    return [
        *(f"that stage {stage} sends {spec}" for stage in borders for spec in stages.passes(stage)),
        *(f"the term of the loss {term}" for term in terms),
    ]


def _unlike_most(found: Sequence[tuple[Hashable, str]]) -> list[int]:
    """The ranks that have found something else than most of their kind; (kind, what was found) of each."""
    most: dict[Hashable, str] = {}
    for (kind, what), _ in Counter(found).most_common():
        most.setdefault(kind, what)
    return [rank for rank, (kind, what) in enumerate(found) if what != most[kind]]


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _digest(actions: Sequence[Action]) -> str:
    return _hashed(list(zip(*actions, strict=True)))


def _hashed(value: object) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
