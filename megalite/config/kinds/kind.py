"""Record of a kind of layer, which each file beside this one fills in for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megalite.config.layer_specs import PATTERN_FLAG
from megalite.config.model import ModelConfig


@dataclass(frozen=True)
class Split:
    """Width that tensor-parallel ranks divide among themselves.

    Attributes:
        words: what it is, in errors.
        size: number of heads or channels.
        flag: flag that gives the size, which the errors of a run begin with; empty: they begin with the ranks.
        groups: flag and number of groups of these heads, if each rank needs whole groups or a part of one.
    """

    words: str
    size: int
    flag: str = ""
    groups: tuple[str, int] | None = None

    def problems(self, ranks: int) -> Iterator[str]:
        """Yield a line if so many tensor-parallel ranks cannot divide it evenly."""
        flag = f"--tensor-model-parallel-size {ranks}"
        if self.size % ranks:
            yield f"{flag} does not divide the {self.words}, {self.size}"
        elif self.groups is not None and self.groups[1] % ranks and ranks % self.groups[1]:
            name, groups = self.groups
            yield f"{flag} is neither a divisor nor a multiple of {name} {groups}: ranks cannot share them evenly"


@dataclass(frozen=True)
class Width:
    """Channels of a matrix that tensor-parallel ranks divide among themselves, as whole blocks in products of few bits.

    Attributes:
        words: the flags and numbers that it is the product of.
        channels: number of channels.
        groups: flag and number of groups of heads that it belongs to; ranks share none. None: it has no groups.
    """

    words: str
    channels: int
    groups: tuple[str, int] | None = None

    def problems(self, flag: str, block: int, ranks: int, divided: str) -> Iterator[str]:
        """Yield a line if a rank would have a part of a block, or of a group.

        `flag`: that of the recipe; `divided`: that of the ranks.
        """
        if self.groups is not None and self.groups[1] % ranks:
            name, groups = self.groups
            yield (
                f"{flag} with {divided} {ranks}: ranks that share one of {name} {groups} would each round a part of "
                f"its gradient: give a number of ranks that divides {groups}"
            )
        elif self.channels % (block * ranks):
            following = -(-self.channels // (block * ranks)) * block * ranks
            yield (
                f"{flag} with {divided} {ranks}: {self.words}, {self.channels} channels, are no blocks of {block} on "
                f"each rank: the next width is {following}"
            )


@dataclass(frozen=True)
class Kind:
    """Costs and rules of a kind of layer.

    Attributes:
        weights: number of elements of its matrices.
        products: number of products of a forward for one token, each with an addition. The second argument is the
            number of keys that the token attends to.
        flags: fields that only layers of this kind read, named as for `needs`.
        needed: what these flags need, in a network without such layers; None: another error says it.
        problems: yields a line for each option of such layers that contradicts another.
        splits: widths that tensor-parallel ranks divide.
        widths: the same as channels of matrices.
    """

    weights: Callable[[ModelConfig], int]
    products: Callable[[ModelConfig, float], float]
    flags: str = ""
    needed: Callable[[ModelConfig], str | None] = lambda model: None
    problems: Callable[[ModelConfig], Iterable[str]] = lambda model: ()
    splits: Callable[[ModelConfig], Iterable[Split]] = lambda model: ()
    widths: Callable[[ModelConfig], Iterable[Width]] = lambda model: ()


def in_pattern(what: str, letter: str) -> str:
    """Return what a flag needs that is for the layer of a letter."""
    return f"{what}, {letter} in {PATTERN_FLAG}"
