"""Keys of config.json on layers of several kinds: their order, and those that describe layers of one kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megalite.config import ModelConfig
from megalite.config.layer_patterns import MOST_LAYERS
from megalite.config.layer_specs import ATTENTION_LETTER, DELTA_LETTER, EXPERTS_LETTER, MAMBA_LETTER, pattern_of
from megalite.conversion.config_keys import UNREADABLE, Json, Keys, key, layers_of, value_of
from megalite.conversion.position_keys import rotary
from megalite.errors import CheckpointError
from megalite.model.mamba import NORM_EPSILON
from megalite.small_files import shown

Letters = Callable[[Json], str]
"""Function that returns the pattern of the network that a config.json describes. Raises CheckpointError."""
_ATTENTION_KINDS = dict.fromkeys(("attention", "full_attention"), ATTENTION_LETTER)
_NEMOTRON = {"mamba": MAMBA_LETTER, "linear_attention": MAMBA_LETTER, **_ATTENTION_KINDS, "mlp": "-"}
_NEMOTRON |= {"moe": EXPERTS_LETTER}


def only_with(letter: str, letters: Letters, *of_kind: Keys) -> Iterator[Keys]:
    """Yield entries for keys that describe layers of one kind: they are read if the network has such layers."""

    def has_such(config: Json) -> bool:
        try:
            return letter in letters(config)
        except (CheckpointError, *UNREADABLE):  # which the entry for the layers reports
            return False

    for each in of_kind:

        def write(model: ModelConfig, each: Keys = each) -> dict[str, Any]:
            return each.write(model) if letter in pattern_of(model.layers) else {}

        yield replace(each, applies=has_such, write=write)


def letters_of_kinds(name: str, kinds: Any, letters: Mapping[str, str]) -> str:
    """Return the letters of layers that key `name` lists by their kinds. Raises CheckpointError for an unknown one."""
    if not isinstance(kinds, list) or len(kinds) > MOST_LAYERS:
        raise CheckpointError(f"{name} is {shown(kinds)}, it must be a list with the kind of each layer")
    unknown = sorted({shown(kind) for kind in kinds if not isinstance(kind, str) or kind not in letters})
    if unknown:
        raise CheckpointError(
            f"{name} has {', '.join(unknown)[:200]}, which is unknown: {', '.join(letters)} are known"
        )
    return "".join(letters[kind] for kind in kinds)


def pattern_fields(letters: str) -> dict[str, Any]:
    return {"num_layers": len(letters), "hybrid_layer_pattern": letters}


# ------------------------------------------------------------------------------------------------ one half in a layer


def nemotron_letters(config: Json) -> str:
    """Return the pattern of a Nemotron-H model, whose letters are Megatron-LM's."""
    pattern, found = config.get("hybrid_override_pattern"), set()
    if pattern is not None:
        if not isinstance(pattern, str) or not {*pattern} <= {*_NEMOTRON.values()} or len(pattern) > MOST_LAYERS:
            raise CheckpointError(f"hybrid_override_pattern is {shown(pattern)}, it must be of the letters M * - E")
        found.add(pattern)
    for name in ("layers_block_type", "layer_types"):
        if config.get(name) is not None:
            found.add(letters_of_kinds(name, config[name], _NEMOTRON))
    if len(found) != 1:
        raise CheckpointError(
            "it has no hybrid_override_pattern and no layers_block_type"
            if not found
            else "hybrid_override_pattern, layers_block_type and layer_types differ"
        )
    (letters,) = found
    if not letters or config.get("num_hidden_layers", len(letters)) != len(letters):
        raise CheckpointError(
            f"num_hidden_layers is {shown(config.get('num_hidden_layers'))} for {len(letters)} layers of the pattern"
        )
    return letters


def nemotron_layers() -> Keys:
    """Return the entry for the layers of Nemotron-H."""

    def write(model: ModelConfig) -> dict[str, Any]:
        letters = pattern_of(model.layers)
        return {"num_hidden_layers": len(letters), "hybrid_override_pattern": letters}

    names = ("num_hidden_layers", "hybrid_override_pattern", "layers_block_type", "layer_types")
    return Keys(names, lambda config: pattern_fields(nemotron_letters(config)), write)


# ------------------------------------------------------------------------------------------------ two halves in a layer


def with_dense(mixers: str) -> str:
    """Return the pattern of layers with these mixers, each with a dense feed-forward layer."""
    return "".join(letter + "-" for letter in mixers)


def mixers_of(model: ModelConfig) -> str:
    """Return the letters of the mixers of a network."""
    return "".join(letter for letter in pattern_of(model.layers) if letter not in f"-{EXPERTS_LETTER}")


