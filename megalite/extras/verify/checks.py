"""Verdicts on what needs no trace of tensors: a log, a pair of checkpoints, the samples of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from megalite.errors import ConfigurationError, DataError
from megalite.extras.verify.batches import StepBatches, consumed_before, from_trace, recorded_samples
from megalite.extras.verify.command import Command
from megalite.extras.verify.compare import first_difference, layer_of
from megalite.extras.verify.evidence import Evidence
from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.logs import Log, Printed, Row, read_log
from megalite.extras.verify.metrics_check import STEPS, MetricsCheck, check_metrics
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.samples_check import SampleFinding, check_samples
from megalite.extras.verify.saved import open_saved
from megalite.extras.verify.step_check import check_step, gradients_of
from megalite.extras.verify.step_quantities import Difference, StepGradients
from megalite.extras.verify.suspect import NOT_EXPLAINED, Hypothesis
from megalite.extras.verify.trace import Entry, Trace
from megalite.extras.verify.verdict import Figure, Verdict

_MOST_PARAMETERS = 1 << 28
"""Size of a network, beside whose trace a figure is explained without being asked for, which needs 24 bytes each."""


def verify_metrics(command: Command, checkpoint: Path | None, log: Path, trace: Path | None = None) -> Verdict:
    """Compare a log of the first steps after a checkpoint with what should have come out.

    Args:
        checkpoint: None for a run that begins with the initial values that megalite draws.
        trace: has the samples of these steps, or of the first ones; None: the data flags do.

    Raises DataError or CheckpointError as `check_metrics` does.
    """
    start = None if checkpoint is None else open_saved(checkpoint)
    before = 0 if start is None or command.settings.get("finetune") else start.iteration or 0
    batches = [] if trace is None else list(islice(_recorded(trace, before + 1), STEPS))
    recorded = recorded_samples(batches, consumed_before(command, before + 1)) if batches else None
    found = check_metrics(command, read_log(log), start, len(batches) or STEPS, recorded)
    figures = [
        Figure(f"{each.name} of step {each.step}", each.recorded, each.expected, each.tolerance)
        for each in found.figures
    ]
    return Verdict((), None, hypotheses=_of_figures(found), figures=figures, notes=(*command.notes, *found.notes))


def with_explained_figures(verdict: Verdict, command: Command, checkpoint: Path | None, trace: Trace) -> Verdict:
    """Add what explains the first figure of a trace that differs, if all of its tensors are right."""
    wrong = {each.name: Printed(each.recorded) for each in verdict.figures if each.differs}
    batches = from_trace(trace) if wrong and verdict.first is None else None
    if batches is None or not batches.whole:
        return verdict
    try:
        return replace(verdict, hypotheses=_explained(command, checkpoint, trace, batches, wrong))
    except NOT_EXPLAINED as error:
        return replace(verdict, notes=(*verdict.notes, f"no explanation was looked for: {error!r}"))


def _explained(
    command: Command, checkpoint: Path | None, trace: Trace, batches: StepBatches, wrong: Mapping[str, Printed]
) -> list[Hypothesis]:
    """Return what explains figures of a step. Raises DataError if the network is too large to be held whole."""
    start = None if checkpoint is None else open_saved(checkpoint)
    step = 1 if start is None or command.settings.get("finetune") else (start.iteration or 0) + 1
    log = Log(trace.format, [Row(step, wrong, (range(step, step + 1),))])
    if start is not None:
        size = sum(math.prod(kind.shape) for kind in start.weights.source.tensors.values())
        if size > _MOST_PARAMETERS:
            raise DataError(f"{size:,} parameters with their optimizer are too many to be held at once: give --metrics")
    found = check_metrics(command, log, start, 1, recorded_samples([batches], consumed_before(command, step)))
    return _of_figures(found)


def _of_figures(found: MetricsCheck) -> list[Hypothesis]:
    return [Hypothesis("figure", each.name, each.ratio * LIMIT) for each in found.explanations]


def _recorded(trace: Path, step: int) -> Iterator[StepBatches]:
    """Yield the micro-batches of steps in a row, as far as a trace has all of them."""
    while True:
        try:
            found = from_trace(read_trace(trace, step))
        except ConfigurationError:  # the trace has no such step
            return
        if found is None or not found.whole:
            return
        yield found
        step += 1


def verify_step(command: Command, before: Path, after: Path, trace: Trace | None = None) -> Verdict:
    """Check that one step of the optimizer leads from a checkpoint to another, with the gradients of its batch.

    `trace`: has the batch, if it has all of it; else the data flags give it. Without either, only what follows from the
    averages of the optimizer is checked. Raises CheckpointError.
    """
    start, end = open_saved(before), open_saved(after)
    notes: list[str] = []
    gradients: StepGradients | None
    try:
        if command.balances_so_far:
            raise DataError("global_aux_loss takes the choices of the step so far, which only a trace is verified with")
        recorded = None if trace is None else from_trace(trace)
        known = recorded is not None and recorded.whole
        gradients = gradients_of(command, start, recorded.arrays if recorded is not None and known else None)
    except DataError as error:
        gradients = None
        notes.append(f"the gradients are not known, so only the update is checked: {error}")
    found = check_step(command, start, end, gradients)
    judgements = [_judgement(each, order) for order, each in enumerate(found.differences)]
    hypotheses = [Hypothesis("update", each.name, each.ratio * LIMIT) for each in found.explanations]
    first = first_difference(judgements)
    ranks = (0,) if first is not None else ()
    return Verdict(judgements, first, ranks, hypotheses, notes=(*command.notes, *found.notes, *notes))


def _judgement(difference: Difference, order: int) -> Judgement:
    """Return a difference as a judgement, whose limit is what rounding explains at most."""
    name = difference.tensor if difference.kind == "weights" else f"{difference.tensor} ({difference.kind})"
    entry = Entry(0, name, "parameter_after", (), "the second checkpoint", _not_kept)
    rounding = difference.tolerance / LIMIT
    return Judgement(
        entry, None, layer_of(difference.tensor), order, difference.distance, rounding, 1.0, difference.change
    )


def _not_kept() -> Evidence:
    raise DataError("the tensors of a checkpoint are read once")


def with_samples(verdict: Verdict, command: Command, trace: Trace, step: int) -> Verdict:
    """Add lines on recorded samples that are not those that the data flags give for a step, counted from 1.

    Raises DataError if the data are not here, or end before.
    """
    if not trace.batches:
        return replace(verdict, notes=(*verdict.notes, "the trace has no batch to compare with the data"))
    found = check_samples(command, trace.batches, trace.coordinates, consumed_before(command, step))
    said = [*found.missing, *([found.explanation] if found.explanation else [])]
    said += list(dict.fromkeys(map(_line, found.findings)))[:8]
    notes = [] if said else [f"{found.samples} samples are those of the data flags"]
    return replace(verdict, further=(*verdict.further, *said), notes=(*verdict.notes, *notes))


def _line(finding: SampleFinding) -> str:
    place = f"rank {finding.rank}, micro-batch {finding.micro_batch}, row {finding.row}"
    what = finding.said or (f"it is sample {finding.found}" if finding.found is not None else "it is no sample near it")
    return f"{place}: {finding.field} of sample {finding.expected} differ: {what}"
