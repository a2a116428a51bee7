"""Names of a GPT's tensors in Megatron-LM, and the logical tensors in each.

Names are those of megatron-core with Transformer Engine, with the number of the layer in them; its distributed
checkpoints have these names whichever implementation the run used. `canonical` translates names of every generation.
"""

from __future__ import annotations

import re

from megalite.config import ModelConfig
from megalite.conversion.mapping import MappedBox, Rule

WORD = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
TOKEN_TABLES = (WORD, OUTPUT)
"""Tensors with one row per token, and with rows that pad the vocabulary."""
_LAYER = "decoder.layers.{layer}."


def _query_key_value(suffix: str = "") -> Rule:
    """Return the rule of the fused matrix: for each group its query heads, its key and its value."""

    def pieces(model: ModelConfig) -> tuple[MappedBox, ...]:
        heads = model.num_attention_heads // model.kv_groups
        queries = (
            MappedBox(f"attention.query{suffix}", (group, slice(heads)), (group * heads,))
            for group in range(model.kv_groups)
        )
        return (*queries, MappedBox(f"attention.key_value{suffix}", (slice(None), slice(heads, None))))

    name, hidden = _LAYER + "self_attention.linear_qkv.", "" if suffix else " hidden"
    groups = "groups heads_and_two width"
    return Rule(f"{name}{'bias' if suffix else 'weight'}", f"({groups}){hidden} -> {groups}{hidden}", pieces)


def _norm(file: str, tensor: str, axis: str = "hidden", joint: str = ".") -> tuple[Rule, Rule]:
    weight, bias = (
        Rule(f"{file}{joint}{part}", f"{axis} -> {axis}", (MappedBox(f"{tensor}.{part}"),))
        for part in ("weight", "bias")
    )
    return weight, bias


def _rule(file: str, pattern: str, tensor: str) -> Rule:
    return Rule(file, pattern, (MappedBox(tensor),))


_ATTENTION, _MLP = _LAYER + "self_attention.", _LAYER + "mlp."

RULES: tuple[Rule, ...] = (
    _rule(WORD, "vocabulary hidden -> vocabulary hidden", "embedding.word"),
    _rule("embedding.position_embeddings.weight", "positions hidden -> positions hidden", "embedding.position"),
    *_norm(_ATTENTION + "linear_qkv.layer_norm", "input_norm", joint="_"),
    _query_key_value(),
    _query_key_value("_bias"),
    *_norm(_ATTENTION + "q_layernorm", "attention.query_norm", "width"),
    *_norm(_ATTENTION + "k_layernorm", "attention.key_norm", "width"),
    _rule(_ATTENTION + "linear_proj.weight", "hidden (heads width) -> hidden heads width", "attention.output"),
    _rule(_ATTENTION + "linear_proj.bias", "hidden -> hidden", "attention.output_bias"),
    *_norm(_MLP + "linear_fc1.layer_norm", "mlp_norm", joint="_"),
    _rule(_MLP + "linear_fc1.weight", "(two ffn) hidden -> two ffn hidden", "mlp.gate_up"),
    _rule(_MLP + "linear_fc1.bias", "(two ffn) -> two ffn", "mlp.gate_up_bias"),
    _rule(_MLP + "linear_fc1.weight", "ffn hidden -> ffn hidden", "mlp.up"),
    _rule(_MLP + "linear_fc1.bias", "ffn -> ffn", "mlp.up_bias"),
    _rule(_MLP + "linear_fc2.weight", "hidden ffn -> hidden ffn", "mlp.down"),
    _rule(_MLP + "linear_fc2.bias", "hidden -> hidden", "mlp.down_bias"),
    *_norm("decoder.final_layernorm", "final_norm"),
    _rule(OUTPUT, "vocabulary hidden -> vocabulary hidden", "output"),
)

_OTHER_NAMES = (  # older ones, and those without Transformer Engine; in this order
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
    """Return this table's name for a tensor's name of any generation; the layer's number stays as it is."""
    for pattern, replacement in _OTHER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def is_weight(name: str) -> bool:
    """Tell whether a tensor of this name is a weight, not just a buffer."""
    return _NO_WEIGHT.fullmatch(name) is None
