"""Networks of every family on layouts of every class, one rank of many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.conversion.families import FAMILIES
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.head import LossConfig
from megalite.optim.buckets import DataParallel, make_buckets
from megalite.parallel.context import AttentionWay
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import UnconnectedMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag
from tests.harness.huggingface import CONFIGS, as_written, make_config
from tests.rank_types.checker import Checked

WORLD = 16_384
SEQUENCE = 16

CLASSES: dict[str, dict[str, Any]] = {
    "dp": {"zero": 0},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "tp": {"tp": 2},
    "fused": {"tp": 2, "fused": True},
    "tp-sp": {"tp": 2, "sp": True},
    "tp4-sp": {"tp": 4, "sp": True},
    "cp-ring": {"cp": 2},
    "cp-gather": {"cp": 2, "gathers": True},
    "cp-heads": {"cp": 2, "head_ranks": 2},
    "cp4-both": {"cp": 4, "head_ranks": 2},
    "cp-chains": {"cp": 2, "chains": True},
    "ep": {"ep": 2},
    "ep-gather": {"ep": 2, "dispatcher": "allgather"},
    "ep-etp": {"tp": 2, "sp": True, "ep": 2, "etp": 2},
    "pp": {"pp": 4},
    "all": {"tp": 2, "sp": True, "cp": 2, "ep": 2, "etp": 1, "pp": 4, "zero": 2},
}


@dataclass(frozen=True)
class Layout:
    """Split of the ranks; those left are data-parallel."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    gathers: bool = False
    head_ranks: int = 1
    chains: bool = False
    ep: int = 1
    etp: int = 1
    pp: int = 1
    zero: int = 1
    fused: bool = False
    dispatcher: Literal["allgather", "alltoall"] = "alltoall"

    def mesh(self, rank: int = 0) -> UnconnectedMesh:
        return UnconnectedMesh(
            rank=rank,
            world_size=WORLD,
            tensor_parallel_size=self.tp,
            context_parallel_size=self.cp,
            pipeline_parallel_size=self.pp,
            expert_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
        )


def names_of_families() -> dict[str, str]:
    """Return a name in `CONFIGS` of each family."""
    names: dict[str, str] = {}
    for name, (kind, _) in CONFIGS.items():
        names.setdefault(kind.model_type, name)
    return names


def _cells() -> Iterator[tuple[int, int, str, str]]:
    """Yield each family with the classes of layout that differ for it, and the numbers of both."""
    for row, (family, name) in enumerate(names_of_families().items()):
        has_experts = any("expert" in key for key in CONFIGS[name][1])
        for column, (kind, sizes) in enumerate(CLASSES.items()):
            layout = Layout(**sizes)
            if has_experts and layout.tp > 1 and not layout.sp:
                continue  # refused: experts train with a split sequence alone
            if layout.ep > 1 and layout.pp == 1 and not has_experts:
                continue
            yield row, column, family, kind


CELLS = tuple(_cells())


def model_of(family: str) -> ModelConfig:
    """Return a small network of a family."""
    config = as_written(make_config(names_of_families()[family]))
    table = next(each for each in FAMILIES if each.name == family)
    model = replace(table.model(config), kda_num_heads=4, linear_num_key_heads=4, linear_num_value_heads=4)
    if model.num_experts is None:
        return model
    return replace(
        model,
        num_experts=8,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        moe_aux_loss_coeff=(0.1, 0.1, 0.1),
        moe_z_loss_coeff=0.1,
    )


def micro_batch(model: ModelConfig, layout: Layout) -> MicroBatch:
    """Return a rank's part of two samples. A token's experts are on one rank, and all are chosen equally often: then
    other ranks would send as many tokens as this one sends."""
    text = torch.randint(model.vocab_size or 1, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    cut = SequenceLayout.cut(SEQUENCE, zigzag(layout.cp), 0)
    tokens, labels = (cut.own(each) for each in (text[:, :-1], text[:, 1:]))
    positions = cut.own(torch.arange(SEQUENCE).expand(2, -1))
    mask = torch.ones(tokens.shape, dtype=torch.float64)
    replayed = None
    if model.num_experts:
        routers = sum(layer.feed_forward == "moe" for layer in model.all_layers)
        numbers = torch.arange(tokens.numel()).view(-1, 2).t()[:, :, None, None]
        local, topk = model.num_experts // layout.ep, model.moe_router_topk
        of_rank = (numbers // layout.ep * topk + torch.arange(topk)) % local
        replayed = (numbers % layout.ep * local + of_rank).expand(-1, -1, routers, -1)
    return MicroBatch(tokens, positions, None, labels, mask, RandomKey(0, (0, 1)), cut, replayed=replayed)


def stages(model: ModelConfig, count: int) -> list[StageLayers]:
    """Cut the layers into stages, before layers that choose keys if they attend to chosen ones. Some may have none."""
    starts = [at for at, layer in enumerate(model.layers) if layer.mixer != "sparse_attention" or layer.chooses]
    cuts = [max(at for at in starts if at <= model.num_layers * stage // count) for stage in range(count)]
    borders = list(pairwise([*cuts, model.num_layers]))
    return [
        StageLayers(first, stop - first, embedding=stage == 0, loss=stage == count - 1)
        for stage, (first, stop) in enumerate(borders)
    ]


def step(model: ModelConfig, layout: Layout) -> None:
    """Run forward, backward and the sums of gradients of one rank of each stage of a pipeline, with types.

    Raises SpmdTypeError where they do not fit.
    """
    model = replace(model, moe_token_dispatcher_type=layout.dispatcher)
    batch = micro_batch(model, layout)
    arriving: Mapping[str, Tensor] = {}
    for number, layers in enumerate(stages(model, layout.pp)):
        mesh = layout.mesh(number * (WORLD // layout.pp))
        ends = (mesh.rank % (WORLD // layout.pp), WORLD - WORLD // layout.pp + mesh.rank % (WORLD // layout.pp))
        tied = model.shares_embedding and layout.pp > 1 and mesh.rank in ends
        network = GPT(
            model,
            mesh,
            stage_layers=layers,
            tied_ranks=ends if tied else None,
            sequence_parallel=layout.sp,
            dtype=torch.float64,
            loss=LossConfig(fused=layout.fused),
            attention_ways=(AttentionWay(layout.head_ranks, layout.gathers, layout.chains),),
        )
        initialize(network, 0)
        buckets = make_buckets([network], mesh, DataParallel(torch.float64, zero_stage=layout.zero))
        arriving = Checked(mesh).step(network, buckets, arriving, batch)
