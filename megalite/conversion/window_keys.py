"""Keys of a config.json for sliding windows: their length, and the layers that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite.config import ModelConfig
from megalite.config.attention_windows import MOST_LAYERS
from megalite.conversion.config_keys import Json, Keys
from megalite.errors import CheckpointError
from megalite.small_files import shown


def _window_fields(size: int | None, windowed: list[bool]) -> dict[str, Any]:
    """Return the fields for a window in which a token sees `size` keys, its own among them."""
    if size is None or not any(windowed):
        return {"window_size": None, "window_attn_skip_freq": None}
    pattern = None if all(windowed) else "[" + ",".join(str(int(each)) for each in windowed) + "]"
    return {"window_size": f"{size - 1},0", "window_attn_skip_freq": pattern}


def _window(model: ModelConfig) -> int | None:
    before = next((layer.keys_before for layer in model.layers if layer.keys_before is not None), None)
    return None if before is None else before + 1


def _layer_types(model: ModelConfig) -> list[str]:
    return ["full_attention" if layer.keys_before is None else "sliding_attention" for layer in model.layers]


def _windowed(config: Json, otherwise: Callable[[int], bool]) -> list[bool]:
    """Return which layers have a window, by layer_types or, if that key is missing, by `otherwise`."""
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if type(layers) is not int or layers > MOST_LAYERS:
        raise CheckpointError(f"num_hidden_layers is {shown(layers)}, where at most {MOST_LAYERS:,} are")
    if types is None:
        return [otherwise(layer) for layer in range(layers)]
    unknown = sorted({*types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"layer_types has {', '.join(unknown)[:200]}, which is unknown")
    if len(types) != layers:
        raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers")
    return [kind == "sliding_attention" for kind in types]


def window_everywhere(default: int = 4096) -> Keys:
    """Return the entry of Mistral: all layers have a window, or none if it is null."""

    def read(config: Json) -> dict[str, Any]:
        return _window_fields(config.get("sliding_window", default), [True])

    return Keys(("sliding_window",), read, lambda model: {"sliding_window": _window(model)})


def window_from_layer() -> Keys:
    """Return the entry of Qwen: windows only with use_sliding_window, and then from layer max_window_layers on."""

    def read(config: Json) -> dict[str, Any]:
        size = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        return _window_fields(size, _windowed(config, lambda layer: layer >= config.get("max_window_layers", 28)))

    def write(model: ModelConfig) -> dict[str, Any]:
        first = next(
            (number for number, layer in enumerate(model.layers) if layer.keys_before is not None), model.num_layers
        )
        size = _window(model)
        return {
            "use_sliding_window": size is not None,
            "sliding_window": size,
            "max_window_layers": first,
            "layer_types": _layer_types(model),
        }

    return Keys(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write)


def window_pattern(full_every: int, default: int = 4096) -> Keys:
    """Return the entry of Gemma: in each group of `full_every` layers, the last one sees all keys."""

    def read(config: Json) -> dict[str, Any]:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern")) or full_every
        windowed = _windowed(config, lambda layer: (layer + 1) % every != 0)
        return _window_fields(config.get("sliding_window", default), windowed)

    return Keys(
        ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
        read,
        lambda model: {"sliding_window": _window(model) or default, "layer_types": _layer_types(model)},
    )
