"""Depths of multi-token prediction (arXiv:2412.19437): their part of a pattern of layers, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.config.fields import named, needs, with_defaults
from megalite.config.kinds.table import KINDS
from megalite.config.layer_specs import NEXT_DEPTH, NEXT_STAGE, PATTERN_FLAG
from megalite.config.model import ModelConfig
from megalite.errors import ConfigurationError
from megalite.small_files import shown

DEPTHS_FLAG = "--mtp-num-layers"
FIELDS = "mtp_num_layers mtp_hybrid_override_pattern mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads"
"""Fields of a network that describe its depths."""
NEEDED = f"{DEPTHS_FLAG}, or {NEXT_DEPTH} in {PATTERN_FLAG}"
"""Flags that these fields need."""


def without_depths(model: ModelConfig) -> ModelConfig:
    """Return the network that predicts the next token alone, without the sizes of layers that only depths have."""
    alone: ModelConfig = with_defaults(model, FIELDS.split())
    others = (KINDS[kind].flags for kind in model.kinds - alone.kinds)
    found: ModelConfig = with_defaults(alone, named(alone, " ".join(others)))
    return found


def with_depths_of_pattern(model: ModelConfig) -> ModelConfig:
    """Move the depths written in the pattern of layers into the fields for depths, and drop the fields of 0 depths.

    Raises:
        ConfigurationError: the depths have different letters, or are divided into stages.
    """
    if (pattern := model.hybrid_layer_pattern) is not None and NEXT_DEPTH in pattern:
        main, parts = split_pattern(pattern)
        model = replace(model, hybrid_layer_pattern=main)
        if parts:
            model = replace(model, mtp_num_layers=len(parts), mtp_hybrid_override_pattern=parts[0])
    return without_depths(model) if model.mtp_num_layers == 0 else model


def split_pattern(pattern: str) -> tuple[str, list[str]]:
    """Return the letters of the network, with its stages, and those of each depth.

    Raises ConfigurationError as `with_depths_of_pattern` does.
    """
    main, *parts = pattern.rstrip(NEXT_DEPTH).split(NEXT_DEPTH)
    what = f"{PATTERN_FLAG} {shown(pattern)}"
    if len(set(parts)) > 1:
        other = next(part for part in parts if part != parts[0])
        raise ConfigurationError(
            f"{what} has the depths {shown(parts[0])} and {shown(other)}: give all of them the same letters"
        )
    if parts and NEXT_STAGE in parts[0]:
        raise ConfigurationError(f"{what}: {NEXT_STAGE} is not for depths, which are on the last stage: leave it out")
    return main, parts


def depth_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each relation between a network and its depths that does not hold."""
    pattern, letters = model.hybrid_layer_pattern, model.mtp_hybrid_override_pattern
    if not model.depths:
        yield from needs(model, "mtp_*", NEEDED)
        return
    if model.position_embedding_type == "learned_absolute":
        yield (
            f"{DEPTHS_FLAG} {model.depths} needs --position-embedding-type rope, yarn or none: learned positions are "
            "added to the first embedding alone"
        )
    if pattern is not None and letters is None:
        yield f"{DEPTHS_FLAG} {model.depths}: give the letters of a depth in {PATTERN_FLAG} {shown(pattern)}, behind /"
    if pattern is None and letters is not None:
        yield f"--mtp-hybrid-override-pattern {shown(letters)} needs {PATTERN_FLAG}"
    if wrong := next((letter for letter in letters or "" if letter in (NEXT_STAGE, NEXT_DEPTH)), None):
        yield (
            f"--mtp-hybrid-override-pattern {shown(letters)} has {wrong}: give the letters of one depth, which all "
            f"depths have; {DEPTHS_FLAG} says how many there are"
        )
