"""Keys of a family's config.json on positions: rotary embeddings, and the windows of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite.config import ModelConfig
from megalite.conversion.config_keys import Json, Keys, layers_of, value_of
from megalite.errors import CheckpointError
from megalite.small_files import shown

# ------------------------------------------------------------------------------------------------ rotary embeddings
#
# Keys are written with the names in published checkpoints, which every version of transformers reads (`rope_theta`,
# `rope_scaling`). The keys that version 5 writes (`rope_parameters`) are also read.

_SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rotary_seq_len_interpolation_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_scaling_low_freq_factor",
        "high_freq_factor": "rope_scaling_high_freq_factor",
        "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
    },
    "yarn": {
        "factor": "rotary_scaling_factor",
        "original_max_position_embeddings": "yarn_original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "truncate": "yarn_correction_range_round_to_int",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "attention_factor": "yarn_attention_factor",
    },
}
"""Keys of each kind of scaling, with their fields."""
_OPTIONAL = {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"}
"""Keys of scalings that may be missing: the field then has its default. All but `truncate` may be null."""


def _scaling_fields(parameters: Json, max_positions: Any) -> dict[str, Any]:
    """Return the fields for rotary parameters, in the old or new form. `max_positions`: max_position_embeddings."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _SCALINGS:
        raise CheckpointError(f"rotary embeddings are scaled by {shown(kind)}, supported are {', '.join(_SCALINGS)}")
    known = _SCALINGS[kind]
    handled = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    unknown = sorted(name for name in parameters if name not in known and name not in handled)
    if unknown:
        raise CheckpointError(f"{', '.join(unknown)[:200]} of rotary embeddings scaled by {shown(kind)} is unknown")
    given = {name: parameters[name] for name in known if name in parameters}
    if "original_max_position_embeddings" in known:
        given.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        if given.get("factor") is None:
            given["factor"] = max_positions / given["original_max_position_embeddings"]
        without = {name for name in ("beta_fast", "beta_slow") if not given.get(name)}  # 0 means the default
        without |= {"attention_factor"} if given.get("attention_factor") is None else set()
        if not (given.get("mscale") and given.get("mscale_all_dim")):  # one of them alone has no effect
            without |= {"mscale", "mscale_all_dim"}
        given = {name: value for name, value in given.items() if name not in without}
    if lacking := [name for name in known if name not in _OPTIONAL and given.get(name) is None]:
        raise CheckpointError(f"rotary embeddings scaled by {shown(kind)} have no {' and no '.join(lacking)}")
    values = {known[name]: value for name, value in given.items()}
    return values | {
        "use_rope_scaling": kind == "llama3",
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
    }


def _scaling(model: ModelConfig) -> dict[str, Any]:
    """Return the keys for the scaling of a model; {} if nothing is scaled."""
    kind = "default"
    if model.position_embedding_type == "yarn":
        kind = "yarn"
    elif model.use_rope_scaling:
        kind = "llama3"
    elif model.rotary_seq_len_interpolation_factor is not None:
        kind = "linear"
    values = {name: getattr(model, field) for name, field in _SCALINGS[kind].items()}
    if kind == "yarn":
        left_out = {name for name, field in _SCALINGS[kind].items() if values[name] == getattr(ModelConfig, field)}
        if "mscale" not in left_out or "mscale_all_dim" not in left_out:  # one of them alone has no effect
            left_out -= {"mscale", "mscale_all_dim"}
        # The factor is always written. Without it, a reader would use the ratio of the two lengths.
        values = {name: value for name, value in values.items() if name == "factor" or name not in left_out}
    return {"rope_type": kind, **values} if values else {}


def rotary(
    theta: str = "rope_theta",
    share: str | None = None,
    default_share: float = 1.0,
    *,
    default_base: float = 10_000.0,
    otherwise: Json | None = None,
) -> Keys:
    """Return the entry for rotary embeddings: their base, the rotated share of a head, and their scaling.

    `share` is the key for the rotated share. If it is None, the family always rotates whole heads. `otherwise`: the
    scaling of files without one; None: nothing is scaled.
    """
    unscaled = None if otherwise is None else {"rope_type": "default"}

    def read(config: Json) -> dict[str, Any]:
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or otherwise or {}
        base: Any = parameters.get("rope_theta", config.get(theta, default_base))
        part: Any = parameters.get("partial_rotary_factor", config.get(share or "partial_rotary_factor", default_share))
        if share is None and part != 1.0:
            raise CheckpointError(f"partial_rotary_factor is {shown(part)}, but this family rotates all of a head")
        scaled = _scaling_fields(parameters, config.get("max_position_embeddings"))
        return {"rotary_base": float(base), "rotary_percent": float(part), **scaled}

    def write(model: ModelConfig) -> dict[str, Any]:
        written = {theta: model.rotary_base, "rope_scaling": _scaling(model) or unscaled}
        return written if share is None else written | {share: model.rotary_percent}

    return Keys((theta, share or "partial_rotary_factor", "rope_scaling", "rope_parameters"), read, write)


