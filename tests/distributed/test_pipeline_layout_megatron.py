"""Stages have the same layers as in Megatron-LM: comparison with megatron-core, over all flags for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.pipeline_layout import stage_layers, stages_of_letters
from megalite.errors import ConfigurationError
from tests.distributed import megatron_layout
from tests.harness.rank_pool import RankPools

FIELDS = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""Names in `TransformerConfig` that differ from the flags' names."""
PIECES = ["t", "tt", "|", "t|", "t*3", "(t|)*2", "(tt|t*2)*3", "|*2", ",", "t*0", "(t)*2*2", "tt"]
WRONG = ["E", "L", "m", "(", ")", "*", "*2", "3", "x", " ", "()*2", "((t)*2|)*2"]


def sizes(layers: int, ranks: int, chunks: int) -> dict[str, Any]:
    virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    return {"num_layers": layers, "pipeline_model_parallel_size": ranks, **virtual}


def even() -> Iterator[dict[str, Any]]:
    for layers, ranks, chunks, embedding, loss in product(range(1, 19), range(2, 6), range(1, 4), (0, 1), (0, 1)):
        accounts = {
            "account_for_embedding_in_pipeline_split": bool(embedding),
            "account_for_loss_in_pipeline_split": bool(loss),
        }
        yield sizes(layers, ranks, chunks) | accounts


def first_and_last() -> Iterator[dict[str, Any]]:
    ends = (None, 1, 2, 3, 4)
    for layers, ranks, chunks, first, last in product(range(1, 13), range(2, 5), range(1, 3), ends, ends):
        given = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
        divides_by_zero = chunks > 1 and ranks == 2 and first and last  # megatron-core does, without ranks in between
        if (first or last) and not divides_by_zero:
            yield sizes(layers, ranks, chunks) | given


def by_letters() -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for _ in range(1000):
        text = f"E{''.join(draw.choices(PIECES, k=draw.randrange(7)))}{draw.choice(['L', 'L', '|L', '|', 'LE'])}"
        layers = "".join(stages_of_letters(text)).count("t") + draw.choice([0, 0, 0, 1])
        yield sizes(max(layers, 1), draw.choice([2, 3, 4]), 1) | {"pipeline_model_parallel_layout": text}


def ours(options: dict[str, Any]) -> list[tuple[int, int]] | None:
    fields = {FIELDS.get(name, name): value for name, value in options.items()}
    model = ModelConfig(num_layers=fields.pop("num_layers"), hidden_size=16, num_attention_heads=4)
    try:
        return [(stage.first_layer, stage.layers) for stage in stage_layers(model, ParallelConfig(**fields))]
    except ConfigurationError:
        return None


@pytest.mark.parametrize("way", [even, first_and_last, by_letters])
def test_stages(way: Callable[[], Iterator[dict[str, Any]]], rank_pools: RankPools) -> None:
    cases = list(way())
    (expected,) = rank_pools(1).run(megatron_layout.stages, cases)
    accepted = 0
    for case, answer in zip(cases, expected, strict=True):
        right = not isinstance(answer, str) and all(layers >= 0 for _, layers in answer)  # it gives -1 layers, too
        assert ours(case) == (answer if right else None), (case, answer)
        accepted += right
    assert 100 < accepted < len(cases) - 100


def test_letters(rank_pools: RankPools) -> None:
    draw = random.Random(1)
    texts = ["".join(draw.choices(PIECES + draw.choice([[], WRONG]), k=draw.randrange(6))) for _ in range(2000)]
    (expected,) = rank_pools(1).run(megatron_layout.letters, texts)
    for text, answer in zip(texts, expected, strict=True):
        if isinstance(answer, str):
            with pytest.raises(ConfigurationError):
                stages_of_letters(text)
        else:
            assert stages_of_letters(text) == answer, text
    assert 500 < sum(isinstance(answer, str) for answer in expected) < 1500
