"""A split model, run forward, gives the same results as the oracle with the same weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.layer_specs import LayerSpec
from megalite.config.model import ModelConfig
from megalite.inference.sampling import Sampling
from tests.distributed.inference_run import cached, generated, order_of_work, scored, whole_weights
from tests.distributed.layout_cell import LAYERS, SEQUENCE, VOCABULARIES, Cell, oracle
from tests.distributed.layout_expected import on_ranks, one_thread
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

NO_ROPE = [layer % 3 % 2 for layer in range(LAYERS)]
CELLS = (
    Cell("gpt2", vocabulary="odd"),
    Cell("llama", key_values="uneven6", tied=False),
    Cell("neox", key_values="mqa", vocabulary="empty"),
    Cell("gemma", key_values="few"),
    Cell("deepseek", key_values="gqa"),
    Cell("nemotron", key_values="gqa"),
    Cell("llama", pattern="-**-*"),
    Cell("llama", pattern="MG*-"),
    Cell("gpt2", pattern="G-M*", recurrent="wide"),
    Cell("llama", pattern="L-K*L", recurrent="wide"),
    Cell("gpt2", pattern="K*K"),
    Cell("gemma3", key_values="gqa", output_gate=True, no_rope_freq=str(NO_ROPE), softmax_type="learnable"),
    Cell("gpt-oss", qk_layernorm=True, norm_over_heads=True),
    Cell("llama", latents="narrow values", qk_layernorm=True, yarn=True),
    Cell("gpt2", latents="wide values", pattern="+-G+", output_gate=True),
    Cell("deepseek", latents="few", qk_layernorm=True),
    Cell("llama", latents="narrow values", indexing="few", yarn=True),
    Cell("gpt2", latents="wide values", pattern="DDD-D", indexing="every second", output_gate=True),
)
LAYOUTS = {"alone": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2), "pp3": (1, 3)}


def laid_out(layout: str) -> list[Cell]:
    tp, pp = LAYOUTS[layout]
    return [replace(cell, tp=tp, etp=tp, pp=pp) for cell in CELLS]


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    with one_thread():
        yield


ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [8, 9, 7, 9], [3, 2, 3, 8, 4, 6, 2], [6, 4]]


@pytest.mark.wide
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.wide] * (name != "alone")) for name in LAYOUTS]
)
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


def test_the_cache_has_the_window_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [(3, 5, None)[layer % 3] for layer in range(LAYERS)]
    specs = tuple(LayerSpec(keys_before=window and window - 1) for window in windows)
    monkeypatch.setattr(ModelConfig, "layers", specs)
    cell, row = CELLS[1], ROWS[0]
    model = replace(oracle(cell), windows=tuple(windows))
    expected = model.logits(whole_weights(cell), torch.tensor([row]), torch.arange(len(row))[None])[0]
    ((found,),) = cached([cell], [row], 512)
    close(torch.stack(found), expected[len(row) // 2 - 1 :])


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.wide] * (name != "tp2")) for name in LAYOUTS])
def test_greedy_text_is_the_oracles(layout: str, rank_pools: RankPools) -> None:
    cells = laid_out(layout)
    eod, most = 7, 4
    arguments = {"max_new_tokens": most, "ends": (eod,), "sampling": Sampling(temperature=0.0)}
    ranks = on_ranks(rank_pools, cells[0].world_size, functools.partial(generated, **arguments), cells, ROWS, 3)
    for number, cell in enumerate(cells):
        weights = whole_weights(cell)
        assert all(found[number] == ranks[0][number] for found in ranks)
        for row, prompt in enumerate(ROWS):
            events = [event for index, event in ranks[0][number] if index == row]
            room = most if cell.family != "gpt2" else min(most, SEQUENCE + 2 - len(prompt))
            seen = [*prompt, *events[:-1]][: len(prompt) + room - 1]
            # One forward tells all choices: up to the first token that is wrong, it has read those of the oracle.
            choices = next_logits(cell, weights, seen)[len(prompt) - 1 :].argmax(-1).tolist()
            expected = [*choices[: choices.index(eod)], "stop"] if eod in choices else [*choices, "length"]
            assert events == expected, (cell, row)


@pytest.mark.parametrize(
    ("layout", "every"),
    [pytest.param("alone", 6, id="alone"), pytest.param("tp2-pp2", 1, id="tp2-pp2", marks=pytest.mark.wide)],
)
def test_sampled_text_depends_on_the_seed_and_the_number_of_the_prompt_alone(
    layout: str, every: int, rank_pools: RankPools
) -> None:
    def texts(cells: list[Cell], prompts: list[list[int]], batch_size: int, seed: int = 1) -> list[list[list[Any]]]:
        """Return the events of each cell and prompt."""
        sampling = Sampling(temperature=2.0, top_k=12, top_p=0.95, seed=seed)
        function = functools.partial(generated, max_new_tokens=5, ends=(7,), sampling=sampling)
        first, *others = on_ranks(rank_pools, cells[0].world_size, function, cells, prompts, batch_size)
        assert all(other == first for other in others)
        return [[[e for index, e in events if index == row] for row in range(len(prompts))] for events in first]

    expected = texts(laid_out("alone")[::every], ROWS, 1)
    cells = laid_out(layout)[::every]
    for batch_size in (2, 4):
        assert texts(cells, ROWS, batch_size) == expected
    assert texts(cells, ROWS[:2], 2) == [cell[:2] for cell in expected]
    assert texts(cells, ROWS, 4, seed=2) != expected
    twice = texts(cells, [ROWS[0], ROWS[0]], 2)[0]
    assert twice[0] == expected[0][0] != twice[1]


def test_each_stage_works_on_a_batch_of_its_own(rank_pools: RankPools) -> None:
    """While the last stage chooses a batch's tokens, the other stages continue with the next batches."""
    first, second, third = rank_pools(3).run(order_of_work, laid_out("pp3")[0], ROWS[:3])
    assert first == [*["run"] * 3, *["share", "run"] * 3, *["share"] * 3]
    assert second == [*["run"] * 2, *["share", "run"] * 4, *["share"] * 2]
    assert third == ["run", "share"] * 6


def test_a_sequence_ends_where_it_is_told_to(rank_pools: RankPools) -> None:
    def stop(index: int, tokens: Sequence[int]) -> bool:
        return index == 1 and len(tokens) == len(ROWS[1]) + 2

    arguments = {"max_new_tokens": 4, "ends": (), "sampling": Sampling(temperature=0.0), "stop": stop}
    with one_thread():
        (events,) = generated([CELLS[1]], ROWS, 4, **arguments)
    assert [len([e for index, e in events if index == row]) for row in range(4)] == [5, 3, 5, 5]
    assert (1, "stop") in events
    assert (0, "length") in events


def next_logits(cell: Cell, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Return the logits of the token after each one, [sequence, vocabulary]."""
    ids = torch.tensor([tokens])
    logits = oracle(cell).logits(weights, ids, torch.arange(len(tokens))[None])
    return logits[0, :, : VOCABULARIES[cell.vocabulary][0]]


@pytest.mark.parametrize("layout", wide_except([*LAYOUTS, "cp2", "cp2-pp2"], ["cp2"]))
def test_logits_and_scores_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    """Sequences are padded to whole chunks under context parallelism, beyond the learned positions."""
    context = [replace(cell, cp=2, pp=1 + ("pp2" in layout)) for cell in CELLS]
    cells = laid_out(layout) if layout in LAYOUTS else context
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
