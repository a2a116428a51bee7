"""Places of the samples of a source: a pure function of the tokens that it has given before, and of past lengths.

A source is read pass after pass. What it has given lies in its passes without a gap: the sample that a pass ends in has
the first tokens of the next pass, too.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite.extras.mixes.reading import InOrder, InTurns, Reading, lanes


class Cut(NamedTuple):
    """Length of the samples that a source gives from a token on."""

    given: int
    """Tokens that the source has given before."""
    length: int


Part = tuple[int, int, int]
"""Tokens of a sample: the number of the pass, the first of them in its stream, and the one behind the last."""


@dataclass(frozen=True)
class BlendOrder:
    """The first pass of a source that has been part of a blend: the samples of the blend's order that it has not read.

    Attributes:
        order: numbers of these samples, in the order of the blend.
        length: tokens of a sample.
        samples: number of all samples of the stream.
        tokens: tokens of the stream, which may have several epochs.
    """

    order: np.ndarray
    length: int
    samples: int
    tokens: int

    @property
    def left(self) -> int:
        """Number of tokens that have not been read."""
        return len(self.order) * self.length + self.tokens - self.samples * self.length

    def reading(self, length: int) -> Reading:
        """Return the order of samples of a length: the blend's own, if they are as long as its samples."""
        read = InOrder(self.order, self.length, self.samples, self.tokens)
        return read if length == self.length else InTurns(read.rest(0), length)


class Course:
    """Samples of a source.

    Args:
        tokens: tokens of a pass, at least 1.
        cuts: lengths of the samples, the first one from token 0 on.
        blend: what is read before the first pass; None: nothing. It is pass 0 then.
    """

    def __init__(self, tokens: int, cuts: Sequence[Cut], blend: BlendOrder | None = None) -> None:
        self._tokens, self._cuts, self._blend = tokens, cuts, blend
        self._lead = 0 if blend is None else blend.left
        self._givens = [cut.given for cut in cuts]
        # The order in use: its pass, the number of cuts before, the token at which it began, and itself.
        self._found: tuple[int, int, int, Reading] | None = None

    def parts(self, given: int) -> list[Part]:
        """Return the parts of the sample before which the source has given so many tokens."""
        cuts = len(self._givens) if given >= self._givens[-1] else bisect.bisect_right(self._givens, given)
        length, number = self._cuts[cuts - 1].length, self._pass_at(given)
        if (kept := self._found) is None or kept[0] != number or kept[1] != cuts:
            kept = self._found = (number, cuts, *self._reading(number, given))
        _, _, at, reading = kept
        sample = (given - at) // length
        found = [(number, begin, end) for begin, end in reading.ranges(sample)]
        if sample < reading.whole:
            return found
        missing = length - sum(end - begin for _, begin, end in found)
        while missing:
            number += 1
            found.append((number, 0, min(missing, self._tokens)))
            missing -= found[-1][2]
        return found

    def _pass_at(self, given: int) -> int:
        if given < self._lead:
            return 0
        return (given - self._lead) // self._tokens + (self._blend is not None)

    def _reading(self, number: int, given: int) -> tuple[int, Reading]:
        """Return the order of a pass that is in force at a token, and the token at which that order began."""
        begin = 0
        if number or self._blend is None:
            begin = self._lead + (number - (self._blend is not None)) * self._tokens
        current = bisect.bisect_right(self._givens, begin) - 1
        cut = self._cuts[current]
        reading: Reading
        if begin < self._lead:
            assert self._blend is not None
            at, reading = begin, self._blend.reading(cut.length)
        else:
            read = (cut.given - begin) % cut.length  # by the sample that the pass before ends in
            at, reading = begin + read, InTurns(lanes(read, self._tokens), cut.length)
        for later in self._cuts[current + 1 :]:
            if later.given > given:
                break
            segments = reading.rest((later.given - at) // cut.length)
            at, cut, reading = later.given, later, InTurns(segments, later.length)
        return at, reading
