"""Effects of the data flags on a run: where it reads, how its batch grows, what it is tested on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.end_to_end.runs import GPT2, NO_DROPOUT, Run, losses, metrics, words
from tests.harness.token_files import add_document

NULL = words("--tokenizer-type NullTokenizer --vocab-size 60")
BYTES = words("--tokenizer-type ByteTokenizer")
EVALUATED = (*GPT2, *NO_DROPOUT, "--eval-iters", 2, "--train-iters", 5)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return documents of numbers that count up."""
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for document in range(60):
            add_document(writer, [*(np.arange(document, document + 20) % 50), 60])
        writer.finish()
    return tmp_path / "corpus"


def test_the_test_set_is_read_once_at_the_end(corpus: Path, run: Run, tmp_path: Path) -> None:
    """A model that is validated and tested on the same file, with as many samples, has the same loss twice."""
    data = ("--train-data-path", corpus, "--valid-data-path", corpus, "--test-data-path", corpus)
    ended = run(*EVALUATED, "--save", tmp_path / "run", data=(*NULL, *data))
    valid, test = metrics(tmp_path / "run")[-2:]
    assert (valid["iteration"], test["iteration"]) == (5, 5)
    assert test["test_loss"] == valid["valid_loss"]
    assert sum("test_loss" in line for line in metrics(tmp_path / "run")) == 1
    assert "test at step 5 | loss" in ended.stdout


@pytest.mark.wide
def test_a_run_that_stops_before_its_end_is_not_tested(corpus: Path, run: Run, tmp_path: Path) -> None:
    flags = (*EVALUATED, "--save", tmp_path / "run", "--exit-interval", 3, "--split", "80,10,10")
    run(*flags, data=(*NULL, "--data-path", corpus), expected=85)
    assert not any("test_loss" in line for line in metrics(tmp_path / "run"))


@pytest.mark.wide
def test_every_form_of_the_same_paths_is_the_same_run(corpus: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "blend").write_text(f"1 {corpus} 2 {corpus}")
    (tmp_path / "each").write_text(json.dumps({"train": ["1", str(corpus), "2", str(corpus)]}))
    forms = [
        ("--data-path", 1, corpus, 2, corpus, "--split", 1),
        ("--data-args-path", tmp_path / "blend", "--split", 1),
        ("--train-data-path", 1, corpus, 2, corpus),
        ("--per-split-data-args-path", tmp_path / "each"),
    ]
    found = []
    for number, form in enumerate(forms):
        flags = (*GPT2, *NO_DROPOUT, "--train-iters", 3, "--save", tmp_path / str(number))
        run(*flags, data=(*NULL, *form))
        found.append(losses(tmp_path / str(number)))
    assert found == [found[0]] * len(forms)


