"""Reads of blocks into place: for any saved and any wanted boxes, and without a byte more than needed."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.checkpoint import manifest
from megalite.checkpoint.fetching import Target, assign, fetch, needed_blocks
from megalite.checkpoint.manifest import Block, Manifest, SavedBox, read_manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box
from tests.harness import checkpoints

CPU = torch.device("cpu")
ALONE = ParallelMesh().world()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"model/cube": (3, 4, 5), "model/word": (6, 5), "model/norm": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def wanted_of(described: Manifest, name: str, targets: list[Target]) -> dict[SavedBox, list[Target]]:
    return {
        saved: meeting
        for saved in described.tensors[name].boxes
        if (meeting := [target for target in targets if saved.box.intersection(target.box) is not None])
    }


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_boxes_are_filled_from_any_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 4 * data.draw(st.integers(1, 20)))
        path = checkpoints.write(folder, tensors(), data.draw(checkpoints.cuts(tensors())))
        described = read_manifest(path)
        targets: list[tuple[str, Target]] = []
        wanted: dict[SavedBox, list[Target]] = {}
        for name, box in (placed for file in data.draw(checkpoints.cuts(tensors())) for placed in file):
            room = torch.full((2, *box.size), torch.nan)
            values = room[0] if data.draw(st.booleans()) else room.movedim(0, -1)[..., 0]  # in one piece, or not
            dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
            targets.append((name, Target(box, values.to(dtype))))
        for name in tensors():
            wanted |= wanted_of(described, name, [target for each, target in targets if each == name])
        assert fetch(path, described, wanted, {}, ALONE, CPU) is None
    for name, target in targets:
        assert torch.equal(target.values.float(), tensors()[name][target.box.slices()]), (name, target.box)
    shutil.rmtree(folder)


def test_a_few_rows_cost_a_few_blocks(tmp_path: Path) -> None:
    values = {"model/word": torch.randn(1000, 64)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 1024)  # four rows
        path = checkpoints.write(tmp_path, values)
        with checkpoints.counted_bytes() as read:
            rows = CheckpointReader(path).read("model/word", Box((6, 0), (4, 64)))
    assert torch.equal(rows, values["model/word"][6:10])
    assert sum(read) == 2 * 1024


def test_damage_elsewhere_does_not_matter_and_here_it_does(tmp_path: Path) -> None:
    values = {"model/word": torch.randn(1000, 64)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 1024)
        path = checkpoints.write(tmp_path, values)
        described = read_manifest(path)
        (saved,) = described.tensors["model/word"].boxes
        shard = path / saved.file
        data = bytearray(shard.read_bytes())
        data[saved.start + 5 * 1024] ^= 1
        shard.write_bytes(data)
        for first, whole in ((0, True), (20, False)):
            target = Target(Box((first, 0), (4, 64)), torch.zeros(4, 64))
            failure = fetch(path, described, {saved: [target]}, {}, ALONE, CPU)
            assert (failure is None) == whole, failure


# ------------------------------------------------------------------------------------------------ between ranks


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_several_ranks_need_is_read_by_one_of_them_and_the_work_is_shared(data: st.DataObject) -> None:
    boxes = [SavedBox("t", (48,), torch.float32, Box((row * 4,), (4,)), "f", row * 16, (0,)) for row in range(12)]
    blocks = [block for saved in boxes for block in saved.blocks()]
    ranks = data.draw(st.integers(1, 4))
    needs: dict[int, list[Block]] = {
        rank: data.draw(st.lists(st.sampled_from(blocks), unique_by=id)) for rank in range(ranks)
    }
    assigned = assign(needs)
    read = [block.start for mine in assigned.values() for block in mine]
    shared = {block.start for block in blocks if sum(block in mine for mine in needs.values()) > 1}
    assert sorted(read) == sorted(shared)
    for rank, mine in assigned.items():
        assert all(block in needs[rank] for block in mine)
    if all(mine == blocks for mine in needs.values()) and ranks > 1:
        assert max(map(len, assigned.values())) - min(map(len, assigned.values())) <= 1


def test_needed_blocks_are_those_that_meet_a_box() -> None:
    saved = SavedBox("t", (8, 4), torch.float32, Box((0, 0), (8, 4)), "f", 0, (1, 2, 3, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 32)  # two rows
        assert [block.start for block in needed_blocks(saved, [Box((3, 1), (1, 1)), Box((6, 0), (2, 4))])] == [32, 96]
        assert [block.start for block in needed_blocks(saved, [Box((0, 3), (8, 1))])] == [0, 32, 64, 96]
        assert list(needed_blocks(saved, [Box((8, 0), (1, 4))])) == []
        assert [block.before for block in saved.blocks()] == [0, 1, 2, 3]


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    values = {f"model/{number}": torch.randn(3) for number in range(90)}
    path = checkpoints.write(tmp_path, values, [[(name, Box((0,), (3,)))] for name in values])
    described = read_manifest(path)
    targets = {tensor.boxes[0]: [Target(Box((0,), (3,)), torch.zeros(3))] for tensor in described.tensors.values()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, hard))
    try:
        assert fetch(path, described, targets, {}, ALONE, CPU) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for saved, (target,) in targets.items():
        assert torch.equal(target.values, values[saved.name])
