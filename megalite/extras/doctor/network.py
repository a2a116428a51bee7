"""Check that nodes reach each other at ports that the system assigns, and compare their clocks."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from megalite.extras.doctor.findings import Finding

Addresses = Mapping[str, tuple[str, int]]
"""Address and port of each node."""
CLOCK_SECONDS = 1.0
"""Smallest reported difference of clocks. With a larger one, files of one node seem to come from the future on
another."""
_CONNECT_SECONDS = 5.0
_QUESTIONS = 5
_AT_ONCE = 32
_TIME = struct.Struct("!d")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def own_address(backend: str, host: str) -> str:
    """Return the address at which other ranks look for this one, as the backend finds it. Raises OSError if there is
    none.

    Gloo takes the interface in GLOO_SOCKET_IFNAME, otherwise the address of the host's name. NCCL takes an interface
    that begins with one of NCCL_SOCKET_IFNAME's names; without that variable, this check takes the one that leads to
    rank 0's `host`.
    """
    if backend == "gloo":
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        return _address_of(interfaces[0]) if interfaces[0] else socket.gethostbyname(socket.gethostname())
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = [name for _, name in socket.if_nameindex() if wanted and chooses(wanted, name)]
    for name in chosen:
        with suppress(OSError):  # the interface has no address
            return _address_of(name)
    if chosen or (wanted and not wanted.startswith("^")):
        raise OSError(f"NCCL_SOCKET_IFNAME {wanted} names no interface that has an address")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # nothing is sent
        route.connect((host, 9))
        return str(route.getsockname()[0])


def chooses(wanted: str, interface: str) -> bool:
    """Tell whether a value of NCCL_SOCKET_IFNAME selects an interface: by prefix; after =: by name; after ^: not
    these."""
    rest = wanted.removeprefix("^")
    names = rest.removeprefix("=").split(",")
    found = interface in names if rest.startswith("=") else interface.startswith(tuple(names))
    return found != wanted.startswith("^")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(sock.fileno(), _ADDRESS_OF_INTERFACE, request)
        except OSError as error:
            raise OSError(f"the interface {interface} has no address: {error.strerror}") from error
    return socket.inet_ntoa(answer[20:24])


class Listener(socketserver.ThreadingTCPServer):
    """Listener that sends the time to clients with the right token, at a port chosen by the system. A context
    manager."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str, token: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__((address, 0), _Answering)
        self.token, self.clock = token.encode(), clock
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Answering(socketserver.StreamRequestHandler):
    server: Listener

    def handle(self) -> None:
        if self.rfile.read(len(self.server.token)) != self.server.token:
            return
        while self.rfile.read(1):
            self.wfile.write(_TIME.pack(self.server.clock()))


@dataclass(frozen=True)
class Reached:
    """Result of a connection to another node."""

    problem: str = ""
    clock: float = 0.0
    """Seconds by which the other node's clock is ahead."""


ReachedFrom = Mapping[str, Mapping[str, Reached]]
"""Results of connecting, by the node that tried, and the node that it tried to reach."""


def reach(address: str, port: int, token: str) -> Reached:
    """Connect and compare clocks: of several requests, the one with the fastest answer counts (Cristian, 1989)."""
    best, clock = float("inf"), 0.0
    try:
        with (
            socket.create_connection((address, port), _CONNECT_SECONDS) as connection,
            connection.makefile("rb") as answers,
        ):
            connection.sendall(token.encode())
            for _ in range(_QUESTIONS):
                sent, start = time.time(), time.monotonic()
                connection.sendall(b"?")
                answer = answers.read(_TIME.size)
                taken = time.monotonic() - start
                if len(answer) < _TIME.size:
                    raise ConnectionError("the other side has closed the connection")
                if taken < best:
                    best, clock = taken, _TIME.unpack(answer)[0] - (sent + taken / 2)
    except OSError as error:
        return Reached(error.strerror or str(error) or type(error).__name__)
    return Reached(clock=clock)


def reach_all(addresses: Addresses, own: str, token: str) -> dict[str, Reached]:
    """Connect to all other nodes. Each node begins with those after itself, to spread the connections."""
    names = list(addresses)
    at = names.index(own)
    others = names[at + 1 :] + names[:at]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        reached = threads.map(lambda node: reach(*addresses[node], token), others)
        return dict(zip(others, reached, strict=True))


def examine_network(reached: ReachedFrom, addresses: Addresses, first: str) -> Iterator[Finding]:
    """Yield the faults between nodes, from each node's results. `first`: rank 0's node; clocks are compared with
    its."""
    yield from _unreachable(reached, addresses)
    for node, others in reached.items():
        if node != first and first in others and abs(others[first].clock) > CLOCK_SECONDS:
            ahead = -others[first].clock
            text = f"its clock is {abs(ahead):.1f} seconds {'ahead of' if ahead > 0 else 'behind'} that of {first}"
            yield Finding("warning", text, node)


def _unreachable(reached: ReachedFrom, addresses: Addresses) -> Iterator[Finding]:
    """Yield a finding for each node that most others do not reach, and one for each further pair."""
    failed = {(a, b): each.problem for a, others in reached.items() for b, each in others.items() if each.problem}
    count = len(reached) - 1
    parted = {node: {b if a == node else a for a, b in failed if node in (a, b)} for node in reached}
    alone = [node for node in reached if count > 1 and 2 * len(parted[node]) > count]
    if 2 * len(alone) > len(reached):
        (a, b), problem = next(iter(failed.items()))
        where = addresses[b][0]
        yield Finding("sick", f"most nodes do not reach most others, as {a} {b} at {where} ({problem}): {_why(where)}")
        return
    for node in alone:  # the other nodes would each be reported together with it
        problem = next(failed[pair] for pair in failed if node in pair)
        where, these = addresses[node][0], f"{len(parted[node])} of {count} nodes"
        text = f"{these} do not reach it at {where}, or it does not reach them ({problem}): {_why(where)}"
        yield Finding("sick", text, node)
    for (a, b), problem in failed.items():
        back = (b, a) in failed
        if a in alone or b in alone or (back and a > b):  # both directions are one finding
            continue
        both = f", nor {b} {a}" if back else ""
        yield Finding("sick", f"{a} does not reach {b} at {addresses[b][0]}{both} ({problem}): {_why(addresses[b][0])}")


def _why(address: str) -> str:
    interface = "the interface between nodes (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
    if ipaddress.ip_address(address).is_loopback:
        return f"there each node finds itself. Set {interface}, or correct /etc/hosts"
    return f"open the ports between nodes, or set {interface}"
