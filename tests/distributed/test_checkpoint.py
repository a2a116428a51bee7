"""Saved under one layout, loaded under any other, bit for bit; and failures that every rank sees alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import TrainingState, directory
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.initialization import initial_values, initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient, named_pieces
from megalite.parallel.sharding import LogicalTensor, Normal
from tests.harness.checkpoints import read
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools

GPT2 = ModelConfig(
    num_layers=2, hidden_size=8, num_attention_heads=4, vocab_size=13, make_vocab_size_divisible_by=2,
    max_position_embeddings=5,
)  # fmt: skip
LLAMA = ModelConfig(
    num_layers=2, hidden_size=12, num_attention_heads=4, group_query_attention=True, num_query_groups=2, vocab_size=11,
    make_vocab_size_divisible_by=1, ffn_hidden_size=20, position_embedding_type="rope", normalization="RMSNorm",
    swiglu=True, add_bias_linear=False, qk_layernorm=True, untie_embeddings_and_output_weights=True,
)  # fmt: skip
OPTIMIZERS = {GPT2: OptimizerConfig(lr=0.01), LLAMA: OptimizerConfig(lr=0.01, optimizer="muon")}


@dataclass(frozen=True)
class Layout:
    world: int
    tp: int = 1
    zero: int = 0
    instances: int = 1
    sp: bool = False
    bucket_size: int | None = None


LAYOUTS = [
    Layout(1),
    Layout(1, zero=1, bucket_size=100),
    Layout(2),
    Layout(2, zero=1),
    Layout(2, tp=2),
    Layout(2, tp=2, sp=True),
    Layout(4, zero=1, bucket_size=200),
    Layout(4, tp=2),
    Layout(4, tp=2, zero=1, sp=True, bucket_size=100),
    Layout(4, tp=4, zero=1),
    Layout(4, tp=2, zero=2, bucket_size=100),
    Layout(2, zero=3),
    Layout(4, zero=3, instances=2),
]


@dataclass
class Case:
    """A model with its optimizer on one rank."""

    network: GPT
    optimizer: Optimizer
    mesh: ParallelMesh

    @staticmethod
    def build(layout: Layout, model: ModelConfig, dtype: torch.dtype, seed: int) -> Case:
        rank = dist.get_rank() if dist.is_initialized() else 0
        mesh = ParallelMesh(rank=rank, world_size=layout.world, tensor_parallel_size=layout.tp)
        network = GPT(model, mesh, sequence_parallel=layout.sp, dtype=dtype)
        initialize(network, seed)
        wide = torch.promote_types(dtype, torch.float32)
        options = DataParallel(
            wide, layout.zero, layout.instances, bucket_size=layout.bucket_size, overlap_gather=layout.zero > 0
        )
        optimizer = make_optimizer([network], mesh, OPTIMIZERS[model], options, blocks=[network.blocks()])
        return Case(network, optimizer, mesh)

    def step(self, number: int) -> None:
        """An update with gradients drawn by global name."""
        self.optimizer.begin_step(1)
        drawn: dict[int, Tensor] = {}
        for parameter, piece in named_pieces(self.network):
            gradient = drawn.setdefault(id(parameter), torch.zeros(parameter.shape))
            name = f"{number}/{piece.tensor.name}"
            values = initial_values(LogicalTensor(name, piece.tensor.shape, Normal(1.0), False), piece.box, seed=0)
            piece.view(gradient).copy_(values)
        for bucket in self.optimizer.buckets:
            for slot in bucket.slots:
                for use in range(slot.parameter.sharding.uses):
                    bucket.accumulate(slot.parameter, DenseGradient(drawn[id(slot.parameter)]), use)
        self.optimizer.reduce(0, 1)
        self.optimizer.step(Rates(0.01, 0.01, 0.01))

    def save(self, path: Path, iteration: int = 1) -> Path:
        state = TrainingState(iteration, 4 * iteration, self.optimizer.steps)
        return checkpoint.save(path, state, self.network, self.optimizer, self.mesh, {"model": {}})

    def by_name(self) -> dict[str, Tensor]:
        """The global tensors, NaN where this rank holds nothing; put together by pieces, not by the checkpoint."""
        found: dict[str, Tensor] = {}
        with self.optimizer.whole_parameters():
            parameters = {id(p): p for p, _ in named_pieces(self.network)}.values()
            held = [("model", p, p.detach().clone()) for p in parameters]
        for state in self.optimizer.slices():
            for name, values in state.state.items():
                local = torch.full((state.parameter.numel(),), torch.nan, dtype=values.dtype)
                local[state.start : state.stop] = values
                held.append((f"optimizer/{name}", state.parameter, local.view(state.parameter.shape)))
        for kind, parameter, local in held:
            for piece in parameter.sharding.pieces:
                shape, name = piece.tensor.shape, f"{kind}/{piece.tensor.name}"
                tensor = found.setdefault(name, torch.full(shape, torch.nan, dtype=local.dtype))
                part = tensor[piece.box.slices()]
                tensor[piece.box.slices()] = torch.where(part.isnan(), piece.view(local), part)
        return found


def merge(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole tensors; where ranks hold the same element they must hold the same bits."""
    merged: dict[str, Tensor] = {}
    for found in ranks:
        for name, tensor in found.items():
            before = merged.setdefault(name, tensor.clone())
            both = ~before.isnan() & ~tensor.isnan()
            assert_bits_equal(tensor[both], before[both], f"copies of {name}")
            merged[name] = torch.where(before.isnan(), tensor, before)
    for name, tensor in merged.items():
        assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return merged


