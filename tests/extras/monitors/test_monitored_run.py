"""A run shows where its time and its memory go, and names the rank whose memory grows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.monitors.performance import performance_lines
from megalite.extras.monitors.planned import Planned
from megalite.lifecycle.out_of_memory import describe_out_of_memory
from tests.end_to_end.runs import GPT2, MOCK, Run, assert_same_checkpoint, ended, losses, metrics
from tests.extras.corruption.corruption_run import FLAGS, trainer_of
from tests.extras.corruption.gradient_run import SYNC
from tests.harness.job import Job

LEAK = """
import os, sys
sys.path.insert(0, ROOT)
import torch
from megalite.pipeline.engine import PipelineEngine
from megalite.lifecycle.failure import run_main
from megalite.commands.pretrain import main
run, kept = PipelineEngine.run, []
def leaking(engine, *arguments):
    result = run(engine, *arguments)
    kept.append(None)
    if os.environ["RANK"] == "1" and len(kept) >= 9:
        kept[-1] = torch.ones(2**18)
    return result
PipelineEngine.run = leaking
run_main(main)
"""


def test_a_leak_on_one_rank_is_named_and_nothing_else(spawn: Callable[..., Job], tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(LEAK.replace("ROOT", repr(str(Path(__file__).parents[3]))))
    flags = [*MOCK, *GPT2, "--train-iters", 50, "--log-interval", 25, "--timing-interval", 25, SYNC, 5]
    flags += ["--memory-monitor", "--performance-monitor", "--performance-plan", "cpu", "--use-distributed-optimizer"]
    out = ended(spawn([entry, *flags, "--save", tmp_path / "run"], 2)).stdout
    (warning,) = [line for line in out.splitlines() if line.startswith("WARNING")]
    found = re.match(
        r"WARNING: the memory of rank 1 \(.*\) grows by (\S+) MiB a step, since about step (\d+) by", warning
    )
    assert found is not None, warning
    assert 0.95 < float(found[1]) < 1.05
    assert 8 <= int(found[2]) <= 10
    assert out.count("share of a step: data ") == out.count("memory, most of all ranks: parameters ") == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "memory_growth_bytes/max" in line] == [10, 20, 25, 30, 40, 50]
    last = lines[-1]
    assert last["memory_growth_bytes/max_rank"] == last["memory_bytes/other/max_rank"] == 1.0
    assert last["memory_beyond_prediction_bytes/max"] > 30 * 2**20
    sizes = {kind: last[f"memory_bytes/{kind}/max"] for kind in ("parameters", "gradients", "optimizer")}
    assert sizes["optimizer"] == sizes["parameters"] == sizes["gradients"]  # two halves of moments
    assert metrics(tmp_path / "run")  # all keys are documented
    assert (
        len(re.findall(r"a step takes \S+ ms, \S+ times its plan: forward and backward \d+% \(planned \d+%\)", out))
        == 2
    )


def test_monitors_change_no_bit(run: Run, tmp_path: Path) -> None:
    flags = [*MOCK, *GPT2, "--train-iters", 4, "--timing-interval", 2, "--tp", 2]
    run(*flags, "--save", tmp_path / "plain", world_size=2)
    plan = "--performance-monitor", "--performance-plan", "cpu"
    run(*flags, "--memory-monitor", *plan, SYNC, 2, "--save", tmp_path / "monitored", world_size=2)
    assert losses(tmp_path / "monitored") == losses(tmp_path / "plain")
    assert_same_checkpoint(tmp_path / "monitored" / "iter_0000004", tmp_path / "plain" / "iter_0000004")


def test_the_largest_cost_beside_computation_is_told() -> None:
    sections = {"data": 0.01, "forward_and_backward": 0.5, "optimizer": 0.09, "waiting_for_others": 0.4}
    figures = {f"iteration_time_s/{name}": seconds for name, seconds in sections.items()}
    figures |= {"iteration_time_s/slowest_rank": 3.0, "iteration_time_s/slowest_rank_work": 0.9}
    figures |= {"wait_s/tp": 0.3, "wait_s/tp/max": 0.35, "wait_s/tp/max_rank": 2.0, "bytes_sent/tp": 3 * 2**20}
    figures |= {"wait_s/world": 0.1, "wait_s/world/max": 0.1, "wait_s/world/max_rank": 0.0, "bytes_sent/world": 512}
    unequal = figures | {"communication_share": 0.05, "scaling_efficiency": 0.65}
    assert list(performance_lines(unequal)) == [
        "share of a step: data 1%, forward and backward 50%, optimizer 9%, waiting for others 40%: tp 30% (rank 2: "
        "35%), world 10% (rank 0: 10%)",
        "sent in the step: tp 3 MiB, world 512 B",
        "beside computation, 30% of a step is unequal work: rank 3 works 90% of a step, and others wait for it",
    ]
    *_, finding = performance_lines(figures | {"communication_share": 0.3, "scaling_efficiency": 0.65})
    assert finding == (
        "beside computation, 30% of a step is communication that nothing hides, most of it along tp"
    )  # fmt: skip
    assert list(performance_lines({"lm_loss": 1.0})) == []
    *_, beside = performance_lines(
        figures, Planned(0.5, {"forward and backward": 0.7, "cp": 0.0, "tp": 0.2, "dp": 0.1})
    )
    assert beside == (
        "a step takes 1,000.0 ms, 2.00 times its plan: forward and backward 50% (planned 70%), tp 30% (planned 20%), "
        "dp 0% (planned 10%)"
    )


def test_the_largest_tensors_are_named_when_memory_runs_out() -> None:
    trainer = trainer_of("--hidden-size 256 --ffn-hidden-size 4096")
    kept = torch.ones(3 * 2**20, 4)
    told = describe_out_of_memory(MemoryError("Unable to allocate 9 TiB"))
    line = next(line for line in told.splitlines() if line.startswith("The largest tensors: "))
    assert "48 MiB other (float32 [3145728, 4])" in line
    size = trainer.optimizer.buckets[0].gradients.nbytes / 2**20
    assert f"{size:.3g} MiB gradients (float32 [" in line
    assert " MiB optimizer (float32 [" in line
    assert len(kept)


@pytest.mark.parametrize(
    ("flags", "ranks", "told"),
    [
        (f"{SYNC} 5", 1, "compares the gradients of ranks, and there is only one"),
        (f"{SYNC} 5 --gradient-compression topk", 2, "needs data parallelism that sums all gradients in each step"),
        (
            f"{SYNC} 5 --use-distributed-optimizer --optimizer-cpu-offload",
            2,
            "does not go with an optimizer or weights",
        ),
        ("--performance-monitor --timing-interval 0", 1, "--performance-monitor needs --timing-interval above 0"),
        ("--performance-plan cpu", 1, "--performance-plan needs --performance-monitor"),
        ("--on-corruption go-back", 1, "needs --check-weight-hash-across-dp-replicas-interval or --rerun-on-replica"),
        (f"{SYNC} 2 --on-corruption go-back", 2, "--on-corruption needs --check-weight-hash"),
    ],
)
def test_what_cannot_be_monitored_is_refused(flags: str, ranks: int, told: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve(parse_arguments([*FLAGS.split(), *flags.split()]).config, ranks)
    assert told in str(raised.value)
