"""Notes on a blend that is another one on resume, compared with the samples of both blends."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config import RunConfig, parse_arguments, resolve
from megalite.extras.mixes.blend_changes import blend_change_notes
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.training.data import RunData, open_data, order_notes, seen_samples
from tests.harness.token_files import add_document

LENGTH = 10
FLAGS = f"""--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length {LENGTH} --micro-batch-size 1 --lr 1
--global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 60000 --max-position-embeddings 32 --eval-iters 0
--seed 7"""
SAMPLES = 200
PLACE = 120
"""Samples of the first blend that the checkpoint has consumed."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Return prefixes by name, of 300 samples each; no token is there twice."""
    token = 0
    for name in ("code", "web", "math"):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for _ in range(250):
                add_document(writer, np.arange(token, token + 12))
                token += 12
            writer.finish()
    return {name: tmp_path / name for name in ("code", "web", "math")}


def config_of(path: str, flags: str = f"--train-samples {SAMPLES}") -> RunConfig:
    return resolve(parse_arguments(f"{FLAGS} --data-path {path} --split 1 {flags}".split()).config, 1)


def blend(files: dict[str, Path], **weights: float) -> str:
    return " ".join(f"{weight} {files[name]}" for name, weight in weights.items())


def notes(before: RunConfig, after: RunConfig, place: int = PLACE) -> tuple[str, ...] | None:
    saved = json.loads(json.dumps(asdict(before)))
    seen = seen_samples(open_data(before).train, place)
    return blend_change_notes(Path("run/iter_0000030"), saved, after, open_data(after), place, seen)