def rotary_of_two_kinds() -> Keys:
    """Return the entry for Gemma 3. Layers with a sliding window have their own base, and no scaling."""

    def read(config: Json) -> dict[str, Any]:
        nested = config.get("rope_parameters") or {}
        full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        sliding = nested.get("sliding_attention") or {}
        if sliding.get("rope_type", "default") != "default":
            raise CheckpointError(f"layers with a window have rotary embeddings of kind {shown(sliding['rope_type'])}")
        if others := sorted({*sliding} - {"rope_type", "rope_theta"} | {*full} & {"partial_rotary_factor"}):
            raise CheckpointError(f"{', '.join(others)[:200]} of rotary embeddings of layers of two kinds is unknown")
        if "type" in (config.get("rope_scaling") or {}) and "rope_type" not in full:
            raise CheckpointError("rope_scaling has a type, but no rope_type, which transformers needs here")
        if full.get("truncate", True) is not True:
            raise CheckpointError("truncate is false, which transformers ignores if layers are of two kinds")
        unknown = [name for name in nested if name not in ("full_attention", "sliding_attention")]
        if unknown:
            raise CheckpointError(f"rope_parameters of {', '.join(unknown)[:200]} are unknown")
        local: Any = sliding.get("rope_theta", config.get("rope_local_base_freq", 10_000.0))
        base: Any = full.get("rope_theta", config.get("rope_theta", 1_000_000.0))
        scaled = _scaling_fields(full, config.get("max_position_embeddings"))
        return {"rotary_base": float(base), "window_rotary_base": float(local), **scaled}

    def write(model: ModelConfig) -> dict[str, Any]:
        local = model.rotary_base if model.window_rotary_base is None else model.window_rotary_base
        return {
            "rope_theta": model.rotary_base,
            "rope_local_base_freq": local,
            "rope_scaling": _scaling(model) or None,
        }

    return Keys(("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters"), read, write)


# ------------------------------------------------------------------------------------------------ sliding windows


def _window_fields(size: int | None, windowed: list[bool]) -> dict[str, Any]:
    """Return the fields for a window in which a token attends to `size` keys, including its own."""
    if not any(windowed):
        return {"window_size": None, "window_attn_skip_freq": None}
    if size is None:
        raise CheckpointError("layers have sliding windows, but sliding_window is null or switched off")
    pattern = None if all(windowed) else "[" + ",".join(str(int(each)) for each in windowed) + "]"
    return {"window_size": f"{size - 1},0", "window_attn_skip_freq": pattern}


def _window(model: ModelConfig) -> int | None:
    before = next((layer.keys_before for layer in model.layers if layer.keys_before is not None), None)
    return None if before is None else before + 1


def _layer_types(model: ModelConfig) -> list[str]:
    return ["full_attention" if layer.keys_before is None else "sliding_attention" for layer in model.layers]


def _windowed(config: Json, otherwise: Callable[[int], bool]) -> list[bool]:
    """Return for each layer whether it has a window, from layer_types or, if this key is missing, from `otherwise`."""
    types, layers = config.get("layer_types"), layers_of(config)
    if types is None:
        return [otherwise(layer) for layer in range(layers)]
    unknown = sorted({*types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"layer_types has {', '.join(unknown)[:200]}, which is unknown")
    if len(types) != layers:
        raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers")
    return [kind == "sliding_attention" for kind in types]


def window_everywhere(default: int | None = 4096) -> Keys:
    """Return the entry for Mistral: all layers have a window, or no layer if the key is null."""

    def read(config: Json) -> dict[str, Any]:
        size = config.get("sliding_window", default)
        return _window_fields(size, [size is not None])

    return Keys(("sliding_window",), read, lambda model: {"sliding_window": _window(model)})


def window_from_layer(*, states_layers: bool = False) -> Keys:
    """Return the entry for Qwen: with use_sliding_window, the layers from max_window_layers on have windows.

    `states_layers`: layer_types must then say which layers have windows, because versions of transformers differ.
    """

    def read(config: Json) -> dict[str, Any]:
        size = config.get("sliding_window", 4096) if value_of(config, "use_sliding_window", False) else None
        first = value_of(config, "max_window_layers", 28)
        if states_layers and size is not None and config.get("layer_types") is None:
            raise CheckpointError("use_sliding_window is true, but no layer_types says which layers have windows")
        return _window_fields(size, _windowed(config, lambda layer: size is not None and layer >= first))

    def write(model: ModelConfig) -> dict[str, Any]:
        windowed = [layer.keys_before is not None for layer in model.layers]
        return {
            "use_sliding_window": any(windowed),
            "sliding_window": _window(model),
            "max_window_layers": windowed.index(True) if any(windowed) else model.num_layers,
            "layer_types": _layer_types(model),
        }

    return Keys(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write)


def window_pattern(full_every: int, *, pattern_key: bool = False, default: int = 4096) -> Keys:
    """Return the entry for Gemma: in each group of `full_every` layers, the last one has no window.

    `pattern_key`: the family has a key for the size of the group. `default`: the window if the key is missing.
    """
    pattern = "sliding_window_pattern"

    def read(config: Json) -> dict[str, Any]:
        every = value_of(config, pattern, full_every)
        if every != full_every and not pattern_key and config.get("layer_types") is None:
            raise CheckpointError(f"{pattern} is {shown(every)}, but only {full_every} is supported: give layer_types")
        windowed = _windowed(config, lambda layer: (layer + 1) % every != 0)
        return _window_fields(config.get("sliding_window", default), windowed)

    return Keys(
        ("sliding_window", "layer_types", pattern),
        read,
        lambda model: {"sliding_window": _window(model) or default, "layer_types": _layer_types(model)},
    )
