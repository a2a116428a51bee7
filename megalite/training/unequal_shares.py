"""Unequal shares of the data-parallel ranks in the micro-batches of a step: those of a flag, or measured ones."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config.run import TaskConfig
from megalite.config.validate_shares import FLAG, batch_unit, given_shares, ranks_together
from megalite.data.sampler import Deal, Shares
from megalite.entry_points import entry_point
from megalite.errors import ConfigurationError, MegaliteError
from megalite.parallel import collectives
from megalite.parallel.device import seconds_between, time_mark
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.engine import RunningStep, StepObserver
from megalite.pipeline.schedules import Action

SECTION = "data_parallel_shares"
"""Section of a checkpoint's configuration that has the shares in force."""
_MEASURED_STEPS = 16
"""Most recent steps whose times count."""
_LEAST_GAIN = 0.02
"""Share of a step's time that other shares must save to be taken."""


def deal_of(counts: Sequence[int], rank: int, slots: int) -> Deal:
    """Return a rank's part of a step in which ranks take turns, and each passes once it has its number.

    Args:
        counts: the number of micro-batches of each rank, at least one.
        slots: the number of slots of this rank; those after its micro-batches are empty.
    """
    numbers, turns = list[int](), [0]
    for turn in range(counts[rank]):
        numbers.append(turns[-1] + sum(count > turn for count in counts[:rank]))
        turns.append(turns[-1] + sum(count > turn for count in counts))
    turns[-1] = sum(counts)  # the others go on after its last turn
    return Deal(numbers, turns, sum(counts), slots - counts[rank])


def divided(shares: Sequence[int], micro_batches: int) -> list[int]:
    """Divide micro-batches in proportion to the shares, each rank getting at least one.

    Each rank gets the whole part of its share; what is left goes to the largest remainders, the first ranks first.
    """
    left, whole = micro_batches - len(shares), sum(shares)
    counts = [1 + left * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: -(left * shares[rank] % whole))
    for rank in by_remainder[: micro_batches - sum(counts)]:
        counts[rank] += 1
    return counts


def balanced(seconds: Sequence[float], micro_batches: int) -> list[int]:
    """Return the numbers of micro-batches that end soonest on ranks with these seconds for each: the least maximum.

    Each rank gets one; each further one goes to where it ends first (of several such ranks, to the first).
    """
    counts = [1] * len(seconds)
    ends = [(2 * own, rank) for rank, own in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(micro_batches - len(seconds)):
        end, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, (end + seconds[rank], rank))
    return counts


