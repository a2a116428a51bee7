"""Validation of the planner on published runs; writes docs/planner_validation.md.

    python -m benchmarks.planner.validate

Predictions of a source's runs are by a fit that left the source out, but for one run of each of its programs, whose
error does not count. It takes about ten minutes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from benchmarks.planner.fit import Fit, timed_runs
from benchmarks.planner.predict import parts_of, step_of
from benchmarks.planner.published import PROGRAMS, Run, published, rows
from megalite.planner.memory import memory_of_ranks

PAGE = Path(__file__).parents[2] / "docs" / "planner_validation.md"
_FAR = 0.15
_GIB = 2**30
_COVERED = 0.9
_FEW = 20
"""Runs of a program below which its interval is that of all programs."""
_MEMORY = ("Reducing Activation", "Zero Bubble")
_BUBBLES = {"1f1b": 0.243, "interleaved-1f1b": 0.106, "zb-h1": 0.159}  # 8 stages, 24 micro-batches, the 1.5B model
_LEAST_LAYOUTS = 3


@dataclass(frozen=True)
class Prediction:
    """Run with the seconds that a fit without its source predicts."""

    run: Run
    seconds: float

    @property
    def log(self) -> float:
        """Logarithm of predicted to measured seconds."""
        return math.log(self.seconds / (self.run.seconds or math.nan))

    @property
    def error(self) -> float:
        """Error as a share of the measured seconds, with its sign."""
        return math.exp(self.log) - 1


def predictions(fit: Fit) -> list[Prediction]:
    """Return the predictions of all runs but those that are kept for the number of a program."""
    by_number = {run.number: run for run in fit.runs}
    found: dict[int, float] = {}
    for source in dict.fromkeys(run.source for run in fit.runs):
        found |= fit.without(source)
    return [Prediction(by_number[number], seconds) for number, seconds in sorted(found.items())]


def mean_error(found: Iterable[Prediction]) -> float:
    """Return the mean absolute error."""
    return fmean(abs(each.error) for each in found)


def of_lineage(found: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions of Megatron-LM and of what was made from it."""
    return [each for each in found if PROGRAMS[each.run.program].lineage]


# ------------------------------------------------------------------------------------------------- intervals


def widths(found: Sequence[Prediction]) -> dict[str, float]:
    """Return the factor of each program that the measured seconds are within nine times of ten; "" for all."""
    by_program = defaultdict(list)
    for each in found:
        by_program[each.run.program].append(abs(each.log))
        by_program[""].append(abs(each.log))
    return {
        program: math.exp(_quantile(logs, _COVERED))
        for program, logs in by_program.items()
        if len(logs) >= _FEW or not program
    }


def _quantile(values: Iterable[float], share: float) -> float:
    """Return the value that this share of as many others will not exceed (split conformal prediction)."""
    ordered = sorted(values)
    return ordered[min(math.ceil((len(ordered) + 1) * share), len(ordered)) - 1]


def covered(found: Sequence[Prediction]) -> float:
    """Return the share of runs within the interval that the runs of other sources give."""
    inside = []
    for source in {each.run.source for each in found}:
        width = math.log(widths([each for each in found if each.run.source != source])[""])
        inside += [abs(each.log) <= width for each in found if each.run.source == source]
    return fmean(inside)


# ------------------------------------------------------------------------------------------------- tables


