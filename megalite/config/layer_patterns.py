"""Layers with windows, with experts and without rotary positions, from Megatron-LM's flags for patterns of layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from megalite.errors import ConfigurationError
from megalite.small_files import shown

MOST_LAYERS = 10_000


def keys_before(window_size: str | None, skip_freq: str | None, layers: int) -> Sequence[int | None]:
    """Return, for each layer, the number of keys before its own position that a token attends to; None: all.

    Raises:
        ConfigurationError: a flag cannot be parsed, or describes another number of layers.
    """
    if window_size is None:
        return [None] * layers
    found = re.fullmatch(r"\(?\s*(\d{1,15})\s*,\s*0\s*\)?", window_size)
    if found is None:
        raise ConfigurationError(
            f"--window-size {shown(window_size)}: expected LEFT,0: how many keys before and after its own a token sees"
        )
    return [int(found[1]) if windowed else None for windowed in _windowed(skip_freq, layers)]


def layers_with_experts(experts: int | None, layer_freq: str | None, layers: int) -> Sequence[bool]:
    """Return, for each layer, whether its feed-forward layer consists of experts.

    Raises:
        ConfigurationError: the flag cannot be parsed, or describes another number of layers.
    """
    if experts is None:
        return [False] * layers
    if layer_freq is None:
        return [True] * layers
    if every := _every(layer_freq):
        return [layer % every == 0 for layer in range(layers)]
    words = "N, for the layers 0, N, 2N, ... with experts, or a 1 (with) or a 0"
    return _pattern("--moe-layer-freq", layer_freq, words, layers)


def layers_without_rotation(freq: str | None, layers: int) -> Sequence[bool]:
    """Return, for each layer, whether its queries and keys are not rotated.

    Raises:
        ConfigurationError: the flag cannot be parsed, or describes another number of layers.
    """
    if freq is not None and (every := _every(freq)) and layers % every:
        raise ConfigurationError(f"--no-rope-freq {freq} does not divide --num-layers {layers}: give a list")
    return _every_nth("--no-rope-freq", freq, "without rotation, or a 1 (without) or a 0", layers)


def layers_with_output_norms(freq: str | None, layers: int) -> Sequence[bool]:
    """Return, for each layer, whether its norms are behind its halves instead of before them.

    Raises:
        ConfigurationError: the flag cannot be parsed, or describes another number of layers.
    """
    return _every_nth("--output-norm-freq", freq, "with norms behind, or a 1 (behind) or a 0", layers)


def layers_of_linear_attention(freq: str | None, layers: int) -> Sequence[bool]:
    """Return, for each layer, whether linear attention is in the place of attention.

    Raises:
        ConfigurationError: the flag cannot be parsed, or describes another number of layers.
    """
    if freq is None:
        return [False] * layers
    if every := _every(freq):
        return [(layer + 1) % every != 0 for layer in range(layers)]
    words = "N, for attention in one layer of N, or a 1 (linear attention) or a 0"
    return _pattern("--linear-attention-freq", freq, words, layers)


def _windowed(skip_freq: str | None, layers: int) -> Sequence[bool]:
    if skip_freq is None:
        return [True] * layers
    if (every := _every(skip_freq)) > 1:
        return [(layer + 1) % every != 0 for layer in range(layers)]
    words = "N, for one layer of N without the window, or a 1 (with) or a 0"
    return _pattern("--window-attn-skip-freq", skip_freq, words, layers)


def _every_nth(flag: str, freq: str | None, words: str, layers: int) -> Sequence[bool]:
    """Return which layers a flag means: every N-th, or those that a list has; None: none. `words`: what they are."""
    if freq is None:
        return [False] * layers
    if every := _every(freq):
        return [(layer + 1) % every == 0 for layer in range(layers)]
    return _pattern(flag, freq, f"N, for every N-th layer {words}", layers)


def _every(text: str) -> int:
    """Return the N of a flag that is a single number; 0 where it is none, and perhaps a list."""
    return int(text) if re.fullmatch(r"\d{1,15}", text) else 0


def _pattern(flag: str, text: str, words: str, layers: int) -> Sequence[bool]:
    """Read a list of 0 and 1, one for each layer, such as `([1]*2+[0])*4`, without running it.

    Raises ConfigurationError for anything else, and for another number of layers.
    """
    try:
        pattern = _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: the expression is nested too deep
        pattern = []
    if not pattern:
        raise ConfigurationError(
            f"{flag} {shown(text)}: expected {words} for each layer, like [1,1,0] or ([1]*2+[0])*4"
        )
    if len(pattern) != layers:
        raise ConfigurationError(f"{flag} {shown(text)} is for {len(pattern)} layers, and the network has {layers}")
    return pattern


def _list(node: ast.expr) -> list[bool]:
    """Evaluate an expression of lists of 0 and 1, their sums and repetitions. Raises ValueError for anything else."""
    match node:
        case ast.List(elements):
            return [_number(element, most=1) == 1 for element in elements]
        case ast.BinOp(left, ast.Add(), right):
            return _list(left) + _list(right)
        case ast.BinOp(left, ast.Mult(), right):
            repeated = _list(left)
            return repeated * _number(right, most=MOST_LAYERS // max(len(repeated), 1))
    raise ValueError


def _number(node: ast.expr, most: int) -> int:
    match node:
        case ast.Constant(int(value)) if 0 <= value <= most:
            return value
    raise ValueError
