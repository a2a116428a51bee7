"""Mailbox of the ranks: real stores and processes, a store that dies or stops, and texts of strangers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.errors import CommunicationError, RendezvousError
from megalite.mailbox import Mailbox
from megalite.small_files import parse_json
from megalite.torch_internals import HashStore, PrefixStore, Store, TCPStore
from tests.harness.fork_server import fork_context


def _serve(port: Connection, done: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    done.poll(60.0)


def _write(port: int, name: str, begin: Connection, said: Connection) -> None:
    mailbox = Mailbox(TCPStore("127.0.0.1", port, is_master=False), 8, 10.0)
    begin.poll(30.0)  # all at once
    said.send([mailbox.first(f"word {number}", name) for number in range(50)])


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Port and process number of a store in a process of its own."""
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=_serve, args=(theirs, theirs), daemon=True)
    process.start()
    assert ours.poll(60.0)
    assert process.pid is not None
    yield ours.recv(), process.pid
    process.kill()
    process.join()


def local(**options: Any) -> Mailbox:
    return Mailbox(HashStore(), 4, 5.0, "the store", **options)


def test_of_eight_writers_of_a_text_one_is_first_for_all(server: tuple[int, int]) -> None:
    context = fork_context()
    (here, begin), results = context.Pipe(), [context.Pipe() for _ in range(8)]
    for rank, (_, theirs) in enumerate(results):
        context.Process(target=_write, args=(server[0], f"of {rank}", begin, theirs), daemon=True).start()
    here.send("all of them see it: none reads it")
    assert all(ours.poll(60.0) for ours, _ in results)
    said = [ours.recv() for ours, _ in results]
    assert all(each == said[0] for each in said)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "^the store does not answer any more: rank 0, which runs it, ended without .*'a word'"),
        (
            signal.SIGSTOP,
            r"^the store does not answer: rank 0, which runs it, is suspended .*no word for 1 s, on 'a word'\)$",
        ),
    ],
)
def test_a_store_that_goes_while_a_rank_waits_is_an_error_in_time(
    number: signal.Signals, told: str, server: tuple[int, int]
) -> None:
    port, process = server
    mailbox = Mailbox(TCPStore("127.0.0.1", port, is_master=False), 2, 1.0, "the store", "rank 0", RendezvousError)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(mailbox.wait, ["a word"], 30.0)
        time.sleep(0.2)
        os.kill(process, number)
        try:
            with pytest.raises(RendezvousError, match=told):
                waiting.result(10.0)
        finally:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # ends a wait that has no limit


def test_a_text_is_waited_for_without_asking_again() -> None:
    store = HashStore()
    mailbox = Mailbox(SimpleNamespace(get=store.get, wait=store.wait), 2, 10.0)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(mailbox.get, "word", 10.0, "no word")
        time.sleep(0.1)
        store.set("word", "text")
        assert waiting.result(5.0) == "text"


def _look(port: int, said: Connection) -> None:
    mailbox = Mailbox(TCPStore("127.0.0.1", port, is_master=False), 2, 6.0)
    mailbox.put("word", "text")
    said.send("connected")
    said.poll(30.0)
    said.send(mailbox.look("word"))


@pytest.mark.wide
def test_a_request_outlasts_that_all_processes_are_suspended_together(server: tuple[int, int]) -> None:
    ours, theirs = fork_context().Pipe()
    client = fork_context().Process(target=_look, args=(server[0], theirs), daemon=True)
    client.start()
    assert ours.poll(60.0)
    assert client.pid is not None
    assert ours.recv() == "connected"
    os.kill(server[1], signal.SIGSTOP)
    ours.send("ask")
    time.sleep(0.2)
    os.kill(client.pid, signal.SIGSTOP)
    time.sleep(6.1)
    os.kill(client.pid, signal.SIGCONT)
    time.sleep(0.05)
    os.kill(server[1], signal.SIGCONT)
    assert ours.poll(10.0)
    assert ours.recv() == "text"


def test_what_does_not_come_is_told_with_the_time() -> None:
    with pytest.raises(CommunicationError, match=r"^rank 0 is silent, for 0 s, at the store$"):
        local().get("a word", 0.1, "rank 0 is silent")


@pytest.mark.parametrize("over_tcp", [False, True])
def test_ranks_that_are_missing_are_known_and_the_others_answers_are_there(over_tcp: bool) -> None:
    store: Store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if over_tcp else HashStore()
    mailbox = Mailbox(store, 4)
    for rank in (0, 3, 7):
        mailbox.put(f"answer/{rank}", f"of {rank}")
    assert not mailbox.wait(["answer/0", "answer/3", "answer/4"], 0.0)
    assert mailbox.wait(["answer/0", "answer/3"], 0.0)
    assert mailbox.gather("answer", [], 0.0) == {}
    assert mailbox.gather("answer", range(5), 0.05, lambda: False) == {0: "of 0", 3: "of 3"}
    assert mailbox.gather("answer", [3, 7], 60.0, lambda: False) == {3: "of 3", 7: "of 7"}
    assert mailbox.gather("answer", [1], 60.0, lambda: True) == {}


def test_two_runs_in_one_store_do_not_read_each_other() -> None:
    store = HashStore()
    first, second = (Mailbox(PrefixStore(f"run/{attempt}", store), 2) for attempt in (0, 1))
    first.put("word", "of the first")
    assert second.look("word") is None
    assert first.at_root("failure/0/").first("word", "failed") == "failed"
    assert second.at_root("failure/0/").look("word") == "failed"
    assert second.at_root("failure/1/").look("word") is None
    first.delete("word")
    assert first.look("word") is None


def test_a_number_is_the_sum_of_what_was_added_and_a_text_may_replace_another() -> None:
    mailbox = local()
    assert [mailbox.add("beats", 1), mailbox.add("beats", 0)] == [1, 1]
    assert [mailbox.first("lowest", "5"), mailbox.first("lowest", "7")] == ["5", "5"]
    assert [mailbox.first("lowest", "2", instead_of="5"), mailbox.first("lowest", "3", instead_of="5")] == ["2", "2"]


@pytest.mark.parametrize("written", [b"", b"\xff", b"[" * 100_000, b"9" * 6000, b"cos\nsystem\n(S'true'\ntR."])
def test_texts_of_strangers_are_refused(written: bytes) -> None:
    mailbox = local()
    mailbox.store.set("roll", written)  # type: ignore[arg-type]
    told = "^something that is not a rank has written to the store: roll is ['\"]"
    with pytest.raises(CommunicationError, match=told) as error:
        mailbox.parsed("roll", mailbox.look("roll") or "", parse_json)
    assert len(str(error.value)) < 320


def test_requests_share_a_thread_that_ends_with_the_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), start(thread))[1])
    mailbox = local()
    assert not begun
    for number in range(20):
        mailbox.put(f"{number}", "text")
    at_root = mailbox.at_root("elsewhere/")
    assert at_root.look("0") is None
    (thread,) = begun
    assert thread.is_alive()
    assert thread.daemon
    del mailbox, at_root
    thread.join(10.0)
    assert not thread.is_alive()
