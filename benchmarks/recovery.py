"""Seconds from kill -9 of a rank to the next finished step, and the goodput that follows from them.

    python -m benchmarks.recovery [--trials 10] [--ranks 4] [--systems stock plain warm-srun warm-torchrun] [--write]
    python -m benchmarks.recovery --micro-batches 32 --systems copies survivors

One run for each system, on this machine: a random rank is killed at a random moment after the recovery from the kill
before. `stock`: torchrun starts a plain training with torch.distributed.checkpoint anew
(`benchmarks/recovery_baselines/dcp.py`). `plain`: torchrun starts megalite anew. `warm-srun` and `warm-torchrun`:
megalite with --warm-restart, its processes started as srun starts them and by torchrun. `copies`: warm-srun with a copy
in memory after every step; `survivors`: with --survivors-finish-step, too. A second is that of a machine
that does nothing else; the load at the start of each run is printed beside its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from megalite.extras.chaos.faults import Fault
from megalite.extras.chaos.plan import SITES, read_sites
from megalite.extras.chaos.trial import RUN, Limits, Running
from megalite.extras.chaos.verdict import quantiles
from megalite.extras.planner.goodput import DAY, Failures

ROOT = Path(__file__).parents[1]
BASELINE_SITES = ROOT / "benchmarks" / "recovery_baselines" / "dcp.toml"
LLAMA_3 = 419 / (54 * DAY)
"""Unexpected interruptions a second of Llama 3's run on 16,384 GPUs: 419 in 54 days (arXiv 2407.21783, table 5)."""
SAVES = 5.0, 0.5, 0.0
"""Seconds that a save stops the training, for which goodput is shown; 0: copies in memory beside computation."""
MODEL = shlex.split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    " --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --lr 1e-3 --lr-decay-style constant "
    "--eval-iters 0 --log-interval 1 --train-iters 100000 --save-interval 10 --use-distributed-optimizer"
)


DEFAULT = "stock", "plain", "warm-srun", "warm-torchrun"
EVERY_STEP = ("--warm-restart", "--memory-checkpoint-interval", "1")


def start_as_srun(ranks: int, command: Sequence[str]) -> int:
    """Start ranks as srun does, and end the others when one fails. Returns the first exit code that is not 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    while None in (codes := [process.poll() for process in started]) and not any(codes):
        time.sleep(0.02)
    deadline = time.monotonic() + 40.0  # srun's --wait in slurm/common.sh
    while None in [process.poll() for process in started] and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in started:
        process.send_signal(signal.SIGKILL)
    codes = [process.wait() for process in started]
    return next((abs(code) for code in codes if code), 0)


def knows_warm_restarts() -> bool:
    """Tell whether megalite has --warm-restart."""
    shown = subprocess.run([sys.executable, "pretrain_gpt.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    return "--warm-restart" in shown.stdout


def commands(ranks: int, kills: int, micro_batches: int = 1) -> Mapping[str, tuple[Path, list[str]]]:
    """Return the sites file and the command of each system."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    restarts = f"--max-restarts={kills + 2}"
    pretrain = [
        "pretrain_gpt.py",
        *MODEL,
        "--global-batch-size",
        str(ranks * micro_batches),
        "--save",
        RUN,
        "--resume",
        "auto",
    ]
    baseline = ["-m", "benchmarks.recovery_baselines", "dcp", "--directory", RUN, "--steps", "100000"]
    own = [sys.executable, "-m", "benchmarks.recovery", "--as-srun", str(ranks), "--", sys.executable, *pretrain]
    return {
        "stock": (BASELINE_SITES, [*torchrun, restarts, *baseline, "--save-interval", "10", "--step-seconds", "0.02"]),
        "plain": (SITES, [*torchrun, restarts, *pretrain]),
        "warm-srun": (SITES, [*own, "--warm-restart"]),
        "copies": (SITES, [*own, *EVERY_STEP]),
        "survivors": (SITES, [*own, *EVERY_STEP, "--survivors-finish-step"]),
        "warm-torchrun": (SITES, [*torchrun, restarts, *pretrain, "--warm-restart"]),
    }


