"""Action lists of a run. All are proved before the first step, and a rank runs only lists that were proved."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import zip_longest
from typing import NamedTuple

from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm
from megalite.parallel.stage_module import Inside
from megalite.pipeline.checker import Collective, check
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import SCHEDULES, Action, Kind, forward_only, orders_of
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages
from megalite.process.place import ranks_text

_LONGEST = 2000
"""Largest number of characters of an error message that are sent to other ranks."""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: lists and proofs are a million objects without reference cycles, and searching them
    for cycles takes as long as the proof."""
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
    """Lists of a pipeline rank for training and evaluation steps, compared with those that were proved."""

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
        """Create the schedules of a run; `prove` must be called before the first step.

        Args:
            schedule: a name in SCHEDULES; for `group_size` see `orders_of`.
            overlap: overlap messages with computation.
            inside_actions: collectives inside actions, by kind, in order; data-parallel pipelines run them together.
            after_list: collectives after each rank's list (see `check`).
            terms: terms of the loss, the same on all ranks.
            copied: text, in order, that must be the same on all ranks with the same stages and the same
                tensor-parallel rank.
        """
        self.stages, self.rank = stages if stages is not None else Stages(), rank
        self._schedule, self._group_size, self._overlap = SCHEDULES[schedule], group_size, overlap
        self._reductions = reductions if reductions is not None else Reductions()
        self._inside_actions, self._after_list = inside_actions if inside_actions is not None else {}, after_list
        self._declared, self._copied = _declared(self.stages, terms), list(copied)
        self._proved: dict[_Step, str] = {}
        """Digest of this rank's list."""
        self._lists: dict[_Step, list[Action]] = {}

    def training(self, micro_batches: int) -> list[Action]:
        """Return this rank's list of a training step. Raises ScheduleError if it was not proved, which is a bug."""
        return self._list(_Step(micro_batches, backward=True))

    def evaluation(self, micro_batches: int) -> list[Action]:
        """Return this rank's list of an evaluation step (forward only). Raises ScheduleError if it was not proved."""
        return self._list(_Step(micro_batches, backward=False))

    def prove(
        self, training: Collection[int] = (), evaluation: Collection[int] = (), mesh: ParallelMesh | None = None
    ) -> ProvedSchedules:
        """Prove steps of these numbers of micro-batches that have not been proved yet; returns itself.

        All ranks of `mesh` call it together: the ranks of a pipeline divide the steps among themselves and exchange the
        digests of the proved lists. Without `mesh`, this rank proves all steps.

        Raises ScheduleError on all ranks if the proof of a step fails, if ranks declare different messages or terms of
        the loss, or if ranks with the same stages differ in their lists or in `copied`. All of these are bugs.
        """
        wanted = {_Step(number, True) for number in training} | {_Step(number, False) for number in evaluation}
        steps = sorted(wanted - self._proved.keys())
        if not steps:
            return self
        steps.sort(key=lambda step: step.micro_batches * (3 if step.backward else 1), reverse=True)
        if mesh is not None and not mesh.is_connected:  # a run with these ranks has them prove their lists together
            for step in steps:
                self._proved[step] = _digest(self._lowered(step, [self.rank])[0])
            return self
        # The last rank gets the longest step, since the first rank also writes to the screen.
        mine = steps if mesh is None else steps[self.stages.ranks - 1 - self.rank :: self.stages.ranks]
        own: list[tuple[int, bool, list[str]]] = []
        failure: Exception | None = None
        try:
            own = [(*step, self._digests(step)) for step in mine]
        except Exception as error:  # whatever the error, the other ranks wait below
            if mesh is None:
                raise
            failure = error
        for proved in [own] if mesh is None else all_gather_json(own, mesh, "pp"):
            for micro_batches, backward, digests in proved:
                self._proved[_Step(micro_batches, backward)] = digests[self.rank]
        if mesh is not None:
            self._agree([self._proved.get(step) for step in steps], failure, mesh)
        return self

    @_without_garbage_collection()
    def _digests(self, step: _Step) -> list[str]:
        """Prove the lists of a step; returns their digests."""
        lists = self._lowered(step, range(self.stages.ranks))
        reductions = self._reductions if step.backward else None
        after_list = self._after_list if step.backward else ()
        check(self.stages, lists, step.micro_batches, reductions, backward=step.backward, after_list=after_list)
        return [_digest(actions) for actions in lists]

    @_without_garbage_collection()
    def _list(self, step: _Step) -> list[Action]:
        """Return this rank's actions, made once.

        Raises:
            ScheduleError: the list was not proved, or is another than the proved one.
        """
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
        schedule = self._schedule if step.backward else forward_only
        orders = orders_of(schedule, self.stages, step.micro_batches, self._group_size)
        reductions = self._reductions if step.backward else None
        return lower(self.stages, orders, reductions, overlap=self._overlap, ranks=ranks)

    def _agree(self, digests: Sequence[str | None], failure: Exception | None, mesh: ParallelMesh) -> None:
        """Raise ScheduleError on all ranks of all pipelines if a proof has failed, or ranks differ from the others."""
        why = ""
        if failure is not None:
            why = str(failure)
            if not isinstance(failure, ScheduleError):
                why = f"rank {mesh.rank} could not prove its steps: {type(failure).__name__}: {failure}"
        place = [self.rank, mesh.coordinate("tp")]
        hashes = map(_hashed, (self._declared, self._copied, [*digests, self._inside_actions]))
        told = all_gather_json([place, *hashes, why[:_LONGEST]], mesh)
        for *_, error in told:
            if error:
                raise ScheduleError(error) from failure
        everyone = [("", declared) for _, declared, *_ in told]
        copies = [(tuple(place), copied) for place, _, copied, *_ in told]
        for found, own_declarations in ((everyone, self._declared), (copies, self._copied)):
            if deviating := _unlike_most(found):
                difference = _first_differing_declaration(found, deviating, own_declarations, mesh)
                raise ScheduleError(f"{ranks_text(deviating)}: {difference}. Do all ranks run the same megalite?")
        if deviating := _unlike_most([(rank, lists) for (rank, _), *_, lists, _ in told]):
            raise ScheduleError(
                f"{ranks_text(deviating)}: the steps, or the collectives inside them, are not those of the other ranks "
                "with the same stages. Do all ranks run the same megalite?"
            )


