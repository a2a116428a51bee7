"""A layer of experts, made for this test, trains the same on any expert view of the ranks.

It covers all code for expert parameters: placement, buckets, ZeRO, norms, rules and checkpoints. Tokens are distributed
over all ranks and reach experts by a gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite import checkpoint
from megalite.checkpoint import Contents, Plan, Saver, TrainingState
from megalite.config.optimizer import OptimizerConfig
from megalite.optim import muon
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.muon import Muon
from megalite.optim.optimizer import make_optimizer
from megalite.parallel import collectives, placement
from megalite.parallel.initialization import initial_values, set_initial_values
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import DenseGradient, Parameter, accumulate_grad, named_pieces
from megalite.parallel.sharding import Box, Constant, LogicalTensor, Normal, Sharding
from tests import muon as oracle
from tests.harness.close import assert_number_close, assert_parameter_close
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters
from tests.harness.wide import wide_except

EXPERTS, HIDDEN, FFN, LAYERS = 4, 8, 12, 2
TOKENS, MICRO_BATCHES, STEPS = 8, 2, 2
RATES = Rates(0.05, 0.05, weight_decay=0.1)
CLIP = 0.05

View = tuple[int, int, int, int]
Held = tuple[str, tuple[int, ...], Box, Tensor]
Exchanged = Callable[[Tensor, Group], Tensor]


@dataclass(frozen=True)
class Cell:
    """Layout for the given number of ranks, with ZeRO stage and update rule."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    instances: int = 1
    overlap: bool = False

    @property
    def view(self) -> View:
        return self.tp, self.cp, self.ep, self.etp

    def config(self) -> OptimizerConfig:
        return OptimizerConfig(lr=0.0, optimizer=self.optimizer, clip_grad=CLIP, muon_nesterov=True)

    def data_parallel(self) -> DataParallel:
        return DataParallel(
            torch.float64,
            zero_stage=self.zero,
            instances=self.instances,
            bucket_size=100 if self.overlap else None,
            overlap_reduce=self.overlap,
            overlap_gather=self.overlap,
        )


