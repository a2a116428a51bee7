"""Connections between ranks' watchdogs and the monitor."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import itemgetter
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.watchdog import link
from megalite.watchdog.link import MONITOR, RANK, Link, LinkLost, Message

SECRET = b"what only the ranks know"


class Other:
    """Bare socket at the other end of a link, with what a peer there writes that has the right secret, or a wrong
    one."""

    def __init__(self, connection: socket.socket, secret: bytes = SECRET) -> None:
        self.connection, self.lines = connection, 0
        digits = b"0" * 64
        theirs = connection.recv(65)[:64]
        self.key = hmac.digest(secret, MONITOR + b" " + digits + b" " + theirs, "sha256")
        connection.sendall(digits + b"\n")

    def line(self, data: bytes, number: int | None = None) -> bytes:
        """Return a line with its code."""
        self.lines = self.lines + 1 if number is None else number
        return hmac.digest(self.key, b"%d %s" % (self.lines, data), "sha256").hex().encode() + b" " + data + b"\n"

    def send(self, data: bytes) -> None:
        self.connection.sendall(self.line(data))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def ends(sockets: tuple[socket.socket, socket.socket]) -> tuple[Link, Other]:
    """Return a rank's link to a monitor that has proved its identity, and the other end."""
    end = Link(sockets[0], SECRET, RANK)
    other = Other(sockets[1])
    other.send(b"{}")
    assert receive_all(end, 1) == [{}]
    return end, other


def linked(first: socket.socket, second: socket.socket) -> tuple[Link, Link]:
    """Return a monitor's link and a rank's link that share the secret."""
    monitor, rank = Link(first, SECRET, MONITOR), Link(second, SECRET, RANK)
    monitor.receive()
    receive_all(rank, 1)
    rank.send()
    receive_all(monitor, 1)
    return monitor, rank


def test_half_a_line_that_was_read_is_not_unread(ends: tuple[Link, Other]) -> None:
    end, other = ends
    whole = other.line(b'{"a": 1}')
    assert not end.unread
    other.connection.sendall(whole[:-4])
    assert end.unread
    assert end.receive() == []
    assert not end.unread
    other.connection.sendall(whole[-4:])
    assert end.unread
    assert end.receive() == [{"a": 1}]