def _first_differing_declaration(
    found: Sequence[tuple[Hashable, str]], deviating: Sequence[int], own_declarations: Sequence[str], mesh: ParallelMesh
) -> str:
    """Return, as text, the first difference between the first deviating rank and the majority of its kind.

    All ranks call it together.

    Args:
        found: kind and hash of the declarations of each rank.
        deviating: the ranks that differ from the majority of their kind.
        own_declarations: the declarations of this rank.
    """
    declared = all_gather_json(own_declarations, mesh)
    kind = found[deviating[0]][0]
    usual = next(rank for rank, (other, _) in enumerate(found) if other == kind and rank not in deviating)
    pairs = zip_longest(declared[deviating[0]], declared[usual], fillvalue="nothing more")
    theirs, expected = next((one, two) for one, two in pairs if one != two)
    return f"declares {theirs[:_LONGEST]}, but rank {usual} declares {expected[:_LONGEST]}"


def _declared(stages: Stages, terms: Sequence[LossTerm]) -> list[str]:
    """Return, as text, declarations that must be the same on all ranks: messages of stages, and terms of the loss."""
    borders = range(stages.count - 1)
    return [
        *(f"that stage {stage} sends {spec}" for stage in borders for spec in stages.passes(stage)),
        *(f"the term of the loss {term}" for term in terms),
    ]


def _unlike_most(found: Sequence[tuple[Hashable, str]]) -> list[int]:
    """Return the ranks that differ from the majority of their kind. `found`: kind and value of each rank."""
    most: dict[Hashable, str] = {}
    for (kind, what), _ in Counter(found).most_common():
        most.setdefault(kind, what)
    return [rank for rank, (kind, what) in enumerate(found) if what != most[kind]]


def _digest(actions: Sequence[Action]) -> str:
    return _hashed(list(zip(*actions, strict=True)))


def _hashed(value: object) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
