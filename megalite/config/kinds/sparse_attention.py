"""Sparse attention: costs and rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.config.fields import named, needs, with_defaults
from megalite.config.kinds.kind import Kind, Split, in_pattern
from megalite.config.kinds.latent_attention import latent_problems, latent_weights, latent_widths
from megalite.config.layer_specs import LATENT_LETTER, SPARSE_LETTER
from megalite.config.model import ModelConfig

_SIZES = "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk"


def without_indexers(model: ModelConfig) -> ModelConfig:
    """Return the network that attends to all keys: with latent attention in place of sparse attention."""
    if "sparse_attention" not in model.kinds:
        return model
    variant = ["experimental_attention_variant"] if model.experimental_attention_variant == "dsa" else []
    dense: ModelConfig = with_defaults(model, [*named(model, "dsa_*"), *variant])
    patterns = {name: getattr(model, name) for name in ("hybrid_layer_pattern", "mtp_hybrid_override_pattern")}
    given = {name: letters for name, letters in patterns.items() if letters is not None}
    return replace(dense, **{name: text.replace(SPARSE_LETTER, LATENT_LETTER) for name, text in given.items()})


def _indexer_weights(model: ModelConfig) -> int:
    """Count the matrices of an indexer: to its queries, its key and the weights of its heads."""
    heads, width = model.dsa_indexer_n_heads or 0, model.dsa_indexer_head_dim or 0
    return (model.q_lora_rank or model.hidden_size) * heads * width + model.hidden_size * (width + heads)


def _weights(model: ModelConfig) -> int:
    return latent_weights(model) + _indexer_weights(model)


def _products_without_indexer(model: ModelConfig, seen: float) -> float:
    """Sum those of attention to the chosen keys."""
    length, topk = 2 * seen, model.dsa_indexer_topk or 0
    sparse = topk < length and model.dsa_stage != "warmup"
    attended = topk - topk * topk / (2 * length) if sparse else seen
    widths = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    return latent_weights(model) + model.num_attention_heads * widths * attended


def _products(model: ModelConfig, seen: float) -> float:
    """Sum those of attention to the chosen keys, and those of the indexer with all keys that a token sees.

    Those of the indexer count as often as they are computed in a step, of which the result is a third, or all of it
    where the rest of the network has no backward.
    """
    heads, width = model.dsa_indexer_n_heads or 0, model.dsa_indexer_head_dim or 0
    of_indexer = _indexer_weights(model) + heads * (width + 1) * seen
    times = (3 if model.trains_indexers else 1) / (1 if model.trains_indexers_alone else 3)
    return _products_without_indexer(model, seen) + times * of_indexer


def _needed(model: ModelConfig) -> str | None:
    if model.hybrid_layer_pattern is not None:
        return in_pattern("sparse attention", SPARSE_LETTER)
    if model.experimental_attention_variant == "dsa":  # which says itself what it needs
        return None
    return "--multi-latent-attention and --experimental-attention-variant dsa"


def _problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each option of sparse attention that contradicts another."""
    if "latent_attention" not in model.kinds:  # whose rules are the same
        yield from latent_problems(model)
    for name in _SIZES.split():
        if getattr(model, name) is None:
            yield f"sparse attention needs --{name.replace('_', '-')}"
    width, rotated = model.dsa_indexer_head_dim, model.qk_pos_emb_head_dim
    if model.rotary and width is not None and width < rotated:
        yield f"--dsa-indexer-head-dim {width} is less than --qk-pos-emb-head-dim {rotated}, its rotated channels"
    if not model.dsa_indexer_loss_coeff:
        names = "dsa_stage dsa_indexer_use_sparse_loss"
        yield from needs(model, names, "--dsa-indexer-loss-coeff above 0: without it indexers are not trained")
    elif model.dsa_stage == "warmup":
        dense = "--dsa-stage sparse or indexer: in the warm-up attention is to all keys, and so is the loss"
        yield from needs(model, "dsa_indexer_use_sparse_loss", dense)
    if model.dsa_indexer_topk_freq == 1:
        yield from needs(model, "dsa_indexer_skip_topk_offset", "--dsa-indexer-topk-freq above 1")


SPARSE_ATTENTION = Kind(
    _weights,
    _products,
    "dsa_*",
    _needed,
    _problems,
    lambda model: [Split("attention heads", model.num_attention_heads, "--num-attention-heads")],
    latent_widths,
)
WITHOUT_INDEXER = replace(SPARSE_ATTENTION, weights=latent_weights, products=_products_without_indexer)
"""Costs of a layer that attends to the keys which another one has chosen."""
