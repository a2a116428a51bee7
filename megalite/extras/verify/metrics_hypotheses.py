"""Other figures that a log would have if the program had done something else: one hypothesis each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.config.fields import flag_of
from megalite.errors import MegaliteError
from megalite.extras.verify.command import Command, named_factors
from megalite.extras.verify.logs import LOSS, NORM, RATE
from megalite.extras.verify.saved import Saved
from megalite.extras.verify.truth import (
    Copies,
    OneProcess,
    Step,
    copies_of_tensors,
    first_steps,
    mean_loss,
    mean_of_mean_losses,
    open_data_of,
    with_vocabulary,
)
from megalite.model.batch import MicroBatch
from megalite.optim.learning_rate import LearningRateSchedule, RateSchedules
from megalite.training.data import RunData


@dataclass(frozen=True)
class Prediction:
    """Figures under a hypothesis, by step and name."""

    name: str
    figures: Mapping[tuple[int, str], float]


@dataclass(frozen=True)
class Known:
    """The run that a log is of, and its exact steps.

    Attributes:
        before: number of the step before the first one.
        updates: whether each of the steps updates the weights.
        windows: the steps that the loss of each row is the mean of, by the number of the row's step.
        rate_of_next: whether the log has the learning rate of the next step.
        loss_scale: factor of the loss, as the log has it.
    """

    command: Command
    data: RunData
    start: Saved | None
    schedules: RateSchedules
    steps: Sequence[Step]
    before: int
    updates: Sequence[bool]
    windows: Mapping[int, range]
    rate_of_next: bool
    loss_scale: float = 1.0

    def figure(self, name: str, step: int, window: range, steps: Sequence[Step] | None = None) -> float:
        """Return a figure of a row of the log. `steps`: those of an emulated run."""
        steps = self.steps if steps is None else steps
        own = steps[step - self.before - 1]
        if name == NORM:
            return own.norm
        if name == RATE:
            return self.schedules.learning_rate.at(self.position(own))
        losses = [steps[at - self.before - 1].loss for at in window if at > self.before]
        return sum(losses) / len(losses)

    def position(self, step: Step) -> int:
        """Return the number of samples after which the schedule has the learning rate that a step logs."""
        return step.next_scheduled if self.rate_of_next else step.scheduled

    def changed(self, name: str, change: Callable[[Step], Step]) -> dict[tuple[int, str], float]:
        """Return a figure of each row if each step were another."""
        steps = [change(step) for step in self.steps]
        return {(step, name): self.figure(name, step, window, steps) for step, window in self.windows.items()}

    def replaced(self, step: int, other: Step) -> dict[tuple[int, str], float]:
        """Return the loss and the norm of a row if its step were another."""
        steps = list(self.steps)
        steps[step - self.before - 1] = other
        window = self.windows[step]
        return {(step, name): self.figure(name, step, window, steps) for name in (LOSS, NORM)}


def predictions(known: Known, step: int, name: str) -> Iterator[Prediction]:
    """Yield the figures under each hypothesis about a figure of a step."""
    yield from {LOSS: _losses, NORM: _norms, RATE: _rates}[name](known, step)
    exact = {(at, name): known.figure(name, at, window) for at, window in known.windows.items()}
    counts: dict[str, float] = {**known.command.counts}
    if known.loss_scale > 1:
        counts["the loss scale"] = known.loss_scale
    for factor, said in named_factors(counts).items():
        yield Prediction(said, {key: value * factor for key, value in exact.items()})
    yield Prediction("rounded to bf16", {key: float(torch.tensor(value).bfloat16()) for key, value in exact.items()})
    if name == RATE:
        return
    for shift, said in ((-1, "that of the step before"), (1, "that of the step after")):
        shifted = {key: exact[key[0] + shift, name] for key in exact if (key[0] + shift, name) in exact}
        yield Prediction(said, shifted)
    yield from _batches(known, step)


# ------------------------------------------------------------------------------------------------ gradient norms


def _norms(known: Known, step: int) -> Iterator[Prediction]:
    """Yield what a norm may be that is counted otherwise."""
    limit = known.command.config.optimizer.clip_grad
    if limit:
        yield Prediction("the norm after clipping", known.changed(NORM, lambda s: replace(s, norm=min(s.norm, limit))))
    copies = copies_of_tensors(with_vocabulary(known.command, known.start), known.command.world_size)
    experts = known.command.sizes["ep"]
    weights: dict[str, Callable[[Copies], float]] = {
        "replicas on tensor-parallel ranks are counted on every rank": lambda c: c.tensor_parallel,
        "what tensor-parallel ranks hold alike is left out": lambda c: c.tensor_parallel == 1,
        "tied weights are counted on each of their stages": lambda c: c.stages,
        "experts are counted on one of the expert-parallel ranks alone": lambda c: 1 / experts if c.is_expert else 1,
        "experts are counted once for each expert-parallel rank": lambda c: experts if c.is_expert else 1,
        "experts are left out": lambda c: not c.is_expert,
    }
    for said, weight in weights.items():
        factors = {name: float(weight(each)) for name, each in copies.items()}
        if len(set(factors.values())) > 1:
            yield Prediction(said, known.changed(NORM, lambda s, factors=factors: _weighted(s, factors)))  # type: ignore[misc]
    yield from _other_mean(known, step)
    yield from _not_cleared(known, step)
    ranks = known.command.sizes["tp"]
    kinds: dict[str, list[str]] = {}
    for name, each in copies.items():
        if each.tensor_parallel > 1:
            kinds.setdefault(re.sub(r"^layers\.\d+\.", "", name), []).append(name)
    for kind, names in kinds.items():
        for said, factor in ((f"times {ranks}", ranks), (f"divided by {ranks}", 1 / ranks)):
            factors = {name: factor**2 if name in names else 1.0 for name in copies}
            figures = known.changed(NORM, lambda s, factors=factors: _weighted(s, factors))  # type: ignore[misc]
            yield Prediction(f"gradients of {kind}, which tensor-parallel ranks hold alike, are {said}", figures)


def _not_cleared(known: Known, step: int) -> Iterator[Prediction]:
    """Yield the norm if a step's gradients are added to what the buffers had before it."""
    if step - known.before < 2:
        return
    run = _at(known, step - 1)
    run.step(updates=known.updates[step - known.before - 2])
    left = {
        "gradients are added to those of the step before, which are not cleared": run.gradients,
        "gradients are added to the weights, which are left in their buffer": dict(run.weights()),
    }
    run.tried(run.micro_batches())
    for said, before in left.items():
        for times in dict.fromkeys((1, known.command.sizes["dp"])):  # a buffer may be summed over ranks with the rest
            sums = (each + times * before[name] for name, each in run.gradients.items())
            norm = math.sqrt(sum(float(each.double().square().sum()) for each in sums))
            yield Prediction(
                f"{said}{f', by each of {times} data-parallel ranks' if times > 1 else ''}", {(step, NORM): norm}
            )


