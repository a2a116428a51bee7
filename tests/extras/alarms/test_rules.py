"""Rules of alarms: what is large, what ends a run, and what does not go together."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import megalite
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import CheckpointError, ConfigurationError, MegaliteError
from megalite.extras.alarms import alarms
from megalite.extras.alarms.history import History
from megalite.training.left_out import left_out_of
from tests.end_to_end.runs import GPT2, MOCK, words
from tests.extras.alarms.alarm_run import ALARMS, SPIKE, items, train
from tests.extras.alarms.test_alarms import ledger


def test_a_value_is_compared_with_the_largest_of_the_window() -> None:
    history = History(3)
    assert not history.is_exceeded(1e9, 2.0)
    history = history.with_values([5.0, -2.0, math.nan, 1.0])
    assert history.values == (5.0, 2.0, 1.0)
    assert history.is_exceeded(10.0, 2.0)
    assert history.is_exceeded(-10.0, 2.0)
    assert not history.is_exceeded(9.9, 2.0)
    assert not history.is_exceeded(math.inf, 2.0)
    assert history.with_values([1.0]).is_exceeded(4.0, 2.0)  # the 5 is out of the window
    assert not History(1, (0.0,)).is_exceeded(0.0, 2.0)  # a loss that has come to 0, and stays there
    assert json.loads(json.dumps(history.values)) == list(history.values)


def test_a_large_gradient_is_reported(tmp_path: Path) -> None:
    """The sample that makes the loss jump does so with the gradient, by less than ten times."""
    with mock.patch.object(alarms, "LARGE_GRADIENT", 2.0):
        found = train({}, items(), tmp_path / "run", check_for_large_grads=True, spiky_loss_window=4)
    assert not found.skipped
    (line,) = ledger(tmp_path / "run")
    assert (line["step"], line["kind"], line["outcome"]) == (SPIKE, "large gradient", "trained")


@pytest.mark.parametrize("ends", [True, False])
def test_a_loss_that_is_not_finite_may_end_the_run(ends: bool) -> None:
    """A step whose gradients are not finite is skipped in any case."""
    with mock.patch.object(alarms.Alarms, "_loss", return_value=math.nan):
        found = train(
            {}, items(()), steps=3, on_not_finite="end" if ends else "skip", **{**ALARMS, "spiky_loss_window": 1}
        )
    assert found.numbers == ([1] if ends else [1, 2, 3])
    assert found.skipped == ([1] if ends else [])
    assert ("--on-not-finite end ends the run" in found.error) is ends


def test_samples_of_an_infinite_loss_are_named() -> None:
    """The gradient is finite, so nothing of the device is suspected."""
    points = [torch.full((4,), 3.0 if number == 9 else 1.0 + number % 2) for number in range(64)]

    def loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean() + (torch.inf if batch.max() > 2.5 else 0.0)

    with (
        megalite.Trainer(
            stages=[nn.Linear(4, 4)],
            loss=loss,
            dataset=points,
            shuffle=False,
            micro_batch_size=1,
            global_batch_size=4,
            optimizer=megalite.SGD(lr=0.01),
            precision="fp64",
            quiet=True,
            watchdog=False,
            on_not_finite="end",
        ) as run,
        pytest.raises(MegaliteError) as raised,
    ):
        run.train(6)
    assert re.match(r"the loss of step 3 is inf, while .* its rows: sample 9 \(loss inf", str(raised.value))


def test_a_gradient_that_is_not_finite_may_end_the_run() -> None:
    assert len(train({}, items(()), spoils=3).skipped) == 10
    found = train({}, items(()), spoils=3, on_not_finite="end")
    assert found.skipped == [4]
    assert "before it began, parameters were already not finite" in found.error


SPIKY = "--check-for-spiky-loss"
REWIND = f"{SPIKY} --spiky-loss-policy rewind --save run --save-interval 2"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--spiky-loss-policy skip", "--spiky-loss-policy needs --check-for-spiky-loss"),
        ("--spiky-loss-factor 2", "--spiky-loss-factor needs --check-for-spiky-loss"),
        ("--spiky-loss-window 2", "--spiky-loss-window needs --check-for-spiky-loss or --check-for-large-grads"),
        (f"{SPIKY} --spiky-loss-factor 1", "--spiky-loss-factor 1.0: must be above 1"),
        (f"{SPIKY} --spiky-loss-left-out-steps 2", "needs --spiky-loss-policy rewind"),
        (f"{SPIKY} --spiky-loss-policy rewind", "--spiky-loss-policy rewind needs --save"),
        (f"{SPIKY} --spiky-loss-policy rewind --save run", "--spiky-loss-policy rewind needs --save-interval"),
        (f"{REWIND} --no-save-optim", "needs the optimizer's state in the checkpoints"),
        (f"{REWIND} --warm-restart --resume auto", "and --warm-restart: copies in memory"),
        (f"{REWIND} --check-weight-hash-across-dp-replicas-interval 2", "and the search for silent corruption"),
        (f"{REWIND} --data-parallel-shares 1,1", "and --data-parallel-shares"),
        ("--check-for-large-grads --gradient-compression topk", "--check-for-large-grads judges the one update"),
        ("--iterations-to-skip 4 --local-update diloco", "--iterations-to-skip judges the one update"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve(parse_arguments([*MOCK, *GPT2, "--train-iters", "4", *words(flags)]).config, 2)
    assert why in str(raised.value)


def test_several_optimizers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="with several optimizers each may update others"):
        megalite.Trainer(
            nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}),
            loss=lambda outputs, batch: outputs.sum(),
            dataset=[torch.ones(2)] * 4,
            optimizer={"a*": megalite.SGD(lr=0.1), "b*": megalite.SGD(lr=0.1)},
            micro_batch_size=1,
            quiet=True,
            watchdog=False,
            check_for_large_grads=True,
        )


@pytest.mark.parametrize(
    "section", [{"ranges": [[4, 3]]}, {"ranges": [[4, 7], [7, 9]]}, {"ranges": [["4", 5]]}, {"ranges": 3}]
)
def test_samples_that_are_no_ranges_are_refused(section: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="left_out_samples are not ascending ranges"):
        left_out_of(tmp_path, {"left_out_samples": section})
    assert left_out_of(tmp_path, {"left_out_samples": {"ranges": [[0, 3], [5, 5]]}}) == [(0, 3), (5, 5)]
