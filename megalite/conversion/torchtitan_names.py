"""Names of the tensors of a network in torchtitan, and the logical tensors in each of them.

They are those of torchtitan's Llama 3, Qwen3, DeepSeek-V3 and gpt-oss, as versions 0.1 and 0.2 have them; its Llama's
are also those of Meta's own files. `canonical` translates the names of 0.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from megalite.config import ModelConfig
from megalite.conversion.mapping import (
    ATTENTION_OUTPUT,
    QUERY,
    FileTensor,
    MappedBox,
    Rule,
    file_tensors,
    linear,
    norm,
)
from megalite.conversion.prediction_layers import rules_of_depths
from megalite.conversion.recurrent_rules import norms
from megalite.conversion.shared_rules import KEY_OR_VALUE, ends, gated, gated_mlp
from megalite.errors import CheckpointError

WORD, HEAD = "tok_embeddings.weight", "output.weight"
EXPERT_BIAS = "moe.expert_bias"
"""End of the name of a bias of the choice of experts. All models of version 0.3 have it, unless they turn it off."""
BUFFERS = r"freqs_cis|.*\.(rope\.cache|tokens_per_expert)"
"""Pattern for the canonical names of tensors that are not weights."""
_LAYER = "layers.{layer}."
_ATTENTION, _MOE = _LAYER + "attention.", _LAYER + "moe."
_GATE_UP_DOWN = ("w1", "w3", "w2")
_OTHER_NAMES = (  # names of version 0.3
    (r"^lm_head\.", "output."),
    (r"\.attention\.qkv_linear\.", ".attention."),
    (r"\.moe\.routed_experts\.inner_experts\.", ".moe.experts."),
    (r"(\.moe\..*)_[A-Z]{1,3}$", r"\1"),  # letters for the axes
)


def canonical(name: str, model: ModelConfig) -> str:
    """Return the canonical name for a tensor's name of any version. Depths follow the layers, as the rules have it."""
    for pattern, replacement in _OTHER_NAMES:
        name = re.sub(pattern, replacement, name)
    depth = re.match(r"mtp_layers\.(\d{1,6})\.", name)
    return name if depth is None else f"layers.{model.num_layers + int(depth[1])}.{name[depth.end() :]}"


def _in_halves() -> tuple[Rule, ...]:
    """Return the rules for queries and keys of which channel i is rotated with i + half, as in megalite."""
    return (
        *linear(_ATTENTION + "wq", QUERY, MappedBox("attention.query")),
        *linear(_ATTENTION + "wk", KEY_OR_VALUE, MappedBox("attention.key_value", offset=(0, 0))),
    )


