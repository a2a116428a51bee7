"""Runs with a teacher: on layouts, continued, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from tests.end_to_end.runs import GPT2, LLAMA, MOCK, NO_DROPOUT, Run, assert_same_checkpoint, metrics, words

STUDENT = (*GPT2, *NO_DROPOUT, *words("--fp64 --lr-decay-style constant"))
TEACHER = (*LLAMA, *NO_DROPOUT, *words("--hidden-size 32 --num-layers 4 --fp64 --train-iters 2"))
TERMS = ("lm_loss", "distill_loss")
LAYOUTS = {
    "tp2": "--tp 2 --sequence-parallel",
    "zero3": "--data-parallel-sharding-strategy optim_grads_params",
    "pp2": "--pp 2",
    "cp2": "--cp 2",
}


@pytest.fixture
def teacher(run: Run, tmp_path: Path) -> Path:
    """Run directory of a larger network, trained with dropout off."""
    run(*TEACHER, "--save", tmp_path / "teacher", data=MOCK)
    return tmp_path / "teacher"


def records(directory: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(directory) if "grad_norm" in line]


def test_runs_with_a_teacher_agree_and_continue(teacher: Path, run: Run, tmp_path: Path) -> None:
    flags = (*STUDENT, "--distill-from", teacher, *words("--distill-weight 0.7 --distill-temperature 2 --save"))
    whole, parts, split = tmp_path / "whole", tmp_path / "parts", tmp_path / "split"
    evaluated = words("--eval-iters 1 --eval-interval 4")
    began = run(*flags, whole, "--train-iters", 4, *evaluated, data=MOCK)
    assert "41,056 parameters: 4 layers, hidden 32; 436 KiB a rank, of which 356 KiB are weights" in began.stdout
    run(*flags, parts, "--train-iters", 4, *evaluated, "--exit-interval", 2, data=MOCK, expected=85)
    resumed = run(*flags, parts, "--train-iters", 4, *evaluated, "--resume", "auto", data=MOCK)
    assert "note: the checkpoint's options" not in resumed.stdout
    assert_same_checkpoint(parts / "iter_0000004", whole / "iter_0000004")
    assert metrics(parts) == metrics(whole)
    assert [line["distill_loss"] > 0 for line in records(whole)] == [True] * 4
    (evaluation,) = [line for line in metrics(whole) if "valid_loss" in line]
    assert "distill_loss" not in evaluation
    run(*flags, split, "--train-iters", 4, *words(LAYOUTS["tp2"]), data=MOCK, world_size=2)
    assert_agree(split, whole)
    run(*TEACHER, "--save", teacher, "--resume", "auto", "--train-iters", 3, data=MOCK)
    on = run(*flags, parts, "--train-iters", 5, "--resume", "auto", data=MOCK)
    assert f"note: the teacher is now megalite, {teacher / 'iter_0000003'}; until " in on.stdout


def assert_agree(ours: Path, theirs: Path) -> None:
    for one, other in zip(records(ours), records(theirs), strict=True):
        for name in (*TERMS, "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-10), name


@pytest.mark.wide
def test_layouts_agree(teacher: Path, run: Run, tmp_path: Path) -> None:
    flags = (*STUDENT, "--distill-from", teacher, *words("--distill-top-k 7 --train-iters 3 --save"))
    run(*flags, tmp_path / "alone", data=MOCK)
    for name, layout in LAYOUTS.items():
        run(*flags, tmp_path / name, *words(layout), data=MOCK, world_size=2)
        assert_agree(tmp_path / name, tmp_path / "alone")
    run(*flags, tmp_path / "own", *words("--pp 2 --distill-layout cp 2"), data=MOCK, world_size=2)
    assert_agree(tmp_path / "own", tmp_path / "alone")
    stopped = (*flags, tmp_path / "parts", *words("--pp 2 --distill-layout cp 2"))
    run(*stopped, "--exit-interval", 2, data=MOCK, world_size=2, expected=85)
    run(*stopped, "--resume", "auto", data=MOCK, world_size=2)
    assert_same_checkpoint(tmp_path / "parts" / "iter_0000003", tmp_path / "own" / "iter_0000003")


@pytest.mark.wide
def test_a_teacher_with_flags_of_its_training_alone_has_another_layout(run: Run, tmp_path: Path) -> None:
    """Neither the loads that a balancing loss remembers nor DeepEP are needed to run it."""
    experts = words("--num-experts 4 --moe-token-dispatcher-type flex --moe-router-load-balancing-type global_aux_loss")
    run(*TEACHER, *experts, *words("--moe-aux-loss-coeff 0.1"), "--save", tmp_path / "teacher", data=MOCK)
    flags = (*STUDENT, "--distill-from", tmp_path / "teacher", *words("--train-iters 2 --save"))
    run(*flags, tmp_path / "alone", data=MOCK)
    run(*flags, tmp_path / "own", *words("--distill-layout ep 2"), data=MOCK, world_size=2)
    assert_agree(tmp_path / "own", tmp_path / "alone")


def test_a_teacher_that_is_not_there_or_has_other_tokens_is_refused(run: Run, teacher: Path, tmp_path: Path) -> None:
    flags = (*STUDENT, *words("--train-iters 1"))
    gone = run(*flags, "--distill-from", tmp_path / "gone", data=MOCK, expected=64)
    assert f"--distill-from {tmp_path / 'gone'} is no folder" in gone.stderr
    other = words("--mock-data --tokenizer-type NullTokenizer --vocab-size 70 --no-report")
    refused = run(*flags, "--distill-from", teacher, data=other, expected=64)
    assert "the teacher has 61 tokens, and the network that is trained has 71" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--distill-weight 0.3", "--distill-weight needs --distill-from"),
        ("--distill-top-k 3 --distill-temperature 2", "--distill-top-k needs --distill-from"),
        ("--distill-from x --distill-weight 0", "--distill-weight 0.0: must be above 0, at most 1"),
        ("--distill-from x --mtp-num-layers 1", "teachers predict the next token alone; drop one"),
        ("--distill-layout tp 1", "--distill-layout needs --distill-from"),
        ("--distill-from x --distill-layout tp 2", "--distill-layout tp 2: 1 ranks cannot be divided into groups of"),
        (
            "--distill-from x --distill-layout dp 2",
            "--distill-layout dp 2: 'dp' is no part of a layout: give any",
        ),
        ("--distill-from x --distill-layout tp", "--distill-layout tp: tp needs a number of ranks behind it, not ''"),
        ("--distill-from x --distill-layout pp 0", "pp 0: --pipeline-model-parallel-size 0: must be at least 1"),
        ("--distill-from x --distill-layout tp 1 tp 1", "--distill-layout tp 1 tp 1: tp is given twice"),
        ("--distill-from x --distill-layout pp 1 sequence-parallel", "sequence-parallel changes nothing with tp 1"),
        ("--distill-from x --fused-linear-cross-entropy", "which never has all logits: drop one"),
    ],
)
def test_flags_that_do_not_fit_a_teacher_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(parse_arguments([*map(str, (*STUDENT, *MOCK)), "--train-iters", "1", *words(flags)]).config, 1)
