"""Schedules: pure functions from the size of a pipeline and the number of micro-batches to the order of each rank.

A schedule contains no communication: `lowering` derives it from the orders of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from megalite.pipeline.stages import Stages

Listed = Literal["F", "B", "I", "W", "R", "receive F", "send F", "free F", "receive B", "send B", "free B"]
Kind = Literal[Listed, "skip F", "skip B", "skip I", "skip W"]


class Action(NamedTuple):
    """Action of a rank on one micro-batch in one of its chunks.

    F runs the stage forward. B runs it backward; alternatively, I computes only the gradient of its input, and W
    computes the gradients of its weights later. R reduces the gradients that are complete after the backward of this
    micro-batch, over the data-parallel ranks: after R, the reductions of all these buckets have started. Those that
    overlap backward (all of them under ZeRO 2 and 3) start inside B or W, bucket by bucket in a fixed order.

    "receive F" posts the receive of the stage's input, "send F" starts to send its output, and "free F" waits until the
    output has been sent and frees its memory. "receive B", "send B" and "free B" do the same with gradients, which are
    received for the output and sent for the input. `peer` is the pipeline rank at the other end.

    "skip F" takes the place of F, and so on, if a step leaves a micro-batch out: its messages travel, as zeros, and its
    gradients count as arrived. Proved lists have no such action.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        where = "" if self.peer is None else f" {'from' if self.kind.startswith('receive') else 'to'} rank {self.peer}"
        return f"{self.kind} of micro-batch {self.micro_batch}, chunk {self.chunk}{where}"


def gpipe(stages: Stages, rank: int, micro_batches: int, group: int) -> list[Action]:
    """GPipe (arXiv:1811.06965): all forwards, then all backwards."""
    numbers = range(micro_batches)
    return [Action("F", m) for m in numbers] + [Action("B", m) for m in numbers]


def one_forward_one_backward(stages: Stages, rank: int, micro_batches: int, group: int) -> list[Action]:
    """1F1B (PipeDream-Flush, arXiv:2006.09503): as many micro-batches in flight as stages from here to the last."""
    forward = [Action("F", m) for m in range(micro_batches)]
    backward = [Action("B", m) for m in range(micro_batches)]
    return _alternate(forward, backward, warm_up=stages.ranks - 1 - rank)


def interleaved(stages: Stages, rank: int, micro_batches: int, group: int) -> list[Action]:
    """1F1B over several chunks per rank (arXiv:2104.04473): groups of micro-batches go through chunk after chunk."""
    order = _by_groups(stages, micro_batches, group)
    forward = [Action("F", m, chunk) for m, chunk in order]
    backward = [Action("B", m, stages.chunks - 1 - chunk) for m, chunk in order]
    largest = max(_groups(stages, micro_batches, group))
    return _alternate(forward, backward, 2 * (stages.ranks - 1 - rank) + (stages.chunks - 1) * largest)


def zb_h1(stages: Stages, rank: int, micro_batches: int, group: int) -> list[Action]:
    """ZB-H1 (arXiv:2401.10241): 1F1B with delayed weight gradients. The delay is longer on later ranks, so that all
    ranks keep as many micro-batches as the first.
    """
    forward = [Action("F", m) for m in range(micro_batches)]
    backward: list[list[Action]] = []
    for m in range(micro_batches):
        backward.append([Action("I", m)] + [Action("W", m - rank)] * (m >= rank))
    delayed = [Action("W", m) for m in range(max(micro_batches - rank, 0), micro_batches)]
    return _alternate(forward, backward, stages.ranks - 1 - rank) + delayed