def train_and_save(layout: Layout, model: ModelConfig, dtype: torch.dtype, path: Path) -> dict[str, Tensor]:
    case = Case.build(layout, model, dtype, seed=1)
    case.step(0)
    case.step(1)
    case.save(path)
    return case.by_name()


def load(layout: Layout, model: ModelConfig, dtype: torch.dtype, path: Path) -> tuple[Any, int, dict[str, Tensor]]:
    case = Case.build(layout, model, dtype, seed=2)
    case.step(5)
    found = checkpoint.find_candidates(path, case.mesh).paths[0]
    state = checkpoint.load(found, case.network, case.optimizer, case.mesh)
    return state, case.optimizer.steps, case.by_name()


def resume(layout: Layout, model: ModelConfig, dtype: torch.dtype, path: Path) -> list[dict[str, Tensor]]:
    """After a third step: of a run that went on, and of one that was saved and loaded into other values."""
    case = Case.build(layout, model, dtype, seed=1)
    case.step(0)
    case.step(1)
    saved = case.save(path)
    case.step(2)
    other = Case.build(layout, model, dtype, seed=2)
    other.step(5)
    checkpoint.load(saved, other.network, other.optimizer, other.mesh)
    other.step(2)
    return [case.by_name(), other.by_name()]


def run(rank_pools: RankPools, function: Any, layout: Layout, *arguments: Any) -> list[Any]:
    if layout.world == 1:
        return [function(layout, *arguments)]
    return rank_pools(layout.world).run(function, layout, *arguments)


FAMILIES = [
    pytest.param(GPT2, torch.float32, id="gpt2-fp32-adam"),
    pytest.param(LLAMA, torch.bfloat16, id="llama-bf16-muon"),
]


@pytest.mark.parametrize(("model", "dtype"), FAMILIES)
@pytest.mark.parametrize("saving", LAYOUTS, ids=str)
def test_every_layout_loads_what_any_layout_saved(
    rank_pools: RankPools, tmp_path: Path, model: ModelConfig, dtype: torch.dtype, saving: Layout
) -> None:
    truth = merge(run(rank_pools, train_and_save, saving, model, dtype, tmp_path))

    for name, tensor in read(tmp_path / "iter_0000001").items():
        assert_bits_equal(tensor, truth[name], name)
    for loading in LAYOUTS:
        answers = run(rank_pools, load, loading, model, dtype, tmp_path)
        assert {(state, steps) for state, steps, _ in answers} == {(TrainingState(1, 4, 2), 2)}
        loaded = merge([found for _, _, found in answers])
        assert loaded.keys() == truth.keys()
        for name in truth:
            assert_bits_equal(loaded[name], truth[name], f"{name} loaded under {loading}")


@pytest.mark.parametrize(("model", "dtype"), FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_goes_on_bit_for_bit(
    rank_pools: RankPools, tmp_path: Path, model: ModelConfig, dtype: torch.dtype, layout: Layout
) -> None:
    answers = run(rank_pools, resume, layout, model, dtype, tmp_path)
    went_on, resumed = (merge([answer[i] for answer in answers]) for i in range(2))
    for name in went_on:
        assert_bits_equal(resumed[name], went_on[name], name)


@pytest.mark.parametrize("layout", [Layout(4), Layout(4, zero=1), Layout(4, tp=2)], ids=str)
def test_writing_is_shared_equally(rank_pools: RankPools, tmp_path: Path, layout: Layout) -> None:
    run(rank_pools, train_and_save, layout, LLAMA, torch.float32, tmp_path)
    sizes = checkpoint.read_manifest(tmp_path / "iter_0000001").files.values()
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


# ------------------------------------------------------------------------------------------------------ failures


def fail_alone(layout: Layout, path: Path, kind: str) -> tuple[str, str]:
    """Save once, then again with a fault on the last rank; the error of each rank, and what can still be loaded."""
    case = Case.build(layout, GPT2, torch.float32, seed=1)
    case.step(0)
    case.save(path)
    last = case.mesh.rank == layout.world - 1
    try:
        if kind == "damaged file":
            if last:
                shard = path / "iter_0000001" / "rank_00000.safetensors"
                shard.write_bytes(shard.read_bytes()[:-1])
            dist.barrier()
            checkpoint.load(path / "iter_0000001", case.network, case.optimizer, case.mesh)
        elif kind == "another folder":
            checkpoint.find_candidates(path / "elsewhere" if last else path, case.mesh)
        else:
            case.save(path / "elsewhere" if last else path, iteration=2)
    except CheckpointError as error:
        return str(error), str(directory.latest(path))
    return "no error", ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("damaged file", r"loading .*/iter_0000001 failed on rank 0: .*rank_00000.safetensors has"),
        ("another folder", "the ranks do not see the same files in"),
        ("another folder to save", "failed on rank 3: .*No such file or directory"),
    ],
)
def test_a_fault_of_one_rank_is_the_same_error_on_all(
    rank_pools: RankPools, tmp_path: Path, kind: str, message: str
) -> None:
    answers = rank_pools(4).run(fail_alone, Layout(4, tp=2, zero=1), tmp_path, kind)
    if kind != "another folder":
        assert len({error for error, _ in answers}) == 1
    for error, latest in answers:
        assert re.search(message, error), error
        assert latest == str(tmp_path / "iter_0000001")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
