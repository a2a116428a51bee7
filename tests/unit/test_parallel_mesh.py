"""Groups of ranks in both views of the mesh; and any rank of a large layout, built on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.mesh import DENSE_AXES, EXPERT_AXES, ParallelMesh, UnconnectedMesh
from tests.harness.job import Job

ROOT = Path(__file__).parents[2]


def groups(axis: str, world_size: int = 8, **sizes: int) -> list[list[int]]:
    """Return the groups along `axis` of all ranks, each once."""
    meshes = [ParallelMesh(rank=rank, world_size=world_size, **sizes) for rank in range(world_size)]
    return [list(ranks) for ranks in dict.fromkeys(mesh.ranks(axis) for mesh in meshes)]


def test_the_order_is_megatrons() -> None:
    """Tensor-parallel ranks closest together, then context, then data, pipeline stages furthest apart."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert groups("tp", **sizes) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups("dp", **sizes) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups("pp", **sizes) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 2}
    assert groups("cp", **sizes) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups("dp", **sizes) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_expert_view_lays_the_ranks_of_a_stage_out_again() -> None:
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "pipeline_parallel_size": 2}
    assert groups("etp", **sizes) == [[0, 1], [2, 3], [4, 5], [6, 7]]  # as tp, where not told otherwise
    assert groups("ep", **sizes) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups("edp", **sizes) == [[0], [1], [2], [3], [4], [5], [6], [7]]
    sizes = {"tensor_parallel_size": 4, "expert_parallel_size": 2, "expert_tensor_parallel_size": 1}
    assert groups("ep", **sizes) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups("edp", **sizes) == [[0, 2, 4, 6], [1, 3, 5, 7]]


small = st.sampled_from([1, 2, 3, 4])


@given(tp=small, cp=small, dp=small, pp=small, ep=small, data=st.data())
def test_groups_partition_the_world(tp: int, cp: int, dp: int, pp: int, ep: int, data: st.DataObject) -> None:
    dp *= ep  # so that both views factor
    world_size = tp * cp * dp * pp
    rank = data.draw(st.integers(0, world_size - 1))
    sizes = {
        "world_size": world_size,
        "tensor_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_parallel_size": pp,
        "expert_parallel_size": ep,
    }
    mesh = ParallelMesh(rank=rank, **sizes)
    assert mesh.ranks(*DENSE_AXES) == mesh.ranks(*EXPERT_AXES) == tuple(range(world_size))
    for axis in (*DENSE_AXES, *EXPERT_AXES):
        ranks = mesh.ranks(axis)
        assert len(ranks) == mesh.size(axis)
        assert ranks[mesh.coordinate(axis)] == rank
        assert all(ParallelMesh(rank=other, **sizes).ranks(axis) == ranks for other in ranks)
    assert mesh.ranks("dp", "cp", "tp") == mesh.ranks("edp", "ep", "etp")  # a stage is the same in both views


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 0},
        {"pipeline_parallel_size": 3},
        {"expert_parallel_size": 16},
    ],
)
def test_sizes_that_do_not_factor_the_world_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="8 ranks cannot be divided"):
        ParallelMesh(world_size=8, **sizes)


@pytest.mark.parametrize("axes", [("tp", "ep"), ("etp", "dp"), ("pp", "cp", "edp")])
def test_axes_of_two_views_make_no_group(axes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"axes \(.*\) belong to two views"):
        ParallelMesh().group(*axes)


@pytest.mark.parametrize("axes", [("tensor",), ("tp", "tensor")])
def test_an_axis_that_is_none_is_named(axes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="the mesh has no axis 'tensor': it has "):
        ParallelMesh().group(*axes)


def test_a_group_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = ParallelMesh()
    group = mesh.group("dp", "cp")
    monkeypatch.setattr(mesh, "ranks", lambda *axes: pytest.fail("its ranks are looked for again"))
    assert mesh.group("dp", "cp") is group


def test_the_world_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 16,384 ranks a search takes half a millisecond."""
    mesh = UnconnectedMesh(world_size=16_384, tensor_parallel_size=8)
    world = mesh.world()
    assert world.ranks == tuple(range(16_384))
    for search in ("ranks", "group_of"):
        monkeypatch.setattr(mesh, search, lambda *_: pytest.fail("its ranks are looked for again"))
    assert mesh.world() is world


def test_one_process_needs_no_process_group() -> None:
    mesh = ParallelMesh()
    for group in (mesh.world(), mesh.group("tp"), mesh.group("dp", "cp"), mesh.group("edp")):
        assert (group.ranks, group.rank, group.size, group.process_group) == ((0,), 0, 1, None)


ANY_RANK = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.mesh import ParallelMesh

rank, world_size = int(sys.argv[1]), 16384
dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
mesh = ParallelMesh(
    rank=rank, world_size=world_size, tensor_parallel_size=8, pipeline_parallel_size=8, expert_parallel_size=16,
    device=torch.device("meta"),
)
assert {axis: mesh.size(axis) for axis in ("pp", "dp", "tp")} == {"pp": 8, "dp": 256, "tp": 8}
config = ModelConfig(  # Llama 3.1 405B's sizes, 16 of its layers
    num_layers=16, hidden_size=16384, num_attention_heads=128, ffn_hidden_size=53248, group_query_attention=True,
    num_query_groups=8, position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
    untie_embeddings_and_output_weights=True, vocab_size=128256,
)
network = GPT(config, mesh, sequence_parallel=True, dtype=torch.bfloat16)
options = DataParallel(torch.float32, zero_stage=1, bucket_size=256_000_000, overlap_reduce=True, overlap_gather=True)
optimizer = make_optimizer([network], mesh, OptimizerConfig(lr=1e-4), options)
assert all(bucket.parameters.is_meta for bucket in optimizer.buckets)
elements = sum(shard.master.numel() for shard in optimizer.shards)
layer = 16384 * 128 * (128 + 128 + 8 + 8) + 3 * 16384 * 53248
expected = (16 * layer + 2 * 128256 * 16384) / 8 / 256  # over tp, then over dp
assert expected <= elements < 1.001 * expected, (elements, expected)
print(rank, mesh.coordinate("pp"), mesh.coordinate("dp"), mesh.coordinate("tp"))
"""


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        pytest.param(0, "0 0 0", marks=pytest.mark.wide),
        (5000, "2 113 0"),
        pytest.param(16383, "7 255 7", marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_any_rank_of_16384_can_be_built_here(rank: int, place: str, tmp_path: Path) -> None:
    """Model, buckets and sharded optimizer on the meta device under a fake process group."""
    script = tmp_path / "any_rank.py"
    script.write_text(ANY_RANK)
    with Job([script, str(rank)], 1, tmp_path / "job", told=[{}]) as job:
        assert job.wait() == [0], job.stderr(0)
        assert job.stdout(0).split(maxsplit=1) == [str(rank), place + "\n"]
