"""Declarations of layers: terms of the loss, and communication with other ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megalite.config.model import ModelConfig
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import StageLayers
from megalite.config.validate import resolve
from megalite.model import layer_kinds
from megalite.model.gpt import GPT
from megalite.model.head import LM_LOSS
from megalite.model.mlp import MLP
from megalite.model.recompute import Recompute
from megalite.parallel import placement
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite.parallel.stage import LossTerm
from megalite.parallel.stage_module import Inside
from megalite.training import builder
from megalite.training.builder import count_parameters, make_optimizer, make_proved_schedules, make_stages

MODEL = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=2, max_position_embeddings=4, vocab_size=4)
OUT, BACK = "out", "back"


class Sending(MLP):
    """A feed-forward with a term of the loss, whose rows go to other ranks and come back."""

    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute) -> None:
        super().__init__(context, f"layers.{layer}.mlp", layer_kinds.feed_forward_sizes(config, config.ffn_size))
        self._layer = f"layer {layer}"

    @property
    def inside(self) -> list[Inside]:
        return [Inside(OUT, self._layer), Inside(BACK, self._layer)]

    @staticmethod
    def loss_terms(config: ModelConfig, context: ParallelContext) -> tuple[LossTerm, ...]:
        return (LossTerm("balance", lambda micro_batch: torch.ones(()), config.init_method_std),)


@pytest.fixture(autouse=True)
def sending(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = layer_kinds.LAYER_KINDS["dense"]._replace(make=Sending, loss_terms=Sending.loss_terms)
    monkeypatch.setitem(layer_kinds.LAYER_KINDS, "dense", kind)  # type: ignore[arg-type]


def stage(part: StageLayers | None = None, recompute: Recompute | None = None) -> GPT:
    return GPT(MODEL, ParallelMesh(device=torch.device("meta")), stage_layers=part, recompute=recompute)


def test_terms_of_layers_are_the_networks_on_every_stage() -> None:
    """Once, with however many layers, and where there are none."""
    for part in (None, StageLayers(0, 0, embedding=True, loss=False), StageLayers(1, 2, embedding=False, loss=True)):
        first, *others = stage(part).loss_terms
        assert first == LM_LOSS
        assert [(term.name, term.weight) for term in others] == [("balance", MODEL.init_method_std)]


F = [(OUT, 0), (BACK, 0)], [(OUT, 1), (BACK, 1)], [(OUT, 2), (BACK, 2)]
B = [each[::-1] for each in F]


@pytest.mark.parametrize(
    ("recompute", "backward"),
    [
        (Recompute(), B[2] + B[1] + B[0]),
        (Recompute(attention=True), B[2] + B[1] + B[0]),
        (Recompute(method="uniform", layers=2), F[2] + B[2] + F[0] + F[1] + B[1] + B[0]),
        (Recompute(method="block", layers=1), B[2] + B[1] + F[0] + B[0]),
    ],
    ids=str,
)
def test_what_layers_do_together_is_declared(recompute: Recompute, backward: list[tuple[str, int]]) -> None:
    """In backward the other way round; what is recomputed before that again as in forward."""
    network = stage(recompute=recompute)
    assert network.inside(backward=False) == [Inside(name, f"layer {layer}") for name, layer in F[0] + F[1] + F[2]]
    assert network.inside(backward=True) == [Inside(name, f"layer {layer}") for name, layer in backward]


def test_the_proof_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = """--mock-data --tokenizer-type NullTokenizer --vocab-size 4 --num-layers 3 --hidden-size 8 --lr 1
    --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4 --micro-batch-size 1 --train-iters 1"""
    config, mesh = resolve(parse_arguments(flags.split()).config, 1), ParallelMesh()
    stages = make_stages(config)
    chunks = builder.make_chunks(config, MODEL, mesh, stages)
    told: dict[str, Any] = {}
    monkeypatch.setattr(builder, "ProvedSchedules", lambda *arguments, **rest: told.update(rest))
    optimizer = make_optimizer(config, chunks, mesh, stages, partial(set_initial_values, seed=1))
    make_proved_schedules(config, mesh, stages, chunks, optimizer, ())
    exchanges = {
        kind: [each.name for each in those if each.name in (OUT, BACK)]
        for kind, those in told["inside_actions"].items()
    }
    assert exchanges == {"F": [OUT, BACK] * 3, "B": [BACK, OUT] * 3, "I": [BACK, OUT] * 3, "W": [], "R": []}


class Experts(nn.Module):
    """A weight that is split over ep alone, one that is split over ep and etp, and one of no view."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()

        def parameter(name: str, splits: dict[int, tuple[str, ...]]) -> Parameter:
            tensor = LogicalTensor(name, (4, 8), Constant(0.0), weight_decay=False)
            return Parameter(placement.split(mesh, tensor, splits), torch.float32, mesh.device)

        self.parts, self.copies = parameter("parts", {0: ("ep",), 1: ("etp",)}), parameter("copies", {0: ("ep",)})
        self.dense = parameter("dense", {0: ("tp",)})


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 4, 1), (4, 1, 2)])
def test_every_rank_counts_all_experts(tp: int, ep: int, etp: int) -> None:
    """Copies on ranks that are not its tensor-parallel peers, too."""
    sizes = {"tensor_parallel_size": tp, "expert_parallel_size": ep, "expert_tensor_parallel_size": etp}
    for rank in range(4):
        mesh = UnconnectedMesh(rank=rank, world_size=4, **sizes)
        assert count_parameters([Experts(mesh)], mesh) == 3 * 4 * 8  # type: ignore[list-item]
