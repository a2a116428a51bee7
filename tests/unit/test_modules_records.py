"""Records, buffers and costs of plain modules, and the errors about them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megalite.config.optimizer import OptimizerConfig
from megalite.errors import MegaliteError
from megalite.modules.alike import check_alike
from megalite.modules.balance import balance, counted_costs, measured_costs
from megalite.modules.batch_norm import SyncBatchNorm
from megalite.modules.buffers import KeptBuffers
from megalite.modules.records import decays, give_records, matrix_names, value_setter
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initial_values
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import Box, LogicalTensor, Normal, Use
from megalite.parallel.state import State, states_of
from megalite.pipeline.stages import Stages
from tests.unit.test_modules_training import Run, assert_same_state, cut, numbers, plainly, square

ADAMW = OptimizerConfig(lr=0.1)


def tensors(module: nn.Module) -> dict[str, LogicalTensor]:
    return {piece.tensor.name: piece.tensor for _, piece in named_pieces(module)}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.conv = nn.Conv2d(4, 6, 3)
        self.norm = nn.LayerNorm((2, 3))
        self.attention = nn.MultiheadAttention(4, 2)
        self.lstm = nn.LSTM(4, 3)
        self.position = nn.Parameter(torch.randn(1, 7, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(4, 5)
        self.same = self.head


def test_records_follow_from_the_kinds_of_modules() -> None:
    module = Mixed()
    before = {name: values.clone() for name, values in module.state_dict().items()}
    give_records([module], ParallelMesh())
    found = tensors(module)
    assert set(found) == set(before) - {"same.weight", "same.bias"}
    shapes = {name: tensor.shape for name, tensor in found.items() if tensor.shape != tuple(before[name].shape)}
    assert shapes == {"scale": (1,)}
    vectors = {name for name, tensor in found.items() if not tensor.weight_decay}
    assert vectors == {name for name in found if before[name].dim() < 2}
    assert [name for name, tensor in found.items() if tensor.is_embedding_or_output] == ["table.weight"]
    matrices = {name: tensor.matrices for name, tensor in found.items() if tensor.matrices is not None}
    assert matrices.pop("conv.weight") == "rows d1 d2 d3 -> 1 rows (d1 d2 d3)"
    assert set(matrices) == {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "head.weight",
    }
    assert matrix_names([module]) == [name for name in found if name in (*matrices, "conv.weight")]
    assert module.same.weight is module.head.weight
    for name, values in module.state_dict().items():
        assert torch.equal(values, before[name])
    assert module.lstm(torch.randn(2, 1, 4))[0].shape == (2, 1, 3)  # it keeps a list of its own


def test_weight_decay_can_be_chosen() -> None:
    module = Mixed()
    give_records([module], ParallelMesh(), weight_decay=lambda name, values: name == "scale" or decays(name, values))
    assert tensors(module)["scale"].weight_decay


def drawn(name: str, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator)


def test_drawn_values_depend_on_seed_and_name_and_fill_a_module_on_the_meta_device() -> None:
    def made(seed: int) -> nn.Module:
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))
            module.register_parameter("scale", nn.Parameter(torch.tensor(0.0)))
            module.register_parameter("frozen", nn.Parameter(torch.empty(2), requires_grad=False))
        give_records([module], ParallelMesh(), initial=lambda *those: abs(drawn(*those)), seed=seed)
        make_optimizer(
            [module], ParallelMesh(), ADAMW, DataParallel(torch.float32), set_values=value_setter([module], seed)
        )
        return module

    first, again, other = made(1).state_dict(), made(1).state_dict(), made(2).state_dict()
    for name, values in first.items():
        assert values.device.type == "cpu"
        assert torch.equal(values, again[name]), name
        if values.is_floating_point():
            assert not torch.equal(values, other[name]), name
    assert not torch.equal(first["scale"], first["frozen"][0])
    module = nn.Linear(3, 4)
    give_records([module], ParallelMesh(), initial=drawn)
    tensor = tensors(module)["weight"]
    part = initial_values(tensor, Box((1, 1), (2, 2)), seed=3)
    assert torch.equal(part, initial_values(tensor, Box.whole((4, 3)), seed=3)[1:3, 1:3])


def test_frozen_parameters_with_values_keep_them() -> None:
    """They may be a pretrained part."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    before = {name: values.clone() for name, values in module.state_dict().items()}
    give_records([module], ParallelMesh(), initial=drawn)
    make_optimizer([module], ParallelMesh(), ADAMW, DataParallel(torch.float32), set_values=value_setter([module], 1))
    kept = {name: torch.equal(values, before[name]) for name, values in module.state_dict().items()}
    assert kept == {"0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False}


def test_drawn_values_of_another_size_are_refused() -> None:
    module = nn.Linear(3, 4)
    give_records([module], ParallelMesh(), initial=lambda name, generator, shape: torch.zeros(2))
    with pytest.raises(MegaliteError, match=r"initial values for bias are \(2,\), and it has the shape \(4,\)"):
        make_optimizer(
            [module], ParallelMesh(), ADAMW, DataParallel(torch.float32), set_values=value_setter([module], 1)
        )


def test_parallel_layers_keep_their_records_and_are_drawn() -> None:
    mesh = ParallelMesh()
    tensor = LogicalTensor("up", (4, 3), Normal(1.0), True)
    layer = ColumnParallelLinear(ParallelContext(mesh), "ffn", [replicated(mesh, tensor, grad_is_partial=False)])
    module = nn.ModuleList([layer, nn.Linear(4, 2)])
    plain = module[1].state_dict()["weight"].clone()
    give_records([module], mesh)
    assert set(tensors(module)) == {"up", "1.weight", "1.bias"}
    make_optimizer([module], mesh, ADAMW, DataParallel(torch.float32), set_values=value_setter([module], 7))
    assert torch.equal(module.state_dict()["0.weights.0"], initial_values(tensor, Box.whole((4, 3)), 7))
    assert torch.equal(module.state_dict()["1.weight"], plain)
    check_alike([module], mesh)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)


