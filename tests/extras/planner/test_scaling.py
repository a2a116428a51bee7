"""Scaling over ranks: its arithmetic, its picture, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.comparison.commands.scaling import (
    Arguments,
    check,
    configuration,
    median_of,
    predictions,
    with_batch,
)
from megalite.extras.comparison.runs import message
from megalite.extras.comparison.scaling import Run, compare, table
from megalite.extras.comparison.scaling_chart import chart

STRONG = [Run(1, 8, 1.0), Run(2, 8, 0.625), Run(4, 8, 0.25)]
WEAK = [Run(2, 8, 1.0), Run(4, 16, 1.25)]
FLAGS = """pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 2
--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
--global-batch-size 8 --train-iters 8 --lr 1e-3"""
OWN = FLAGS.split()


def test_speed_up_is_of_samples_per_second() -> None:
    strong = compare(STRONG, [1.0, 0.5, None])
    assert [point.speed_up for point in strong] == [1.0, 1.6, 4.0]
    assert [point.efficiency for point in strong] == [1.0, 0.8, 1.0]
    assert [point.communication for point in strong] == [0.0, 0.25, 0.0]
    first, second = compare(WEAK, [None, None])
    assert (first.speed_up, second.speed_up, second.efficiency, second.communication) == (1.0, 1.6, 0.8, None)


def test_the_table_has_a_line_for_each_run() -> None:
    header, *lines = table(compare(STRONG, [1.0, 0.5, None]))
    assert all(len(line) == len(header) for line in lines)
    assert lines[1].split() == ["2", "8", "0.6250", "s", "1.60", "80%", "0.25", "0.5000", "s"]
    assert lines[2].split()[-1] == "-"
    *_, weak = table(compare(WEAK, [None, None]))  # whose first run has communication
    assert weak.split()[-3:] == ["80%", "-", "-"]
    assert len(weak) == len(header)


def test_the_picture_has_a_dot_for_each_run_and_dashes_for_the_planner() -> None:
    root = ElementTree.fromstring(
        chart({"strong": compare(STRONG, [1.0, 0.5, None]), "weak": compare(WEAK, [None] * 2)})
    )
    tags = [(each.tag.rpartition("}")[2], each.get("stroke-dasharray")) for each in root.iter()]
    assert sum(tag == "circle" for tag, _ in tags) == 5
    assert sum(dashes is not None for _, dashes in tags) == 1
    words = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert {"Speed-up over 1 rank", "ranks", "speed-up (samples per second)", "strong scaling"} <= {*words}


@pytest.mark.parametrize(
    ("arguments", "program", "words"),
    [
        (Arguments(), [], "give a program and its flags behind --"),
        (Arguments(ranks=(2, 1)), OWN, "from few to many"),
        (Arguments(), [*OWN, "--save", "run"], "--save behind --: leave it out"),
        (Arguments(), ["own.py", "--lr", "1"], "--global-batch-size behind -- must be given"),
        (Arguments(), ["own.py", "--global-batch-size", "6"], "6 behind -- is not divisible by --ranks 4"),
        (Arguments(ranks=(2, 3)), ["own.py", "--global-batch-size", "6"], "3 is no multiple of 2"),
        (Arguments(), [*OWN, "--tp", "2"], "1 rank"),
        (Arguments(ranks=(1, 8)), OWN, "global-batch-size 8"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: Arguments, program: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(arguments, program)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_batch_replaces_the_one_of_the_command() -> None:
    assert with_batch(["a.py", "--global-batch-size", "8", "--x"], 16) == ["a.py", "--x", "--global-batch-size", "16"]
    assert with_batch(["a.py", "--global-batch-size=8"], 4) == ["a.py", "--global-batch-size", "4"]
    assert configuration(["python", *OWN], 32).training.global_batch_size == 32


def test_steps_before_the_warmup_do_not_count(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"iteration_time_s": 9.0}\n{"valid_loss": 1}\n{"iteration_time_s": 1.0}\n')
    assert median_of(metrics, 1) == 1.0
    with pytest.raises(MegaliteError, match="had 2 steps, of which --warmup 2"):
        median_of(metrics, 2)
    with pytest.raises(MegaliteError, match="wrote no metrics"):
        median_of(tmp_path / "none", 0)


def test_a_failure_shows_its_error_or_its_last_lines() -> None:
    assert message("step 1\nerror: no data\nTraceback\nby torchrun\n") == "error: no data"
    assert message("\n".join(map(str, range(20)))).splitlines() == [str(each) for each in range(8, 20)]
    assert (
        message("why\nE0101 failed (exitcode: -6) local_rank: 1\nTraceback\n")
        == "why\nE0101 failed (exitcode: -6) local_rank: 1"
    )


def test_the_planner_is_calibrated_on_the_first_run() -> None:
    first, second = predictions(OWN, [Run(1, 8, 0.4), Run(2, 8, 0.3)])
    assert first == pytest.approx(0.4, rel=0.01)
    assert second is not None
    assert 0.2 < second < 0.4
    assert predictions(["own.py"], [Run(1, 8, 0.4)]) == [None]
