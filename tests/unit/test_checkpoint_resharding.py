"""A checkpoint rewritten with other splits is the same checkpoint: same values, loads and atomicity."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import Plan, Saver, file_writer, manifest
from megalite.checkpoint.comparison import compare
from megalite.checkpoint.file_writer import cut_by_weights, cut_evenly, write_checkpoint
from megalite.checkpoint.inspection import verify
from megalite.checkpoint.integrity import covers
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.plan import held_regions
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensors import Kind
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.conversion.native import weights_of_ranks
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box
from tests.harness import checkpoints
from tests.harness.checkpoints import STATE
from tests.harness.job import Job
from tests.harness.tool import Ended, run_tool

pytestmark = pytest.mark.costly

ROOT = Path(__file__).resolve().parents[2]
MESH = ParallelMesh()
MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_attention_heads=4, group_query_attention=True, num_query_groups=2, vocab_size=11,
    make_vocab_size_divisible_by=1, ffn_hidden_size=24, position_embedding_type="rope", normalization="RMSNorm",
    swiglu=True, add_bias_linear=False,
)  # fmt: skip
TENSORS = {
    "model/layers.2.word": torch.randn(6, 5).bfloat16(),
    "model/layers.10.norm": torch.randn(7),
    "optimizer/exp_avg/layers.2.word": torch.randn(6, 5),
    "optimizer/exp_avg/layers.10.norm": torch.randn(7).double(),
}


def build(seed: int) -> tuple[GPT, Optimizer]:
    network = GPT(MODEL, MESH, dtype=torch.bfloat16)
    initialize(network, seed)
    optimizer = make_optimizer([network], MESH, OptimizerConfig(lr=0.1), DataParallel(torch.float32))
    generator = torch.Generator().manual_seed(seed)
    for state in optimizer.slices():
        for values in state.state.values():
            values.copy_(torch.randn(values.shape, generator=generator))
    return network, optimizer


def bits(network: GPT, optimizer: Optimizer) -> list[Tensor]:
    return [*network.parameters(), *(values for state in optimizer.slices() for values in state.state.values())]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"model": asdict(MODEL)}
    optimizer = build(1)[1]
    path = Saver(tmp_path_factory.mktemp("saved"), optimizer, Plan.alone(optimizer)).save(STATE, config)
    assert isinstance(path, Path)
    return path


def run(*arguments: object) -> Ended:
    return run_tool("reshard", *arguments)


def no_progress(size: int) -> None:
    pass


def assert_same(a: Path, b: Path) -> None:
    first, second = CheckpointReader(a), CheckpointReader(b)
    names = first.manifest.tensors | second.manifest.tensors
    assert compare(first, second, names, 1, no_progress).same
    assert verify(second, 1, no_progress) == []


# ------------------------------------------------------------------------------------------------------ the same values


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_cut_becomes_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 8 * data.draw(st.integers(1, 20)))
        _cut_again(tmp_path_factory.mktemp("runs"), data)


def _cut_again(folder: Path, data: st.DataObject) -> None:
    path = checkpoints.write(folder / "a", TENSORS, data.draw(checkpoints.cuts(TENSORS)))
    source = CheckpointReader(path)
    files = data.draw(st.integers(1, 9))
    cut = data.draw(st.just(cut_evenly(source.tensors, files)) | checkpoints.cuts(TENSORS))
    seen: list[int] = []
    read = source.manifest
    written = write_checkpoint(source, read.training, read.config, folder / "b", cut, 2, seen.append)
    assert sum(seen) == sum(tensor.nbytes for tensor in TENSORS.values())
    assert_same(path, written)
    assert verify(CheckpointReader(written), 1, no_progress) == []
    found = checkpoints.read(written, manifest.BLOCK)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    placed = [[(name, saved.box) for name, tensor in read_manifest(written).tensors.items() for saved in tensor.boxes]]
    assert sorted(map(str, placed[0])) == sorted(map(str, (box for boxes in cut for box in boxes)))
    shutil.rmtree(folder)


@pytest.mark.parametrize("flags", [("--files", 3), ("--tensor-model-parallel-size", 2)])
def test_a_run_continues_from_it_bit_for_bit(saved: Path, tmp_path: Path, flags: tuple[object, ...]) -> None:
    result = run("--load", saved.parent, "--save", tmp_path / "new", *flags)
    assert result.code == 0, result.stderr
    path = tmp_path / "new" / "iter_0000007"
    assert checkpoint.latest(tmp_path / "new") == path
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "7\n"
    assert f"{path}: " in result.stdout
    assert_same(saved, path)
    other = build(2)
    assert checkpoint.load(path, *other, MESH) == STATE
    for ours, theirs in zip(bits(*build(1)), bits(*other), strict=True):
        assert torch.equal(ours, theirs)


def test_the_command_itself(saved: Path, tmp_path: Path) -> None:
    command = [ROOT / "tools/checkpoint/reshard.py", "--load", saved, "--files", "2", "--save", tmp_path / "new"]
    with Job(command, 1, tmp_path, told=[{}]) as job:
        assert job.wait() == [0], job.stderr(0)
    assert_same(saved, tmp_path / "new" / "iter_0000007")


# ------------------------------------------------------------------------------------------------------ how it is cut


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), files=st.integers(1, 6))
def test_files_are_of_equal_size(sizes: list[int], files: int) -> None:
    tensors = {}
    for number, size in enumerate(sizes):
        box = Box((0,) * 2, (size, 3))
        for kind, dtype in (("model", torch.bfloat16), ("optimizer/exp_avg", torch.float32)):
            tensors[f"{kind}/{number}"] = Kind(box.size, dtype)
    cut = cut_evenly(tensors, files)
    written = [sum(box.numel * (2 if name.startswith("model") else 4) for name, box in boxes) for boxes in cut]
    total = sum(sizes) * 3 * 6
    assert sum(written) == total
    assert all(abs(size - total / files) < 4 for size in written)


def test_a_weight_its_state_and_its_neighbours_share_a_file(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path, TENSORS)
    cut = cut_evenly(CheckpointReader(path).tensors, 1)
    assert [name for name, _ in cut[0]] == [
        "model/layers.2.word",
        "optimizer/exp_avg/layers.2.word",
        "model/layers.10.norm",
        "optimizer/exp_avg/layers.10.norm",
    ]


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        (("--tensor-model-parallel-size", 2), [(0, 4)]),
        (("--tensor-model-parallel-size", 4), [(0, 4)]),  # more ranks than groups of keys and values
        (("--pipeline-model-parallel-size", 2), [(0, 2), (2, 2)]),
        (("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 4), [(i, 1) for i in range(4)]),
        (("--pipeline-model-parallel-size", 2, "--pipeline-model-parallel-layout", "Ettt|tL"), [(0, 3), (3, 1)]),
    ],
    ids=str,
)
def test_each_rank_of_the_layout_finds_what_is_its_own_in_its_file(
    saved: Path, tmp_path: Path, flags: tuple[object, ...], stages: list[tuple[int, int]]
) -> None:
    result = run("--load", saved, "--save", tmp_path, *flags)
    assert result.code == 0, result.stderr
    written = read_manifest(tmp_path / "iter_0000007")
    split = flags[1] if flags[0] == "--tensor-model-parallel-size" else 1
    assert isinstance(split, int)
    assert len(written.files) == split * len(stages)
    held = [_held(rank, split, stages) for rank in range(split * len(stages))]
    for weight, box in set.union(*held):
        holders = [rank for rank, regions in enumerate(held) if (weight, box) in regions]
        for name in (weight, weight.replace("model/", "optimizer/exp_avg/", 1)):
            found = [one for one in written.tensors[name].boxes if one.box.intersection(box) is not None]
            files = {int(one.file.removeprefix("rank_").removesuffix(".safetensors")) for one in found}
            # Copies (a norm, a group of keys and values, an output layer tied to the embedding) share in them.
            assert files <= set(holders)
            if len(holders) == 1:
                assert [one.box for one in found] == [box]


def _held(rank: int, split: int, stages: list[tuple[int, int]]) -> set[tuple[str, Box]]:
    """Return the boxes of weights on a rank of a layout; `stages`: first layer and number of layers of each."""
    mesh = UnconnectedMesh(
        rank=rank,
        world_size=split * len(stages),
        tensor_parallel_size=split,
        pipeline_parallel_size=len(stages),
        device=torch.device("meta"),
    )
    (first, layers), ends = stages[mesh.coordinate("pp")], {mesh.ranks("pp")[0], mesh.ranks("pp")[-1]}
    part = StageLayers(first, layers, embedding=first == 0, loss=first + layers == 4)
    network = GPT(MODEL, mesh, stage_layers=part, tied_ranks=tuple(sorted(ends)))
    return {(region.part.name, region.part.box) for region in held_regions(network, None)}


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"expert_model_parallel_size": 2}, 2),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 3, "expert_tensor_parallel_size": 1}, 6),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8),
    ],
    ids=str,
)
def test_the_weights_of_ranks_of_any_view_are_the_model(sizes: dict[str, int], ranks: int) -> None:
    """The smallest number of ranks with both views."""
    by_rank = list(weights_of_ranks(MODEL, ParallelConfig(**sizes)))
    assert len(by_rank) == ranks
    for _, piece in named_pieces(GPT(MODEL, MESH)):
        saved = [box for rank in by_rank for name, box in rank if name == f"model/{piece.tensor.name}"]
        assert covers(saved, piece.box), piece.tensor.name


def test_weights_of_another_model_are_refused(saved: Path) -> None:
    tensors = CheckpointReader(saved).tensors
    weights = [[(name, Box((0,) * len(t.shape), t.shape)) for name, t in tensors.items() if name.startswith("model/")]]
    assert len(cut_by_weights(tensors, weights)[0]) == len(tensors)
    with pytest.raises(CheckpointError, match=r"is not in the model that its config describes"):
        cut_by_weights(tensors, [weights[0][:-1]])


# ------------------------------------------------------------------------------------------------------ left out


def test_weights_alone_serve_generation_and_refuse_to_go_on(saved: Path, tmp_path: Path) -> None:
    result = run("--load", saved, "--save", tmp_path, "--files", 2, "--no-optimizer")
    assert result.code == 0, result.stderr
    assert "without the optimizer's state" in result.stdout
    path = tmp_path / "iter_0000007"
    assert all(name.startswith("model/") for name in read_manifest(path).tensors)
    network, _ = build(2)
    checkpoint.load(path, network, None, MESH)
    for ours, theirs in zip(build(1)[0].parameters(), network.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(CheckpointError, match="it has only weights"):
        checkpoint.load(path, *build(2), MESH)


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --files, or --tensor-model-parallel-size and --pipeline-model-parallel-size"),
        (("--files", 2, "--tensor-model-parallel-size", 2), "give --files, or"),
        (("--files", 0), "--files 0: must be at least 1"),
        (("--tensor-model-parallel-size", 3), "--tensor-model-parallel-size 3 does not divide the attention heads, 4"),
        (("--tensor-model-parallel-size", 0), "--tensor-model-parallel-size 0: must be at least 1"),
        (("--pipeline-model-parallel-size", 0), "--pipeline-model-parallel-size must be at least 1"),
        (("--pipeline-model-parallel-size", 3), "cannot be divided evenly among 3 stages"),
    ],
)
def test_flags_that_make_no_cut(saved: Path, tmp_path: Path, flags: tuple[object, ...], message: str) -> None:
    result = run("--load", saved, "--save", tmp_path, *flags)
    assert result.code == 64
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_there_stays(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path, TENSORS)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    result = run("--load", tmp_path, "--save", tmp_path, "--files", 2)
    assert result.code == 93
    assert f"{path} already exists: choose another folder" in result.stderr
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before

    newer = checkpoints.write(tmp_path / "other", TENSORS, training=replace(STATE, iteration=9))
    assert run("--load", newer, "--save", tmp_path, "--files", 2).code == 0
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000009"


@pytest.mark.parametrize("kind", ["flip", "cut", "missing"])
def test_what_is_damaged_is_not_copied(tmp_path: Path, kind: str) -> None:
    path = checkpoints.write(tmp_path / "a", TENSORS)
    shard = path / "rank_00000.safetensors"
    good = shard.read_bytes()
    if kind == "missing":
        shard.unlink()
    else:
        shard.write_bytes(good[:-1] + (bytes([good[-1] ^ 64]) if kind == "flip" else b""))
    result = run("--load", path, "--save", tmp_path / "b", "--files", 2)
    assert result.code == 93
    assert "rank_00000.safetensors: " in result.stderr
    assert "megalite-inspect-checkpoint --verify lists all that is damaged" in result.stderr
    assert list((tmp_path / "b").iterdir()) == []


def test_every_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.write(tmp_path / "a", TENSORS)
    synced: set[int] = set()
    sync, rename = os.fsync, os.rename

    def renamed(old: Path, new: Path) -> None:
        assert {file.stat().st_ino for file in old.iterdir()} <= synced
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.add(os.fstat(descriptor).st_ino), sync(descriptor)))
    monkeypatch.setattr(os, "rename", renamed)
    assert run("--load", path, "--save", tmp_path / "b", "--files", 3).code == 0


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_disk_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = checkpoints.write(tmp_path / "a", TENSORS)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (file_writer, "_copy_box")), full)
    result = run("--load", path, "--save", tmp_path / "b", "--files", 2)
    assert result.code == 93
    assert "No space left on device. Free space, or choose another folder" in result.stderr
    assert list((tmp_path / "b").iterdir()) == []
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "Not a directory" in run("--load", path, "--save", blocked, "--files", 2).stderr