def table(header: Sequence[str], body: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in body:
        yield f"| {' | '.join(map(str, row))} |"


def by_source(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the errors of each source."""
    groups = defaultdict(list)
    for each in found:
        groups[each.run.source].append(each)
    yield from table(
        ("source", "runs", "mean error", "median", "largest"),
        (
            (
                source.replace("|", "/"),
                len(own),
                f"{mean_error(own):.1%}",
                f"{median(each.error for each in own):+.1%}",
                f"{max((each.error for each in own), key=abs):+.0%}",
            )
            for source, own in groups.items()
        ),
    )


def layout(run: Run) -> str:
    """Return the layout of a run in a few letters."""
    parallel, training = run.config.parallel, run.config.training
    chunks = run.row["vpp"].removesuffix(".0")
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
    }
    named = [f"{axis}{size}" for axis, size in sizes.items() if size > 1] + [f"VPP{chunks}"] * bool(chunks)
    return " ".join([*named, f"ZeRO{parallel.zero_stage}", f"mb{training.micro_batch_size}"])


def far_rows(found: Iterable[Prediction]) -> Iterator[str]:
    """Yield the runs whose prediction is far from the measurement."""
    yield from table(
        ("row", "program", "model", "GPUs", "layout", "sequence", "measured s", "predicted s", "error"),
        (
            (
                each.run.number + 2,
                each.run.program,
                each.run.row["model"],
                f"{each.run.world_size} x {each.run.row['gpu']}",
                layout(each.run),
                each.run.config.data.seq_length,
                f"{each.run.seconds:.3g}",
                f"{each.seconds:.3g}",
                f"{each.error:+.0%}",
            )
            for each in found
            if abs(each.error) > _FAR
        ),
    )


def choices(found: Iterable[Prediction]) -> list[tuple[Prediction, Prediction, int]]:
    """Return, for each published sweep over layouts, the layout predicted fastest, that measured fastest, and how many
    there were."""
    sweeps: dict[Hashable, list[Prediction]] = defaultdict(list)
    for each in found:
        run, config = each.run, each.run.config
        same = (run.program, run.source, run.row["gpu"], run.world_size, run.row["precision"])
        sweeps[(*same, config.model, config.data.seq_length, config.training.global_batch_size)].append(each)
    chosen = []
    for sweep in sweeps.values():
        if len({layout(each.run) for each in sweep}) >= _LEAST_LAYOUTS:
            fastest = min(sweep, key=lambda each: each.seconds)
            chosen.append((fastest, min(sweep, key=lambda each: each.run.seconds or math.inf), len(sweep)))
    return chosen


def sweeps(found: Iterable[Prediction]) -> Iterator[str]:
    """Yield the choices in published sweeps."""
    yield from table(
        ("source", "model", "layouts", "chosen", "measured best", "slower by"),
        (
            (
                each.run.source[:60].replace("|", "/"),
                each.run.row["model"],
                count,
                layout(each.run),
                layout(best.run),
                f"{(each.run.seconds or 0) / (best.run.seconds or 1) - 1:.1%}",
            )
            for each, best, count in choices(found)
        ),
    )


def bubbles() -> Iterator[str]:
    """Yield the bubbles of the zero-bubble paper's 1.5B model."""
    run = next(
        run for run in published()[0] if run.program == "zero-bubble" and run.config.training.global_batch_size == 144
    )
    body = []
    for schedule, stated in _BUBBLES.items():
        parallel = replace(run.config.parallel, pipeline_schedule=schedule)
        if schedule == "interleaved-1f1b":
            other = next(
                each
                for each in published()[0]
                if each.row["schedule"] == "interleaved" and each.program == "zero-bubble"
            )
            parallel = other.config.parallel
        found = step_of(replace(run, config=replace(run.config, parallel=parallel)), run.cluster, run.stack).simulated
        passes = found.cost.total - found.cost.data - found.cost.optimizer
        share = (found.cost.bubble + found.cost.pipeline) / passes
        body.append((schedule, f"{share:.1%}", f"{stated:.1%}", f"{100 * (share - stated):+.1f}"))
    yield from table(("schedule", "predicted", "paper", "points"), body)


def memory() -> Iterator[str]:
    """Yield the predicted memory beside the published one, on the rank that holds most."""
    body = []
    for run in published()[0]:
        if run.memory is None or not any(part in run.source for part in _MEMORY):
            continue
        step = step_of(run, run.cluster, run.stack)
        group = run.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        orders = step.orders(step.micro_batches, group)
        most = max(each.total for each in memory_of_ranks(run.config, run.world_size, parts_of(run), orders))
        name = "Korthikanti et al." if "Reducing" in run.source else "zero bubble"
        body.append(
            (
                name,
                run.row["model"],
                layout(run),
                f"{most / _GIB:.1f}",
                run.memory,
                f"{most / _GIB / run.memory - 1:+.0%}",
            )
        )
    yield from table(("source", "model", "layout", "predicted GiB", "published", "error"), body)


def unused() -> Iterator[str]:
    """Yield why rows of the table are not predicted."""
    runs, reasons = published()
    groups = defaultdict(list)
    for number, reason in reasons.items():
        groups[reason].append(number + 2)
    without_time = [run.number + 2 for run in runs if run.seconds is None]
    groups["only its memory, or FLOP/s by a convention that is not stated, is published"] += without_time
    yield from table(
        ("reason", "rows", "numbers"),
        ((reason, len(numbers), ", ".join(map(str, numbers))) for reason, numbers in groups.items()),
    )


def assumptions(runs: Iterable[Run]) -> Iterator[str]:
    """Yield what was assumed of how many rows."""
    counts: Mapping[str, list[int]] = defaultdict(list)
    for run in runs:
        for each in run.assumed:
            counts[each].append(run.number)
    yield from table(("assumed", "rows"), ((each, len(numbers)) for each, numbers in sorted(counts.items())))


def page(fit: Fit, found: Sequence[Prediction]) -> str:
    """Return the page."""
    factors = widths(found)
    far = [each for each in found if abs(each.error) > _FAR]
    slowdowns = [(each.run.seconds or 0) / (best.run.seconds or 1) - 1 for each, best, _ in choices(found)]
    lines = [
        "# Validation of the planner",
        "",
        "Written by `python -m benchmarks.planner.validate` from `benchmarks/planner/published_runs.csv`, which has",
        "the source of each row; row numbers are lines of that file. A step is predicted from the records of what",
        "megalite's own code does on the meta device, by constants of the GPU and one number of the program that ran",
        "(`megalite/planner/clusters.toml`). The runs of a source are predicted by a fit that left the source out, but",
        "for one run of each of its programs, which gives the program's number and is not counted.",
        "",
        f"Of {len(rows())} rows, {len(fit.runs)} have a step time and a configuration, and {len(found)} are predicted.",
        "",
        *table(
            ("runs", "number", "mean error of the step time", "within 15 %"),
            (
                (name, len(own), f"{mean_error(own):.1%}", f"{fmean(abs(each.error) <= _FAR for each in own):.0%}")
                for name, own in (("all", found), ("Megatron-LM and its descendants", of_lineage(found)))
            ),
        ),
        "",
        "## By source",
        "",
        *by_source(found),
        "",
        "## Intervals",
        "",
        "Nine times of ten, the measured seconds lie between the prediction divided and multiplied by this factor. By",
        f"the factor that all other sources give, {covered(found):.0%} of the runs do.",
        "",
        *table(("program", "factor"), ((name or "all", f"{factor:.2f}") for name, factor in sorted(factors.items()))),
        "",
        "## Choice of a layout",
        "",
        f"In published sweeps over at least {_LEAST_LAYOUTS} layouts of one model, the layout that is predicted to be",
        f"the fastest is on average {fmean(slowdowns):.1%} slower than the one that was measured to be, at most",
        f"{max(slowdowns):.1%}.",
        "",
        *sweeps(found),
        "",
        "## Bubbles",
        "",
        "Eight stages of the zero-bubble paper's 1.5B model with 24 micro-batches: what is idle or waits for messages,",
        "as a share of the passes. The paper's values are at second hand.",
        "",
        *bubbles(),
        "",
        "## Memory",
        "",
        "The rank that holds most, without what the driver takes.",
        "",
        *memory(),
        "",
        "## Runs that are more than 15 % off",
        "",
        f"{len(far)} of {len(found)}.",
        "",
        *far_rows(found),
        "",
        "## What was assumed",
        "",
        *assumptions(fit.runs),
        "",
        "## Rows that are not predicted",
        "",
        *unused(),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Predict all runs and write the page."""
    fit = Fit(timed_runs())
    found = predictions(fit)
    PAGE.write_text(page(fit, found))
    print(f"{mean_error(found):.1%} over all, {mean_error(of_lineage(found)):.1%} of Megatron's lineage: {PAGE}")


if __name__ == "__main__":
    main()
