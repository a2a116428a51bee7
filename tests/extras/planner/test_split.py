"""Splits of a network over pipeline ranks of unequal speed, beside every other split, and files of measured seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import stages_of_letters
from megalite.errors import MegaliteError
from megalite.extras.planner.split import PartCosts, letters, rank_costs, split
from megalite.extras.planner.stage_layout import with_stages
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.simulator import simulate
from megalite.pipeline.stages import Stages
from megalite.pipeline.timeline import TimeLine
from megalite.pipeline.trace import to_trace
from tests.end_to_end.runs import words

RUN = words(
    "--num-layers 6 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 --tokenizer-type NullTokenizer "
    "--mock-data --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 16 "
    "--train-iters 1 --lr 1e-3 --pp 3 --pipeline-model-parallel-layout"
)


def every(stages: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Yield every split in which each stage has a part."""
    for inner in product(range(layers + 1), repeat=stages - 1):
        counts = (*inner, layers - sum(inner))
        parts = [count + (stage == 0) + (stage == stages - 1) for stage, count in enumerate(counts)]
        if counts[-1] >= 0 and min(parts) >= 1:
            yield counts


def fastest(costs: Sequence[PartCosts], stages: Stages) -> float:
    return min(max(rank_costs(costs, stages, each)) for each in every(stages.count, len(costs[0].layers)))


@pytest.mark.wide_except("0", "1", "2", "3", "4", "5")
@pytest.mark.parametrize("seed", range(30))
def test_no_split_has_a_faster_slowest_rank(seed: int) -> None:
    """One stage per rank with any costs, also of each rank its own; several with layers that are alike."""
    draw = random.Random(seed)
    ranks, layers = draw.randint(1, 4), draw.randint(2, 7)
    chunks = draw.choice([1, 2]) if ranks * 2 <= layers + 2 else 1
    stages = Stages(ranks, chunks, v_shaped=chunks == 2 and draw.random() < 0.5)
    if stages.count > layers + 2:
        stages = Stages(1)
    alike = [draw.uniform(0.5, 2.0)] * layers
    costs = [
        PartCosts(
            draw.uniform(0, 2) * speed,
            tuple(cost * speed for cost in (alike if chunks > 1 else [draw.uniform(0.2, 2.0) for _ in range(layers)])),
            draw.uniform(0, 3) * speed,
        )
        for speed in (draw.choice([1.0, 1.0, 2.0, 3.5]) for _ in range(stages.ranks))
    ]
    found = split(costs, stages)
    assert tuple(found) in set(every(stages.count, layers))
    assert max(rank_costs(costs, stages, found)) == pytest.approx(fastest(costs, stages), rel=1e-12)


def test_half_the_speed_gets_half_the_layers() -> None:
    fast = PartCosts(0.0, (1.0,) * 12, 0.0)
    assert split([fast, fast * 2], Stages(2)) == [8, 4]
    assert split([fast * 2, fast], Stages(2, 2)) == [2, 4, 2, 4]
    assert letters([8, 4]) == "Et*8|t*4L"
    assert letters([0, 2, 2, 0]) == "E|(t*2|)*2L"
    assert letters([3]) == "Et*3L"


def written(layout: str, *more: str, world_size: int = 3) -> tuple[list[int], tuple[str, ...]]:
    """Return the layers of the stages that a run would have, and the notes."""
    config, notes = with_stages(parse_arguments([*RUN, layout, *more]).config, world_size)
    text = config.parallel.pipeline_model_parallel_layout
    assert text is not None
    return [stage.count("t") for stage in stages_of_letters(text)], notes


def test_measured_seconds_move_layers_away_from_a_slow_rank(tmp_path: Path) -> None:
    """The middle rank took twice what the others would have: it gets half of their layers, and the note says why."""
    file = tmp_path / "seconds.json"
    costs = {"Ett|tt|ttL": [1.0, 2.0, 1.0], "Ettt|t|ttL": [1.5, 1.0, 1.0]}
    for layout, seconds in costs.items():
        file.write_text(json.dumps({"seconds": seconds, "layout": layout}))
        found, notes = written(f"auto:{file}")
        assert sum(found) == 6
        assert found[1] == 1
        assert "pipeline rank 1 takes " in notes[0]
        assert f"s as {letters([part.count('t') for part in layout.split('|')])}, which was measured" in notes[0]
    assert written("auto")[1] == ()


