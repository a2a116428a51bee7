"""Expected results of a cell of the layout matrix: the oracle's training of the same weights, and the comparisons."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.sharding import Box
from tests.distributed.layout_cell import (
    ADAPTERS_OF_ORACLE,
    CLIP_ALPHA,
    Cell,
    batch,
    depths,
    dropout,
    loss_terms,
    network,
    optimizer_config,
    oracle,
    rates,
)
from tests.distributed.layout_run import SEED, Held, RankResult, run_cells
from tests.experts_oracle import Record
from tests.harness.close import (
    assert_bits_equal,
    assert_gradient_close,
    assert_number_close,
    assert_parameter_close,
)
from tests.harness.rank_pool import RankPools
from tests.muon import Muon, matrices
from tests.oracle import Routing, loss_sum_and_count
from tests.qk_clip import Array, clip
from tests.rounding_oracle import RoundedLinears, Rule
from tests.rules import RULES, ByHand

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Result:
    """Result of a cell's run, with unsharded tensors."""

    initial: Tensors
    gradients: Tensors
    final: Tensors
    losses: list[float]
    gradient_norms: list[float]
    skipped: list[bool]
    sample_losses: dict[int, Tensor]
    states: Tensors
    means: Tensors
    figures: dict[str, float]


def run(rank_pools: RankPools, cells: Sequence[Cell]) -> list[Result]:
    """Run cells of one world size."""
    (world_size,) = {cell.world_size for cell in cells}
    by_rank = on_ranks(rank_pools, world_size, run_cells, cells)
    return [result_of(cell, ranks) for cell, ranks in zip(cells, zip(*by_rank, strict=True), strict=True)]


def run_each(rank_pools: RankPools, cells: Sequence[Cell]) -> list[Result]:
    """Run cells of any world sizes, those of one size in one call."""
    results: dict[int, Result] = {}
    for size in sorted({cell.world_size for cell in cells}):
        numbers = [number for number, cell in enumerate(cells) if cell.world_size == size]
        results |= dict(zip(numbers, run(rank_pools, [cells[number] for number in numbers]), strict=True))
    return [results[number] for number in range(len(cells))]


