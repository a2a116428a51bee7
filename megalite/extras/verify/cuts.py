"""Cuts of whole tensors into the parts that ranks have, by what a trace says or by the recorded shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.extras.verify.trace import Place
from megalite.parallel.sequence import zigzag
from megalite.parallel.sharding import Box

Cut = Callable[[Tensor], Tensor]


class NoCounterpart(Exception):
    """Error: a recorded tensor is not in megalite's network, or not in this form; the text says why."""


def same(whole: Tensor) -> Tensor:
    return whole


def box_of(offset: tuple[int, ...], size: tuple[int, ...], whole: tuple[int, ...]) -> Cut:
    """Return the cut of a box. Raises NoCounterpart if it is not within the tensor."""
    if len(offset) != len(whole) or any(sum(each) > most for *each, most in zip(offset, size, whole, strict=True)):
        raise NoCounterpart(f"its part of {list(size)} from {list(offset)} on is not within {list(whole)}")
    return lambda values: values[Box(offset, size).slices()]


def shape_after(cut: Cut, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(cut(torch.zeros((), dtype=torch.uint8).expand(shape)).shape)


def tokens_of(cp: tuple[int, int], sequence: int) -> Tensor:
    """Return the indices of a context-parallel rank's tokens in their sample, as Megatron-LM cuts it."""
    rank, ranks = cp
    chunks = torch.arange(sequence).chunk(2 * ranks) if ranks > 1 else (torch.arange(sequence),)
    return torch.cat([chunks[number] for number in zigzag(ranks)[rank]]) if ranks > 1 else chunks[0]


def split_by(place: Place, shape: tuple[int, ...], whole: tuple[int, ...]) -> Cut:
    """Return the cut that a trace says itself. Raises NoCounterpart if it does not give the recorded shape."""

    def cut(values: Tensor) -> Tensor:
        for split in place.splits:
            count = split.count if split.kind == "block" else 2 * split.count
            chunks = values.chunk(count, split.dimension)
            numbers = [split.index] if split.kind == "block" else [split.index, count - 1 - split.index]
            empty = values.narrow(split.dimension, 0, 0)
            values = torch.cat([chunks[at] if at < len(chunks) else empty for at in numbers], split.dimension)
        return values

    if any(split.dimension >= len(whole) for split in place.splits) or shape_after(cut, whole) != shape:
        raise NoCounterpart(f"its place does not cut {list(whole)} into {list(shape)}")
    return cut


@dataclass(frozen=True)
class SplitOf:
    """Dimensions of a recorded tensor that are a rank's part."""

    tokens: bool
    features: bool


def fitting(
    shape: tuple[int, ...],
    order: str,
    free: bool,
    batch: int,
    tokens: int,
    tp: tuple[int, int],
    features: int,
    own: int,
) -> tuple[str, SplitOf] | None:
    """Return the order of dimensions, and what is split, that give a shape; the usual order first."""
    for dimensions in dict.fromkeys((order, *(("sbh", "bsh") if free else ()))):
        for split in _splits(tp[1]):
            count = tokens // tp[1] if split.tokens else tokens
            width = own if split.features else features
            sizes = {"s": count, "b": batch, "h": width, "t": count * batch}
            wanted = tuple(sizes.get(letter, 0) for letter in dimensions)
            flat = (count * batch, width)
            if shape in (wanted, flat):
                return dimensions, split
    return None


def _splits(ranks: int) -> Iterator[SplitOf]:
    """Yield what may be split, the likeliest first."""
    if ranks > 1:
        yield SplitOf(tokens=False, features=True)
        yield SplitOf(tokens=True, features=False)
    yield SplitOf(tokens=False, features=False)
