"""Agent of a node, in this process, with processes of the launcher and a board that the test plays."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

import pytest

from megalite.extras.recovery import agent as agent_module
from megalite.extras.recovery import ranks as ranks_module
from megalite.extras.recovery.agent import Agent
from megalite.extras.recovery.decision import Decision
from megalite.extras.recovery.forks import Launched
from megalite.extras.recovery.generation import Generation
from megalite.extras.recovery.lines import Ended, Lines, Message
from megalite.extras.recovery.ranks import Ranks, last_word
from megalite.process.place import Place


class Board:
    """Board whose notices go no further than this list."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Message]] = []
        self._ours, self._theirs = socket.socketpair()
        self.lines = Lines(self._theirs)
        self.came: list[Message] = []
        self.generation = 0

    def fileno(self) -> int:
        return self._ours.fileno()

    def receive(self) -> list[Message]:
        self._ours.setblocking(False)
        if not self._ours.recv(100):
            raise Ended
        came, self.came = self.came, []
        return came

    def hear(self, *messages: Message) -> None:
        """Have the agent read messages of the process that calls the store."""
        self.came += messages
        self._theirs.send(b".")

    def end(self) -> None:
        """Have the process that calls the store end."""
        self._theirs.close()

    def begin(self) -> None:
        self.generation += 1

    def watch(self, *kinds: str) -> None:
        """Look for nothing."""

    def first(self, kind: str, value: Message) -> None:
        self.written.append((f"{self.generation}/{kind}", value))

    def add(self, kind: str, value: Any) -> None:
        self.written.append((f"{self.generation}/{kind}", value))

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Node:
    """Agent of a node, whose events the test lets it handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._name = f"\0megalite-test-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._name)
        listener.listen()
        self.agent, self.board = Agent(listener, os.getpid(), set()), Board()
        self._listener, self._opened = listener, list[Lines]()
        monkeypatch.setattr(agent_module, "Notices", lambda *_: self.board)
        self.forked: list[int] = []
        monkeypatch.setattr(Ranks, "fork", lambda ranks, _: self.forked.extend(ranks.by_number))

    def connect(self) -> Lines:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self._name)
        connection.settimeout(5.0)
        self._opened.append(Lines(connection))
        self.turn()
        return self._opened[-1]

    def join(self, rank: int, here: int = 1, world: int = 1, **environment: str) -> Lines:
        """Connect a process of the launcher."""
        lines = self.connect()
        assert lines.receive() == [{"welcome": True}]
        place = asdict(Place(rank, rank % here, world, here, "localhost", 1))
        hello = {
            "place": place,
            "save": "run",
            "copies": False,
            "spare_nodes": 0,
            "replica_ranks": 0,
            "replanning_seconds": 0.0,
            "meeting_seconds": 30.0,
            "environment": environment,
        }
        lines.send(hello)
        self.turn()
        return lines

    def turn(self) -> None:
        """Have the agent handle what has happened."""
        self.agent._events.turn(1.0)

    def time_out(self, name: str) -> None:
        """Have the agent do what it would when it has waited long enough for something."""
        self.agent._events.expire(name)

    @property
    def decision(self) -> Decision:
        assert self.agent._decision is not None
        return self.agent._decision

    def close(self) -> None:
        for lines in self._opened:
            lines.close()
        self.board.close()
        self._listener.close()
        os.close(self.agent._launcher)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(monkeypatch)
    yield made
    made.close()


def end_of(lines: Lines) -> Message:
    (message,) = [message for message in lines.receive() if "end" in message]
    return message


def meeting(node: Node, **options: Any) -> Lines:
    lines = node.join(0, **options)
    node.board.hear({"ready": True})
    node.turn()
    assert node.agent._state == "meeting"
    return lines


def began(node: Node) -> None:
    node.board.hear({"generation": node.board.generation, "kind": "roster", "value": {"begin": True}})
    node.turn()
    assert node.agent._state == "running"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([0, None, None], None),
        ([None, None, None], "3 generations ended before they began to train: generation 1: a; generation 2: b; "),
        ([5, 5, 5], "3 generations began after step 5 and failed: generation 1: a; generation 2: b; generation 3: c"),
        ([5, None, 5, 6], None),
        ([5, None, 5, None, 5], "generation 1: a; generation 3: c; generation 5: e"),
        ([5, 5, 6, 6], None),
    ],
    ids=str,
)
def test_generations_without_progress_end_the_run(steps: list[int | None], expected: str | None, node: Node) -> None:
    meeting(node)
    node.decision.history = list(zip(range(1, 6), steps, "abcdef", strict=False))
    decided = node.decision._decide()
    if expected is None:
        assert decided == {"begin": True}
    else:
        assert decided["end"] == 93
        assert expected in decided["error"]


def test_a_generation_that_never_began_has_no_step(node: Node) -> None:
    meeting(node)
    began(node)
    node.board.hear({"generation": 1, "kind": "over", "value": {"failed": "rank 0 died"}})
    node.turn()
    assert node.decision.history == [(1, None, "rank 0 died")]


def test_a_process_of_the_next_attempt_waits_while_ranks_of_the_last_one_end(node: Node) -> None:
    """torchrun has killed the launcher's processes, and the agent still ends the ranks."""
    lines = meeting(node)
    began(node)
    node.agent._ranks.by_number[0].process = 2**22 + 1  # none has this number
    lines.close()
    node.turn()
    with pytest.raises(Ended):
        node.connect().receive()


