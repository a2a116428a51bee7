"""State that is not a parameter, and optimizer state of another shape than its weight: saved once, loaded anywhere.

A toy module has integer counts, equal on all ranks, and a bias that is split over tensor-parallel ranks. A toy rule
keeps the averages of a matrix's squared gradients over rows and columns, as Adafactor does (arXiv:1804.04235).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite import checkpoint
from megalite.checkpoint import FORMATS, Contents, Plan, Saver, TrainingState
from megalite.checkpoint.comparison import compare
from megalite.checkpoint.file_writer import Cut, cut_by_weights, write_checkpoint
from megalite.checkpoint.inspection import describe
from megalite.checkpoint.integrity import covers
from megalite.checkpoint.plan import held_states
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensors import Kind
from megalite.config import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.conversion.native import open_megalite
from megalite.errors import CheckpointError
from megalite.optim import optimizer, update_rule
from megalite.optim.buckets import DataParallel
from megalite.optim.elementwise import elementwise_rule
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Shard
from megalite.optim.update_rule import UpdateRule
from megalite.parallel import collectives
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient, Parameter, accumulate_grad
from megalite.parallel.placement import replicated, split
from megalite.parallel.sharding import Box, Constant, LogicalTensor, Normal
from megalite.parallel.state import State
from tests.harness import checkpoints
from tests.harness.checkpoints import read
from tests.harness.rank_pool import RankPools
from tests.harness.tool import run_tool

ROWS, COLUMNS = 20, 12
WEIGHT = LogicalTensor("toy.weight", (ROWS, COLUMNS), Normal(1.0), True, matrices="rows columns -> 1 rows columns")
NORM = LogicalTensor("toy.norm", (COLUMNS,), Constant(1.0), weight_decay=False)
COUNTS = LogicalTensor("toy.router.counts", (8,), Constant(3), weight_decay=False)
BIAS = LogicalTensor("toy.router.bias", (6,), Constant(0.5), weight_decay=False)
LARGE = 2**60 + 1
"""Count that no float can represent."""
OWN = {"state/toy.router.counts", "state/toy.router.bias", "optimizer/row/toy.weight", "optimizer/column/toy.weight"}
CONFIG = OptimizerConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.5)


class Router(nn.Module):
    """Router; the last of four tensor-parallel ranks has only padding of the bias."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.counts = State(replicated(mesh, COUNTS, grad_is_partial=False), torch.int64, mesh.device)
        self.bias = State(split(mesh, BIAS, {0: ("tp",)}, columns=0, padded=8), torch.float32, mesh.device)

    def count(self) -> None:
        """Change the state as a step does, each element in a different way."""
        self.counts.values += LARGE * torch.arange(1, 9) % 2**62
        (piece,) = self.bias.sharding.pieces
        piece.view(self.bias.values).add_(torch.linspace(0, 1, 6)[piece.box.slices()])


class Toy(nn.Module):
    def __init__(self, mesh: ParallelMesh, *, routed: bool = True) -> None:
        super().__init__()
        self.weight = Parameter(split(mesh, WEIGHT, {0: ("tp",)}, padded=24), torch.float64, mesh.device)
        self.norm = Parameter(replicated(mesh, NORM, grad_is_partial=False), torch.float64, mesh.device)
        self.routers = nn.ModuleList([Router(mesh)] if routed else [])


# ------------------------------------------------------------------------------------------------------ the rule


def factor(dimension: int) -> update_rule.OwnState:
    """Return averages over all but one dimension of a matrix, split as that dimension is."""

    def make(config: OptimizerConfig, parameter: Parameter, mesh: ParallelMesh) -> State | None:
        (piece,) = parameter.sharding.pieces
        if piece.tensor.matrices is None:
            return None
        tensor = LogicalTensor(piece.tensor.name, (piece.tensor.shape[dimension],), Constant(0.0), weight_decay=False)
        axes = tuple(axis for cut, axis in piece.splits if cut == dimension)
        padded = parameter.shape[dimension] * mesh.size(*axes)
        return State(split(mesh, tensor, {0: axes}, columns=0, padded=padded), torch.float64, mesh.device)

    return make


