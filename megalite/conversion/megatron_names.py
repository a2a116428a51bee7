"""Names of the tensors of a network in Megatron-LM, and the logical tensors in each of them.

The names are those of megatron-core with Transformer Engine, including the number of the layer. Distributed checkpoints
use these names for every implementation. `canonical` translates the names of all other versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megalite.config import ModelConfig
from megalite.config.layer_specs import KINDS_WITH_LATENTS
from megalite.conversion.mapping import ATTENTION_OUTPUT, DOWN, UP, MappedBox, Rule, linear, norm, table

WORD = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
TOKEN_TABLES = (WORD, OUTPUT)
"""Tensors with one row per token. They may have further rows that pad the vocabulary."""
_ATTENTION, _MLP = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mlp."
_MAMBA = "decoder.layers.{layer}.mixer."
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
        (_MLP + "router.qb_beta", "experts -> experts", "state/moe.quantile_offset"),
        (
            experts + "1.weight",
            "experts (two expert_ffn) expert_hidden -> experts two expert_ffn expert_hidden",
            "moe.gate_up",
        ),
        (experts + "1.weight", "experts expert_ffn expert_hidden -> experts expert_ffn expert_hidden", "moe.up"),
        (experts + "2.weight", "experts expert_hidden expert_ffn -> experts expert_hidden expert_ffn", "moe.down"),
        (shared + "linear_fc1.weight", "(two shared_ffn) hidden -> two shared_ffn hidden", "moe.shared.gate_up"),
        (shared + "linear_fc1.weight", "shared_ffn hidden -> shared_ffn hidden", "moe.shared.up"),
        (shared + "linear_fc2.weight", "hidden shared_ffn -> hidden shared_ffn", "moe.shared.down"),
        (_MLP + "fc1_latent_proj.weight", "expert_hidden hidden -> expert_hidden hidden", "moe.latent_down"),
        (_MLP + "fc2_latent_proj.weight", "hidden expert_hidden -> hidden expert_hidden", "moe.latent_up"),
        (shared + "gate_weight", "one hidden -> one hidden", "moe.shared_gate"),
    )
    return tuple(Rule(file, pattern, (MappedBox(tensor),)) for file, pattern, tensor in rules)


def _parts(file: str, last: str, of_tensor: str, parts: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules of a matrix of which each part is stored by itself. `parts`: axes of their rows, by name."""
    return tuple(
        Rule(f"{file}.{part}", f"({axes}) {last} -> {axes} ({last})", (MappedBox(of_tensor.format(part)),))
        for part, axes in parts.items()
    )


def _mamba() -> tuple[Rule, ...]:
    """Return the rules of a Mamba-2 layer."""
    heads, groups = "mamba_heads mamba_width", "mamba_groups mamba_state"
    convolved = {"x": heads, "B": groups, "C": groups}
    vectors = (
        *((_MAMBA + part, "mamba_heads", f"mamba.{part}") for part in ("dt_bias", "A_log", "D")),
        *((f"{_MAMBA}conv1d.bias.{part}", axes, f"mamba.conv_{part}_bias") for part, axes in convolved.items()),
        (_MAMBA + "norm.weight", heads, "mamba.norm.weight"),
    )
    return (
        *norm(_MAMBA + "in_proj.layer_norm", "mamba_norm", joint="_"),
        *_parts(_MAMBA + "in_proj.weight", "hidden", "mamba.{}", {"z": heads, **convolved, "dt": "mamba_heads"}),
        *_parts(_MAMBA + "conv1d.weight", "one mamba_taps", "mamba.conv_{}", convolved),
        *(Rule(file, f"({axes}) -> {axes}", (MappedBox(tensor),)) for file, axes, tensor in vectors),
        Rule(_MAMBA + "out_proj.weight", f"hidden ({heads}) -> hidden {heads}", (MappedBox("mamba.output"),)),
    )


def _gated_delta() -> tuple[Rule, ...]:
    """Return the rules of a gated delta net."""
    keys, values, heads = "key_heads key_width", "value_heads value_width", "value_heads"
    convolved = {"query": keys, "key": keys, "value": values}
    vectors = (
        ("dt_bias", heads, "dt_bias"),
        ("A_log", heads, "A_log"),
        ("out_norm.weight", "value_width", "norm.weight"),
    )
    return (
        *norm(_ATTENTION + "linear_qkv.layer_norm", "gated_delta_norm", joint="_"),
        *_parts(
            _ATTENTION + "in_proj.weight",
            "hidden",
            "gated_delta.{}",
            {**convolved, "z": values, "beta": heads, "alpha": heads},
        ),
        *_parts(_ATTENTION + "conv1d.weight", "one delta_taps", "gated_delta.conv_{}", convolved),
        *(
            Rule(_ATTENTION + file, f"{axes} -> {axes}", (MappedBox(f"gated_delta.{part}"),))
            for file, axes, part in vectors
        ),
        Rule(
            _ATTENTION + "out_proj.weight",
            f"hidden ({values}) -> hidden {values}",
            (MappedBox("gated_delta.output"),),
        ),
    )


