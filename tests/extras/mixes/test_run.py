"""Runs with a mix: the same on every layout, whenever they stop, and after a blend; and their ledger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
import yaml

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import DataError
from megalite.parallel.mesh import ParallelMesh
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import open_data
from megalite.training.task import Summarized
from tests.end_to_end.runs import GPT2, NO_DROPOUT, ROOT, Run, metrics, words
from tests.extras.mixes.mixed_run import write_files
from tests.harness.job import Job
from tests.harness.rank_pool import RankPools

NULL = words("--tokenizer-type NullTokenizer --vocab-size 3000 --no-report")
FLAGS = (*GPT2, *NO_DROPOUT, "--fp64", "--lr-decay-style", "constant")
LAYOUTS = {
    "dp2": (2, ()),
    "tp2": (2, ("--tp", 2, "--sequence-parallel")),
    "pp2": (2, ("--pp", 2)),
    "cp2": (2, ("--cp", 2)),
}


@pytest.fixture
def prefixes(tmp_path: Path) -> dict[str, str]:
    return write_files(tmp_path, {"web": 1500, "code": 700, "math": 200})


def schedule(folder: Path, prefixes: dict[str, str], *phases: Any, **of_math: Any) -> Path:
    """Write a schedule of these sources with phases as (first token, weights). Returns its path."""
    path = folder / f"mix{len(list(folder.glob('mix*')))}.yaml"
    sources = {name: {"path": prefix, **(of_math if name == "math" else {})} for name, prefix in prefixes.items()}
    text = {"sources": sources, "phases": [{"from": first, "weights": weights} for first, weights in phases]}
    path.write_text(yaml.safe_dump(text))
    return path


def records(directory: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(directory) if "grad_norm" in line]


def ledger(spawn: Callable[..., Job], run: Path) -> str:
    """Return what the tool says of a run."""
    job = spawn([ROOT / "tools" / "inspect_dataset.py", "--ledger", run], 1)
    assert job.wait() == [0], job.stderr(0)
    return str(job.stdout(0))


def test_a_mix_is_the_same_whenever_the_run_stops(
    prefixes: dict[str, str], run: Run, spawn: Callable[..., Job], tmp_path: Path
) -> None:
    """A run is stopped, told other later phases, and continued on another layout: only what comes after is another."""
    first = schedule(tmp_path, prefixes, (0, {"web": 2, "code": 1}), (256, {"web": 1, "math": 1}), max_epochs=1)
    whole = (*FLAGS, "--train-iters", 12, "--save-interval", 6)
    run(*whole, "--save", tmp_path / "whole", data=(*NULL, "--data-mix-schedule", first))
    begun = (*whole, "--save", tmp_path / "run", "--data-mix-schedule", first, "--exit-interval", 6)
    run(*begun, data=NULL, expected=85)
    shutil.copytree(tmp_path / "run", tmp_path / "changed")
    on = (*whole, "--resume", "auto", "--save")
    run(*on, tmp_path / "run", data=(*NULL, "--data-mix-schedule", first))
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    other = schedule(tmp_path, prefixes, (0, {"web": 2, "code": 1}), (256, {"web": 1, "math": 1}), (512, {"code": 1}))
    ended = run(*on, tmp_path / "changed", "--tp", 2, data=(*NULL, "--data-mix-schedule", other), world_size=2)
    assert (
        "note: data mix: sample 24 is the first of a phase: web 50 %, math 50 %" in ended.stdout
    )  # math has no cap now
    changed, expected = records(tmp_path / "changed"), records(tmp_path / "whole")
    for ours, theirs in zip(changed[:8], expected[:8], strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-10)
        assert ours["consumed_tokens/math"] == theirs["consumed_tokens/math"]
    assert changed[8]["consumed_tokens/code"] - changed[7]["consumed_tokens/code"] == 64
    assert set(changed[9]) & {"lm_loss/code", "lm_loss/web"} == {"lm_loss/code"}
    (decision,) = [json.loads(line) for line in (tmp_path / "changed" / "ledger.jsonl").read_text().splitlines()]
    assert (decision["kind"], decision["samples"]) == ("data", [[0, 23]])
    said = ledger(spawn, tmp_path / "changed")
    assert "48 samples of 16 tokens, 768 tokens" in said
    assert "each of 48 samples was looked up: no token of a pass is missing before the next one, or comes twice" in said


@pytest.mark.wide_except("dp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mix_is_the_same_on_every_layout(layout: str, prefixes: dict[str, str], run: Run, tmp_path: Path) -> None:
    path = schedule(tmp_path, prefixes, (0, {"web": 2, "code": 1}), (128, {"web": 1, "math": 1}))
    flags = (*FLAGS, "--train-iters", 4, "--save")
    run(*flags, tmp_path / "one", data=(*NULL, "--data-mix-schedule", path))
    ranks, more = LAYOUTS[layout]
    run(*flags, tmp_path / layout, *more, data=(*NULL, "--data-mix-schedule", path), world_size=ranks)
    for ours, theirs in zip(records(tmp_path / layout), records(tmp_path / "one"), strict=True):
        for name in (name for name in theirs if name.startswith(("lm_loss", "consumed_tokens"))):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-10)


def test_a_mix_takes_over_from_a_blend_with_longer_samples(
    prefixes: dict[str, str], run: Run, spawn: Callable[..., Job], tmp_path: Path
) -> None:
    """A blend at 16 tokens becomes a mix at 32: positions, counts and records go on in tokens."""
    blend = ("--data-path", 2, prefixes["web"], 1, prefixes["code"], "--split", "90,10,0", "--seq-length", 16)
    sizes = (*FLAGS, "--max-position-embeddings", 32, "--save", tmp_path / "run")
    run(*sizes, "--train-iters", 5, data=(*NULL, *blend))
    path = schedule(tmp_path, prefixes, (0, {"web": 1, "code": 1, "math": 1}))
    longer = ("--seq-length", 32, "--global-batch-size", 2, "--micro-batch-size", 1, "--split", "90,10,0")
    mixed = (*sizes, *longer, "--train-iters", 10, "--resume", "auto")
    ended = run(*mixed, data=(*NULL, "--data-mix-schedule", path))
    assert "the next one is number 10 now, and was 20" in ended.stdout
    assert "takes over from a blend (web behind its sample 13, code behind its sample 7)" in ended.stdout
    found = records(tmp_path / "run")
    assert [line["consumed_tokens"] for line in found] == [64 * step for step in range(1, 11)]
    last = found[-1]
    assert sum(value for name, value in last.items() if name.startswith("consumed_tokens/")) == 640
    said = ledger(spawn, tmp_path / "run")
    assert "step 6: data: takes over from a blend" in said
    assert "no token of a pass is missing before the next one, or comes twice" in said
    # What cannot be right is refused before the first step, in one line.
    for flags, message in {
        ("--split", "80,20,0"): "was trained on the part from 0 to 0.9 of each file",
        ("--seed", 7): "--seed 7: the sources of",
    }.items():
        refused = run(*mixed, "--train-iters", 12, *flags, data=(*NULL, "--data-mix-schedule", path), expected=93)
        assert message in refused.stderr
    left = run(*mixed, "--train-iters", 12, data=(*NULL, *blend[:-2]), expected=93)
    assert "is of a run with --data-mix-schedule" in left.stderr


@pytest.mark.wide
def test_a_run_goes_back_to_where_samples_became_longer(
    prefixes: dict[str, str], run: Run, spawn: Callable[..., Job], tmp_path: Path
) -> None:
    """The checkpoint there counts shorter samples; those left out are longer ones, and the change stays recorded."""
    path = schedule(tmp_path, prefixes, (0, {"web": 2, "code": 1}))
    flags = (*FLAGS, "--max-position-embeddings", 32, "--save", tmp_path / "run")
    run(*flags, "--train-iters", 4, data=(*NULL, "--data-mix-schedule", path))
    longer = words("--train-iters 14 --seq-length 32 --global-batch-size 2 --micro-batch-size 1 --resume auto")
    alarms = words("--check-for-spiky-loss --spiky-loss-policy rewind --spiky-loss-factor 1.001 --spiky-loss-window 1")
    ended = run(*flags, *longer, *alarms, "--save-interval", 20, data=(*NULL, "--data-mix-schedule", path))
    assert "The run has gone back from step 12 to 4, without them" in ended.stdout
    decisions = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    found = [(each["step"], each["kind"], each["samples"]) for each in decisions]
    assert found == [(5, "data", [[0, 7]]), (5, "spike", [[22, 23]])]
    lines = records(tmp_path / "run")
    assert [(line["iteration"], line["consumed_tokens"]) for line in lines] == [
        (step, 64 * step) for step in range(1, 15)
    ]
    assert "each of 38 samples was looked up: no token of a pass is missing" in ledger(spawn, tmp_path / "run")


def test_numbers_of_samples_that_mean_something_else_are_told(
    prefixes: dict[str, str], run: Run, tmp_path: Path
) -> None:
    """Longer samples in the same batch make longer steps, and warm-up counts longer samples."""
    path = schedule(tmp_path, prefixes, (0, {"web": 1, "code": 1}))
    flags = (*FLAGS, "--max-position-embeddings", 32, "--save", tmp_path / "run", "--lr-warmup-samples", 8)
    run(*flags, "--train-samples", 16, data=(*NULL, "--data-mix-schedule", path))
    longer = (*flags, "--train-samples", 24, "--seq-length", 32, "--resume", "auto")
    said = " ".join(run(*longer, data=(*NULL, "--data-mix-schedule", path)).stdout.split())
    assert "--train-samples, --lr-warmup-samples count samples of 32 tokens now, not of 16" in said
    assert "a step has 128 tokens now, and had 64" in said
    assert "--global-batch-size 2 would keep it" in said


def open_schedule(folder: Path, prefixes: dict[str, str]) -> str:
    """Open a schedule whose weights are others on the second rank. Returns the error that this rank gets."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    path = folder / f"mix{mesh.rank}.yaml"
    weights = {"web": 1 + mesh.rank, "code": 1}
    sources = {name: {"path": prefix} for name, prefix in prefixes.items()}
    path.write_text(yaml.safe_dump({"sources": sources, "phases": [{"weights": weights}]}))
    flags = [*NULL, *FLAGS, "--train-iters", "2", "--data-mix-schedule", str(path)]
    config = resolve(parse_arguments([str(flag) for flag in flags]).config, mesh.world_size)
    task = GPTTask(config, open_data(config), mesh)
    try:
        task.notes(cast(Summarized, None))  # it is not asked before the ranks have compared
    except DataError as error:
        return str(error)
    return ""


