"""State with values per replica, saved under one layout and loaded under another: every rank has what the rule says.

A small network of two stages has a weight that tensor-parallel ranks divide, two norms, of one of which each of these
ranks has a part of the gradient (as under sequence parallelism), and a weight that both stages use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite import checkpoint
from megalite.checkpoint import Contents, Plan, Saver, TrainingState
from megalite.checkpoint.manifest import split_name
from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import Bucket, DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.optim.replica import BucketState, Replica
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated, split
from megalite.parallel.sharding import Constant, LogicalTensor, Normal, Use
from megalite.parallel.state import State
from tests.harness.checkpoints import read
from tests.harness.rank_pool import RankPools

ADAM = OptimizerConfig(lr=0.1)
STATES = (
    BucketState("residual", "sum", whole=True, per_use=True),
    BucketState("velocity", "average", whole=False),
    BucketState("outer_momentum", "drop", whole=True, per_use=True),
    BucketState("residual_of_sum", None, whole=False),
)
SHAPES = {"0.weight": (12, 5), "1.weight": (12, 5), "0.part": (7,), "1.part": (7,), "0.norm": (3,), "1.norm": (3,)} | {
    "tied": (6, 5)
}


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    instances: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def count(self, state: BucketState, tensor: str) -> int:
        """Return the number of replicas of a state."""
        if tensor == "tied":
            uses = 2 if state.whole or self.pp == 2 else 1
        else:
            uses = self.tp if tensor.endswith("part") else 1
        return uses * (self.dp if state.whole else self.instances)


class Stage(nn.Module):
    def __init__(self, mesh: ParallelMesh, number: int, tied: Parameter) -> None:
        super().__init__()

        def tensor(name: str) -> LogicalTensor:
            return LogicalTensor(f"{number}.{name}", SHAPES[f"{number}.{name}"], Normal(1.0), weight_decay=False)

        self.weight = Parameter(split(mesh, tensor("weight"), {0: ("tp",)}), torch.float64, mesh.device)
        partial = mesh.size("tp") > 1
        self.part = Parameter(replicated(mesh, tensor("part"), grad_is_partial=partial), torch.float64, mesh.device)
        self.norm = Parameter(replicated(mesh, tensor("norm"), grad_is_partial=False), torch.float64, mesh.device)
        self.tied = tied
        counts = LogicalTensor(f"{number}.counts", (4,), Constant(0), weight_decay=False)
        self.counts = State(replicated(mesh, counts, grad_is_partial=False), torch.int64, mesh.device)


def make_stages(mesh: ParallelMesh) -> list[Stage]:
    stages = mesh.size("pp")
    tensor = LogicalTensor("tied", SHAPES["tied"], Normal(1.0), weight_decay=False)
    uses = (Use(),) if stages == 2 else (Use(chunk=0), Use(chunk=1))
    record = replace(
        split(mesh, tensor, {0: ("tp",)}), replica_ranks=mesh.ranks("pp"), grad_is_partial=stages == 2, uses=uses
    )
    tied = Parameter(record, torch.float64, mesh.device)
    return [Stage(mesh, number, tied) for number in ((0, 1) if stages == 1 else (mesh.coordinate("pp"),))]


def contents(mesh: ParallelMesh, options: DataParallel) -> Contents:
    stages = make_stages(mesh)
    return Contents.of(stages, mesh, options, blocks=[[stage] for stage in stages])


def values_of(state: BucketState, tensor: str, replica: int) -> Tensor:
    """Return whole numbers, others for each replica."""
    first = crc32(f"{state.name} {tensor} {replica}".encode()) % 1000
    return first + torch.arange(torch.Size(SHAPES[tensor]).numel(), dtype=torch.float64).view(SHAPES[tensor])


Values = Callable[[BucketState, str, int, int], Tensor]
"""Function from a state, a tensor, a replica and the number of replicas to values."""


class Run:
    def __init__(self, layout: Layout, mesh: ParallelMesh | None = None) -> None:
        rank = dist.get_rank() if layout.ranks > 1 else 0
        self.layout = layout
        self.mesh = mesh or ParallelMesh(
            rank=rank, world_size=layout.ranks, tensor_parallel_size=layout.tp, pipeline_parallel_size=layout.pp
        )
        options = DataParallel(torch.float64, zero_stage=layout.zero, instances=layout.instances)
        stages = make_stages(self.mesh)
        self.stages = nn.ModuleList(stages)
        initialize(self.stages, 1)
        self.optimizer = make_optimizer(stages, self.mesh, ADAM, options, blocks=[[stage] for stage in stages])
        self.plan = Plan(
            self.mesh,
            lambda mesh: contents(mesh, options),
            ADAM,
            zero_stage=layout.zero,
            instances=layout.instances,
            bucket_states=STATES,
            rank_states=lambda layouts: {"basis": ((len(layouts),), torch.float64)},
            own=self.optimizer,
        )
        for state in STATES:
            self.optimizer.bucket_states[state] = [
                [torch.full_like(flat, -1.0) for flat in self.flats(bucket, state, lambda *_: torch.zeros(()))]
                for bucket in self.optimizer.buckets
            ]
        self.optimizer.rank_states["basis"] = torch.full((len(self.optimizer.buckets),), 1.0 + rank).double()

    def flats(self, bucket: Bucket, state: BucketState, values: Values) -> Iterator[Tensor]:
        """Yield the flat tensors of a bucket's state, filled with values; padding is zero."""
        at = self.mesh.coordinates_of(self.mesh.rank)
        record = bucket.slots[0].parameter.sharding
        peers = self.layout.dp if state.whole else self.layout.instances
        position = at["dp"] if state.whole else at["dp"] // (self.layout.dp // self.layout.instances)
        copies = record.replica_ranks.index(self.mesh.rank) if record.grad_is_partial else 0
        own = state.whole and state.relayout is not None
        for use in range(len(bucket.accumulators) if own else 1):
            flat = torch.zeros(bucket.length, dtype=torch.float64)
            for slot in bucket.slots:
                (piece,) = slot.parameter.sharding.pieces
                name = piece.tensor.name
                count = self.layout.count(state, name) if state.relayout else 1
                replica = (use + copies) * peers + position if state.relayout else 0
                whole = values(state, name, replica, count).expand(SHAPES[name])
                piece.view(flat[slot.start : slot.stop].view(slot.parameter.shape)).copy_(whole[piece.box.slices()])
            yield flat if state.whole else flat[slice(*bucket.owned_range)]

    def fill(self) -> None:
        for state, buckets in self.optimizer.bucket_states.items():
            for bucket, flats in zip(self.optimizer.buckets, buckets, strict=True):
                own = self.flats(bucket, state, lambda state, name, replica, _: values_of(state, name, replica))
                for flat, values in zip(flats, own, strict=True):
                    flat.copy_(values)

    def check(self, values: Values) -> None:
        for state, buckets in self.optimizer.bucket_states.items():
            for bucket, flats in zip(self.optimizer.buckets, buckets, strict=True):
                for flat, right in zip(flats, self.flats(bucket, state, values), strict=True):
                    assert torch.equal(flat, right), (state, bucket.slots[0].parameter.sharding.name)

    def save(self, folder: Path) -> None:
        Saver(folder, self.optimizer, self.plan).save(TrainingState(1, 1, 1), {"model": {}})

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.stages, self.optimizer, self.mesh, plan=self.plan)