def _weighted(step: Step, factors: Mapping[str, float]) -> Step:
    return replace(step, norm=math.sqrt(sum(factors[name] * norm * norm for name, norm in step.norms.items())))


def _other_mean(known: Known, step: int) -> Iterator[Prediction]:
    """Yield the step if the loss is the other of the two means, where masks make them differ."""
    other = replace(known.command, per_token_loss=not known.command.per_token_loss)
    run = _at(replace(known, command=other), step)
    said = "the mean over tokens" if other.per_token_loss else "the mean of the micro-batches' means"
    found = run.tried(run.micro_batches())
    if known.figure(NORM, step, known.windows[step]) != found.norm:
        yield Prediction(f"the gradient of {said}", {(step, NORM): found.norm})


# ------------------------------------------------------------------------------------------------ learning rates


def _rates(known: Known, step: int) -> Iterator[Prediction]:
    """Yield the rates of other steps and units."""
    schedule, batch = known.schedules.learning_rate, known.command.config.training.global_batch_size or 1
    of_rank = known.command.micro_batches // known.command.sizes["dp"]
    began = known.steps[0].scheduled

    def at(place: Callable[[int], float], by: LearningRateSchedule = schedule) -> dict[tuple[int, str], float]:
        places = {number: known.position(known.steps[number - known.before - 1]) for number in known.windows}
        return {(number, RATE): by.at(max(int(place(position)), 0)) for number, position in places.items()}

    yield Prediction("that of one step before", at(lambda p: p - batch))
    yield Prediction("that of one step after", at(lambda p: p + batch))
    for said, factor in (
        ("the schedule advances with each micro-batch", of_rank),
        ("the schedule advances once for each data-parallel rank", known.command.sizes["dp"]),
        ("the schedule counts steps in place of samples", 1 / batch),
        ("the schedule counts samples in place of steps", batch),
    ):
        yield Prediction(said, at(lambda p, factor=factor: p * factor))  # type: ignore[misc]
    if began:
        yield Prediction("the schedule begins anew at the checkpoint", at(lambda p: p - began))
        for position in (began - batch, began):
            saved = replace(schedule, maximum=schedule.at(position))
            yield Prediction("the schedule's highest rate is the one that the checkpoint had", at(lambda p: p, saved))
    warmup, decay = schedule.warmup_samples, schedule.decay_samples
    for said, other in (
        ("without warm-up", replace(schedule, warmup_samples=0.0)),
        ("the warm-up counts samples in place of steps", replace(schedule, warmup_samples=warmup / batch)),
        ("the warm-up counts steps in place of samples", replace(schedule, warmup_samples=warmup * batch)),
        ("the warm-up counts micro-batches", replace(schedule, warmup_samples=warmup / of_rank)),
        ("without decay", replace(schedule, style="constant")),
        ("the decay counts samples in place of steps", replace(schedule, decay_samples=decay / batch)),
        ("the decay counts steps in place of samples", replace(schedule, decay_samples=decay * batch)),
    ):
        yield Prediction(said, at(lambda p: p, other))
    yield Prediction("that of the embedding and the output layer", at(lambda p: p, known.schedules.token_tables))


