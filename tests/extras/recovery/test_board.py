"""Board of the agents: notices of other nodes, one of which ends in mid-notice, and how often many nodes look."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from megalite.extras.recovery import board
from megalite.extras.recovery.lines import Ended, Lines
from megalite.mailbox import Mailbox
from megalite.torch_internals import HashStore

Boards = Callable[..., Lines]


class CountingStore:
    """Store that counts how often it is asked whether something is there."""

    def __init__(self) -> None:
        self.store, self.looks = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return self.store.check(keys)


def serve(lines: Lines, mailbox: Mailbox, nodes: int) -> None:
    with suppress(Ended):
        board.serve(lines, mailbox, nodes)


@pytest.fixture
def boards() -> Iterator[Boards]:
    """Function that starts a board on a store, and returns its agent's end of the connection."""
    begun: list[tuple[Lines, socket.socket, threading.Thread]] = []

    def begin(store: Any, nodes: int = 2) -> Lines:
        ours, theirs = socket.socketpair()
        ours.settimeout(10.0)
        agent = Lines(ours)
        thread = threading.Thread(target=serve, args=(Lines(theirs), Mailbox(store, nodes), nodes))
        thread.start()
        begun.append((agent, ours, thread))
        assert agent.receive() == [{"ready": True}]
        return agent

    yield begin
    for agent, _, thread in begun:
        agent.close()
        thread.join(10.0)
        assert not thread.is_alive()


def test_a_node_that_ends_in_mid_notice_hides_no_other(boards: Boards) -> None:
    store = HashStore()
    Mailbox(store, 3).add("1/came", 1)  # what an agent does before it writes its notice
    first, other = boards(store), boards(store)
    first.send({"watch": "1/came"})
    for agent, ranks in ((first, [0, 1]), (other, [4, 5])):
        agent.send({"add": "1/came", "value": {"ranks": ranks}})
        assert first.receive() == [{"seen": "1/came", "value": {"ranks": ranks}}]
    Mailbox(store, 3).put("1/came/1", '{"ranks": [2, 3]}')  # it was only late
    assert first.receive() == [{"seen": "1/came", "value": {"ranks": [2, 3]}}]


def test_the_first_word_counts_for_all(boards: Boards) -> None:
    """Three agents speak at once, and one when the others have been told."""
    store = HashStore()
    agents = [boards(store) for _ in range(4)]

    def say(number: int) -> None:
        agents[number].send({"first": "1/over", "value": {"failed": f"rank {number}"}, "watch": "1/over"})

    for number in range(3):
        say(number)
    told = [agent.receive() for agent in agents[:3]]
    assert told[0][0]["value"]["failed"] in ("rank 0", "rank 1", "rank 2")
    say(3)
    assert [*told, agents[3].receive()] == [told[0]] * 4


@pytest.mark.parametrize(("nodes", "least", "most"), [(1, 20, 101), (1000, 1, 2)])
def test_many_nodes_look_less_often(nodes: int, least: int, most: int, boards: Boards) -> None:
    store = CountingStore()
    boards(store, nodes).send({"watch": "1/roster"})
    time.sleep(1.0)
    assert least <= store.looks <= most  # of one of the nodes, in a second