class Factored(UpdateRule):
    """Toy rule.

    Each rank of a shard group has the squares of its slice. Summed over the group they are complete, and all ranks get
    the same sums.
    """

    def __init__(self, shards: Sequence[Shard], mesh: ParallelMesh) -> None:
        self.shards, self.group = shards, mesh.group("tp")

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for shard in self.shards:
            bucket = shard.bucket
            squares = torch.zeros(bucket.length, dtype=torch.float64)
            squares[shard.start : shard.stop] = (shard.gradients * factor).square()
            if bucket.zero_stage > 0:
                collectives.all_reduce_(squares, bucket.shard_group)
            scale = torch.ones_like(squares)
            for slot, own in zip(bucket.slots, shard.own_states, strict=True):
                if own:
                    row, column = own["row"].values, own["column"].values
                    mine = squares[slot.start : slot.stop].view(slot.parameter.shape)
                    row.lerp_(mine.mean(dim=1), 0.25)
                    column.lerp_(collectives.all_reduce_(mine.sum(dim=0), self.group) / ROWS, 0.25)
                    scale[slot.start : slot.stop] = torch.outer(row, column).sqrt().add_(0.1).flatten()
            for run in shard.segments:
                if run.group.matrices:
                    run.master.sub_(rates.of(run.group)[0] * factor * run.gradients / scale[run.start : run.stop])


