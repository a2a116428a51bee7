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
    """Return the rule of the fused matrix: per group its query heads, their gates if any, its key and its value."""

    def pieces(model: ModelConfig) -> tuple[MappedBox, ...]:
        heads = model.num_attention_heads // model.kv_groups
        parts = ["query", "gate"] if model.attention_output_gate else ["query"]
        of_heads = (
            MappedBox(f"attention.{part}{suffix}", (group, slice(at * heads, (at + 1) * heads)), (group * heads,))
            for at, part in enumerate(parts)
            for group in range(model.kv_groups)
        )
        rest = slice(len(parts) * heads, None)
        return (*of_heads, MappedBox(f"attention.key_value{suffix}", (slice(None), rest)))

    name, hidden = _ATTENTION + "linear_qkv.", "" if suffix else " hidden"
    groups = "groups of_group width"
    return Rule(f"{name}{'bias' if suffix else 'weight'}", f"({groups}){hidden} -> {groups}{hidden}", pieces)


def _experts() -> tuple[Rule, ...]:
    """Return the rules of a layer with experts: the router, all experts in one tensor, and shared experts."""
    experts, shared = _MLP + "experts.experts.linear_fc", _MLP + "shared_experts."
    rules = (
        (_MLP + "router.weight", "experts hidden -> experts hidden", "moe.router"),
        (_MLP + "router.expert_bias", "experts -> experts", "state/moe.expert_bias"),
        (experts + "1.weight", "experts (two expert_ffn) hidden -> experts two expert_ffn hidden", "moe.gate_up"),
        (experts + "1.weight", "experts expert_ffn hidden -> experts expert_ffn hidden", "moe.up"),
        (experts + "2.weight", "experts hidden expert_ffn -> experts hidden expert_ffn", "moe.down"),
        (shared + "linear_fc1.weight", "(two shared_ffn) hidden -> two shared_ffn hidden", "moe.shared.gate_up"),
        (shared + "linear_fc1.weight", "shared_ffn hidden -> shared_ffn hidden", "moe.shared.up"),
        (shared + "linear_fc2.weight", "hidden shared_ffn -> hidden shared_ffn", "moe.shared.down"),
        (shared + "gate_weight", "one hidden -> one hidden", "moe.shared_gate"),
    )
    return tuple(Rule(file, pattern, (MappedBox(tensor),)) for file, pattern, tensor in rules)


RULES: tuple[Rule, ...] = (
    table(WORD, "vocabulary", "embedding.word"),
    table("embedding.position_embeddings.weight", "positions", "embedding.position"),
    *norm(_ATTENTION + "linear_qkv.layer_norm", "input_norm", joint="_"),
    _query_key_value(),
    _query_key_value("_bias"),
    *norm(_ATTENTION + "q_layernorm", "attention.query_norm", "width"),
    *norm(_ATTENTION + "k_layernorm", "attention.key_norm", "width"),
    Rule(_ATTENTION + "core_attention.softmax_offset", "heads -> heads", (MappedBox("attention.sink"),)),
    *linear(_ATTENTION + "linear_proj", ATTENTION_OUTPUT, MappedBox("attention.output")),
    *norm(_MLP + "linear_fc1.layer_norm", "mlp_norm", joint="_"),
    *linear(_MLP + "linear_fc1", _GATE_UP, MappedBox("mlp.gate_up")),
    *linear(_MLP + "linear_fc1", UP, MappedBox("mlp.up")),
    *linear(_MLP + "linear_fc2", DOWN, MappedBox("mlp.down")),
    *_experts(),
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
_NORM_OF_EXPERTS = re.compile(r"(decoder\.layers\.(\d+)\.)mlp\.linear_fc1\.layer_norm_(weight|bias)")
_NO_WEIGHT = re.compile(r".*(\._extra_state(/.*)?|inv_freq)")


def canonical(name: str) -> str:
    """Return the canonical name for a tensor's name of any version. The number of the layer stays unchanged."""
    for pattern, replacement in _OTHER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def written(name: str, model: ModelConfig) -> str:
    """Return the name under which Megatron-LM with Transformer Engine expects a tensor.

    The norm before experts is not fused with their first matrix.
    """
    norm_of_experts = _NORM_OF_EXPERTS.fullmatch(name)
    if norm_of_experts is None or model.layers[int(norm_of_experts[2])].feed_forward == "dense":
        return name
    return f"{norm_of_experts[1]}pre_mlp_layernorm.{norm_of_experts[3]}"


def is_weight(name: str) -> bool:
    """Return whether a tensor with this name is a weight and not only a buffer."""
    return _NO_WEIGHT.fullmatch(name) is None
