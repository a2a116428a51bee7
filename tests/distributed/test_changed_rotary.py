"""A run goes on with rotary embeddings that are scaled for longer samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.errors import CheckpointError
from tests.distributed.layout_expected import on_ranks
from tests.distributed.test_upcycling import DENSE, begun, saved, trained
from tests.harness.close import assert_number_close
from tests.harness.rank_pool import RankPools

ROPE = f"{DENSE} --position-embedding-type rope"
YARN = f"{DENSE} --position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8"


@pytest.mark.wide
def test_a_run_goes_on_with_yarn_where_that_is_allowed(tmp_path: Path, rank_pools: RankPools) -> None:
    on_ranks(rank_pools, 1, saved, f"{ROPE} --train-iters 2 --save {tmp_path}")
    on = f"--train-iters 4 --load {tmp_path}"
    with pytest.raises(CheckpointError, match=r"(?s)position_embedding_type: rope in .*--allow-changed-rotary goes on"):
        on_ranks(rank_pools, 1, begun, f"{YARN} {on}")
    ((_, plain, _),) = on_ranks(rank_pools, 1, trained, f"{ROPE} {on}")
    ((_, same, notes),) = on_ranks(rank_pools, 1, trained, f"{ROPE} {on} --allow-changed-rotary")
    assert (same, [note for note in notes if "rotary" in note]) == (plain, [])
    results = on_ranks(rank_pools, 1, trained, f"{YARN} {on} --allow-changed-rotary")
    results += on_ranks(rank_pools, 2, trained, f"{YARN} {on} --allow-changed-rotary --cp 2")
    for _, losses, notes in results:
        for loss, expected, without in zip(losses, results[0][1], plain, strict=True):
            assert_number_close(loss, expected)
            assert loss != pytest.approx(without, rel=1e-6)
        assert any(
            note.startswith("restored: weights, optimizer state (2 updates), position (step 2") for note in notes
        )
        (note,) = [note for note in notes if "rotary" in note]
        assert note.endswith(
            "iter_0000002: position_embedding_type rope -> yarn, rotary_scaling_factor 1.0 -> 4.0, "
            "yarn_original_max_position_embeddings None -> 8"
        )
