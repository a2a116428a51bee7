"""Evaluations of `megalite.Trainer` in one process: how many samples they and epochs have, and what empty ones say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalite

NUMBERS = [torch.tensor([float(number)]) for number in range(11)]


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(NUMBERS)


def make_run(**options: Any) -> megalite.Trainer:
    module = nn.Linear(1, 1)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    given: dict[str, Any] = {"loss": lambda outputs, batch: outputs.mean(), "quiet": True, "dataset": NUMBERS}
    return megalite.Trainer(module, micro_batch_size=4, optimizer=megalite.SGD(lr=0.0), **{**given, **options})


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"valid_dataset": NUMBERS}, 11),
        ({"valid_dataset": NUMBERS[:3]}, 3),
        ({"valid_dataset": NUMBERS, "eval_iters": 2}, 8),
        ({"valid_dataset": NUMBERS, "eval_iters": 9}, 11),
        ({"valid_dataset": NUMBERS, "eval_global_batch_size": 8}, 11),
        ({"valid_dataset": torch.utils.data.DataLoader(NUMBERS, num_workers=1)}, 11),  # type: ignore[arg-type]
        ({"valid_dataset": Stream(), "eval_iters": 2}, 8),
    ],
    ids=["all", "less than a batch", "two batches", "no more than all", "of eight", "read by a worker", "a stream"],
)
def test_the_samples_of_an_evaluation(options: dict[str, Any], samples: int) -> None:
    with make_run(**options) as run:
        assert run.evaluate() == {"loss": (samples - 1) / 2}


def test_another_dataset_is_evaluated_whole_whatever_the_batch_of_training() -> None:
    with make_run(global_batch_size=8) as run:
        assert run.evaluate(NUMBERS) == {"loss": 5.0}


def test_epochs_end_with_their_last_whole_step() -> None:
    with make_run() as run:  # 11 samples, in steps of four
        run.train(epochs=1)
        assert run.iteration == 2
        run.train(epochs=2)
        assert run.iteration == 5


def test_terms_that_count_nothing_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with make_run(quiet=False, count=lambda batch: 0) as run:
        run.evaluate(NUMBERS)
        run.train(steps=2)
    assert capsys.readouterr().out.count("note: the count of loss was 0 in a step or an evaluation") == 1
