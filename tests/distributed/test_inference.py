"""A split model, run forward, says what the oracle says of the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.inference_run import scored, whole_weights
from tests.distributed.layout_cell import SEQUENCE, VOCABULARIES, Cell, oracle
from tests.distributed.layout_expected import on_ranks, one_thread
from tests.harness.rank_pool import RankPools

CELLS = (
    Cell("gpt2", vocabulary="odd"),
    Cell("llama", key_values="uneven6", tied=False),
    Cell("neox", key_values="mqa", vocabulary="empty"),
    Cell("gemma", key_values="few"),
)
LAYOUTS = {"alone": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2), "pp3": (1, 3)}


def laid_out(layout: str) -> list[Cell]:
    tp, pp = LAYOUTS[layout]
    return [Cell(c.family, c.key_values, tied=c.tied, vocabulary=c.vocabulary, tp=tp, pp=pp) for c in CELLS]


@pytest.fixture(autouse=True)
def small_tensors() -> None:
    with one_thread():
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_scores_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    cells = laid_out(layout)
    tokens = torch.randint(15, (3, SEQUENCE), generator=torch.Generator().manual_seed(0))
    ranks = on_ranks(rank_pools, cells[0].world_size, scored, cells, tokens)
    for number, cell in enumerate(cells):
        expected = oracle(cell).logits(whole_weights(cell), tokens, torch.arange(SEQUENCE).expand(3, -1))
        expected = expected[..., : VOCABULARIES[cell.vocabulary][0]]
        labels = tokens[:, 1:, None]
        for found in ranks:
            logits, scores, likeliest = found[number]
            close(logits, expected)
            close(scores, expected[:, :-1].log_softmax(-1).gather(-1, labels).squeeze(-1))
            assert torch.equal(likeliest, expected[:, :-1].argmax(-1)), cell


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
