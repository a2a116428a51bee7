"""Descriptions of layers, and the language of --hybrid-layer-pattern: one letter a layer, | between stages.

Behind / are the letters of a depth, which predicts a further token (`prediction.py`).

A layer has a mixer, a feed-forward layer, or both: a letter is one of them, with its norm and its residual, and a block
of a GPT is both. To add a letter, give it a record in `LETTERS`, its costs and rules a file in `kinds/`, and its
module a row in `megalite/model/layer_kinds.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megalite.errors import ConfigurationError
from megalite.small_files import shown

Mixer = str
"""Kind of mixer: attention, latent_attention, sparse_attention, mamba, gated_delta, kimi_delta, short_convolution, or a
program's own."""
FeedForward = Literal["dense", "moe"]
Names = tuple[str | None, str | None]
"""Begin of the names of a layer's mixer and feed-forward layer; None for one that it lacks."""
PATTERN_FLAG = "--hybrid-layer-pattern"
MAMBA_LETTER, DELTA_LETTER, CONVOLUTION_LETTER, KIMI_LETTER = "M", "G", "L", "K"
ATTENTION_LETTER, LATENT_LETTER, SPARSE_LETTER, EXPERTS_LETTER, NEXT_STAGE, NEXT_DEPTH = "*", "+", "D", "E", "|", "/"
KINDS_WITH_LATENTS = frozenset({"latent_attention", "sparse_attention"})
"""Attention over latents. Layers of both have weights of the same names; the sparse ones may have an indexer, too."""


@dataclass(frozen=True)
class LayerSpec:
    """Description of one layer. The network (`model/block.py`), FLOPs and memory are computed from the list of all.

    Attributes:
        mixer: kind of the half that mixes tokens; None: the layer has none.
        feed_forward: kind of the half that processes each token separately; None: the layer has none.
        keys_before: size of the sliding window: number of keys before its own position that a token attends to; None:
            all.
        rotary: True if attention rotates queries and keys, in a network that has rotary positions.
        output_norm: True if the layer normalises what its halves put out instead of what they read.
        chooses: False if sparse attention takes the keys that the last layer with an indexer has chosen.
    """

    mixer: Mixer | None = "attention"
    feed_forward: FeedForward | None = "dense"
    keys_before: int | None = None
    rotary: bool = True
    output_norm: bool = False
    chooses: bool = True

    @property
    def attends(self) -> bool:
        """True if the mixer computes scores of queries and keys."""
        return self.mixer == "attention" or self.mixer in KINDS_WITH_LATENTS

    @property
    def kinds(self) -> tuple[Mixer | FeedForward, ...]:
        """Kinds of the halves that the layer has, in order."""
        return tuple(kind for kind in (self.mixer, self.feed_forward) if kind is not None)


@dataclass(frozen=True)
class Letter:
    """Letter of a pattern.

    Attributes:
        layer: description of its layer, which has one half.
        words: what it stands for, in messages.
        has_core: True for a mixer with projections, a core and an output layer: it may offload, and compute what is
            around its core again.
        reads_attention: True if the layer reads the flags of attention, as one of a program may.
    """

    layer: LayerSpec
    words: str
    has_core: bool = False
    reads_attention: bool = True

    @property
    def kind(self) -> Mixer | FeedForward:
        """Kind of its half."""
        (kind,) = self.layer.kinds
        return kind

    @property
    def passes_state(self) -> bool:
        """True if its core passes a state on from token to token, as one that is not attention does."""
        return self.has_core and not self.reads_attention


LETTERS: dict[str, Letter] = {
    MAMBA_LETTER: Letter(LayerSpec("mamba", None), "Mamba-2", has_core=True, reads_attention=False),
    DELTA_LETTER: Letter(LayerSpec("gated_delta", None), "gated delta net", has_core=True, reads_attention=False),
    KIMI_LETTER: Letter(LayerSpec("kimi_delta", None), "Kimi delta attention", has_core=True, reads_attention=False),
    CONVOLUTION_LETTER: Letter(LayerSpec("short_convolution", None), "short convolution", reads_attention=False),
    ATTENTION_LETTER: Letter(LayerSpec("attention", None), "attention", has_core=True),
    LATENT_LETTER: Letter(LayerSpec("latent_attention", None), "latent attention", has_core=True),
    SPARSE_LETTER: Letter(LayerSpec("sparse_attention", None), "sparse attention", has_core=True),
    "-": Letter(LayerSpec(None, "dense"), "dense feed-forward", reads_attention=False),
    EXPERTS_LETTER: Letter(LayerSpec(None, "moe"), "experts", reads_attention=False),
}
"""Letters of a pattern; `megalite/library/layer_kinds.py` adds those of a program."""


def kinds_with_core() -> frozenset[Mixer | FeedForward]:
    """Return the kinds whose letters have a core."""
    return frozenset([letter.kind for letter in LETTERS.values() if letter.has_core])


def kinds_without_attention() -> frozenset[Mixer | FeedForward]:
    """Return the kinds that are known not to read the flags of attention."""
    return frozenset([letter.kind for letter in LETTERS.values() if not letter.reads_attention])