class UnequalShares(Shares):
    """Shares that a flag gives: the numbers of micro-batches of the ranks are in this proportion.

    Ranks that share collectives within each micro-batch have as many slots; some of these may be empty.
    """

    are_equal = False

    def __init__(self, rank: int, shares: Sequence[int], unit: int, together: int = 1) -> None:
        """Describe the shares. `together`: the number of consecutive ranks that meet in each micro-batch."""
        super().__init__(rank, len(shares))
        self.shares, self.unit, self._together = tuple(shares), unit, together
        self._dealt: tuple[object, Deal] | None = None

    def counts(self, micro_batches: int) -> list[int]:
        """Return the number of micro-batches of each rank."""
        return [share * (micro_batches // self.unit) for share in self.shares]

    def slots_of_ranks(self, micro_batches: int) -> list[int]:
        """Return the number of slots of each rank, the empty ones included."""
        counts, together = self.counts(micro_batches), self._together
        blocks = [max(counts[first : first + together]) for first in range(0, len(counts), together)]
        return [block for block in blocks for _ in range(together)]

    def slots(self, micro_batches: int) -> Sequence[int]:
        return sorted(set(self.slots_of_ranks(micro_batches)))

    def deal(self, micro_batches: int) -> Deal:
        key = self.shares, micro_batches
        if self._dealt is None or self._dealt[0] != key:  # most steps are dealt as the last one, and ranks may be many
            slots = self.slots_of_ranks(micro_batches)[self.rank]
            self._dealt = key, deal_of(self.counts(micro_batches), self.rank, slots)
        return self._dealt[1]

    def require(self, has_empty_slots: bool) -> None:
        """Raise ConfigurationError if these shares need empty slots, and micro-batches cannot be empty."""
        together = self._together
        for first in range(0, self.ranks, together):
            if len(set(self.shares[first : first + together])) > 1 and not has_empty_slots:
                raise ConfigurationError(
                    f"{FLAG}: data-parallel ranks {first} to {first + together - 1} share collectives in each "
                    "micro-batch (experts, or ZeRO 2 and 3), and data of one's own has no empty micro-batches: give "
                    "them equal shares, or use ZeRO 0 or 1"
                )

    def check(self, reductions: Mapping[int, Sequence[int]]) -> None:
        """Prove that ranks with other numbers of slots reduce their gradients in the same order.

        These reductions are all that they share. Ranks that reduce each micro-batch together have equal lists, which
        are proved as ever.
        """
        once = all(len(set(order)) == len(order) for order in reductions.values())
        if once and len({tuple(order) for order in reductions.values()}) > 1:
            raise MegaliteError(
                f"{FLAG}: ranks with {' and '.join(map(str, reductions))} micro-batches would reduce the gradients of "
                "their stages in different orders: leave out --overlap-grad-reduce, or take another schedule"
            )

    def description(self, micro_batches: int) -> str:
        """Return the shares as text."""
        counts, slots = self.counts(micro_batches), self.slots_of_ranks(micro_batches)
        empty = sum(slots) - sum(counts)
        text = ":".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)}"
        return f"{text} micro-batches on the data-parallel ranks" + (f", with {empty} empty slots" if empty else "")


class EvenShares(UnequalShares):
    """Shares as equal as can be, for a number of ranks that need not divide a step's micro-batches (`--elastic`)."""

    def __init__(self, rank: int, ranks: int, together: int) -> None:
        """Describe the place of this rank; see `UnequalShares`."""
        super().__init__(rank, [1] * ranks, 1, together)

    def counts(self, micro_batches: int) -> list[int]:
        return divided(self.shares, micro_batches)


