"""Going back, within a run, to the newest checkpoint, with samples left out of what follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from megalite import checkpoint
from megalite.checkpoint import Candidates
from megalite.data.sampler import Ranges, sample_at
from megalite.storage import AnyPath
from megalite.training.display import Display
from megalite.training.ledger import ranges
from megalite.training.resume import ResumePoint
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import SAVE, START


def go_back(trainer: Trainer, display: Display, samples: Sequence[int], steps: int) -> Ranges | None:
    """Load the newest whole checkpoint of the run's directory, and leave samples out from there on.

    Called by all ranks together.

    Args:
        samples: the samples of the last step, which was not trained on.
        steps: number of steps of this size whose samples are left out: the last one, and those before it, as far as
            they came after the checkpoint.

    Returns:
        The samples that are left out now, or None if there is no checkpoint yet.
    """
    assert trainer.checkpoints is not None
    assert trainer.directory is not None
    with trainer.sections(SAVE):
        trainer.checkpoints.finish(display)  # the newest one may still be written
    found: Candidates = checkpoint.find_candidates(trainer.directory, trainer.mesh)
    if not found.paths:
        return None
    before, last = trainer.left_out, trainer.iterations
    end = trainer.consumed_samples - len(samples)

    def load(path: AnyPath) -> None:
        trainer.load(path, checkpoint.check_whole(path, trainer.mesh), ResumePoint(found))

    with trainer.sections(START):
        trainer.optimizer.finish_parameter_gather()
        path, _, damaged = checkpoint.newest_whole(found.paths, load)
    for note in checkpoint.fall_back_notes(found.paths[0], path, damaged):
        display.message(note)
    start = max(trainer.consumed_samples, end - len(samples) * (steps - 1))
    earlier = (sample_at(place, before) for place in range(start, end))
    left_out = ranges(chain(samples, earlier))
    trainer.left_out = ranges(number for low, high in (*before, *left_out) for number in range(low, high + 1))
    trainer.iterations, trainer.skips_in_a_row = last, 0
    return left_out