def numbered(*layers: nn.Module) -> list[nn.Module]:
    return cut(layers, [range(number, number + 1) for number in range(len(layers))])


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize(
    ("modules", "mesh", "message"),
    [
        (
            [nn.Linear(2, 2), nn.Linear(2, 2)],
            {},
            "two parameters are called weight, in stage 0 and in stage 1: name the",
        ),
        (numbered(on_meta()), {}, r"0\.weight is on the meta device and has no values: give initial="),
        (
            numbered(nn.Linear(2, 2)),
            {"device": torch.device("cuda:0")},
            r"0\.weight is on cpu, and this rank computes on",
        ),
        (numbered(nn.BatchNorm1d(2, affine=False, device="meta")), {}, r"0\.running_mean is on the meta device"),
        (numbered(Lazy()), {}, r"0\.lazy\.weight of a lazy module has no shape yet: call the module once"),
    ],
)
def test_parameters_that_cannot_have_a_record_are_named(modules: list[nn.Module], mesh: Any, message: str) -> None:
    with pytest.raises(MegaliteError, match=message):
        give_records(modules, UnconnectedMesh(**mesh))


def test_the_number_of_modules_is_that_of_the_stages() -> None:
    with pytest.raises(MegaliteError, match="there are 1 modules for 2 stages: give one for each"):
        give_records([nn.Linear(2, 2)], ParallelMesh(), Stages(1, 2))


