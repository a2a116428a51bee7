"""The loss that is differentiated, and gradients: their sums over ranks, their norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from museum.plain.data import Batch
from museum.plain.network import EMBEDDING, HEAD, Stage, name_in_files
from museum.plain.ranks import Group, Ranks, all_sum
from museum.plain.tensor_parallel import Weight


def count_tokens(batches: list[Batch], ranks: Ranks) -> Tensor:
    """Return the number of tokens of the step that count in the loss, over all ranks."""
    total = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
    return all_sum(total, ranks.data)


def scale_loss(losses: Tensor, mask: Tensor, tokens: Tensor, ranks: Ranks) -> Tensor:
    """Return a micro-batch's term in the loss that is differentiated: the mean over the tokens of the step.

    Args:
        losses: of each token, [b, s].
        mask: which of them count, [b, s].
        tokens: how many count in the whole step.
    """
    return (losses * mask).sum() / tokens * data_factor(ranks)


def scale_auxiliary_loss(loss: Tensor, ranks: Ranks) -> Tensor:
    """Return a layer's balancing loss as a term of the loss: the mean over the micro-batches of the step."""
    settings = ranks.settings
    return loss * settings.auxiliary / (settings.micro_batches * settings.dp) * data_factor(ranks)


def data_factor(ranks: Ranks) -> float:
    """Return the factor of losses that undoes the average over ranks in `reduce_gradients`."""
    return float(ranks.data.size) if ranks.settings.average else 1.0


def synchronize_gradients(stage: Stage, ranks: Ranks) -> None:
    """Complete the gradients by the terms of other ranks."""
    sum_norm_gradients(stage, ranks)
    sum_router_gradients(stage, ranks)
    sum_head_norm_gradients(stage, ranks)
    sum_shared_key_value_gradients(stage, ranks)
    tied_gradients(stage, ranks)
    reduce_gradients(stage, ranks)
    reduce_expert_gradients(stage, ranks)


def sum_norm_gradients(stage: Stage, ranks: Ranks) -> None:
    """Sum gradients of norms over tensor-parallel ranks, each of which sees its tokens under sequence parallelism."""
    if ranks.settings.sp:
        _sum_gradients(stage, lambda name: name.endswith(("layernorm.weight", "model.norm.weight")), ranks.tp)


def sum_router_gradients(stage: Stage, ranks: Ranks) -> None:
    """Sum gradients of routers over tensor-parallel ranks, each of which sees its tokens under sequence parallelism."""
    if ranks.settings.sp:
        _sum_gradients(stage, lambda name: name.endswith("block_sparse_moe.gate.weight"), ranks.tp)


def sum_head_norm_gradients(stage: Stage, ranks: Ranks) -> None:
    """Norms of queries and keys see only this rank's heads: sum over tensor-parallel ranks.

    A key-value head that several ranks have is no exception: each has the gradient of its own queries.
    """
    _sum_gradients(stage, lambda name: name.endswith(("q_norm.weight", "k_norm.weight")), ranks.tp)


def sum_shared_key_value_gradients(stage: Stage, ranks: Ranks) -> None:
    """Sum over the tensor-parallel ranks with the same key-value head."""
    if ranks.tp.size > ranks.settings.key_value_heads:
        _sum_gradients(stage, lambda name: name.endswith(("k_proj.weight", "v_proj.weight")), ranks.key_value)


def tied_gradients(stage: Stage, ranks: Ranks) -> None:
    """Sum the gradients of a tied embedding over the first and the last stage."""
    if ranks.settings.tied and ranks.pp.size > 1:
        _sum_gradients(stage, lambda name: name in (EMBEDDING, HEAD), ranks.tied)


def _sum_gradients(stage: Stage, chosen: Callable[[str], bool], group: Group) -> None:
    for name, parameter in stage.weights():
        if chosen(name):
            parameter.main_grad = all_sum(parameter.main_grad, group)


def reduce_gradients(stage: Stage, ranks: Ranks) -> None:
    """Sum or average the gradients over the ranks that have seen other tokens: dp x cp."""
    for _, parameter in stage.weights():
        if not parameter.part.is_expert:
            parameter.main_grad = all_sum(parameter.main_grad, ranks.data) / data_factor(ranks)


def reduce_expert_gradients(stage: Stage, ranks: Ranks) -> None:
    """Sum the gradients of experts over the ranks that have them; each has seen the tokens of its group.

    An average is over dp x cp here, too, as the losses are of so many ranks.
    """
    for _, parameter in stage.weights():
        if parameter.part.is_expert:
            parameter.main_grad = all_sum(parameter.main_grad, ranks.edp) / data_factor(ranks)


def counts_in_norm(name: str, parameter: Weight, ranks: Ranks) -> bool:
    """Tell whether this rank adds a weight to the norm of the gradient: each element counts on one rank."""
    part = parameter.part
    copies = [ranks.edp if part.is_expert else ranks.data]
    if part.range is None:
        copies.append(ranks.tp)
    elif part.shares_heads:
        copies.append(ranks.key_value)
    is_copy = name_in_files(name, ranks.settings) != name
    return not is_copy and all(group.index == 0 for group in copies)


def gradient_norm(stage: Stage, ranks: Ranks) -> float:
    """Return the norm of the gradient of the whole model."""
    squares = torch.zeros((), dtype=torch.float64)
    for name, parameter in stage.weights():
        if counts_in_norm(name, parameter, ranks):
            squares += parameter.main_grad.double().square().sum()
    return float(all_sum(squares, ranks.world).sqrt())


def reported_loss(total: Tensor, batches: list[Batch], ranks: Ranks) -> float:
    """Return the mean loss of the tokens of the step, from the sum of this rank's."""
    counts_here = ranks.is_last and ranks.tp.index == 0
    everywhere = all_sum(total if counts_here else torch.zeros_like(total), ranks.world)
    return float(everywhere / count_tokens(batches, ranks))
