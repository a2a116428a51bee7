"""Datasets that a run reads: splits, blends, counts, and a tokenizer that must fit."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.data import DataConfig
from megalite.data import blend
from megalite.data.blend import BlendedDataset, build_blend_index, normalize, parse_blend
from megalite.data.dataset_spec import DatasetSpec, parse_split, read_dataset_specs
from megalite.data.datasets import Datasets, Samples, build_mock_datasets, build_token_datasets, target_samples
from megalite.data.index_cache import IndexCache
from megalite.data.mock_dataset import MockDataset
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.errors import ConfigurationError, DataError
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.harness.fork_server import fork_context
from tests.harness.token_files import add_document


def write(prefix: Path, documents: int, token: int, tokenizer: dict[str, Any] | None = None) -> str:
    with IndexedDatasetWriter(prefix, np.uint16, tokenizer) as writer:
        for _ in range(documents):
            add_document(writer, np.full(11, token))
        writer.finish()
    return str(prefix)


def build(samples: Samples, tokenizer: Any = None, **flags: Any) -> Datasets[np.ndarray]:
    return build_token_datasets(DataConfig(seq_length=10, **flags), samples, 1234, tokenizer or NullTokenizer(99))


def test_blend_index_by_hand() -> None:
    """The orders Megatron-LM's own function gives for these weights."""
    datasets, samples, _ = build_blend_index([0.5, 0.3, 0.2], 20).values()
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    for dataset in range(3):
        assert samples[datasets == dataset].tolist() == list(range((datasets == dataset).sum()))
    exhausted, _, _ = build_blend_index(normalize([5, 3, 2]), 10, [5, 3, 2]).values()
    assert exhausted.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]


BLENDS: dict[str, tuple[list[float], int, list[int] | None]] = {
    "alike": ([1.0] * 7, 5000, None),
    "one": ([1.0], 3000, None),
    "with weights hardly ever chosen": ([2.0**n for n in range(16)], 9000, None),
    "taken to the last sample": ([1.0, 1.0, 1.0], 5100, [2000, 100, 3000]),
}


@pytest.mark.parametrize("lead", [0, 256])
@pytest.mark.parametrize("name", BLENDS)
def test_blend_index_is_that_of_the_plain_loop(name: str, lead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend, "LEAD", lead)  # 0: most stretches are computed again
    weights, size, limits = BLENDS[name]
    shares = normalize(weights)
    counts = [0] * len(weights)
    expected = []
    for i in range(size):
        open_ones = [d for d in range(len(weights)) if limits is None or counts[d] < limits[d]]
        chosen = max(open_ones, key=lambda d: (shares[d] * max(i, 1) - counts[d], -d))
        expected.append((chosen, counts[chosen]))
        counts[chosen] += 1
    index = build_blend_index(shares, size, limits)
    assert list(zip(index["datasets"].tolist(), index["samples"].tolist(), strict=True)) == expected
    assert index["counts"].tolist() == counts


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.data())
def test_blend_by_length_takes_every_sample_once(limits: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, sum(limits)))
    datasets, samples, _ = build_blend_index(normalize(limits), size, limits).values()
    pairs = set(zip(datasets.tolist(), samples.tolist(), strict=True))
    assert len(pairs) == size
    assert all(sample < limits[dataset] for dataset, sample in pairs)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 300))
def test_weighted_blend_never_asks_for_more_than_is_drawn(weights: list[float], size: int) -> None:
    """Megatron-LM's surplus covers what the first `size` samples ask of each dataset."""
    shares = normalize(weights)
    datasets, _, counts = build_blend_index(shares, size).values()
    for dataset, share in enumerate(shares):
        assert counts[dataset] == (datasets == dataset).sum() <= math.ceil(math.ceil(size * share) * 1.005)


def test_a_blend_of_too_many_is_refused() -> None:
    with pytest.raises(DataError, match="a blend of 32768 prefixes: at most 32767"):
        BlendedDataset([[1]] * 2**15, [1.0] * 2**15, 5, IndexCache(), ["unused"])


