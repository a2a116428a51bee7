"""Every layout has each layer once, in order; others are refused with the counts and the flag to change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.pipeline_layout import (
    StageLayers,
    layout_lines,
    schedule_name,
    stage_layers,
    stages_of_letters,
    virtual_stages,
)
from megalite.errors import ConfigurationError
from megalite.pipeline.stages import Stages

LETTERS = "--pipeline-model-parallel-layout"


def model(layers: int) -> ModelConfig:
    return ModelConfig(num_layers=layers, hidden_size=16, num_attention_heads=4)


def parallel(ranks: int, **flags: Any) -> ParallelConfig:
    return ParallelConfig(pipeline_model_parallel_size=ranks, **flags)


def offsets(layers: int, ranks: int, **flags: Any) -> list[list[int]]:
    """Return the first layer of each stage, by rank."""
    config = parallel(ranks, **flags)
    held = stage_layers(model(layers), config)
    stages = Stages(ranks, virtual_stages(model(layers), config), config.pipeline_schedule == "zb-v")
    return [[held[stage].first_layer for stage in stages.of_rank(rank)] for rank in range(ranks)]


def refusal(layers: int, ranks: int, **flags: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        stage_layers(model(layers), parallel(ranks, **flags))
    return str(raised.value)


def test_known_values() -> None:
    assert offsets(16, 4) == [[0], [4], [8], [12]]
    ends = {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 3}
    assert offsets(14, 4, **ends) == [[0], [3], [7], [11]]
    assert offsets(16, 4, num_virtual_stages_per_pipeline_rank=2) == [[0, 8], [2, 10], [4, 12], [6, 14]]
    assert offsets(16, 4, num_layers_per_virtual_pipeline_stage=2) == [[0, 8], [2, 10], [4, 12], [6, 14]]
    assert offsets(16, 4, pipeline_schedule="zb-v") == [[0, 14], [2, 12], [4, 10], [6, 8]]
    assert offsets(10, 2, pipeline_schedule="zb-v", decoder_first_pipeline_num_layers=4) == [[0, 8], [2, 5]]
    accounts = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert offsets(14, 4, **accounts, num_layers_per_virtual_pipeline_stage=2) == [[0, 7], [1, 9], [3, 11], [5, 13]]


def test_letters_are_dealt_round_the_ranks() -> None:
    config = parallel(16, pipeline_model_parallel_layout="Et*3|(tt|)*29,|L")
    stages = stage_layers(model(61), config)
    assert (virtual_stages(model(61), config), schedule_name(2, config)) == (2, "interleaved-1f1b")
    assert stages[0] == StageLayers(first_layer=0, layers=3, embedding=True, loss=False)
    assert stages[16] == StageLayers(first_layer=33, layers=2, embedding=False, loss=False)
    assert stages[30] == StageLayers(first_layer=61, layers=0, embedding=False, loss=False)
    assert stages[31] == StageLayers(first_layer=61, layers=0, embedding=False, loss=True)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, ParallelConfig]:
    """Draw a number of layers, and a layout for them."""
    ranks = draw(st.integers(1, 6))
    schedule = draw(st.sampled_from([None, "zb-v"]))
    chunks = 2 if schedule == "zb-v" else draw(st.integers(1, 4)) if ranks > 1 else 1
    flags: dict[str, Any] = {"pipeline_schedule": schedule}
    if chunks != (2 if schedule else 1):
        flags["num_virtual_stages_per_pipeline_rank"] = chunks
    way = draw(st.sampled_from(["even", "ends", "letters"]))
    if way == "letters":
        held = draw(st.lists(st.integers(0, 3), min_size=ranks * chunks, max_size=ranks * chunks))
        flags["num_virtual_stages_per_pipeline_rank"] = None
        flags["pipeline_model_parallel_layout"] = f"E{'|'.join('t' * count for count in held)}L"
        return sum(held), parallel(ranks, **flags)
    each = draw(st.integers(1, 4))
    if way == "ends" and ranks > 1:
        first, last = (draw(st.none() | st.integers(1, 4)) for _ in range(2))
        others = ranks - sum(end is not None for end in (first, last))
        flags["decoder_first_pipeline_num_layers"] = None if first is None else first * chunks
        flags["decoder_last_pipeline_num_layers"] = None if last is None else last * chunks
        return (others * each + (first or 0) + (last or 0)) * chunks, parallel(ranks, **flags)
    accounts = [draw(st.booleans()) for _ in range(2)] if ranks * chunks * each > 2 else [False, False]
    flags["account_for_embedding_in_pipeline_split"], flags["account_for_loss_in_pipeline_split"] = accounts
    return ranks * chunks * each - sum(accounts), parallel(ranks, **flags)


@given(layouts())
def test_every_layer_is_held_once_and_in_order(layout: tuple[int, ParallelConfig]) -> None:
    layers, config = layout
    stages = stage_layers(model(layers), config)
    assert len(stages) == config.pipeline_model_parallel_size * virtual_stages(model(layers), config)
    held = [layer for stage in stages for layer in range(stage.first_layer, stage.first_layer + stage.layers)]
    assert held == list(range(layers))
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.loss for stage in stages] == [False] * (len(stages) - 1) + [True]


@given(layouts())
def test_all_ranks_and_layers_are_shown(layout: tuple[int, ParallelConfig]) -> None:
    layers, config = layout
    count, *lines = layout_lines(model(layers), config)
    assert count.startswith(f"{layers} layers in ")
    shown: list[int] = []
    ranks: list[int] = []
    for line in lines:
        name, held = line.split(": ")
        ranks += _range(name)
        shown += [number for part in held.split(" (")[0].replace(";", ",").split(", ") for number in _range(part)]
    assert ranks == list(range(config.pipeline_model_parallel_size))
    assert sorted(shown) == list(range(layers))


def _range(text: str) -> list[int]:
    name, _, numbers = text.partition(" ")
    if name.rstrip("s") not in ("rank", "layer"):
        assert name in ("embedding", "loss", "nothing")
        return []
    first, _, last = numbers.partition("-")
    return list(range(int(first), int(last or first) + 1))


def test_lines() -> None:
    assert layout_lines(model(20), parallel(2, num_virtual_stages_per_pipeline_rank=2)) == (
        "20 layers in 4 stages, 2 per rank, schedule interleaved-1f1b",
        "rank 0: embedding, layers 0-4; layers 10-14",
        "rank 1: layers 5-9; layers 15-19, loss",
    )
    assert layout_lines(model(16), parallel(4, pipeline_schedule="zb-v")) == (
        "16 layers in 8 stages, 2 per rank, schedule zb-v",
        "rank 0: embedding, layers 0-1; layers 14-15, loss",
        "ranks 1-3: layers 2-7; layers 8-13 (2 + 2 each)",
    )
    assert layout_lines(model(3), parallel(4, pipeline_model_parallel_layout="E|t||ttL")) == (
        "3 layers in 4 stages, schedule 1f1b",
        "rank 0: embedding",
        "rank 1: layer 0",
        "rank 2: nothing",
        "rank 3: layers 1-2, loss",
    )
    assert layout_lines(model(2), parallel(1)) == (
        "2 layers in 1 stage, schedule 1f1b",
        "rank 0: embedding, layers 0-1, loss",
    )


@st.composite
def letters(draw: st.DrawFn) -> tuple[str, str]:
    """Draw the meaning of a string, and the string, with repeats and commas."""
    meaning, text = "", ""
    for _ in range(draw(st.integers(0, 6))):
        item = draw(st.text("EtL|", min_size=1, max_size=4))
        times = draw(st.integers(0, 12))
        way = draw(st.sampled_from(["plain", "brackets", "letter"]))
        if way == "plain":
            meaning, text = meaning + item, text + item
        elif way == "brackets":
            meaning, text = meaning + item * times, f"{text}({item})*{times}"
        else:
            meaning, text = meaning + item[0] * times, f"{text}{item[0]}*{times}"
        text += draw(st.sampled_from(["", ","])) if way == "plain" else ""
    return meaning, text


@given(letters())
def test_letters_mean_what_is_written(written: tuple[str, str]) -> None:
    meaning, text = written
    assert stages_of_letters(text) == meaning.split("|")


@pytest.mark.parametrize(
    ("layers", "layout", "problem"),
    [
        (4, "Ett|tL", "has 3 layers (t), which is not --num-layers 4: make them equal"),
        (4, "Ett|tttL", "has 5 layers (t), which is not --num-layers 4: make them equal"),
        (2, "tE|tL", ": E (the embedding) must be there once, first of all, not elsewhere"),
        (2, "|EttL", ": E (the embedding) must be there once, first of all, not elsewhere"),
        (2, "t|tL", ": E (the embedding) must be there once, first of all, not 0 times"),
        (2, "Et|EtL", ": E (the embedding) must be there once, first of all, not 2 times"),
        (2, "Et|Lt", ": L (the loss) must be there once, last of all, not elsewhere"),
        (2, "EttL|", ": L (the loss) must be there once, last of all, not elsewhere"),
        (2, "Et|t", ": L (the loss) must be there once, last of all, not 0 times"),
        (2, "EtL|tL", ": L (the loss) must be there once, last of all, not 2 times"),
        (2, "Ett|mL", ": m is a depth, and needs --mtp-num-layers"),
        (2, "Ett|xL", ": 'x' is unknown: E embedding, t layer, m depth, L loss, | next stage"),
        (2, "Ett |L", ": ' ' is unknown: E embedding, t layer, m depth, L loss, | next stage"),
        (2, "Et2|L", ": '2' is unknown: E embedding, t layer, m depth, L loss, | next stage"),
        (2, "E(t|*2L", ": a bracket must be closed, contain no other, and be followed by a count, as in (tt|)*3"),
        (2, "E(t|t)L", ": a bracket must be closed, contain no other, and be followed by a count, as in (tt|)*3"),
        (2, "E((t)*2|)*1L", ": a bracket must be closed, contain no other, and be followed by a count, as in (tt|)*3"),
        (2, "Et)*2|L", ": a bracket must be opened, contain no other, and be followed by a count, as in (tt|)*3"),
        (2, "Et*|L", ": * must be between a letter, | or bracket and a count, as in t*3"),
        (2, "Et*1*2|L", ": * must be between a letter, | or bracket and a count, as in t*3"),
    ],
)
def test_letters_that_are_refused(layers: int, layout: str, problem: str) -> None:
    text = refusal(layers, 2, pipeline_model_parallel_layout=layout)
    assert text == f"{LETTERS} {layout!r}{'' if problem.startswith(':') else ' '}{problem}"


def test_stages_by_letters_are_a_multiple_of_the_ranks() -> None:
    expected = (
        f"3 stages of {LETTERS} 'E|tt|L' cannot be divided evenly among 2 ranks (--pipeline-model-parallel-size): "
    )
    assert refusal(2, 2, pipeline_model_parallel_layout="E|tt|L") == expected + "add or drop |"


def test_absurd_repeats_are_refused_before_they_fill_the_memory() -> None:
    for times in ("10000", "9" * 5000):
        text = refusal(2, 2, pipeline_model_parallel_layout=f"Et*{times}|L")
        assert text == f"{LETTERS}: *{times[:20]} is more layers than any model has"


@pytest.mark.parametrize(
    ("layers", "ranks", "flags", "problem"),
    [
        (
            6,
            4,
            {},
            "--num-layers 6 cannot be divided evenly among 4 stages (--pipeline-model-parallel-size 4): change one, or "
            "use --pipeline-model-parallel-layout",
        ),
        (
            4,
            2,
            {"num_virtual_stages_per_pipeline_rank": 3},
            "6 stages (--pipeline-model-parallel-size 2 x 3 per rank) are more than --num-layers 4: use fewer",
        ),
        (
            1,
            4,
            {"account_for_embedding_in_pipeline_split": True},
            "4 stages (--pipeline-model-parallel-size 4) are more than --num-layers 1 + 1 "
            "(--account-for-embedding-in-pipeline-split): use fewer",
        ),
        (
            6,
            4,
            {"num_layers_per_virtual_pipeline_stage": 1},
            "--num-layers 6 cannot be divided evenly among 4 ranks (--pipeline-model-parallel-size)",
        ),
        (
            8,
            2,
            {"num_layers_per_virtual_pipeline_stage": 3},
            "4 layers per rank cannot be divided evenly among stages of 3 (--num-layers-per-virtual-pipeline-stage)",
        ),
        (
            8,
            4,
            {"decoder_first_pipeline_num_layers": 3},
            "--num-layers 8 less --decoder-first-pipeline-num-layers 3 leaves 5 layers, which cannot be divided evenly "
            "among 3 other ranks (--pipeline-model-parallel-size 4)",
        ),
        (
            8,
            2,
            {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 4},
            "--num-layers 8 less --decoder-first-pipeline-num-layers 3 and --decoder-last-pipeline-num-layers 4 "
            "leaves 1 layers, which cannot be divided among 0 other ranks (--pipeline-model-parallel-size 2)",
        ),
        (
            5,
            3,
            {"decoder_last_pipeline_num_layers": 7},
            "--num-layers 5 less --decoder-last-pipeline-num-layers 7 leaves -2 layers, which cannot be divided among "
            "2 other ranks (--pipeline-model-parallel-size 3)",
        ),
        (
            8,
            2,
            {"decoder_last_pipeline_num_layers": 3, "num_virtual_stages_per_pipeline_rank": 2},
            "5 layers of one rank cannot be divided evenly among its 2 stages: change "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        ),
    ],
)
def test_layers_that_do_not_come_out_even(layers: int, ranks: int, flags: dict[str, Any], problem: str) -> None:
    assert refusal(layers, ranks, **flags) == problem
