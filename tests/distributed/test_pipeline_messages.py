"""Stages may pass on several tensors, different ones per border: the engine sends exactly the declared ones."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from megalite.parallel.stage import StageOutput, TensorSpec
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.point_to_point import Links, make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from tests.distributed.pipeline_run import Gradients, pipeline_mesh
from tests.harness.rank_pool import RankPools

ROWS, WIDTH, FACTORS = 3, 4, {"loss": 0.5, "spread": 2.0}
HIDDEN = TensorSpec("hidden", (ROWS, WIDTH), torch.float64)
IDS = TensorSpec("ids", (ROWS,), torch.int64, gradient=False)
SCALE = TensorSpec("scale", (WIDTH,), torch.float64)
SHADOW = TensorSpec("shadow", (ROWS, WIDTH), torch.float64, gradient=False)
BORDERS = ((HIDDEN, IDS), (IDS, SCALE, HIDDEN), (SHADOW,), (HIDDEN, SCALE), (SHADOW, HIDDEN))
"""Borders in turn: with and without gradients, in different orders, and one without any gradient."""


class Mixed(nn.Module):
    """Stage that computes the declared tensors from all its inputs."""

    def __init__(self, stage: int, stages: Stages) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.takes = {spec.name for spec in stages.passes(stage - 1)} if stage else set()
        self.passes = {spec.name for spec in stages.passes(stage)}

    def forward(self, inputs: Mapping[str, Tensor], x: Tensor) -> StageOutput:
        assert inputs.keys() == self.takes
        hidden = inputs.get("hidden", x) + inputs.get("shadow", torch.zeros_like(x))
        ids = inputs.get("ids", torch.arange(ROWS))
        hidden = torch.tanh(hidden[ids] @ self.weight) * inputs.get("scale", torch.ones(WIDTH, dtype=torch.float64))
        if not self.passes:
            return StageOutput({}, {"loss": hidden.sum(), "spread": hidden.square().sum()})
        given = {"hidden": hidden, "ids": ids.flip(0), "scale": hidden.sum(0), "shadow": hidden.detach() * 2}
        return StageOutput({name: given[name] for name in self.passes}, {"spread": hidden.square().mean()})


def stages_of(schedule: str, ranks: int, chunks: int) -> Stages:
    borders = tuple(BORDERS[border % len(BORDERS)] for border in range(ranks * chunks - 1))
    return Stages(ranks, chunks, schedule == "zb-v", borders)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4)]


class CountingLinks(Links):
    def __init__(self, links: Links) -> None:
        super().__init__(links.outgoing, links.incoming)
        self.sent: list[tuple[int, ...]] = []

    def send(self, tensor: Tensor, peer: int):  # type: ignore[no-untyped-def]
        self.sent.append(tuple(tensor.shape))
        return super().send(tensor, peer)


def trained(schedule: str, ranks: int, chunks: int) -> tuple[dict[str, float], dict[int, Tensor], int]:
    """Return this rank's sums, its stages' gradients, and the number of tensors that it has sent."""
    mesh, stages = pipeline_mesh(), stages_of(schedule, ranks, chunks)
    own = stages.of_rank(mesh.rank)
    layers, links = [Mixed(stage, stages) for stage in own], CountingLinks(make_links(mesh, stages))
    engine = PipelineEngine(layers, stages, mesh.rank, links, mesh.device)
    actions = ProvedSchedules(stages, mesh.rank, schedule=schedule).prove([4]).training(4)
    links.sent.clear()
    sums = engine.run(actions, inputs(), FACTORS, Gradients(layers))
    gradients = {stage: layer.weight.grad for stage, layer in zip(own, layers, strict=True)}
    return {name: total.item() for name, total in sums.items()}, gradients, len(links.sent)


def alone(stages: Stages) -> tuple[dict[str, float], list[Tensor]]:
    """Run stage by stage on one process, so that only the declared gradients flow back."""
    layers, sums = [Mixed(stage, stages) for stage in range(stages.count)], {"loss": 0.0, "spread": 0.0}
    for x in inputs():
        passed: Mapping[str, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        for layer in layers:
            passed, terms, _ = layer(passed, x)
            for name, term in terms.items():
                sums[name] += term.item()
                total = total + FACTORS[name] * term
        total.backward()
    return sums, [layer.weight.grad for layer in layers]


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"),
    [("gpipe", 2, 1), ("1f1b", 2, 1), ("1f1b", 3, 1), ("interleaved-1f1b", 2, 3), ("zb-h1", 3, 1), ("zb-v", 2, 2)],
)
def test_stages_pass_on_what_is_declared(schedule: str, ranks: int, chunks: int, rank_pools: RankPools) -> None:
    stages = stages_of(schedule, ranks, chunks)
    found, (sums, gradients) = rank_pools(ranks).run(trained, schedule, ranks, chunks), alone(stages)
    for name, total in sums.items():
        assert sum(own.get(name, 0.0) for own, _, _ in found) == pytest.approx(total, rel=1e-14)
    for own in found:
        for stage, gradient in own[1].items():
            torch.testing.assert_close(gradient, gradients[stage], rtol=1e-12, atol=1e-14)
    travels = [stages.place(stage)[0] != stages.place(stage + 1)[0] for stage in range(stages.count - 1)]
    sent = 0
    for border in (border for border, moved in enumerate(travels) if moved):
        passed = BORDERS[border % len(BORDERS)]
        sent += len(passed) + sum(spec.gradient for spec in passed)
    assert sum(count for _, _, count in found) == 4 * sent
