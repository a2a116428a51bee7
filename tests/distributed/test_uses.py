"""A weight used any number of times in each of a rank's chunks trains as with plain autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import DataParallel, make_buckets
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel import placement
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding, Use
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.stages import Stages
from tests.distributed.chunks_run import actions
from tests.harness.close import assert_number_close, assert_parameter_close
from tests.harness.rank_pool import RankPools
from tests.harness.stages import LOSS, as_stage, passing_hidden
from tests.harness.unsharded import unsharded_parameters
from tests.harness.wide import wide_except

WIDTH, ROWS, MICRO_BATCHES, STEPS, RATE = 6, 4, 3, 2, 0.05
ORDERS = {
    "whole": "F0 F0.1 B0.1 F1 F1.1 B1.1 B0 F2 F2.1 B2.1 B1 B2",
    "deferred": "F0 F0.1 I0.1 F1 F1.1 I1.1 W0.1 I0 W1.1 F2 F2.1 I2.1 I1 W0 W2.1 I2 W1 W2",
}
IN_ONE = {"whole": "F0 B0 F1 F2 B1 B2", "deferred": "F0 I0 F1 I1 W0 F2 I2 W1 W2"}


@dataclass(frozen=True)
class Case:
    """Case: by chunk and block, the number of uses of the weight; ZeRO's stage; an order."""

    chunks: tuple[tuple[tuple[int, ...], ...], ...]
    zero: int
    order: str

    def actions(self) -> Any:
        return actions((IN_ONE if len(self.chunks) == 1 else ORDERS)[self.order], reduce_each=self.zero >= 2)

    def uses(self) -> tuple[Use, ...]:
        used = [(number, chunk) for chunk, blocks in enumerate(self.chunks) for block in blocks for number in block]
        return tuple(Use(used.count(key), key[1]) for key in sorted(set(used)))


def sharding(mesh: ParallelMesh, name: str) -> Sharding:
    return placement.replicated(mesh, LogicalTensor(name, (WIDTH, WIDTH), Normal(0.3), True), grad_is_partial=False)


class Block(nn.Module):
    """Block with a layer of its own, followed by the shared one, used several times."""

    def __init__(self, context: ParallelContext, name: str, shared: Parameter, uses: Sequence[int]) -> None:
        super().__init__()
        self.own = ColumnParallelLinear(context, "vocabulary", [sharding(context.mesh, name)])
        self.shared = nn.ModuleList(ColumnParallelLinear(context, "vocabulary", [shared], use=use) for use in uses)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in (self.own, *self.shared):
            hidden = layer(hidden).tanh()
        return hidden


class Chunk(nn.Module):
    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def make_chunks(mesh: ParallelMesh, case: Case) -> list[Chunk]:
    context = ParallelContext(mesh, False, torch.float64)
    shared = context.parameter(replace(sharding(mesh, "shared"), uses=case.uses()))
    return [
        Chunk([Block(context, f"{chunk}.{number}", shared, uses) for number, uses in enumerate(blocks)])
        for chunk, blocks in enumerate(case.chunks)
    ]


def inputs(step: int, rank: int) -> Iterator[Tensor]:
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
        yield torch.randn(ROWS, 1, WIDTH, generator=generator, dtype=torch.float64)