def _latent_attention() -> tuple[Rule, ...]:
    """Return the rules of attention over latents. A head's rows follow each other, of both parts of it."""
    matrices = {
        "linear_q_proj": ("heads query_width", "hidden", "query"),
        "linear_q_down_proj": ("query_rank", "hidden", "query_down"),
        "linear_q_up_proj": ("heads query_width", "query_rank", "query_up"),
        "linear_kv_down_proj": ("latent_rows", "hidden", "key_value_down"),
        "linear_kv_up_proj": ("heads key_and_value", "latent_rank", "key_value_up"),
    }
    output = "hidden (heads latent_value) -> hidden heads latent_value", "hidden -> hidden"
    return (
        *norm(_ATTENTION + "linear_qkv.layer_norm", "latent_attention_norm", joint="_"),
        *norm(_ATTENTION + "q_layernorm", "latent_attention.query_norm", "query_rank"),
        *norm(_ATTENTION + "kv_layernorm", "latent_attention.key_value_norm", "latent_rank"),
        *(
            Rule(
                f"{_ATTENTION}{file}.weight",
                f"({rows}) {columns} -> {rows} {columns}",
                (MappedBox(f"latent_attention.{part}"),),
            )
            for file, (rows, columns, part) in matrices.items()
        ),
        *linear(_ATTENTION + "linear_proj", output, MappedBox("latent_attention.output")),
    )


def _indexer() -> tuple[Rule, ...]:
    """Return the rules of the indexer of sparse attention."""
    matrices = {
        "linear_wq_b": ("index_heads index_width", "index_input", "query"),
        "linear_wk": ("index_width", "hidden", "key"),
        "linear_weights_proj": ("index_heads", "hidden", "weights"),
    }
    begin, ours = _ATTENTION + "core_attention.indexer.", "latent_attention.indexer."
    return (
        *(
            Rule(f"{begin}{file}.weight", f"({rows}) {columns} -> {rows} {columns}", (MappedBox(ours + part),))
            for file, (rows, columns, part) in matrices.items()
        ),
        *norm(f"{begin}k_norm", f"{ours}key_norm", "index_width"),
    )


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
    *_mamba(),
    *_gated_delta(),
    *_latent_attention(),
    *_indexer(),
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
    (r"\.self_attention\.in_proj\.layer_norm_", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.linear_(q|kv)_up_proj\.layer_norm_", r".\1_layernorm."),
    (r"(\.layers\.\d+)\.norm\.", r"\1.mixer.in_proj.layer_norm_"),
    (r"\.(pre_mlp_layernorm|post_attention_(layer)?norm)\.", ".mlp.linear_fc1.layer_norm_"),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"^(mtp\.layers\.\d+\.)transformer_layer\.", r"\1mtp_model_layer."),
)
_NORM = re.compile(
    r"((?:decoder|mtp\.layers\.\d+\.(?:mtp_model|transformer)_layer)\.(?:layers\.(\d+)\.)?)"
    r"(mlp\.linear_fc1|self_attention\.linear_qkv)\.layer_norm_(weight|bias)"
)
_LATENT_NORM = re.compile(r"\.(q|kv)_layernorm\.")
_NO_WEIGHT = re.compile(r".*(\._extra_state(/.*)?|inv_freq)")


def canonical(name: str) -> str:
    """Return the canonical name for a tensor's name of any version. The number of the layer stays unchanged."""
    for pattern, replacement in _OTHER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def written(name: str, model: ModelConfig) -> str:
    """Return the name under which Megatron-LM with Transformer Engine expects a tensor.

    The norm before experts is not fused with their first matrix, nor that before attention over latents, whose norms
    are fused with the matrices that read them unless it is sparse. That before a gated delta net is fused with its own.
    The norm after all layers, and the layers of depths, have other names if there is a pattern of layers.
    """
    if model.hybrid_layer_pattern is not None:
        name = name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    else:
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    if "latent_attention" in model.kinds:
        name = _LATENT_NORM.sub(r".linear_\1_up_proj.layer_norm_", name)
    if (found := _NORM.fullmatch(name)) is None:
        return name
    layer = (model.depth_layers if name.startswith("mtp.") else model.layers)[int(found[2] or 0)]
    if layer.feed_forward == "moe" and found[3].startswith("mlp"):
        return f"{found[1]}pre_mlp_layernorm.{found[4]}"
    if layer.mixer in KINDS_WITH_LATENTS and found[3].startswith("self_attention"):
        return f"{found[1]}input_layernorm.{found[4]}"
    if layer.mixer == "gated_delta" and found[3].startswith("self_attention"):
        return f"{found[1]}self_attention.in_proj.layer_norm_{found[4]}"
    return name


def is_weight(name: str) -> bool:
    """Return whether a tensor with this name is a weight and not only a buffer."""
    return _NO_WEIGHT.fullmatch(name) is None
