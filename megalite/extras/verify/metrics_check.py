"""Comparison of a log with the first steps of its run: losses, gradient norms and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.errors import DataError
from megalite.extras.verify.command import Command
from megalite.extras.verify.logs import FIGURES, LOSS, NORM, RATE, Log, Row
from megalite.extras.verify.metrics_hypotheses import Known, Prediction, predictions
from megalite.extras.verify.saved import Saved
from megalite.extras.verify.truth import OneProcess, Step, emulated, first_steps, open_data_of

STEPS = 3
"""Maximum number of steps that are computed."""
ALLOWED = 8.0
"""Times that a figure may be farther from fp64 than emulated runs are, in root mean square (see `_spreads`). Of 1,920
figures of right runs in bf16, none was farther than 4.5 times; kernels of devices may round in more places."""
_OF_A_SUM = 8 * 2.0**-24
"""Relative error of a figure that a program adds up and logs in fp32."""
_LEAST_OF_FP64 = 2.0**-46


@dataclass(frozen=True)
class Figure:
    """A recorded figure beside what should have come out.

    Attributes:
        tolerance: what rounding explains, of the computation and of the print.
    """

    step: int
    name: str
    recorded: float
    expected: float
    tolerance: float

    @property
    def ratio(self) -> float:
        """Times that the figure is farther off than rounding explains it."""
        return distance(self.recorded, self.expected, self.tolerance)

    @property
    def is_accused(self) -> bool:
        return self.ratio > 1.0


@dataclass(frozen=True)
class Explanation:
    """A hypothesis, and how well it explains the log.

    Attributes:
        ratio: times that the first accused figure is farther from the hypothesis than rounding explains.
        mean_ratio: the mean of that over all figures of which the hypothesis says something, each at most 10.
    """

    name: str
    expected: float
    ratio: float
    mean_ratio: float

    @property
    def explains(self) -> bool:
        return self.ratio <= 1.0


@dataclass(frozen=True)
class MetricsCheck:
    """Result of the comparison. `explanations`: of the first accused figure, the best one first."""

    format: str
    figures: tuple[Figure, ...]
    explanations: tuple[Explanation, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Figure | None:
        """The first figure that is farther off than rounding explains."""
        return next((figure for figure in self.figures if figure.is_accused), None)


def distance(recorded: float, expected: float, tolerance: float) -> float:
    """Return a distance in tolerances; infinity if one of the numbers is not finite."""
    difference = abs(recorded - expected)
    if difference == 0.0:
        return 0.0
    return difference / tolerance if tolerance and math.isfinite(difference) else math.inf


def check_metrics(
    command: Command,
    log: Log,
    start: Saved | None,
    steps: int = STEPS,
    recorded: Dataset[SampleFields] | None = None,
) -> MetricsCheck:
    """Compare the first steps of a log after a checkpoint.

    Args:
        start: the checkpoint that the run started from; None: it began with the initial values that megalite draws.
        steps: most steps that are computed.
        recorded: the samples of these steps; None: those of the data flags. Samples that another program has made up
            (--mock-data) are not known, and of such a log only rates are compared.

    Raises:
        DataError: the log has none of the first steps, or the data are not here.
        CheckpointError: the checkpoint is of another network, or cannot be read.
    """
    data = open_data_of(command, recorded)
    reason = _only_rates(command, recorded is not None)
    truth = OneProcess(command, data, start)
    before = 0 if start is None or command.settings.get("finetune") else start.iteration or 0
    rows, updates, notes = _rows_of(log, before, steps)
    exact = first_steps(truth, updates)
    rounded = (
        [exact]
        if reason
        else [
            first_steps(OneProcess(command, data, start, numerics), updates, number or None)
            for number, numerics in enumerate(emulated(command))
        ]
    )
    scale = next((row.figures["loss_scale"].value for row in rows if "loss_scale" in row.figures), 1.0)
    windows = {row.step: row.windows[-1] for row in rows}
    schedules = truth.trainer.rates
    known = Known(command, data, start, schedules, exact, before, updates, windows, log.rate_of_next, scale)
    figures = tuple(each for each in _compared(known, rows, rounded) if each.name == RATE or not reason)
    check = MetricsCheck(log.format, figures, notes=(*truth.notes, *notes, *([reason] if reason else [])))
    return check if check.first is None else replace(check, explanations=_explanations(check.first, figures, known))


def _only_rates(command: Command, is_recorded: bool) -> str:
    """Return why only learning rates can be compared; empty if all figures can."""
    if command.balances_so_far:
        return "with global_aux_loss Megatron-LM takes the choices of the step so far: of a log only rates are compared"
    if not is_recorded and command.config.data.mock_data and command.program != "megalite":
        return "the samples are made up by another program: only rates are compared (--trace gives the samples)"
    return ""


def _rows_of(log: Log, before: int, steps: int) -> tuple[list[Row], list[bool], list[str]]:
    """Return the rows to compare, whether each step updates the weights, and notes. Raises DataError."""
    rows = [row for row in log.rows if before < row.step <= before + steps]
    notes, kept, updates = [], list[Row](), list[bool]()
    for row in rows:
        own = [step for step in row.windows[-1] if step > before + len(updates)]
        if row.skipped not in (0, len(own)):
            notes.append(
                f"up to step {row.step}: {row.skipped} of {len(own)} steps were skipped, and the log does not say which"
            )
            break
        gap = row.step - before - len(updates) - len(own)
        updates += [True] * gap + [not row.skipped] * len(own)
        kept.append(row)
    if not kept:
        last = log.rows[-1].step
        raise DataError(
            f"the log has steps {log.rows[0].step} to {last}, none of the {steps} after step {before} that can be "
            "computed: give the checkpoint before them"
        )
    return kept, updates, notes


def _spreads(exact: Sequence[Step], rounded: Sequence[Sequence[Step]]) -> list[dict[str, float]]:
    """Return for each step how far rounding moves the loss and the norm, in root mean square, and never less later.

    Few runs may all be near by chance. So the deviations of single tokens and tensors count, too, as if they were
    independent of each other.
    """
    found: list[dict[str, float]] = []
    least = {LOSS: 0.0, NORM: 0.0}
    for step, others in zip(exact, zip(*rounded, strict=True), strict=True):
        tokens = step.token_losses
        of_tokens = _root_mean_square([float((each.token_losses - tokens).square().mean()) ** 0.5 for each in others])
        of_tensors = (
            norm / (step.norm or 1.0) * _root_mean_square([each.norms[name] - norm for each in others])
            for name, norm in step.norms.items()
        )
        least = {
            LOSS: max(least[LOSS], _root_mean_square([each.loss - step.loss for each in others])),
            NORM: max(least[NORM], _root_mean_square([each.norm - step.norm for each in others])),
        }
        single = {LOSS: of_tokens / math.sqrt(max(len(tokens), 1)), NORM: math.hypot(*of_tensors)}
        found.append({name: math.hypot(least[name], single[name]) for name in least})
    return found


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _compared(known: Known, rows: Sequence[Row], rounded: Sequence[Sequence[Step]]) -> Iterator[Figure]:
    """Yield the figures of the rows, in the order in which a step computes them."""
    of_sum = _LEAST_OF_FP64 if known.command.precision == "fp64" else _OF_A_SUM
    spreads = _spreads(known.steps, rounded)
    for row in rows:
        spread = {RATE: 0.0, **spreads[row.step - known.before - 1]}
        for name in FIGURES:
            if (printed := row.figures.get(name)) is None or (row.skipped and name != RATE):
                continue
            choices = []
            for window in row.windows if name == LOSS else row.windows[-1:]:
                expected = known.figure(name, row.step, window)
                tolerance = ALLOWED * spread[name] + of_sum * abs(expected) + printed.half_unit
                choices.append(Figure(row.step, name, printed.value, expected, tolerance))
            yield min(choices, key=lambda figure: figure.ratio)


def _explanations(first: Figure, figures: Sequence[Figure], known: Known) -> tuple[Explanation, ...]:
    """Return the hypotheses about the first accused figure, the best one first."""
    found = []
    for prediction in predictions(known, first.step, first.name):
        ratios = dict(_ratios(prediction, figures))
        if (first.step, first.name) in ratios:
            mean = sum(min(ratio, 10.0) for ratio in ratios.values()) / len(ratios)
            at = prediction.figures[first.step, first.name]
            found.append(Explanation(prediction.name, at, ratios[first.step, first.name], mean))
    return tuple(sorted(found, key=lambda each: (not each.explains, each.mean_ratio if each.explains else each.ratio)))


def _ratios(prediction: Prediction, figures: Sequence[Figure]) -> Iterator[tuple[tuple[int, str], float]]:
    for figure in figures:
        expected = prediction.figures.get((figure.step, figure.name))
        if expected is not None:
            larger = max(1.0, abs(expected / figure.expected)) if figure.expected else 1.0
            yield (figure.step, figure.name), distance(figure.recorded, expected, figure.tolerance * larger)