class MeasuredShares(UnequalShares):
    """Shares that follow from the times of the ranks, taken anew at each save (`--data-parallel-shares auto`).

    Those in force are in the checkpoint, so that a resumed run has the same ones.
    """

    def __init__(self, mesh: ParallelMesh, micro_batches: int, together: int, speeds: Sequence[float] = ()) -> None:
        """Begin with equal shares.

        Args:
            micro_batches: the number in a step of the final size.
            speeds: relative speeds of the ranks, as far as they are known; empty: all are equal.
        """
        ranks = mesh.size("dp")
        self._mesh, self._micro_batches = mesh, micro_batches
        super().__init__(mesh.coordinate("dp"), [1] * ranks, together, together)
        self.shares = tuple(self._balanced([1 / speed for speed in speeds] or [1.0] * ranks))
        self.observer = self._times = ComputeTimes(mesh)

    def _balanced(self, seconds: Sequence[float]) -> list[int]:
        """Return the counts that end soonest. Ranks that meet in each micro-batch get as many."""
        together = self._together
        blocks = [max(seconds[first : first + together]) for first in range(0, len(seconds), together)]
        counts = balanced(blocks, self._micro_batches // together)
        return [count for count in counts for _ in range(together)]

    def counts(self, micro_batches: int) -> list[int]:
        if micro_batches == self._micro_batches:
            return list(self.shares)
        blocks = divided(self.shares[:: self._together], micro_batches // self._together)
        return [count for count in blocks for _ in range(self._together)]

    def balance(self) -> str | None:
        """Take the shares that the measured times ask for."""
        own = torch.tensor([self._times.take()], dtype=torch.float64, device=self._mesh.device)
        measured = collectives.all_gather(own, self._mesh.world()).tolist()
        seconds = [0.0] * self.ranks
        for rank, found in enumerate(measured):
            place = self._mesh.coordinates_of(rank)["dp"]
            seconds[place] = max(seconds[place], found)
        if not all(seconds):
            return None  # no step has been measured since the last save
        before, after = self.shares, tuple(self._balanced(seconds))
        now, then = (max(map(float.__mul__, seconds, map(float, counts))) for counts in (before, after))
        if then > (1 - _LEAST_GAIN) * now:
            return None
        self.shares = after
        return (
            f"{self.description(self._micro_batches)} from the next step on, after measured {_times(seconds)} per "
            f"micro-batch: {1 - then / now:.0%} less time per step"
        )

    def saved(self) -> dict[str, Any]:
        return {SECTION: {"micro_batches": list(self.shares)}}

    def restore(self, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Take the shares in force from a checkpoint's configuration, if they fit. Returns notes."""
        if SECTION not in saved:
            return ()
        section = saved[SECTION]
        found: Any = section.get("micro_batches") if isinstance(section, dict) else None
        fits = isinstance(found, list) and all(type(count) is int and count > 0 for count in found)
        fits = fits and len(found) == self.ranks and sum(found) == self._micro_batches
        together = self._together
        if not fits or any(len(set(found[first : first + together])) > 1 for first in range(0, self.ranks, together)):
            return (
                f"note: {FLAG} auto begins with new shares: those of the checkpoint are for other data-parallel ranks, "
                "another batch, or ranks that do not share experts or shards",
            )
        self.shares = tuple(found)
        return ()


def _times(seconds: Sequence[float]) -> str:
    low, high = min(seconds), max(seconds)
    return f"{1000 * low:.1f} to {1000 * high:.1f} ms"


class ComputeTimes(StepObserver):
    """Seconds that the computations of each step take on this rank, without waiting for other ranks."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._device, self._waits = mesh.device, mesh.waits
        self._steps: deque[list[tuple[Any, Any, float]]] = deque(maxlen=_MEASURED_STEPS)
        """Start and end of each computation, and the seconds within it in which the host has waited."""
        self._micro_batches: deque[int] = deque(maxlen=_MEASURED_STEPS)

    def execute(self, action: Action, step: RunningStep) -> None:
        """Run an action, and time it if it computes."""
        if action.kind not in ("F", "B", "I", "W"):
            step.execute(action)
            return
        if action.kind == "F" and action.chunk == 0:
            if action.micro_batch == 0:
                self._steps.append([])
                self._micro_batches.append(0)
            self._micro_batches[-1] += 1
        step.wait_for_message(action)
        waited, start = self._waits.seconds, time_mark(self._device)
        step.execute(action)
        self._steps[-1].append((start, time_mark(self._device), self._waits.seconds - waited))

    def take(self) -> float:
        """Return the median over the last steps of the seconds per micro-batch, and forget them; 0 without a step.

        The first step does not count if there are others: it may compile, or allocate.
        """
        totals = [sum(seconds_between(start, end) - waited for start, end, waited in step) for step in self._steps]
        each = [total / number for total, number in zip(totals, self._micro_batches, strict=True)]
        self._steps.clear()
        self._micro_batches.clear()
        return statistics.median(each[1:] or each or [0.0])


def make_even_shares(config: TaskConfig, mesh: ParallelMesh) -> EvenShares:
    """Return the shares of `--elastic`."""
    together = ranks_together(config.parallel, mesh.world_size)
    return EvenShares(mesh.coordinate("dp"), mesh.size("dp"), together)


def make_unequal_shares(config: TaskConfig, mesh: ParallelMesh) -> UnequalShares:
    """Return the shares of `--data-parallel-shares`, which has been validated."""
    parallel, training = config.parallel, config.training
    shares, together = given_shares(parallel), ranks_together(parallel, mesh.world_size)
    if shares is None:
        assert training.global_batch_size is not None
        speeds = () if parallel.device_classes is None else entry_point("data_parallel_speeds")(parallel)
        return MeasuredShares(mesh, training.global_batch_size // training.micro_batch_size, together, speeds)
    return UnequalShares(mesh.coordinate("dp"), shares, batch_unit(parallel, mesh.world_size)[0], together)
