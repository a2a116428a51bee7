"""Board on which the agents of all nodes write: the store, reached by a process of each agent.

An agent has one thread, because it forks, and must never wait: a call of a store that hangs would keep it from ending
its ranks. So another process, forked by the agent, makes the calls. It also hosts the store, on rank 0's node, if the
launcher does not.
"""

from __future__ import annotations

import json
import select
import time
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.extras.recovery.lines import Lines, Message

if TYPE_CHECKING:
    from megalite.torch_internals import Store

_POLL_SECONDS = {"over": 0.1, "came": 0.01, "roster": 0.01, "finished": 0.05, "left": 0.02}
"""Seconds between looks at a notice, by the last part of its name."""


def serve(lines: Lines, store: Store) -> NoReturn:
    """Make an agent's calls of the store, until it ends. Raises Ended then, and RuntimeError if the store is lost."""
    watched: dict[str, tuple[int, float]] = {}
    poll = select.poll()
    poll.register(lines, select.POLLIN)
    lines.send({"ready": True})
    while True:
        wait = min((due for _, due in watched.values()), default=time.monotonic() + 60.0) - time.monotonic()
        if poll.poll(max(1000 * wait, 0)):
            for message in lines.receive():
                _obey(message, store, watched)
        for name, (seen, due) in list(watched.items()):
            if due <= time.monotonic():
                watched[name] = (_look(name, seen, store, lines), time.monotonic() + _POLL_SECONDS[kind(name)])


def kind(name: str) -> str:
    return name.rpartition("/")[2]


def _obey(message: Message, store: Store, watched: dict[str, tuple[int, float]]) -> None:
    if "forget" in message:
        for name in [name for name in watched if name.startswith(message["forget"])]:
            del watched[name]
    if "watch" in message:
        watched[message["watch"]] = (0, 0.0)
    if "add" in message:
        _add(message["add"], message["value"], store)
    if "first" in message:
        store.compare_set(f"{message['first']}/1", "", json.dumps(message["value"]))
        store.add(message["first"], 1)


def _add(name: str, value: Any, store: Store) -> None:
    """Add a notice to those of a name."""
    store.set(f"{name}/{store.add(f'{name} begun', 1)}", json.dumps(value))
    store.add(name, 1)


def _look(name: str, seen: int, store: Store, lines: Lines) -> int:
    """Pass on the notices of a name that are new. Returns the number of those that have been passed on."""
    if store.add(name, 0) > seen:  # the others are complete in a moment, in whichever order
        while store.check([f"{name}/{seen + 1}"]):
            seen += 1
            lines.send({"seen": name, "value": json.loads(store.get(f"{name}/{seen}"))})
    return seen