def fill_and_save(layout: Layout, folder: Path) -> None:
    run = Run(layout)
    run.fill()
    run.save(folder)


def load_and_check(saved: Layout, layout: Layout, path: Path, folder: Path) -> list[float]:
    run = Run(layout)
    run.load(path)

    def relaid(state: BucketState, name: str, replica: int, wanted: int) -> Tensor:
        if state.relayout is None:
            return values_of(state, name, 0)
        old = [values_of(state, name, each) for each in range(saved.count(state, name))]
        if len(old) == wanted:
            return old[replica]
        if state.relayout == "average":
            return torch.stack(old).sum(0) / len(old)
        zero = torch.zeros(SHAPES[name], dtype=torch.float64)
        return zero if state.relayout == "drop" else sum(old[replica::wanted], zero)

    run.check(relaid)
    run.save(folder)
    return run.optimizer.rank_states["basis"].tolist()


def on_ranks(pools: RankPools, layout: Layout, function: Callable[..., object], *arguments: object) -> list[object]:
    return pools(layout.ranks).run(function, *arguments) if layout.ranks > 1 else [function(*arguments)]


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (Layout(dp=2, zero=1), Layout(dp=3, zero=1)),
        (Layout(dp=3), Layout(dp=2, zero=1)),
        (Layout(dp=2, zero=1), Layout(dp=2)),
        (Layout(tp=2), Layout()),
        (Layout(), Layout(tp=2, dp=2, instances=2)),
        (Layout(pp=2, dp=2, zero=2), Layout()),
        (Layout(), Layout(pp=2)),
    ],
    ids=str,
)
def test_every_rank_has_what_the_rule_says(
    rank_pools: RankPools, tmp_path: Path, saving: Layout, loading: Layout
) -> None:
    on_ranks(rank_pools, saving, fill_and_save, saving, tmp_path / "saved")
    saved = read(tmp_path / "saved" / "iter_0000001")
    for name, values in saved.items():
        for state in STATES:
            if name == f"optimizer/{state.name}/{split_name(name)[1]}":
                assert torch.equal(values, values_of(state, split_name(name)[1], 0))
            elif name.startswith(f"replica/optimizer/{state.name}/"):
                assert len(values) == saving.count(state, split_name(name)[1])
                assert all(torch.equal(e, values_of(state, split_name(name)[1], k)) for k, e in enumerate(values))
    found = on_ranks(
        rank_pools, loading, load_and_check, saving, loading, tmp_path / "saved" / "iter_0000001", tmp_path / "again"
    )
    again = read(tmp_path / "again" / "iter_0000001")
    for name, values in saved.items():
        if name.startswith("replica/optimizer/residual/"):
            assert torch.equal(values.sum(0), again[name].sum(0))
        elif not name.startswith(("replica/", "rank/")):
            assert torch.equal(values, again[name])
    if (saving.tp, saving.pp) == (loading.tp, loading.pp):
        assert found == [[1.0] * len(values) for values in found if isinstance(values, list)]


