"""Names of the tensors of a GPT in Megatron-LM, and the logical tensors in each of them.

The names are those of megatron-core with Transformer Engine, including the number of the layer. Distributed checkpoints
use these names for every implementation. `canonical` translates the names of all other versions.
"""

from __future__ import annotations

import re

from megalite.config import ModelConfig
from megalite.conversion.mapping import ATTENTION_OUTPUT, DOWN, UP, MappedBox, Rule, linear, norm, table

WORD = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
TOKEN_TABLES = (WORD, OUTPUT)
"""Tensors with one row per token. They may have further rows that pad the vocabulary."""
_ATTENTION, _MLP = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mlp."
_GATE_UP = "(two ffn) hidden -> two ffn hidden", "(two ffn) -> two ffn"


def _query_key_value(suffix: str = "") -> Rule:
    """Return the rule of the fused matrix: per group its query heads, its key and its value."""

    def pieces(model: ModelConfig) -> tuple[MappedBox, ...]:
        heads = model.num_attention_heads // model.kv_groups
        queries = (
            MappedBox(f"attention.query{suffix}", (group, slice(heads)), (group * heads,))
            for group in range(model.kv_groups)
        )
        return (*queries, MappedBox(f"attention.key_value{suffix}", (slice(None), slice(heads, None))))

    name, hidden = _ATTENTION + "linear_qkv.", "" if suffix else " hidden"
    groups = "groups heads_and_two width"
    return Rule(f"{name}{'bias' if suffix else 'weight'}", f"({groups}){hidden} -> {groups}{hidden}", pieces)


RULES: tuple[Rule, ...] = (
    table(WORD, "vocabulary", "embedding.word"),
    table("embedding.position_embeddings.weight", "positions", "embedding.position"),
    *norm(_ATTENTION + "linear_qkv.layer_norm", "input_norm", joint="_"),
    _query_key_value(),
    _query_key_value("_bias"),
    *norm(_ATTENTION + "q_layernorm", "attention.query_norm", "width"),
    *norm(_ATTENTION + "k_layernorm", "attention.key_norm", "width"),
    *linear(_ATTENTION + "linear_proj", ATTENTION_OUTPUT, MappedBox("attention.output")),
    *norm(_MLP + "linear_fc1.layer_norm", "mlp_norm", joint="_"),
    *linear(_MLP + "linear_fc1", _GATE_UP, MappedBox("mlp.gate_up")),
    *linear(_MLP + "linear_fc1", UP, MappedBox("mlp.up")),
    *linear(_MLP + "linear_fc2", DOWN, MappedBox("mlp.down")),
    *norm("decoder.final_layernorm", "final_norm"),
    table(OUTPUT, "vocabulary", "output"),
)

_OTHER_NAMES = (  # names of older versions, and without Transformer Engine; replaced in this order
    (r"^language_model\.", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"\.attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.input_(layer)?norm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.(pre_mlp_layernorm|post_attention_(layer)?norm)\.", ".mlp.linear_fc1.layer_norm_"),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"^word_embeddings_for_head\.", "output_layer."),
)
_NO_WEIGHT = re.compile(r".*(\._extra_state(/.*)?|inv_freq)")


def canonical(name: str) -> str:
    """Return the canonical name for a tensor's name of any version. The number of the layer stays unchanged."""
    for pattern, replacement in _OTHER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def is_weight(name: str) -> bool:
    """Return whether a tensor with this name is a weight and not only a buffer."""
    return _NO_WEIGHT.fullmatch(name) is None
