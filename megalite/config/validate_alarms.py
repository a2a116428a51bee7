"""Check of the options of alarms, with those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.run import TaskConfig


def alarm_problems(config: TaskConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    alarms = config.alarms
    if not alarms.check_for_spiky_loss:
        yield from needs(alarms, "spiky_loss_policy spiky_loss_factor", "--check-for-spiky-loss")
        if not alarms.check_for_large_grads:
            yield from needs(alarms, "spiky_loss_window", "--check-for-spiky-loss or --check-for-large-grads")
    if alarms.spiky_loss_policy != "rewind":
        yield from needs(alarms, "spiky_loss_left_out_steps", "--spiky-loss-policy rewind")
    if not alarms.watches:
        return
    if not config.synchronization.is_plain:
        yield (
            f"{_flag(config)} judges the one update of a step, and here ranks update by themselves or without waiting, "
            "or change the gradients on the way: drop it, or the flags of the other synchronization"
        )
    if config.recovery.survivors_finish_step:
        yield (
            f"{_flag(config)} and --survivors-finish-step: a step that survivors finish has the losses of some ranks "
            "only; drop one of them"
        )
    if alarms.check_for_spiky_loss and alarms.spiky_loss_policy == "rewind":
        yield from _rewind_problems(config)


def _flag(config: TaskConfig) -> str:
    """Return the first flag that makes the run judge its steps."""
    alarms = config.alarms
    given = {
        "--check-for-spiky-loss": alarms.check_for_spiky_loss,
        "--check-for-large-grads": alarms.check_for_large_grads,
        "--on-not-finite end": alarms.on_not_finite == "end",
    }
    return next((flag for flag, is_given in given.items() if is_given), "--iterations-to-skip")


def _rewind_problems(config: TaskConfig) -> Iterator[str]:
    """Yield what going back in a run, without another start, does not fit."""
    flag, checkpoint = "--spiky-loss-policy rewind", config.checkpoint
    if checkpoint.save is None:
        yield f"{flag} needs --save: it goes back to the newest checkpoint there"
    elif checkpoint.save_interval is None:
        yield f"{flag} needs --save-interval: without it, the first checkpoint to go back to is the last one"
    if not checkpoint.save_optim:
        yield f"{flag} needs the optimizer's state in the checkpoints: drop --no-save-optim"
    if config.recovery.warm_restart:
        yield f"{flag} and --warm-restart: copies in memory would be of the steps that it takes back; drop one of them"
    if config.corruption.finds_right_steps:
        yield f"{flag} and the search for silent corruption, which counts the steps since its last check: drop one"
    if config.training.moe_record_routing is not None:
        yield f"{flag} and --moe-record-routing, whose records are of the steps that it takes back: drop one of them"
    if config.parallel.data_parallel_shares is not None:
        yield f"{flag} and --data-parallel-shares: measured shares are of the steps that it takes back; drop one"
