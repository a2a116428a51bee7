"""Choice of the samples of a rank: pure functions of the number of consumed samples, the only state to resume from.

This is Megatron-LM's `--dataloader-type single`. Samples are taken in order: a step has the next global batch, divided
into micro-batches of consecutive samples, which the data-parallel ranks take in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """

    numbers: Sequence[int]
    turns: Sequence[int]
    total: int
    empty: int = 0

    @property
    def slots(self) -> int:
        """Number of slots of this rank, the empty ones included."""
        return len(self.numbers) + self.empty

    def samples(self, consumed_samples: int, micro_batch_size: int) -> list[range]:
        """Return the global sample ids of this rank's micro-batches in the step that starts at `consumed_samples`."""
        firsts = (consumed_samples + number * micro_batch_size for number in self.numbers)
        return [range(first, first + micro_batch_size) for first in firsts]


def equal_deal(rank: int, ranks: int, micro_batches: int, replicas: int = 1) -> Deal:
    """Return a rank's part of a step in which ranks take turns, and all have as many micro-batches.

    `replicas`: the number of equal blocks of ranks, each of which has consecutive micro-batches.
    """
    size, length = ranks // replicas, micro_batches // replicas
    replica, rank = divmod(rank, size)
    start, end = replica * length, (replica + 1) * length
    return Deal(range(start + rank, end, size), range(start, end + 1, size), micro_batches)