def test_ranks_that_read_other_schedules_are_refused(
    prefixes: dict[str, str], rank_pools: RankPools, tmp_path: Path
) -> None:
    """A path may lead to another file on each node: all ranks say so, and none trains."""
    found = rank_pools(2).run(open_schedule, tmp_path, prefixes)
    assert all("the ranks do not read the same file" in each for each in found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data-path", "x"), "the data is given in more than one way"),
        (("--mock-data",), "the data is given in more than one way"),
        (("--sft",), "--data-mix-schedule mixes token files"),
        (("--phase-transition-iterations", "3"), "its phases begin at the tokens [192] with steps of 64"),
        (("--phase-transition-iterations", "x"), "give steps separated by commas"),
        (("--split", "1,0,0"), "leaves nothing to validate on"),
    ],
)
def test_flags_that_contradict_the_mix(
    flags: tuple[str, ...], message: str, prefixes: dict[str, str], run: Run, tmp_path: Path
) -> None:
    path = schedule(tmp_path, prefixes, (0, {"web": 1}), (128, {"code": 1}))
    given = (*FLAGS, "--eval-iters", 1, "--train-iters", 4, *flags)
    ended = run(*given, data=(*NULL, "--data-mix-schedule", path), expected=64)
    assert message in ended.stderr


def test_a_mix_that_ends_before_the_run_is_refused_at_the_start(
    prefixes: dict[str, str], run: Run, tmp_path: Path
) -> None:
    path = schedule(tmp_path, prefixes, (0, {"math": 1}), max_epochs=1)
    flags = (*FLAGS, "--train-iters", 40, "--split", "1,0,0")
    ended = run(*flags, data=(*NULL, "--data-mix-schedule", path), expected=64)
    assert "in phase 1, all sources have reached max_epochs at token 192" in ended.stderr
    agreed = ("--phase-transition-iterations", "2", "--train-iters", 3, "--split", "1,0,0")
    path = schedule(tmp_path, prefixes, (0, {"math": 1}), (128, {"web": 1}))
    run(*FLAGS, *agreed, data=(*NULL, "--data-mix-schedule", path))
