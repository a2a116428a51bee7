"""The monitor of all ranks: fake ranks that speak to a real one over real sockets."""

from __future__ import annotations

import math
import random
import re
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megalite.errors import CommunicationError
from megalite.mailbox import Mailbox
from megalite.process.place import Place
from megalite.watchdog import monitor as monitor_file
from megalite.watchdog import sections as sections_file
from megalite.watchdog import watchdog as watchdog_file
from megalite.watchdog.hang_dump import RankDump
from megalite.watchdog.link import MONITOR, RANK, Link, LinkLost, Message, Peer, connect
from megalite.watchdog.monitor import Monitor
from megalite.watchdog.secret import Secret
from megalite.watchdog.sections import MEETING, Limits, Sections
from megalite.watchdog.watchdog import Watchdog

pytestmark = pytest.mark.costly

HERE, ELSEWHERE = "here", "elsewhere"
SECRET = b"what only the ranks know"
LATE = {"overdue": ["optimizer", 61.0, 60.0]}
SECONDS = 60.0
"""Time after which a test assumes that nothing comes."""


def peer_of(rank: int, space: str = HERE, section: str = "") -> Peer:
    """Return a rank's own description of itself."""
    return Peer(rank, f"n{rank}", 1000 + rank, 5000 + rank, space, section)


class FakeRank:
    """Rank's end of its connection to the monitor."""

    def __init__(self, monitor: Monitor, rank: int, space: str = HERE, section: str = "") -> None:
        self.rank = rank
        self.link = connect(*monitor.address, SECRET, SECONDS)
        self.link.send(**asdict(peer_of(rank, space, section)))
        self._unread: list[Message] = []
        self.heard: list[str] = []
        """Keys of all messages that were waited for or skipped."""

    def wait_for(self, key: str) -> Any:
        """Return the value of the next message with the key; earlier messages are skipped."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            while self._unread:
                message = self._unread.pop(0)
                self.heard += message
                if key in message:
                    return message if key == "end" else message[key]
            if select.select([self.link], [], [], 0.1)[0]:
                self._unread += self.link.receive()
        raise AssertionError(f"rank {self.rank} has heard nothing of {key!r}")

    def asked(self) -> bool:
        """Tell if the monitor has requested a dump."""
        while select.select([self.link], [], [], 0.0)[0]:
            self._unread += self.link.receive()
        return any("dump" in message for message in self._unread)

    def answer(self) -> None:
        """Answer the monitor's request."""
        assert self.wait_for("dump")
        self.link.send(dump=asdict(RankDump(self.rank, 4)))

    def dies(self) -> None:
        self.link.close()


class Watch:
    """Monitor, its reports, and its ranks."""

    def __init__(
        self,
        spaces: tuple[str, ...] = (HERE,) * 3,
        missing: int = 0,
        folder: Path | None = None,
        section: str = "",
        limits: Limits = Limits(),  # noqa: B008  # frozen
    ) -> None:
        self.reported: list[tuple[str, int]] = []
        place = Place(0, 0, len(spaces) + missing)
        self.monitor = Monitor(peer_of(0), place, Secret(SECRET), limits, self._report, folder)
        self.monitor.start()
        self.ranks = [FakeRank(self.monitor, rank, space, section) for rank, space in enumerate(spaces)]
        for rank in self.ranks:
            rank.wait_for("first")

    def _report(self, message: str, code: int) -> int:
        self.reported.append((message, code))
        return code

    @property
    def message(self) -> str:
        ((message, code),) = self.reported
        assert code == 85
        return message