def is_free(letter: str) -> bool:
    """Tell whether a program may give a letter a meaning: one that Megatron-LM's language and this one leave free."""
    return len(letter) == 1 and letter.isascii() and letter.isalpha() and letter not in LETTERS


def count_of_pattern(pattern: str) -> int:
    """Return the number of letters of a pattern, known or not, without those of depths."""
    main = pattern.partition(NEXT_DEPTH)[0]
    return len(main) - main.count(NEXT_STAGE)


def specs_of_letters(pattern: str, what: str = PATTERN_FLAG) -> list[LayerSpec]:
    """Return the description of each letter of a pattern, which may be divided into stages.

    `what`: what the pattern is of, in messages.

    Raises:
        ConfigurationError: the pattern has no layer, or a letter that is unknown.
    """
    specs = []
    for place, letter in enumerate(pattern, start=1):
        if letter == NEXT_STAGE:
            continue
        if letter not in LETTERS:
            words = (f"{known} {each.words}" for known, each in LETTERS.items())
            raise ConfigurationError(
                f"{what} {shown(pattern)}: {letter!r}, character {place}, is unknown; there are "
                f"{', '.join(words)}, {NEXT_STAGE} next stage, {NEXT_DEPTH} depth that predicts a further token"
            )
        specs.append(LETTERS[letter].layer)
    if not specs:
        raise ConfigurationError(f"{what} {shown(pattern)} has no layers: give one letter for each")
    return specs


def specs_of_pattern(
    pattern: str, windows: Sequence[int | None], rotary: Sequence[bool], output_norms: Sequence[bool]
) -> tuple[LayerSpec, ...]:
    """Return the descriptions of a pattern's layers.

    `windows` and `rotary`: `keys_before` and `rotary` of each one, if it is attention. `output_norms`: `output_norm`.

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
        replace(spec, keys_before=before, rotary=rotated, output_norm=behind)
        if spec.attends
        else replace(spec, output_norm=behind)
        for spec, before, rotated, behind in zip(specs, windows, rotary, output_norms, strict=True)
    )


def with_shared_choices(layers: Sequence[LayerSpec], every: int, offset: int) -> tuple[LayerSpec, ...]:
    """Return the layers, of which those of sparse attention choose that are among the first `offset`, or so many on.

    As in Megatron-LM, layers of all kinds are counted, from 1 on.
    """

    def shares(number: int, spec: LayerSpec) -> bool:
        return spec.mixer == "sparse_attention" and max(number - max(offset, 1), 0) % every != 0

    return tuple(
        replace(spec, chooses=False) if shares(number, spec) else spec for number, spec in enumerate(layers, start=1)
    )


def pattern_of(layers: Sequence[LayerSpec]) -> str:
    """Return the letters of layers, those of both halves of a block of a GPT in order."""
    of_kinds = {each.kind: letter for letter, each in LETTERS.items()}
    return "".join(of_kinds[kind] for layer in layers for kind in layer.kinds)


def numbers_in_names(layers: Sequence[LayerSpec]) -> tuple[tuple[int | None, int | None], ...]:
    """Return, for each layer, the numbers of its mixer and of its feed-forward layer in the names of their weights.

    None is the number of a half that it lacks.

    Mixers of one kind are counted among themselves, as are those with latents, and all feed-forward layers, whatever
    stands between. So the n-th attention and the n-th feed-forward layer have the names, the initial values and the
    dropout of block n of a GPT, whose checkpoint has a place for each of them.
    """
    counts: Counter[str] = Counter()

    def number(half: str | None) -> int | None:
        if half is None:
            return None
        counts[half] += 1
        return counts[half] - 1

    mixers = ("latents" if layer.mixer in KINDS_WITH_LATENTS else layer.mixer for layer in layers)
    return tuple(
        (number(mixer), number(layer.feed_forward and "feed-forward"))
        for mixer, layer in zip(mixers, layers, strict=True)
    )


def specs_of_depth(layers: Sequence[LayerSpec], letters: str | None) -> tuple[LayerSpec, ...]:
    """Return the descriptions of a depth's layers.

    Each has the window, the rotation and the norms of the last of `layers` with the same halves. Raises
    ConfigurationError for letters that have no layer.

    Args:
        layers: those of the network.
        letters: those of a depth; None for one layer as the network's last.
    """
    if letters is None:
        return (replace(layers[-1], chooses=True),)
    last = {spec.kinds: spec for spec in layers}
    of_depth = specs_of_letters(letters, f"depth of {PATTERN_FLAG}, behind {NEXT_DEPTH},")
    return tuple(replace(last.get(spec.kinds, spec), chooses=True) for spec in of_depth)


def layer_names(layers: Sequence[LayerSpec], of_depth: Sequence[LayerSpec], depths: int) -> tuple[Names, ...]:
    """Return the begin of the names of each layer.

    The layers of the network come first, then those of each depth with weights of its own.
    """
    places = [("layers", layers), *((f"mtp.{depth}.layers", of_depth) for depth in range(depths))]
    return tuple(
        (None if mixer is None else f"{begin}.{mixer}", None if feeds is None else f"{begin}.{feeds}")
        for begin, specs in places
        for mixer, feeds in numbers_in_names(specs)
    )
