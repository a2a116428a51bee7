"""Plain modules on several ranks: they train as a loop of plain torch does on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config.optimizer import OptimizerConfig
from megalite.errors import MegaliteError
from megalite.modules.alike import check_alike
from megalite.modules.batch_norm import SyncBatchNorm
from megalite.modules.buffers import KeptBuffers
from megalite.modules.messages import find_messages
from megalite.modules.records import check_tied_buckets, give_records, value_setter
from megalite.modules.stage import ModuleStage, Objective
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.stages import Stages
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters
from tests.harness.wide import wide_except
from tests.unit.test_modules_training import Batch, Sometimes, cut, layers, loss, square

RATE, STEPS, MICRO_BATCHES, SAMPLES = 0.05, 2, 4, 4
SGD = OptimizerConfig(lr=RATE, optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)


def images(step: int, number: int) -> dict[str, Tensor]:
    """Return a micro-batch of all data-parallel ranks."""
    generator = torch.Generator().manual_seed(10 * step + number)
    image = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input": image, "label": torch.randint(5, (SAMPLES,), generator=generator)}


def numbers(step: int, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * step + number)
    return {"input": torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)}


def synchronized_layers() -> list[nn.Module]:
    made = layers()
    made[1] = SyncBatchNorm(4).double()
    return made


class Into(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.own = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x @ self.weight).tanh()


class OutOf(nn.Module):
    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6).double()
        self.weight = tied

    def forward(self, hidden: Tensor) -> Tensor:
        return self.own(hidden).tanh() @ self.weight.t()


class Through(OutOf):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.own(super().forward(hidden) @ self.weight).tanh()


def tied_layers() -> list[nn.Module]:
    first = Into()
    return [first, nn.Linear(6, 6).double(), Through(first.weight), OutOf(first.weight)]


def trained(
    kind: str,
    parts: Sequence[range],
    pp: int,
    zero: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    recompute: bool = False,
) -> dict[str, Tensor] | None:
    """Train on these ranks. Returns the parameters and buffers of this rank's stages."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), pipeline_parallel_size=pp)
    of_data = {"images": images, "tied": numbers}[kind]
    modules = cut({"images": synchronized_layers, "tied": tied_layers}[kind](), parts)
    samples = SAMPLES // mesh.size("dp")
    own = slice(mesh.coordinate("dp") * samples, (mesh.coordinate("dp") + 1) * samples)

    def batch(step: int, number: int) -> Batch:
        return Batch({name: each[own] for name, each in of_data(step, number).items()}, range(samples))

    plans = find_messages(modules, batch(0, 0).values)
    stages = Stages(pp, chunks, v_shaped=schedule == "zb-v", messages=tuple(plan.passes for plan in plans[:-1]))
    of_stages = give_records(modules, mesh, stages)
    mine = stages.of_rank(mesh.coordinate("pp"))
    check_alike([modules[number] for number in mine], mesh)
    made = [
        ModuleStage(
            modules[number],
            mesh,
            plans[number],
            number=number,
            count=stages.count,
            objective=Objective(loss if kind == "images" else square),
            kept=KeptBuffers(modules[number], mesh),
            uses=uses,
            recompute=recompute,
        )
        for number, uses in zip(mine, of_stages, strict=True)
    ]
    optimizer = make_optimizer(
        made,
        mesh,
        SGD,
        DataParallel(torch.float64, zero),
        blocks=[chunk.blocks() for chunk in made],
        set_values=value_setter(made, seed=1),
    )
    check_tied_buckets(optimizer.buckets, mesh)
    engine: PipelineEngine[Any] = PipelineEngine(
        made, stages, mesh.coordinate("pp"), make_links(mesh, stages), mesh.device
    )
    orders = orders_of(SCHEDULES[schedule], stages, MICRO_BATCHES)
    (actions,) = lower(stages, orders, Reductions(per_micro_batch=zero >= 2), ranks=[mesh.coordinate("pp")])
    for step in range(STEPS):
        optimizer.begin_step(MICRO_BATCHES)
        batches = [batch(step, number) for number in range(MICRO_BATCHES)]
        engine.run(actions, batches, {"loss": 1 / (SAMPLES * MICRO_BATCHES)}, optimizer)
        optimizer.step(Rates(RATE, RATE, weight_decay=0.0))
        for chunk in made:
            assert chunk.kept is not None
            chunk.kept.synchronize()
            chunk.kept.check()
    with unsharded_parameters(optimizer):
        return {name: each.clone() for number in mine for name, each in modules[number].state_dict().items()}