Begin = Callable[..., Watch]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Begin a watch whose ranks have only a second for an answer."""
    monkeypatch.setattr(monitor_file, "ANSWER_SECONDS", 1.0)
    with ExitStack() as stack:

        def begin(*arguments: Any, **named: Any) -> Watch:
            begun = Watch(*arguments, **named)
            stack.callback(begun.monitor.close)
            return begun

        yield begin


def test_a_rank_that_dies_is_named_with_its_place_and_all_others_end(watch: Begin) -> None:
    watched = watch()
    first, second, third = watched.ranks
    second.link.send(section="optimizer", step=7)
    second.dies()
    for rank in (first, third):
        assert rank.wait_for("end") == {"end": 85, "at_once": False, "kill": []}
    said = r'rank 1 \(process 1001 on n1\) has ended without a message, last seen in step 7, "optimizer", '
    assert re.match(said + r"[\d.]+ s before: ", watched.message)


def test_a_death_is_told_with_the_age_of_what_is_known(watch: Begin) -> None:
    watched = watch()
    watched.ranks[1].link.send(section="optimizer", step=7)
    watched.ranks[2].link.send(section="step", step=8)
    time.sleep(0.6)
    watched.ranks[2].link.send(dump=asdict(RankDump(2, 4)))  # it is alive, and sends nothing about its place
    for rank in watched.ranks[1:]:
        rank.dies()
    watched.ranks[0].wait_for("end")
    places = r'in step 7, "optimizer" \(rank 1\), ([\d.]+) s before, in step 8, "step" \(rank 2\), ([\d.]+) s before: '
    ages = re.search(f"have ended without a message, last seen {places}", watched.message)
    assert ages is not None, watched.message
    assert all(0.6 <= float(age) < 5.0 for age in ages.groups())


def test_an_alarm_is_told_with_the_place_that_came_with_it(watch: Begin) -> None:
    watched = watch((HERE, HERE))
    watched.ranks[1].link.send(**LATE, section="optimizer", step=3)
    for rank in watched.ranks:
        rank.answer()
    watched.ranks[0].wait_for("end")
    assert watched.message.startswith('step 3 hangs: rank 1 (process 1001 on n1) has been in "optimizer"')


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Limits under which half a second of silence is too long."""
    monkeypatch.setattr(sections_file, "LEAST_SILENCE", 0.5)
    monkeypatch.setattr(monitor_file, "WARNING_SECONDS", 0.2)
    return Limits(least=0.5, unlearnt=0.5)


def test_a_rank_without_a_sign_of_life_is_named_whatever_it_was_doing(
    watch: Begin, impatient: Limits, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = watch((HERE, HERE), section=MEETING, limits=impatient)
    first, second = watched.ranks
    deadline = time.monotonic() + SECONDS
    while not watched.reported:
        first.link.send(section=MEETING, step=0)
        if first.asked():
            first.answer()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert first.wait_for("end")["kill"] == [asdict(peer_of(1, section=MEETING))]
    assert watched.message.startswith("the run hangs: at least one rank has given no sign of life for ")
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "rank 1 (" in line]
    assert warning.startswith("warning: rank 1 (process 1001 on n1) has given no sign of life for ")
    assert "rank 1 (process 1001 on n1) has not answered for " in watched.message
    second.dies()


def test_a_rank_that_gives_a_sign_of_life_in_time_ends_nothing(watch: Begin, impatient: Limits) -> None:
    watched = watch((HERE, HERE), limits=impatient)
    watched.ranks[0].wait_for("dump")  # rank 1, or both, are missed
    for rank in watched.ranks:
        rank.link.send(dump=asdict(RankDump(rank.rank, 4)))
    for _ in range(20):
        for rank in watched.ranks:
            rank.link.send(section="step", step=1)
        time.sleep(0.05)
    assert not watched.reported


def test_the_start_of_a_run_may_keep_other_threads_from_running() -> None:
    limits = Limits(least=20.0, unlearnt=60.0)
    assert [limits.silence(name) for name in ("start", "step", "", "save")] == [60.0, 20.0, 20.0, 60.0]
    assert Limits(least=1.0).silence("step") == sections_file.LEAST_SILENCE
    again = replace(limits, starts_again=True)
    assert [again.silence(name) for name in ("meeting", "start", "step", "save")] == [20.0, 20.0, 20.0, 60.0]


