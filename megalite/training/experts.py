"""Experts of a run: how tokens reach them, their loads in a step, and a note if they are spread over nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from megalite.config import ModelConfig
from megalite.model.gpt import GPT
from megalite.model.moe import MoE
from megalite.parallel import collectives, deep_ep
from megalite.parallel.mesh import ParallelMesh
from megalite.process.host import host_name

MAX_LOAD, MIN_LOAD, DROPPED = "max_expert_load", "min_expert_load", "dropped_assignments"
"""Names of the figures: the largest and smallest number of tokens of an expert over the mean, by layer, and the share
of the choices that were dropped."""


def with_dispatcher(model: ModelConfig, dtype: torch.dtype, mesh: ParallelMesh) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return `model` with all-to-all instead of "flex" if any rank lacks DeepEP, and a note. All ranks call it."""
    if model.num_experts is None or model.moe_token_dispatcher_type != "flex":
        return model, ()
    choices = model.moe_router_topk * mesh.size("etp")
    reason = deep_ep.why_unavailable(model.hidden_size, choices, dtype, mesh.device)
    reasons = collectives.all_gather_json(reason, mesh)
    lacking = [f"on rank {rank}, {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if not lacking:
        return model, ()
    note = f"note: --moe-token-dispatcher-type flex is alltoall in this run, with the same results: {lacking[0]}"
    return replace(model, moe_token_dispatcher_type="alltoall"), (note,)


def expert_loads(chunks: Iterable[GPT], layers: int, mesh: ParallelMesh) -> dict[str, float]:
    """Return the figures of the last step that updated the weights. Called by all ranks of a pipeline together.

    Args:
        layers: number of layers of the full model.
    """
    numbers = torch.zeros(layers, 4, dtype=torch.float64, device=mesh.device)
    for chunk in chunks:
        for number, block in enumerate(chunk.layers, chunk.stage_layers.first_layer):
            if isinstance(block.mlp, MoE) and (load := block.mlp.router.load) is not None:
                counts, dropped = load[: block.mlp.router.num_experts], load[-1]
                numbers[number] = torch.stack(
                    [counts.max() * len(counts), counts.min() * len(counts), counts.sum(), dropped]
                )
    numbers = collectives.all_reduce_(numbers, mesh.group("pp")).cpu()
    figures = {}
    for number, (largest, smallest, kept, dropped) in enumerate(numbers.tolist()):
        if kept + dropped:
            figures[f"{MAX_LOAD}/layer_{number}"] = largest / max(kept, 1.0)
            figures[f"{MIN_LOAD}/layer_{number}"] = smallest / max(kept, 1.0)
    if figures:
        figures[DROPPED] = float(numbers[:, 3].sum() / numbers[:, 2:].sum())
    return figures


def node_notes(mesh: ParallelMesh) -> tuple[str, ...]:
    """Return a note if the ranks that share this rank's experts are on several nodes. They all call it."""
    nodes = set(collectives.all_gather_json(host_name(), mesh, "ep", "etp"))
    if len(nodes) == 1:
        return ()
    sizes = f"EP {mesh.size('ep')} x ETP {mesh.size('etp')}"
    return (
        f"note: the ranks that share experts ({sizes}) are on {len(nodes)} nodes, so tokens travel between nodes in "
        "each layer: a smaller --expert-model-parallel-size keeps them on one",
    )
