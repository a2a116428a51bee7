"""Trainings whose gradients are checked, with sums over ranks that go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from torch import Tensor

from megalite.errors import MegaliteError
from megalite.extras.corruption import gradient_sync
from megalite.extras.corruption.summed_again import summed_again
from megalite.extras.corruption.watch import CorruptionWatch
from megalite.optim.reduction import Reduction
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import Group
from megalite.training.trainer import Trainer
from tests.extras.corruption.corruption_run import digest_of, flip_bit, trainer_of

SYNC = "--check-gradient-sync-interval"


@dataclass(frozen=True)
class Wrong:
    """A sum that goes wrong in one step."""

    what: Literal["sum", "gather", "partial sum"]
    """sum: a rank gets a wrong slice; gather: a rank gets the slices of others wrong; partial sum: it is left out, by
    all."""
    rank: int
    step: int


@dataclass(frozen=True)
class Course:
    """Result of a training on a rank."""

    bits: list[str]
    """Loss, gradient norm and bytes sent of each step."""
    weights: str
    error: str
    code: int
    summed_again: int
    """Number of buckets of this rank that have been summed again."""


def train(flags: str, steps: int, *wrong: Wrong) -> Course:
    trainer = trainer_of(flags)
    watch = CorruptionWatch(trainer) if trainer.config.corruption.is_watched else None
    bits: list[str] = []
    error, code, found = "", 0, list[object]()

    def counted(bucket: Any) -> Any:
        found.append(summed_again(bucket))
        return found[-1]

    with trainer.loader, mock.patch.object(gradient_sync, "summed_again", counted):
        for number in range(1, steps + 1):
            with going_wrong(trainer, next((each for each in wrong if each.step == number), None)):
                try:
                    metrics = trainer.step() if watch is None else watch.step()
                except MegaliteError as raised:
                    error, code = str(raised), raised.exit_code
                    break
            bits.append(f"{metrics.losses} {metrics.grad_norm} {metrics.bytes_sent}")
    return Course(bits, digest_of(trainer), error, code, sum(each is not None for each in found))


@contextmanager
def going_wrong(trainer: Trainer, wrong: Wrong | None) -> Iterator[None]:
    if wrong is None:
        yield
        return
    is_here = trainer.mesh.rank == wrong.rank
    reduce_scatter, all_reduce = collectives.reduce_scatter_async, collectives.all_reduce_in_rank_order_
    begin_gather = Reduction.begin_gather

    def flipped(pending: Pending, start: int) -> Pending:
        def wait() -> Tensor:
            values = pending.wait()
            if is_here:
                flip_bit(values[start + int(values[start:].ne(0).int().argmax()) :])
            return values

        return Pending(None, wait)

    def wrong_sum(*arguments: Any, **named: Any) -> Pending:
        return flipped(reduce_scatter(*arguments, **named), 0)

    def wrong_gather(reduction: Reduction, shard: Tensor, gradients: Tensor) -> Pending:
        of_others = len(shard) if reduction.groups.shards.rank == 0 else 0
        return flipped(begin_gather(reduction, shard, gradients), of_others)

    def left_out(tensor: Tensor, group: Group) -> Tensor:
        return tensor if group.axis == "tp" else all_reduce(tensor, group)

    patches: dict[str, AbstractContextManager[object]] = {
        "sum": mock.patch.object(collectives, "reduce_scatter_async", wrong_sum),
        "gather": mock.patch.object(Reduction, "begin_gather", wrong_gather),
        "partial sum": mock.patch.object(collectives, "all_reduce_in_rank_order_", left_out),
    }
    with patches[wrong.what]:
        yield
