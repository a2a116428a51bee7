"""Output of the inspection of checkpoints: the damage that it finds, and the differences between two."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.checkpoint import manifest
from megalite.checkpoint.comparison import Comparison, ValueDifference, compare, compared_bytes
from megalite.checkpoint.inspection import statistics, verify
from megalite.checkpoint.integrity import CorruptFileError
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite.process import progress
from tests.harness import checkpoints
from tests.harness.checkpoints import STATE
from tests.harness.tool import Ended, run_tool

pytestmark = pytest.mark.costly

ROOT = Path(__file__).resolve().parents[2]


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/word": torch.randn(6, 5, generator=generator).bfloat16(),
        "model/norm": torch.randn(7, generator=generator),
        "optimizer/exp_avg/word": torch.randn(6, 5, generator=generator),
        "optimizer/exp_avg/norm": torch.randn(7, generator=generator).double(),
    }


def halves(values: dict[str, Tensor]) -> list[list[tuple[str, Box]]]:
    """Return two files, the first with the upper rows."""
    return [
        [
            (name, Box((start, *(0,) * (tensor.ndim - 1)), (length, *tensor.shape[1:])))
            for name, tensor in values.items()
            for start, length in [(0, 3) if half == 0 else (3, tensor.shape[0] - 3)]
        ]
        for half in (0, 1)
    ]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "run", tensors(), halves(tensors()))


def inspect(*arguments: object) -> Ended:
    return run_tool("inspect_checkpoint", *arguments)


def no_progress(size: int) -> None:
    pass


def found_by_verify(path: Path) -> list[tuple[str, str | None, str]]:
    found = verify(CheckpointReader(path), workers=2, advance=no_progress)
    return [(damage.file, damage.tensor, damage.problem) for damage in found]


# ------------------------------------------------------------------------------------------------------ what it holds


def test_a_run_directory_is_shown_by_its_latest_checkpoint(saved: Path) -> None:
    shown = inspect("--load", saved.parent)
    assert shown.code == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert f"checkpoint {saved}" in lines
    assert "others none" in lines
    assert "iteration 7" in lines
    assert "consumed samples 28" in lines
    assert "model/word [6, 5] bfloat16 2 60 rank_00000 rank_00001" in lines
    assert "optimizer/exp_avg/norm [7] float64 2 56 rank_00000 rank_00001" in lines
    assert "model 2 37 88" in lines
    assert "optimizer/exp_avg 2 37 176" in lines
    size = (saved / "rank_00001.safetensors").stat().st_size
    assert f"rank_00001.safetensors {size:,} 4 4" in lines

    newer = checkpoints.write(saved.parent, tensors(), training=replace(STATE, iteration=12))
    assert f"checkpoint         {newer}\nothers             iter_0000007\n" in inspect("--load", saved.parent).stdout
    assert f"checkpoint         {saved}\nothers             iter_0000012\n" in inspect("--load", saved).stdout


def test_the_tensors_are_those_of_the_pattern_and_the_totals_of_all(saved: Path) -> None:
    shown = inspect("--load", saved, "--tensors", "optimizer/*/norm")
    assert "optimizer/exp_avg/norm" in shown.stdout
    assert "model/norm" not in shown.stdout
    assert "model/word" not in shown.stdout
    assert any(line.split() == ["model", "2", "37", "88"] for line in shown.stdout.splitlines())
    missing = inspect("--load", saved, "--tensors", "norm")
    assert missing.code == 64
    assert "--tensors norm: there is no such tensor; a name is model/word" in missing.stderr


def test_the_configuration_by_section(tmp_path: Path) -> None:
    config = {"model": {"hidden_size": 8, "swiglu": True}, "training": {"seed": None}}
    shown = inspect("--load", checkpoints.write(tmp_path, tensors(), config=config), "--config")
    lines = [line.split() for line in shown.stdout.splitlines()]
    start = lines.index(["model"])
    assert lines[start : start + 5] == [["model"], ["hidden_size", "8"], ["swiglu", "yes"], [], ["training"]]
    assert lines[start + 5] == ["seed", "-"]


def test_what_a_stranger_has_written_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    config = {"data": {"path": "a\x1b[2Jb", "other": "\ud800", "list": ["\x1b[2J"]}}
    shown = inspect("--load", checkpoints.write(tmp_path, tensors(), config=config), "--config")
    assert shown.code == 0, shown.stderr
    assert r"'a\x1b[2Jb'" in shown.stdout
    assert r"'\ud800'" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_json_has_all_that_the_manifest_has(saved: Path) -> None:
    found = json.loads(inspect("--load", saved, "--json", "--verify", "--statistics").stdout)
    described = json.loads((saved / "manifest.json").read_text())
    assert found["training"] == described["training"]
    assert found["config"] == described["config"]
    assert {file: entry["bytes"] for file, entry in found["files"].items()} == {
        file: entry["size"] for file, entry in described["files"].items()
    }
    for name, tensor in described["tensors"].items():
        assert {key: found["tensors"][name][key] for key in tensor} == tensor
    assert found["damage"] == []
    assert found["statistics"]["model/norm"]["elements"] == 7
    assert found["totals"]["model"] == {"tensors": 2, "elements": 37, "bytes": 88}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give a FOLDER, --load, or --diff with two checkpoints"),
        (["--load", "a", "--diff", "a", "b"], "give a FOLDER, --load, or --diff with two checkpoints"),
        (["--diff", "a", "b", "--verify"], "are about one checkpoint: give it as --load"),
        (["--load", "a", "--workers", "0"], "--workers 0: must be at least 1"),
        (["--load", "a", "--verfy"], "there is no flag --verfy: did you mean --verify?"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], message: str) -> None:
    refused = inspect(*flags)
    assert refused.code == 64
    assert message in refused.stderr


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    refused = inspect("--load", tmp_path)
    assert refused.code == 93
    assert f"{tmp_path} has no checkpoint" in refused.stderr


@pytest.mark.wide
def test_the_command_itself(saved: Path) -> None:
    """Its file has the name of a standard library module that everything imports."""
    command = [sys.executable, str(ROOT / "tools/checkpoint/inspect.py"), "--load", str(saved), "--verify"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    (saved / "rank_00000.safetensors").unlink()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 93, ended.stderr
    assert ended.stdout.endswith("\nrank_00000.safetensors: it is missing\n")
    assert ended.stderr == f"error: {saved}: 1 damaged: load another checkpoint\n"


# ------------------------------------------------------------------------------------------------------ damage


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found_or_makes_no_difference(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_a_flipped_bit(tmp_path_factory, data)


@pytest.mark.wide
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_many_flipped_bits_are_found_or_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_a_flipped_bit(tmp_path_factory, data)


def check_a_flipped_bit(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = checkpoints.write(folder, tensors(), data.draw(checkpoints.cuts(tensors())))
    damaged = data.draw(st.sampled_from(sorted(file for file in path.iterdir())))
    good = damaged.read_bytes()
    position, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    damaged.write_bytes(good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :])
    try:
        found = {file for file, _, _ in found_by_verify(path)}
    except CheckpointError as error:
        found = {str(error).split("/")[-1].split()[0]}
    if not found:
        loaded = checkpoints.read(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert found <= {damaged.name}
    shutil.rmtree(folder)


def test_all_that_is_wrong_is_found_at_once(tmp_path: Path) -> None:
    values = tensors()
    files = [[placed] for placed in halves(values)[0]] + [halves(values)[1]]
    path = checkpoints.write(tmp_path, values, files)
    assert inspect("--load", path, "--verify").stdout.endswith("\nevery byte is as it was written\n")
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == 5

    shards[0].unlink()
    size = shards[1].stat().st_size
    os.truncate(shards[1], size - 1)
    with shards[2].open("ab") as file:
        file.write(b"more")
    shards[3].write_bytes(b"\xff" * shards[3].stat().st_size)
    good = shards[4].read_bytes()
    shards[4].write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # the end of exp_avg/norm
    (path / "rank_00009.safetensors").write_bytes(b"")

    *found, foreign = found_by_verify(path)
    assert [file for file, _, _ in found] == [shard.name for shard in (*shards[:4], *shards[3:])]
    problems = [problem for _, _, problem in found]
    assert problems[0] == "it is missing"
    assert problems[1] == f"it has {size - 1} bytes of {size}: it was cut off or replaced"
    assert problems[2].startswith(f"it has {shards[2].stat().st_size} bytes of")
    assert problems[3] == "the checksum of the bytes around its tensors does not match"
    assert problems[4].startswith("the checksum of optimizer/exp_avg/norm@0 does not match, in bytes ")
    assert problems[5].startswith("the checksum of optimizer/exp_avg/norm@3 does not match, in bytes ")
    assert found[5][1] == "optimizer/exp_avg/norm"
    assert foreign == ("rank_00009.safetensors", None, "it is not of this checkpoint")

    shown = inspect("--load", path, "--verify")
    assert shown.code == 93
    assert "7 damaged: load another checkpoint" in shown.stderr
    for file, _, problem in (*found, foreign):
        assert f"{file}: {problem}\n" in shown.stdout
    machine = json.loads(inspect("--load", path, "--verify", "--json").stdout)["damage"]
    assert [tuple(damage.values()) for damage in machine] == [*found, foreign]


def test_a_file_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    """Use an intact file of the same size, with other values or with boxes of another split."""
    path = checkpoints.write(tmp_path / "a", tensors(), halves(tensors()))
    other = checkpoints.write(tmp_path / "b", tensors(1), halves(tensors()))
    shutil.copy(other / "rank_00000.safetensors", path / "rank_00000.safetensors")
    assert {(file, tensor) for file, tensor, _ in found_by_verify(path)} == {
        ("rank_00000.safetensors", name) for name in tensors()
    }
    square = {"model/word": torch.zeros(2, 2)}
    rows = [[("model/word", Box((row, 0), (1, 2))) for row in (0, 1)]]
    columns = [[("model/word", Box((0, column), (2, 1))) for column in (0, 1)]]
    path, other = (checkpoints.write(tmp_path / n, square, cut) for n, cut in (("c", rows), ("d", columns)))
    shutil.copy(other / "rank_00000.safetensors", path / "rank_00000.safetensors")
    problems = [problem for _, _, problem in found_by_verify(path)]
    assert problems == ["the checksum of the bytes around its tensors does not match"]


def test_a_header_that_gives_right_bytes_another_shape_is_found(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path, tensors())
    shard = path / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"[6, 5]", b"[5, 6]", 1))
    problem = "the checksum of the bytes around its tensors does not match"
    assert found_by_verify(path) == [(shard.name, None, problem)]


def test_an_input_output_error_is_damage_of_that_box_only(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, bad = os.preadv, saved / "rank_00000.safetensors"

    def failing(descriptor: int, buffers: Any, start: int) -> int:
        found = os.fstat(descriptor)
        if found.st_ino == bad.stat().st_ino and start >= found.st_size - 24:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", failing)
    problem = "it cannot be read: Input/output error"
    assert found_by_verify(saved) == [(bad.name, "optimizer/exp_avg/norm", problem)]


def test_progress_counts_every_byte_once(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    verify(CheckpointReader(saved), 2, seen.append)
    assert sum(seen) == 88 + 176
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "INTERVAL", 0.0)
        with progress.show_progress("verifying", 264) as advance:
            advance(64)
            advance(200)
    assert capsys.readouterr().err == "verifying: 64 of 264 bytes\nverifying: 264 of 264 bytes\n"


# ------------------------------------------------------------------------------------------------------ statistics

NUMBERS = st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-44])


@settings(max_examples=15, deadline=None)
@given(data=st.data(), numbers=st.lists(NUMBERS, min_size=12, max_size=12))
def test_statistics_are_those_of_the_whole_tensor_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, numbers: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    values = {"model/x": torch.tensor(numbers).view(3, 4)}
    numbers = values["model/x"].flatten().tolist()  # as fp32 has them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 4 * data.draw(st.integers(1, 5)))
        path = checkpoints.write(folder, values, data.draw(checkpoints.cuts(values)))
        found = statistics(CheckpointReader(path), "model/x", no_progress)
    finite = [x for x in numbers if math.isfinite(x)]
    assert found.elements == 12
    assert found.nans == sum(map(math.isnan, numbers))
    assert found.infinities == sum(map(math.isinf, numbers))
    assert found.zeros == sum(x == 0 for x in numbers)
    assert found.denormals == sum(0 < abs(x) < 1.17549435e-38 for x in numbers)
    if finite:
        assert (found.minimum, found.maximum) == (min(finite), max(finite))
        mean = math.fsum(finite) / len(finite)
        assert found.mean == pytest.approx(mean, abs=1e-9)
        assert found.std == pytest.approx(math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite)), abs=1e-9)
        assert found.norm == pytest.approx(math.hypot(*finite), abs=1e-9)
    else:
        assert found.to_json()["minimum"] is None
    shutil.rmtree(folder)


def test_what_is_not_finite_ends_in_an_error_that_names_it(tmp_path: Path) -> None:
    values = tensors()
    healthy = checkpoints.write(tmp_path / "healthy", values)
    assert inspect("--load", healthy, "--statistics").code == 0
    values["optimizer/exp_avg/word"][2, 3] = torch.nan
    values["model/word"][0, 0] = -torch.inf
    ill = checkpoints.write(tmp_path / "ill", values)
    shown = inspect("--load", ill, "--statistics")
    assert shown.code == 93
    assert "2 tensors are not finite: model/word, optimizer/exp_avg/word" in shown.stderr
    assert "1" in next(line for line in shown.stdout.splitlines() if line.startswith("model/word")).split()
    assert inspect("--load", ill, "--statistics", "--tensors", "*norm").code == 0
    found = json.loads(inspect("--load", ill, "--statistics", "--json").stdout)["statistics"]
    assert (found["model/word"]["nans"], found["model/word"]["infinities"]) == (0, 1)
    assert (found["optimizer/exp_avg/word"]["nans"], found["optimizer/exp_avg/word"]["infinities"]) == (1, 0)


def test_statistics_of_damaged_values_are_not_shown(saved: Path) -> None:
    shard = saved / "rank_00000.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    shown = inspect("--load", saved, "--statistics")
    assert shown.code == 93
    assert shown.stdout == ""
    assert f"{shard}: the checksum of optimizer/exp_avg/norm@0 does not match, in bytes" in shown.stderr


# ------------------------------------------------------------------------------------------------------ differences


def compared(a: Path, b: Path, names: list[str] | None = None) -> Comparison:
    first, second = CheckpointReader(a), CheckpointReader(b)
    names = names or sorted(first.manifest.tensors | second.manifest.tensors)
    seen: list[int] = []
    found = compare(first, second, names, 2, seen.append)
    assert sum(seen) == compared_bytes(first, second, names)
    return found


@pytest.mark.wide
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_values_are_compared_whatever_cuts_saved_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    ours, theirs = tensors(), tensors()
    changes = data.draw(
        st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 4)), st.floats(-10, 10, width=32), max_size=4)
    )
    name = "optimizer/exp_avg/word"
    for place, value in changes.items():
        theirs[name][place] += value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 8 * data.draw(st.integers(1, 20)))
        a = checkpoints.write(folder / "a", ours, data.draw(checkpoints.cuts(ours)))
        b = checkpoints.write(folder / "b", theirs, data.draw(checkpoints.cuts(theirs)))
        found = compared(a, b)
    steps = (ours[name].double() - theirs[name].double()).abs()
    if steps.any():
        scale = torch.maximum(ours[name].abs(), theirs[name].abs()).double()
        expected = ValueDifference(30, int(steps.count_nonzero()), float(steps.max()), float((steps / scale).max()))
        assert found.values == {name: expected}
    assert found.same == (not steps.any())
    assert found.compared == 4
    shutil.rmtree(folder)


def test_each_kind_of_difference_is_shown_with_both_sides(tmp_path: Path) -> None:
    config = {"model": {"hidden_size": 8}, "training": {"seed": 1, "bf16": True}}
    ours, theirs = tensors(), tensors()
    ours["model/only_here"] = torch.zeros(1)
    theirs["model/only_there"] = torch.zeros(1)
    theirs["model/norm"] = theirs["model/norm"][:4].clone()
    theirs["model/word"] = theirs["model/word"].float()  # the same values
    a = checkpoints.write(tmp_path / "a", ours, config=config)
    changed = {"model": {"hidden_size": 8}, "training": {"seed": 2}}
    b = checkpoints.write(tmp_path / "b", theirs, training=replace(STATE, optimizer_steps=5), config=changed)

    found = compared(a, b)

    assert found.training == {"optimizer_steps": (6, 5)}
    assert found.config == {"training.seed": (1, 2), "training.bf16": (True, "(absent)")}
    assert found.only_in_a == ["model/only_here"]
    assert found.only_in_b == ["model/only_there"]
    assert found.kinds == {
        "model/norm": ("float32 [7]", "float32 [4]"),
        "model/word": ("bfloat16 [6, 5]", "float32 [6, 5]"),
    }
    assert found.values == {}
    assert found.compared == 3

    shown = inspect("--diff", a.parent, b.parent)
    assert shown.code == 1
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for line in (f"a: {a}", "optimizer_steps 6 5", "training.seed 1 2", "training.bf16 yes (absent)", "only in a"):
        assert line in lines
    assert "model/word bfloat16 [6, 5] float32 [6, 5]" in lines
    assert lines[-1] == "3 of 3 tensors that both have in the same shape are equal"
    machine = json.loads(inspect("--diff", a, b, "--json").stdout)
    assert machine["same"] is False
    assert machine["config"]["training.seed"] == [1, 2]


def test_the_same_is_said_to_be_the_same(tmp_path: Path, saved: Path) -> None:
    other = checkpoints.write(tmp_path / "other", tensors())
    shown = inspect("--diff", saved, other)
    assert shown.code == 0
    assert shown.stdout.endswith("4 of 4 tensors that both have in the same shape are equal\n")


@pytest.mark.parametrize(
    ("ours", "theirs", "absolute", "relative"),
    [
        (0.0, -0.0, 0.0, 0.0),
        (1.0, math.nan, math.inf, math.inf),
        (math.inf, 1.0, math.inf, math.inf),
        (math.inf, -math.inf, math.inf, math.inf),
        (1e-40, 2e-40, pytest.approx(1e-40, rel=1e-4), pytest.approx(0.5, rel=1e-4)),
        (0.0, 3.0, 3.0, 1.0),
    ],
)
def test_bits_that_differ_are_counted_also_where_numbers_say_little(
    tmp_path: Path, ours: float, theirs: float, absolute: float, relative: float
) -> None:
    rest = [math.nan, math.inf, 5.0]  # the same in both
    a = checkpoints.write(tmp_path / "a", {"model/x": torch.tensor([ours, *rest])})
    b = checkpoints.write(tmp_path / "b", {"model/x": torch.tensor([theirs, *rest])})
    assert compared(a, b).values == {"model/x": ValueDifference(4, 1, absolute, relative)}
    assert inspect("--diff", a, b).code == 1
    assert inspect("--diff", a, b, "--json").code == 1
    json.loads(inspect("--diff", a, b, "--json").stdout, parse_constant=pytest.fail)


def test_nothing_is_compared_before_it_is_verified(tmp_path: Path, saved: Path) -> None:
    other = checkpoints.write(tmp_path / "other", tensors())
    shard = other / "rank_00000.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CorruptFileError, match=r"the checksum of optimizer/exp_avg/norm@0 does not match, in bytes"):
        compared(saved, other)
    assert compared(saved, other, ["model/word"]).same
    assert inspect("--diff", saved, other).code == 93