def test_a_tie_over_pipeline_ranks_is_refused_under_tensor_parallelism() -> None:
    modules = numbered(nn.Linear(2, 2), nn.Linear(2, 2))
    modules[1].get_submodule("1").weight = modules[0].get_parameter("0.weight")
    mesh = UnconnectedMesh(world_size=4, tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(MegaliteError, match=r"0\.weight is shared by stages on different pipeline ranks"):
        give_records(modules, mesh, Stages(2, 1))


def test_ties_are_one_record_with_a_use_per_stage_of_a_rank() -> None:
    layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    modules = numbered(*layers)
    mesh = UnconnectedMesh(rank=1, world_size=2, pipeline_parallel_size=2)
    of_stages = give_records(modules, mesh, Stages(2, 2))
    weight = layers[1].weight
    assert isinstance(weight, Parameter)
    assert layers[3].weight is weight
    assert not isinstance(layers[0].weight, Parameter)  # of another rank
    assert (weight.sharding.name, weight.sharding.replica_ranks, weight.sharding.grad_is_partial) == (
        "0.weight",
        (0, 1),
        True,
    )
    assert weight.sharding.uses == (Use(), Use(chunk=1))
    assert of_stages == [{}, {"3.weight": 1}]


class Into(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).tanh()


class OutOf(nn.Module):
    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.own, self.weight = nn.Linear(6, 6).double(), tied

    def forward(self, hidden: Tensor) -> Tensor:
        return self.own(hidden).tanh() @ self.weight


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_weight_of_three_stages_on_one_rank_trains_as_in_a_plain_loop(zero: int, recompute: bool) -> None:
    def layers() -> list[nn.Module]:
        first = Into()
        second = OutOf(first.weight)
        return [first, second, Named("x", first.weight), OutOf(first.weight)]

    expected = nn.Sequential(*layers())
    plainly(expected, numbers, lambda module, batch: square(module(batch.values["x"]), batch.values))
    modules = [Wrapped(number, layer) for number, layer in enumerate(layers())]
    run = Run(modules, numbers(0, 0).values, square, zero, recompute=recompute)
    for step in range(3):
        run.step([numbers(step, number) for number in range(2)])
    assert_same_state(run.modules, expected)


class Named(Into):
    """Use of a weight of another stage, in a stage that has nothing else."""

    def __init__(self, name: str, tied: nn.Parameter) -> None:
        super().__init__()
        self.weight = tied


class Wrapped(nn.Module):
    def __init__(self, number: int, layer: nn.Module) -> None:
        super().__init__()
        self.add_module(str(number), layer)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.get_submodule(str(self.number))(x)
        return result


# ------------------------------------------------------------------------------------------------ buffers


def test_buffers_are_states_that_share_memory_with_the_module() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[1].register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
    give_records([module], ParallelMesh())
    kept = KeptBuffers(module, ParallelMesh())
    states = {state.sharding.name: state for state in states_of(nn.ModuleList([kept]))}
    assert set(states) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    module(torch.randn(5, 3))
    assert states["0.num_batches_tracked"].values.item() == 1
    assert torch.equal(states["0.running_mean"].values, module.get_buffer("0.running_mean"))
    module.get_submodule("0").running_mean = torch.full((3,), 4.0)
    kept.synchronize()
    kept.check()
    assert states["0.running_mean"].values.tolist() == [4.0] * 3
    assert kept.collectives() == []
    states["0.running_mean"].begin()  # as a load does before it fills in values
    assert module.get_buffer("0.running_mean").tolist() == [4.0] * 3


class OneBuffer(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("counts", buffer)


@pytest.mark.parametrize(
    ("buffer", "rules", "message"),
    [
        (torch.ones(2), {"counts": "sum"}, "'sum' is no rule for buffers: use one of keep, average, first rank"),
        (torch.ones(2), {"other*": "keep"}, r"no buffer is called other\*, for which there is a rule"),
        (torch.ones(2).to(torch.float8_e4m3fn), {}, "the buffer counts is of torch.float8_e4m3fn, which a checkpoint"),
        (torch.tensor(1), {"*": "average"}, "the buffer counts of torch.int64 has no average: use the rule"),
    ],
)
def test_rules_that_cannot_hold_are_refused(buffer: Tensor, rules: Any, message: str) -> None:
    with pytest.raises(MegaliteError, match=message):
        KeptBuffers(OneBuffer(buffer), ParallelMesh(), rules)


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    module = OneBuffer(torch.ones(2))
    kept = KeptBuffers(module, ParallelMesh())
    module.counts = torch.ones(3)
    with pytest.raises(MegaliteError, match=r"the buffer counts has become \(3,\) from \(2,\): it must keep its shape"):
        kept.synchronize()


def test_a_state_without_a_constant_or_values_is_an_error() -> None:
    record = replicated(ParallelMesh(), LogicalTensor("x", (2,), Normal(1.0), False), grad_is_partial=False)
    with pytest.raises(TypeError, match="the state x begins as a constant"):
        State(record, torch.float32, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------ normalization


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2)])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_synchronized_normalization_of_one_rank_is_torchs(shape: tuple[int, ...], momentum: Any, affine: bool) -> None:
    torch.manual_seed(1)
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    theirs = kind(4, momentum=momentum, affine=affine).double()
    ours = SyncBatchNorm(4, momentum=momentum, affine=affine).double()
    ours.bind(ParallelMesh())
    ours.load_state_dict(theirs.state_dict())
    for training in (True, True, False):
        values = (2 + torch.randn(shape, dtype=torch.float64)).requires_grad_()
        gradient = torch.randn(shape, dtype=torch.float64)
        outputs = [norm.train(training)(values) for norm in (ours, theirs)]
        torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
        pairs = zip(
            *(
                torch.autograd.grad(o, [values, *n.parameters()], gradient)
                for o, n in zip(outputs, (ours, theirs), strict=True)
            ),
            strict=True,
        )
        for mine, torchs in pairs:
            torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)
        for name, buffer in theirs.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------ balance


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), stages=st.integers(1, 8))
def test_the_largest_cost_of_a_stage_is_as_small_as_it_can_be(costs: list[int], stages: int) -> None:
    if stages > len(costs):
        with pytest.raises(MegaliteError, match="layers cannot be divided into"):
            balance(costs, stages)
        return
    found = balance(costs, stages)
    assert list(itertools.chain.from_iterable(found)) == list(range(len(costs)))
    assert all(found)
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))) for cuts in every)
    assert max(sum(costs[number] for number in part) for part in found) == best