def receive_all(end: Link, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += end.receive()
    return messages


def sent_as_far_as_it_goes(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


def test_objects_arrive_however_the_bytes_are_cut(ends: tuple[Link, Other]) -> None:
    end, other = ends
    data = other.line(b'{"section": "save", "step": 3}') + other.line('{"dump": {"stacks": "ä\\n"}}'.encode())
    for byte in data[:-1]:
        other.connection.sendall(bytes([byte]))
        assert end.receive() == ([{"section": "save", "step": 3}] if byte == ord("\n") else [])
    other.connection.sendall(data[-1:] + other.line(b"{}") + other.line(b"{}"))
    assert len(receive_all(end, 3)) == 3


def test_what_is_sent_is_what_is_received(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    monitor, rank = linked(*sockets)
    message = {"dump": {"stacks": "x" * 300_000}, "kill": [1, 2], "none": None, "seconds": 0.1}
    rank.send(**message)
    assert receive_all(monitor, 1) == [message]
    monitor.send(small="second")
    assert receive_all(rank, 1) == [{"small": "second"}]


def test_messages_of_several_threads_do_not_mix(sockets: tuple[socket.socket, socket.socket]) -> None:
    end, sender = linked(*sockets)
    sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    messages: list[Message] = [{"dump": letter * 300_000} for letter in "abcd"]
    threads = [Thread(target=sender.send, kwargs=message) for message in messages]
    for thread in threads:
        thread.start()
    received = receive_all(end, len(messages))
    for thread in threads:
        thread.join()
    assert sorted(received, key=itemgetter("dump")) == messages


def test_nothing_follows_a_message_that_could_not_be_sent_whole(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_SEND_SECONDS", 0.1)
    ours, theirs = sockets
    sender, _ = linked(ours, theirs)
    sender.send(dump="x" * 10_000_000)
    theirs.settimeout(0.5)
    with suppress(TimeoutError):
        while data := theirs.recv(1 << 20):
            sender.send(lost="a rank")
            assert b"lost" not in data


@pytest.mark.parametrize(
    "garbage",
    [b"hello", b"[1]", b"7", b"\xff\xfe\x00", b'{"step": 1%s}' % (b"0" * 5000), b"[" * 50_000],
    ids=["a word", "a list", "a number", "no text", "digits", "deep"],
)
def test_garbage_ends_the_connection_though_it_is_from_a_rank(garbage: bytes, ends: tuple[Link, Other]) -> None:
    end, other = ends
    other.send(garbage)
    with pytest.raises(LinkLost):
        receive_all(end, 1)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_what_a_stranger_sends_is_never_a_message(garbage: bytes, digits_first: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = Link(ours, SECRET, MONITOR)
        theirs.sendall((b"0" * 64 + b"\n" if digits_first else b"") + garbage)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkLost):
            while True:
                assert end.receive() == []
        assert not end.proved


Forge = Callable[[Other], bytes]
FORGERIES: dict[str, Forge] = {
    "another number": lambda other: other.line(b"{}", 7),
    "the same again": lambda other: other.line(b"{}") + other.line(b"{}", other.lines),
    "changed": lambda other: other.line(b'{"a": 1}').replace(b"1}", b"2}"),
    "no code": lambda other: b"{}\n",
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_line_cannot_be_forged_by_who_stands_between(forge: Forge, ends: tuple[Link, Other]) -> None:
    end, other = ends
    other.connection.sendall(forge(other))
    with pytest.raises(LinkLost):
        while True:
            assert end.receive() == [{}]


def test_who_knows_another_secret_is_a_stranger(sockets: tuple[socket.socket, socket.socket]) -> None:
    end = Link(sockets[0], SECRET, RANK)
    Other(sockets[1], b"another").send(b"{}")
    with pytest.raises(LinkLost):
        receive_all(end, 1)


def test_an_end_does_not_take_its_own_lines_for_another_ends(sockets: tuple[socket.socket, socket.socket]) -> None:
    end = Link(sockets[0], SECRET, MONITOR)
    sockets[1].sendall(sockets[1].recv(1000))
    assert end.receive() == []
    sockets[1].sendall(sockets[1].recv(1000))
    with pytest.raises(LinkLost):
        end.receive()
    assert not end.proved


@pytest.mark.parametrize("proved", [True, False])
def test_a_line_without_end_ends_the_connection(
    proved: bool, sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger has a kilobyte for it."""
    if proved:
        monkeypatch.setattr(link, "_LARGEST", 5000)
    end = linked(*sockets)[0] if proved else Link(sockets[0], SECRET, MONITOR)
    limit = 5000 if proved else 1024
    sockets[1].sendall(b"x" * limit)
    while len(end._buffer) < limit:
        assert end.receive() == []
    sockets[1].sendall(b"x")
    with pytest.raises(LinkLost):
        end.receive()


@pytest.mark.wide
def test_a_long_message_takes_time_in_proportion_to_its_length(ends: tuple[Link, Other]) -> None:
    """Each piece that comes is looked at once: 16 MiB took 1.8 s of rank 0 when it was not so."""
    end, other = ends
    line = other.line(b'{"dump": "' + b"x" * (link._LARGEST - 100) + b'"}')
    thread = Thread(target=other.connection.sendall, args=(line,))
    thread.start()
    began = time.thread_time()
    receive_all(end, 1)
    assert time.thread_time() - began < 0.8
    thread.join()


@pytest.mark.parametrize("value", [b"[" + b"[]," * 2**23 + b"0]", b'"' + b"x" * 2**25 + b'"'], ids=["lists", "text"])
def test_a_line_is_not_so_long_that_it_fills_the_memory_when_it_is_parsed(
    value: bytes, ends: tuple[Link, Other]
) -> None:
    """64 MiB of brackets took more than a gigabyte."""
    end, other = ends
    line = other.line(b'{"dump": ' + value + b"}")
    thread = Thread(target=sent_as_far_as_it_goes, args=(other.connection, line))
    thread.start()
    with pytest.raises(LinkLost):
        receive_all(end, 1)
    end.close()
    thread.join()


def test_the_end_of_the_other_is_told_by_reading_and_not_by_writing(ends: tuple[Link, Other]) -> None:
    end, other = ends
    other.connection.close()
    end.send(section="", step=1)
    with pytest.raises(LinkLost):
        end.receive()
