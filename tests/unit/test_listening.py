"""On which interfaces a process listens."""

from __future__ import annotations

import socket

import pytest

from megalite.process import host
from megalite.process.host import listen
from megalite.process.place import Place

ALL = ("::", "0.0.0.0")


def where(host: str, *, one_machine: bool = False) -> str:
    with listen("the test", Place(0, 0, 4, 4 if one_machine else 2, host)) as taken:
        address: str = taken.getsockname()[0]
    return address


def named(addresses: list[str]) -> object:
    """A resolver that knows one name."""

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        pairs = [(socket.AF_INET6 if ":" in address else socket.AF_INET, address) for address in addresses]
        return [(family, 0, 0, "", (address, 0, 0, 0) if ":" in address else (address, 0)) for family, address in pairs]

    return resolve


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1.1"])
def test_one_machine_talks_to_itself(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert where(host) in (host, "127.0.0.1", "::1")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("addresses", "one_machine", "expected"),
    [
        (["192.0.2.1"], False, ALL),  # of another machine, which passes connections on
        (["127.0.1.1"], False, ALL),  # as this one calls itself, and the others do not
        (["127.0.1.1"], True, ("127.0.1.1",)),
        (["192.0.2.1", "127.0.0.2"], True, ("127.0.0.2",)),
        ([], False, ALL),
    ],
)
def test_the_address_of_this_machine_is_taken_and_else_a_warning_says_that_it_is_all(
    addresses: list[str],
    one_machine: bool,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(host.socket, "getaddrinfo", named(addresses))
    assert where("node-1", one_machine=one_machine) in expected
    warned = capsys.readouterr().err
    assert ("warning: the test listens on all interfaces, as MASTER_ADDR=node-1 is not" in warned) is (expected == ALL)


def test_a_port_that_is_taken_is_told() -> None:
    place = Place(0, 0, 2, host="127.0.0.1")
    with listen("the test", place) as taken, pytest.raises(OSError, match="in use"):
        listen("the test", place, taken.getsockname()[1])
