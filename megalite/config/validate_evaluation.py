"""Relations of the flags of evaluations: what is evaluated, and whether there is any."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.data import DataConfig, evaluation_problems
from megalite.config.fields import needs
from megalite.config.training import TrainingConfig


def validation_problems(data: DataConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    yield from evaluation_problems(data, training.eval_iters)
    if data.mock_data and training.full_validation:
        yield "--full-validation reads all validation data, and those of --mock-data have no end: leave it out"
    if data.mock_data and training.multiple_validation_sets:
        yield "--multiple-validation-sets evaluates files, and --mock-data has none: leave it out"
    if not training.multiple_validation_sets:
        yield from needs(training, "validation_set_names", "--multiple-validation-sets")
    elif not training.eval_iters and not training.full_validation:
        yield "--multiple-validation-sets evaluates nothing with --eval-iters 0: add --full-validation, or leave it out"
