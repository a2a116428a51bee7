"""Alarms about the steps of a run: what is looked at before an update, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.config.run import fits
from megalite.errors import CheckpointError, ConfigurationError, MegaliteError
from megalite.extras.alarms.going_back import go_back
from megalite.extras.alarms.history import History
from megalite.extras.alarms.origins import origin
from megalite.extras.alarms.rows import highest_rows
from megalite.optim.optimizer import StepResult
from megalite.parallel.collectives import all_gather_json, broadcast_
from megalite.run.loop import TrainingLoop
from megalite.training import loss_terms
from megalite.training.gradients import Gradients
from megalite.training.ledger import Decision, ranges
from megalite.training.nonfinite import MAX_CONSECUTIVE_SKIPS
from megalite.training.trainer import Trainer

LARGE_GRADIENT = 10.0
"""Factor above the largest norm of the steps before from which a gradient is reported: Megatron-LM's."""
_SHOWN = 4
"""The most rows in a message."""
_HISTORY = "alarm_history"
"""Section of a checkpoint's configuration with the values that steps are compared with."""


@dataclass(frozen=True)
class _Found:
    """Alarm about a step, the same on all ranks."""

    decision: Decision
    samples: Sequence[int]
    refused: bool
    """The update was left out because of what the step is, and not because it was told to be."""