def on_ranks(rank_pools: RankPools, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `function` on each rank of a pool; if the world size is 1, of this process."""
    if world_size > 1:
        return rank_pools(world_size).run(function, *arguments)
    with one_thread():
        return [function(*arguments)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, as the ranks of a pool do: a second one only spins on tensors of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def result_of(cell: Cell, ranks: Sequence[RankResult]) -> Result:
    """Merge the results of all ranks, which must agree."""
    first = ranks[0]
    for rank in ranks[1:]:
        assert rank.losses == first.losses, f"{cell}: ranks report different losses"
        assert rank.gradient_norms == first.gradient_norms or any(first.skipped), f"{cell}: different norms"
        assert rank.skipped == first.skipped, f"{cell}: some ranks skip a step, others do not"
        assert rank.figures == first.figures or any(first.skipped), f"{cell}: ranks report different figures"
    return Result(
        initial=assemble(rank.initial for rank in ranks),
        gradients=assemble(rank.gradients for rank in ranks),
        final=assemble(rank.final for rank in ranks),
        losses=first.losses,
        gradient_norms=first.gradient_norms,
        skipped=first.skipped,
        sample_losses={sample: loss for rank in ranks for sample, loss in rank.sample_losses.items()},
        states=assemble(rank.states for rank in ranks),
        means=assemble(rank.means for rank in ranks),
        figures=first.figures,
    )


def assemble(ranks: Iterable[list[Held]]) -> Tensors:
    """Return unsharded tensors by logical name.

    Boxes must tile each of them, and all replicas of a box must have the same bits.
    """
    boxes: dict[tuple[str, Box], Held] = {}
    for part in (part for rank in ranks for part in rank):
        first = boxes.setdefault((part.name, part.box), part)
        assert part.digest == first.digest, f"{part.name} at {part.box} differs between its replicas"
    whole: Tensors = {}
    filled: dict[str, Tensor] = {}
    for (name, box), part in boxes.items():
        assert part.values is not None
        tensor = whole.setdefault(name, torch.zeros(part.shape, dtype=part.values.dtype))
        count = filled.setdefault(name, torch.zeros(part.shape, dtype=torch.int8))
        tensor[box.slices()] = part.values
        count[box.slices()] += 1
    for name, count in filled.items():
        assert (count == 1).all(), f"{name} is not tiled by the ranks' boxes"
    return whole


@dataclass(frozen=True)
class Expected:
    """Result of the oracle's training."""

    initial: Tensors
    gradients: Tensors
    """Gradients of the first step, after clipping."""
    final: Tensors
    losses: list[float]
    gradient_norms: list[float]
    states: Tensors
    means: Tensors
    """Means of the weights after the last step, if the cell has them."""
    largest: list[dict[str, Array]]
    """Largest logits of each step, [heads] by the begin of the names of a layer's weights."""


@functools.cache
@one_thread()
def expected(alone: Cell) -> Expected:
    """Return the oracle's training from the initial weights of every layout; `alone` is a `Cell.alone()`."""
    initial = network(alone).weights(SEED, alone.torch_dtype, noise=0.2)
    adapters = ADAPTERS_OF_ORACLE.get(alone.adapters or "")
    if adapters is not None:
        initial |= adapters.initial(initial, SEED, alone.torch_dtype, noise=0.2)
    indexing = oracle(alone).indexing
    weights = {name: value.clone() for name, value in initial.items()}
    trained = {name: each for name, each in weights.items() if indexing is None or indexing.trains(name)}
    trained = trained if adapters is None else {name: each for name, each in trained.items() if ".lora_" in name}
    for each in trained.values():
        each.requires_grad_()
    optimizers = torch_optimizers(alone, trained)
    losses, norms, gradients = [], [], {}
    states: Tensors = {}
    decay = alone.ema_decay
    means = {} if decay is None else {name: weight.detach().clone() for name, weight in trained.items()}
    largest: list[dict[str, Array]] = []
    wide = torch.promote_types(alone.torch_dtype, torch.float32)
    for step in alone.step_numbers:
        whole = batch(alone, step)
        fields = (whole.tokens, whole.positions, whole.document_ids)
        biases = {name.removesuffix("expert_bias"): bias for name, bias in states.items() if "expert_bias" in name}
        offsets = {name.removesuffix("quantile_offset"): each for name, each in states.items() if "offset" in name}
        routing = Routing(biases, whole.padding, offsets=offsets)
        dropped = dropout(alone, step, SEED)
        largest.append({})
        model = replace(oracle(alone), largest=largest[-1], unnoted=whole.padding)
        used = weights if adapters is None else adapters.merged(weights)
        rule = None
        if alone.recipe is not None:
            each = alone.recipe, alone.hybrid, alone.rounds_weight_gradients, alone.plain_layers
            rule = RoundedLinears(used, Rule(*each, alone.stores_activations))
        with nullcontext() if rule is None else rule:
            normed = model.normed(used, *fields, dropped, routing)
        logits = model.logits_of(used, normed)
        total, count = loss_sum_and_count(logits, whole.labels, whole.loss_mask, **loss_terms(alone))
        text = torch.cat([whole.tokens, whole.labels[:, -1:]], dim=1)
        shared = (whole.positions, whole.document_ids, whole.loss_mask, dropped, routing)
        further = depths(alone).losses(model, used, normed, text, *shared, **loss_terms(alone))
        loss = total / count.clamp(min=1.0) + sum(further)
        experts = oracle(alone).experts
        if experts is not None:
            loads = [states.get(f"{name}previous_load", _even(record)) for name, record in routing.records.items()]
            loss = loss + experts.loss(routing.records.values(), alone.micro_batch_size, loads)
            for name, record in routing.records.items():
                if experts.bias_rate:
                    bias = biases.get(name, torch.zeros(record.logits.shape[-1], dtype=wide))
                    states[f"{name}expert_bias"] = experts.next_bias(bias, record)
                if experts.quantile_ema is not None:
                    offset = offsets.get(name, torch.zeros(record.logits.shape[-1], dtype=wide))
                    states[f"{name}quantile_offset"] = experts.next_offset(offset, record)
                if "global_aux_loss" in experts.losses:
                    counts = record.by_score.sum((0, 1))
                    states[f"{name}previous_load"] = (counts / counts.sum()).to(wide).detach()
        if indexing is not None and indexing.coefficient:
            queries = whole.tokens.numel() if whole.padding is None else (~whole.padding).sum()
            loss = loss + indexing.coefficient * sum(routing.choices.divergences) / queries
        for weight in trained.values():
            weight.grad = None
        loss.backward()
        norm = torch.cat([_gradient(weight).flatten() for weight in trained.values()]).norm().item()
        if alone.clip_grad:
            for weight in trained.values():
                _gradient(weight).mul_(min(1.0, alone.clip_grad / (norm + 1e-6)))
        if step == alone.first_step:
            gradients = {name: _gradient(weight).clone() for name, weight in trained.items()}
        now = rates(alone, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = now.token_table_learning_rate if group["table"] else now.learning_rate
                group["weight_decay"] = 0.0 if group["free"] else now.weight_decay
            optimizer.step()
        if alone.qk_clip is not None:
            clip(weights, largest[-1], alone.qk_clip, CLIP_ALPHA)
        means = {name: mean * decay + trained[name].detach() * (1 - decay) for name, mean in means.items()}
        losses.append(loss.item())
        norms.append(norm)
    final = {name: weight.detach() for name, weight in weights.items()}
    return Expected(initial, gradients, final, losses, norms, states, means, largest)


def _even(record: Record) -> Tensor:
    experts = record.logits.shape[-1]
    return torch.full((experts,), 1 / experts)


def torch_optimizers(cell: Cell, weights: Tensors) -> list[torch.optim.Optimizer]:
    """Return optimizers with weight decay on everything except biases and norms, and a separate rate for the token
    tables."""
    config = optimizer_config(cell)
    groups = [
        {
            "params": [weight],
            "free": group_of(name) == "vectors",
            "table": group_of(name) == "token_tables",
            "name": name,
        }
        for name, weight in weights.items()
    ]
    if cell.optimizer == "sgd":
        return [torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum)]
    if cell.optimizer in RULES:
        return [ByHand(groups, RULES[cell.optimizer])]
    whole = [
        group
        for group in groups
        if cell.optimizer == "muon" and matrices(group["name"], group["params"][0]) is not None
    ]
    rest = [group for group in groups if all(group is not other for other in whole)]
    betas = (config.adam_beta1, config.adam_beta2)
    adam = torch.optim.AdamW(rest, lr=0.0, betas=betas, eps=config.adam_eps)
    if not whole:
        return [adam]
    return [
        adam,
        Muon(whole, config.muon_momentum, nesterov=config.muon_nesterov, per_head=cell.per_head, fused=cell.fused_qkv),
    ]


def group_of(name: str) -> str:
    """Return the group of parameters that the tensor of this name belongs to."""
    if name in ("embedding.word", "output"):
        return "token_tables"
    return "vectors" if name.endswith(("bias", "magnitude", "sink", "A_log", ".D")) or "norm" in name else "weights"


def norms_by_group(tensors: Tensors) -> dict[str, float]:
    groups: dict[str, list[float]] = {"weights": [], "vectors": [], "token_tables": []}
    for name, tensor in tensors.items():
        groups[group_of(name)].append(tensor.norm().item())
    return {group: math.hypot(*norms) for group, norms in groups.items()}


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def assert_as_expected(cell: Cell, result: Result) -> None:
    """Assert I1 to I7 for one cell; the message names the cell."""
    wanted = expected(cell.alone())
    try:
        _assert_as_expected(cell, result, wanted)
    except AssertionError as error:
        raise AssertionError(f"[{cell}] {error}") from None


def _assert_as_expected(cell: Cell, result: Result, wanted: Expected) -> None:
    names, trained = set(wanted.initial), set(wanted.gradients)
    assert set(result.initial) == set(result.final) == names
    assert set(result.gradients) == trained
    assert ("output" in names) is not cell.tied
    assert not any(result.skipped)
    for name in names:
        assert_bits_equal(result.initial[name], wanted.initial[name], f"initial {name}")
    assert_number_close(result.losses[0], wanted.losses[0], "loss")
    assert_number_close(result.gradient_norms[0], wanted.gradient_norms[0], "gradient norm")
    for name in trained:
        actual, gradient = result.gradients[name], wanted.gradients[name]
        assert_gradient_close(actual, gradient, wanted.gradient_norms[0], f"gradient of {name}")
    assert set(result.states) == set(wanted.states)
    for name, values in wanted.states.items():
        assert_bits_equal(result.states[name], values, name)
    assert set(result.means) == set(wanted.means)
    norm = wanted.gradient_norms[0]
    clipping = min(1.0, cell.clip_grad / (norm + 1e-6)) if cell.clip_grad else 1.0
    for group, expected in norms_by_group(wanted.gradients).items():
        assert_number_close(result.figures[f"gradient {group}"], expected / clipping, f"gradient norm of {group}")
    for group, expected in norms_by_group({name: result.final[name] for name in trained}).items():
        assert_number_close(result.figures[f"parameter {group}"], expected, f"norm of {group}")
    if cell.qk_clip is not None or cell.logs_logits:
        found = max(logits.max() for logits in wanted.largest[-1].values())
        assert_number_close(result.figures["largest logit"], float(found), "largest logit")
    zeros = sum(gradient.numel() - int(gradient.count_nonzero()) for gradient in result.gradients.values())
    assert result.figures["zeros"] == zeros, "zeros in the gradient"
    for step in range(1, cell.steps):
        assert_number_close(result.losses[step], wanted.losses[step], f"loss {step} steps later")
        assert_number_close(result.gradient_norms[step], wanted.gradient_norms[step], f"norm {step} steps later")
    for name in names:
        rate = rates(cell, 0).learning_rate
        assert_parameter_close(result.final[name], wanted.final[name], rate, f"{name} after {cell.steps} steps")
        if name in wanted.means:
            assert_parameter_close(result.means[name], wanted.means[name], rate, f"mean of {name}")


def assert_same_bits(actual: Result, expected: Result, name: str) -> None:
    """Assert the same bits of losses, gradients, norms, figures of the parameters, and final weights."""
    assert actual.losses == expected.losses, name
    assert actual.gradient_norms == expected.gradient_norms, name
    assert actual.figures == expected.figures, name
    for kind in ("gradients", "final", "means"):
        for tensor, value in getattr(expected, kind).items():
            assert_bits_equal(getattr(actual, kind)[tensor], value, f"{name}: {kind} of {tensor}")