@pytest.mark.wide
@pytest.mark.bits
@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), Layout(tp=2, dp=2, zero=1), Layout(pp=2, dp=2)], ids=str)
def test_the_same_layout_has_the_same_bits(rank_pools: RankPools, tmp_path: Path, layout: Layout) -> None:
    on_ranks(rank_pools, layout, fill_and_save, layout, tmp_path / "saved")
    path = tmp_path / "saved" / "iter_0000001"
    on_ranks(rank_pools, layout, load_and_check, layout, layout, path, tmp_path / "again")
    saved, again = read(path), read(tmp_path / "again" / "iter_0000001")
    assert saved.keys() == again.keys()
    assert all(torch.equal(values, again[name]) for name, values in saved.items())


# ------------------------------------------------------------------------------------- replicas with their own weights


class Local(Run):
    """Run of which each rank is a replica."""

    def __init__(self, ranks: int) -> None:
        self.world = ParallelMesh(rank=dist.get_rank() if ranks > 1 else 0, world_size=ranks)
        super().__init__(Layout(), self.world.replica(ranks))
        self.optimizer.replica = Replica(self.world.rank, ranks, "average")
        self.optimizer.bucket_states = {state: self.optimizer.bucket_states[state] for state in STATES[::3]}
        self.plan = Plan(
            self.world,
            lambda mesh: contents(mesh, DataParallel(torch.float64)),
            ADAM,
            zero_stage=0,
            instances=1,
            bucket_states=STATES[::3],
            rank_states=lambda layouts: {"basis": ((len(layouts),), torch.float64)},
            replicas=ranks,
            own=self.optimizer,
        )

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.stages, self.optimizer, self.world, plan=self.plan)


def change_and_save(ranks: int, folder: Path) -> None:
    run = Local(ranks)
    run.fill()
    for part in run.optimizer.slices():
        part.values.add_(run.world.rank)
        for values in part.tensors.values():
            values.fill_(run.world.rank)
    for stage in run.stages:
        stage.counts.values.fill_(2**60)
    run.save(folder)


def load_and_save(ranks: int, path: Path, folder: Path) -> None:
    run = Local(ranks)
    run.load(path)
    run.save(folder)


def test_replicas_have_weights_of_their_own(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(change_and_save, 2, tmp_path / "two")
    two = read(tmp_path / "two" / "iter_0000001")
    assert {len(values) for name, values in two.items() if name.startswith("replica/model/")} == {2}
    assert {name.split("/")[0] for name in two if "residual_of_sum" in name} == {"optimizer"}
    assert not any(name.startswith(("model/", "state/", "optimizer/exp_avg")) for name in two)
    for ranks in (2, 3):
        folder = tmp_path / str(ranks)
        rank_pools(ranks).run(load_and_save, ranks, tmp_path / "two" / "iter_0000001", folder)
        for name, values in read(folder / "iter_0000001").items():
            if name.startswith(("replica/model/", "replica/state/", "replica/optimizer/exp_avg")):
                mean = two[name].sum(0) // 2 if values.dtype == torch.int64 else two[name].sum(0) / 2
                right = two[name] if ranks == 2 else mean.expand(values.shape)
                assert torch.equal(values, right), name
            elif name.startswith("replica/"):
                assert torch.equal(values.sum(0), two[name].sum(0))
            elif name.startswith("optimizer/"):
                assert torch.equal(values, two[name])
            elif name in two:
                assert torch.equal(values, two[name]), name
    run = Run(Layout())
    run.load(tmp_path / "two" / "iter_0000001")
    run.save(tmp_path / "plain")
    plain = read(tmp_path / "plain" / "iter_0000001")
    assert torch.equal(plain["model/tied"], two["replica/model/tied"].sum(0) / 2)
    rank_pools(2).run(load_and_save, 2, tmp_path / "plain" / "iter_0000001", tmp_path / "back")
    back = read(tmp_path / "back" / "iter_0000001")
    assert all(torch.equal(values, back["replica/model/tied"][0]) for values in back["replica/model/tied"])
    assert torch.equal(back["replica/model/tied"][1], plain["model/tied"])
