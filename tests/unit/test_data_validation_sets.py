"""Validation data as several sets, and as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.data import DataConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.data.datasets import Datasets, Samples, build_token_datasets, target_samples
from megalite.data.tokenizers.null import NullTokenizer
from megalite.errors import ConfigurationError, DataError
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.harness.token_files import add_document

WHOLE = Samples(train=5, valid=None, test=0)
SETS = Samples(train=5, valid=6, test=0, evaluation=6, set_names=())
WHOLE_SETS = WHOLE._replace(set_names=())
FLAGS = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1
--train-iters 4 --tokenizer-type NullTokenizer --vocab-size 9 --max-position-embeddings 8"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Return prefixes by name: `a` of 20 documents, `b` of 10, each of ten tokens, and `one` of a single one."""
    for name, documents in (("a", 20), ("b", 10), ("one", 1)):
        (tmp_path / name).mkdir()
        with IndexedDatasetWriter(tmp_path / name / "text", np.uint16) as writer:
            for document in range(documents):
                add_document(writer, np.arange(10) + 10 * document)
            writer.finish()
    return {name: str(tmp_path / name / "text") for name in ("a", "b", "one")}


def build(samples: Samples, **flags: Any) -> Datasets[np.ndarray]:
    return build_token_datasets(DataConfig(seq_length=10, **flags), samples, 1234, NullTokenizer(999))


def documents(dataset: Any) -> list[int]:
    """Return the documents that samples begin with, in ascending order."""
    return sorted(int(dataset[sample][0]) // 10 for sample in range(len(dataset)))


def is_whole(dataset: Any, numbers: range) -> bool:
    """Tell whether the samples are these documents, each once, but for the last one, whose label is missing."""
    found = documents(dataset)
    return len(found) == len(numbers) - 1 == len(set(found)) and set(found) <= set(numbers)


def test_whole_data_are_each_sample_of_one_epoch(files: dict[str, str]) -> None:
    """A weight of a single prefix changes nothing of it."""
    for path in ([files["a"]], ["3", files["a"]]):
        whole = build(WHOLE, data_path=path, split="50,50").valid
        assert is_whole(whole, range(10, 20))
    blend = build(WHOLE, train_data_path=[files["a"]], valid_data_path=[files["a"], files["b"]]).valid
    alone = [build(WHOLE, train_data_path=[files["a"]], valid_data_path=[files[name]]).valid for name in "ab"]
    assert is_whole(alone[0], range(20))
    assert documents(blend) == sorted([*documents(alone[0]), *documents(alone[1])])


def test_each_prefix_is_a_set_by_the_end_of_its_path(files: dict[str, str]) -> None:
    """The weights of --data-path are those of training; every set has as many samples as it would have alone."""
    flags = {"data_path": ["7", files["a"], "3", files["b"]], "split": "50,50"}
    whole, some = build(WHOLE_SETS, **flags), build(SETS, **flags)
    assert whole.valid is None
    assert [*whole.valid_sets] == ["a/text", "b/text"]
    assert is_whole(whole.valid_sets["a/text"], range(10, 20))
    assert is_whole(whole.valid_sets["b/text"], range(5, 10))
    for name, each in some.valid_sets.items():
        alone = build(SETS._replace(set_names=None), data_path=[files[name[0]]], split="50,50").valid
        assert alone is not None
        assert [each[sample].tolist() for sample in range(6)] == [alone[sample].tolist() for sample in range(6)]


def test_names_of_sets_can_be_given(files: dict[str, str]) -> None:
    """The same prefix twice has two names then."""
    data = {"train_data_path": [files["a"]], "valid_data_path": [files["b"], files["b"]]}
    assert [*build(WHOLE._replace(set_names=("x", "y")), **data).valid_sets] == ["x", "y"]
    with pytest.raises(ConfigurationError, match=r"have 2 prefixes, .* would be called text, text: give each"):
        build(WHOLE_SETS, **data)
    with pytest.raises(ConfigurationError, match=r"have 2 prefixes, .* would be called x: give each a name"):
        build(WHOLE._replace(set_names=("x",)), **data)


@pytest.mark.parametrize("samples", [WHOLE, SETS])
def test_validation_data_are_needed(files: dict[str, str], samples: Samples) -> None:
    with pytest.raises(ConfigurationError, match=r"need validation data: give --valid-data-path"):
        build(samples, train_data_path=[files["a"]])


def test_weights_that_say_nothing_are_refused(files: dict[str, str]) -> None:
    data = {"train_data_path": [files["a"]], "valid_data_path": ["1", files["a"], "2", files["b"]]}
    with pytest.raises(
        ConfigurationError, match=r"^--multiple-validation-sets .* reads no weights: give only prefixes$"
    ):
        build(SETS, **data)
    with pytest.raises(ConfigurationError, match=r"^--full-validation .* weights .* say otherwise: give --multiple-"):
        build(WHOLE, **data)


@pytest.mark.parametrize("samples", [WHOLE, WHOLE_SETS])
def test_a_set_without_a_whole_sample_is_refused(files: dict[str, str], samples: Samples) -> None:
    with pytest.raises(
        DataError, match=r"^--full-validation has nothing to read of .*one/text: .* fewer tokens than a"
    ):
        build(samples, train_data_path=[files["a"]], valid_data_path=[files["a"], files["one"]])


def test_a_full_validation_needs_no_number_of_batches() -> None:
    """The test set is read for --eval-iters batches, as without it."""
    steps = {"train_samples": 40, "train_iters": 10, "global_batch_size": 4, "eval_interval": 5}
    assert target_samples(**steps, eval_iters=0, full_validation=True) == Samples(40, None, 0, 0)
    assert target_samples(**steps, eval_iters=2, full_validation=True, set_names=("x",)) == (40, None, 8, 8, ("x",))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--mock-data --full-validation", "those of --mock-data have no end: leave it out"),
        ("--mock-data --multiple-validation-sets", "evaluates files, and --mock-data has none: leave it out"),
        ("--data-path a --validation-set-names a", "--validation-set-names needs --multiple-validation-sets"),
        (
            "--data-path a --multiple-validation-sets --eval-iters 0",
            "evaluates nothing with --eval-iters 0: add --full-",
        ),
        ("--train-data-path a --full-validation", "there is nothing to validate on: give --valid-data-path"),
    ],
)
def test_flags_that_evaluate_nothing_are_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, 1)
    (line,) = str(raised.value).splitlines()
    assert problem in line
