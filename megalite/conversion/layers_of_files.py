"""Layers as files have them: one or two halves of megalite's layers in each, whatever their kinds."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config import ModelConfig
from megalite.config.layer_specs import LayerSpec, numbers_in_names
from megalite.model.layer_kinds import LAYER_KINDS

_MODULES = {"dense": "mlp", "sparse_attention": "latent_attention"}
"""Words in names for the modules of kinds, where a kind's own name is not the word."""
_OF_DEPTH = ("embedding_norm", "hidden_norm", "projection", "final_norm")
"""Words in names for what a depth of multi-token prediction has beside its layers."""


def begins_by_layer(model: ModelConfig, halves: int) -> list[dict[str, str]]:
    """Return, for each layer of files, the begins of the names of its tensors, by the word after the begin.

    Layers of depths of multi-token prediction follow those of the network, the first of each with the depth's norms.

    `halves`: number of halves of a layer of the files: 2 (a mixer and a feed-forward layer), or 1 (either).
    """
    depths = [(f"mtp.{depth}", model.depth_layers) for depth in range(model.own_depths)]
    found = _begins("layers", model.layers, halves)
    for depth, layers in depths:
        first, *others = _begins(f"{depth}.layers", layers, halves)
        found += [first | dict.fromkeys(_OF_DEPTH, depth), *others]
    return found


def _begins(where: str, layers: Sequence[LayerSpec], halves: int) -> list[dict[str, str]]:
    """Return the begins for layers that are numbered together. `where`: what stands before their numbers."""
    found: list[dict[str, str]] = []
    place = 0
    for spec, numbers in zip(layers, numbers_in_names(layers), strict=True):
        for kind, number in zip((spec.mixer, spec.feed_forward), numbers, strict=True):
            if kind is None or number is None:
                continue
            if place % halves == 0:
                found.append({})
            place += 1
            row = LAYER_KINDS[kind]
            found[-1] |= dict.fromkeys((_MODULES.get(kind, kind), row.norm, row.output_norm), f"{where}.{number}")
    return found


def mixer_axis_lengths(model: ModelConfig) -> dict[str, int]:
    """Return the length of each axis of the weights of recurrent layers, latent attention and indexers, by name."""
    heads, width, groups, state = (
        model.mamba_heads,
        model.mamba_head_dim,
        model.mamba_num_groups,
        model.mamba_state_dim,
    )
    channels = heads * width + 2 * groups * state
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    key_width, value_width = model.linear_key_head_dim, model.linear_value_head_dim
    return {
        "channels": model.hidden_size,
        "short_taps": model.short_conv_kernel_dim,
        "mamba_heads": heads,
        "mamba_width": width,
        "mamba_groups": groups,
        "mamba_state": state,
        "mamba_channels": channels,
        "mamba_rows": heads * width + channels + heads,
        "mamba_taps": model.mamba_conv_kernel_dim,
        "key_heads": keys,
        "key_width": key_width,
        "value_heads": values,
        "value_width": value_width,
        "delta_channels": 2 * keys * key_width + values * value_width,
        "delta_taps": model.linear_conv_kernel_dim,
        "values_by_key": values // keys,
        "rows_by_key": 2 * key_width + 2 * (values // keys) * value_width,
        "gates_by_key": 2 * (values // keys),
        "kimi_heads": model.kda_num_heads,
        "kimi_width": model.kda_head_dim,
        "kimi_rank": model.kda_head_dim,
        "kimi_channels": 3 * model.kda_num_heads * model.kda_head_dim,
        "kimi_taps": model.kda_conv_kernel_dim,
        "query_rank": model.q_lora_rank or 0,
        "latent_rank": model.kv_lora_rank,
        "latent_rows": model.kv_lora_rank + model.qk_pos_emb_head_dim,
        "query_width": model.qk_head_dim + model.qk_pos_emb_head_dim,
        "key_and_value": model.qk_head_dim + model.v_head_dim,
        "latent_value": model.v_head_dim,
        "index_heads": model.dsa_indexer_n_heads or 0,
        "index_width": model.dsa_indexer_head_dim or 0,
        "index_input": model.q_lora_rank or model.hidden_size,
    }