def bamba_letters(config: Json) -> str:
    """Return the pattern of a Bamba model, which lists the layers that have attention."""
    layers, listed = layers_of(config), value_of(config, "attn_layer_indices", None) or []
    if not isinstance(listed, list) or any(type(place) is not int or not 0 <= place < layers for place in listed):
        raise CheckpointError(f"attn_layer_indices is {shown(listed)}, it must be a list of numbers below {layers}")
    places = {*listed}
    return with_dense("".join(ATTENTION_LETTER if place in places else MAMBA_LETTER for place in range(layers)))


def bamba_layers() -> Keys:
    """Return the entry for the layers of Bamba."""

    def write(model: ModelConfig) -> dict[str, Any]:
        mixers = mixers_of(model)
        places = [place for place, letter in enumerate(mixers) if letter == ATTENTION_LETTER]
        return {"num_hidden_layers": len(mixers), "attn_layer_indices": places}

    names = ("num_hidden_layers", "attn_layer_indices")
    return Keys(names, lambda config: pattern_fields(bamba_letters(config)), write)


_GRANITE = {"mamba": MAMBA_LETTER, "linear_attention": MAMBA_LETTER, **_ATTENTION_KINDS}


def granite_letters(config: Json) -> str:
    """Return the pattern of a Granite 4 model, in which all layers have experts, or none."""
    layers, kinds, experts = layers_of(config), config.get("layer_types"), value_of(config, "num_local_experts", 8)
    mixers = MAMBA_LETTER * layers if kinds is None else letters_of_kinds("layer_types", kinds, _GRANITE)
    if len(mixers) != layers:
        raise CheckpointError(f"layer_types has {len(mixers)} entries for {layers} layers")
    return "".join(letter + (EXPERTS_LETTER if experts else "-") for letter in mixers)


def granite_layers() -> Keys:
    """Return the entry for the layers of Granite 4, and for the number of experts in each, which may be 0."""

    def read(config: Json) -> dict[str, Any]:
        experts = value_of(config, "num_local_experts", 8)
        return pattern_fields(granite_letters(config)) | ({"num_experts": experts} if experts != 0 else {})

    def write(model: ModelConfig) -> dict[str, Any]:
        mixers, kinds = mixers_of(model), {MAMBA_LETTER: "mamba", ATTENTION_LETTER: "attention"}
        written = [kinds.get(letter, "neither") for letter in mixers]
        return {
            "num_hidden_layers": len(mixers),
            "layer_types": written,
            "num_local_experts": model.num_experts or 0,
        }

    return Keys(("num_hidden_layers", "layer_types", "num_local_experts"), read, write)


_QWEN = {"linear_attention": DELTA_LETTER, **_ATTENTION_KINDS}


def qwen_letters(config: Json, *, experts: Callable[[Json], list[bool]]) -> str:
    """Return the pattern of a Qwen model with gated delta nets. `experts`: tells which layers have experts."""
    layers, kinds = layers_of(config), config.get("layer_types")
    if kinds is None:
        interval = value_of(config, "full_attention_interval", 4)
        if type(interval) is not int or interval < 1:
            raise CheckpointError(f"full_attention_interval is {shown(interval)}, it must be a whole number above 0")
        mixers = "".join(DELTA_LETTER if (layer + 1) % interval else ATTENTION_LETTER for layer in range(layers))
    else:
        mixers = letters_of_kinds("layer_types", kinds, _QWEN)
    if len(mixers) != layers:
        raise CheckpointError(f"layer_types has {len(mixers)} entries for {layers} layers")
    feed_forwards = (EXPERTS_LETTER if sparse else "-" for sparse in experts(config))
    return "".join(letter for pair in zip(mixers, feed_forwards, strict=True) for letter in pair)


def qwen_layers(letters: Letters, *by_step: str) -> Keys:
    """Return the entry for the layers of such a model. `by_step`: further keys that say which layers have experts."""
    kinds = {letter: kind for kind, letter in _QWEN.items()}

    def write(model: ModelConfig) -> dict[str, Any]:
        mixers = mixers_of(model)
        written = {
            "num_hidden_layers": len(mixers),
            "layer_types": [kinds.get(letter, "neither") for letter in mixers],
        }
        if by_step:
            pattern = [letter for letter in pattern_of(model.layers) if letter in f"-{EXPERTS_LETTER}"]
            dense = [layer for layer, letter in enumerate(pattern) if letter == "-"]
            written |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        return written

    names = ("num_hidden_layers", "layer_types", "full_attention_interval", *by_step)
    return Keys(names, lambda config: pattern_fields(letters(config)), write)


