"""Logs of right runs are not accused; of wrong ones, the first figure that is wrong is, and the cause comes first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.errors import DataError
from megalite.extras.verify.command import Command
from megalite.extras.verify.logs import LOSS, NORM, RATE, Log, read_log
from megalite.extras.verify.metrics_check import MetricsCheck, check_metrics
from megalite.extras.verify.truth import OneProcess, Step, copies_of_tensors, open_data_of, with_vocabulary
from tests.extras.verify.recorded_run import FLAGS, command_of, megatron_line, saved, train
from tests.harness.rank_pool import RankPools

pytestmark = pytest.mark.extra

MASKED = f"{FLAGS} --eod-mask-loss --reset-position-ids --reset-attention-mask"
TWO_RANKS = "--tensor-model-parallel-size 2 --sequence-parallel"
Record = dict[str, float]


def check(folder: Path, command: Command, *, after: int = 0, steps: int = 3) -> MetricsCheck:
    """Check a log of megalite, whose samples are those of its flags whatever program is taken to have written it."""
    samples = open_data_of(replace(command, program="megalite")).train
    return check_metrics(command, read_log(folder / "metrics.jsonl"), saved(folder, after), steps, samples)


def records_of(folder: Path) -> list[Record]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log_of(folder: Path, records: list[Record]) -> Log:
    (folder / "changed.jsonl").write_text("\n".join(map(json.dumps, records)))
    return read_log(folder / "changed.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("fp32") / "run", MASKED)


# ------------------------------------------------------------------------------------------------ right runs


@pytest.mark.wide_except("flags0", "flags2", "flags4")
@pytest.mark.parametrize(
    "flags",
    [
        FLAGS,
        f"{FLAGS} --fp64",
        f"{MASKED} --bf16 --optimizer muon",
        f"{FLAGS.replace('dropout 0', 'dropout 0.1')} --bf16",
        f"{FLAGS} --bf16 --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 0.01",
    ],
)
def test_right_runs_are_not_accused(tmp_path: Path, flags: str) -> None:
    folder = train(tmp_path / "run", flags)
    found = check(folder, command_of(flags), after=1)
    assert found.first is None, found.first
    assert {figure.step for figure in found.figures} == {2, 3}
    assert {figure.name for figure in found.figures} == {LOSS, NORM, RATE}


def test_runs_may_begin_with_the_initial_values(run: Path) -> None:
    assert check_metrics(command_of(MASKED), read_log(run / "metrics.jsonl"), None).first is None


@pytest.mark.wide_except("--bf16")
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_right_runs_on_two_ranks_are_not_accused(tmp_path: Path, rank_pools: RankPools, precision: str) -> None:
    flags = f"{MASKED} {TWO_RANKS} {precision}"
    rank_pools(2).run(train, tmp_path / "run", flags)
    found = check(tmp_path / "run", command_of(flags, ranks=2))
    assert found.first is None, found.first


def test_lines_of_megatron_have_the_next_rate_and_mean_losses(run: Path) -> None:
    """Its version of now counts the first step in the mean of the second line, too."""
    records = records_of(run)
    rates = OneProcess(command_of(MASKED), open_data_of(command_of(MASKED)), None).trainer.rates
    for mean in (True, False):
        losses = [record["lm_loss"] for record in records]
        losses[1] = (losses[0] + losses[1]) / 2 if mean else losses[1]
        lines = [
            megatron_line(step, loss, record["grad_norm"], rates.at(8 * step).learning_rate)
            for step, (loss, record) in enumerate(zip(losses, records, strict=True), 1)
        ]
        (run / "lines").write_text("\n".join(lines))
        assert check_metrics(command_of(MASKED), read_log(run / "lines"), saved(run, 0)).first is None


def test_a_log_of_other_steps_is_refused(run: Path) -> None:
    log = log_of(run, [record | {"iteration": 100 + record["iteration"]} for record in records_of(run)])
    with pytest.raises(DataError, match="steps 101 to 103"):
        check_metrics(command_of(MASKED), log, saved(run, 0))


def test_skipped_steps_update_nothing(tmp_path: Path) -> None:
    """The first loss scale is far too large for the gradients, so that fp16 skips the first step."""
    flags = f"{FLAGS} --fp16 --initial-loss-scale {2**24} --hysteresis 1 --min-loss-scale 1024"
    folder = train(tmp_path / "run", flags, steps=4)
    assert records_of(folder)[0]["skipped"]
    found = check(folder, command_of(flags), steps=4)
    assert found.first is None, found.first
    assert (1, NORM) not in {(figure.step, figure.name) for figure in found.figures}


# ------------------------------------------------------------------------------------------------ wrong runs


FOUR_RANKS = command_of(f"{MASKED} {TWO_RANKS}", ranks=4)
"""2 tensor-parallel, so 2 data-parallel ranks with 2 micro-batches each."""


@pytest.fixture(scope="module")
def exact_steps(run: Path) -> list[Step]:
    process = OneProcess(FOUR_RANKS, open_data_of(FOUR_RANKS), saved(run, 0))
    return [process.step() for _ in range(3)]


def replicas_counted(step: Step, record: Record) -> Record:
    copies = copies_of_tensors(with_vocabulary(FOUR_RANKS, None), 4)
    squares = sum(copies[name].tensor_parallel * norm**2 for name, norm in step.norms.items())
    return {"grad_norm": math.sqrt(squares)}


WRONG: dict[str, tuple[str, Callable[[Step, Record], Record]]] = {
    "norm times root": (
        "times the root of 2 (the tensor-parallel ranks",
        lambda step, record: {"grad_norm": record["grad_norm"] * 2**0.5},
    ),
    "norm after clipping": (
        "the norm after clipping",
        lambda step, record: {"grad_norm": min(record["grad_norm"], 0.5)},
    ),
    "replicas": ("replicas on tensor-parallel ranks are counted on every rank", replicas_counted),
    "norm in bf16": (
        "rounded to bf16",
        lambda step, record: {"grad_norm": float(torch.tensor(record["grad_norm"]).bfloat16())},
    ),
    "loss over micro-batches": (
        "divided by 4 (the micro-batches of a step",
        lambda step, record: {"lm_loss": record["lm_loss"] / 4},
    ),
    "loss in bits": ("in bits", lambda step, record: {"lm_loss": record["lm_loss"] / math.log(2)}),
    "rate": (
        "that of one step after",
        lambda step, record: {"learning_rate": [0.0, 0.005, 0.01, 0.00939711][int(record["iteration"])]},
    ),
    "rate by micro-batches": (
        "the schedule advances with each micro-batch",
        lambda step, record: {"learning_rate": [0.0, 0.01, 0.0077500][int(record["iteration"]) - 1]},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_figures_are_found_and_explained(run: Path, exact_steps: list[Step], case: str) -> None:
    expected, change = WRONG[case]
    records = [record | change(step, record) for step, record in zip(exact_steps, records_of(run), strict=True)]
    found = check_metrics(FOUR_RANKS, log_of(run, records), saved(run, 0), steps=2)
    assert found.first is not None
    best = found.explanations[0]
    assert best.explains
    assert expected in best.name


@pytest.mark.parametrize(
    ("expected", "first_sample"),
    [("of the step before", 0), ("of the step after", 16), ("begins one sample late", 9), ("one sample early", 7)],
)
def test_other_samples_are_recognized(run: Path, expected: str, first_sample: int) -> None:
    """The second step has samples 8 to 15; the run has read others."""
    command = command_of(MASKED)
    one = OneProcess(command, open_data_of(command), saved(run, 0))
    one.step()
    other = one.tried(one.micro_batches(first_sample))
    records = records_of(run)[:2]
    records[1] |= {"lm_loss": other.loss, "grad_norm": other.norm}
    found = check_metrics(command, log_of(run, records), saved(run, 0))
    assert found.first is not None
    assert (found.first.step, found.first.name) == (2, LOSS)
    assert expected in found.explanations[0].name


@pytest.mark.parametrize("flag", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"])
def test_masks_that_the_run_did_not_apply_are_recognized(tmp_path: Path, flag: str) -> None:
    found = check(train(tmp_path / "run", FLAGS, steps=1), command_of(f"{FLAGS} {flag}"))
    assert found.first is not None
    assert found.explanations[0].name == f"{flag} has no effect"


def test_the_mean_of_the_loss_is_that_of_the_program(run: Path) -> None:
    """Masks give micro-batches different numbers of tokens that count: Megatron-LM then has two means."""
    flags = MASKED
    assert check(run, command_of(flags)).first is None
    found = check(run, command_of(flags, program="megatron"))
    assert found.first is not None
    assert found.first.name == NORM  # it logs the mean over tokens in any case
    assert found.explanations[0].name == "the gradient of the mean over tokens"
    assert check(run, command_of(f"{flags} --calculate-per-token-loss", program="megatron")).first is None


def test_samples_that_another_program_makes_up_are_not_known(run: Path) -> None:
    log = log_of(run, [each | {"lm_loss": 9.0, "grad_norm": 9.0} for each in records_of(run)])
    found = check_metrics(command_of(MASKED, program="megatron"), log, saved(run, 0))
    assert {each.name for each in found.figures} == {RATE}
    assert found.first is None


def test_one_rank_alone_logs_its_own_loss(run: Path) -> None:
    command = command_of(MASKED, ranks=2)
    one = OneProcess(command, open_data_of(command), saved(run, 0))
    micro_batches = one.micro_batches()
    losses = one.token_losses(micro_batches)
    total, count = 0.0, 0.0
    for loss, each in zip(losses[1::2], micro_batches[1::2], strict=True):
        assert each.loss_mask is not None
        total, count = total + float((loss * each.loss_mask).sum()), count + float(each.loss_mask.sum())
    mean = total / count
    found = check_metrics(command, log_of(run, [records_of(run)[0] | {"lm_loss": mean}]), saved(run, 0))
    assert found.explanations[0].name == "that of data-parallel rank 1 alone"
