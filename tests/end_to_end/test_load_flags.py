"""Every flag for choosing, loading and keeping checkpoints works, and every problem is reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.runs import (
    GPT2,
    PRETRAIN,
    Run,
    Start,
    assert_same_checkpoint,
    contents,
    ended,
    iterations,
    latest_iteration,
    metrics,
    saved_tensors,
    words,
)
from tests.harness.job import Job

CONSTANT = (*GPT2, *words("--lr-decay-style constant"))
EACH = words("--save-interval 1")
STEPS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of four steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("whole")
    mock = words("--mock-data --tokenizer-type NullTokenizer --vocab-size 60")
    argv: list[Any] = [PRETRAIN, *mock, *CONSTANT, "--train-iters", STEPS, "--save", folder / "run", *EACH]
    with Job(argv, 2, folder / "job") as job:
        assert job.wait() == [0, 0], job.stderr(0)
    return folder / "run"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)


def step(directory: Path, number: int) -> Path:
    return directory / f"iter_{number:07d}"


# ------------------------------------------------------------------------------------------------------ choosing


def test_a_run_falls_back_over_damage_that_one_rank_sees_and_is_the_run_unbroken(
    run: Run, whole: Path, copy: Path
) -> None:
    flip_a_bit(step(copy, 4) / "rank_00001.safetensors")
    (step(copy, 3) / "rank_00000.safetensors").unlink()
    out = run(*CONSTANT, "--train-iters", STEPS + 1, "--save", copy, *EACH, "--resume", "auto", world_size=2).stdout
    assert f"WARNING: fell back to {step(copy, 2)}: 2 steps are repeated from step 2 on" in out
    assert "rank_00001.safetensors: the checksum of" in out
    assert "rank_00000.safetensors: it is missing" in out
    assert f"continues from {step(copy, 2)}" in out
    assert iterations(copy) == [1, 2, 3, 4, 5], "metrics are cut where the run goes on"
    assert metrics(copy)[:STEPS] == metrics(whole)
    for number in (3, 4):
        assert_same_checkpoint(step(copy, number), step(whole, number))


@pytest.mark.wide
def test_a_finished_run_whose_end_is_damaged_is_finished_again(run: Run, whole: Path, copy: Path) -> None:
    (step(copy, 4) / "manifest.json").unlink()
    out = run(*CONSTANT, "--train-iters", STEPS, "--save", copy, "--load", copy, world_size=2).stdout
    assert "iter_0000004 is not a checkpoint: it has no manifest.json" in out
    assert_same_checkpoint(step(copy, 4), step(whole, 4))


@pytest.mark.wide
def test_nothing_begins_anew_where_all_are_damaged(run: Run, copy: Path) -> None:
    for number in range(1, STEPS + 1):
        flip_a_bit(step(copy, number) / "rank_00000.safetensors")
    before = contents(copy)
    for chosen in (["--resume", "auto"], ["--load", copy, "--ckpt-step", 2]):
        error = run(*CONSTANT, "--train-iters", 9, "--save", copy, *chosen, expected=93).stderr
        assert "there is no undamaged checkpoint to start from" in error
        assert ("iter_0000001" in error) == ("auto" in chosen), "--ckpt-step is that one or none"
    assert contents(copy) == before


@pytest.mark.wide
def test_ckpt_step_goes_back_and_leaves_what_was_beyond(run: Run, whole: Path, copy: Path, tmp_path: Path) -> None:
    flags = [*CONSTANT, "--train-iters", 3, "--load", copy, "--ckpt-step"]
    assert f"continues from {step(copy, 2)}" in run(*flags, 2, "--save", tmp_path / "other", world_size=2).stdout
    assert iterations(tmp_path / "other") == [3]
    assert_same_checkpoint(step(tmp_path / "other", 3), step(whole, 3))

    run(*flags, 1, "--save", copy, "--exit-interval", 2, world_size=2, expected=85)
    assert latest_iteration(copy) == 2
    out = run(*flags[:-1], "--save", copy, world_size=2).stdout
    assert f"note: iter_0000004, iter_0000003 in {copy}: newer than step 2" in out
    assert f"continues from {step(copy, 2)}" in out
    error = run(*flags, 7, "--save", tmp_path / "third", expected=64).stderr
    assert f"--ckpt-step 7: {copy} has only steps 1, 2, 3, 4" in error


def test_a_missing_checkpoint_ends_the_run_if_asked_to(run: Run, tmp_path: Path) -> None:
    flags = [*CONSTANT, "--train-iters", 1, "--load", tmp_path / "new", "--save", tmp_path / "new"]
    error = run(*flags, "--exit-on-missing-checkpoint", expected=64).stderr
    assert f"--exit-on-missing-checkpoint: --save {tmp_path / 'new'} and --load {tmp_path / 'new'} has no" in error
    run(*flags)
    run(*flags, "--train-iters", 2, "--resume", "auto", "--exit-on-missing-checkpoint")


# ------------------------------------------------------------------------------------------------------ what is taken


def test_a_load_that_would_silently_begin_with_random_weights_is_refused(run: Run, whole: Path, tmp_path: Path) -> None:
    def error(load: Path, *flags: Any) -> str:
        return run(*CONSTANT, "--train-iters", 2, "--load", load, *flags, expected=64).stderr

    one = step(whole, 4)
    assert f"--load {one} is one checkpoint: give its run directory {whole} (with --ckpt-step 4)" in error(one)
    foreign = tmp_path / "step-10"
    foreign.mkdir()
    (foreign / ".metadata").touch()
    assert f"--load {foreign} was not written by megalite: it has a .metadata, but no manifest.json" in error(foreign)
    assert "megalite-convert --loader megatron" in error(foreign)
    none = tmp_path / "none"
    for flags in ((), ("--finetune",), ("--save", tmp_path / "new", "--resume", "auto")):
        assert f"--load {none} is no folder" in error(none, *flags)
    assert not (tmp_path / "new").exists()


@pytest.mark.wide
def test_finetune_takes_the_weights_and_begins_a_new_run(run: Run, whole: Path, tmp_path: Path) -> None:
    new = [*CONSTANT, "--train-iters", 2, "--load", whole, "--finetune", "--save", tmp_path / "new", "--resume", "auto"]
    out = run(*new, "--lr", 0, "--exit-interval", 1, expected=85).stdout
    assert f"new, with the weights of {step(whole, 4)}" in out
    assert "restored: weights; ignored: optimizer state (4 updates): a new one by --finetune, position" in out
    assert "note: --lr" not in out
    assert iterations(tmp_path / "new") == [1]
    assert metrics(tmp_path / "new")[0]["consumed_samples"] == 4
    ours, theirs = saved_tensors(step(tmp_path / "new", 1)), saved_tensors(step(whole, 4))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name.startswith("model/"))
    out = run(*new).stdout
    assert f"continues from {step(tmp_path / 'new', 1)}" in out, "--finetune is for --load alone"
    assert iterations(tmp_path / "new") == [1, 2]


@pytest.mark.wide
def test_a_new_optimizer_goes_on_with_the_weights_alone(run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(*CONSTANT, "--train-iters", 2, "--save", first, "--no-save-optim", "--no-save-rng")
    assert all(name.startswith("model/") for name in saved_tensors(step(first, 2)))
    flags = [*CONSTANT, "--train-iters", 3, "--load", first, "--save", second]
    assert "it was saved with --no-save-optim. --no-load-optim continues" in run(*flags, expected=93).stderr
    out = run(*flags, "--no-load-optim", "--no-load-rng", "--optimizer", "sgd").stdout
    assert "--no-load-rng: already so" in out
    assert "ignored: optimizer state (2 updates): a new one by --no-load-optim" in out
    assert "note: --optimizer is sgd here, and was adam in the run that saved the checkpoint" in out
    assert iterations(second) == [3]


@pytest.mark.wide
def test_a_checkpoint_says_what_the_schedule_is(run: Run, tmp_path: Path) -> None:
    """Flags say something else, and a run without a checkpoint follows them."""
    keeps = (*GPT2, "--use-checkpoint-opt-param-scheduler")
    decay = words("--lr 0.01 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.2 --save-interval 4")
    directory = ("--save", tmp_path / "run", "--load", tmp_path / "run")
    run(*keeps, *decay, *directory, "--train-iters", 8, "--exit-interval", 4, expected=85)
    other = words("--lr 0.5 --lr-decay-style linear --lr-warmup-iters 0 --weight-decay 0 --lr-decay-iters 100")
    run(*keeps, *other, *directory, "--train-iters", 10)
    refused = run(*keeps, *other, *directory, "--train-iters", 12, "--global-batch-size", 8, expected=64)
    assert "counts steps of 4 samples, not of --global-batch-size 8" in refused.stderr
    run(*GPT2, *decay, "--lr-decay-iters", 8, "--train-iters", 10, "--save", tmp_path / "expected")
    found, expected = metrics(tmp_path / "run"), metrics(tmp_path / "expected")
    assert [line["learning_rate"] for line in found] == [line["learning_rate"] for line in expected]
    assert [line["lm_loss"] for line in found] == [line["lm_loss"] for line in expected]


@pytest.mark.wide
def test_a_checkpoint_says_what_the_model_is(run: Run, start: Start, copy: Path) -> None:
    course = words("--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0")
    flags = [*course, "--lr-decay-style", "constant", "--train-iters", 5, "--load", copy, "--save", copy]
    mock, saved = words("--mock-data"), "--use-checkpoint-args"
    assert "missing: --num-layers" in run(*flags, data=mock, expected=64).stderr
    out = ended(start(*flags, saved, data=mock, world_size=2)).stdout
    assert f"continues from {step(copy, 4)}" in out
    assert "vocabulary     61" in out
    error = run(*flags, saved, "--swiglu", "--train-iters", 6, data=mock, expected=93).stderr
    assert "swiglu: False in the checkpoint, True in this run" in error
    error = run(*course, saved, "--load", copy / "none", data=mock, expected=64).stderr
    assert f"--load {copy / 'none'} is no folder; there are some in {copy}" in error


@pytest.mark.wide
def test_another_precision_loads_by_its_flag_alone(run: Run, whole: Path, tmp_path: Path) -> None:
    flags = [*CONSTANT, "--train-iters", 5, "--load", whole, "--save", tmp_path / "new", "--bf16"]
    run(*flags, expected=93)
    out = run(*flags, "--load-casts").stdout
    assert "restored: weights, optimizer state (4 updates), position (step 4, 16 samples)" in out
    assert saved_tensors(step(tmp_path / "new", 5))["model/embedding.word"].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------ keeping


@pytest.mark.wide
def test_only_every_kth_and_the_newest_two_are_kept(run: Run, tmp_path: Path) -> None:
    run(*CONSTANT, "--train-iters", 7, "--save", tmp_path / "run", *EACH, "--save-retain-interval", 3)
    kept = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert kept == ["iter_0000003", "iter_0000006", "iter_0000007"]


def test_a_failed_save_is_told_and_training_goes_on(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (step(directory, 2)).mkdir(parents=True)
    (step(directory, 2) / "foreign").touch()
    flags = [*CONSTANT, "--train-iters", 3, "--save", directory, *EACH]
    out = run(*flags, world_size=2).stdout
    assert "WARNING: saving iteration 2 to" in out
    assert "Training continues, unsaved: failure 1 of 2 that --tolerated-save-failures allows in a row" in out
    assert latest_iteration(directory) == 3
    assert (step(directory, 2) / "foreign").exists()


@pytest.mark.wide
def test_failed_saves_end_the_run_when_there_are_too_many(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for number, tolerated, done in ((1, 0, 1), (2, 1, 2), (3, 9, 3)):
        for blocked in range(1, 4):
            (step(directory / str(number), blocked)).mkdir(parents=True)
        flags = [*CONSTANT, "--train-iters", 3, "--save", directory / str(number), *EACH]
        job = ended(start(*flags, "--tolerated-save-failures", tolerated), expected=93)
        assert f"error: saving iteration {done} to" in job.stderr
        assert job.stdout.count("Training continues") == done - 1, "the last save must succeed"


def test_two_jobs_do_not_save_into_one_directory(start: Start, run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    endless = [*CONSTANT, "--train-iters", 100000, "--save", directory]
    first = start(*endless)
    first.wait_for_output(0, "step      1/100000")
    error = run(*endless, "--resume", "auto", expected=64, world_size=2).stderr
    assert f"another run is saving into --save {directory} (process {first.ranks[0].process.pid} on " in error
    first.kill_all()
    first.wait()
    run(*CONSTANT, "--train-iters", 1, "--save", directory)
