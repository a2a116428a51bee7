"""States that context-parallel ranks pass on: the bits of one process, where cuts lie between chunks."""

from __future__ import annotations

import pytest

from megalite.parallel.sequence import SequenceLayout, zigzag
from tests.distributed.state_chain_run import TOKENS, computed
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("ranks", wide_except([2, 3], [3]))
def test_a_chain_of_ranks_has_the_bits_of_one(ranks: int, delta: bool, rank_pools: RankPools) -> None:
    """Outputs and the gradients of each token's inputs."""
    whole = computed(1, delta)
    for rank, found in enumerate(rank_pools(ranks).run(computed, ranks, delta)):
        layout = SequenceLayout.cut(TOKENS, zigzag(ranks), rank)
        for number, (own, expected) in enumerate(zip(found, whole, strict=True)):
            assert_bits_equal(own, layout.own(expected, 0), f"{number} on rank {rank}")
