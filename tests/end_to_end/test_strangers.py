"""Strangers on the network of a run: what they can reach and read, and the effect of what they send."""

from __future__ import annotations

import datetime
import random
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.end_to_end.campaign import FAULTY, everything_said
from tests.end_to_end.runs import GPT2, MOCK, words
from tests.harness.job import Job

LISTENING = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def listeners(process: int) -> list[tuple[str, int]]:
    """Return addresses, as the system writes them, and ports."""
    found = []
    sockets = {str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def greets_as_a_monitor(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as stranger:
        try:
            return re.fullmatch(rb"[0-9a-f]{64}\n", stranger.recv(100)) is not None
        except TimeoutError:
            return False


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")
def test_a_run_that_strangers_talk_to_still_names_and_ends_a_rank_that_is_stopped(tmp_path: Path) -> None:
    flags = words("--train-iters 10000 --lr-decay-style constant --watchdog-min-seconds 2 --tp 2")
    environment = {"FAULT": "", "FAULT_RECORD": str(tmp_path), "STEP_SECONDS": "0.05"}
    with Job([FAULTY, *MOCK, *GPT2, *flags], 2, tmp_path, environment, store_of_rank_0=True) as job:
        job.wait_for_output(0, "step     3/10000")
        process = job.ranks[0].process.pid
        assert process is not None
        listening = listeners(process)
        assert len(listening) >= 3  # the store, the monitor, gloo
        assert [address for address, _ in listening if address not in LOOPBACK] == []
        store = TCPStore("127.0.0.1", job.port, is_master=False, timeout=datetime.timedelta(seconds=5))
        known = store.get("run/0/megalite/watchdog").decode()
        named = re.fullmatch(r"(\d+) (\.megalite_secret_[0-9a-f]{32})", known)
        assert named is not None, known
        assert not (Path(tempfile.gettempdir()) / named[2]).exists()
        assert greets_as_a_monitor(int(named[1]))
        draw = random.Random(0)
        for line in (b'{"token":"\\ud800"}', b"[" * 900, b"0" * 64, *(draw.randbytes(300) for _ in range(20))):
            with socket.create_connection(("127.0.0.1", int(named[1])), timeout=5.0) as stranger:
                stranger.sendall(line + b"\n{}\n")
        job.kill(1, signal.SIGSTOP)
        began = time.monotonic()
        assert job.wait(timeout=60) == [85, -9]
        assert time.monotonic() - began < 15
        (said,) = everything_said(job)
        assert f"rank 1 (process {job.ranks[1].process.pid} on " in said
        assert "has not answered for" in said
