"""Table of the kinds of layers, and what all of them are asked."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.kinds.attention import ATTENTION
from megalite.config.kinds.dense import DENSE
from megalite.config.kinds.experts import EXPERTS
from megalite.config.kinds.gated_delta import GATED_DELTA
from megalite.config.kinds.kimi_delta import KIMI_DELTA
from megalite.config.kinds.kind import Kind, Split, Width
from megalite.config.kinds.latent_attention import LATENT_ATTENTION
from megalite.config.kinds.mamba import MAMBA
from megalite.config.kinds.short_convolution import SHORT_CONVOLUTION
from megalite.config.kinds.sparse_attention import SPARSE_ATTENTION, WITHOUT_INDEXER
from megalite.config.layer_specs import FeedForward, LayerSpec, Mixer
from megalite.config.model import ModelConfig

KINDS: dict[Mixer | FeedForward, Kind] = {
    "attention": ATTENTION,
    "latent_attention": LATENT_ATTENTION,
    "sparse_attention": SPARSE_ATTENTION,
    "dense": DENSE,
    "moe": EXPERTS,
    "mamba": MAMBA,
    "gated_delta": GATED_DELTA,
    "kimi_delta": KIMI_DELTA,
    "short_convolution": SHORT_CONVOLUTION,
}
"""Kinds of layers, by the names of halves in `LayerSpec`; `megalite/library/layer_kinds.py` adds those of a program."""


def kinds_of(layer: LayerSpec) -> list[Kind]:
    """Return the kinds of a layer's halves, the mixer first."""
    shares = layer.mixer == "sparse_attention" and not layer.chooses
    return [WITHOUT_INDEXER if shares and kind == layer.mixer else KINDS[kind] for kind in layer.kinds]


def kind_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each option of a kind of layer that contradicts another, or is for a layer not there."""
    if not model.kinds:  # reported by `relation_problems`
        return
    for name, kind in KINDS.items():
        if name in model.kinds:
            yield from kind.problems(model)
        elif (needed := kind.needed(model)) is not None:
            yield from needs(model, kind.flags, needed)


def splits(model: ModelConfig) -> Iterator[Split]:
    """Yield each width of the network's layers that tensor-parallel ranks divide among themselves."""
    for name, kind in KINDS.items():
        if name in model.kinds:
            yield from kind.splits(model)


def widths(model: ModelConfig) -> Iterator[Width]:
    """Yield the channels of each matrix of the network's layers that tensor-parallel ranks divide."""
    for name, kind in KINDS.items():
        if name in model.kinds:
            yield from kind.widths(model)