def plainly(kind: str) -> nn.Module:
    made = layers() if kind == "images" else tied_layers()
    network = nn.Sequential(*made)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            values = {"images": images, "tied": numbers}[kind](step, number)
            output = network(values["input"])
            ((loss if kind == "images" else square)(output, values) / (SAMPLES * MICRO_BATCHES)).backward()
        optimizer.step()
    return network


FOUR = [range(number, number + 1) for number in range(4)]
LAYOUTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "images on two ranks": (2, ("images", [range(7)], 1, 1)),
    "images, whole parameters gathered": (2, ("images", [range(7)], 1, 3)),
    "images in two stages": (2, ("images", [range(3), range(3, 7)], 2, 0)),
    "images in two stages on two ranks each": (4, ("images", [range(2), range(2, 7)], 2, 3)),
    "images, recomputed": (2, ("images", [range(7)], 1, 3, "1f1b", 1, True)),
    "images, gradients of weights later": (2, ("images", [range(3), range(3, 7)], 2, 0, "zb-h1")),
    "tied in one": (2, ("tied", [range(4)], 1, 3)),
    "tied on two ranks": (2, ("tied", [range(1), range(1, 4)], 2, 0)),
    "tied on two ranks of two": (4, ("tied", [range(1), range(1, 4)], 2, 2)),
    "tied over two of three": (3, ("tied", [range(1), range(1, 2), range(2, 4)], 3, 0)),
    "tied over stages in turn": (2, ("tied", FOUR, 2, 0, "interleaved-1f1b", 2)),
    "tied over stages in turn, recomputed": (4, ("tied", FOUR, 2, 3, "interleaved-1f1b", 2, True)),
    "tied in V": (2, ("tied", FOUR, 2, 0, "zb-v", 2)),
}


FEW = (
    *("images on two ranks", "images, whole parameters gathered", "images, recomputed"),
    *("images, gradients of weights later", "tied in one", "tied over two of three", "tied in V"),
)


@pytest.mark.wide_except("tied over two of three", "images on two ranks", "images, whole parameters gathered")
@pytest.mark.parametrize("layout", wide_except(LAYOUTS, FEW))
def test_modules_train_as_a_plain_loop(layout: str, rank_pools: RankPools) -> None:
    ranks, arguments = LAYOUTS[layout]
    expected = plainly(arguments[0]).state_dict()
    seen = set()
    for found in rank_pools(ranks).run(trained, *arguments):
        for name, tensor in found.items():
            seen.add(name)
            torch.testing.assert_close(tensor, expected[name], rtol=1e-11, atol=1e-12, msg=name)
    assert seen == set(expected)


