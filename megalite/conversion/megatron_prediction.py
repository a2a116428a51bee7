"""Tensors of the depths of multi-token prediction in Megatron-LM's files.

A depth's layers have the names of a network of them alone, behind `mtp.layers.D.mtp_model_layer.`; a GPT's one layer
has no number of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from megalite.checkpoint.manifest import STATE
from megalite.config import ModelConfig
from megalite.config.model import with_layers
from megalite.conversion.mapping import FileTensor, Rule, file_tensors
from megalite.conversion.prediction_layers import rules_of_depths


def file_tensors_of_depths(
    rules: Iterable[Rule], model: ModelConfig, logical: Mapping[str, tuple[int, ...]], halves: int
) -> list[FileTensor]:
    """Return the tensors of the files for the depths of a network. The arguments are those of `file_tensors`."""
    of_depth, found = with_layers(model, model.depth_layers), list[FileTensor]()
    rules = (*rules, *rules_of_depths(""))
    for depth in range(model.own_depths):
        places = {name.replace(f"mtp.{depth}.", "", 1): name for name in logical if is_of_depth(name, depth)}
        own = {name: logical[place] for name, place in places.items()}
        for tensor in file_tensors(rules, of_depth, own, halves):
            boxes = tuple((places[name], box, view) for name, box, view in tensor.boxes)
            found.append(replace(tensor, name=_file_name(tensor.name, depth, model), boxes=boxes))
    return found


def is_of_depth(name: str, depth: int | None = None) -> bool:
    """Tell whether a logical tensor, or a module's state, is of a depth. `depth`: of which; None: of any."""
    number = r"\d+" if depth is None else depth
    return re.match(rf"mtp\.{number}\.", name.removeprefix(STATE)) is not None


def _file_name(name: str, depth: int, model: ModelConfig) -> str:
    """Return the name of a tensor of a depth, by its name in a network of the depth's layers alone."""
    begin = f"mtp.layers.{depth}."
    if not name.startswith("decoder.layers."):
        return begin + name.removeprefix("decoder.")
    inner = "layers." if model.hybrid_layer_pattern is not None else "layers.0."
    kept = "layers." if model.hybrid_layer_pattern is not None else ""
    return f"{begin}mtp_model_layer.{kept}{name.removeprefix('decoder.').removeprefix(inner)}"
