"""A split model, run forward, says what the oracle says of the same weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megalite.inference.sampling import Sampling
from tests.distributed.inference_run import cached, generated, scored, whole_weights
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
def small_tensors() -> Iterator[None]:
    with one_thread():
        yield


ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [8, 9, 7, 9], [3, 2, 3, 8, 4, 6, 2], [6, 4]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_see_those_before_them_in_the_cache(layout: str, rank_pools: RankPools) -> None:
    cells = laid_out(layout)
    for chunk in (512, 2):
        ranks = on_ranks(rank_pools, cells[0].world_size, cached, cells, ROWS, chunk)
        for number, cell in enumerate(cells):
            weights = whole_weights(cell)
            for row, tokens in enumerate(ROWS):
                expected = next_logits(cell, weights, tokens)[len(tokens) // 2 - 1 :]
                for found in ranks:
                    close(torch.stack(found[number][row]), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_greedy_text_is_the_oracles(layout: str, batch_size: int, rank_pools: RankPools) -> None:
    cells = laid_out(layout)
    eod, most = 7, 6
    arguments = {"max_new_tokens": most, "eod": eod, "sampling": Sampling(temperature=0.0)}
    ranks = on_ranks(
        rank_pools, cells[0].world_size, functools.partial(generated, **arguments), cells, ROWS, batch_size
    )
    for number, cell in enumerate(cells):
        weights = whole_weights(cell)
        for found in ranks:
            for row, prompt in enumerate(ROWS):
                tokens, finish = list(prompt), "length"
                for _ in range(most if cell.family != "gpt2" else min(most, SEQUENCE + 2 - len(prompt))):
                    token = int(next_logits(cell, weights, tokens)[-1].argmax())
                    if token == eod:
                        finish = "stop"
                        break
                    tokens.append(token)
                events = [event for index, event in found[number] if index == row]
                assert events == [*tokens[len(prompt) :], finish], (cell, row)


def next_logits(cell: Cell, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """[sequence, vocabulary] of the token after each."""
    ids = torch.tensor([tokens])
    logits = oracle(cell).logits(weights, ids, torch.arange(len(tokens))[None])
    return logits[0, :, : VOCABULARIES[cell.vocabulary][0]]


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