def test_nobody_was_silent_while_the_monitor_itself_was_suspended(
    watch: Begin, impatient: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock goes on by a minute while it waits for messages, and the ranks speak just behind that."""
    watched = watch((HERE, HERE), limits=replace(impatient, least=30.0, unlearnt=30.0))
    watched.ranks[0].wait_for("first")
    offset = 0.0
    monkeypatch.setattr(monitor_file, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + offset))
    select = watched.monitor._selector.select

    def suspended(timeout: float) -> Any:
        nonlocal offset
        found = select(timeout)
        offset += 60.0 * (offset == 0.0)
        return found

    monkeypatch.setattr(watched.monitor._selector, "select", suspended)
    deadline = time.monotonic() + SECONDS
    while offset == 0.0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for rank in watched.ranks:
        rank.wait_for("first")
        assert not rank.asked()


def test_one_rank_of_each_node_is_to_speak_where_rank_0_is_lost(watch: Begin) -> None:
    watched = watch((HERE, HERE, ELSEWHERE, HERE, ELSEWHERE))

    def speak() -> list[bool]:
        for rank in watched.ranks:
            rank.wait_for("first")
        return [rank.wait_for("speaks") for rank in watched.ranks]

    deadline = time.monotonic() + SECONDS
    while speak() != [False, True, True, False, False]:
        assert time.monotonic() < deadline


def test_who_comes_later_and_is_lower_is_to_speak_at_once(watch: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_file, "_PING_SECONDS", math.inf)
    watched = watch((HERE,), missing=2)
    third = FakeRank(watched.monitor, 2)
    assert third.wait_for("speaks") is True
    second = FakeRank(watched.monitor, 1)
    assert (second.wait_for("speaks"), third.wait_for("speaks")) == (True, False)


def test_who_comes_when_the_run_is_ending_ends_too(watch: Begin) -> None:
    watched = watch((HERE, HERE), missing=1)
    watched.ranks[1].dies()
    watched.ranks[0].wait_for("end")
    assert FakeRank(watched.monitor, 2).wait_for("end")["end"] == 85


def test_who_has_not_come_is_not_missed_while_the_ranks_meet(
    watch: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor_file, "_COMING_SECONDS", 0.3)
    watched = watch((HERE, HERE), missing=1, section=MEETING)
    time.sleep(0.8)
    assert capfd.readouterr().err == ""
    watched.ranks[0].link.send(section="start", step=0)
    deadline, said = time.monotonic() + SECONDS, ""
    while "rank 2:" not in said:
        said += capfd.readouterr().err
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


def test_ranks_that_die_together_are_named_together(watch: Begin) -> None:
    watched = watch((HERE,) * 5)
    for rank in watched.ranks[2:4]:
        rank.dies()
    watched.ranks[0].wait_for("end")
    assert "rank 2 (process 1002 on n2), rank 3 (process 1003 on n3) have ended without a message" in watched.message


def test_a_rank_that_says_why_it_fails_speaks_for_itself(watch: Begin) -> None:
    watched = watch()
    watched.ranks[1].link.send(fails=64)
    watched.ranks[1].dies()
    assert watched.ranks[2].wait_for("end")["end"] == 64
    assert watched.reported == []


def test_ranks_that_a_launcher_ends_do_not_hide_the_one_that_died(watch: Begin) -> None:
    watched = watch()
    watched.ranks[1].dies()
    for rank in (watched.ranks[2], watched.ranks[0]):
        rank.link.send(fails=85)
    watched.monitor.settle()  # rank 0 ends no sooner
    assert watched.message.startswith("rank 1 (process 1001 on n1) has ended without a message")


def test_the_failure_of_rank_0_is_told_before_it_takes_the_monitor_along(watch: Begin) -> None:
    watched = watch()
    watched.ranks[0].link.send(fails=70)
    for rank in watched.ranks[1:]:
        assert rank.wait_for("first_fails") == 70


def test_all_learn_where_rank_0_is(watch: Begin) -> None:
    watched = watch()
    watched.ranks[0].link.send(section="save", step=3)
    while (first := watched.ranks[2].wait_for("first"))["step"] != 3:
        pass
    assert first["section"] == "save"


def test_a_rank_that_gives_no_answer_is_named_and_killed_by_one_beside_it(watch: Begin, tmp_path: Path) -> None:
    watched = watch((HERE, ELSEWHERE, ELSEWHERE, ELSEWHERE), folder=tmp_path)
    first, second, silent, fourth = watched.ranks
    silent.link.send(section="step", step=9)
    fourth.link.send(section="optimizer", step=10)
    fourth.link.send(**LATE)
    for rank in (first, second, fourth):
        rank.answer()
    assert [rank.wait_for("end")["kill"] for rank in (first, fourth)] == [[], []]
    victim = asdict(peer_of(2, ELSEWHERE, "step")) | {"step": 9}
    assert second.wait_for("end")["kill"] == [victim]
    assert 'step 10 hangs: rank 3 (process 1003 on n3) has been in "optimizer" for 61 s' in watched.message
    assert re.search(r"rank 2 \(process 1002 on n2\) has not answered for \d+ s: .* in step 9", watched.message)
    assert "rank 1 " not in watched.message
    assert str(tmp_path) in watched.message


def test_nobody_is_asked_to_kill_a_process_of_another_machine(watch: Begin) -> None:
    watched = watch((HERE, ELSEWHERE))
    watched.ranks[0].link.send(**LATE)
    watched.ranks[0].answer()
    end = watched.ranks[0].wait_for("end")
    assert (end["kill"], end["at_once"]) == ([], True)
    assert "rank 1 (process 1001 on n1) has not answered" in watched.message


def test_a_hang_in_which_all_answer_is_told_once(watch: Begin) -> None:
    watched = watch()
    for rank in watched.ranks:
        rank.link.send(**LATE)
    for rank in watched.ranks:
        rank.answer()
    for rank in watched.ranks:
        assert rank.wait_for("end")["kill"] == []
    assert "does not answer" not in watched.message


def test_a_lost_connection_leads_to_the_rank_that_never_came(watch: Begin) -> None:
    watched = watch((HERE, HERE), missing=1)
    watched.ranks[1].link.send(lost="a collective failed: reset by peer")
    for rank in watched.ranks:
        rank.answer()
    watched.ranks[0].wait_for("end")
    assert "rank 1 (process 1001 on n1), in step 0: a collective failed" in watched.message
    assert "rank 2 never connected to rank 0's watchdog" in watched.message


def test_who_dies_while_the_others_are_asked_is_the_one(watch: Begin) -> None:
    watched = watch()
    watched.ranks[0].link.send(lost="a collective failed: reset by peer")
    watched.ranks[2].dies()
    watched.ranks[0].wait_for("end")
    assert watched.message.startswith("rank 2 (process 1002 on n2) has ended without a message")


def test_nobody_is_asked_what_it_is_in_where_a_rank_has_died(watch: Begin) -> None:
    """Otherwise dumps of a hang would be left although there was none."""
    watched = watch()
    watched.ranks[2].dies()
    watched.ranks[0].link.send(lost="a collective failed: reset by peer")
    watched.ranks[1].wait_for("end")
    assert "dump" not in watched.ranks[1].heard


def test_of_more_answers_than_can_be_read_in_time_the_number_is_told(
    watch: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, sent = Event(), Event()

    def slowly(values: dict[str, Any]) -> RankDump:
        reads.set()
        assert sent.wait(SECONDS)
        time.sleep(0.5)
        return RankDump.of(values)

    monkeypatch.setattr(monitor_file, "RankDump", SimpleNamespace(of=slowly))
    watched = watch((HERE,) * 8)
    watched.ranks[1].link.send(**LATE)
    watched.ranks[0].answer()
    assert reads.wait(SECONDS)
    for rank in watched.ranks[1:-1]:  # while the first answer is read, so that all of these are there at once
        rank.answer()
    sent.set()
    assert watched.ranks[0].wait_for("end")
    assert re.search(r"the answers of \d of 8 ranks could not be read in time", watched.message)
    assert "rank 7 (process 1007 on n7) has not answered" in watched.message
    assert watched.message.count("has not answered") == 1


def test_ranks_that_leave_are_not_missed(watch: Begin) -> None:
    watched = watch()
    for rank in watched.ranks[1:]:
        rank.link.send(**LATE)  # it was late, and came to its end after all
        rank.link.send(bye=True)
        with pytest.raises(LinkLost):
            rank.wait_for("end")
    watched.ranks[0].link.send(section="save", step=2)
    while watched.ranks[0].wait_for("first")["step"] != 2:
        pass
    watched.monitor.close()
    assert watched.ranks[0].wait_for("bye")
    assert watched.reported == []


def strange(watched: Watch) -> socket.socket:
    """Return a connection of a stranger."""
    return socket.create_connection(watched.monitor.address, timeout=SECONDS)


def is_hung_up_on(stranger: socket.socket) -> bool:
    """Tell whether the monitor ends the connection; before that it sends only its random digits and its proof."""
    with suppress(ConnectionResetError):
        while said := stranger.recv(1000):
            assert re.fullmatch(rb"([0-9a-f]{64}( \{\})?\n)+", said)
    return True


def test_strangers_disturb_nobody(watch: Begin) -> None:
    """A single line of a stranger once ended the monitor; at the next hang, rank 0 killed itself."""
    watched = watch()
    draw = random.Random(1)
    digits = b"0" * 64 + b"\n"
    lines = (
        *(
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"token":"\\ud800"}\n',
            b'{"token": 3}\n',
            b"[" * 999 + b"\n",
            b"\xff\xfe\n",
            b"\n",
        ),
        *(digits + garbage for garbage in (b"{}\n", digits, b"0" * 64 + b" {}\n", b"\xed\xa0\x80 {}\n", b"x" * 2000)),
        *(draw.randbytes(draw.randrange(1, 500)) + b"\n" for _ in range(100)),
    )
    for line in lines:
        with strange(watched) as stranger:
            stranger.sendall(line)
            assert is_hung_up_on(stranger), line
    with strange(watched), strange(watched) as mute:
        mute.sendall(b"x" * 500)
        watched.ranks[1].link.send(section="save", step=2)
        watched.ranks[1].dies()
        assert watched.ranks[2].wait_for("end")["end"] == 85
        assert 'last seen in step 2, "save"' in watched.message


SENSELESS: tuple[dict[str, Any], ...] = (
    {"section": 3, "step": 1},
    {"section": "save"},
    {"section": "save", "step": -1},
    {"section": "save", "step": 10**19},
    {"section": "x" * 5000, "step": 1},
    {"fails": "85"},
    {"fails": None},
    {"fails": 256},
    {"section": "save\x1b[2J", "step": 1},
    {"dump": 7},
    {"dump": {"rank": 0}},
    {"dump": {"stacks": 5}},
    {"dump": {"flight_recorder": {"waiting": True, "groups": [{}]}}},
    {"overdue": ["step"]},
    {"overdue": ["step", {}, "soon"]},
    {"overdue": 5},
)


def test_ranks_that_make_no_sense_are_as_good_as_dead(watch: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_file, "_TOGETHER_SECONDS", math.inf)
    watched = watch((HERE,) * (1 + len(SENSELESS)))
    for rank, message in zip(watched.ranks[1:], SENSELESS, strict=True):
        if isinstance(dump := message.get("dump"), dict):
            message = {"dump": asdict(RankDump(rank.rank, 4)) | dump}
        rank.link.send(**message)
    deadline = time.monotonic() + SECONDS
    while len(watched.monitor._lost) < len(SENSELESS):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr(monitor_file, "_TOGETHER_SECONDS", 0.0)
    assert watched.ranks[0].wait_for("end")["end"] == 85
    named = [int(rank) for rank in re.findall(r"rank (\d+) \(process", watched.message)]
    assert named == [*range(1, len(watched.ranks))]


def test_nothing_follows_a_leave(watch: Begin) -> None:
    watched = watch((HERE, HERE))
    rank = watched.ranks[1].link
    rank._connection.sendall(b"".join(rank._sealing.code(data) + b" " + data + b"\n" for data in (b'{"bye": 1}',) * 2))
    while 1 in watched.monitor._ranks:
        time.sleep(0.01)
    watched.ranks[0].link.send(section="save", step=3)
    while watched.ranks[0].wait_for("first")["step"] != 3:
        pass
    assert watched.reported == []


@pytest.mark.parametrize(
    "changed",
    [{"rank": 1}, {"rank": 3}, {"rank": -1}, {"rank": True}, {"process": 2**31}, {"host": 1}, {"start": "1"}],
    ids=str,
)
def test_who_is_no_rank_or_one_that_is_there_is_refused(changed: dict[str, Any], watch: Begin) -> None:
    watched = watch((HERE, HERE), missing=1)
    link = connect(*watched.monitor.address, SECRET, SECONDS)
    link.send(**asdict(peer_of(2)) | changed)
    with pytest.raises(LinkLost):
        link.receive()
    watched.ranks[1].link.send(section="save", step=2)
    watched.ranks[1].dies()
    watched.ranks[0].wait_for("end")
    assert 'last seen in step 2, "save"' in watched.message


def test_who_does_not_say_who_it_is_has_seconds_for_it(watch: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_file, "_GREETING_SECONDS", 0.3)
    watched = watch((HERE,))
    with strange(watched) as mute:
        assert is_hung_up_on(mute)


def test_of_many_strangers_the_first_have_to_go_and_ranks_still_come(
    watch: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_file, "_MOST_STRANGERS", 3)
    monkeypatch.setattr(monitor_file, "_GREETING_SECONDS", math.inf)
    watched = watch((HERE,), missing=1)
    with ExitStack() as stack:
        strangers = [stack.enter_context(strange(watched)) for _ in range(10)]
        strangers[0].settimeout(5.0)
        assert all(is_hung_up_on(stranger) for stranger in strangers[:6])
        assert FakeRank(watched.monitor, 1).wait_for("first")
        assert len(watched.monitor._strangers) <= 4


def test_a_rank_with_another_secret_is_a_stranger(watch: Begin) -> None:
    watched = watch()
    with pytest.raises(LinkLost):
        connect(*watched.monitor.address, b"another", SECONDS)
    assert watched.reported == []


def test_a_defect_in_the_conclusions_still_ends_the_run(
    watch: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor_file, "hang", lambda *_: 1 / 0)
    watched = watch((HERE, HERE))
    watched.ranks[1].link.send(**LATE)
    for rank in watched.ranks:
        rank.answer()
    assert [rank.wait_for("end")["end"] for rank in watched.ranks] == [85, 85]
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_file_with_the_secret_is_gone_once_all_have_come(watch: Begin, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch()
    watched = watch((HERE,), missing=1)
    watched.monitor.secret = Secret(SECRET, file)
    assert file.exists()
    FakeRank(watched.monitor, 1).wait_for("first")
    assert not file.exists()


def test_ranks_that_cannot_reach_the_monitor_are_told_of(
    watch: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor_file, "_COMING_SECONDS", 0.5)
    watched = watch((HERE,), missing=2)
    deadline, said = time.monotonic() + SECONDS, ""
    while "ranks 1, 2:" not in said:
        said += capfd.readouterr().err
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    assert f"port {watched.monitor.address[1]} of" in said


def test_ranks_without_the_secret_say_so_at_once_and_only_one_of_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEGALITE_SECRET", raising=False)
    store = HashStore()
    store.set("megalite/watchdog", f"1234 .megalite_secret_{'0' * 32}")
    for rank in (8, 9):
        with Watchdog(
            Sections(), Limits(), lambda *_: 0, Place(rank, rank - 8, 16, 8), mailbox=Mailbox(store, 16)
        ) as watchdog:
            assert not watchdog.linked
    said = capfd.readouterr().err
    assert said.count("have no secret in common") == 1
    assert "MEGALITE_SECRET" in said


@pytest.mark.parametrize(
    "message",
    [
        {"end": 85},
        {"end": 256, "at_once": True, "kill": []},
        {"first": {}},
        {"first": 7},
        {"end": 85, "at_once": True, "kill": [1]},
        {"first_fails": 256},
        {"first_fails": "70"},
        {"dump": "../../outside"},
        {"dump": "20261122T062148\n"},
        {"dump": 7},
    ],
    ids=str,
)
def test_a_monitor_that_makes_no_sense_does_not_end_a_ranks_thread_but_is_lost_to_it(
    message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor, rank = Link(ours, SECRET, MONITOR), Link(theirs, SECRET, RANK)
        monitor.receive()
        rank.receive()
        watchdog = Watchdog(Sections(), Limits(), lambda *_: 0, Place(1, 1, 2))
        watchdog._link = rank
        lost: list[bool] = []
        monkeypatch.setattr(watchdog, "_lose_first", lambda: lost.append(True))
        monkeypatch.setattr(watchdog, "_end", lambda *_, **__: None)
        monitor.send(**message)
        watchdog._read(SECONDS)
        assert lost == [True]


def test_a_communication_that_fails_while_rank_0_is_suspended_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_file, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(watchdog_file, "_TICK_SECONDS", 0.05)
    said: list[str] = []

    def report(store: object, message: str, code: int) -> int:
        said.append(message)
        return code

    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor, rank = Link(ours, SECRET, MONITOR), Link(theirs, SECRET, RANK)
        monitor.receive()
        rank.receive()
        watchdog = Watchdog(Sections(), Limits(), report, Place(1, 0, 2))
        watchdog._link = rank
        watchdog._take({"first": asdict(peer_of(0)), "speaks": True, "age": 0.0})
        monkeypatch.setattr(watchdog, "_end", lambda *_, **__: setattr(watchdog, "_leaving", True))
        watchdog._thread.start()
        monkeypatch.setattr(watchdog_file, "ignore_stop_signals", lambda: None)  # those of the tests are to end them
        watchdog._await_verdict(CommunicationError("a collective failed"))
    (message,) = said
    assert ": a collective failed" in message
    assert "rank 0 (process 1000 on n0) has not answered for " in message


def test_a_rank_that_a_launcher_ends_while_its_communication_fails_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal comes when it is no longer the loop's, and not yet ignored."""
    monkeypatch.setattr(watchdog_file, "ignore_stop_signals", lambda: sys.exit(85))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor, rank = Link(ours, SECRET, MONITOR), Link(theirs, SECRET, RANK)
        monitor.receive()
        rank.receive()
        watchdog = Watchdog(Sections(), Limits(), lambda *_: 0, Place(1, 1, 2))
        watchdog._link = rank
        with pytest.raises(SystemExit):
            watchdog.__exit__(CommunicationError, CommunicationError("a collective failed"), None)
        assert monitor.receive()[-1] == {"fails": 85}


@pytest.mark.parametrize("message", [{"first": {}}, {"first": 7}, {"first": asdict(peer_of(0))}], ids=str)
def test_a_rank_starts_though_the_monitor_makes_no_sense(
    message: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGALITE_SECRET", SECRET.decode() * 2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            monitor = Link(connection, SECRET * 2, MONITOR)
            while not monitor.receive():
                pass
            monitor.send(**message)

        speaker = Thread(target=speak)
        speaker.start()
        store = HashStore()
        store.set("megalite/watchdog", f"{server.getsockname()[1]} ")
        with Watchdog(Sections(), Limits(), lambda *_: 0, Place(1, 1, 2), mailbox=Mailbox(store, 16)) as watchdog:
            assert not watchdog.linked
        speaker.join()


def test_a_rank_that_is_requested_to_end_while_it_connects_is_not_told_as_dead(
    watch: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGALITE_SECRET", SECRET.decode() * 2)
    monkeypatch.setattr("tests.unit.test_watchdog_monitor.SECRET", SECRET * 2)
    begun = watch((HERE,) * 2, missing=2)
    store = HashStore()
    store.set("megalite/watchdog", f"{begun.monitor.address[1]} ")
    watchdog = Watchdog(Sections(), Limits(), lambda *_: 0, Place(2, 2, 4), mailbox=Mailbox(store, 16))

    def requested(message: Message) -> None:
        raise SystemExit(85)

    monkeypatch.setattr(watchdog, "_take", requested)
    with pytest.raises(SystemExit):
        watchdog.__enter__()
    begun.ranks[1].dies()
    assert begun.ranks[0].wait_for("end")["end"] == 85
    assert "rank 1 (" in begun.message
    assert "rank 2 (" not in begun.message