def test_a_store_that_hangs_does_not_keep_the_agent_from_ending(node: Node) -> None:
    """The ranks have ended, and nobody says why."""
    lines = meeting(node)
    began(node)
    node.agent._state = "ending"
    node.agent._end_generation()
    node.time_out("verdict")
    assert end_of(lines)["end"] == 85


def test_a_stop_signal_ends_a_run_whose_agent_still_connects(node: Node) -> None:
    lines = node.join(0)
    assert node.agent._state == "connecting"
    lines.send({"signal": int(signal.SIGTERM)})
    node.turn()
    assert end_of(lines)["end"] == 85


def test_a_store_that_is_ready_late_revives_no_run_that_has_ended(node: Node) -> None:
    lines = node.join(0)
    lines.send({"signal": int(signal.SIGTERM)})
    node.turn()
    node.board.hear({"ready": True})
    node.turn()
    assert node.agent._state == "left"
    assert node.board.written == []


def test_a_stop_between_the_decision_and_the_start_is_told_to_other_nodes(node: Node) -> None:
    lines = meeting(node, world=2)
    lines.send({"signal": int(signal.SIGTERM)})
    node.turn()
    node.board.hear({"generation": 1, "kind": "roster", "value": {"begin": True}})
    node.turn()
    assert ("1/over", {"end": 85}) in node.board.written
    assert node.forked == []


def test_a_stop_signal_ends_ranks_that_finish_their_step(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other generation will use what they compute, and a job that is preempted has little time."""
    killed: list[int] = []
    monkeypatch.setattr(Ranks, "kill", lambda _, rank: killed.append(rank.place.rank))
    monkeypatch.setattr(os, "kill", lambda *_: None)
    lines = meeting(node)
    began(node)
    node.agent._ranks.by_number[0].process = os.getpid()
    node.board.hear({"generation": 1, "kind": "over", "value": {"failed": "rank 1 died", "grace": 0.0, "ranks": [1]}})
    node.turn()
    assert (node.agent._state, killed) == ("ending", [])
    lines.send({"signal": int(signal.SIGTERM)})
    node.turn()
    assert killed == [0]
    node.agent._ranks.by_number[0].process = 0


def test_an_agent_that_leaves_keeps_its_exit_code_when_the_store_ends(node: Node) -> None:
    """The store may end with rank 0's agent, which leaves once it knows that the others do."""
    lines = node.join(1, world=2)
    node.board.hear({"ready": True})
    node.turn()
    began(node)
    node.board.hear({"generation": 1, "kind": "over", "value": {"end": 93}})
    node.turn()
    assert node.agent._state == "leaving"
    node.board.end()
    node.turn()
    assert end_of(lines) == {"end": 93, "error": None, "record": None}


def test_a_late_word_revives_no_node_that_has_given_itself_up(node: Node) -> None:
    node.join(1, world=2)
    node.board.hear({"ready": True})
    node.turn()
    began(node)
    node.agent._give_node_up({"end": 85, "error": "its launcher has ended"})
    node.time_out("leave")
    node.board.hear({"generation": 1, "kind": "over", "value": {"failed": "its launcher has ended", "lost": True}})
    node.turn()
    assert node.agent._state == "left"


def test_a_defect_of_the_agent_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = meeting(node)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Agent, "_forward", broken)
    lines.send({"signal": int(signal.SIGTERM)})
    node.agent.run()
    told = end_of(lines)
    assert told["end"] == 70
    assert "please report this\nTraceback" in told["error"]
    assert "ZeroDivisionError: planted" in told["error"]


