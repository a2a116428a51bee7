"""Options of alarms: what is done about a step whose loss or gradient looks wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megalite.config.fields import NonNegativeInt, PositiveInt, Range

AboveOne = Annotated[float, Range("above 1", lambda value: value > 1)]


@dataclass(frozen=True)
class AlarmsConfig:
    """Options of alarms about single steps."""

    check_for_spiky_loss: bool = False
    """Look, before each update, whether the loss has jumped, and name the samples behind it."""
    spiky_loss_policy: Literal["log", "skip", "rewind"] = "log"
    """Once it has: report it (log); also leave out the update (skip); or go back to the newest checkpoint of save, and
    train on from there as if the samples of the step were not among the data (rewind)."""
    spiky_loss_factor: AboveOne = 10.0
    """A loss has jumped if it is at least this many times the largest of the steps before. 10 is Megatron-LM's; 1.5
    suits skip and rewind."""
    spiky_loss_window: PositiveInt = 100
    """Number of steps before, those that were trained on, with which loss and gradient are compared. The first ones are
    not judged."""
    spiky_loss_left_out_steps: PositiveInt = 1
    """Number of steps whose samples rewind leaves out: the one whose loss has jumped, and those before it, as far as
    they came after the checkpoint."""
    check_for_large_grads: bool = False
    """Report a step whose gradient norm is at least ten times the largest of the steps before."""
    on_not_finite: Literal["skip", "end"] = "skip"
    """Once the gradient of a step is not finite: skip it, and end after ten in a row; or end at once, also where only
    the loss is not, with a report on the origin, as Megatron-LM does by default (end)."""
    iterations_to_skip: tuple[NonNegativeInt, ...] = ()
    """Steps whose updates are left out, by the number of steps before them: 0 is the first step."""

    @property
    def watches(self) -> bool:
        """True if steps are judged before their update."""
        return (
            self.check_for_spiky_loss
            or self.check_for_large_grads
            or self.on_not_finite == "end"
            or bool(self.iterations_to_skip)
        )
