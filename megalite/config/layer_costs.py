"""Weights and operations of each kind of layer, as numbers: what needs no torch to be known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalite.config.layer_specs import FeedForward, Mixer
from megalite.config.model import ModelConfig
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class LayerCost:
    """Cost of a kind of layer.

    Attributes:
        weights: number of elements of its matrices.
        products: number of products of a forward for one token, each with an addition. The second argument is the
            number of keys that the token attends to.
    """

    weights: Callable[[ModelConfig], int]
    products: Callable[[ModelConfig, float], float]


def _attention_weights(model: ModelConfig) -> int:
    of_heads = 3 if model.attention_output_gate else 2  # queries, perhaps gates, and the output layer
    return model.hidden_size * (of_heads * model.num_attention_heads + 2 * model.kv_groups) * model.head_dim


def _attention_products(model: ModelConfig, seen: float) -> float:
    scores_and_context = 2 * model.num_attention_heads * model.head_dim * seen
    return _attention_weights(model) + scores_and_context


def _dense_weights(model: ModelConfig) -> int:
    return model.activation.matrices * model.hidden_size * model.ffn_size


def _experts_weights(model: ModelConfig) -> int:
    return _experts(model, model.num_experts or 0)


def _experts(model: ModelConfig, used: int) -> int:
    """Return the elements of so many experts, of the shared ones, and of the matrices around a latent width."""
    routed = used * model.expert_ffn_size * model.expert_hidden_size
    shared = (model.moe_shared_expert_intermediate_size or 0) * model.hidden_size
    return model.activation.matrices * (routed + shared) + 2 * (model.moe_latent_size or 0) * model.hidden_size


def _experts_products(model: ModelConfig, seen: float) -> float:
    router = (model.num_experts or 0) + model.moe_shared_expert_gate
    return _experts(model, model.moe_router_topk) + model.hidden_size * router


def _mamba_weights(model: ModelConfig) -> int:
    heads, inner = model.mamba_heads, model.mamba_heads * model.mamba_head_dim
    return model.hidden_size * (3 * inner + 2 * model.mamba_num_groups * model.mamba_state_dim + heads)


def _mamba_products(model: ModelConfig, seen: float) -> float:
    """Sum up: within a chunk, a token meets half of it on average; between chunks, each state twice."""
    heads, width, state = model.mamba_heads, model.mamba_head_dim, model.mamba_state_dim
    shared = model.mamba_num_groups * state
    met = min(model.mamba_chunk_size / 2, seen)
    convolution = model.mamba_conv_kernel_dim * (heads * width + 2 * shared)
    return _mamba_weights(model) + convolution + met * (shared + heads * width) + 2 * heads * width * state


def _delta_weights(model: ModelConfig) -> int:
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    return model.hidden_size * (2 * keys + 3 * values + 2 * model.linear_num_value_heads)


def _delta_products(model: ModelConfig, seen: float) -> float:
    """Sum as for Mamba-2, with products of keys with keys, of each head of keys, and the solution of a triangle."""
    heads, key, value = model.linear_num_value_heads, model.linear_key_head_dim, model.linear_value_head_dim
    met = min(model.linear_chunk_size / 2, seen)
    shared = model.linear_num_key_heads * key
    convolution = model.linear_conv_kernel_dim * (2 * shared + heads * value)
    within = met * (2 * shared + heads * (key + 2 * value))
    return _delta_weights(model) + convolution + within + 3 * heads * key * value


def _kimi_weights(model: ModelConfig) -> int:
    """Count the matrices of queries, keys, values and output, two each of decay and gate, and that of beta."""
    inner, rank = model.kda_num_heads * model.kda_head_dim, model.kda_head_dim
    return model.hidden_size * (4 * inner + 2 * rank + model.kda_num_heads) + 2 * rank * inner


def _kimi_products(model: ModelConfig, seen: float) -> float:
    """Count as for the gated delta net, though decays stand inside the products within a chunk."""
    inner, width = model.kda_num_heads * model.kda_head_dim, model.kda_head_dim
    within = 5 * min(model.kda_chunk_size / 2, seen) * inner
    return _kimi_weights(model) + 3 * model.kda_conv_kernel_dim * inner + within + 3 * inner * width


def _convolution_weights(model: ModelConfig) -> int:
    return 4 * model.hidden_size**2


def _convolution_products(model: ModelConfig, seen: float) -> float:
    """Count also the convolution, and for each channel the products with B and C."""
    return _convolution_weights(model) + (model.short_conv_kernel_dim + 2) * model.hidden_size


LAYER_COSTS: dict[Mixer | FeedForward, LayerCost] = {
    "attention": LayerCost(_attention_weights, _attention_products),
    "mamba": LayerCost(_mamba_weights, _mamba_products),
    "gated_delta": LayerCost(_delta_weights, _delta_products),
    "kimi_delta": LayerCost(_kimi_weights, _kimi_products),
    "short_convolution": LayerCost(_convolution_weights, _convolution_products),
    "dense": LayerCost(_dense_weights, lambda model, seen: _dense_weights(model)),
    "moe": LayerCost(_experts_weights, _experts_products),
}


def least_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of all matrices, without padding. An unknown vocabulary counts as 0.

    If the layers are not known, they count as attention with a dense feed-forward layer.
    """
    rows = (model.vocab_size or 0) * (2 if model.untie_embeddings_and_output_weights else 1)
    if model.position_embedding_type == "learned_absolute":
        rows += model.max_position_embeddings or 0
    try:
        kinds = [kind for layer in model.layers for kind in layer.kinds]
    except ConfigurationError:  # reported elsewhere
        kinds = ["attention", "dense"] * model.num_layers
    return model.hidden_size * rows + sum(kinds.count(kind) * cost.weights(model) for kind, cost in LAYER_COSTS.items())
