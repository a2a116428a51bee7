"""Lowering: adds sends, receives and gradient reductions to the orders of computation."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.simulator import Lanes, Span, durations, lanes, simulate
from megalite.pipeline.stages import Stages

_RECEIVE: dict[Kind, Kind] = {"F": "receive F", "B": "receive B", "I": "receive B"}
_SEND: dict[Kind, Kind] = {"F": "send F", "B": "send B", "I": "send B"}
_FREE: dict[Kind, Kind] = {"F": "free F", "B": "free B", "I": "free B"}


@dataclass(frozen=True)
class Reductions:
    """Times at which a rank reduces its gradients over the data-parallel ranks."""

    per_micro_batch: bool = False
    """Reduce after every micro-batch (ZeRO 2 and 3) instead of once per step."""
    overlap: bool = False
    """If once per step: reduce a chunk when its gradients are complete, instead of at the end of the list."""
    align_ranks: bool = False
    """Delay reductions on later ranks, so that all ranks reduce a chunk at about the same time. Not for V-shaped
    stages, whose chunks do not end in that order."""


def lower(
    stages: Stages,
    orders: Sequence[Sequence[Action]],
    reductions: Reductions | None = None,
    *,
    overlap: bool = True,
    ranks: Sequence[int] | None = None,
) -> list[list[Action]]:
    """Return the full lists of `ranks` (None: all), from the orders of all ranks; without `reductions`, gradients are
    not reduced.

    A send directly follows the computation of its message. The receives from a rank are posted in the order in which it
    sends, each before its send starts, so that no send waits for the receiver's program, even if the backend does not
    buffer. (This holds on the time line of equal stages, and therefore in every order that the lists allow.) A receive
    is posted at least one computation before its message is needed. With `overlap`, a send is waited for after the next
    computation, so that the two overlap; otherwise immediately.

    Raises ScheduleError if the orders deadlock.
    """
    spans = simulate(stages, orders, durations())
    tables = [lanes(stages, rank) for rank in range(stages.ranks)]
    sent = _sent(tables, spans)
    lists = []
    for rank in range(stages.ranks) if ranks is None else ranks:
        order = _with_reductions(orders[rank], stages, rank, reductions)
        receives = _receives(rank, tables[rank], spans[rank], sent)
        lists.append(list(_with_messages(rank, order, tables[rank], receives, overlap=overlap)))
    return lists


Table = Mapping[tuple[Kind, int], Lanes]
"""Lanes of a rank, by kind and chunk."""
Sent = Mapping[int, Mapping[int, Sequence[tuple[int, int, float]]]]
"""Messages by receiver and sender: lane, micro-batch and time, in order."""


def _sent(tables: Sequence[Table], spans: Sequence[Sequence[Span]]) -> Sent:
    sent: dict[int, dict[int, list[tuple[int, int, float]]]] = {rank: {} for rank in range(len(tables))}
    for rank, own in enumerate(spans):
        for (kind, micro_batch, chunk, _), _, end in own:
            _, gives, taker = tables[rank][kind, chunk]
            if gives is not None and taker is not None and taker != rank:
                sent[taker].setdefault(rank, []).append((gives, micro_batch, end))
    return sent


def _receives(rank: int, table: Table, spans: Sequence[Span], sent: Sent) -> dict[int, list[Action]]:
    """Return the receives of a rank, by the index of the computation before which they are posted."""
    users: dict[tuple[int, int], int] = {}
    for index, (action, _, _) in enumerate(spans):
        needs = table[action.kind, action.chunk].needs
        if needs is not None:
            users[needs, action.micro_batch] = index
    ends = [end for _, _, end in spans]
    receives: dict[int, list[Action]] = defaultdict(list)
    for peer, messages in sorted(sent[rank].items()):
        latest = len(spans)
        for lane, micro_batch, sent_at in reversed(messages):
            index = users[lane, micro_batch]
            action = spans[index].action
            # Post before the first computation of this rank that ends at or after the send (the receive must be posted
            # before the send), at least one computation before the message is used, and no later than the receive of
            # the sender's next message: receives from one peer are in the order of its sends.
            latest = max(min(latest, index - 1, bisect_left(ends, sent_at)), 0)
            receives[latest].insert(0, Action(_RECEIVE[action.kind], micro_batch, action.chunk, peer))
    return receives


def _with_messages(
    rank: int, order: Iterable[Action], table: Table, receives: Mapping[int, Sequence[Action]], *, overlap: bool
) -> Iterator[Action]:
    """Yield the order with its messages. With `overlap`, a send is over one computation later, else at once."""
    on_their_way: list[Action] = []
    computations = 0
    for action in order:
        kind, micro_batch, chunk, _ = action
        if kind == "R":
            yield action
            continue
        if computations in receives:
            yield from receives[computations]
        computations += 1
        yield action
        arrived, on_their_way = on_their_way, []
        peer = table[kind, chunk].taker
        if peer is not None and peer != rank:
            yield Action(_SEND[kind], micro_batch, chunk, peer)
            (on_their_way if overlap else arrived).append(Action(_FREE[kind], micro_batch, chunk, peer))
        yield from arrived
    yield from on_their_way


def _with_reductions(
    order: Sequence[Action], stages: Stages, rank: int, reductions: Reductions | None
) -> Iterator[Action]:
    """Insert each R after the action that completes its gradients: a full backward (B), or its weight half (W)."""
    if reductions is None:
        yield from order
        return
    last = {action.chunk: index for index, action in enumerate(order) if action.kind in ("B", "W")}
    delay = 0  # counted in actions B and W
    if not reductions.per_micro_batch:
        if not reductions.overlap:
            delay = len(order)
        elif reductions.align_ranks and stages.chunks > 1 and not stages.v_shaped:
            delay = rank
    waiting: list[tuple[int, Action]] = []  # (number of backwards before it, reduction)
    backwards = 0
    for index, action in enumerate(order):
        yield action
        if action.kind in ("B", "W"):
            backwards += 1
            if reductions.per_micro_batch or last[action.chunk] == index:
                waiting.append((backwards + delay, Action("R", action.micro_batch, action.chunk)))
            while waiting and waiting[0][0] <= backwards:
                yield waiting.pop(0)[1]
    yield from (reduction for _, reduction in waiting)
