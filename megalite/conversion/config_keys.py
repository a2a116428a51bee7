"""Keys of a family's config.json: each entry of the family's table is read and written here.

Keys of rotary embeddings are in `rotary_keys`, those of sliding windows in `window_keys`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig
from megalite.config.activations import ACTIVATIONS, FLAGS, TANH_GELU
from megalite.errors import CheckpointError
from megalite.small_files import shown

Json = Mapping[str, Any]
_REQUIRED = object()


@dataclass(frozen=True)
class Keys:
    """Keys of config.json that have a meaning together."""

    names: tuple[str, ...]
    read: Callable[[Json], dict[str, Any]]
    """Function that returns the fields of ModelConfig for the keys. Raises CheckpointError for values no field can
    have."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Function that returns the keys for a model, as near as possible: reading them again shows what they cannot
    express."""


def key(name: str, field: str, default: Any = _REQUIRED) -> Keys:
    """Return the entry of a key that equals a field. `default`: the family's value if the key is missing or null."""

    def read(config: Json) -> dict[str, Any]:
        value = config.get(name)
        value = default if value is None else value
        if value is _REQUIRED:
            raise CheckpointError(f"it has no {name}")
        return {field: value}

    return Keys((name,), read, lambda model: {name: getattr(model, field)})


def fixed(name: str, value: Any, *, written: bool = True) -> Keys:
    """Return the entry of a key that may be missing, null or one value, since megalite computes nothing else."""

    def read(config: Json) -> dict[str, Any]:
        if config.get(name) not in (None, value):
            raise CheckpointError(f"{name} is {shown(config[name])}, where only {shown(value)} is known")
        return {}

    return Keys((name,), read, lambda _: {name: value} if written else {})


def unread(*names: str) -> Keys:
    """Return the entry of keys that some files of a family have, and that transformers does not read."""
    return Keys(names, lambda _: {}, lambda _: {})


def tied(default: bool) -> Keys:
    """Return the entry that says whether the output layer is the word embedding."""
    return Keys(
        ("tie_word_embeddings",),
        lambda config: {"untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", default)},
        lambda model: {"tie_word_embeddings": not model.untie_embeddings_and_output_weights},
    )


def grouped_queries(default: int | None = None) -> Keys:
    """Return the entry of the number of key-value heads; missing: `default`; null: one per query head."""

    def read(config: Json) -> dict[str, Any]:
        heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads", default)
        if groups is None or groups == heads:
            return {"group_query_attention": False, "num_query_groups": 1}
        return {"group_query_attention": True, "num_query_groups": groups}

    return Keys(("num_key_value_heads",), read, lambda model: {"num_key_value_heads": model.kv_groups})


def head_width(default: int | None = None) -> Keys:
    """Return the entry of the width of a head; missing: `default`, or the hidden size divided by the heads."""
    return Keys(
        ("head_dim",),
        lambda config: {"kv_channels": config.get("head_dim") or default},
        lambda model: {"head_dim": model.head_dim},
    )


def feed_forward_width(name: str = "intermediate_size") -> Keys:
    """Return the entry of the width of the feed-forward layer; missing: four times the hidden size."""
    return Keys((name,), lambda config: {"ffn_hidden_size": config.get(name)}, lambda model: {name: model.ffn_size})


def linear_biases() -> Keys:
    """Return the entry of Llama's two keys for biases; megalite has both biases or none."""

    def read(config: Json) -> dict[str, Any]:
        attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
        if attention != mlp:
            raise CheckpointError(
                f"attention_bias is {shown(attention)} and mlp_bias {shown(mlp)}, where both are alike"
            )
        return {"add_bias_linear": attention}

    return Keys(
        ("attention_bias", "mlp_bias"),
        read,
        lambda model: {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear},
    )


def activation(name: str, default: str, *, gated: bool) -> Keys:
    """Return the entry of the feed-forward layer's activation function."""
    rows = {each: row for row in ACTIVATIONS if row.gated == gated for each in row.hugging_face}

    def read(config: Json) -> dict[str, Any]:
        value = config.get(name) or default
        if value not in rows:
            raise CheckpointError(f"{name} is {shown(value)}, where {', '.join(rows)} are known")
        return {flag: flag in rows[value].flags for flag in FLAGS}

    def write(model: ModelConfig) -> dict[str, Any]:
        alike = [each for each, row in rows.items() if row == model.activation]
        return {name: default if default in alike or not alike else alike[0]}

    return Keys((name,), read, write)


def tanh_gate() -> Keys:
    """Return the entry of the first Gemma's gate, the tanh form of GELU.

    Its published files call it gelu; version 4 of transformers has a key of its own for it.
    """

    def read(config: Json) -> dict[str, Any]:
        for name in ("hidden_act", "hidden_activation"):
            if config.get(name) not in (None, "gelu", *TANH_GELU):
                raise CheckpointError(f"{name} is {shown(config[name])}, where gelu, {', '.join(TANH_GELU)} are known")
        return {flag: flag == "geglu" for flag in FLAGS}

    names = ("hidden_act", "hidden_activation")
    return Keys(names, read, lambda _: dict.fromkeys(names, "gelu_pytorch_tanh"))


def square_root_of_heads() -> Keys:
    """Return the entry of the scalar whose square root divides the attention scores; Gemma's default is 256."""
    return Keys(
        ("query_pre_attn_scalar",),
        lambda config: {"query_pre_attn_scalar": float(config.get("query_pre_attn_scalar", 256))},
        lambda model: {"query_pre_attn_scalar": _whole(model.query_pre_attn_scalar or model.head_dim)},
    )


def soft_cap(name: str, default: float | None) -> Keys:
    """Return the entry of a soft cap, which is off if the key is null; missing: `default`."""
    return Keys((name,), lambda config: {name: config.get(name, default)}, lambda model: {name: getattr(model, name)})


def embedding_dropout() -> Keys:
    """Return the entry of the embedding's dropout, a separate key in GPT-2; in megalite it equals that of the residual
    branches."""
    return Keys(("embd_pdrop",), lambda _: {}, lambda model: {"embd_pdrop": model.hidden_dropout})


def _whole(value: float) -> float:
    return int(value) if math.isfinite(value) and value == int(value) else value