def told(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the lines on sources, between the first line and the advice."""
    found = notes(before, after)
    assert found is not None
    assert found[0] == "note: the data or their order have changed, and sources do not go on where they are:"
    assert found[-1].endswith("give --data-mix-schedule FILE, which continues each source where it is (docs/mixes.md)")
    return [line.removeprefix("note:   ") for line in found[1:-1]]


def drawn(data: RunData, numbers: range) -> set[bytes]:
    return {data.train[number]["tokens"].tobytes() for number in numbers}


def counts(shares: list[float], place: int) -> list[int]:
    """Return how many of the first samples a blend takes of each source, by a plain loop."""
    taken = [0] * len(shares)
    for sample in range(place):
        behind = [share * max(sample, 1) - count for share, count in zip(shares, taken, strict=True)]
        taken[behind.index(max(behind))] += 1
    return taken


def test_ranges_of_what_comes_again_and_is_passed_over_are_exact(files: dict[str, Path]) -> None:
    """Each file has enough for one epoch, so that orders stay. The largest change is told first."""
    before, after = config_of(blend(files, code=60, web=25, math=15)), config_of(blend(files, code=20, web=30, math=50))
    assert (counts([0.6, 0.25, 0.15], PLACE), counts([0.2, 0.3, 0.5], PLACE)) == ([72, 30, 18], [24, 36, 60])
    assert told(before, after) == [
        "math: samples 18 to 59 of its order are passed over (42 samples, 420 tokens)",
        "code: samples 24 to 39 of its order come again (16 samples, 160 tokens)",
        "web: samples 30 to 35 of its order are passed over (6 samples, 60 tokens)",
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"code": 3, "web": 1}, {"code": 1, "web": 3}),
        ({"code": 1}, {"code": 1, "web": 1, "math": 1}),
        ({"code": 1, "web": 1, "math": 1}, {"web": 1}),
        ({"code": 7, "web": 5, "math": 1}, {"math": 2, "code": 1}),
        ({"code": 9, "web": 1}, {"code": 8, "web": 2}),
    ],
)
def test_as_many_samples_come_again_as_are_told(
    first: dict[str, float], second: dict[str, float], files: dict[str, Path]
) -> None:
    before, after = config_of(blend(files, **first)), config_of(blend(files, **second))
    repeated = drawn(open_data(before), range(PLACE)) & drawn(open_data(after), range(PLACE, SAMPLES))
    lines = [line for line in told(before, after) if "again" in line]
    numbers = [re.search(r"\(([\d,]+) samples?,", line) for line in lines]
    assert sum(1 if found is None else int(found[1]) for found in numbers) == len(repeated)


@pytest.mark.parametrize(
    ("flags", "why", "code", "web"),
    [
        ("--train-samples 200 --seed 8", "--seed 8, not 7", 60, 20),
        ("--train-samples 200 --seq-length 16", "samples of 16 tokens, not 10", 56, 18),
        ("--train-samples 900", "drawn for 3 epochs, not 1", 90, None),
        ("--train-samples 200 --split 90,10", "another part of its file", 60, 20),
    ],
)
def test_an_order_that_is_another_one_has_a_bound(
    flags: str, why: str, code: int, web: int | None, files: dict[str, Path]
) -> None:
    """No more of the tokens may come again than were given, and than are left to draw."""
    path = blend(files, code=3, web=1)
    found, length = told(config_of(path), config_of(path, flags)), 16 if "16" in flags else LENGTH
    assert [re.sub(r" \([\d,]+ tokens\)$", "", line) for line in found] == [
        f"{name}: its order is another one ({why}), so up to {most} of its samples may come again"
        for name, most in (("code", code), ("web", web))
        if most is not None
    ]
    assert f"({code * length} tokens)" in found[0] or length == 16


def test_nothing_is_told_where_nothing_comes_again(files: dict[str, Path], tmp_path: Path) -> None:
    before = config_of(blend(files, code=30, web=70))
    assert notes(before, before) is None
    assert notes(before, config_of(blend(files, code=3, web=7))) == ()
    assert notes(before, config_of(blend(files, code=30, web=70), f"--train-samples {SAMPLES + 1}")) == ()
    (tmp_path / "elsewhere").mkdir()
    for prefix in files.values():
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{prefix}{suffix}", tmp_path / "elsewhere")
    moved = {name: tmp_path / "elsewhere" / name for name in files}
    assert notes(before, config_of(blend(moved, code=30, web=70))) == ()


def test_no_more_comes_again_than_the_run_draws(files: dict[str, Path]) -> None:
    """The changed blend takes 2 of each 40 samples from code, so that 4 of it are left."""
    before, after = config_of(blend(files, code=1, web=1)), config_of(blend(files, code=1, web=19))
    was, here, most = counts([0.5, 0.5], PLACE), counts([0.05, 0.95], PLACE), counts([0.05, 0.95], SAMPLES)
    assert most[0] < was[0]
    again = most[0] - here[0]
    line = (
        f"code: samples {here[0]} to {most[0] - 1} of its order come again ({again} samples, {again * LENGTH} tokens)"
    )
    assert line in told(before, after)


def test_small_changes_are_told_together(files: dict[str, Path], tmp_path: Path) -> None:
    parts = {name: tmp_path / name for name in "abcdef"}
    for prefix in parts.values():
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{files['web']}{suffix}", f"{prefix}{suffix}")
    before = config_of(blend(parts, a=10, b=10, c=10, d=10, e=10, f=10))
    found = told(before, config_of(blend(parts, a=19, b=17, c=9, d=3, e=6, f=6)))
    assert [line[0] for line in found[:4]] == ["a", "b", "e", "f"]
    assert found[4:] == ["and 2 more sources (60 tokens)"]


def test_what_cannot_be_told_is_left_to_the_samples_seen(files: dict[str, Path], tmp_path: Path) -> None:
    """The first file has other tokens now, in documents of the same lengths; then it is gone."""
    before, after = config_of(blend(files, code=3, web=1)), config_of(blend(files, code=1, web=3))
    saved, seen = json.loads(json.dumps(asdict(before))), seen_samples(open_data(before).train, PLACE)

    def again(config: RunConfig, saved: dict[str, Any] = saved) -> tuple[str, ...] | None:
        return blend_change_notes(tmp_path, saved, config, open_data(config), PLACE, seen)

    assert again(after) is not None
    (tmp_path / "code.bin").write_bytes((tmp_path / "web.bin").read_bytes())
    assert again(after) is None
    assert order_notes(open_data(after).train, seen)
    (tmp_path / "code.bin").unlink()
    assert again(config_of(blend(files, web=1))) is None
    assert again(after := config_of(blend(files, web=1)), {**saved, "data": {}}) is None
    mock = {**saved["data"], "data_path": [], "mock_data": True, "split": "969, 30, 1"}
    assert again(after, {**saved, "data": mock}) is None