@pytest.mark.wide
def test_a_cache_that_cannot_be_written_is_told_and_changes_nothing(corpus: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = []
    for name, cache in (("a", tmp_path / "cache"), ("b", tmp_path / "file" / "cache")):
        flags = (*GPT2, *NO_DROPOUT, "--train-iters", 3, "--save", tmp_path / name, "--data-cache-path", cache)
        ended = run(*flags, data=(*NULL, "--data-path", corpus, "--split", "90,10,0"), world_size=2)
        assert ended.stdout.count("cannot be kept in") == (name == "b")
        found.append(losses(tmp_path / name))
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        ("--rampup-batch-size", 4, 4, 24, "--global-batch-size", 12),
        pytest.param(
            ("--step-batch-size-schedule", "0:4 384:12", "0.192K:8", "--global-batch-size", None),
            marks=pytest.mark.wide,
        ),
    ],
    ids=["ramp", "schedule"],
)
def test_the_batch_grows_alike_through_a_resume_on_other_ranks(
    run: Run, tmp_path: Path, sizes: tuple[object, ...]
) -> None:
    course = (*GPT2, *NO_DROPOUT, *sizes, "--train-samples", 70, "--fp64", "--save-interval", 100)
    run(*course, "--save", tmp_path / "whole")
    expected = metrics(tmp_path / "whole")
    # With 16 tokens per sample: 4 until 12 samples, 8 until 24, from there (the 28th on) 12, of which three are left.
    assert [line["consumed_samples"] for line in expected] == [4, 8, 12, 20, 28, 40, 52, 64]
    run(*course, "--save", tmp_path / "parts", "--exit-interval", 4, expected=85)
    run(*course, "--save", tmp_path / "parts", "--resume", "auto", "--micro-batch-size", 1, world_size=2)
    found = metrics(tmp_path / "parts")
    assert [line["consumed_samples"] for line in found] == [line["consumed_samples"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-9)


@pytest.mark.wide
def test_another_batch_size_trains_on_as_many_samples(run: Run, tmp_path: Path) -> None:
    course = (*GPT2, "--train-samples", 40, "--save", tmp_path / "run", "--save-interval", 100)
    run(*course, "--exit-interval", 3, expected=85)
    run(*course, "--resume", "auto", "--global-batch-size", 8)
    assert [line["consumed_samples"] for line in metrics(tmp_path / "run")] == [4, 8, 12, 20, 28, 36]


@pytest.mark.wide
def test_a_resume_with_other_data_is_told(corpus: Path, run: Run, tmp_path: Path) -> None:
    course = (*GPT2, "--save", tmp_path / "run", "--save-interval", 100, "--split", "1,0,0", "--eval-iters", 0)

    def resumed(*flags: Any) -> bool:
        directory = tmp_path / "copy"
        shutil.copytree(tmp_path / "run", directory)
        resume = (*course, "--save", directory, "--resume", "auto", "--exit-interval", 4, *flags)
        ended = run(*resume, data=(*NULL, "--data-path", corpus), expected=85)
        shutil.rmtree(directory)
        return "the data or their order have changed" in ended.stdout

    run(*course, "--train-samples", 40, "--exit-interval", 3, data=(*NULL, "--data-path", corpus), expected=85)
    assert not resumed("--train-samples", 40)
    assert not resumed("--train-samples", 40, "--global-batch-size", 8)
    assert resumed("--train-samples", 40, "--seed", 77)
    assert resumed("--train-samples", 4000)


def test_conversations_train(run: Run, tmp_path: Path) -> None:
    records = ({"prompt": f"{n}=", "completion": f"{n}"} for n in range(100))
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = (*BYTES, "--sft", "--data-path", tmp_path / "talk.jsonl", "--split", "80,10,10")
    run(*EVALUATED, "--save", tmp_path / "run", "--train-iters", 40, data=data, world_size=2)
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 1
    assert {"valid_loss", "test_loss"} <= {key for line in metrics(tmp_path / "run") for key in line}


@pytest.mark.wide
def test_documents_to_fill_in_train(run: Run, tmp_path: Path) -> None:
    marks = zip(("prefix", "middle", "suffix", "pad"), range(56, 60), strict=True)
    flags = [word for name, token in marks for word in (f"--fim-{name}-token", token)]
    found = []
    for workers in (0, 2):
        directory = tmp_path / str(workers)
        run(*GPT2, "--train-iters", 3, "--save", directory, "--fim-data", *flags, "--num-workers", workers)
        found.append(losses(directory))
    run(*GPT2, "--train-iters", 3, "--save", tmp_path / "plain")
    assert found[0] == found[1] != losses(tmp_path / "plain")


@pytest.mark.wide
def test_a_schedule_may_begin_with_fewer_ranks(run: Run, tmp_path: Path) -> None:
    """Its first size is too small for the ranks that continue; on them, it cannot begin."""
    course = (*GPT2, "--global-batch-size", None, "--step-batch-size-schedule", "0:2 64:8", "--train-samples", 28)
    directory = ("--save", tmp_path / "run", "--resume", "auto")
    refused = run(*course, *directory, world_size=2, expected=64)
    assert "the size 2, of the step at 0 samples, is not a multiple of --micro-batch-size 2 x 2" in refused.stderr
    run(*course, *directory, "--exit-interval", 2, expected=85)
    run(*course, *directory, world_size=2)
    assert [line["consumed_samples"] for line in metrics(tmp_path / "run")] == [2, 4, 12, 20, 28]


@pytest.mark.wide
def test_an_evaluation_has_batches_of_its_own_size(run: Run, tmp_path: Path) -> None:
    """Six batches of 4 samples are the samples of two batches of 12."""
    course = (*GPT2, *NO_DROPOUT, "--fp64", "--train-iters", 2, "--eval-interval", 1)
    found = []
    for name, sizes in {
        "small": ("--eval-iters", 6),
        "large": ("--eval-iters", 2, "--eval-global-batch-size", 12),
        "one": ("--eval-iters", 2),
    }.items():
        run(*course, *sizes, "--save", tmp_path / name, world_size=2)
        found.append([line["valid_loss"] for line in metrics(tmp_path / name) if "valid_loss" in line])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] != pytest.approx(found[2], rel=1e-6)
    assert len(found[0]) == 2
