"""Keys of a family's config.json. Each entry reads and writes one or more keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig
from megalite.config.activations import ACTIVATIONS, FLAGS, TANH_GELU
from megalite.config.layer_patterns import MOST_LAYERS
from megalite.errors import CheckpointError
from megalite.small_files import shown

Json = Mapping[str, Any]
UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Errors in reading values of any kind, beside CheckpointError."""
_REQUIRED = object()


@dataclass(frozen=True)
class Keys:
    """Keys of config.json that have a meaning only together."""

    names: tuple[str, ...]
    read: Callable[[Json], dict[str, Any]]
    """Function that returns the fields of ModelConfig for the keys. Raises CheckpointError for unsupported values."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Function that returns the keys for a model, as exactly as they can express it.

    The caller reads them again to find what they cannot express.
    """
    applies: Callable[[Json], bool] = lambda _: True
    """Function that tells whether a config.json has a network for which the keys mean something."""


def value_of(config: Json, name: str, default: Any = _REQUIRED) -> Any:
    """Return the value of a key; if it is missing, `default`, which is that of transformers' class for the family.

    null means nothing or false, as in Python. It is refused where the default is something, because versions of
    transformers differ on what is meant.
    """
    value = config.get(name, default)
    if value is _REQUIRED:
        raise CheckpointError(f"it has no {name}")
    if value is None and default:
        otherwise = "" if default is _REQUIRED else f", or leave it out for {shown(default)}"
        raise CheckpointError(f"{name} is null: give its value{otherwise}")
    return default if value is None else value


def key(name: str, field: str, default: Any = _REQUIRED, *, written: str | None = None) -> Keys:
    """Return the entry for a key that equals a field.

    `default`: the family's value if the key is missing. `written`: the attribute of ModelConfig to write, if it is not
    the field itself, because the field may be None.
    """
    return Keys(
        (name,),
        lambda config: {field: value_of(config, name, default)},
        lambda model: {name: getattr(model, written or field)},
    )


def fixed(name: str, value: Any, *, written: bool = True) -> Keys:
    """Return the entry for a key with only one supported value, which is also the default."""

    def read(config: Json) -> dict[str, Any]:
        found = value_of(config, name, value)
        if found != value:
            raise CheckpointError(f"{name} is {shown(found)}, but only {shown(value)} is supported")
        return {}

    return Keys((name,), read, lambda _: {name: value} if written else {})


def negated(name: str, field: str, default: bool) -> Keys:
    """Return the entry for a key that is true if a field is false. `default`: the family's value of a missing key."""
    return Keys(
        (name,),
        lambda config: {field: not value_of(config, name, default)},
        lambda model: {name: not getattr(model, field)},
    )


def quantization(method: str) -> Keys:
    """Return the entry for quantized weights, of which the family's files may have those of this method.

    Written files have none.
    """

    def read(config: Json) -> dict[str, Any]:
        found = config.get("quantization_config") or {"quant_method": method}
        if found.get("quant_method") != method:
            raise CheckpointError(f"quantization_config is {shown(found)}, but only {method} is supported")
        return {}

    return Keys(("quantization_config",), read, lambda _: {})


def tied(default: bool) -> Keys:
    """Return the entry for the key that ties the output layer to the word embedding."""
    return negated("tie_word_embeddings", "untie_embeddings_and_output_weights", default)


def grouped_queries(default: int | None = None) -> Keys:
    """Return the entry for the number of key-value heads. If missing: `default`; if null: one per query head."""

    def read(config: Json) -> dict[str, Any]:
        heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads", default)
        if groups is None or groups == heads:
            return {"group_query_attention": False, "num_query_groups": 1}
        return {"group_query_attention": True, "num_query_groups": groups}

    return Keys(("num_key_value_heads",), read, lambda model: {"num_key_value_heads": model.kv_groups})


def head_width(default: int | None = None) -> Keys:
    """Return the entry for the width of a head. If missing: `default`, or the hidden size divided by the heads."""
    return key("head_dim", "kv_channels", default, written="head_dim")


def linear_biases() -> Keys:
    """Return the entry for Llama's two keys for biases. megalite supports only both biases or none."""

    def read(config: Json) -> dict[str, Any]:
        attention, mlp = value_of(config, "attention_bias", False), value_of(config, "mlp_bias", False)
        if attention != mlp:
            raise CheckpointError(
                f"attention_bias is {shown(attention)} and mlp_bias {shown(mlp)}, but they must be equal"
            )
        return {"add_bias_linear": attention}

    names = ("attention_bias", "mlp_bias")
    return Keys(names, read, lambda model: dict.fromkeys(names, model.add_bias_linear))


