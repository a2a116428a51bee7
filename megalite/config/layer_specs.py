"""Descriptions of layers, and the language of --hybrid-layer-pattern: one letter a layer, | between stages.

A layer has a mixer, a feed-forward layer, or both: a letter is one of them, with its norm and its residual, and a block
of a GPT is both. To add a letter, give it a `LayerSpec` in `LETTERS`, its costs in `layer_costs.py`, and its module in
`megalite/model/layer_kinds.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalite.errors import ConfigurationError
from megalite.small_files import shown

Mixer = str
"""Kind of mixer: attention, mamba, gated_delta, kimi_delta, short_convolution, or one that a program has added."""
FeedForward = Literal["dense", "moe"]
KINDS_WITH_CORE = frozenset({"attention", "mamba", "gated_delta", "kimi_delta"})
"""Mixers with projections, a core and an output layer: they may offload, and compute what is around a core again."""
KINDS_WITHOUT_ATTENTION = frozenset({"mamba", "gated_delta", "kimi_delta", "short_convolution", "dense", "moe"})
"""Kinds that do not read the flags of attention; those of a program may."""
PATTERN_FLAG = "--hybrid-layer-pattern"
MAMBA_LETTER, DELTA_LETTER, CONVOLUTION_LETTER, KIMI_LETTER = "M", "G", "L", "K"
ATTENTION_LETTER, EXPERTS_LETTER, NEXT_STAGE = "*", "E", "|"


@dataclass(frozen=True)
class LayerSpec:
    """Description of one layer. The network (`model/block.py`), FLOPs and memory are computed from the list of all.

    Attributes:
        mixer: kind of the half that mixes tokens; None: the layer has none.
        feed_forward: kind of the half that processes each token separately; None: the layer has none.
        keys_before: size of the sliding window: number of keys before its own position that a token attends to; None:
            all.
        rotary: True if attention rotates queries and keys, in a network that has rotary positions.
    """

    mixer: Mixer | None = "attention"
    feed_forward: FeedForward | None = "dense"
    keys_before: int | None = None
    rotary: bool = True

    @property
    def kinds(self) -> tuple[Mixer | FeedForward, ...]:
        """Kinds of the halves that the layer has, in order."""
        return tuple(kind for kind in (self.mixer, self.feed_forward) if kind is not None)


LETTERS: dict[str, LayerSpec] = {
    MAMBA_LETTER: LayerSpec("mamba", None),
    DELTA_LETTER: LayerSpec("gated_delta", None),
    KIMI_LETTER: LayerSpec("kimi_delta", None),
    CONVOLUTION_LETTER: LayerSpec("short_convolution", None),
    ATTENTION_LETTER: LayerSpec("attention", None),
    "-": LayerSpec(None, "dense"),
    EXPERTS_LETTER: LayerSpec(None, "moe"),
}
"""Letters of a pattern; `megalite/library/layer_kinds.py` adds those of a program."""
_WORDS = {
    MAMBA_LETTER: "Mamba-2",
    DELTA_LETTER: "gated delta net",
    KIMI_LETTER: "Kimi delta attention",
    CONVOLUTION_LETTER: "short convolution",
    "-": "dense feed-forward",
    EXPERTS_LETTER: "experts",
}
_LATER = {
    "+": "multi-head latent attention",
    "D": "sparse attention",
    "/": "the beginning of a layer of multi-token prediction",
}


def is_free(letter: str) -> bool:
    """Tell whether a program may give a letter a meaning: one that Megatron-LM's language and this one leave free."""
    return len(letter) == 1 and letter.isascii() and letter.isalpha() and letter not in {*LETTERS, *_LATER}


def count_of_pattern(pattern: str) -> int:
    """Return the number of letters of a pattern, known or not."""
    return len(pattern) - pattern.count(NEXT_STAGE)


def specs_of_letters(pattern: str) -> list[LayerSpec]:
    """Return the description of each letter of a pattern, which may be divided into stages.

    Raises:
        ConfigurationError: the pattern has no layer, or a letter that is unknown or not supported.
    """
    specs = []
    for place, letter in enumerate(pattern, start=1):
        if letter == NEXT_STAGE:
            continue
        if letter not in LETTERS:
            words = (f"{known} {_WORDS.get(known, spec.mixer)}" for known, spec in LETTERS.items())
            what = f"{_LATER[letter]}, which megalite does not have yet" if letter in _LATER else "unknown"
            raise ConfigurationError(
                f"{PATTERN_FLAG} {shown(pattern)}: {letter!r}, character {place}, is {what}; there are "
                f"{', '.join(words)}, {NEXT_STAGE} next stage"
            )
        specs.append(LETTERS[letter])
    if not specs:
        raise ConfigurationError(f"{PATTERN_FLAG} {shown(pattern)} has no layers: give one letter for each")
    return specs


def specs_of_pattern(pattern: str, windows: Sequence[int | None], rotary: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """Return the descriptions of a pattern's layers.

    `windows` and `rotary`: `keys_before` and `rotary` of each one, if it is attention.

    Raises:
        ConfigurationError: a letter has no layer, or there is another number of layers than of windows: that of
            --num-layers.
    """
    specs = specs_of_letters(pattern)
    if len(specs) != len(windows):
        raise ConfigurationError(
            f"{PATTERN_FLAG} {shown(pattern)} has {len(specs)} layers, but --num-layers is {len(windows)}: leave "
            "--num-layers out"
        )
    return tuple(
        replace(spec, keys_before=before, rotary=rotated) if spec.mixer == "attention" else spec
        for spec, before, rotated in zip(specs, windows, rotary, strict=True)
    )


def pattern_of(layers: Sequence[LayerSpec]) -> str:
    """Return the letters of layers, those of both halves of a block of a GPT in order."""
    of_kinds = {kind: letter for letter, spec in LETTERS.items() for kind in spec.kinds}
    return "".join(of_kinds[kind] for layer in layers for kind in layer.kinds)


def numbers_in_names(layers: Sequence[LayerSpec]) -> tuple[tuple[int | None, int | None], ...]:
    """Return, for each layer, the numbers of its mixer and of its feed-forward layer in the names of their weights.

    None is the number of a half that it lacks.

    Mixers of one kind are counted among themselves, and so are all feed-forward layers, whatever stands between. So the
    n-th attention and the n-th feed-forward layer have the names, the initial values and the dropout of block n of a
    GPT, whose checkpoint has a place for each of them.
    """
    counts: Counter[str] = Counter()

    def number(half: str | None) -> int | None:
        if half is None:
            return None
        counts[half] += 1
        return counts[half] - 1

    return tuple((number(layer.mixer), number(layer.feed_forward and "feed-forward")) for layer in layers)
