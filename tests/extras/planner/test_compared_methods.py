"""Comparison of synchronization: its arithmetic, its picture, and what is refused before anything runs."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.config.synchronization import SynchronizationConfig
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.comparison.commands.compare_synchronization import (
    MOCK_FLAGS,
    SMALL_MODEL,
    Arguments,
    check,
    own_flags,
    read_curve,
    resolved,
)
from megalite.extras.comparison.synchronization import Curve, Link, compare, rows, table
from megalite.extras.comparison.synchronization_chart import TITLE, chart
from megalite.extras.comparison.synchronization_methods import METHODS, PLAIN

LINK = Link(alpha=0.5, beta=0.01)
CURVES = {PLAIN: Curve([4.0, 3.0, 2.0], [100, 100, 100], 1.0), "half": Curve([4.0, 3.5, 3.0], [10, 10, 10], 1.0)}
FLAGS = [*SMALL_MODEL.split(), *MOCK_FLAGS.split()]


def test_a_step_waits_for_its_messages() -> None:
    assert CURVES[PLAIN].times(LINK) == [2.5, 5.0, 7.5]
    assert Curve([4.0, 3.0], [0, 100], 1.0).times(LINK) == [1.0, 3.5]


def test_messages_under_way_take_their_turn_beside_computation() -> None:
    """The second message waits for the first. With a delay of 1, step 2 waits for the message of step 1."""
    curve = Curve([1.0] * 4, [300, 300, 0, 0], 1.0, delay=1)
    assert curve.times(LINK) == [1.5, 4.5, 7.5, 8.5]


def test_losses_are_compared_at_equal_bytes_and_at_equal_time() -> None:
    plain, half = compare(CURVES, PLAIN, LINK)
    assert (plain.loss, half.loss) == (2.0, 3.0)
    assert (plain.loss_at_bytes, half.loss_at_bytes) == (4.0, 3.0)
    assert (plain.loss_at_time, half.loss_at_time) == (4.0, 3.0)
    assert (half.bytes_a_step, half.fewer_bytes) == (10.0, 10.0)
    assert half.simulated == pytest.approx(1.6)


def test_the_loss_is_a_mean_over_a_twentieth_of_the_steps() -> None:
    curve = Curve([float(step) for step in range(40)], [1] * 40, 1.0)
    assert [curve.loss_after(steps) for steps in (0, 1, 2, 40)] == [0.0, 0.0, 0.5, 38.5]


def test_the_table_has_a_line_for_each_method() -> None:
    header, *lines = table(compare(CURVES, PLAIN, LINK))
    assert [line.split()[0] for line in lines] == [PLAIN, "half"]
    assert len({len(line) for line in lines}) == 1
    assert header.split()[0] == "method"


def test_the_rows_have_each_step() -> None:
    assert list(rows(CURVES, LINK))[3:] == [
        ("half", step, loss, 10 * step, pytest.approx(1.6 * step)) for step, loss in ((1, 4.0), (2, 3.5), (3, 3.0))
    ]


def test_the_picture_has_three_lines_for_each_method_also_without_a_finite_loss() -> None:
    lost = Curve([4.0, math.nan, math.inf], [1, 1, 1], 1.0)
    root = ElementTree.fromstring(chart({**CURVES, "lost": lost}, LINK))
    paths = [each for each in root.iter() if each.tag.endswith("path")]
    assert len(paths) == 3 * (1 + 3) + 3
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")


def test_lines_over_bytes_begin_with_the_first_exchange_and_what_is_above_is_marked() -> None:
    local = Curve([4.0, 3.0, 3.0, 2.0, 2.0], [0, 100, 0, 100, 0], 1.0)
    diverged = Curve([4.0, 9.0, 9.0, 9.0, 9.0], [100] * 5, 1.0)
    root = ElementTree.fromstring(chart({"local": local, "diverged": diverged}, LINK))
    paths = [each.get("d", "") for each in root.iter() if each.tag.endswith("path")]
    steps, over_bytes = paths[1], paths[4]
    assert steps.count("L") == 4
    places = [tuple(map(float, point.split())) for point in over_bytes[1:].split("L")]
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(places))  # in steps
    assert len({x for x, _ in places}) == 2  # as many as there are exchanges
    marks = [each for each in root.iter() if each.text == "▲"]
    assert len(marks) == 3  # one a panel
    assert TITLE in [each.text for each in root.iter() if each.tag.endswith("text")]


@pytest.mark.parametrize("name", METHODS)
def test_the_flags_of_each_method_are_accepted(name: str) -> None:
    method = METHODS[name]
    chosen = resolved([*FLAGS, "--train-iters", "100", *method.words(100, 0.3)], 2 + method.servers)
    assert (chosen == SynchronizationConfig()) == (name in (PLAIN, "sgd"))
    assert method.delay == chosen.local_update_delay


@pytest.mark.parametrize(
    ("arguments", "program", "words"),
    [
        (Arguments(methods=("int7",)), FLAGS, "--methods int7: choose from plain, fp16, bf16"),
        (Arguments(ranks=1), FLAGS, "--ranks 1 has nothing to synchronize"),
        (Arguments(), [*FLAGS, "--save=run"], "--save behind --: leave it out"),
        (Arguments(), [*FLAGS, "--train-iters", "5"], "--train-iters behind --: leave it out, give --steps"),
        (Arguments(), [*FLAGS, "--gradient-compression", "int8"], "flags of synchronization behind --"),
        (Arguments(output=__file__), FLAGS, "test_compared_methods.py is no folder: choose another path"),
        (Arguments(ranks=3), ["pretrain_gpt.py", *FLAGS], "3 data-parallel ranks"),
    ],
)
def test_what_cannot_be_compared_is_one_line(arguments: Arguments, program: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(arguments, program)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_data_parallelism_is_always_there_and_first() -> None:
    assert list(check(Arguments(methods=("int8", PLAIN, "int8")), FLAGS)) == [PLAIN, "int8"]


def test_a_program_of_ones_own_is_taken_as_it_is() -> None:
    assert own_flags(["own.py", "--lr", "1"]) is None
    assert own_flags(["python", "pretrain_gpt.py", "--lr", "1"]) == own_flags(["--lr", "1"]) == ["--lr", "1"]


def test_metrics_are_read_with_the_ranks_own_work(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    step = {"lm_loss": "NaN", "iteration_time_s": 9.0, "bytes_sent": 3}
    records = [step, {"valid_loss": 1.0}, step | {"lm_loss": 2.0, "iteration_time_s/slowest_rank_work": 1.0}]
    metrics.write_text("\n".join(map(json.dumps, records)))
    curve = read_curve(metrics, 2)
    assert (curve.losses[1], curve.sent, curve.compute, curve.delay) == (2.0, [3, 3], 1.0, 2)
    assert math.isnan(curve.losses[0])
    with pytest.raises(MegaliteError, match="wrote no metrics"):
        read_curve(tmp_path / "none", 0)