def activation(name: str, default: str, *, gated: bool) -> Keys:
    """Return the entry for the activation function of the feed-forward layer."""
    rows = {each: row for row in ACTIVATIONS if row.gated == gated for each in row.hugging_face}

    def read(config: Json) -> dict[str, Any]:
        value = value_of(config, name, default)
        if value not in rows:
            raise CheckpointError(f"{name} is {shown(value)}, supported are {', '.join(rows)}")
        return {flag: flag in rows[value].flags for flag in FLAGS}

    def write(model: ModelConfig) -> dict[str, Any]:
        alike = [each for each, row in rows.items() if row == model.activation]
        return {name: default if default in alike or not alike else alike[0]}

    return Keys((name,), read, write)


def equal_dropouts(*names: str, default: float) -> Keys:
    """Return the entry for the dropouts of the embedding and of the residual branches, which megalite has as one."""

    def read(config: Json) -> dict[str, Any]:
        first, second = (value_of(config, name, default) for name in names)
        if first != second:
            raise CheckpointError(
                f"{names[0]} is {shown(first)} and {names[1]} {shown(second)}, but they must be equal"
            )
        return {"hidden_dropout": first}

    return Keys(names, read, lambda model: dict.fromkeys(names, model.hidden_dropout))


def tanh_gate() -> Keys:
    """Return the entry for the gate of the first Gemma, which is the tanh form of GELU.

    Its published files call it gelu. Version 4 of transformers has a separate key for it.
    """

    def read(config: Json) -> dict[str, Any]:
        for name in ("hidden_act", "hidden_activation"):
            if config.get(name) not in (None, "gelu", *TANH_GELU):
                raise CheckpointError(f"{name} is {shown(config[name])}, supported are gelu, {', '.join(TANH_GELU)}")
        return {flag: flag == "geglu" for flag in FLAGS}

    names = ("hidden_act", "hidden_activation")
    return Keys(names, read, lambda _: dict.fromkeys(names, "gelu_pytorch_tanh"))


def square_root_of_heads() -> Keys:
    """Return the entry for the scalar whose square root divides the attention scores. Gemma's default is 256."""
    return Keys(
        ("query_pre_attn_scalar",),
        lambda config: {"query_pre_attn_scalar": float(config.get("query_pre_attn_scalar", 256))},
        lambda model: {"query_pre_attn_scalar": _whole(model.query_pre_attn_scalar or model.head_dim)},
    )


def soft_cap(name: str, default: float | None) -> Keys:
    """Return the entry for a soft cap. If missing: `default`; if null: no cap."""
    return Keys((name,), lambda config: {name: config.get(name, default)}, lambda model: {name: getattr(model, name)})


def _whole(value: float) -> float:
    return int(value) if math.isfinite(value) and value == int(value) else value


def layers_of(config: Json) -> int:
    """Return the number of layers. Raises CheckpointError if it is none that is possible."""
    layers = config["num_hidden_layers"]
    if type(layers) is not int or layers > MOST_LAYERS:
        raise CheckpointError(f"num_hidden_layers is {shown(layers)}, at most {MOST_LAYERS:,} are possible")
    return layers


# ------------------------------------------------------------------------------------------------ experts


def num_experts(*names: str) -> Keys:
    """Return the entry for the number of experts, which has the first of these names in files that are written."""

    def read(config: Json) -> dict[str, Any]:
        values = [value_of(config, name) for name in names if name in config]
        if not values or any(value != values[0] for value in values):
            raise CheckpointError(f"{names[0]} is missing" if not values else f"{' and '.join(names)} differ")
        return {"num_experts": values[0]}

    return Keys(names, read, lambda model: {names[0]: model.num_experts})


def sparse_by_step(config: Json) -> list[bool]:
    """Return for each layer of a Qwen model whether it has experts. Raises CheckpointError."""
    step, dense = value_of(config, "decoder_sparse_step", 1), value_of(config, "mlp_only_layers", [])
    if type(step) is not int or step < 1 or any(type(each) is not int for each in dense):
        raise CheckpointError(f"decoder_sparse_step {shown(step)} or mlp_only_layers {shown(dense)} is no number")
    without = {*dense}
    return [layer not in without and (layer + 1) % step == 0 for layer in range(layers_of(config))]


def sparse_layers() -> Keys:
    """Return the entry for Qwen's layers with experts: every decoder_sparse_step-th one that is not in a list."""

    def read(config: Json) -> dict[str, Any]:
        with_experts = sparse_by_step(config)
        if not any(with_experts):
            raise CheckpointError("no layer has experts")
        pattern = "[" + ",".join(str(int(each)) for each in with_experts) + "]"
        return {"moe_layer_freq": None if all(with_experts) else pattern}

    def write(model: ModelConfig) -> dict[str, Any]:
        dense = [number for number, layer in enumerate(model.layers) if layer.feed_forward == "dense"]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Keys(("decoder_sparse_step", "mlp_only_layers"), read, write)