def olmo_layers() -> Keys:
    """Return the entry for the layers of OLMo-Hybrid, in which those with attention have their norms behind."""
    kinds = {letter: kind for kind, letter in _QWEN.items()}

    def read(config: Json) -> dict[str, Any]:
        layers, listed = layers_of(config), config.get("layer_types")
        if listed is None:
            mixers = "".join(ATTENTION_LETTER if layer % 4 == 3 else DELTA_LETTER for layer in range(layers))
            mixers = mixers if ATTENTION_LETTER in mixers else mixers[:-1] + ATTENTION_LETTER
        else:
            mixers = letters_of_kinds("layer_types", listed, _QWEN)
        if len(mixers) != layers:
            raise CheckpointError(f"layer_types has {len(mixers)} entries for {layers} layers")
        behind = [int(letter == ATTENTION_LETTER) for letter in mixers for _ in range(2)]
        return pattern_fields(with_dense(mixers)) | {"output_norm_freq": str(behind)}

    def write(model: ModelConfig) -> dict[str, Any]:
        mixers = mixers_of(model)
        return {"num_hidden_layers": len(mixers), "layer_types": [kinds.get(letter, "neither") for letter in mixers]}

    return Keys(("num_hidden_layers", "layer_types"), read, write)


def olmo_delta_sizes() -> Keys:
    """Return the entry for the heads of OLMo-Hybrid's gated delta nets, which follow from attention's if missing."""

    def read(config: Json) -> dict[str, Any]:
        heads = value_of(config, "num_attention_heads")
        keys = value_of(config, "linear_num_key_heads", None) or heads
        width = value_of(config, "linear_key_head_dim", None) or int(0.75 * value_of(config, "hidden_size") / keys)
        return {
            "linear_num_key_heads": keys,
            "linear_num_value_heads": value_of(config, "linear_num_value_heads", None) or heads,
            "linear_key_head_dim": width,
            "linear_value_head_dim": value_of(config, "linear_value_head_dim", None) or 2 * width,
        }

    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return Keys(names, read, lambda model: {name: getattr(model, name) for name in names})


def rotary_of_text() -> Keys:
    """Return the entry for rotary embeddings of Qwen3.5, whose sections for images are alike for text."""
    entry = rotary(share="partial_rotary_factor", default_share=0.25)

    def read(config: Json) -> dict[str, Any]:
        given = config.get("rope_parameters") or {}
        of_text = {name: value for name, value in given.items() if name not in ("mrope_section", "mrope_interleaved")}
        return entry.read({**config, "rope_parameters": of_text})

    return replace(entry, read=read)


def optional_rotary() -> Keys:
    """Return the entry for positions of Granite 4: rotary embeddings or none."""
    entry, name = rotary(), "position_embedding_type"

    def read(config: Json) -> dict[str, Any]:
        if (kind := config.get(name)) not in (None, "nope", "rope"):
            raise CheckpointError(f"{name} is {shown(kind)}, but only 'rope' and 'nope' are supported")
        return entry.read(config) if kind == "rope" else {name: "none"}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {name: "rope"} | entry.write(model) if model.rotary else {name: "nope"}

    return Keys((name, *entry.names), read, write)


def rotary_or_none() -> Keys:
    """Return the entry for positions of OLMo-Hybrid: rotary embeddings or, with null as their base, none."""
    entry, name = rotary(), "rope_parameters"
    nothing = {"rope_theta": None, "rope_type": "default"}

    def read(config: Json) -> dict[str, Any]:
        if name in config and config[name] is None and "rope_theta" not in config:
            raise CheckpointError(
                f"{name} is null, which versions of transformers read as no rotary embeddings or as those of the base "
                f"10000: give {shown(nothing)} for none, or their base"
            )
        found = config.get("rope_scaling") or config.get(name) or config
        return {"position_embedding_type": "none"} if found.get("rope_theta", 0) is None else entry.read(config)

    def write(model: ModelConfig) -> dict[str, Any]:
        return entry.write(model) if model.rotary else {name: nothing}

    return Keys(entry.names, read, write)


def factor_of_scores() -> Keys:
    """Return the entry for the factor of attention scores."""

    def read(config: Json) -> dict[str, Any]:
        if not (factor := value_of(config, "attention_multiplier", 1.0)) > 0:  # the square would lose its sign
            raise CheckpointError(f"attention_multiplier is {shown(factor)}, it must be above 0")
        scalar = factor**-2
        whole = round(scalar)
        return {"query_pre_attn_scalar": float(whole) if math.isclose(scalar, whole, rel_tol=1e-12) else scalar}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"attention_multiplier": (model.query_pre_attn_scalar or model.head_dim) ** -0.5}

    return Keys(("attention_multiplier",), read, write)


