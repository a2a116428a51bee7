"""Training without torch, of ranks that its parent forks and restarts not: a command that takes milliseconds.

    python -c "from tests.extras.chaos.toy import main; main()" --run DIR [--lie NAME]

It keeps all promises, unless it is told to break one once it has resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

RANKS, STEPS, SAVE_INTERVAL = 2, 12, 2
RESUMABLE = 85


def load(run: Path, rank: int) -> tuple[int, int]:
    """Return step and value of the newest checkpoint of this rank that is whole."""
    for path in sorted(run.glob(f"step_*/rank{rank}"), reverse=True):
        text, _, digest = path.read_bytes().rpartition(b" ")
        if hashlib.sha256(text).hexdigest().encode() == digest:
            step, value = json.loads(text)
            return step, value
    return 0, 0


def save(run: Path, rank: int, step: int, value: int) -> None:
    """Write a checkpoint under a temporary name, and rename it; a full disk leaves the one before."""
    folder = run / f"step_{step:06d}"
    text = json.dumps([step, value]).encode()
    try:
        folder.mkdir(exist_ok=True)
        temporary = folder / f"{rank}.tmp"
        with temporary.open("wb") as file:
            file.write(text + b" " + hashlib.sha256(text).hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / f"rank{rank}")
    except OSError as error:
        (run.parent / f"failed{rank}").write_text(str(error))


def send(run: Path) -> None:
    """Send a datagram from this machine to itself, again until one comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as both:
        both.bind(("127.0.0.1", 0))
        both.settimeout(0.05)
        while True:
            try:
                both.sendto(b"step", both.getsockname())
                both.recv(4)
                return
            except OSError as error:
                (run.parent / "cut").write_text(str(error))


def train_step(run: Path, rank: int, step: int, value: int, lie: str) -> int:
    """Run a step, and record it; returns its number."""
    time.sleep(0.01)
    if rank == 0 and not (lie == "skip" and step == STEPS):
        loss = value / 2**64 + (1e-16 if lie == "loss" else 0.0)
        samples = 4 * step + (4 if lie == "sample" else 0)
        with (run / "metrics.jsonl").open("a") as file:
            for _ in range(2 if lie == "repeat" else 1):
                file.write(json.dumps({"iteration": step, "consumed_samples": samples, "lm_loss": loss}) + "\n")
    return step


def cut(run: Path, step: int) -> None:
    """Leave out the records of steps that come again."""
    path = run / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    kept = "".join(line for line in lines if line.strip("\0\n") and json.loads(line)["iteration"] <= step)
    temporary = run / "metrics.tmp"  # the other rank may fail, and end this one
    temporary.write_text(kept)
    os.replace(temporary, path)


def train(run: Path, rank: int, lie: str, *, sends: bool) -> None:
    """Be a rank."""
    step, value = load(run, rank)
    if not step:
        lie = ""
    if rank == 0:
        cut(run, step)
    if lie == "orphan":
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    if lie == "memory":
        Path(f"/dev/shm/megalite_chaos_toy_{os.getpid()}").write_text("left")
    for number in range(step + 1, STEPS + 1):
        value = (value * 6364136223846793005 + number) % 2**64
        if sends:
            time.sleep(0.1)  # for the network to be cut meanwhile
            send(run)
        train_step(run, rank, number, value, lie)
        if number % SAVE_INTERVAL == 0:
            save(run, rank, number, value)
    (run / f"final{rank}.bin").write_bytes((value + (lie == "weights")).to_bytes(8, "big"))


def main() -> None:
    """Fork the ranks; end them all when one has ended badly, or stands still."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--lie", default="")
    parser.add_argument("--send", action="store_true")
    arguments = parser.parse_args()
    arguments.run.mkdir(exist_ok=True)
    ranks = []
    for rank in range(RANKS):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ["RANK"] = str(rank)
            code = 1
            try:
                train(arguments.run, rank, arguments.lie, sends=arguments.send)
                code = 0
            finally:
                os._exit(code)
    while ranks:
        ended, status = os.waitpid(-1, os.WUNTRACED)
        if status:
            for each in ranks:
                if each != ended or os.WIFSTOPPED(status):
                    os.kill(each, signal.SIGKILL)
            os._exit(RESUMABLE)
        ranks.remove(ended)
