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
    reason = deep_ep.why_unavailable(model.expert_hidden_size, choices, dtype, mesh.device)
    reasons = collectives.all_gather_json(reason, mesh)
    lacking = [f"on rank {rank}, {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if not lacking:
        return model, ()
    note = f"note: --moe-token-dispatcher-type flex is alltoall in this run, with the same results: {lacking[0]}"
    return replace(model, moe_token_dispatcher_type="alltoall"), (note,)


def expert_loads(chunks: Iterable[GPT], layers: int, mesh: ParallelMesh) -> dict[str, float]:
    """Return the figures of the last step that updated the weights. Called by all ranks of a pipeline together.

    Args:
        layers: number of layers of the full model, with those of depths.
    """
    numbers = torch.zeros(layers, 4, dtype=torch.float64, device=mesh.device)
    for chunk in chunks:
        for number, block in chunk.numbered_layers():
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
    """Return a note if ranks that share experts are on several nodes. All ranks call it, and get the same."""
    names: list[str] = collectives.all_gather_json(host_name(), mesh)
    groups = collectives.all_gather_json([mesh.ranks("ep", "etp"), mesh.ranks("etp")], mesh)
    nodes = [[len({names[rank] for rank in group}) for group in each] for each in groups]
    most, most_of_one = (max(numbers) for numbers in zip(*nodes, strict=True))
    if most == 1:
        return ()
    ep, etp = mesh.size("ep"), mesh.size("etp")
    if most_of_one > 1:
        advice = f"each expert is on up to {most_of_one}: a smaller --expert-tensor-parallel-size keeps it on one"
    else:
        advice = "a smaller --expert-model-parallel-size keeps them on one"
    return (
        f"note: the ranks that share experts (EP {ep} x ETP {etp}) are on up to {most} nodes, so tokens travel between "
        f"nodes in each layer; {advice}",
    )
