"""Where this process runs."""

from __future__ import annotations

import os
import socket


def host_name() -> str:
    """What this machine is called by whoever starts jobs on it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def process_space() -> str:
    """What two processes have in common that see each other by their numbers: a machine, and a container on it."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return socket.gethostname()
