"""Cost of the watchdog and the timers, how soon a death is named, and how soon a run that is told to stop has ended.

    python -m benchmarks.watchdog [--rounds 15] [--trials 5] [--write]

Cost: CPU time of all threads of a data-parallel step of benchmarks/cpu_step.py on two gloo ranks, with sections, the
watchdog, its monitor and the flight recorder, against two ranks without any of them; the two pairs step in turn, round
by round. Targets: a step within 1.02 of the other's; from kill -9 of a rank to the message under 3 s; from SIGTERM to
a saved, resumable exit under 2 steps and the save. The last two are of a run under torchrun, on four ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.cpu_step import megalite_step, quartiles
from benchmarks.results import write_results
from megalite.lifecycle.failure import default_mailbox, report
from megalite.parallel.mesh import ParallelMesh
from megalite.process.place import Place
from megalite.watchdog.sections import AGREEMENT, DATA, FORWARD_BACKWARD, OPTIMIZER, STEP, Limits, Sections
from megalite.watchdog.watchdog import Watchdog

VOCABULARY = 1024
RANKS = 4
MODEL = (
    *("--num-layers", 4, "--hidden-size", 256, "--num-attention-heads", 4, "--ffn-hidden-size", 688),
    *("--seq-length", 256, "--max-position-embeddings", 256, "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--micro-batch-size", 4, "--global-batch-size", 16, "--lr", 1e-3, "--tp", 2),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCABULARY, "--train-iters", 100000),
    *("--lr-decay-style", "constant", "--log-interval", 1, "--eval-interval", 100000),
)
ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------------------------------------------- the cost


def serve(rank: int, port: int, watched: bool, connections: list[Connection]) -> None:
    """One of two ranks: a step for each request, answered with its CPU seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = ParallelMesh(rank=rank, world_size=2)
    sections = Sections(mesh.waits.by_axis)
    mailbox = default_mailbox()
    watchdog = Watchdog(sections, Limits(), report, Place(rank, rank, 2), mailbox=mailbox)
    section = sections if watched else lambda name: nullcontext()
    step = megalite_step(VOCABULARY, mesh)
    with watchdog if watched else nullcontext():
        while connections[rank].recv():
            began = time.process_time()
            # As the trainer's, but for what the parts hold.
            with section(STEP):
                with section(DATA):
                    pass
                with section(FORWARD_BACKWARD):
                    step()
                with section(OPTIMIZER):
                    pass
            with section(AGREEMENT):
                pass
            connections[rank].send(time.process_time() - began)
    dist.destroy_process_group()


@contextmanager
def pair(port: int, watched: bool) -> Iterator[list[Connection]]:
    """Two ranks, which end with it."""
    ends = [multiprocessing.Pipe() for _ in range(2)]
    arguments = port, watched, [theirs for _, theirs in ends]
    ranks = multiprocessing.spawn(serve, arguments, nprocs=2, join=False)
    try:
        yield [ours for ours, _ in ends]
    finally:
        for ours, _ in ends:
            ours.send(False)
        ranks.join()


def step_of(pair: list[Connection]) -> float:
    """CPU seconds of a step on both ranks."""
    for rank in pair:
        rank.send(True)
    return float(sum(rank.recv() for rank in pair))


def cost(rounds: int) -> list[float]:
    """Ratios of a watched step's CPU time to another's."""
    with pair(29530, watched=True) as watched, pair(29531, watched=False) as bare:
        step_of(watched), step_of(bare)
        return [step_of(watched) / step_of(bare) for _ in range(rounds)]


# ---------------------------------------------------------------------------------------------------- the ends


class TorchRun:
    """A training under torchrun, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        program = [ROOT / "pretrain_gpt.py", *MODEL, "--save", folder / "run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment["MEGALITE_EXIT_FILE"] = str(folder / "exit")
        self.exit_file = folder / "exit"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                list(map(str, [*command, *program])), stdout=file, stderr=file, env=environment, cwd=ROOT
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return when it is in the output."""
        while not (found := re.search(pattern, self.text)):
            if self.process.poll() is not None and not re.search(pattern, self.text):
                raise SystemExit(f"the run ended without {pattern!r}:\n{self.text}")
            time.sleep(0.01)
        return found

    def rank(self, number: int) -> int:
        """The process number of a rank."""
        wanted = f"RANK={number}".encode()
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
        raise SystemExit(f"no process is rank {number}")


def seconds_to_the_message(folder: Path) -> float:
    """Return the seconds from kill -9 of a rank to the line that names it."""
    run = TorchRun(folder)
    run.wait_for("step +3/")
    os.kill(run.rank(2), signal.SIGKILL)
    began = time.monotonic()
    run.wait_for("error: rank 2 ")
    seconds = time.monotonic() - began
    run.process.wait()
    return seconds


def steps_to_the_exit(folder: Path, moment: float) -> float:
    """Return the steps from SIGTERM, at a `moment` of a step from 0 to 1, to the exit code, less the save."""
    run = TorchRun(folder)
    run.wait_for("step +6/")
    time.sleep(moment * step_seconds(run.text))
    run.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    while not run.exit_file.exists():
        time.sleep(0.01)
    seconds = time.monotonic() - began
    run.process.wait()
    if run.exit_file.read_text() != "85\n":
        raise SystemExit(f"the run ended otherwise:\n{run.text}")
    save = float(run.wait_for(r"saved .* in ([0-9.]+) s").group(1))
    return (seconds - save) / step_seconds(run.text)


def step_seconds(text: str) -> float:
    """The median of a run's steps, but for the first."""
    return statistics.median(float(ms.replace(",", "")) / 1000 for ms in re.findall(r"([0-9,]+) ms \|", text)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="leave the figures in benchmarks/results")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ratios = cost(arguments.rounds)
    print(f"a watched step / one that is not       {quartiles(ratios)}  (target 1.02)")
    with tempfile.TemporaryDirectory() as folder:
        paths = (Path(folder) / str(number) for number in range(2 * arguments.trials))
        deaths, stops = [], []
        for trial in range(arguments.trials):
            stop = partial(steps_to_the_exit, moment=(trial + 0.5) / arguments.trials)
            for measure, figures in ((seconds_to_the_message, deaths), (stop, stops)):
                path = next(paths)
                path.mkdir()
                figures.append(measure(path))
    print(f"seconds from kill -9 to the message    {quartiles(deaths)}, at most {max(deaths):.2f}  (target 3)")
    print(f"steps from SIGTERM to the exit, less the save  {quartiles(stops)}, at most {max(stops):.2f}  (target 2)")
    if arguments.write:
        figures = {"watched_step_ratios": ratios, "seconds_to_the_message": deaths, "steps_to_the_exit": stops}
        print(write_results("watchdog", figures))


if __name__ == "__main__":
    main()