def test_costs_are_the_operations_of_layers() -> None:
    layers = [nn.Linear(10, 100, bias=False), nn.ReLU(), nn.Linear(100, 100, bias=False)]
    first, second, third = counted_costs(layers, torch.randn(50, 10))
    assert second == 0
    assert math.isclose(first, 50 * 2 * 1000 + 8 * 1000)
    assert math.isclose(third, 10 * first)


def test_measured_costs_are_seconds() -> None:
    layers = [nn.Linear(10, 10), nn.Linear(10, 400), nn.Linear(400, 400)]
    first, _, third = measured_costs(layers, torch.randn(500, 10))
    assert 0 < first < third < 10
    assert layers[0].weight.grad is None


def test_two_parameters_that_share_memory_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight.data = module[0].weight.data
    with pytest.raises(MegaliteError, match=r"0\.weight of stage 0 \(Sequential\) and 1\.weight of .* share memory"):
        give_records([module], ParallelMesh())


def test_a_checkpoint_has_buffers_of_any_dtype_of_numbers() -> None:
    """Small integers are saved as int64, complex numbers as pairs; the module keeps its own dtypes."""
    module = nn.Module()
    values = [torch.tensor([True, False]), torch.tensor(3, dtype=torch.int32), torch.tensor([1 + 2j, 3 - 1j])]
    for number, value in enumerate(values):
        module.register_buffer(f"b{number}", value.clone())
    kept = KeptBuffers(module, ParallelMesh())
    saved = {state.sharding.name: state.values.clone() for state in states_of(nn.ModuleList([kept]))}
    assert [saved[f"b{number}"].tolist() for number in range(3)] == [[1, 0], 3, [[1.0, 2.0], [3.0, -1.0]]]
    for buffer in module.buffers():
        buffer.zero_()
    kept.synchronize()
    for state in states_of(nn.ModuleList([kept])):
        state.values.copy_(saved[state.sharding.name])
    kept.restore()
    assert all(map(torch.equal, module.buffers(), values))
    assert [buffer.dtype for buffer in module.buffers()] == [value.dtype for value in values]
