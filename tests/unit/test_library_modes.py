"""Modes and frozen parts of a model of one's own: what is in evaluation mode stays in it, what is frozen stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalite

SAMPLES = [(torch.full((4,), float(number)), torch.tensor(number % 2)) for number in range(8)]


class Pair(nn.Module):
    """A teacher, and a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.9)).requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.teacher(input))


def make_run(model: nn.Module, **options: Any) -> megalite.Trainer:
    given = {"loss": lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]), "quiet": True, **options}
    optimizer = megalite.SGD(lr=0.1)
    return megalite.Trainer(model, dataset=SAMPLES, optimizer=optimizer, micro_batch_size=4, **given)


def test_a_part_in_evaluation_mode_stays_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair()
    model.teacher.eval()
    with make_run(model, quiet=False) as run:
        for _ in range(2):
            run.step()
            assert not any(part.training for part in model.teacher.modules())
            assert all(part.training for part in model.head.modules())
            run.evaluate(SAMPLES)
            assert not any(part.training for part in model.modules())
    assert torch.equal(model.get_buffer("teacher.1.running_mean"), torch.zeros(4))
    assert "note: teacher stays in evaluation mode, as given" in capsys.readouterr().out


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair().eval()
    with make_run(model, quiet=False) as run:
        run.step()
        assert all(part.training for part in model.modules())
    assert "evaluation mode" not in capsys.readouterr().out


def test_parts_of_which_some_are_in_evaluation_mode_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2), nn.Dropout())
    for number in (1, 3):
        model[number].eval()
    with make_run(model, quiet=False) as run:
        run.step()
        assert [part.training for part in model] == [True, False, True, False]
    assert "note: 1 and 1 other module stay in evaluation mode" in capsys.readouterr().out


def test_a_frozen_parameter_that_needs_a_gradient_later_is_refused() -> None:
    model = Pair()
    with make_run(model) as run:
        run.step()
        model.teacher.requires_grad_(True)
        with pytest.raises(megalite.MegaliteError, match=r"teacher\.\S+ was frozen when the run began"):
            run.step()


def test_a_metric_may_count_its_items() -> None:
    def of_first(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0].sum(), (batch[0] > 2).sum()

    wanted = sum(float(sample.sum()) for sample, _ in SAMPLES[:7]) / 16
    with make_run(Pair(), metrics={"mean": of_first, "labels": lambda outputs, batch: batch[1].sum()}) as run:
        found = run.evaluate(SAMPLES[:7])
    assert (found["mean"], found["labels"]) == (wanted, 3 / 7)


@pytest.mark.parametrize(
    ("value", "told"),
    [(torch.ones(2), r"a tensor \(2,\), 4\.0"), ((torch.ones(()), 1, 2), r"a tensor \(\), 1, 2")],
)
def test_a_metric_that_is_no_number_is_refused(value: Any, told: str) -> None:
    run = make_run(Pair(), metrics={"mean": lambda outputs, batch: value})
    with pytest.raises(megalite.MegaliteError, match=f"the metric mean returned {told}: return a sum over the samples"):
        run.evaluate(SAMPLES)
    run.close()
