"""Going back, within a run, to the newest checkpoint, with samples left out of what follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from megalite import checkpoint
from megalite.data.sampler import Ranges, drawn, merged
from megalite.parallel.collectives import on_any_rank
from megalite.run.loop import TrainingLoop
from megalite.storage import AnyPath
from megalite.training.ledger import ranges
from megalite.training.resume import ResumePoint
from megalite.watchdog.sections import SAVE, START


def go_back(loop: TrainingLoop, samples: Sequence[int], steps: int) -> Ranges | None:
    """Load the newest whole checkpoint that is of this run, and leave samples out from there on.

    Called by all ranks together.

    Args:
        loop: the loop, which knows the checkpoints of its run: the directory may have those of one that was left.
        samples: the samples of the last step, which was not trained on.
        steps: number of steps of this size whose samples are left out: the last one, and those before it, as far as
            they came after the checkpoint.

    Returns:
        The samples that are left out now, or None if there is no checkpoint yet.
    """
    trainer, display = loop.trainer, loop.display
    assert trainer.checkpoints is not None
    assert trainer.directory is not None
    with trainer.sections(SAVE):
        trainer.checkpoints.finish(display)  # the newest one may still be written
        on_any_rank([False], trainer.mesh)  # a barrier: rank 0 may have removed old ones until now
    found = checkpoint.find_iterations(trainer.directory, loop.saves, trainer.mesh)
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
    start, samples_in_all = max(trainer.consumed_samples, end - len(samples) * (steps - 1)), trainer.loader.length
    earlier = (drawn(place, before, samples_in_all) for place in range(start, end))
    left_out = ranges(chain(samples, earlier))
    trainer.left_out = merged((*before, *left_out))
    trainer.iterations, trainer.skips_in_a_row = last, 0
    return left_out
