"""Keys of a config.json for rotary embeddings: their base, the rotated share, and their scaling.

Keys are written under the names that published checkpoints have and that every version of transformers reads
(`rope_theta`, `rope_scaling`). The keys that version 5 writes (`rope_parameters`) are read, too.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from megalite.config import ModelConfig
from megalite.conversion.config_keys import Json, Keys
from megalite.errors import CheckpointError
from megalite.small_files import shown

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
"""Keys of each kind of scaling, with their fields. A missing key means the field's default, except that the original
length is then max_position_embeddings."""


@cache
def _field_defaults() -> dict[str, Any]:
    return {field.name: field.default for field in fields(ModelConfig)}


def _scaling_fields(parameters: Json, max_positions: Any) -> dict[str, Any]:
    """Return the fields for rotary parameters of either generation; `max_positions`: max_position_embeddings."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _SCALINGS:
        raise CheckpointError(f"rotary embeddings are scaled by {shown(kind)}, where {', '.join(_SCALINGS)} are known")
    known = _SCALINGS[kind]
    handled = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    unknown = sorted(name for name in parameters if name not in known and name not in handled)
    if unknown:
        raise CheckpointError(f"{', '.join(unknown)[:200]} of rotary embeddings scaled by {shown(kind)} is unknown")
    given = {name: parameters[name] for name in known if parameters.get(name) is not None}
    if "original_max_position_embeddings" in known:
        given.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        given.setdefault("factor", max_positions / given["original_max_position_embeddings"])
        if not (given.get("mscale") and given.get("mscale_all_dim")):  # one alone says nothing
            given = {name: value for name, value in given.items() if not name.startswith("mscale")}
    elif "factor" in known and "factor" not in given:
        raise CheckpointError(f"rotary embeddings scaled by {shown(kind)} have no factor")
    values = {known[name]: value for name, value in given.items()}
    return values | {
        "use_rope_scaling": kind == "llama3",
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
    }


def _scaling(model: ModelConfig) -> dict[str, Any]:
    """Return the scaling keys of a model; {} if nothing is scaled."""
    kind = "default"
    if model.position_embedding_type == "yarn":
        kind = "yarn"
    elif model.use_rope_scaling:
        kind = "llama3"
    elif model.rotary_seq_len_interpolation_factor is not None:
        kind = "linear"
    values = {name: getattr(model, field) for name, field in _SCALINGS[kind].items()}
    if kind == "yarn":
        left_out = {name for name, field in _SCALINGS[kind].items() if values[name] == _field_defaults()[field]}
        if "mscale" not in left_out or "mscale_all_dim" not in left_out:  # one alone says nothing
            left_out -= {"mscale", "mscale_all_dim"}
        # The factor is always said: left out it would be that of the two lengths.
        values = {name: value for name, value in values.items() if name == "factor" or name not in left_out}
    return {"rope_type": kind, **values} if values else {}


def rotary(theta: str = "rope_theta", share: str | None = None, default_share: float = 1.0) -> Keys:
    """Return the entry of rotary embeddings: their base, the rotated share of a head, and their scaling.

    `share`: the key of the rotated share; None: the family rotates whole heads, whatever its files say.
    """

    def read(config: Json) -> dict[str, Any]:
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        base: Any = parameters.get("rope_theta", config.get(theta, 10000.0))
        part: Any = parameters.get("partial_rotary_factor", config.get(share or "partial_rotary_factor", default_share))
        if share is None and part != 1.0:
            raise CheckpointError(f"partial_rotary_factor is {shown(part)}, where this family rotates all of a head")
        scaled = _scaling_fields(parameters, config.get("max_position_embeddings"))
        return {"rotary_base": float(base), "rotary_percent": float(part), **scaled}

    def write(model: ModelConfig) -> dict[str, Any]:
        written = {theta: model.rotary_base, "rope_scaling": _scaling(model) or None}
        return written if share is None else written | {share: model.rotary_percent}

    return Keys((theta, share or "partial_rotary_factor", "rope_scaling", "rope_parameters"), read, write)


def rotary_of_two_kinds() -> Keys:
    """Return the entry of Gemma 3: layers with a sliding window have a base of their own, unscaled."""

    def read(config: Json) -> dict[str, Any]:
        nested = config.get("rope_parameters") or {}
        full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        sliding = nested.get("sliding_attention") or {}
        if sliding.get("rope_type", "default") != "default":
            raise CheckpointError(f"layers with a window have rotary embeddings of kind {shown(sliding['rope_type'])}")
        if "type" in (config.get("rope_scaling") or {}) and "rope_type" not in full:
            raise CheckpointError("rope_scaling has a type and no rope_type, by which transformers scales here")
        if not full.get("truncate", True):
            raise CheckpointError("truncate is false, which transformers does not see where layers are of two kinds")
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