def make_rules(shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> list[UpdateRule]:
    vectors = [run for shard in shards for run in shard.segments if not run.group.matrices]
    return [Factored(shards, mesh), elementwise_rule(vectors, config)]


@contextmanager
def factored() -> Iterator[None]:
    """Replace SGD's rule for matrices by `Factored` within the context."""
    rule = update_rule.RuleState(
        lambda _, group: () if group.matrices else ("momentum_buffer",), {"row": factor(0), "column": factor(1)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(update_rule.RULE_STATE, "sgd", rule)
        patch.setattr(optimizer, "make_rules", make_rules)
        yield


# ------------------------------------------------------------------------------------------------------ a run


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    dp: int = 1
    zero: int = 0


class Run:
    def __init__(self, layout: Layout, *, routed: bool = True) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.mesh = ParallelMesh(rank=rank, world_size=layout.tp * layout.dp, tensor_parallel_size=layout.tp)
        options = DataParallel(gradient_dtype=torch.float64, zero_stage=layout.zero)
        self.network = Toy(self.mesh, routed=routed)
        initialize(self.network, 1)
        self.optimizer = optimizer.make_optimizer([self.network], self.mesh, CONFIG, options, blocks=[[self.network]])

        def contents_at(mesh: ParallelMesh) -> Contents:
            network = Toy(mesh, routed=routed)
            return Contents.of([network], mesh, options, blocks=[[network]])

        self.plan = Plan(self.mesh, contents_at, CONFIG, zero_stage=layout.zero, instances=1, own=self.optimizer)

    def step(self, number: int) -> None:
        """Update with gradients of which each data-parallel rank has a half, or all."""
        generator = torch.Generator().manual_seed(number)
        whole = {tensor.name: torch.randn(tensor.shape, generator=generator).double() for tensor in (WEIGHT, NORM)}
        self.optimizer.begin_step(1)
        for parameter in (self.network.norm, self.network.weight):
            (piece,) = parameter.sharding.pieces
            gradient = torch.zeros(parameter.shape, dtype=torch.float64)
            piece.view(gradient).copy_(whole[piece.tensor.name][piece.box.slices()] / self.mesh.size("dp"))
            accumulate_grad(parameter, DenseGradient(gradient))
        self.optimizer.reduce(0, 1)
        self.optimizer.step(Rates(0.1, 0.1, 0.0))
        for router in self.network.routers:
            router.count()

    def save(
        self, folder: Path, *, state: bool = True, ckpt_format: str = "megalite", background: bool = False
    ) -> Path:
        training = TrainingState(self.optimizer.steps, 4 * self.optimizer.steps, self.optimizer.steps)
        file_format = FORMATS[ckpt_format]
        saver = Saver(folder, self.optimizer, self.plan, file_format=file_format, state=state, asynchronous=background)
        path = saver.save(training, {"model": {}})
        saver.close()
        assert isinstance(path, Path)
        return path

    def load(self, path: Path, *, state: bool = True, casts: bool = False) -> None:
        checkpoint.load(path, self.network, self.optimizer, self.mesh, plan=self.plan, state=state, casts=casts)

    def held(self) -> dict[str, tuple[Box, Tensor]]:
        """Return this rank's parts of the tensors that have their own `Sharding`."""
        return {
            prefix + piece.tensor.name: (piece.box, piece.view(state.values).clone())
            for prefix, state in held_states(self.network, self.optimizer)
            for piece in state.sharding.pieces
        }


def trained(layout: Layout, *, routed: bool = True) -> Run:
    run = Run(layout, routed=routed)
    for number in (1, 2):
        run.step(number)
    return run


def train_and_save(layout: Layout, folder: Path) -> Path:
    with factored():
        return trained(layout).save(folder)


def load_and_save(layout: Layout, path: Path, folder: Path) -> dict[str, tuple[Box, Tensor]]:
    """Load, save the loaded state, and save again after a step; return the loaded state."""
    with factored():
        run = Run(layout)
        run.load(path)
        loaded = run.held()
        run.save(folder, background=True)
        run.step(3)
        run.save(folder)
        return loaded


def on_ranks(pools: RankPools, layout: Layout, function: Callable[..., object], *arguments: object) -> list[object]:
    ranks = layout.tp * layout.dp
    return pools(ranks).run(function, layout, *arguments) if ranks > 1 else [function(layout, *arguments)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_and_save(Layout(), tmp_path_factory.mktemp("alone"))


# ------------------------------------------------------------------------------------------------------ any layout

LAYOUTS = [Layout(), Layout(tp=4), Layout(dp=2, zero=3), Layout(tp=2, dp=2, zero=1)]


@pytest.fixture(scope="module")
def saved(rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rank_pools(4).run(train_and_save, Layout(tp=2, dp=2, zero=1), folder)
    return folder / "iter_0000002"


def test_each_tensor_is_saved_once_in_its_own_shape(saved: Path) -> None:
    tensors = checkpoint.read_manifest(saved).tensors
    assert {name for name in tensors if not name.startswith("model/")} == OWN | {"optimizer/momentum_buffer/toy.norm"}
    counts, bias = tensors["state/toy.router.counts"], tensors["state/toy.router.bias"]
    assert (counts.dtype, counts.shape) == (torch.int64, (8,))
    assert [box.file for box in counts.boxes] == ["rank_00000.safetensors"]
    assert [(box.file, box.box.offset) for box in bias.boxes] == [
        ("rank_00000.safetensors", (0,)),
        ("rank_00001.safetensors", (4,)),
    ]
    row, column = tensors["optimizer/row/toy.weight"], tensors["optimizer/column/toy.weight"]
    assert (row.shape, len(row.boxes)) == ((ROWS,), 2)
    assert (column.shape, len(column.boxes)) == ((COLUMNS,), 1)


def test_all_layouts_save_the_same(alone: Path, saved: Path) -> None:
    ours, theirs = read(alone), read(saved)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        if name.startswith("state/"):
            assert torch.equal(values, theirs[name])
        else:
            torch.testing.assert_close(theirs[name], values, rtol=1e-12, atol=0)
    steps = LARGE * torch.arange(1, 9) % 2**62
    assert torch.equal(ours["state/toy.router.counts"], 3 + 2 * steps)
    assert torch.equal(ours["state/toy.router.bias"], 0.5 + 2 * torch.linspace(0, 1, 6))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_was_saved_is_loaded_on_every_rank_to_the_bit(
    rank_pools: RankPools, saved: Path, tmp_path: Path, layout: Layout
) -> None:
    whole = read(saved)
    for rank in on_ranks(rank_pools, layout, load_and_save, saved, tmp_path):
        assert isinstance(rank, dict)
        assert rank.keys() == OWN
        for name, (box, values) in rank.items():
            assert torch.equal(values, whole[name][box.slices()]), name
    again = CheckpointReader(tmp_path / "iter_0000002")
    assert compare(CheckpointReader(saved), again, whole, 1, lambda size: None).same


def test_training_goes_on_with_what_was_loaded(rank_pools: RankPools, saved: Path, tmp_path: Path) -> None:
    with factored():
        unbroken = trained(Layout())
        unbroken.step(3)
        expected = read(unbroken.save(tmp_path / "unbroken"))
    rank_pools(2).run(load_and_save, Layout(dp=2, zero=3), saved, tmp_path)
    for name, values in read(tmp_path / "iter_0000003").items():
        torch.testing.assert_close(values, expected[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"world_size": 8, "tensor_parallel_size": 2, "expert_parallel_size": 4, "expert_tensor_parallel_size": 1},
        {"world_size": 8, "context_parallel_size": 2, "pipeline_parallel_size": 2, "expert_parallel_size": 2},
        {"world_size": 16, "tensor_parallel_size": 2, "context_parallel_size": 2, "expert_parallel_size": 2},
    ],
    ids=str,
)
def test_of_all_ranks_one_saves_each_element_and_all_know_what_they_hold(sizes: dict[str, int]) -> None:
    world = ParallelMesh(**sizes)
    expert_axes = tuple(axis for axis in ("ep", "etp") if world.size(axis) > 1)

    def contents_at(mesh: ParallelMesh) -> Contents:
        names = {name: f"stage.{mesh.coordinate('pp')}.{name}" for name in ("whole", "by tp", "by experts")}
        whole, by_tp, by_experts = (LogicalTensor(name, (8,), Constant(0.0), False) for name in names.values())
        shardings = (
            replicated(mesh, whole, grad_is_partial=False),
            split(mesh, by_tp, {0: ("tp",)}, columns=0),
            split(mesh, by_experts, {0: expert_axes}, columns=0),
        )
        return Contents([], [], [("state/", State(sharding, torch.int64, mesh.device)) for sharding in shardings])

    plan = Plan(world, contents_at, CONFIG, zero_stage=1, instances=1)
    saved: dict[str, list[Box]] = {}
    for rank in range(world.world_size):
        assert len(plan.held(rank)) == 3
        for part in plan.saved(rank):
            saved.setdefault(part.name, []).append(part.box)
    assert len(saved) == 3 * world.size("pp")
    assert all(covers(boxes, Box((0,), (8,))) for boxes in saved.values())
    assert all(len(boxes) == 1 for name, boxes in saved.items() if name.endswith("whole"))


# ------------------------------------------------------------------------------------------------------ tools


def test_the_tools_show_it(alone: Path, saved: Path) -> None:
    shown = run_tool("inspect_checkpoint", "--load", alone)
    assert shown.code == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "state/toy.router.counts [8] int64 1 64 rank_00000" in lines
    assert f"optimizer/row/toy.weight [{ROWS}] float64 1 160 rank_00000" in lines
    assert {"state 2 14 88", "optimizer/column 1 12 96"} <= set(lines)
    figures = run_tool("inspect_checkpoint", "--load", alone, "--statistics", "--tensors", "state/*")
    assert figures.code == 0, figures.stderr
    assert run_tool("inspect_checkpoint", "--load", alone, "--verify").code == 0
    differences = run_tool("inspect_checkpoint", "--diff", alone, alone, "--tensors", "state/*")
    assert differences.code == 0
    assert "2 of 2 tensors that both have in the same shape are equal" in differences.stdout


def test_a_difference_of_one_in_a_large_count_is_seen(alone: Path, tmp_path: Path) -> None:
    with factored():
        run = Run(Layout())
        run.load(alone)
        run.network.routers[0].counts.values[7] += 1
        other = run.save(tmp_path)
    found = compare(CheckpointReader(alone), CheckpointReader(other), read(alone), 1, lambda size: None)
    assert {name: values.different for name, values in found.values.items()} == {"state/toy.router.counts": 1}


def test_files_for_a_layout_have_what_its_ranks_hold(saved: Path, tmp_path: Path) -> None:
    reader = CheckpointReader(saved)
    weights = [
        [("model/toy.weight", Box((start, 0), (10, COLUMNS))), ("state/toy.router.bias", Box((at,), (3,)))]
        for start, at in ((0, 0), (10, 3))
    ]
    weights[1] += [("model/toy.norm", Box((0,), (COLUMNS,))), ("state/toy.router.counts", Box((0,), (8,)))]
    cut = cut_by_weights(reader.tensors, weights)
    assert [sorted(name for name, _ in file if name in OWN) for file in cut] == [
        ["optimizer/column/toy.weight", "optimizer/row/toy.weight", "state/toy.router.bias"],
        ["state/toy.router.bias", "state/toy.router.counts"],
    ]
    written = rewrite(reader, tmp_path, cut)
    assert compare(reader, written, reader.tensors, 1, lambda size: None).same


def rewrite(reader: CheckpointReader, directory: Path, cut: Cut) -> CheckpointReader:
    saved = reader.manifest
    return CheckpointReader(
        write_checkpoint(reader, saved.training, saved.config, directory, cut, 1, lambda size: None)
    )


@pytest.mark.parametrize("alike", [True, False])
def test_state_and_a_weight_of_one_name_are_two(tmp_path: Path, alike: bool) -> None:
    tensors = {
        "model/a": torch.randn(4, 3),
        "optimizer/exp_avg/a": torch.randn(4, 3),
        "optimizer/row/a": torch.randn(4),
        "state/a": torch.arange(12).view(4, 3) if alike else torch.arange(2),
    }
    reader = CheckpointReader(checkpoints.write(tmp_path / "once", tensors))
    whole = Box.whole(tuple(tensors["state/a"].shape))
    weights = [
        [("model/a", Box((0, 0), (1, 3)))],
        [("state/a", whole), ("model/a", Box((1, 0), (3, 3)))],
    ]
    cut = cut_by_weights(reader.tensors, weights)
    assert [(name, box) for file in cut for name, box in file if name == "state/a"] == [("state/a", whole)]
    assert [sorted(name for name, _ in file) for file in cut] == [
        ["model/a", "optimizer/exp_avg/a", "optimizer/row/a"],
        ["model/a", "optimizer/exp_avg/a", "state/a"],
    ]
    written = rewrite(reader, tmp_path / "again", cut)
    found = compare(reader, written, tensors, 1, lambda size: None)
    assert found.same
    assert found.compared == 4
    totals = describe(written, tensors)["totals"]
    assert {kind: values["tensors"] for kind, values in totals.items()} == dict.fromkeys(
        ("model", "optimizer/exp_avg", "optimizer/row", "state"), 1
    )


@pytest.mark.parametrize(
    "name", ["state/toy.router.counts", "state/toy.router.bias", "optimizer/momentum_buffer/toy.norm"]
)
def test_whole_numbers_are_never_cast(alone: Path, tmp_path: Path, name: str) -> None:
    saved = read(alone)
    saved[name] = saved[name].to(torch.float64 if saved[name].dtype == torch.int64 else torch.int64)
    path = checkpoints.write(tmp_path, saved)
    with factored():
        for casts in (False, True):
            with pytest.raises(CheckpointError, match=rf"{name} is \w+ in it and \w+ in this run: whole numbers are"):
                Run(Layout()).load(path, casts=casts)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_tools_read_it(alone: Path, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as torch_checkpoint

    with factored():
        path = trained(Layout()).save(tmp_path, ckpt_format="torch_dist")
    values = {"state/toy.router.counts": torch.zeros(8, dtype=torch.int64)}
    torch_checkpoint.load(values, checkpoint_id=path, no_dist=True)
    assert torch.equal(values["state/toy.router.counts"], read(alone)["state/toy.router.counts"])


def test_it_is_not_dropped_on_the_way_to_another_format(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8, max_position_embeddings=8)
    monkeypatch.setattr("megalite.conversion.native.model_config", lambda path, config: model)
    with pytest.raises(CheckpointError, match=r"has state/toy.router.bias, .*: no other format can store"):
        open_megalite(alone)


# ------------------------------------------------------------------------------------------------------ what is missing


def loads(run: Run, path: Path) -> dict[str, Callable[[], object]]:
    """Return the ways to load weights from a checkpoint."""
    return {
        "to continue": lambda: run.load(path),
        "with a new optimizer": lambda: run.load(path, state=False),
        "for inference": lambda: checkpoint.load(path, run.network, None, run.mesh),
    }


WAYS = ["to continue", "with a new optimizer", "for inference"]


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_without_state_that_the_network_has_is_refused(tmp_path: Path, way: str) -> None:
    with factored():
        path = trained(Layout(), routed=False).save(tmp_path)
        load = loads(trained(Layout()), path)[way]
        with pytest.raises(CheckpointError, match=r"state/toy.router.counts \[8\] is not in it: it is from another"):
            load()


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_with_state_that_the_network_lacks_is_refused(alone: Path, way: str) -> None:
    with factored():
        load = loads(Run(Layout(), routed=False), alone)[way]
        with pytest.raises(CheckpointError, match=r"state/toy.router.bias \[6\] has no place in this run's model"):
            load()


def test_inference_has_the_state_that_was_saved(alone: Path) -> None:
    run = Run(Layout())
    checkpoint.load(alone, run.network, None, run.mesh)
    whole = read(alone)
    (router,) = run.network.routers
    assert torch.equal(router.counts.values, whole["state/toy.router.counts"])
    assert torch.equal(router.bias.values[:6], whole["state/toy.router.bias"])


def test_a_checkpoint_of_another_optimizer_is_refused(alone: Path) -> None:
    with pytest.raises(CheckpointError, match="is column, momentum_buffer, row for the weights, but this run needs"):
        Run(Layout()).load(alone)


def test_a_new_optimizer_leaves_the_modules_their_state(alone: Path, tmp_path: Path) -> None:
    """The modules' state is part of the model: it is also saved with the weights alone."""
    whole = read(alone)
    with factored():
        weights = trained(Layout()).save(tmp_path, state=False)
        assert {name for name in read(weights) if not name.startswith("model/")} == {n for n in OWN if "state/" in n}
        for path in (alone, weights):
            run = Run(Layout())
            run.step(1)
            run.load(path, state=False)
            for name, (_, values) in run.held().items():
                assert torch.equal(values, whole[name] if name.startswith("state/") else torch.zeros_like(values))


class Given:
    """Source of weights."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.values = tensors
        self.tensors = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self.values[name][box.slices()])


def test_with_the_weights_of_others_the_optimizer_begins_anew_and_no_state_is_made_up() -> None:
    weights = {tensor.name: torch.ones(tensor.shape) for tensor in (WEIGHT, NORM)}
    given = {"state/toy.router.counts": torch.arange(8), "state/toy.router.bias": torch.linspace(1, 2, 6)}
    with factored():
        run = trained(Layout())

        def load(tensors: dict[str, Tensor]) -> None:
            checkpoint.load_weights(Given(tensors), "a source", run.network, run.optimizer, run.mesh)

        with pytest.raises(CheckpointError, match=r"not fit this run:\n  state/toy.router.counts \[8\] is not in it"):
            load(weights | {"toy.router.counts": torch.arange(8), "toy.router.bias": torch.ones(6)})
        with pytest.raises(CheckpointError, match=r"state/toy.router.bias is int64 in it and float32 in this run"):
            load(weights | given | {"state/toy.router.bias": torch.arange(6)})
        load(weights | given)
        for name, (_, values) in run.held().items():
            assert torch.equal(values, given.get(name, torch.zeros_like(values))), name


def test_state_begins_as_a_constant() -> None:
    with pytest.raises(TypeError, match=r"the state toy\.weight begins as a constant"):
        State(replicated(ParallelMesh(), WEIGHT, grad_is_partial=False), torch.float32, torch.device("cpu"))