@pytest.mark.parametrize(("code", "node"), [(85, None), (1, 3), (-9, 3)])
def test_a_rank_that_ends_because_of_another_does_not_make_its_node_sick(code: int, node: int | None) -> None:
    rank = Launched(lines=cast(Lines, None))
    assert last_word(rank, code, stopped=False, node=3)["node"] == node


def test_only_the_process_of_a_rank_speaks_in_its_name() -> None:
    reading, writing = os.pipe()
    mine = Generation(2, 1.0, None, writing, os.getpid())
    child = os.fork()
    if not child:
        mine.tell_end(85)
        os._exit(0)
    os.waitpid(child, 0)
    mine.tell_begun(4)
    assert os.read(reading, 100) == b"begun 4\n"
    assert Generation.of(mine.variables()) == mine
    os.close(reading)
    os.close(writing)


def test_a_rank_that_does_not_end_when_another_has_finished_is_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be suspended, and its watchdog has ended with the run."""
    node.join(0, here=2, world=2)
    node.join(1, here=2, world=2)
    node.board.hear({"ready": True})
    node.turn()
    began(node)
    first, second = node.agent._ranks.all
    first.told, second.process = 0, 2**22 + 1  # none has this number
    killed: list[int] = []
    monkeypatch.setattr(Ranks, "kill", lambda _, rank: killed.append(rank.process))
    suspended = set[int]()
    monkeypatch.setattr(ranks_module, "is_suspended", suspended.__contains__)
    node.agent._judge(first, 0)
    node.time_out("suspended")
    assert killed == []  # it may be busy, as rank 0 of a program of one's own that exports
    suspended.add(second.process)
    node.time_out("suspended")
    assert killed == [second.process]
    second.process = 0


def test_a_node_that_is_lost_is_no_lack_of_progress(node: Node) -> None:
    meeting(node)
    began(node)
    node.board.hear({"generation": 1, "kind": "over", "value": {"failed": "n1 is gone", "grace": 0.0, "lost": True}})
    node.turn()
    assert node.decision.history == []
    assert node.board.generation == 2


def test_a_node_whose_ranks_have_finished_waits_for_others(node: Node) -> None:
    """Ranks of another node may export for longer than a meeting may take."""
    lines = meeting(node, world=2)
    began(node)
    node.agent._ranks.by_number[0].told = 0
    node.agent._judge(node.agent._ranks.by_number[0], 0)
    node.agent._end_generation()
    assert not node.agent._events._timers
    assert lines.fileno() >= 0


def test_ranks_with_new_numbers_get_the_memory_of_their_node() -> None:
    ranks = object.__new__(Ranks)
    files = {rank: [os.memfd_create("a"), os.memfd_create("b")] for rank in (4, 5, 6)}
    ranks._memory = dict(files)
    ranks.keep_memory({6, 0, 1})
    assert ranks._memory == {6: files[6], 0: files[4], 1: files[5]}
    ranks.keep_memory({0})
    assert ranks._memory == {0: files[4]}
    for number in (*files[5], *files[6]):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    ranks.keep_memory(set())
