"""Weights and operations of each kind of layer, as numbers: what needs no torch to be known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    widths = (model.num_experts or 0) * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
    return model.activation.matrices * model.hidden_size * widths


def _experts_products(model: ModelConfig, seen: float) -> float:
    widths = model.moe_router_topk * model.expert_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
    router = (model.num_experts or 0) + model.moe_shared_expert_gate
    return model.hidden_size * (model.activation.matrices * widths + router)


LAYER_COSTS: Mapping[Mixer | FeedForward, LayerCost] = {
    "attention": LayerCost(_attention_weights, _attention_products),
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
