"""Choice of the samples of a rank: pure functions of the number of consumed samples, the only state to resume from.

This is Megatron-LM's `--dataloader-type single`. Samples are taken in order: a step has the next global batch, divided
into micro-batches of consecutive samples, which the data-parallel ranks take in turns. Samples that the run has left
out (`--spiky-loss-policy rewind`) are passed over as if they were not there, and are not consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

Ranges = Sequence[tuple[int, int]]
"""First and last number of each range of samples, which are counted from 0 over the whole run."""


def sample_at(position: int, left_out: Ranges) -> int:
    """Return the number of the sample that has so many before it, without those left out: ascending ranges."""
    for first, last in left_out:
        if position < first:
            break
        position += last - first + 1
    return position


def drawn(position: int, left_out: Ranges, samples: int | None) -> int:
    """Return the number of the sample that a run draws with so many drawn before it.

    `samples`: the number of all samples; None if they have no end. Where the samples end because some are left out, the
    first ones come again, in place of those. A position beyond all samples has no sample, as without any left out.
    """
    rest = 0 if samples is None else samples - sum(last - first + 1 for first, last in left_out)
    if samples is not None and 0 < rest <= position < samples:
        position %= rest
    return sample_at(position, left_out)


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the numbers of these ranges as ascending ranges, as long as possible."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


@dataclass(frozen=True)
class GlobalBatchSize:
    """Number of samples in a step over all ranks, which may grow at the start of a run.

    Attributes:
        final: the size after the ramp.
        ramp: Megatron-LM's `--rampup-batch-size`: the first size, the increment, and the number of samples over which
            the size grows, the same number for each size; None: no ramp.
        schedule: Megatron-LM's `--step-batch-size-schedule`: each size after the number of consumed samples from which
            on steps have it, in order from 0; empty: one size.
    """

    final: int
    ramp: tuple[int, int, int] | None = None
    schedule: Sequence[tuple[int, int]] = ()

    @property
    def sizes(self) -> Sequence[int]:
        """Sizes that steps may have."""
        if self.schedule:
            return sorted({size for _, size in self.schedule})
        start, increment, _ = self.ramp if self.ramp is not None else (self.final, 1, 0)
        return range(start, self.final + 1, increment)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the step that starts at `consumed_samples`."""
        if self.schedule:
            return [size for first, size in self.schedule if first <= consumed_samples][-1]
        if self.ramp is None or self.ramp[0] == self.final or consumed_samples > self.ramp[2]:
            return self.final
        start, increment, samples = self.ramp
        # The same division as in Megatron-LM: with other rounding, a size could change one step earlier or later.
        samples_of_a_size = samples / ((self.final - start) // increment)
        return start + int(consumed_samples / samples_of_a_size) * increment

    def steps(self, consumed_samples: int, train_samples: int) -> int:
        """Return the number of steps from `consumed_samples` to `train_samples`; an incomplete last step is not
        counted."""
        steps = 0
        last_change = self.schedule[-1][0] if self.schedule else self.ramp[2] + 1 if self.ramp is not None else 0
        while consumed_samples < last_change and consumed_samples + self.at(consumed_samples) <= train_samples:
            consumed_samples += self.at(consumed_samples)
            steps += 1
        return steps + max(0, train_samples - consumed_samples) // self.at(consumed_samples)


@dataclass(frozen=True)
class Deal:
    """Micro-batches of a step that one data-parallel rank takes, by their numbers in the step.

    Attributes:
        numbers: those of this rank, ascending.
        turns: bounds of the turns in which it takes them: while it takes `numbers[i]`, all ranks together take those
            from `turns[i]` to below `turns[i + 1]`.
        total: number of micro-batches of all ranks.
        empty: number of slots without samples, after the others, in which the rank only joins collectives.
        left_out: samples that the run passes over.
    """

    numbers: Sequence[int]
    turns: Sequence[int]
    total: int
    empty: int = 0
    left_out: Ranges = ()

    @property
    def slots(self) -> int:
        """Number of slots of this rank, the empty ones included."""
        return len(self.numbers) + self.empty

    def samples(
        self, consumed_samples: int, micro_batch_size: int, data: Sized | None = None
    ) -> Sequence[Sequence[int]]:
        """Return the global sample ids of this rank's micro-batches in the step that starts at `consumed_samples`.

        `data`: all samples, if they have an end. A run that has left some out begins with the first ones again when it
        has passed them all; any other run must have enough.
        """
        size = micro_batch_size
        positions = [range(consumed_samples + n * size, consumed_samples + (n + 1) * size) for n in self.numbers]
        if not self.left_out:
            return positions
        end = None if data is None else len(data)
        return [tuple(drawn(position, self.left_out, end) for position in part) for part in positions]


def equal_deal(rank: int, ranks: int, micro_batches: int, replicas: int = 1) -> Deal:
    """Return a rank's part of a step in which ranks take turns, and all have as many micro-batches.

    `replicas`: the number of equal blocks of ranks, each of which has consecutive micro-batches.
    """
    size, length = ranks // replicas, micro_batches // replicas
    replica, rank = divmod(rank, size)
    start, end = replica * length, (replica + 1) * length
    return Deal(range(start + rank, end, size), range(start, end + 1, size), micro_batches)


class Shares:
    """Shares of the data-parallel ranks in the micro-batches of a step: equal ones.

    Those of `--data-parallel-shares` are in training/unequal_shares.py.

    Attributes:
        are_equal: True if all ranks have as many.
        unit: number of micro-batches of which a step has a multiple.
        observer: `StepObserver` of the pipeline, which sees the actions of each step; None: nobody does.
    """

    are_equal = True
    observer: Any = None

    def __init__(self, rank: int = 0, ranks: int = 1, replicas: int = 1) -> None:
        """Describe the place of this rank; see `equal_deal`."""
        self.rank, self.ranks, self.replicas, self.unit = rank, ranks, replicas, ranks

    def can_deal(self, micro_batches: int) -> bool:
        """Tell whether a step may have this many micro-batches."""
        return micro_batches % self.unit == 0 and micro_batches >= self.ranks

    def slots(self, micro_batches: int) -> Sequence[int]:
        """Return the numbers of slots that ranks have in a step of this many micro-batches, each number once."""
        return [micro_batches // self.ranks]

    def deal(self, micro_batches: int) -> Deal:
        """Return this rank's part of a step of this many micro-batches."""
        return equal_deal(self.rank, self.ranks, micro_batches, self.replicas)

    def require(self, has_empty_slots: bool) -> None:
        """Raise ConfigurationError if the shares need empty slots, and micro-batches cannot be empty."""

    def check(self, reductions: Mapping[int, Sequence[int]]) -> None:
        """Prove that ranks with other numbers of slots reduce their gradients in the same order.

        Args:
            reductions: the chunks that a rank reduces in a step, in order, by its number of slots.

        Raises:
            MegaliteError: they do not.
        """

    def description(self, micro_batches: int) -> str:
        """Return the shares in a step of this many micro-batches as text."""
        own = micro_batches // self.ranks
        return f"{own} micro-batch{'' if own == 1 else 'es'} per rank"

    def balance(self) -> str | None:
        """Take other shares, if measured times ask for them. Called by all ranks together.

        Returns the new ones in words, with the reason, the same on all ranks, or None if they stay.
        """
        return None

    def saved(self) -> dict[str, Any]:
        """Return the section of a checkpoint's configuration that has the shares in force."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> tuple[str, ...]:
        """Take the shares in force from a checkpoint's configuration. Returns notes."""
        return ()
