"""How long a user waits for the first step: `python benchmarks/startup.py`.

Two figures, each the median of five runs with the least and the greatest beside it:

- from `import torch` done to the configuration parsed and validated: at most 0.5 s;
- from the command to the end of the first training step of a small model (an upper bound of its start), on one process
  and on two under torchrun: at most 6 s.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = 5
FLAGS = shlex.split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 1 --eval-iters 0 --log-interval 1"
)
VALIDATE = """
import sys, time
import torch
began = time.perf_counter()
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
resolve(parse_arguments(sys.argv[1:]).config, 1)
print(time.perf_counter() - began)
"""


def environment() -> dict[str, str]:
    """megalite as it stands in this checkout, one thread a rank."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def seconds_to_validate() -> float:
    command = [sys.executable, "-c", VALIDATE, *FLAGS]
    return float(subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout)


def seconds_to_first_step(*launcher: str) -> float:
    command = [sys.executable, "-u", *launcher, str(ROOT / "pretrain_gpt.py"), *FLAGS]
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        took = next((time.perf_counter() - began for line in process.stdout if line.startswith("step 1/1")), None)
        process.stdout.read()
    if took is None or process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return took


def report(what: str, measure: Callable[[], float], target: float) -> bool:
    """Prints one line; returns whether the median meets the target."""
    times = sorted(measure() for _ in range(RUNS))
    median = statistics.median(times)
    met = median <= target
    verdict = "met" if met else "MISSED"
    print(
        f"{what:42} {median:5.2f} s ({times[0]:.2f} to {times[-1]:.2f}); target {target:.1f} s: {verdict}", flush=True
    )
    return met


def main() -> int:
    """0 if every target is met."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    met = [
        report("torch imported to configuration validated", seconds_to_validate, 0.5),
        report("command to first step, one process", seconds_to_first_step, 6.0),
        report("command to first step, torchrun, 2 ranks", lambda: seconds_to_first_step(*torchrun), 6.0),
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
