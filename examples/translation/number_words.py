"""Numbers below a million, and their names in English."""

from __future__ import annotations

import torch

ALL = """END zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand"""
WORDS = ALL.split()
DIGITS, LENGTH = 6, 10  # the longest name has nine words, and END


def name(number: int) -> list[str]:
    """Return the words of a number's name.

    >>> name(40_206)
    ['forty', 'thousand', 'two', 'hundred', 'six']
    """
    for size, word in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            return [*name(number // size), word, *(name(number % size) if number % size else [])]
    if number < 20:
        return [WORDS[1 + number]]
    return [WORDS[19 + number // 10], *(name(number % 10) if number % 10 else [])]


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return different numbers as `digits` [6] and `words` [11]: END, the name, and END again and again."""
    found = []
    for number in torch.randperm(10**DIGITS, generator=torch.Generator().manual_seed(seed))[:count].tolist():
        written = [WORDS.index(word) for word in ("END", *name(number))]
        written += [0] * (1 + LENGTH - len(written))
        digits = [int(digit) for digit in f"{number:0{DIGITS}}"]
        found.append({"digits": torch.tensor(digits), "words": torch.tensor(written)})
    return found