def with_unused_branches(zero: int) -> dict[str, Tensor]:
    """Train a module whose branches each rank uses in other micro-batches."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    module = Sometimes()
    plans = find_messages([module], branching(0, mesh.rank, 0))
    give_records([module], mesh)
    stage = ModuleStage(module, mesh, plans[0], objective=Objective(square), one_block=True)
    optimizer = make_optimizer(
        [stage],
        mesh,
        SGD,
        DataParallel(torch.float64, zero, bucket_size=1, overlap_reduce=True, allow_unused=True),
        blocks=[stage.blocks()],
        set_values=value_setter([stage], seed=1),
    )
    engine: PipelineEngine[Any] = PipelineEngine([stage], device=mesh.device)
    (actions,) = lower(
        Stages(), orders_of(SCHEDULES["1f1b"], Stages(), MICRO_BATCHES), Reductions(per_micro_batch=zero >= 2)
    )
    for step in range(STEPS):
        optimizer.begin_step(MICRO_BATCHES)
        batches = [Batch(branching(step, mesh.rank, number), range(SAMPLES)) for number in range(MICRO_BATCHES)]
        engine.run(actions, batches, {"loss": 1.0 / SAMPLES}, optimizer)
        optimizer.step(Rates(RATE, RATE, weight_decay=0.0))
    with unsharded_parameters(optimizer):
        return {name: each.clone() for name, each in module.state_dict().items()}


def branching(step: int, rank: int, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "branches": (step + rank + number) % 3 == 0}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_may_use_different_parameters(zero: int, rank_pools: RankPools) -> None:
    expected = Sometimes()
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            for number in range(MICRO_BATCHES):
                values = branching(step, rank, number)
                (square(expected(**values), values) / SAMPLES).backward()
        optimizer.step()
    for found in rank_pools(2).run(with_unused_branches, zero):
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


class Counting(nn.Module):
    """Module with a buffer per rule."""

    averaged: Tensor
    copied: Tensor
    kept: Tensor
    count: Tensor
    small: Tensor
    mask: Tensor
    waves: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("averaged", "copied", "kept"):
            self.register_buffer(name, torch.zeros(2, 3))
        for name, dtype in (("count", torch.int64), ("small", torch.int32), ("mask", torch.bool)):
            self.register_buffer(name, torch.tensor(0, dtype=dtype))
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))


def after_synchronization() -> tuple[dict[str, Tensor], str]:
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    module = Counting()
    kept = KeptBuffers(module, mesh, {"aver*": "average", "kept": "keep"})
    module.averaged += mesh.rank  # in place
    module.copied = torch.full((2, 3), 5.0 + mesh.rank)  # assigned
    for buffer in (module.count, module.small, module.waves):
        buffer += 7 + mesh.rank
    module.mask.fill_(mesh.rank == 0)
    kept.synchronize()
    kept.check()
    module.kept += mesh.rank
    with pytest.raises(MegaliteError) as error:
        kept.check()
    return dict(module.state_dict()), str(error.value)


def test_buffers_follow_their_rules(rank_pools: RankPools) -> None:
    for found, message in rank_pools(3).run(after_synchronization):
        assert found["averaged"].unique().tolist() == [1.0]
        assert found["copied"].unique().tolist() == [5.0]
        assert [found[name].item() for name in ("count", "small", "mask")] == [7, 7, True]
        assert found["waves"].tolist() == [7.0, 7.0]
        assert message.startswith("kept has other values on rank 1 than on rank 0: give its buffer the rule")


def unlike(pp: int) -> str:
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), pipeline_parallel_size=pp)
    torch.manual_seed(5)
    modules = cut([nn.Linear(2, 2), nn.Linear(2, 2)], [range(2)] if pp == 1 else [range(1), range(1, 2)])
    give_records(modules, mesh, Stages(pp, 1))
    own = modules[mesh.coordinate("pp")]
    check_alike([own], mesh)
    if mesh.rank == dist.get_world_size() - 1:
        with torch.no_grad():
            next(reversed(list(own.parameters()))).add_(1)
    with pytest.raises(MegaliteError) as error:
        check_alike([own], mesh)
    return str(error.value)


@pytest.mark.parametrize(("ranks", "pp", "other"), [(2, 1, 0), (4, 2, 2)])
def test_modules_that_ranks_build_differently_are_named(ranks: int, pp: int, other: int, rank_pools: RankPools) -> None:
    for message in rank_pools(ranks).run(unlike, pp):
        assert message.startswith(f"1.bias has other values on rank {ranks - 1} than on rank {other}: build the same")
        assert "torch.manual_seed" in message


def normalized(dtype: torch.dtype) -> list[Tensor]:
    """Normalize the own part of a batch, in training and in evaluation; return all results and gradients."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    return _normalize(SyncBatchNorm(3), mesh, *_own(mesh.rank, mesh.world_size, dtype))


def _own(rank: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    both = 2 + torch.randn(2, 6, 3, 2, 5, generator=generator, dtype=torch.float64)
    parts = [each.split([4, 2] if size == 2 else [6])[rank].to(dtype) for each in both]  # not the same of each rank
    return parts[0], parts[1]


def _normalize(norm: nn.Module, mesh: ParallelMesh, values: Tensor, gradient: Tensor) -> list[Tensor]:
    norm.to(values.dtype)
    if isinstance(norm, SyncBatchNorm):
        norm.bind(mesh)
    values.requires_grad_()
    output = norm(values)
    output.backward(gradient)
    assert values.grad is not None
    gradients = [each.grad for each in norm.parameters() if each.grad is not None]
    statistics = [each.clone() for each in norm.buffers()]
    norm.eval()
    return [output.detach(), values.grad, norm(values.detach()).detach(), *gradients, *statistics]


def test_normalization_over_ranks_is_that_of_the_whole_batch(rank_pools: RankPools) -> None:
    expected = _normalize(nn.BatchNorm2d(3), ParallelMesh(), *_own(0, 1, torch.float64))
    parts = rank_pools(2).run(normalized, torch.float64)
    for index, whole in enumerate(expected):
        of_ranks = [part[index] for part in parts]
        # Of samples, of weights (whose gradients the buckets sum), of the running statistics.
        found = torch.cat(of_ranks) if index < 3 else sum(of_ranks) if index < 5 else of_ranks[0]
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