def test_a_blend_that_draws_too_little_names_the_flag(tmp_path: Path) -> None:
    datasets: Any = [[1] * 5, [1] * 4]
    BlendedDataset(datasets, [0.5, 0.5], 8, IndexCache(), [str(tmp_path / "a")])
    with pytest.raises(
        DataError, match=r"needs 5 samples of its dataset 2, which has 4: .*--mid-level-dataset-surplus"
    ):
        BlendedDataset(datasets, [0.5, 0.5], 10, IndexCache(), [str(tmp_path / "a")])


def test_blend_gives_samples_in_proportion(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 20, 1), write(tmp_path / "b", 20, 2)
    train, *_ = build(Samples(100, 0, 0), data_path=["30", a, "70", b], split="1")
    assert len(train) == 100
    assert [sum(int(train[i][0]) == token for i in range(100)) for token in (1, 2)] == [30, 70]


def test_prefixes_alone_are_taken_once(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 10, 1), write(tmp_path / "b", 30, 2)
    train, *_ = build(Samples(40, 0, 0), data_path=[a, b, a], split="1")
    assert len(train) == 40
    with pytest.raises(DataError, match=r"needs 500 samples.*once: give weights"):
        build(Samples(500, 0, 0), data_path=[a, b, a], split="1")


@pytest.mark.parametrize(
    ("data_path", "expected"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        (["1", "a"], (["a"], [1.0])),
        (["0.3", "a", "7e-1", " b "], (["a", "b"], [0.3, 0.7])),
    ],
)
def test_data_path_is_prefixes_or_weights_and_prefixes(data_path: list[str], expected: Any) -> None:
    assert parse_blend(data_path) == expected


@pytest.mark.parametrize("data_path", [["1", "a", "b", "c"], ["0", "a", "1", "b"], ["-1", "a"], ["nan", "a"]])
def test_data_path_that_means_nothing_is_refused(data_path: list[str]) -> None:
    with pytest.raises(DataError, match="give weight and prefix in turn"):
        parse_blend(data_path)


def test_split_is_megatrons() -> None:
    assert parse_split("969, 30, 1") == [(0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert parse_split("80,20") == [(0, 0.8), (0.8, 1.0), None]
    assert parse_split("100") == [(0, 1.0), None, None]
    assert parse_split("1,0,.25") == [(0, 0.8), None, (0.8, 1.0)]
    assert parse_split("90%/10%") == parse_split("[90 10]") == [(0, 0.9), (0.9, 1.0), None]


@pytest.mark.parametrize("split", ["", ",", "0,0", "0,1", "1,2,3,4", "a,b", "-1,2", "0.9.1,1", "1e2,1", "1_0", "nan"])
def test_split_that_means_nothing_is_refused(split: str) -> None:
    with pytest.raises(ConfigurationError, match="--split"):
        parse_split(split)


def test_splits_share_no_document(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        for document in range(100):
            add_document(writer, np.full(11, document))
        writer.finish()
    sets = build(Samples(200, 40, 10), data_path=[str(tmp_path / "a")], split="80,15,5")
    seen = [{int(token) for i in range(len(dataset)) for token in dataset[i]} for dataset in sets[:3]]
    assert [max(seen[0]), min(seen[1]), max(seen[1]), min(seen[2])] == [79, 80, 94, 95]


def test_each_split_can_have_files_of_its_own(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 20, 1), write(tmp_path / "b", 20, 2)
    train, valid, test, *_ = build(Samples(30, 5, 5), train_data_path=[a], valid_data_path=["1", a, "1", b])
    assert test is None
    assert {int(train[i][0]) for i in range(30)} == {1}
    assert {int(valid[i][0]) for i in range(5)} == {1, 2}


def test_split_without_documents_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 10, 1)
    for split, name in (("1,99,0", "train"), ("99,1,0", "valid")):
        with pytest.raises(DataError, match=f"the {name} data would get none of the 10 sequences"):
            build(Samples(5, 1, 1), data_path=[prefix], split=split)


def test_a_test_set_without_documents_is_left_out_with_a_note(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 10, 1)
    sets = build(Samples(5, 1, 1), data_path=[prefix], split="90,10,.1")
    assert (sets.test, len(sets.notes)) == (None, 1)
    assert sets.notes[0].startswith("no test at the end of training: the test data would get none of the 10 sequences")
    assert build(Samples(5, 1, 0), data_path=[prefix], split="90,10,.1").notes == ()


def test_a_file_without_sequences_is_refused_where_it_is_named(tmp_path: Path) -> None:
    prefix, empty = write(tmp_path / "a", 10, 1), write(tmp_path / "empty", 0, 1)
    for name in ("train", "valid", "test"):
        paths = {f"{split}_data_path": [empty if split == name else prefix] for split in ("train", "valid", "test")}
        with pytest.raises(DataError, match=f"empty has no sequence: leave it out of --{name}-data-path"):
            build(Samples(5, 1, 1), **paths)


def with_few_files(prefixes: list[str]) -> None:
    limit = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit - 10, limit))
    for _ in range(2):  # indices that are built, indices that are found
        sets = build(Samples(50, 0, 0), data_path=[word for prefix in prefixes for word in ("1", prefix)], split="1")
        assert len(sets.train) == 50
        assert {int(sets.train[k][0]) for k in range(50)} == set(range(50))
        assert sets.notes == ()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, limit)
    files = [open(os.devnull) for _ in range(10)]  # noqa: SIM115 - a checkpoint's
    del files


