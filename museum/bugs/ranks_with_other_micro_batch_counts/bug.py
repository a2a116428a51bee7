from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from megalite.data.sampler import Deal
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.training.trainer import Trainer
from museum.own_flags import DENSE, FROM_FILES, TRAINING, write_documents

FLAGS = f"{DENSE} {FROM_FILES} {TRAINING}"
RANKS = 2
DATA = write_documents


def wrong() -> AbstractContextManager[Any]:
    dealt, proved, stack = Trainer.next_deal, ProvedSchedules.prove, ExitStack()

    def next_deal(trainer: Trainer) -> Deal:
        found = dealt(trainer)
        return replace(found, numbers=found.numbers[:-1]) if trainer.mesh.coordinate("dp") == 1 else found

    def prove(
        schedules: ProvedSchedules,
        training: Collection[int] = (),
        evaluation: Collection[int] = (),
        mesh: ParallelMesh | None = None,
    ) -> ProvedSchedules:
        return proved(schedules, [*training, *(number - 1 for number in training)], evaluation, mesh)

    stack.enter_context(mock.patch.object(Trainer, "next_deal", next_deal))
    stack.enter_context(mock.patch.object(ProvedSchedules, "prove", prove))
    return stack