def half_rotary() -> Keys:
    """Return the entry for rotary embeddings of Bamba, which rotate half of a head, whatever config.json says."""
    entry = rotary(share="partial_rotary_factor", default_share=0.5)

    def read(config: Json) -> dict[str, Any]:
        fields = entry.read(config)
        rotated, width = config.get("attn_rotary_emb"), config.get("head_dim")
        whole = value_of(config, "hidden_size") // value_of(config, "num_attention_heads") if width is None else width
        if fields["rotary_percent"] != 0.5 or rotated not in (None, whole // 2):
            raise CheckpointError("partial_rotary_factor or attn_rotary_emb is not half of a head, as transformers has")
        return fields

    return replace(entry, names=(*entry.names, "attn_rotary_emb"), read=read)


# ------------------------------------------------------------------------------------------------ Mamba-2


def mamba_norm_epsilon(name: str, default: float) -> Keys:
    """Return the entry for the epsilon of all norms, of which megalite's Mamba-2 layers have a fixed one."""

    def read(config: Json) -> dict[str, Any]:
        if (found := value_of(config, name, default)) != NORM_EPSILON:
            raise CheckpointError(f"{name} is {shown(found)}, but Mamba-2 layers have only {NORM_EPSILON}")
        return {}

    def write(model: ModelConfig) -> dict[str, Any]:
        if model.norm_epsilon != NORM_EPSILON:
            raise CheckpointError(f"--norm-epsilon {model.norm_epsilon} (Mamba-2 layers have {NORM_EPSILON})")
        return {name: model.norm_epsilon}

    return Keys((name,), read, write)


def head_times_heads() -> Keys:
    """Return the entry for the width of a Mamba-2 head, which may be said by the width of all of them."""

    def read(config: Json) -> dict[str, Any]:
        heads, width = value_of(config, "mamba_n_heads", 128), value_of(config, "mamba_d_head", "auto")
        expand, hidden = value_of(config, "mamba_expand", 2), value_of(config, "hidden_size")
        if type(expand) is not int or type(hidden) is not int:
            raise CheckpointError(f"mamba_expand is {shown(expand)}, it must be a whole number")
        inner = expand * hidden
        if inner != (inner // heads if width == "auto" else width) * heads:
            raise CheckpointError(
                f"mamba_expand times hidden_size is {shown(inner)}, but mamba_n_heads times mamba_d_head is another"
            )
        return {"mamba_num_heads": heads, "mamba_head_dim": inner // heads}

    def write(model: ModelConfig) -> dict[str, Any]:
        inner, hidden = model.mamba_heads * model.mamba_head_dim, model.hidden_size
        if inner % hidden:
            raise CheckpointError(f"--mamba-num-heads times --mamba-head-dim, {inner}, is no multiple of {hidden}")
        names = {"mamba_n_heads": model.mamba_heads, "mamba_d_head": model.mamba_head_dim}
        return names | {"mamba_expand": inner // hidden}

    return Keys(("mamba_n_heads", "mamba_d_head", "mamba_expand"), read, write)


def step_limits() -> Keys:
    """Return the entry for the least and the largest step of a token."""

    def read(config: Json) -> dict[str, Any]:
        least, most = (_number(each) for each in value_of(config, "time_step_limit", [0.0, math.inf]))
        return {"mamba_dt_min": least, "mamba_dt_max": None if most == math.inf else most}

    def write(model: ModelConfig) -> dict[str, Any]:
        most = math.inf if model.mamba_dt_max is None else model.mamba_dt_max
        return {"time_step_limit": [model.mamba_dt_min, most]}

    return Keys(("time_step_limit",), read, write)


def without_step_limits() -> Keys:
    """Return the entry for limits of a token's step that transformers does not apply: they must be none."""

    def read(config: Json) -> dict[str, Any]:
        limits = value_of(config, "time_step_limit", [0.0, math.inf])
        if [_number(each) for each in limits] != [0.0, math.inf]:
            raise CheckpointError(f"time_step_limit is {shown(limits)}, which transformers does not apply")
        return {}

    return Keys(("time_step_limit",), read, lambda _: {})


def _number(value: Any) -> Any:
    """Return a number of a config.json, in which transformers writes an infinite one as an object."""
    return math.inf if value == {"__float__": "Infinity"} else value


def same_as(name: str, other: str, default: float) -> Keys:
    """Return the entry for another name of a key, which must say the same."""

    def read(config: Json) -> dict[str, Any]:
        if (found := config.get(name)) not in (None, value_of(config, other, default)):
            raise CheckpointError(f"{name} is {shown(found)}, and {other} is another")
        return {}

    return Keys((name,), read, lambda _: {})


def bamba_sizes() -> tuple[Keys, ...]:
    """Return the entries for the sizes of Mamba-2 layers in Bamba and Granite."""
    return (
        head_times_heads(),
        key("mamba_n_groups", "mamba_num_groups", 1),
        key("mamba_d_state", "mamba_state_dim", 256),
        key("mamba_d_conv", "mamba_conv_kernel_dim", 4),
        step_limits(),
    )
