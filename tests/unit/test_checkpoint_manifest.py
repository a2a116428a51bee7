"""Manifests and trackers from other programs cause a fallback at most."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import checkpoint
from megalite.checkpoint import Manifest, TrainingState, directory, manifest
from megalite.checkpoint.compatibility import model_config, saved_section
from megalite.checkpoint.manifest import SavedBox, SavedFile, SavedTensor
from megalite.config import DataConfig, RunConfig, load_yaml
from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box
from tests.harness.saved_run import SavedRun, litter
from tests.unit.test_config_yaml import VALID

MESH = ParallelMesh()
STATE = TrainingState(3, 12, 2, {"value": 1.0, "good_steps": 0, "overflows_left": -1}, [(0, 2**32 - 1)])
CONFIG: RunConfig = load_yaml(VALID.replace("model:", "model:\n  max_position_embeddings: 8"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "iter_0000003"
    path.mkdir()
    write(path, json.loads(Manifest(STATE, asdict(CONFIG), {}, {}).to_json()))
    return path


def write(path: Path, fields: dict[str, Any]) -> None:
    """Write a manifest with the right checksum for its fields."""
    fields.pop("checksum", None)
    checksum = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    (path / "manifest.json").write_text(json.dumps(fields | {"checksum": checksum}))


def changed(path: Path, section: str, **values: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    fields[section] |= values
    return fields


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((name, ("4", None, float("nan"), -3, 2.0, True, 2**60)) for name in ("consumed_samples", "optimizer_steps")),
        ("iteration", ("4", None, float("nan"), -1, 5, 10**300, [])),
        ("loss_scale", (1.0, {}, {"value": 1.0}, {"value": -1, "good_steps": 0, "overflows_left": 1}, [1])),
        ("loss_scale", ({"value": float("nan"), "good_steps": 0, "overflows_left": 1},)),
        ("loss_scale", ({"value": 1, "good_steps": "0", "overflows_left": 1},)),
        ("seen_samples", ([[1]], [1], {"a": 1}, [[-1, 0]], [[0, "x"]], 7)),
        ("evaluation_left", ("no", 1, None)),
        ("what_is_unknown", (1,)),
    ],
)
def test_a_training_state_is_one(path: Path, field: str, values: tuple[Any, ...]) -> None:
    assert checkpoint.check_whole(path, MESH).training.optimizer_steps == 2
    for value in values:
        write(path, changed(path, "training", **{field: value}))
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged or not ours|manifest says step 5"):
            checkpoint.check_whole(path, MESH)
        path.joinpath("manifest.json").write_text(Manifest(STATE, asdict(CONFIG), {}, {}).to_json())


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def add_tensor(path: Path, shape: list[Any], size: list[Any] | None) -> None:
    """Add a tensor to a manifest, with a box if `size` is given, in a file of sixteen bytes."""
    file = "rank_00000.safetensors"
    box = {"offset": [0] * len(size or ()), "size": size, "file": file, "start": 0, "checksums": "0" * 8}
    fields = changed(path, "files", **{file: {"size": 16, "checksum": 0}})
    write(path, fields | {"tensors": {"a": {"shape": shape, "dtype": "float32", "boxes": [box] if size else []}}})


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "damage",
    [
        fifo,
        endless,
        *(
            lambda path, text=text: path.write_bytes(text)
            for text in (b"[" * 10**6, b'{"a":' * 5000, b"\xff\xfe", b"null", b"[]", b'{"checksum": 1' + b"0" * 6000)
        ),
        lambda path: path.write_text(path.read_text().replace('"format"', '"format": "other", "format"')),
        lambda path: write(path.parent, changed(path.parent, "files", **{"../../x": {"size": 1, "checksum": 0}})),
        lambda path: write(path.parent, changed(path.parent, "files", a={"size": "1", "checksum": 0})),
        lambda path: write(
            path.parent, changed(path.parent, "tensors", a={"shape": "9", "dtype": "int8", "boxes": []})
        ),
        *(
            lambda path, shape=shape, size=size: add_tensor(path.parent, shape, size)
            for shape, size in (([1] * 65, None), ([1], [1] * 65), ([4], ["1111", 2**62]), ([4], [4.0]), ([1], [True]))
        ),
        lambda path: write(path.parent, changed(path.parent, "config") | {"config": None}),
        lambda path: write(path.parent, changed(path.parent, "config", model=[])),
    ],
)
def test_a_manifest_that_cannot_be_read_is_a_reason_to_fall_back(path: Path, damage: Callable[[Path], Any]) -> None:
    damage(path / "manifest.json")
    with pytest.raises(CorruptCheckpointError) as raised:
        checkpoint.read_manifest(path)
    assert len(str(raised.value)) < 600


def test_a_manifest_of_sound_boxes_is_read(path: Path) -> None:
    add_tensor(path, [4], [4])
    assert checkpoint.read_manifest(path).tensors["a"].boxes[0].stop == 16


TENSOR = {"shape": [1], "dtype": "float32", "boxes": []}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        *(("tensors", {f"a{mark}b": TENSOR}) for mark in ("\x1b[2J", "\n", "\ud800", "\u202e")),
        ("tensors", {"a": TENSOR | {"shape": [1] * 17}}),
        ("config", {"\x1b[2J": {}}),
        ("config", {"a": {"\ud800": 1}}),
    ],
)
def test_names_can_be_shown_and_shapes_are_small(path: Path, section: str, values: dict[str, Any]) -> None:
    write(path, changed(path, "tensors", ab=TENSOR))
    assert checkpoint.read_manifest(path).tensors["ab"].shape == (1,)
    write(path, changed(path, section, **values))
    with pytest.raises(CorruptCheckpointError) as raised:
        checkpoint.read_manifest(path)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("name", ["model/a", "optimizer/master/a"])
def test_a_weight_is_of_no_whole_numbers(path: Path, name: str) -> None:
    counts = TENSOR | {"dtype": "int64"}
    write(path, changed(path, "tensors", **{"state/a": counts, "optimizer/count/a": counts}))
    assert checkpoint.read_manifest(path).tensors["state/a"].dtype == torch.int64
    write(path, changed(path, "tensors", **{name: counts}))
    with pytest.raises(CorruptCheckpointError, match=f"'{name}' is a weight, but has whole numbers, int64"):
        checkpoint.read_manifest(path)


def test_values_without_end_are_refused_before_they_are_made(path: Path) -> None:
    (path / "manifest.json").write_text('{"files": [' + "{}," * 4_000_000 + "{}]}")
    with pytest.raises(CorruptCheckpointError, match="braces, brackets, commas and colons"):
        checkpoint.read_manifest(path)


def test_a_manifest_of_many_boxes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MOST_MARKS", 0)
    shape, name = (64, 16, 4096), "model/layers.0.mlp.linear_fc1"
    boxes = tuple(
        SavedBox(name, shape, torch.bfloat16, Box((expert, row, 0), (1, 1, 4096)), "rank_00000.safetensors", 0, (0,))
        for expert in range(64)
        for row in range(16)
    )
    files = {"rank_00000.safetensors": SavedFile(8192, 0)}
    made = Manifest(STATE, {}, files, {name: SavedTensor(shape, torch.bfloat16, boxes)})
    assert Manifest.from_json(made.to_json()).tensors == made.tensors


def test_no_checkpoint_is_saved_that_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SavedRun()
    run.save(tmp_path, 1, 1)
    monkeypatch.setattr(manifest, "_LARGEST", len(tmp_path.joinpath("iter_0000001", "manifest.json").read_text()) - 1)
    with pytest.raises(CheckpointError, match=r"this layout has \d+ boxes of tensors, .*\(--pp\)"):
        run.save(tmp_path, 2, 2)
    monkeypatch.undo()
    assert run.newest(tmp_path) == ((1, 1), ())
    assert not litter(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": "2"}, "num_layers '2'"),
        ({"num_layers": 10**9}, "--num-layers 1000000000: must be at most 10,000"),
        ({"hidden_size": -8}, "--hidden-size -8: must be at least 1"),
        ({"hidden_size": 2**40}, "--hidden-size 1099511627776, "),
        ({"normalization": "MyNorm"}, "normalization 'MyNorm'"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon inf"),
        ({"add_bias_linear": 1}, "add_bias_linear 1"),
        ({"window_size": "9" * 10**5}, "--window-size '999"),
        ({"kv_channels": [1]}, r"kv_channels \[1\]"),
    ],
)
def test_a_saved_network_is_one_that_flags_could_give(values: dict[str, Any], message: str) -> None:
    saved = asdict(CONFIG)
    assert model_config(Path("iter"), saved) == CONFIG.model
    with pytest.raises(CorruptCheckpointError, match=message):
        model_config(Path("iter"), saved | {"model": saved["model"] | values})


def test_what_other_versions_have_saved_is_read(path: Path) -> None:
    saved = asdict(CONFIG) | {"of_later": {"a": 1}}
    saved["data"] |= {"of_later": [[1]]}
    del saved["data"]["tiktoken_pattern"]
    assert saved_section(path, saved, DataConfig) == CONFIG.data
    with pytest.raises(CorruptCheckpointError, match="in the section data: no seq_length"):
        saved_section(path, {"data": {}}, DataConfig)
    with pytest.raises(CheckpointError, match="a model with of_later, unknown here: use a newer megalite"):
        model_config(path, {"model": saved["model"] | {"of_later": 1}})


def test_a_tracker_that_cannot_be_read_names_nothing(path: Path) -> None:
    tracker = path.parent / directory.TRACKER
    for make in (
        fifo,
        endless,
        lambda tracker: tracker.write_text("1" * 6000),
        lambda tracker: tracker.write_text("x/" * 400),
    ):
        tracker.unlink(missing_ok=True)
        tracker.touch()
        make(tracker)
        found = directory.candidates(path.parent)
        assert found.paths == (path,)
        assert "which is not a step" in found.notes[0]
        with pytest.raises(CheckpointError, match="not a checkpoint here: write one of 3 into it"):
            directory.latest(path.parent)