class Alarms:
    """Alarms about the steps of a trainer. All methods are called by all ranks together.

    Every decision follows from the loss and the norm of the gradient, which all ranks share, and from those of the
    steps before, which checkpoints have.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Begin. Raises ConfigurationError if a step may update a part of the parameters only."""
        if trainer.task.optimizers:
            raise ConfigurationError(
                "alarms about steps (check_for_spiky_loss, iterations_to_skip, ...) compare a step with those before "
                "it, and with several optimizers each may update others: leave them out"
            )
        self._trainer, self._config = trainer, trainer.config.alarms
        window = self._config.spiky_loss_window
        self._losses, self._norms = History(window), History(window)
        self._found: list[_Found] = []
        self._refused_in_a_row = self._refused_last = 0
        """Steps whose loss has jumped without one after them being trained on, and the last of them."""
        self._ends = ""
        self._gone_back: list[tuple[int, Decision]] = []
        """The decisions to go back in this process, each with the step that it went back to."""

    def judge(self, gradients: Gradients, result: StepResult) -> StepResult:
        """Return the result of a step before its update, or one that refuses the update."""
        config, norm, before = self._config, result.gradient_norm, self._trainer.iteration
        self._found = []
        if not math.isfinite(norm):  # the step is skipped anyway
            return result
        loss = self._loss(gradients)
        if not math.isfinite(loss) and config.on_not_finite == "end":
            self._ends = (
                f"the loss of step {before + 1} is {loss}, while its gradient is finite, and --on-not-finite end ends "
                f"the run at the first such step{self._rows(gradients)}"
            )
            return replace(result, refused=True)
        if before in config.iterations_to_skip:
            why = f"step {before + 1} was not trained on: --iterations-to-skip has {before}"
            self._found.append(self._alarm("skip", gradients, why, trained=False))
            return replace(result, refused=True)
        is_spiky = config.check_for_spiky_loss and self._losses.is_exceeded(loss, config.spiky_loss_factor)
        refuses = is_spiky and config.spiky_loss_policy != "log"
        if is_spiky:
            why = self._exceeded("loss", loss, config.spiky_loss_factor, self._losses)
            why += self._rows(gradients)
            self._found.append(self._alarm("spike", gradients, why, trained=not refuses))
        if config.check_for_large_grads and self._norms.is_exceeded(norm, LARGE_GRADIENT):
            why = self._exceeded("gradient norm", norm, LARGE_GRADIENT, self._norms)
            self._found.append(self._alarm("large gradient", gradients, why, trained=not refuses))
        if refuses:
            self._refused_in_a_row, self._refused_last = self._refused_in_a_row + 1, max(self._refused_last, before + 1)
            return replace(result, refused=True)
        if before + 1 >= self._refused_last:  # the run has come on, also after going back
            self._refused_in_a_row = 0
        self._losses, self._norms = self._losses.with_values([loss]), self._norms.with_values([norm])
        return result

    def after_step(self, loop: TrainingLoop, *, may_go_back: bool) -> bool:
        """Report on the step that has ended. Returns True if the run has gone back to an earlier one.

        Raises MegaliteError if too many steps in a row were refused, or if a loss that is not finite is to end the run.
        """
        if self._ends:
            raise MegaliteError(self._ends)
        found, self._found = self._found, []
        spike = next((each for each in found if each.refused), None)
        if spike is not None and self._refused_in_a_row == MAX_CONSECUTIVE_SKIPS:
            raise MegaliteError(
                f"{spike.decision.why}. It is the {MAX_CONSECUTIVE_SKIPS}th such step in a row, so this is not about "
                "single samples: look at the data from there on, lower --lr, or raise --spiky-loss-factor"
            )
        if spike is not None and may_go_back and self._config.spiky_loss_policy == "rewind":
            if self._goes_back(spike, loop):
                return True
            loop.display.message("note: there is no checkpoint to go back to yet: the update is left out instead")
        elif spike is not None and self._config.spiky_loss_policy == "rewind":
            loop.display.message("note: the program makes each step (step()), so the update alone is left out")
        for each in found:
            loop.display.message(f"WARNING: {each.decision.why}")
        if found:
            loop.records.write_decisions([each.decision for each in found])
        return False

    def saved(self) -> dict[str, Any]:
        """Return the section of a checkpoint's configuration that later judgements depend on."""
        refused = [self._refused_in_a_row, self._refused_last]
        return {_HISTORY: {"losses": list(self._losses.values), "norms": list(self._norms.values), "refused": refused}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over that section from a checkpoint's configuration. Raises CheckpointError if it is damaged."""
        history, empty = saved.get(_HISTORY, {}), History(self._config.spiky_loss_window)
        losses, norms, refused = history.get("losses", []), history.get("norms", []), history.get("refused", [0, 0])
        if not (fits(losses, tuple[float, ...]) and fits(norms, tuple[float, ...]) and fits(refused, tuple[int, int])):
            raise CheckpointError(f"the checkpoint's {_HISTORY} has no numbers: resume from another one")
        self._losses, self._norms = empty.with_values(losses), empty.with_values(norms)
        self._refused_in_a_row, self._refused_last = refused

    def _goes_back(self, spike: _Found, loop: TrainingLoop) -> bool:
        """Go back to the newest checkpoint, without the samples of the spike. Returns False if there is none."""
        trainer, number = self._trainer, self._trainer.iteration
        refused = self._refused_in_a_row, self._refused_last
        left_out = go_back(loop, spike.samples, self._config.spiky_loss_left_out_steps)
        if left_out is None:
            return False
        self._refused_in_a_row, self._refused_last = refused  # the checkpoint has those from before
        why = f"{spike.decision.why}. The run has gone back from step {number} to {trainer.iteration}, without them"
        loop.display.message(f"WARNING: {why}")
        decision = replace(spike.decision, samples=left_out, why=why)
        self._gone_back = [(step, each) for step, each in self._gone_back if step >= trainer.iteration]
        self._gone_back.append((trainer.iteration, decision))
        loop.begin_again([each for _, each in self._gone_back])
        return True

    def _alarm(self, kind: str, gradients: Gradients, why: str, *, trained: bool) -> _Found:
        """Return an alarm about a step with these gradients."""
        samples = self._samples(gradients)
        ranks = list(range(self._trainer.mesh.size("dp")))
        decision = Decision(kind, ranks, ranges(samples), "trained" if trained else "left out", why)
        return _Found(decision, samples, refused=kind == "spike" and not trained)

    def _exceeded(self, what: str, value: float, factor: float, history: History) -> str:
        return (
            f"the {what} of step {self._trainer.iteration + 1}, {value:.6g}, is at least {factor:g} times the largest "
            f"of the {history.window} steps before, {history.largest:.6g}"
        )

    def _loss(self, gradients: Gradients) -> float:
        """Return the loss of a step as its record has it, that of rank 0: other ranks may differ in the last digit."""
        mesh, term = self._trainer.mesh, gradients.terms[0]
        totals = loss_terms.total_sums([term], gradients.sums, mesh)
        loss = torch.tensor([loss_terms.means(totals, gradients.counts)[term.name]], dtype=torch.float64)
        return float(broadcast_(loss.to(mesh.device), 0, mesh.world()).item())

    def _samples(self, gradients: Gradients) -> list[int]:
        """Return the numbers of the samples of a step, ascending."""
        own = [sample for each in gradients.micro_batches for sample in each.sample_ids]
        return sorted({sample for each in all_gather_json(own, self._trainer.mesh, "dp") for sample in each})

    def _rows(self, gradients: Gradients) -> str:
        """Return a text on the rows with the highest loss, which a second forward finds."""
        shown = []
        for row in highest_rows(self._trainer, gradients.micro_batches, _SHOWN):
            of = [name for sample in row.samples if (name := origin(self._trainer.task, sample))]
            numbers = ", ".join(map(str, row.samples))
            named = f"sample{'s' * (len(row.samples) > 1)} {numbers}"
            shown.append(f"{named} (loss {row.loss:.6g}{''.join(f', {each}' for each in of)})")
        return f". The highest losses of its rows: {'; '.join(shown)}" if shown else ""
