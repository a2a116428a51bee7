"""Layouts by letters (`--pipeline-model-parallel-layout`), read as Megatron-LM reads them.

E is the embedding, t a layer, L the output layer and the loss, | begins the next stage. x*n repeats a letter or the
bar, (..)*n what stands between the brackets; commas are for the eye. There are no brackets within brackets.
"""

from __future__ import annotations

import re

from megalite.errors import ConfigurationError
from megalite.small_files import shown

_FLAG = "--pipeline-model-parallel-layout"
_MOST_LETTERS = 100_000
_FOREIGN = {
    "m": "m is a layer of multi-token prediction, which megalite does not have: leave it out",
    "(": "a bracket is closed, holds no other, and says how often it is repeated, as in (tt|)*3",
    ")": "a bracket is opened, holds no other, and says how often it is repeated, as in (tt|)*3",
    "*": "* stands between a letter, | or bracket and how often it is repeated, as in t*3",
}


def stages_of_letters(layout: str) -> list[str]:
    """Return what each stage holds, in order, each letter written out. Raises ConfigurationError for nonsense."""
    text = _written_out(layout)
    for letter in text:
        if letter not in "EtL|":
            meaning = _FOREIGN.get(letter, f"{letter!r} has no meaning: E embedding, t layer, L loss, | next stage")
            raise ConfigurationError(f"{_FLAG} {shown(layout)}: {meaning}")
    return text.split("|")


def layers_of_letters(layout: str, num_layers: int) -> list[int]:
    """The number of layers of each stage, in order. Raises ConfigurationError unless the embedding stands first, the
    loss last, and all layers in between."""
    stages = stages_of_letters(layout)
    letters = "".join(stages)
    ends = (("E", "the embedding", "first", stages[0][:1]), ("L", "the loss", "last", stages[-1][-1:]))
    for letter, name, place, there in ends:
        count = letters.count(letter)
        if count != 1 or there != letter:
            found = f"{count} times" if count != 1 else "elsewhere"
            raise ConfigurationError(
                f"{_FLAG} {shown(layout)}: {letter}, {name}, stands once, {place} of all, not {found}"
            )
    layers = [stage.count("t") for stage in stages]
    if sum(layers) != num_layers:
        raise ConfigurationError(
            f"{_FLAG} {shown(layout)} holds {sum(layers)} layers (t), and --num-layers is {num_layers}: make them the "
            "same"
        )
    return layers


def _written_out(layout: str) -> str:
    """`layout` without commas and repeats; what is in brackets is repeated first."""

    room = _MOST_LETTERS - len(layout)

    def repeated(match: re.Match[str]) -> str:
        nonlocal room
        if len(match[2].lstrip("0")) > 4 or (room := room - len(match[1]) * int(match[2])) < 0:
            raise ConfigurationError(f"{_FLAG}: *{match[2][:20]} is more than any model has layers")
        return match[1] * int(match[2])

    text = layout.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*([0-9]+)", r"([EtmL|])\*([0-9]+)"):
        text = re.sub(pattern, repeated, text)
    return text
