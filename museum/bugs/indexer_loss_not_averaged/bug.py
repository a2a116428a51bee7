from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.model.sparse_attention import INDEXER_LOSS
from megalite.parallel.stage import LossTerm
from megalite.training import loss_terms
from megalite.training.loss_terms import Totals
from museum.own_flags import LATENT, MADE_UP, TRAINING

FLAGS = f"""{LATENT} {MADE_UP} {TRAINING} --experimental-attention-variant dsa --dsa-indexer-n-heads 4
--dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.5"""
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = loss_terms.loss_multipliers

    def multipliers(terms: Sequence[LossTerm], counts: Totals, scale: float) -> Totals:
        found = right(terms, counts, scale)
        return {**found, INDEXER_LOSS: 2 * found[INDEXER_LOSS]}  # a rank has two micro-batches

    return mock.patch.object(loss_terms, "loss_multipliers", multipliers)
