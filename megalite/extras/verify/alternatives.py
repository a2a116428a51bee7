"""Other networks and other batches that a program may have computed by mistake, each with a name for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.config.activations import ACTIVATIONS, FLAGS
from megalite.extras.verify.cuts import tokens_of
from megalite.model.attention import Attention
from megalite.model.attention_core import LocalCore
from megalite.model.batch import MicroBatch, first_visible
from megalite.model.gpt import GPT
from megalite.model.norm import LayerNorm
from megalite.model.router import Router
from megalite.parallel.linear import RowParallelLinear
from megalite_kernels.attention import dense_mask


def _unchanged(network: GPT) -> None:
    pass


@dataclass(frozen=True)
class Alternative:
    """Another computation of a stage.

    Attributes:
        kind: the class of mistakes: mask, position, epsilon, activation, scale, layout, precision, missing.
        text: what the program would have done.
        fields: fields of the network that differ.
        batch: makes another micro-batch of the right one.
        change: changes the stage before it runs.
    """

    kind: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[MicroBatch], MicroBatch] | None = None
    change: Callable[[GPT], None] = _unchanged


def alternatives(model: ModelConfig, batch: MicroBatch) -> Iterator[Alternative]:
    """Yield what a program may have computed instead of this network on this micro-batch."""
    yield from _positions(model, batch)
    yield from _masks(model, batch)
    yield from _networks(model)
    yield from _weights(model)


def _positions(model: ModelConfig, batch: MicroBatch) -> Iterator[Alternative]:
    """Yield other positions of the tokens."""
    if not model.rotary and model.position_embedding_type != "learned_absolute":
        return
    for shift in (1, -1):
        yield Alternative(
            "position",
            f"positions are {abs(shift)} too {'high' if shift > 0 else 'low'}",
            batch=partial(_with_positions, change=partial(_shifted, by=shift)),
        )
    places = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    if torch.equal(places, batch.positions):
        if batch.first_keys is not None:
            yield Alternative(
                "position",
                "positions begin anew in each document",
                batch=lambda each: replace(each, positions=each.positions - _starts(each)),
            )
    else:
        yield Alternative(
            "position",
            "positions go on over the ends of documents",
            batch=lambda each: replace(each, positions=places),
        )
    yield Alternative(
        "position",
        "every token has position 0",
        batch=lambda each: replace(each, positions=torch.zeros_like(each.positions)),
    )
    length = batch.tokens.shape[1]
    for ranks in (2, 4, 8):
        if length % ranks == 0 and length >= 2 * ranks:
            yield Alternative(
                "position",
                f"each of {ranks} ranks counts the positions of its own part from 0",
                batch=partial(_with_positions, change=partial(torch.remainder, other=length // ranks)),
            )
        if length % (2 * ranks) == 0:
            yield Alternative(
                "position",
                f"each of {ranks} context-parallel ranks counts the positions of its two chunks from 0 on",
                batch=partial(_with_positions, change=partial(_counted_in_chunks, ranks=ranks)),
            )


def _with_positions(batch: MicroBatch, change: Callable[[Tensor], Tensor]) -> MicroBatch:
    return replace(batch, positions=change(batch.positions))


def _shifted(positions: Tensor, by: int) -> Tensor:
    return (positions + by).clamp(min=0)


def _counted_in_chunks(positions: Tensor, ranks: int) -> Tensor:
    """Return the places of tokens among those of their context-parallel rank, which has a chunk from each end."""
    length = positions.shape[-1]
    found = torch.empty(length, dtype=positions.dtype)
    for rank in range(ranks):
        found[tokens_of((rank, ranks), length)] = torch.arange(length // ranks, dtype=positions.dtype)
    return found.expand_as(positions)


def _starts(batch: MicroBatch) -> Tensor:
    assert batch.first_keys is not None
    return batch.first_keys


def _masks(model: ModelConfig, batch: MicroBatch) -> Iterator[Alternative]:
    """Yield other keys that the tokens attend to."""
    if batch.first_keys is not None:
        yield Alternative(
            "mask",
            "tokens attend to other documents",
            batch=lambda each: replace(each, first_keys=None, bounds=type(each.bounds)()),
        )
    for text, make in (
        ("attention is not causal", lambda mask: torch.ones_like(mask)),
        ("tokens attend to the one after them", lambda mask: mask | mask.roll(-1, -2)),
        ("tokens do not attend to themselves", _without_self),
    ):
        yield Alternative("mask", text, change=partial(_with_masks, make=make))
    if (size := model.window_size) is not None:
        yield Alternative("mask", "there is no sliding window", {"window_size": None, "window_attn_skip_freq": None})
        before = int(str(size).strip("()").split(",")[0])
        for shift in (1, -1):
            yield Alternative(
                "mask", f"the window has {before + shift} keys before its own", {"window_size": f"{before + shift},0"}
            )


def _without_self(mask: Tensor) -> Tensor:
    found = mask & ~torch.eye(mask.shape[-1], dtype=torch.bool)
    found[..., 0, 0] = True  # the first token has no other
    return found


def _with_masks(network: GPT, make: Callable[[Tensor], Tensor]) -> None:
    """Have a stage use masks that are made from the right ones, [batch or 1, 1, queries, keys] bool."""

    def whole(micro_batch: MicroBatch, window: int | None) -> Tensor:
        first = first_visible(micro_batch, window)
        return make(dense_mask(first).expand(len(micro_batch.tokens), -1, -1, -1).clone())

    network._whole_mask = whole  # type: ignore[method-assign]


def _activations(model: ModelConfig) -> Iterator[Alternative]:
    for other in ACTIVATIONS:
        if other.gated == model.activation.gated and other != model.activation:
            fields = {flag: flag in other.flags for flag in FLAGS}
            name = other.name.replace("_", " ")
            yield Alternative("activation", f"the activation is {name} instead of {model.activation.name}", fields)


def _networks(model: ModelConfig) -> Iterator[Alternative]:
    """Yield networks with another value of a flag."""
    yield from _activations(model)
    for epsilon in [10.0**-power for power in range(1, 13)]:
        if epsilon != model.norm_epsilon:
            yield Alternative(
                "epsilon", f"norms add {epsilon:g} instead of {model.norm_epsilon:g}", {"norm_epsilon": epsilon}
            )
    if model.rotary:
        yield Alternative(
            "layout",
            "rotary embeddings rotate neighbouring channels instead of halves"
            if not model.rotary_interleaved
            else "rotary embeddings rotate halves instead of neighbouring channels",
            {"rotary_interleaved": not model.rotary_interleaved},
        )
        yield Alternative("position", "queries and keys are not rotated", {"no_rope_freq": _all_layers(model)})
        if model.position_embedding_type == "yarn":
            yield Alternative(
                "position", "angles and scores are those without YaRN", {"position_embedding_type": "rope"}
            )
        if model.use_rope_scaling:
            yield Alternative("position", "rotary frequencies are not scaled", {"use_rope_scaling": False})
        if model.rotary_seq_len_interpolation_factor not in (None, 1.0):
            yield Alternative(
                "position", "rotary angles are not interpolated", {"rotary_seq_len_interpolation_factor": None}
            )
        for base in (10_000.0, 500_000.0, 1_000_000.0):
            if base != model.rotary_base:
                yield Alternative("position", f"the rotary base is {base:g}", {"rotary_base": base})
        if model.rotary_percent < 1.0:
            yield Alternative("position", "all channels are rotated", {"rotary_percent": 1.0})
    if model.apply_layernorm_1p:
        yield Alternative("scale", "norms take their weights as they are, not plus 1", {"apply_layernorm_1p": False})
    elif not model.qk_layernorm:
        yield Alternative("scale", "norms add 1 to their weights", {"apply_layernorm_1p": True})
    if model.qk_layernorm:
        yield Alternative("missing", "queries and keys are not normalised", {"qk_layernorm": False})
    if model.attn_logit_softcapping is not None:
        yield Alternative("missing", "scores of attention are not capped", {"attn_logit_softcapping": None})
    if model.final_logit_softcapping is not None:
        yield Alternative("missing", "logits are not capped", {"final_logit_softcapping": None})
    if model.normalization == "RMSNorm":
        yield Alternative("missing", "norms subtract the mean, too", change=_centred_norms)
    for name, text in (
        ("residual_multiplier", "the multiplier of residual branches is left out"),
        ("embedding_multiplier", "the multiplier of embeddings is left out"),
        ("logits_scaling", "logits are not scaled"),
    ):
        if getattr(model, name) != 1.0:
            yield Alternative("scale", text, {name: 1.0})
    if model.num_experts is not None:
        yield from _routers(model)


def _routers(model: ModelConfig) -> Iterator[Alternative]:
    """Yield other rules of routers."""
    before = model.moe_router_pre_softmax
    yield Alternative(
        "scale",
        "routers take the softmax after the choice" if before else "routers take the softmax before the choice",
        {"moe_router_pre_softmax": not before},
    )
    if model.moe_router_topk_scaling_factor not in (None, 1.0):
        yield Alternative("scale", "weights of experts are not scaled", {"moe_router_topk_scaling_factor": None})
    if model.moe_router_enable_expert_bias:
        yield Alternative("missing", "routers choose without the bias of experts", change=_without_expert_bias)
    yield Alternative("missing", "routers get no gradient from the weights of experts", change=_detached_weights)
    for count in (model.moe_router_topk - 1, model.moe_router_topk + 1):
        if 1 <= count <= (model.num_experts or 0):
            yield Alternative("missing", f"routers choose {count} experts", {"moe_router_topk": count})


def _detached_weights(network: GPT) -> None:
    for module in network.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, found: found._replace(weights=found.weights.detach()))


def _without_expert_bias(network: GPT) -> None:
    for name, buffer in network.named_buffers():
        if name.endswith("expert_bias"):
            buffer.zero_()


def _centred_norms(network: GPT) -> None:
    for module in network.modules():
        if isinstance(module, LayerNorm):
            module.register_forward_pre_hook(_centre)


def _centre(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    first, *rest = arguments
    if not rest or rest[0] is None:
        return (first - first.mean(-1, keepdim=True), *rest)
    total = first + rest[0]  # the residual keeps the mean, which this alternative does not look at
    return (total - total.mean(-1, keepdim=True), torch.zeros_like(total))


def _all_layers(model: ModelConfig) -> str:
    return str([1] * model.num_layers)


def _weights(model: ModelConfig) -> Iterator[Alternative]:
    """Yield stages with changed weights or scales: no biases, gate and value exchanged, another scale of scores."""
    if model.add_bias_linear or model.add_qkv_bias:
        yield Alternative("missing", "biases are left out", change=_without_biases)
        for ranks in (2, 4, 8):
            yield Alternative(
                "sum",
                f"biases of row-parallel layers are added {ranks} times, once by each rank",
                change=partial(_added, ranks),
            )
    if model.activation.gated:
        yield Alternative("layout", "gate and value are exchanged", change=_exchanged)
    for power, text in (
        (0.0, "are not scaled"),
        (1.0, "are divided by the width"),
        (0.25, "are divided by its 4th root"),
    ):
        yield Alternative("scale", f"scores of attention {text}", change=partial(_rescale, power=power))


def _added(ranks: int, network: GPT) -> None:
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, RowParallelLinear) and module.bias is not None:
                module.bias.mul_(ranks)


def _without_biases(network: GPT) -> None:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "bias" in name:
                parameter.zero_()


def _exchanged(network: GPT) -> None:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".mlp.up.weights.0" in name:
                parameter.copy_(torch.cat(parameter.chunk(2, 0)[::-1]))


def _rescale(network: GPT, power: float) -> None:
    """Scale the scores by 1 / width ** power."""
    for module in network.modules():
        if isinstance(module, Attention) and isinstance(module.core, LocalCore):
            module.core = replace(module.core, scale=module.head_dim**-power)