class ExpertProduct(torch.autograd.Function):
    """Product of [tokens, in] with the matrix of each token's expert; tokens of other ranks' experts give zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Parameter, chosen: Tensor) -> Tensor:
        ctx.weight, ctx.chosen = weight, chosen
        ctx.save_for_backward(rows)
        (box,) = (piece.box for piece in weight.sharding.pieces)
        out = rows.new_zeros(len(rows), box.size[1])
        for expert, matrix in zip(box.indices(0), weight.detach().view(box.size), strict=True):
            out[chosen == expert] = rows[chosen == expert] @ matrix.t()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), weight = ctx.saved_tensors, ctx.weight
        (box,) = (piece.box for piece in weight.sharding.pieces)
        to_rows, to_weight = torch.zeros_like(rows), rows.new_zeros(box.size)
        for number, (expert, matrix) in enumerate(zip(box.indices(0), weight.detach().view(box.size), strict=True)):
            own = ctx.chosen == expert
            to_rows[own] = gradients[0][own] @ matrix
            to_weight[number] = gradients[0][own].t() @ rows[own]
        return to_rows, accumulate_grad(weight, DenseGradient(to_weight.view(weight.shape))), None


class Exchange(torch.autograd.Function):
    """All-gather or reduce-scatter of rows; the other of the two is its backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, forward: Exchanged, backward: Exchanged) -> Tensor:
        ctx.group, ctx.transpose = group, backward
        return forward(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transpose(gradients[0], ctx.group), None, None, None


class ExpertLayer(nn.Module):
    """Experts, split over ep and, along their inner width, over etp; their router and a scale are replicated."""

    def __init__(self, mesh: ParallelMesh, number: int) -> None:
        super().__init__()
        self.group = mesh.group("ep", "etp")
        name, draw, partial = f"layers.{number}", Normal(0.5), mesh.size("tp") > 1
        up = LogicalTensor(f"{name}.up", (EXPERTS, FFN, HIDDEN), draw, True, "experts ffn hidden -> experts ffn hidden")
        down = LogicalTensor(
            f"{name}.down", (EXPERTS, HIDDEN, FFN), draw, True, "experts hidden ffn -> experts hidden ffn"
        )
        router = LogicalTensor(f"{name}.router", (EXPERTS, HIDDEN), draw, True, "experts hidden -> 1 experts hidden")
        scale = LogicalTensor(f"{name}.scale", (HIDDEN,), Constant(1.0), False)

        def parameter(sharding: Sharding) -> Parameter:
            return Parameter(sharding, torch.float64, mesh.device)

        self.scale = parameter(placement.replicated(mesh, scale, grad_is_partial=partial))
        self.router = parameter(placement.replicated(mesh, router, grad_is_partial=partial))
        self.up = parameter(placement.split(mesh, up, {0: ("ep",), 1: ("etp",)}))
        self.down = parameter(placement.split(mesh, down, {0: ("ep",), 2: ("etp",)}))

    def forward(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Map this rank's [tokens, hidden] to the same shape; `chosen`: the expert of each token."""
        shares = (hidden @ self.router.t()).softmax(-1).gather(-1, chosen.unsqueeze(-1))
        both = collectives.all_gather, collectives.reduce_scatter
        rows = Exchange.apply(hidden * self.scale, self.group, *both)
        everyones = collectives.all_gather(chosen, self.group)
        inner = ExpertProduct.apply(rows, self.up, everyones).tanh()
        return hidden + shares * Exchange.apply(
            ExpertProduct.apply(inner, self.down, everyones), self.group, *both[::-1]
        )


class Network(nn.Module):
    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(mesh, number) for number in range(LAYERS))

    def forward(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of this rank's losses."""
        for layer in self.layers:
            hidden = layer(hidden, chosen)
        return hidden.pow(3).sum()


def micro_batches(mesh: ParallelMesh, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's tokens and their experts: two experts per micro-batch, so that the others get no token."""
    for number in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
        own = torch.arange(TOKENS).view(mesh.world_size, -1)[mesh.rank]
        yield tokens[own], (own**2 + number) % EXPERTS


class Training:
    """Training of a cell on this rank."""

    def __init__(self, cell: Cell, mesh: ParallelMesh) -> None:
        options, config = cell.data_parallel(), cell.config()
        self.mesh, self.network = mesh, Network(mesh)
        self.optimizer = make_optimizer(
            [self.network],
            mesh,
            config,
            options,
            blocks=[list(self.network.layers)],
            set_values=lambda parameter: set_initial_values(parameter, seed=1),
        )

        def contents_at(mesh: ParallelMesh) -> Contents:
            network = Network(mesh)
            return Contents.of([network], mesh, options, blocks=[list(network.layers)])

        self.plan = Plan(mesh, contents_at, config, zero_stage=options.zero_stage, instances=options.instances)
        self.norms: list[float] = []

    def step(self, number: int) -> None:
        self.optimizer.begin_step(MICRO_BATCHES)
        for micro_batch, (hidden, chosen) in enumerate(micro_batches(self.mesh, number), start=1):
            (self.network(hidden, chosen) / (MICRO_BATCHES * TOKENS)).backward()
            self.optimizer.reduce(0, micro_batch)
        self.norms.append(self.optimizer.step(RATES).gradient_norm)

    def held(self) -> list[Held]:
        with unsharded_parameters(self.optimizer):
            return [
                (piece.tensor.name, piece.tensor.shape, piece.box, piece.view(parameter).detach().clone())
                for parameter, piece in named_pieces(self.network)
            ]


Result = tuple[list[float], list[Held]]


def make_meshes(cells: Iterable[Cell]) -> dict[View, ParallelMesh]:
    """Return this rank's meshes: one for all cells with the same split."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {
        (tp, cp, ep, etp): ParallelMesh(
            rank=rank,
            world_size=world_size,
            tensor_parallel_size=tp,
            context_parallel_size=cp,
            expert_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        for tp, cp, ep, etp in dict.fromkeys(cell.view for cell in cells)
    }


def trained(cells: Sequence[Cell]) -> list[Result]:
    """Return the gradient norms and the final weights of each cell."""
    results, meshes = [], make_meshes(cells)
    for cell in cells:
        training = Training(cell, meshes[cell.view])
        for step in range(STEPS):
            training.step(step)
        results.append((training.norms, training.held()))
    return results


def resumed(pairs: Sequence[tuple[Cell, Cell]], directory: Path) -> list[Result]:
    """Train likewise, but save after each step with one cell and load with the other."""
    results, meshes = [], make_meshes(itertools.chain(*pairs))
    for number, cells in enumerate(pairs):
        norms: list[float] = []
        path: Any = None
        for step, cell in enumerate(cells):
            training = Training(cell, meshes[cell.view])
            if path is not None:
                checkpoint.load(path, training.network, training.optimizer, training.mesh, plan=training.plan)
            training.step(step)
            state = TrainingState(step + 1, 0, training.optimizer.steps)
            folder = directory / str(number)
            path = Saver(folder, training.optimizer, training.plan).save(state, {"model": {}})
            norms += training.norms
        training = Training(cells[0], meshes[cells[0].view])
        checkpoint.load(path, training.network, training.optimizer, training.mesh, plan=training.plan)
        results.append((norms, training.held()))
    return results


@pytest.fixture(scope="module")
def one_process() -> dict[str, Result]:
    rules: list[Literal["adam", "sgd", "muon"]] = ["adam", "sgd", "muon"]
    return {rule: trained([Cell(optimizer=rule)])[0] for rule in rules}


def assert_as_one(ranks: Sequence[Result], alone: Result) -> None:
    norms, weights = alone
    assert min(norms) > 2 * CLIP
    whole = {name: values for name, _, _, values in weights}
    seen = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in whole.items()}
    for theirs, held in ranks:
        for number, norm in zip(norms, theirs, strict=True):
            assert_number_close(norm, number, "gradient norm")
        for name, _, box, values in held:
            assert_parameter_close(values, whole[name][box.slices()], RATES.learning_rate, name)
            seen[name][box.slices()] = True
    assert all(mask.all() for mask in seen.values())


RULES: tuple[Literal["adam", "sgd", "muon"], ...] = ("adam", "sgd", "muon")
VIEWS = {
    2: [(1, 1, 2, 1), (2, 1, 1, 2), (2, 1, 2, 1)],
    4: [(2, 1, 1, 1), (2, 1, 4, 1), (1, 1, 2, 2), (1, 2, 2, 1), (1, 2, 1, 2)],
}
"""Values of tp, cp, ep and etp, by number of ranks."""
HYBRID = {
    2: [],
    4: [
        Cell(ep=2, zero=1, instances=2, optimizer="muon"),  # each instance has one replica of the experts
        Cell(etp=2, zero=3, instances=2, optimizer="adam"),
        Cell(zero=2, instances=2, optimizer="muon", overlap=True),
    ],
}


def cells(world_size: int) -> list[Cell]:
    """Return every view at every stage, and every rule at every stage."""
    views = enumerate(VIEWS[world_size])
    return HYBRID[world_size] + [
        Cell(*view, zero=zero, optimizer=RULES[(number + zero) % 3], overlap=bool((number // 2 + zero) % 2))
        for (number, view), zero in itertools.product(views, range(4))
    ]


@pytest.mark.parametrize("world_size", wide_except([2, 4], [2]))
def test_experts_train_as_on_one_process(
    world_size: int, rank_pools: RankPools, one_process: dict[str, Result]
) -> None:
    those = cells(world_size)
    ranks = rank_pools(world_size).run(trained, those)
    for number, cell in enumerate(those):
        assert_as_one([results[number] for results in ranks], one_process[cell.optimizer])


@pytest.mark.parametrize("world_size", wide_except([2, 4], [2]))
def test_experts_are_saved_under_one_view_and_loaded_under_another(
    world_size: int, rank_pools: RankPools, one_process: dict[str, Result], tmp_path: Path
) -> None:
    """Each view is saved and loaded by the next one, at other stages."""
    views = [(1, 1, 1, 1), *VIEWS[world_size]]
    pairs = [
        (Cell(*saving, zero=number % 4, optimizer=rule), Cell(*loading, zero=(number + 1) % 4, optimizer=rule))
        for number, (saving, loading) in enumerate(zip(views, [*views[1:], views[0]], strict=True))
        for rule in [RULES[number % 3]]
    ]
    ranks = rank_pools(world_size).run(resumed, pairs, tmp_path)
    for number, (cell, _) in enumerate(pairs):
        assert_as_one([results[number] for results in ranks], one_process[cell.optimizer])


def by_hand(rule: str) -> Result:
    """Train the same on unsharded tensors, with torch and tests/muon.py."""
    network, config = Network(ParallelMesh()), Cell().config()
    tensors = [piece.tensor for _, piece in named_pieces(network)]
    weights = {t.name: initial_values(t, Box.whole(t.shape), 1).double().requires_grad_() for t in tensors}
    groups = [
        {"params": [weight], "weight_decay": RATES.weight_decay * (weight.dim() > 1)} for weight in weights.values()
    ]
    betas, momentum = (config.adam_beta1, config.adam_beta2), config.muon_momentum
    torchs: torch.optim.Optimizer = torch.optim.AdamW(groups, RATES.learning_rate, betas, eps=config.adam_eps)
    if rule == "sgd":
        torchs = torch.optim.SGD(groups, RATES.learning_rate, momentum=config.sgd_momentum)
    averages = {name: torch.zeros_like(weight) for name, weight in weights.items() if rule == "muon"}
    norms = []
    for step in range(STEPS):
        for hidden, chosen in micro_batches(ParallelMesh(), step):
            for name in (f"layers.{number}" for number in range(LAYERS)):
                router, scale, up, down = (weights[f"{name}.{kind}"] for kind in ("router", "scale", "up", "down"))
                shares = (hidden @ router.t()).softmax(-1)[torch.arange(TOKENS), chosen]
                inner = torch.einsum("ti,tfi->tf", hidden * scale, up[chosen]).tanh()
                hidden = hidden + shares[:, None] * torch.einsum("tf,tif->ti", inner, down[chosen])
            (hidden.pow(3).sum() / (MICRO_BATCHES * TOKENS)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), CLIP).item())
        with torch.no_grad():
            for name in [name for name in averages if weights[name].dim() > 1]:
                weight, gradient = weights[name], weights[name].grad
                averages[name].lerp_(gradient, 1 - momentum)
                update = oracle.orthogonalized(gradient.lerp(averages[name], momentum), oracle.QUINTIC)
                update *= math.sqrt(max(weight.shape[-2:]))
                weight -= RATES.learning_rate * (RATES.weight_decay * weight + update)
                weight.grad = None
        torchs.step()
        torchs.zero_grad()
    return norms, [(name, weight.shape, Box.whole(weight.shape), weight.detach()) for name, weight in weights.items()]


@pytest.mark.parametrize("rule", RULES)
def test_one_process_trains_as_torch_does(rule: str, one_process: dict[str, Result]) -> None:
    assert_as_one([one_process[rule]], by_hand(rule))


class Largest(TorchDispatchMode):
    """Recorder of the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def matrices_update(cell: Cell) -> dict[str, Any]:
    """Return Muon's declared operations with other ranks, the actual ones, and the largest tensor meanwhile."""
    training = Training(cell, make_meshes([cell])[cell.view])
    (rule,) = (rule for rule in training.optimizer.rules if isinstance(rule, Muon))
    did: list[tuple[int, ...]] = []

    def noting(name: str) -> Any:
        real = getattr(collectives, name)

        def call(*arguments: Any) -> Any:
            did.append(arguments[-1].ranks)
            return real(*arguments)

        return mock.patch.object(collectives, name, call)

    training.step(0)
    counting = mock.patch.object(muon, "orthogonalized", wraps=muon.orthogonalized)
    with noting("all_to_all"), noting("all_reduce_"), counting as made, Largest() as largest:
        rule.update(RATES, 2, 1.0)
    said = [ranks for _, ranks in rule.collectives()]
    return {"said": said, "did": did, "largest": largest.elements, "matrices": made.call_count}


@pytest.mark.parametrize(
    "cell",
    [
        Cell(ep=4, zero=0, optimizer="muon"),
        Cell(ep=2, etp=2, zero=3, optimizer="muon"),
        Cell(ep=2, zero=1, optimizer="muon"),
        Cell(tp=2, zero=2, optimizer="muon"),
    ],
)
def test_a_rank_makes_whole_only_matrices_of_its_own_experts(cell: Cell, rank_pools: RankPools) -> None:
    """It gathers one matrix at a time, each on only one of its ranks, as declared to the step's checker."""
    ranks = rank_pools(4).run(matrices_update, cell)
    for found in ranks:
        assert found["did"] == found["said"]
        assert found["largest"] <= 2 * FFN * HIDDEN  # gloo reduces over two ranks by gathering both inputs
    assert sum(found["matrices"] for found in ranks) == LAYERS * (2 * EXPERTS * cell.etp + cell.tp)
