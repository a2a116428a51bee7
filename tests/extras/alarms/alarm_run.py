"""Trainings of a GPT on data that it learns at once, but for samples that make the loss jump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megalite
from megalite.errors import MegaliteError
from megalite.run.loop import TrainingLoop
from megalite.run.records import Records
from tests.harness.unsharded import unsharded_parameters

VOCABULARY, LENGTH, BATCH, STEPS = 12, 8, 4, 14
SPIKE = 11
"""Step with the sample that makes the loss jump, if no other is given."""
ALARMS = {"check_for_spiky_loss": True, "spiky_loss_factor": 2.0, "spiky_loss_window": 4}


@dataclass
class Course:
    """Events of a training on a rank."""

    records: list[str] = field(default_factory=list)
    """Loss, gradient norm and learning rate of each step of the trajectory, by the bit."""
    numbers: list[int] = field(default_factory=list)
    """Steps that were run, in order."""
    skipped: list[int] = field(default_factory=list)
    decisions: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    consumed: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[tuple[int, int]] = field(default_factory=list)
    error: str = ""


def item(number: int) -> dict[str, Tensor]:
    """Return a sample whose tokens are all the same."""
    return {"tokens": torch.full((LENGTH,), number % 3)}


def wrong_item(number: int) -> dict[str, Tensor]:
    """Return a sample of tokens that no other has."""
    return {"tokens": torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))}


def items(wrong: Sequence[int] = ((SPIKE - 1) * BATCH + 2,), without: Sequence[int] = ()) -> list[dict[str, Tensor]]:
    """Return the data of a run, some of them wrong, and without some."""
    numbers = range(BATCH * (STEPS + 6))
    return [wrong_item(number) if number in wrong else item(number) for number in numbers if number not in without]


def train(
    layout: Mapping[str, Any],
    data: Sequence[dict[str, Tensor]],
    save: Path | None = None,
    *,
    steps: int = STEPS,
    dropout: float = 0.0,
    micro_batch_size: int = 1,
    precision: str = "fp64",
    spoils: int | None = None,
    by_program: bool = False,
    experts: int | None = None,
    **settings: Any,
) -> Course:
    """Train for some steps, by `Trainer.train` or by a program's own loop.

    `spoils`: step after which a weight is not finite.
    """
    config = megalite.GPTConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=4,
        max_position_embeddings=LENGTH,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        num_experts=experts,
        moe_router_enable_expert_bias=experts is not None,
        moe_router_score_function="softmax" if experts is None else "sigmoid",
    )
    course = Course()
    options = {"save_interval": 3, "report": False} if save is not None else {}
    record, tell = Records.write_decisions, TrainingLoop.begin_again

    def noted(records: Records, decisions: Sequence[Any], step: int | None = None) -> None:
        number = records.trainer.iteration if step is None else step
        course.decisions += [(number, vars(each)) for each in decisions]
        record(records, decisions, step)

    def again(loop: TrainingLoop, decisions: Sequence[Any]) -> None:
        del course.records[loop.trainer.iteration - first :]
        tell(loop, decisions)

    with (
        mock.patch.object(Records, "write_decisions", noted),
        mock.patch.object(TrainingLoop, "begin_again", again),
        megalite.Trainer(
            config,
            dataset=data,
            shuffle=False,
            seq_length=LENGTH,
            micro_batch_size=micro_batch_size,
            global_batch_size=BATCH,
            optimizer=megalite.AdamW(lr=0.05, schedule="cosine", steps=3 * STEPS),
            layout=megalite.Layout(**layout),
            precision=precision,
            seed=5,
            save=None if save is None else str(save),
            quiet=True,
            watchdog=False,
            **{**options, **settings},
        ) as run,
    ):
        trainer, first = run._trainer, run.iteration
        whole = trainer.update

        def update(*given: Any) -> Any:
            metrics = whole(*given)
            course.numbers.append(metrics.iteration)
            course.records.append(f"{metrics.losses} {metrics.grad_norm} {metrics.learning_rate}")
            course.skipped += [metrics.iteration] if metrics.skipped else []
            if metrics.iteration == spoils:
                trainer.optimizer.buckets[0].parameters[0] = torch.nan
            return metrics

        with mock.patch.object(trainer, "update", update):
            try:
                if by_program:
                    for batch in run.batches(steps):
                        run.step(batch)
                else:
                    run.train(steps)
            except MegaliteError as error:
                course.error = str(error)
        course.consumed, course.left_out = trainer.consumed_samples, list(trainer.left_out)
        trainer.optimizer.finish_parameter_gather()
        with unsharded_parameters(trainer.optimizer):
            course.weights = {name: each.detach().clone() for name, each in trainer.network.named_parameters()}
    return course


def own_model(layout: Mapping[str, Any], micro_batch_size: int, save: Path) -> float:
    """Train a module that learns to return 0, with one sample that is far from it. Returns its loss in that step."""
    points = [torch.full((4,), 100.0 if number == 42 else 1.0 + number % 2) for number in range(64)]
    with megalite.Trainer(
        stages=[torch.nn.Linear(4, 4) for _ in range(2)],
        loss=lambda outputs, batch: outputs.square().mean(),
        dataset=points,
        shuffle=True,
        micro_batch_size=micro_batch_size,
        global_batch_size=4,
        optimizer=megalite.SGD(lr=0.01),
        layout=megalite.Layout(**layout),
        precision="fp64",
        save=str(save),
        report=False,
        quiet=True,
        watchdog=False,
        spiky_loss_policy="skip",
        **ALARMS,
    ) as run:
        order = [run._run.task.train.index(sample) for sample in range(64)]
        run.train(16)
    return order.index(42)
