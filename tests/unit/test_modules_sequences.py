"""A rank's part of a batch: the fields that are named are cut by the table of the GPT, in any form of batch."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from megalite.errors import ConfigurationError, DataError
from megalite.modules.sequences import own_part
from megalite.parallel.mesh import UnconnectedMesh

TOKENS, SIZE, PLACES = torch.arange(24).view(2, 12), torch.tensor([3, 4]), torch.arange(12 * 5).view(12, 5)
OF_RANKS = ([0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7])
"""The tokens of three ranks: of six chunks, each has one from the beginning and one from the end."""


def mesh(rank: int, ranks: int = 3) -> UnconnectedMesh:
    return UnconnectedMesh(rank=rank, world_size=ranks, context_parallel_size=ranks)


Pair = namedtuple("Pair", "tokens size")  # as torch's collate keeps it


@pytest.mark.parametrize("rank", range(3))
def test_fields_are_cut_in_any_form_of_batch(rank: int) -> None:
    own = TOKENS[:, OF_RANKS[rank]]
    by_name = own_part({"tokens": TOKENS, "size": SIZE, "places": PLACES}, {"tokens": -1, "places": 0}, mesh(rank))
    assert torch.equal(by_name["tokens"], own)
    assert torch.equal(by_name["places"], PLACES[OF_RANKS[rank]])
    assert by_name["size"] is SIZE
    for batch in ((TOKENS, SIZE), [TOKENS, SIZE], Pair(TOKENS, SIZE)):
        part = own_part(batch, {0: 1}, mesh(rank))
        assert type(part) is type(batch)
        assert torch.equal(part[0], own)
        assert part[1] is SIZE


def test_one_rank_has_all_tokens_of_any_number() -> None:
    odd = {"tokens": TOKENS[:, :7]}
    assert own_part(odd, {"tokens": 1}, mesh(0, 1))["tokens"] is odd["tokens"]


@pytest.mark.parametrize(
    ("batch", "dims", "error", "told"),
    [
        (TOKENS, {"tokens": 1}, ConfigurationError, r"a batch is Tensor: let collate return a mapping or a tuple"),
        ((TOKENS,), {1: 1}, ConfigurationError, r"sequence_dims names 1, and a batch has the fields 0: name fields"),
        ({"a": [1]}, {"a": 1}, ConfigurationError, r"sequence_dims=\{'a': 1\}: the field is list in a batch"),
        ({"a": SIZE}, {"a": -2}, ConfigurationError, r"sequence_dims=\{'a': -2\}: the field is \(2,\) in a batch"),
        ({"a": SIZE}, {"a": 0}, DataError, r"field 'a': 2 tokens .* into 6 equal chunks, two for each of cp=3 ranks"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, dims: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        own_part(batch, dims, mesh(0))
