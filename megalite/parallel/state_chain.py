"""States of recurrent layers under context parallelism, passed from run to run of a sample as they are computed.

Each run of tokens waits for the one before it. In exchange nothing is computed twice, and states and outputs have the
bits of one process, where cuts lie between chunks of the recurrence. `state_scan.py` is the way without waiting.

A state is passed on by an all-to-all in which one rank sends and one receives; the others take part with nothing, so
that all ranks have the same collectives in one order, whoever has the runs. In backward, gradients go back likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import Group
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.stage_module import Inside
from megalite_kernels.recurrence import Chain, Run


@dataclass(frozen=True)
class StateChain(Chain):
    """Chain of the runs of tokens that context-parallel ranks have, in the order of the sample.

    Attributes:
        group: the context-parallel ranks.
        layout: the runs of each of them.
    """

    group: Group
    layout: SequenceLayout

    def run(self, runs: Sequence[Run], first: Tensor, *, backward: bool = False) -> Tensor:
        """See `Chain`. `runs`: those of this rank, in the order of the sample."""
        owners = self.layout.run_owners[::-1] if backward else self.layout.run_owners
        own = iter(reversed(runs) if backward else runs)
        state, pending = first, list[Pending]()
        for owner, following in zip(owners, [*owners[1:], None], strict=True):
            if owner == self.group.rank:
                state = next(own)(state)
            if following is None:
                break
            arriving = self._pass_on(state, owner, following)
            if following == self.group.rank != owner:
                state = self._wait(arriving, owner).view(first.shape)
            else:
                pending.append(arriving)
        for sent in pending:
            sent.wait("context parallelism: waited until a state had been passed on")
        return state

    def _pass_on(self, state: Tensor, source: int, target: int) -> Pending:
        """Begin to pass a tensor on from one rank to another. All ranks call it; what arrives is [elements]."""
        size, rank = self.group.size, self.group.rank
        sent, received = [0] * size, [0] * size
        if source != target:
            sent[target], received[source] = (state.numel() * (rank == each) for each in (source, target))
        rows = state.reshape(-1)[: sum(sent)]
        return collectives.all_to_all_rows_async(rows, sent, received, self.group)

    def _wait(self, arriving: Pending, source: int) -> Tensor:
        message = "context parallelism: waited for the state of a sample from rank %d"
        return arriving.wait(message, self.group.ranks[source])


def states_of_runs(ranks: int) -> list[Inside]:
    """Return the collectives of a chain over so many ranks with two runs of a sample each."""
    return [Inside(f"state after run {number}", "cp") for number in range(1, 2 * ranks)]
