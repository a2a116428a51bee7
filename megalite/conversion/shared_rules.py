"""Rules and keys that families of Hugging Face models share."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.conversion.block_fp8 import quantization
from megalite.conversion.config_keys import fixed, key
from megalite.conversion.mapping import ATTENTION_OUTPUT, DOWN, QUERY, MappedBox, Rule, linear, norm, table

ATTENTION, MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
"""Prefixes of the tensors of a layer, as most families have them."""
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
KEY_OR_VALUE = "(groups width) hidden -> groups 1 width hidden", "(groups width) -> groups 1 width"
_GATE_OR_UP = "ffn hidden -> 1 ffn hidden", "ffn -> 1 ffn"

_UNUSED = {"is_encoder_decoder": False, "tie_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {}}
WITHOUT_BLOCKS = tuple(fixed(name, value, written=False) for name, value in ({"is_causal": True} | _UNUSED).items())
"""Keys of every family, also of one that has another quantization."""
OF_ALL = (*WITHOUT_BLOCKS, quantization())
"""Keys of every other family."""
WIDTHS = (
    key("vocab_size", "vocab_size"),
    key("hidden_size", "hidden_size"),
    key("num_attention_heads", "num_attention_heads"),
    key("max_position_embeddings", "max_position_embeddings"),
    key("initializer_range", "init_method_std", 0.02),
)
FFN = key("intermediate_size", "ffn_hidden_size", written="ffn_size")
SIZES = (key("num_hidden_layers", "num_layers"), FFN, *WIDTHS)
RMS_NORM = {"normalization": "RMSNorm", "hidden_dropout": 0.0}
WITHOUT_BIASES = RMS_NORM | {"add_bias_linear": False}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
"""Fields of experts that are chosen by the sigmoid of their scores, with a bias."""


def ends(word: str, final_norm: str, head: str) -> tuple[Rule, ...]:
    """Return the rules for the tensors before and after the layers."""
    embedding, output = table(word, "vocabulary", "embedding.word"), table(head, "vocabulary", "output")
    return (embedding, *norm(final_norm, "final_norm"), output)


def attention(
    block: str = ATTENTION, *, output: str = "o_proj", norms: str = "norm", over_heads: bool = False
) -> tuple[Rule, ...]:
    """Return the rules for the matrices of attention, and for the norms of queries and keys.

    `output`, `norms`: names of the output layer, and of the norms without q_ or k_. `over_heads`: these are over all
    heads together.
    """
    return (
        *linear(f"{block}.q_proj", QUERY, MappedBox("attention.query")),
        *attention_but_queries(block, output=output, norms=norms, over_heads=over_heads),
    )


def attention_but_queries(
    block: str, *, output: str = "o_proj", norms: str = "norm", over_heads: bool = False
) -> tuple[Rule, ...]:
    """Return these rules without that for the queries."""
    return (
        *linear(f"{block}.k_proj", KEY_OR_VALUE, MappedBox("attention.key_value", offset=(0, 0))),
        *linear(f"{block}.v_proj", KEY_OR_VALUE, MappedBox("attention.key_value", offset=(0, 1))),
        *linear(f"{block}.{output}", ATTENTION_OUTPUT, MappedBox("attention.output")),
        *_norm_of_heads(f"{block}.q_{norms}", "attention.query_norm", "heads" if over_heads else ""),
        *_norm_of_heads(f"{block}.k_{norms}", "attention.key_norm", "groups" if over_heads else ""),
    )


def _norm_of_heads(file: str, tensor: str, heads: str) -> tuple[Rule, ...]:
    """Return the rules for a norm of each head or, with the axis of the heads, of all of them together."""
    if not heads:
        return norm(file, tensor, "width")
    return (Rule(f"{file}.weight", f"({heads} width) -> {heads} width", (MappedBox(f"{tensor}.weight"),)),)


def gated_mlp(block: str = MLP, names: Sequence[str] = GATE_UP_DOWN) -> tuple[Rule, ...]:
    """Return the rules for the gate, up and down matrices of a dense feed-forward layer, which have these names."""
    gate, up, down = (f"{block}.{name}" for name in names)
    return (
        *linear(gate, _GATE_OR_UP, MappedBox("mlp.gate_up", offset=(0,))),
        *linear(up, _GATE_OR_UP, MappedBox("mlp.gate_up", offset=(1,))),
        *linear(down, DOWN, MappedBox("mlp.down")),
    )


def gated(block: str, tensor: str, width: str, names: Sequence[str] = GATE_UP_DOWN) -> tuple[Rule, ...]:
    """Return the rules for the gate, up and down matrices of experts, one or shared, which have these names.

    `tensor`: prefix of the logical tensors. `width`: the axis of the inner width.
    """
    gate, up, down = (f"{block}.{name}.weight" for name in names)
    return (
        Rule(gate, f"{width} hidden -> 1 {width} hidden", (MappedBox(f"{tensor}.gate_up", offset=(0,)),)),
        Rule(up, f"{width} hidden -> 1 {width} hidden", (MappedBox(f"{tensor}.gate_up", offset=(1,)),)),
        Rule(down, f"hidden {width} -> hidden {width}", (MappedBox(f"{tensor}.down"),)),
    )


def shared_expert(block: str) -> tuple[Rule, ...]:
    """Return the rules for a shared expert whose output is multiplied with the sigmoid of a gate."""
    gate = Rule(f"{block}.shared_expert_gate.weight", "one hidden -> one hidden", (MappedBox("moe.shared_gate"),))
    return (*gated(f"{block}.shared_expert", "moe.shared", "shared_ffn"), gate)


def not_gated(block: str, tensor: str, width: str, hidden: str = "hidden") -> tuple[Rule, ...]:
    """Return the rules for the up and down matrices of experts without a gate, between these axes."""
    return (
        Rule(f"{block}.up_proj.weight", f"{width} {hidden} -> {width} {hidden}", (MappedBox(f"{tensor}.up"),)),
        Rule(f"{block}.down_proj.weight", f"{hidden} {width} -> {hidden} {width}", (MappedBox(f"{tensor}.down"),)),
    )


def router(block: str) -> Rule:
    return Rule(f"{block}.gate.weight", "experts hidden -> experts hidden", (MappedBox("moe.router"),))


def choice_bias(block: str) -> Rule:
    """Return the rule for the bias of the choice of experts."""
    return Rule(f"{block}.gate.e_score_correction_bias", "experts -> experts", (MappedBox("state/moe.expert_bias"),))


def experts(block: str, names: Sequence[str] = GATE_UP_DOWN) -> tuple[Rule, ...]:
    """Return the rules for the router and for the experts of a layer one by one, whose matrices have these names."""
    return (router(block), *gated(f"{block}.experts.{{expert}}", "moe", "expert_ffn", names))


def fused_experts(block: str = MLP) -> tuple[Rule, ...]:
    """Return the rules for the router and for all experts of a layer in one tensor."""
    gate_up = "experts (two expert_ffn) hidden -> experts two expert_ffn hidden"
    down = "experts hidden expert_ffn -> experts hidden expert_ffn"
    return (
        router(block),
        Rule(f"{block}.experts.gate_up_proj", gate_up, (MappedBox("moe.gate_up"),)),
        Rule(f"{block}.experts.down_proj", down, (MappedBox("moe.down"),)),
    )