def zb_v(stages: Stages, rank: int, micro_batches: int, group: int) -> list[Action]:
    """ZB-V (arXiv:2401.10241, arXiv:2405.15362): two chunks per rank, V-shaped; weight gradients fill the bubbles.

    The phases need at least 2 * ranks - 1 micro-batches. With fewer, the order is made for that number, and the actions
    of micro-batches that do not exist are removed.
    """
    total = max(micro_batches, 2 * stages.ranks - 1)
    ranks_below = stages.ranks - rank  # on the way down the V, this rank included
    actions: list[Action] = []
    done: Counter[tuple[Kind, int]] = Counter()

    def take(kind: Kind, chunk: int) -> None:
        actions.append(Action(kind, done[kind, chunk], chunk))
        done[kind, chunk] += 1

    def backward(chunk: int) -> None:
        take("I", chunk)
        take("W", chunk)

    # Micro-batch 0 goes from this rank down to the last one and back up; meanwhile, new micro-batches run forward.
    for _ in range(2 * ranks_below - 1):
        take("F", 0)
    # It then goes up to rank 0, where the V ends and its backward begins, and comes back to this rank.
    for _ in range(rank):
        take("F", 1)
        take("F", 0)
    for _ in range(ranks_below):
        take("F", 1)
        backward(1)
    while done["F", 1] < total:  # steady state: forward and backward of each chunk in turn
        if done["F", 0] < total:
            take("F", 0)
        backward(0)
        take("F", 1)
        backward(1)
    # No forward is left. Input gradients have priority, because other ranks wait for them; weight gradients follow.
    for _ in range(rank):
        take("I", 0)
        take("I", 1)
    for _ in range(ranks_below):
        backward(0)
    for chunk in (1, 0):
        while done["W", chunk] < total:
            take("W", chunk)
    return [action for action in actions if action.micro_batch < micro_batches]


def forward_only(stages: Stages, rank: int, micro_batches: int, group: int) -> list[Action]:
    """Evaluation. If V-shaped, just enough micro-batches enter before the first comes back to keep all ranks busy."""
    if not stages.v_shaped:
        return [Action("F", m, chunk) for m, chunk in _by_groups(stages, micro_batches, group)]
    down = [Action("F", m, 0) for m in range(micro_batches)]
    back = [Action("F", m, 1) for m in range(micro_batches)]
    return _alternate(down, back, warm_up=2 * (stages.ranks - rank) - 2)


def _alternate(forward: Sequence[Action], backward: Sequence[Action | Sequence[Action]], warm_up: int) -> list[Action]:
    """Return `warm_up` items of `forward`, then one of each list in turn, then the rest of `backward`. Both lists have
    the same length."""
    warm_up = min(warm_up, len(forward))
    actions = list(forward[:warm_up])
    for index, item in enumerate(backward):
        actions += forward[warm_up + index : warm_up + index + 1]
        actions += [item] if isinstance(item, Action) else item
    return actions


def _groups(stages: Stages, micro_batches: int, group: int) -> list[int]:
    """Return the sizes of the groups of micro-batches that go through a chunk before the next chunk. All have size
    `group` except for the last: it is smaller, or larger if it would be smaller than the number of ranks (rank 0 would
    then wait for its own last stage).
    """
    sizes = [group] * (micro_batches // group)
    rest = micro_batches % group
    if rest >= stages.ranks or not sizes:
        return [*sizes, rest] if rest else sizes
    return [*sizes[:-1], sizes[-1] + rest]


def _by_groups(stages: Stages, micro_batches: int, group: int) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) of all forwards, in order."""
    order: list[tuple[int, int]] = []
    first = 0
    for size in _groups(stages, micro_batches, group):
        order += [(m, chunk) for chunk in range(stages.chunks) for m in range(first, first + size)]
        first += size
    return order


Schedule = Callable[[Stages, int, int, int], list[Action]]
"""Function that returns the order of a rank, from the stages, the rank, the number of micro-batches and the size of a
group. config/parallel.py lists the pipelines that support each schedule, by name."""


def orders_of(schedule: Schedule, stages: Stages, micro_batches: int, group: int | None = None) -> list[list[Action]]:
    """Each rank's list. `group`: micro-batches that go through a chunk before the next; None: as many as ranks."""
    return [schedule(stages, rank, micro_batches, group or stages.ranks) for rank in range(stages.ranks)]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}