def test_a_blend_of_many_prefixes_leaves_files_to_open(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / str(number), 5, number) for number in range(50)]
    process = fork_context().Process(target=with_few_files, args=(prefixes,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_data_is_given_in_one_way(tmp_path: Path) -> None:
    one = {"data_path": ["a"]}
    for more in ({"valid_data_path": ["a"]}, {"data_args_path": "a"}, {"per_split_data_args_path": "a"}):
        with pytest.raises(ConfigurationError, match="give the data in one way"):
            read_dataset_specs(DataConfig(seq_length=1, **(one | more)))
    with pytest.raises(ConfigurationError, match="give the data in one way"):
        read_dataset_specs(DataConfig(seq_length=1))
    prefix = write(tmp_path / "a", 10, 1)
    with pytest.raises(ConfigurationError, match="there is no training data"):
        build(Samples(1, 1, 0), valid_data_path=[prefix])


@pytest.mark.parametrize(("steps", "evaluations"), [(9, 4), (10, 4), (2, 1)])
def test_each_evaluation_of_a_run_has_samples_of_its_own(steps: int, evaluations: int) -> None:
    """Megatron-LM's counts: one every three steps, and one more."""
    counts = target_samples(train_samples=100, train_iters=steps, global_batch_size=4, eval_interval=3, eval_iters=2)
    assert counts == Samples(100, evaluations * 8, 8, 8)


def test_mock_data_needs_no_files() -> None:
    train, valid, test, *_ = build_mock_datasets(DataConfig(seq_length=10), Samples(10, 5, 0), 1, NullTokenizer(99))
    assert isinstance(train, MockDataset)
    assert valid is not None
    assert (len(train), len(valid), test) == (10, 5, None)
    assert not np.array_equal(train[0], valid[0])
    assert train.eod == 99


def test_other_tokenizer_than_recorded_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 10, 1, ByteTokenizer().identity())
    build(Samples(1, 0, 0), data_path=[prefix], split="1", tokenizer=ByteTokenizer())
    with pytest.raises(DataError, match=r"made with the tokenizer type 'ByteTokenizer'.*uses type 'NullTokenizer'"):
        build(Samples(1, 0, 0), data_path=[prefix], split="1")


def test_data_without_a_record_is_taken_and_a_damaged_record_is_not(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 10, 1)
    Path(f"{prefix}.megalite.json").unlink()
    build(Samples(1, 0, 0), data_path=[prefix], split="1")
    Path(f"{prefix}.megalite.json").write_text("[")
    with pytest.raises(DataError, match=r"a\.megalite\.json cannot be read as the record"):
        build(Samples(1, 0, 0), data_path=[prefix], split="1")


@pytest.mark.parametrize(
    "identity",
    [
        {f"key{number}": 1 for number in range(17)},
        *({name: 1} for name in ("", "a b", "\x1b[2J", "\ud800", "x" * 65, "größe")),
        {"type": "x" * 4096},
        {"type": ["x"]},
        {"vocab_size": -1},
    ],
)
def test_an_identity_has_few_short_fields(tmp_path: Path, identity: dict[str, Any]) -> None:
    prefix = write(tmp_path / "a", 10, 1, identity)
    with pytest.raises(DataError, match=r"a\.megalite\.json cannot be read.*its tokenizer is not valid"):
        build(Samples(1, 0, 0), data_path=[prefix], split="1", tokenizer=ByteTokenizer())


def test_what_a_record_says_is_shown_escaped_and_short(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 10, 1, {"type": "\x1b[2J\ud800", **{f"key{i}": "x" * 4000 for i in range(15)}})
    with pytest.raises(DataError, match=r"type '\\x1b\[2J\\ud800', key0 'xxx") as raised:
        build(Samples(1, 0, 0), data_path=[prefix], split="1", tokenizer=ByteTokenizer())
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 4000


def test_target_samples_are_megatrons() -> None:
    samples = target_samples(train_samples=777, train_iters=100, global_batch_size=8, eval_interval=30, eval_iters=5)
    assert samples == Samples(777, (100 // 30 + 1) * 5 * 8, 5 * 8, 5 * 8)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_paths_may_stand_in_files(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "blend").write_text("0.3 a\n0.7 b\n", encoding)
    assert read_dataset_specs(DataConfig(seq_length=1, data_args_path=str(tmp_path / "blend"), split="1")) == [
        DatasetSpec(["a", "b"], [0.3, 0.7], 0.0, 1.0),
        None,
        None,
    ]
    (tmp_path / "each").write_text('{"train": [0.3, "a", "0.7", "b"], "test": ["c"]}', encoding)
    each = [DatasetSpec(["a", "b"], [0.3, 0.7]), None, DatasetSpec(["c"], None)]
    assert read_dataset_specs(DataConfig(seq_length=1, per_split_data_args_path=str(tmp_path / "each"))) == each


@pytest.mark.parametrize(
    ("flag", "text", "problem"),
    [
        ("data_args_path", None, "cannot be read: No such file"),
        ("data_args_path", " \n", "is empty"),
        ("data_args_path", "1 a b c", "give weight and prefix in turn"),
        ("per_split_data_args_path", "[", "expected JSON like"),
        ("per_split_data_args_path", "[]", "expected JSON like"),
        ("per_split_data_args_path", "[" * 100_000, "nested deeper"),
        ("per_split_data_args_path", '{"train": "a"}', "'a' is not a list"),
        ("per_split_data_args_path", '{"train": ["a"], "vaild": ["b"]}', "has a key 'vaild'"),
    ],
)
def test_files_of_paths_that_mean_nothing_are_refused(
    tmp_path: Path, flag: str, text: str | None, problem: str
) -> None:
    if text is not None:
        (tmp_path / "paths").write_text(text)
    with pytest.raises(DataError, match=problem):
        read_dataset_specs(DataConfig(seq_length=1, **{flag: str(tmp_path / "paths")}))


def test_a_file_of_paths_without_an_end_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "paths")
    for path in (str(tmp_path / "paths"), "/dev/zero"):
        with pytest.raises(DataError, match=f"{path} cannot be read: not a regular file"):
            read_dataset_specs(DataConfig(seq_length=1, data_args_path=path))


def test_prefixes_alone_validate_on_what_there_is(tmp_path: Path) -> None:
    """Megatron-LM counts every validation's samples, but each begins anew: one validation must find enough."""
    a, b = write(tmp_path / "a", 20, 1), write(tmp_path / "b", 20, 2)
    samples = Samples(5, 500, 0, evaluation=20)
    assert len(build(samples, data_path=[a, b], split="50,50").valid or ()) == 20
    with pytest.raises(DataError, match=r"needs 21 samples.*once: give weights"):
        build(Samples(5, 500, 0, evaluation=21), data_path=[a, b], split="50,50")
