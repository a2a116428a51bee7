"""Tokens by source: counted as a loop over the samples would, from whatever sample on."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.data import sources
from megalite.data.sources import SourceTokens, short_names


def test_tokens_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PIECE", 7)
    chosen = np.random.default_rng(0).integers(0, 3, 100).astype(np.int16)
    counting = SourceTokens(chosen, ["x/a", "x/b", "x/c"], 16)
    for consumed in (0, 4, 30, 31, 100, 50, 51):  # a rewind counts anew
        expected = {
            f"consumed_tokens/{name}": sum(16.0 for sample in chosen[:consumed] if sample == number)
            for number, name in enumerate("abc")
        }
        assert counting.after(consumed) == expected
        assert counting.after(consumed) == expected


def test_a_source_that_is_given_twice_is_one() -> None:
    counting = SourceTokens(np.array([0, 1, 2, 0], np.int16), ["a", "b", "a"], 1)
    assert counting.after(4) == {"consumed_tokens/a": 3.0, "consumed_tokens/b": 1.0}


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["/data/web_text", "/data/code_text"], ["web_text", "code_text"]),
        (["/data/web/text", "/data/code/text", "x"], ["web/text", "code/text", "x"]),
        (["/a/text", "a/text"], ["/a/text", "a/text"]),
        (["a", "a"], ["a", "a"]),
        ([], []),
    ],
)
def test_names_are_the_shortest_that_differ(prefixes: list[str], names: list[str]) -> None:
    assert short_names(prefixes) == names