def _in_pairs() -> tuple[Rule, ...]:
    """Return the rules for queries and keys of which channel 2i is rotated with 2i + 1. Here it is i, with i + half."""

    def pieces(tensor: str, axes: int, model: ModelConfig) -> tuple[MappedBox, ...]:
        starts = (0,) * axes
        return tuple(MappedBox(tensor, (half,), (*starts, half * (model.head_dim // 2))) for half in (0, 1))

    return (
        Rule(
            _ATTENTION + "wq.weight",
            "(heads half_width two) hidden -> two heads half_width hidden",
            partial(pieces, "attention.query", 1),
        ),
        Rule(
            _ATTENTION + "wk.weight",
            "(groups half_width two) hidden -> two groups 1 half_width hidden",
            partial(pieces, "attention.key_value", 2),
        ),
    )


def _latent_attention() -> tuple[Rule, ...]:
    """Return the rules for attention over latents, of whose queries there may be a latent."""
    matrices = {
        "wq": ("(heads query_width) hidden -> heads query_width hidden", "query"),
        "wq_a": ("query_rank hidden -> query_rank hidden", "query_down"),
        "wq_b": ("(heads query_width) query_rank -> heads query_width query_rank", "query_up"),
        "wkv_a": ("latent_rows hidden -> latent_rows hidden", "key_value_down"),
        "wkv_b": ("(heads key_and_value) latent_rank -> heads key_and_value latent_rank", "key_value_up"),
        "wo": ("hidden (heads latent_value) -> hidden heads latent_value", "output"),
    }
    return (
        *(
            Rule(f"{_ATTENTION}{name}.weight", pattern, (MappedBox(f"latent_attention.{part}"),))
            for name, (pattern, part) in matrices.items()
        ),
        *norm(_ATTENTION + "q_norm", "latent_attention.query_norm", "query_rank"),
        *norm(_ATTENTION + "kv_norm", "latent_attention.key_value_norm", "latent_rank"),
    )


_DOWN = "experts hidden expert_ffn -> experts hidden expert_ffn"


def _experts() -> tuple[Rule, ...]:
    """Return the rules for the experts of a layer, of which each tensor has all."""
    gate_or_up = "experts expert_ffn hidden -> experts 1 expert_ffn hidden"
    return (
        Rule(_MOE + "experts.w1", gate_or_up, (MappedBox("moe.gate_up", offset=(0, 0)),)),
        Rule(_MOE + "experts.w3", gate_or_up, (MappedBox("moe.gate_up", offset=(0, 1)),)),
        Rule(_MOE + "experts.w2", _DOWN, (MappedBox("moe.down"),)),
    )


def _experts_with_biases() -> tuple[Rule, ...]:
    """Return the rules for the experts of gpt-oss, whose gates and ups are in turn in one tensor."""
    in_turn = "experts (expert_ffn two){0} -> experts two expert_ffn{0}"
    return (
        Rule(_MOE + "experts.mlp1_weight", in_turn.format(" hidden"), (MappedBox("moe.gate_up"),)),
        Rule(_MOE + "experts.mlp1_bias", in_turn.format(""), (MappedBox("moe.gate_up_bias"),)),
        Rule(_MOE + "experts.mlp2_weight", _DOWN, (MappedBox("moe.down"),)),
        Rule(_MOE + "experts.mlp2_bias", "experts hidden -> experts hidden", (MappedBox("moe.down_bias"),)),
    )


_RULES = (
    *ends(WORD, "norm", HEAD),
    *norms(_LAYER + "attention_norm", "input_norm", "latent_attention_norm"),
    *norm(_LAYER + "ffn_norm", "mlp_norm"),
    *linear(_ATTENTION + "wv", KEY_OR_VALUE, MappedBox("attention.key_value", offset=(0, 1))),
    *linear(_ATTENTION + "wo", ATTENTION_OUTPUT, MappedBox("attention.output")),
    *norm(_ATTENTION + "q_norm", "attention.query_norm", "width"),
    *norm(_ATTENTION + "k_norm", "attention.key_norm", "width"),
    Rule(_ATTENTION + "sinks", "heads -> heads", (MappedBox("attention.sink"),)),
    *_latent_attention(),
    *gated_mlp(_LAYER + "feed_forward", _GATE_UP_DOWN),
    *linear(_MOE + "router.gate", ("experts hidden -> experts hidden", "experts -> experts"), MappedBox("moe.router")),
    Rule(f"{_LAYER}{EXPERT_BIAS}", "experts -> experts", (MappedBox("state/moe.expert_bias"),)),
    *gated(_MOE + "shared_experts", "moe.shared", "shared_ffn", _GATE_UP_DOWN),
    *rules_of_depths(_LAYER),
    *norm(_LAYER + "mtp_norm", "final_norm"),
)


def torchtitan_tensors(model: ModelConfig, logical: Mapping[str, tuple[int, ...]]) -> list[FileTensor]:
    """Return the tensors of a network's files. `logical`: shapes of its logical tensors, by name.

    Raises CheckpointError if torchtitan has no such network.
    """
    llama = not (model.qk_layernorm or model.add_bias_linear or model.add_qkv_bias)
    if model.rotary_percent != 1.0 or (model.rotary_interleaved and not llama):
        raise CheckpointError("it rotates whole heads, and adjacent channels in its Llama alone")
    if model.qk_layernorm_over_heads:
        raise CheckpointError("its norms of queries and keys are of each head")
    rotated = _in_pairs() if llama and not model.rotary_interleaved else _in_halves()
    experts = _experts_with_biases() if model.add_bias_linear else _experts()
    return file_tensors((*_RULES, *rotated, *experts), model, logical)