def leading_dense(name: str, default: int) -> Keys:
    """Return the entry for the number of layers without experts, which are the first ones."""

    def read(config: Json) -> dict[str, Any]:
        dense, layers = value_of(config, name, default), layers_of(config)
        if type(dense) is not int or not 0 <= dense < layers:
            raise CheckpointError(f"{name} is {shown(dense)} for {layers} layers")
        return {"moe_layer_freq": f"[{','.join(['0'] * dense + ['1'] * (layers - dense))}]" if dense else None}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {name: next((number for number, layer in enumerate(model.layers) if layer.feed_forward == "moe"), 0)}

    return Keys((name,), read, write)


def shared_experts(name: str, width: str, default_width: int, default: int = 1) -> Keys:
    """Return the entry for the number of shared experts, each as wide as a routed one, whose width is key `width`."""

    def read(config: Json) -> dict[str, Any]:
        count = value_of(config, name, default)
        if type(count) is not int or count < 1:
            raise CheckpointError(f"{name} is {shown(count)}, it must be a whole number above 0")
        return {"moe_shared_expert_intermediate_size": count * value_of(config, width, default_width)}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {name: max((model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size, 1)}

    return Keys((name,), read, write)


PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Names of the number of layers after the last one that predict further tokens; the first one is written."""


def prediction_layers(config: Json) -> int:
    """Return the number of layers that predict further tokens."""
    counts = [value_of(config, name, 0) for name in PREDICTION_LAYERS if name in config] or [1]
    if any(type(count) is not int or not 0 <= count <= MOST_LAYERS for count in counts):
        raise CheckpointError(f"{PREDICTION_LAYERS[0]} is {shown(counts[0])}, which is no number of layers")
    if len({*counts}) > 1:
        raise CheckpointError(f"{' and '.join(PREDICTION_LAYERS)} differ")
    return counts[0]


def prediction_depths() -> Keys:
    """Return the entry for layers that predict further tokens: each is a depth of multi-token prediction."""

    def read(config: Json) -> dict[str, Any]:
        return {"mtp_num_layers": prediction_layers(config) or None}

    return Keys(PREDICTION_LAYERS, read, lambda model: {PREDICTION_LAYERS[0]: model.depths})


def without_prediction_layers() -> Keys:
    """Return the entry for layers that predict further tokens: they are left out."""

    def read(config: Json) -> dict[str, Any]:
        prediction_layers(config)
        return {}

    return Keys(PREDICTION_LAYERS, read, lambda _: {PREDICTION_LAYERS[0]: 0})


def expert_groups(default: int = 1, default_chosen: int = 1, *, scores: int = 2) -> Keys:
    """Return the entry for groups of experts, whose score is the sum of their two best (DeepSeek-V3, GLM-4.5).

    `scores`: the number of best ones, if it is another.
    """

    def read(config: Json) -> dict[str, Any]:
        groups, chosen = value_of(config, "n_group", default), value_of(config, "topk_group", default_chosen)
        if groups == 1:
            if chosen != 1:
                raise CheckpointError(f"topk_group is {shown(chosen)} of 1 group, it must be 1")
            return dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores"))
        return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen, "moe_router_group_scores": scores}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"n_group": model.moe_router_num_groups or 1, "topk_group": model.moe_router_group_topk or 1}

    return Keys(("n_group", "topk_group"), read, write)


def several_experts(name: str, default: int) -> Keys:
    """Return the entry for the number of experts of a token whose weights add up to 1: more than one.

    The weight of a single one is its score here, and 1 there.
    """

    def read(config: Json) -> dict[str, Any]:
        count = value_of(config, name, default)
        if count == 1:
            raise CheckpointError(f"{name} is 1, and megalite does not normalise the score of a single expert")
        return {"moe_router_topk": count}

    return Keys((name,), read, lambda model: {name: model.moe_router_topk})


def rotated_channels(name: str, width: str, default_width: int) -> Keys:
    """Return the entry for the number of rotated channels of a head, which files may have instead of their share."""

    def read(config: Json) -> dict[str, Any]:
        rotated, parameters = config.get(name), config.get("rope_parameters") or config.get("rope_scaling") or config
        if rotated is None or "partial_rotary_factor" in parameters:
            return {}
        return {"rotary_percent": rotated / value_of(config, width, default_width)}

    return Keys((name,), read, lambda _: {})


def normalized_scores(name: str, topk: str, default_topk: int) -> Keys:
    """Return the entry for the key that says if the scores of the chosen experts, `topk` in number, add up to 1.

    megalite normalizes them if there are several, and never a single one.
    """

    def read(config: Json) -> dict[str, Any]:
        several, found = value_of(config, topk, default_topk) != 1, value_of(config, name, True)
        if found != several:
            raise CheckpointError(f"{name} is {shown(found)}, but only {shown(several)} is supported")
        return {}

    return Keys((name,), read, lambda model: {name: model.moe_router_topk != 1})
