"""Sources of a blend: tokens are counted as a loop over the samples would, from whatever sample on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megalite.data import sources
from megalite.data.sampler import equal_deal
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


def test_samples_left_out_are_not_counted() -> None:
    """Counts are of the samples that the sampler gives: at the end of the data the first ones come again."""
    chosen = np.random.default_rng(0).integers(0, 2, 40).astype(np.int16)
    left_out = [(3, 5), (20, 20)]
    counting = SourceTokens(chosen, ["a", "b"], 1)
    for consumed in (1, 3, 4, 16, 17, 18, 36, 38, 40, 2):
        deal = replace(equal_deal(0, 1, consumed), left_out=left_out)
        drawn = [sample for part in deal.samples(0, 1, range(40)) for sample in part]
        expected = {
            f"consumed_tokens/{name}": float((chosen[drawn] == number).sum()) for number, name in enumerate("ab")
        }
        assert counting.after(consumed, left_out) == expected


def test_a_source_that_is_given_twice_is_one() -> None:
    counting = SourceTokens(np.array([0, 1, 2, 0], np.int16), ["a", "b", "a"], 1)
    assert counting.after(4) == {"consumed_tokens/a": 3.0, "consumed_tokens/b": 1.0}
    assert [counting.names[counting.of(sample)] for sample in range(4)] == ["a", "b", "a", "a"]


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
