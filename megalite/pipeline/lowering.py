"""From orders of computation to the full lists: sends and receives put in, and the reductions of gradients placed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megalite.pipeline.messages import Message, given, needed
from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.simulator import Span, durations, simulate
from megalite.pipeline.stages import Stages

_RECEIVE: dict[str, Kind] = {"F": "receive F", "B": "receive B"}
_SEND: dict[str, Kind] = {"F": "send F", "B": "send B"}
_FREE: dict[str, Kind] = {"F": "free F", "B": "free B"}


@dataclass(frozen=True)
class Reductions:
    """When a rank reduces its gradients over the data-parallel ranks."""

    each: bool = False
    """Behind every micro-batch (ZeRO 2 and 3), or once a step."""
    overlap: bool = False
    """Once a step: as soon as a chunk has all its gradients, or behind the whole list."""
    align: bool = False
    """Put off, on later ranks by more actions, so that all ranks reduce a chunk at about the same time. On a V, where
    chunks end in no such order, nothing is."""


def lower(
    stages: Stages,
    orders: Sequence[Sequence[Action]],
    reductions: Reductions | None = None,
    *,
    overlap: bool = True,
) -> list[list[Action]]:
    """Each rank's full list; without `reductions` gradients are not reduced.

    A send stands right behind the action that gives the message. Its receive is posted, in the order in which the
    sender sends, before the send starts: so no send waits for the receiver's program, however little a backend
    buffers. That holds on the time line of equal stages, hence in every order that the lists allow. It is posted one
    computation before its message is needed, or earlier. With `overlap` a send is waited for behind the next
    computation, so that it travels beside one; else at once.

    Raises ScheduleError where the orders wait for each other for ever.
    """
    spans = simulate(stages, orders, durations())
    sent = _sent(stages, spans)
    inboxes = [_receives(stages, rank, spans[rank], sent) for rank in range(stages.ranks)]
    return [
        list(
            _with_messages(
                stages, rank, _with_reductions(order, stages, rank, reductions), inboxes[rank], overlap=overlap
            )
        )
        for rank, order in enumerate(orders)
    ]


Edge = tuple[int, int]
"""The ranks that send and receive."""


def _sent(stages: Stages, spans: Sequence[Sequence[Span]]) -> dict[Edge, list[tuple[Message, float]]]:
    """What travels along each edge, in order, and when."""
    sent: dict[Edge, list[tuple[Message, float]]] = defaultdict(list)
    for rank, own in enumerate(spans):
        for span in own:
            message = given(stages, rank, span.action)
            if message is not None and (edge := message.route(stages)) != (rank, rank):
                sent[edge].append((message, span.end))
    return sent


def _receives(
    stages: Stages, rank: int, spans: Sequence[Span], sent: dict[Edge, list[tuple[Message, float]]]
) -> dict[int, list[Action]]:
    """The receives of a rank by the index of the computation before which they are posted."""
    user: dict[Message, tuple[int, Action]] = {}
    for index, span in enumerate(spans):
        message = needed(stages, rank, span.action)
        if message is not None:
            user[message] = index, span.action
    ends = [span.end for span in spans]
    receives: dict[int, list[Action]] = defaultdict(list)
    for peer in range(stages.ranks):
        latest = len(spans)
        for message, sent_at in reversed(sent.get((peer, rank), ())):
            index, action = user[message]
            # Posted before the first computation of this rank that ends no earlier than the message is sent.
            latest = max(min(latest, index - 1, bisect_left(ends, sent_at)), 0)
            receives[latest].insert(0, Action(_RECEIVE[message.kind], action.micro_batch, action.chunk, peer))
    return receives


def _with_messages(
    stages: Stages, rank: int, order: Iterable[Action], receives: dict[int, list[Action]], *, overlap: bool
) -> Iterator[Action]:
    on_their_way: list[Action] = []
    computations = 0
    for action in order:
        if action.kind == "R":
            yield action
            continue
        yield from receives.get(computations, ())
        computations += 1
        yield action
        arrived, on_their_way = on_their_way, []
        message = given(stages, rank, action)
        if message is not None and (peer := message.route(stages)[1]) != rank:
            way = message.kind
            yield Action(_SEND[way], action.micro_batch, action.chunk, peer)
            free = Action(_FREE[way], action.micro_batch, action.chunk, peer)
            (on_their_way if overlap else arrived).append(free)
        yield from arrived
    yield from on_their_way


def _with_reductions(
    order: Sequence[Action], stages: Stages, rank: int, reductions: Reductions | None
) -> Iterator[Action]:
    last = {action.chunk: index for index, action in enumerate(order) if action.kind in ("B", "W")}
    put_off: list[tuple[int, Action]] = []  # reductions, and behind how many more backwards each of them comes
    for index, action in enumerate(order):
        yield action
        if reductions is None or action.kind not in ("B", "W"):
            continue
        put_off = [(more - 1, reduction) for more, reduction in put_off]
        if reductions.each or last[action.chunk] == index:
            wait = len(order) if not (reductions.each or reductions.overlap) else 0
            if reductions.align and not reductions.each and stages.chunks > 1 and not stages.v_shaped:
                wait = max(wait, rank)
            put_off.append((wait, Action("R", action.micro_batch, action.chunk)))
        yield from (reduction for more, reduction in put_off if more <= 0)
        put_off = [(more, reduction) for more, reduction in put_off if more > 0]
    yield from (reduction for _, reduction in put_off)
