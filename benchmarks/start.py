"""The cost of a start: CPU time and memory from the command to the end of the first step, beside `import torch`.

    python -m benchmarks.start [--rounds 9]

A small model, one thread a process; CPU time is that of the user and of the system, of a process and its children.
`import torch`, a run on one process and one on two under torchrun take turns, round by round; a figure is the median,
with quartiles. Then which of the heavy modules a run imports.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import write_results

ROOT = Path(__file__).resolve().parents[1]
FLAGS = shlex.split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 1 --eval-iters 0 --log-interval 1"
)
HEAVY = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.utils.tensorboard", "sympy", "triton"),
    *("numba", "pandas", "tensorboard", "fsspec", "sentencepiece", "tokenizers", "transformers"),
    *("rich", "yaml", "einops", "safetensors"),
)
TORCH = [sys.executable, "-c", "import torch"]
RUN = [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS]
TORCHRUN = [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], *RUN[1:]]
MODULES = """
import atexit, runpy, sys
del sys.argv[0]
atexit.register(lambda: print(*sys.modules))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Start(NamedTuple):
    """Figures of one process."""

    cpu: float
    """Seconds."""
    elapsed: float
    """Seconds."""
    first_line: float
    """Seconds until it was there; NaN where nothing is printed."""
    peak: int
    """Resident bytes."""


def environment() -> dict[str, str]:
    """megalite as it stands in this checkout, one thread."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(command: list[str]) -> Start:
    began, first_line = time.perf_counter(), float("nan")
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline():
            first_line = time.perf_counter() - began
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        elapsed = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed")
    return Start(usage.ru_utime + usage.ru_stime, elapsed, first_line, usage.ru_maxrss * 1024)


def heavy_modules() -> list[str]:
    """The watched modules that the run imports."""
    command = [sys.executable, "-c", MODULES, *RUN[1:]]
    out = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
    imported = set(out.splitlines()[-1].split())
    return [name for name in HEAVY if name in imported]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    commands = (TORCH, RUN, TORCHRUN)
    rounds = [tuple(map(start, commands)) for _ in range(parser.parse_args().rounds + 1)][1:]  # the first fills caches
    figures = {
        "import torch, CPU seconds": [torch.cpu for torch, _, _ in rounds],
        "to the first step, CPU seconds": [run.cpu for _, run, _ in rounds],
        "ratio": [run.cpu / torch.cpu for torch, run, _ in rounds],
        "to the first line, seconds": [run.first_line for _, run, _ in rounds],
        "to the end, seconds": [run.elapsed for _, run, _ in rounds],
        "two ranks to the first step, CPU seconds": [two.cpu for _, _, two in rounds],
        "two ranks to the end, seconds": [two.elapsed for _, _, two in rounds],
        "import torch, peak MiB": [torch.peak / 2**20 for torch, _, _ in rounds],
        "to the first step, peak MiB": [run.peak / 2**20 for _, run, _ in rounds],
    }
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in figures.items()}
    for name, (low, median, high) in quartiles.items():
        print(f"{name:40} {median:7.2f} ({low:.2f} to {high:.2f})")
    heavy = heavy_modules()
    print(f"{'heavy modules imported':40} {', '.join(heavy) or 'none'}")
    print("written to", write_results("start", {"rounds": len(rounds), "quartiles": quartiles, "heavy modules": heavy}))


if __name__ == "__main__":
    main()
