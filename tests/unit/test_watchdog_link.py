"""Connections between ranks' watchdogs and the monitor."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from threading import Thread

import pytest

from megalite.watchdog import link
from megalite.watchdog.link import Link, LinkLost, Message


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    yield Link(ours), theirs
    ours.close()
    theirs.close()


def receive_all(end: Link, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += end.receive()
    return messages


def test_objects_arrive_however_the_bytes_are_cut(ends: tuple[Link, socket.socket]) -> None:
    end, other = ends
    data = '{"section": "save", "step": 3}\n{"dump": {"stacks": "ä\\n"}}\n'.encode()
    for byte in data[:-1]:
        other.sendall(bytes([byte]))
        assert end.receive() == ([{"section": "save", "step": 3}] if byte == ord("\n") else [])
    other.sendall(data[-1:] + data)
    assert len(receive_all(end, 3)) == 3


def test_what_is_sent_is_what_is_received(ends: tuple[Link, socket.socket]) -> None:
    end, other = ends
    message = {"dump": {"stacks": "x" * 300_000}, "kill": [1, 2], "none": None, "seconds": 0.1}
    other.settimeout(10.0)
    sender = Link(other)
    sender.send(small="first")
    assert receive_all(end, 1) == [{"small": "first"}]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        Link(ours).send(**message)
        assert receive_all(Link(theirs), 1) == [message]


def test_messages_of_several_threads_do_not_mix(ends: tuple[Link, socket.socket]) -> None:
    end, other = ends
    other.settimeout(10.0)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, messages = Link(other), [{"dump": letter * 300_000} for letter in "abcd"]
    threads = [Thread(target=sender.send, kwargs=message) for message in messages]
    for thread in threads:
        thread.start()
    received = receive_all(end, len(messages))
    for thread in threads:
        thread.join()
    assert sorted(received, key=itemgetter("dump")) == messages


def test_nothing_follows_a_message_that_could_not_be_sent_whole(
    ends: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_SEND_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Link(ours)
        sender.send(dump="x" * 10_000_000)
        theirs.settimeout(0.5)
        with suppress(TimeoutError):
            while data := theirs.recv(1 << 20):
                sender.send(lost="a rank")
                assert b"lost" not in data


@pytest.mark.parametrize(
    "garbage",
    [b"hello\n", b"[1]\n", b"7\n", b"\xff\xfe\x00\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 50_000 + b"\n"],
    ids=["a word", "a list", "a number", "no text", "http", "deep"],
)
def test_garbage_ends_the_connection(garbage: bytes, ends: tuple[Link, socket.socket]) -> None:
    end, other = ends
    other.sendall(garbage)
    with pytest.raises(LinkLost):
        end.receive()


def test_a_message_without_end_ends_the_connection(
    ends: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_LARGEST", 1000)
    end, other = ends
    other.sendall(b"x" * 1001)
    with pytest.raises(LinkLost):
        end.receive()


def test_the_end_of_the_other_is_told_by_reading_and_not_by_writing(ends: tuple[Link, socket.socket]) -> None:
    end, other = ends
    other.close()
    end.send(section="", step=1)
    with pytest.raises(LinkLost):
        end.receive()