def measure(system: str, ranks: int, trials: int, seed: int, folder: Path, micro_batches: int = 1) -> dict[str, Any]:
    """Kill ranks of a run of a system; returns its figures."""
    sites, command = commands(ranks, trials, micro_batches)[system]
    generator = random.Random(seed)
    faults = [
        Fault("kill", generator.randrange(ranks), moment=round(generator.uniform(0.2, 2.0), 2)) for _ in range(trials)
    ]
    trial = Running(command, folder / system, faults, read_sites(sites), Limits(), cut=False).run_to_its_end(
        until_recovered=True
    )
    seconds = [found for number in range(trials) if (found := trial.recovery(number)) is not None]
    return {
        "seconds": seconds,
        "quantiles": quantiles(seconds),
        "steps": _steps(folder / system),
        "not_recovered": trials - len(seconds),
        "starts_of_the_command": len(trial.codes),
        "hung": trial.hung,
        "processes_left": trial.processes_left,
    }


def _steps(folder: Path) -> dict[str, Any] | None:
    """Return the median time of a step, and the numbers of micro-batches that were kept of some, if told."""
    records = [json.loads(line) for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    times = [record["iteration_time_s"] for record in records if "iteration_time_s" in record]
    if not times:
        return None
    kept = [record["kept_micro_batches"] for record in records if "kept_micro_batches" in record]
    return {"median_s": statistics.median(times), "kept": kept}


def goodput(restart: float) -> dict[str, float]:
    """Return the largest goodput at Llama 3's rate of failures, by the seconds that a save stops the training."""
    return {f"{save:g}": Failures(LLAMA_3, save, restart).best for save in SAVES}


def _steps_text(steps: Mapping[str, Any] | None, micro_batches: int) -> str:
    if steps is None:
        return ""
    kept = f", {len(steps['kept'])} with {steps['kept']} of {micro_batches} micro-batches kept" if steps["kept"] else ""
    return f"; steps of {steps['median_s']:.2f} s{kept}"


def main() -> None:
    if "--as-srun" in sys.argv[1:2]:
        sys.exit(start_as_srun(int(sys.argv[2]), sys.argv[4:]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a rank in each step of megalite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--systems", nargs="+", choices=tuple(commands(1, 1)), default=DEFAULT)
    parser.add_argument("--write", action="store_true", help="leave the figures in benchmarks/results")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found: dict[str, Any] = {}
    warm = any(system.startswith("warm") for system in arguments.systems) and knows_warm_restarts()
    with tempfile.TemporaryDirectory() as folder:
        for system in arguments.systems:
            if system.startswith("warm") and not warm:
                print(f"{system:<14} not here: megalite has no --warm-restart", flush=True)
                continue
            load = os.getloadavg()[0]
            ranks, trials, seed, micro_batches = (
                arguments.ranks,
                arguments.trials,
                arguments.seed,
                arguments.micro_batches,
            )
            figures = {"load": load, **measure(system, ranks, trials, seed, Path(folder), micro_batches)}
            found[system] = figures
            of_all = figures["quantiles"]
            if of_all is None:
                print(f"{system:<14} did not recover from any of {arguments.trials} kills", flush=True)
                continue
            figures["goodput"] = goodput(of_all["median"])
            shares = ", ".join(f"{share:.2%} (save of {save} s)" for save, share in figures["goodput"].items())
            print(
                f"{system:<14} median {of_all['median']:.2f} s, p95 {of_all['p95']:.2f}, of {of_all['count']} kills, "
                f"{figures['not_recovered']} not recovered from, load {load:.1f}; goodput {shares}"
                f"{_steps_text(figures['steps'], ranks * micro_batches)}",
                flush=True,
            )
    if arguments.write:
        print(write_results("recovery", found))


if __name__ == "__main__":
    main()