def trained(cases: Sequence[Case]) -> list[tuple[list[float], list[Tensor]]]:
    """Return the norms and the final weights of each case."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size())
    found = []
    for case in cases:
        chunks = make_chunks(mesh, case)
        options = DataParallel(torch.float64, case.zero, overlap_reduce=case.zero == 1)
        optimizer = make_optimizer(
            chunks,
            mesh,
            OptimizerConfig(lr=0.0, optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0),
            options,
            blocks=[list(chunk.blocks) for chunk in chunks],
            set_values=lambda parameter: set_initial_values(parameter, seed=1),
        )
        stages = passing_hidden(Stages(1, len(chunks), v_shaped=len(chunks) == 2), (ROWS, 1, WIDTH))
        last = len(chunks) - 1
        engine: PipelineEngine[Tensor] = PipelineEngine(
            [as_stage(_plain(chunk, last=number == last), last=number == last) for number, chunk in enumerate(chunks)],
            stages,
            device=mesh.device,
        )
        norms = []
        for step in range(STEPS):
            optimizer.begin_step(MICRO_BATCHES)
            engine.run(case.actions(), list(inputs(step, mesh.rank)), {LOSS: 1.0}, optimizer)
            norms.append(optimizer.step(Rates(RATE, RATE, weight_decay=0.0)).gradient_norm)
        with unsharded_parameters(optimizer):
            parameters = {name: p for chunk in chunks for name, p in by_name(chunk).items()}
            found.append((norms, [parameters[name].detach().clone() for name in sorted(parameters)]))
    return found


def _plain(chunk: Chunk, *, last: bool) -> Any:
    def run(hidden: Tensor | None, micro_batch: Tensor) -> Tensor:
        output: Tensor = chunk(micro_batch if hidden is None else hidden)
        return output.pow(3).sum() if last else output

    return run


def by_name(network: nn.Module) -> dict[str, Parameter]:
    return {p.sharding.name: p for p in network.parameters() if isinstance(p, Parameter)}


def expected(case: Case, ranks: int) -> tuple[list[float], list[Tensor]]:
    """Compute the same with plain torch, over the inputs of all ranks."""
    weights: dict[str, Tensor] = {}
    for chunk in make_chunks(ParallelMesh(), case):
        for name, parameter in by_name(chunk).items():
            parameter.allocate()
            set_initial_values(parameter, seed=1)
            weights[name] = parameter.detach().clone().requires_grad_()
    norms = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for hidden in (hidden for rank in range(ranks) for hidden in inputs(step, rank)):
            for chunk, blocks in enumerate(case.chunks):
                for number, uses in enumerate(blocks):
                    for name in (f"{chunk}.{number}", *["shared"] * len(uses)):
                        hidden = (hidden @ weights[name].t()).tanh()
            total = total + hidden.pow(3).sum()
        gradients = dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))
        norms.append(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item())
        weights = {n: (w - RATE * gradients[n]).detach().requires_grad_() for n, w in weights.items()}
    return norms, [weights[name].detach() for name in sorted(weights)]


NETWORKS = {
    "three and one": (((0, 0), (), (0,)), ((1,),)),
    "one and three": (((0,),), ((1, 1), (1,))),
    "two numbers in one chunk": (((0,), (0,), (1, 1, 1)),),
    "three numbers in two chunks": (((0, 0),), ((1,), (2, 2, 2))),
}


@pytest.mark.wide_except("three numbers in two chunks")
@pytest.mark.parametrize("network", wide_except(NETWORKS, ["three and one", "three numbers in two chunks"]))
def test_a_weight_used_often_trains_as_by_plain_autograd(network: str, rank_pools: RankPools) -> None:
    cases = [Case(NETWORKS[network], zero, order) for zero in range(4) for order in ORDERS]
    norms, weights = expected(cases[0], 2)
    for results in rank_pools(2).run(trained, cases):
        for case, (found_norms, found) in zip(cases, results, strict=True):
            for ours, theirs in zip(found_norms, norms, strict=True):
                assert_number_close(ours, theirs, f"norm of {case}")
            for ours, theirs in zip(found, weights, strict=True):
                assert_parameter_close(ours, theirs, RATE, f"weight of {case}")


def test_weights_of_other_chunks_stand_in_other_buckets() -> None:
    """Two weights of the lowest chunk: one is also used in the second chunk, the other in the third."""
    mesh = ParallelMesh()
    context = ParallelContext(mesh, False, torch.float64)
    shared = [context.parameter(replace(sharding(mesh, n), uses=(Use(), Use(chunk=1)))) for n in ("one", "other")]
    chunks = [nn.ParameterList(parameters) for parameters in (shared, shared[:1], shared[1:])]
    buckets = make_buckets(chunks, mesh, DataParallel(torch.float64))
    found = {bucket.layout.slots[0].parameter.sharding.name: bucket.accumulators for bucket in buckets}
    chunks_of = {name: [accumulator.chunk for accumulator in accumulators] for name, accumulators in found.items()}
    assert chunks_of == {"one": [0, 1], "other": [0, 2]}


def test_uses_in_other_chunks_than_hold_the_weight_are_an_error() -> None:
    """Two chunks have the weight, and one of them has no use of it."""
    chunks = make_chunks(ParallelMesh(), Case(NETWORKS["three and one"], 0, "whole"))
    shared = chunks[0].blocks[0].shared[0].weights[0]
    shared.sharding = replace(shared.sharding, uses=(Use(3),))
    with pytest.raises(ValueError, match="shared is in 2 chunks, but its uses are"):
        make_buckets(chunks, ParallelMesh(), DataParallel(torch.float64))