def trace(path: Path, seconds: Sequence[float], blocks: tuple[int, ...] = (), *, in_seconds: bool = True) -> str:
    """Write a step whose stages take these seconds forward, and twice as long backward. Returns the flag's value."""
    stages = Stages(len(seconds))
    orders = orders_of(SCHEDULES["1f1b"], stages, 4)
    spans = simulate(stages, orders, lambda stage, kind: seconds[stage] * (1 if kind == "F" else 2))
    path.write_text(to_trace(TimeLine("", stages, spans, in_seconds, blocks)))
    return f"auto:{path}"


def test_a_trace_says_what_its_stages_had(tmp_path: Path) -> None:
    """Equal seconds with unequal layers are unequal speeds."""
    even = written(trace(tmp_path / "one.json", [1.0, 2.0, 1.0]))[0]
    assert even[1] == 1
    same = written(trace(tmp_path / "two.json", [1.0, 1.0, 1.0], (3, 1, 4)))[0]  # 2, 1 and 3 layers
    assert same[1] == 1
    assert written(trace(tmp_path / "three.json", [1.0, 2.0, 1.0], (3, 2, 3)))[0] == even


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"seconds": [1, 2], "layout": "Ettt|tttL"}, r"has seconds of 2 pipeline ranks, but .*size is 3"),
        ({"seconds": [1, 0, 1], "layout": "Ett|tt|ttL"}, r"rank 1 took 0\.0 seconds: give a number above 0"),
        ({"seconds": [1, -2, 1], "layout": "Ett|tt|ttL"}, r"rank 1 took -2\.0 seconds"),
        ({"seconds": [1, float("nan"), 1], "layout": "Ett|tt|ttL"}, r"rank 1 took nan seconds"),
        ({"seconds": [1, 1e300, 1], "layout": "Ett|tt|ttL"}, r"rank 1 took 1e\+300 seconds"),
        ({"seconds": [1, "2", 1], "layout": "Ett|tt|ttL"}, r"seconds is \[1, '2', 1\]: give a number for each"),
        ({"seconds": [1, True, 1], "layout": "Ett|tt|ttL"}, r"give a number for each pipeline rank"),
        ({"seconds": [1, 1, 1], "layout": "Ett|tt|tL"}, r"its layout is not one of this network: .* has 5 layers"),
        ({"seconds": [1, 1, 1]}, r"give seconds and layout"),
        ({"seconds": [1, 1, 1], "layout": "Ett|tt|ttL", "ranks": 3}, r"give seconds and layout, .* no other key"),
        ({"seconds": [1, 1, 1], "layout": "Ett|t|t|ttL"}, r"4 stages, .* divided evenly among the 3 ranks"),
        ({"seconds": [1, 1, 1], "layout": "Ettt||tttL"}, r"rank 1 had nothing to do"),
        ({"speeds": [1, 1, 1]}, r"is not a trace of --profile-pipeline"),
        ([], r"is not a trace of --profile-pipeline"),
    ],
)
def test_files_that_do_not_fit_are_refused(content: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "seconds.json").write_text(json.dumps(content))
    with pytest.raises(MegaliteError, match=message) as raised:
        written(f"auto:{tmp_path / 'seconds.json'}")
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("fast")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**27)
    for name, message in (("none.json", "No such file"), ("text.json", "Expecting value"), ("large.json", "limit")):
        with pytest.raises(MegaliteError, match=rf"auto:.*{name} cannot be read: .*{message}"):
            written(f"auto:{tmp_path / name}")
    with pytest.raises(MegaliteError, match="has assumed times"):
        written(trace(tmp_path / "assumed.json", [1.0] * 3, in_seconds=False))
    with pytest.raises(MegaliteError, match="was measured with 9 layers, but --num-layers is 6"):
        written(trace(tmp_path / "other.json", [1.0] * 3, (4, 3, 4)))
    with pytest.raises(MegaliteError, match="unknown number of layers in each of its 4 stages"):
        written(trace(tmp_path / "odd.json", [1.0] * 4))
    with pytest.raises(MegaliteError, match=r"has \(4, 4\) as blocks of 3 stages"):
        written(trace(tmp_path / "blocks.json", [1.0] * 3, (4, 4)))
