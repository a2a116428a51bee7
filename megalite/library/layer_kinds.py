"""Kinds of layers of a program's own, as letters of --hybrid-layer-pattern."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

from torch import Tensor, nn

from megalite.config.kinds.kind import Kind
from megalite.config.kinds.table import KINDS
from megalite.config.layer_specs import LETTERS, LayerSpec, Letter, is_free
from megalite.config.model import ModelConfig
from megalite.errors import ConfigurationError, MegaliteError
from megalite.model.batch import LayerContext
from megalite.model.layer_kinds import LAYER_KINDS, mixer_kind
from megalite.model.recompute import Recompute
from megalite.parallel.context import ParallelContext
from megalite.parallel.randomness import SITES

_SITES_OF_PROGRAMS = 1 << 32
"""First number of the sites of dropout of programs' layers."""


def register_layer(
    letter: str,
    name: str,
    make: Callable[[ModelConfig, ParallelContext, str], nn.Module],
    *,
    weights: Callable[[ModelConfig], int],
    products: Callable[[ModelConfig, float], float],
    knows_context: bool = False,
) -> None:
    """Give a letter of --hybrid-layer-pattern a layer of one's own, before a configuration is made.

    A second call for the same letter and name replaces the layer.

    Args:
        letter: a letter from a to z or A to Z that is free.
        name: a word, as `mixer` of `LayerSpec`: the n-th layer of the kind begins its names with `layers.{n}.{name}`.
        make: makes the layer from the network's configuration, its parallel context and the begin of its names. It is
            called with hidden states [sequence (/ size under sequence parallelism), batch, hidden], which have passed a
            norm, and a `LayerContext`, and returns as many, which are added to the residual.
        weights: number of elements of its matrices.
        products: number of products of a forward for one token; the second argument is the number of keys that a token
            attends to (`Kind`).
        knows_context: True if the layer sees no other token than its own, or does what `LayerContext` asks for: it cuts
            at `first_keys`, has only the tokens of `layout`, and keeps a `cache`. Otherwise documents in a sample,
            context parallelism and generation are refused.

    Raises:
        ConfigurationError: the letter or the name is taken, or is none.
    """

    def make_layer(config: ModelConfig, context: ParallelContext, begin: str, recompute: Recompute) -> nn.Module:
        layer = make(config, context, begin)
        if not knows_context:
            layer.register_forward_pre_hook(functools.partial(_refuse_context, letter))
        return layer

    kind = mixer_kind(name, make_layer)
    record = Letter(LayerSpec(name, None), name)
    again = LETTERS.get(letter) == record and SITES.get(kind.site, 0) >= _SITES_OF_PROGRAMS
    if not (again or is_free(letter)):
        raise ConfigurationError(f"register_layer({letter!r}, ...): give a letter from a to z or A to Z that is free")
    if not (again or (name.isidentifier() and name not in {*LAYER_KINDS, "mlp"})):
        raise ConfigurationError(f"register_layer({letter!r}, {name!r}, ...): give another word as the kind's name")
    LETTERS[letter], LAYER_KINDS[name], KINDS[name] = record, kind, Kind(weights, products)
    # By its name, not by its turn: the same layer drops the same elements in every program.
    SITES[kind.site] = _SITES_OF_PROGRAMS + zlib.crc32(name.encode())


def _refuse_context(letter: str, layer: nn.Module, arguments: tuple[Tensor, LayerContext]) -> None:
    """Refuse what a layer would have to know of its context, and has not declared that it knows."""
    _, context = arguments
    asked = {
        "documents in one sample": context.first_keys is not None,
        "context parallelism": not context.layout.is_whole,
        "generation with a cache": context.cache is not None,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise MegaliteError(
                f"layer {letter}, {type(layer).__name__}: {what} needs a layer that knows of it, or that sees no other "
                "tokens: register_layer(..., knows_context=True) says so"
            )
