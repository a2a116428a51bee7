"""Board on which the agents of all nodes write: a mailbox, used by a process of each agent.

An agent has one thread, because it forks, and must never wait: a call of a store that hangs would keep it from ending
its ranks. So another process, forked by the agent, makes the calls. It also hosts the store, on rank 0's node, if the
launcher does not.

Notices of a name have the keys `NAME/1`, `NAME/2` and so on, and their number is under `NAME`. An agent that ends in
between never writes the notice that it has counted. Of some names only the first notice counts, and nothing is counted.
"""

from __future__ import annotations

import json
import select
import time
from typing import TYPE_CHECKING, NoReturn

from megalite.extras.recovery.lines import Lines, Message
from megalite.small_files import parse_json

if TYPE_CHECKING:
    from megalite.mailbox import Mailbox

_FIRST_COUNTS = ("over", "roster")
_POLL_SECONDS = {"over": 0.1, "came": 0.01, "roster": 0.01, "finished": 0.05, "left": 0.02}
"""Least number of seconds between looks at a notice, by the last part of its name."""
_POLL_SECONDS_A_NODE = 1e-3  # all nodes together look at a notice at most 1,000 times a second


def serve(lines: Lines, mailbox: Mailbox, nodes: int) -> NoReturn:
    """Make an agent's calls of the store, until it ends. Raises Ended then, and CommunicationError if the store is
    lost."""
    watched: dict[str, tuple[set[int], float]] = {}
    poll = select.poll()
    poll.register(lines, select.POLLIN)
    lines.send({"ready": True})
    while True:
        wait = min((due for _, due in watched.values()), default=time.monotonic() + 60.0) - time.monotonic()
        if poll.poll(max(1000 * wait, 0)):
            for message in lines.receive():
                _obey(message, mailbox, watched)
        for name, (seen, due) in list(watched.items()):
            if due <= time.monotonic():
                _look(name, seen, mailbox, lines)
                pause = max(_POLL_SECONDS[kind(name)], nodes * _POLL_SECONDS_A_NODE)
                watched[name] = seen, time.monotonic() + pause


def kind(name: str) -> str:
    return name.rpartition("/")[2]


def _obey(message: Message, mailbox: Mailbox, watched: dict[str, tuple[set[int], float]]) -> None:
    if "forget" in message:
        for name in [name for name in watched if name.startswith(message["forget"])]:
            del watched[name]
    if "watch" in message:
        watched[message["watch"]] = set(), 0.0
    if "add" in message:
        mailbox.put(f"{message['add']}/{mailbox.add(message['add'], 1)}", json.dumps(message["value"]))
    if "first" in message:
        mailbox.first(f"{message['first']}/1", json.dumps(message["value"]))


def _look(name: str, seen: set[int], mailbox: Mailbox, lines: Lines) -> None:
    """Pass on the notices of a name that are new, and add their numbers to those that were seen."""
    last = 1 if kind(name) in _FIRST_COUNTS else mailbox.add(name, 0)
    for number in sorted(set(range(1, last + 1)) - seen):
        if (text := mailbox.look(f"{name}/{number}")) is not None:
            seen.add(number)
            lines.send({"seen": name, "value": parse_json(text)})
