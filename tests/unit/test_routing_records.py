"""Files of recorded routing: those that are read, and those that are refused by name."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.fields import FieldsDataset
from megalite.data.loader import MicroBatchLoader
from megalite.data.mock_dataset import MockDataset
from megalite.data.routing_records import RoutingRecords
from megalite.errors import DataError
from tests.harness.dealt import Dealt

LENGTH, EXPERTS, TOPK = 5, 4, 2
LAYERS = (False, True, True)


def records(folder: Path, **options: Any) -> RoutingRecords:
    return RoutingRecords(folder, **({"layers": LAYERS, "experts": EXPERTS, "topk": TOPK} | options))


def choices(tokens: int = LENGTH, layers: int = 2) -> np.ndarray:
    """Return choices at random, [tokens, layers, topk]."""
    return np.random.default_rng(1).random((tokens, layers, EXPERTS)).argsort(-1)[..., :TOPK]


@pytest.mark.parametrize("experts", [EXPERTS, 2**15, 2**20])
def test_what_is_written_is_read(tmp_path: Path, experts: int) -> None:
    written = choices()
    written[0, 0] = [experts - 1, 0]
    written[3] = -1
    written[4, 1] = -1
    records(tmp_path, experts=experts).write(7, written)
    assert [path.name for path in tmp_path.iterdir()] == ["000000000007.npy"]
    found = records(tmp_path, experts=experts).read(7, LENGTH)
    assert found.dtype == np.int64
    assert np.array_equal(found, written)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64])
def test_arrays_of_inference_engines_are_read(tmp_path: Path, dtype: type) -> None:
    """Arrays of all layers, or of those with experts, without the last token, which an engine does not run."""
    every = choices(LENGTH - 1, 3)
    every[:, 0] = 0  # the layer without experts
    np.save(tmp_path / "000000000000.npy", every.astype(dtype))
    np.save(tmp_path / "000000000001.npy", every[:, 1:].astype(dtype))
    for sample in (0, 1):
        found = records(tmp_path).read(sample, LENGTH)
        assert np.array_equal(found[:-1], every[:, 1:])
        assert (found[-1] == -1).all()


def with_row(*row: int) -> np.ndarray:
    changed = choices()
    changed[3, 1] = row
    return changed


REFUSED: dict[str, tuple[Any, str]] = {
    "too many tokens": (choices(6), r"has int64 \[6, 2, 2\], but .* \[5 or fewer tokens, 2 or 3 layers, 2 experts\]"),
    "other layers": (choices(5, 4), r"has int64 \[5, 4, 2\]"),
    "other experts per token": (choices()[..., :1], r"has int64 \[5, 2, 1\]"),
    "two axes": (choices()[0], r"has int64 \[2, 2\]"),
    "no whole numbers": (choices().astype(float), "has float64"),
    "an expert beyond the last": (with_row(1, 4), r"token 3 has the experts \[1, 4\] in layer 2, but it needs 2 diff"),
    "an expert twice": (with_row(1, 1), r"token 3 has the experts \[1, 1\]"),
    "padding of zeros": (np.zeros((5, 2, 2), int), r"token 0 has the experts \[0, 0\] in layer 1"),
    "half a choice": (with_row(1, -1), r"token 3 has the experts \[1, -1\]"),
    "other negative numbers": (with_row(-2, -2), r"token 3 has the experts \[-2, -2\]"),
    "objects": (np.array([{}, []], dtype=object), "is not a record of routing: .*objects"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_arrays_are_refused(tmp_path: Path, what: str) -> None:
    array, words = REFUSED[what]
    np.save(tmp_path / "000000000000.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=f"000000000000.npy.*{words}"):
        records(tmp_path).read(0, LENGTH)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "000000000000.npy"
    with pytest.raises(DataError, match="is missing: --moe-replay-routing needs a file for each sample"):
        records(tmp_path).read(0, LENGTH)
    os.mkfifo(path)
    with pytest.raises(DataError, match="is missing"):
        records(tmp_path).read(0, LENGTH)
    path.unlink()
    records(tmp_path).write(0, choices())
    whole = path.read_bytes()
    header = whole.replace(b"(5, 2, 2), }           ", b"(5, 2, 200000000000), }")
    assert header != whole
    for content in (b"", whole[:-1], whole[:60], b"\x93NUMPY" + bytes(100), header, b"PK\x03\x04" + bytes(50)):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a record of routing"):
            records(tmp_path).read(0, LENGTH)


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    """Python's parser of literals may fail if a thread waits within it, for example as garbage is collected."""
    for sample in range(4):
        records(tmp_path).write(sample, choices())

    def switch(phase: str, info: dict[str, int]) -> None:
        time.sleep(1e-5)

    thresholds = gc.get_threshold()
    gc.callbacks.append(switch)
    try:
        gc.set_threshold(20)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda sample: records(tmp_path).read(sample % 4, LENGTH), range(500)))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(switch)
    assert all(np.array_equal(each, choices()) for each in found)


def test_a_loader_reads_them_with_their_samples(tmp_path: Path) -> None:
    for sample in range(4):
        records(tmp_path).write(sample, np.roll(choices(), sample, axis=0))
    loader = MicroBatchLoader(
        FieldsDataset(MockDataset(20, LENGTH, seed=1, num_samples=8), 19),
        micro_batch_size=2,
        vocab_size=20,
        num_workers=1,
        routing=records(tmp_path),
    )
    with Dealt(loader) as batches:
        for number, fields in enumerate(batches.micro_batches(0, 2)):
            assert fields["replayed"] is not None
            for row, sample in enumerate((2 * number, 2 * number + 1)):
                assert np.array_equal(fields["replayed"][row], np.roll(choices(), sample, axis=0))
        with pytest.raises(DataError, match=r"000000000004\.npy is missing"):
            batches.micro_batches(4, 1)
