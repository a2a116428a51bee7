"""Relay between two network devices that hands on each frame after a delay, for `benchmarks.sites`.

python -m benchmarks.relay DEVICE DEVICE SECONDS
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque

ALL_PROTOCOLS = 3
PACKET, WITH_HEADER = 263, 15
"""Level and option by which frames come and go with the kernel's note of a checksum that is still to be computed."""
SEND_BUFFER, RECEIVE_BUFFER = 32, 33  # beyond the limits for users other than root
FRAME = 1 << 17
MOST_FRAMES = 10_000


def relay(devices: tuple[str, str], seconds: float) -> None:
    """Hand on frames until the process is killed."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) for _ in devices]
    for end, device in zip(ends, devices, strict=True):
        for buffer in (SEND_BUFFER, RECEIVE_BUFFER):
            end.setsockopt(socket.SOL_SOCKET, buffer, 1 << 24)
        end.setsockopt(PACKET, WITH_HEADER, 1)
        end.bind((device, ALL_PROTOCOLS))
        end.setblocking(False)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for end in select.select(ends, [], [], patience)[0]:
            other = ends[1 - ends.index(end)]
            for _ in range(64):
                try:
                    frame, address = end.recvfrom(FRAME)
                except BlockingIOError:
                    break
                if address[2] != socket.PACKET_OUTGOING and len(waiting) < MOST_FRAMES:
                    waiting.append((time.monotonic() + seconds, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, frame = waiting.popleft()
            try:
                other.send(frame)
            except OSError:  # a full queue drops frames, as in a router
                continue


if __name__ == "__main__":
    relay((sys.argv[1], sys.argv[2]), float(sys.argv[3]))