# ------------------------------------------------------------------------------------------------ losses


def _losses(known: Known, step: int) -> Iterator[Prediction]:
    """Yield losses of other samples, and other means."""
    own = known.steps[step - known.before - 1]
    if own.others:
        yield Prediction(
            "with the other terms of the loss", known.changed(LOSS, lambda s: replace(s, loss=s.loss + s.others))
        )
    yield Prediction("in bits", known.changed(LOSS, lambda s: replace(s, loss=s.loss / math.log(2))))
    run, ranks = _at(known, step), known.command.sizes["dp"]
    micro_batches = run.micro_batches()
    losses = run.token_losses(micro_batches)
    whole = [replace(each, loss_mask=torch.ones_like(loss)) for each, loss in zip(micro_batches, losses, strict=True)]
    means = {
        "the mean of the micro-batches' means": mean_of_mean_losses(losses, micro_batches),
        "the mean over tokens": mean_loss(losses, micro_batches),
        "the mean over all tokens, also those that count in no loss": mean_loss(losses, whole),
        "that of the first micro-batch alone": mean_loss(losses[:1], micro_batches),
        "that of the last micro-batch alone": mean_loss(losses[-1:], micro_batches[-1:]),
    }
    for rank in range(ranks if ranks > 1 else 0):
        means[f"that of data-parallel rank {rank} alone"] = mean_loss(losses[rank::ranks], micro_batches[rank::ranks])
    for said, mean in means.items():
        if mean != own.loss:
            yield Prediction(said, {(step, LOSS): known.replaced(step, replace(own, loss=mean))[step, LOSS]})


def _at(known: Known, step: int) -> OneProcess:
    """Return the exact run before a step."""
    run = OneProcess(known.command, known.data, known.start)
    first_steps(run, known.updates[: step - known.before - 1])
    return run


# ------------------------------------------------------------------------------------------------ other samples


def _batches(known: Known, step: int) -> Iterator[Prediction]:
    """Yield the step with other samples, or other labels, masks and positions of its samples."""
    run = _at(known, step)
    here, size = run.consumed, run.batch_size
    begins = {
        "the batch is that of the step before": here - size,
        "the batch is that of the step after": here + size,
        "the batch begins one sample early": here - 1,
        "the batch begins one sample late": here + 1,
        "the batch is the first one of the run": 0,
    }
    for said, begin in begins.items():
        if begin >= 0 and begin != here:
            with suppress(MegaliteError):
                yield Prediction(said, known.replaced(step, run.tried(run.micro_batches(begin))))
    labels: dict[str, Callable[[MicroBatch], MicroBatch]] = {
        "labels are the inputs: they are not shifted": lambda each: replace(each, labels=each.tokens),
        "labels are shifted by two": _shifted_twice,
    }
    for said, change in labels.items():
        yield Prediction(said, known.replaced(step, run.tried([change(each) for each in run.micro_batches()])))
    data = known.command.config.data
    for flag in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask") if not data.sft else ():
        given = bool(getattr(data, flag))
        changed: Any = {flag: not given}
        config = replace(known.command.config, data=replace(data, **changed))
        other = replace(known.command, config=config)
        with suppress(MegaliteError):
            run = _at(replace(known, command=other, data=open_data_of(other)), step)
            said = f"{flag_of(flag)} {'has no effect' if given else 'has an effect, and is not given'}"
            yield Prediction(said, known.replaced(step, run.tried(run.micro_batches())))


def _shifted_twice(each: MicroBatch) -> MicroBatch:
    """Return a micro-batch whose labels are those of the next tokens. The last one is not known, and does not count."""
    assert each.labels is not None  # training data have labels
    assert each.loss_mask is not None  # and a mask
    mask = each.loss_mask.clone()
    mask[:, -1] = 0
    return replace(each, labels=each.labels.roll(-1, 1), loss_mask=mask)
