"""Validation of the planner on published runs; writes planner_validation.md beside it and the planner's intervals.toml.

    python -m benchmarks.planner.validate

Predictions of a source's runs are by a fit that left the source out, but for one run of each of its programs, whose
error does not count. It takes two minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.planner.errors import Prediction, by_model, mean_error, of_lineage, predictions
from benchmarks.planner.fit import Fit, timed_runs
from benchmarks.planner.intervals import FEW, Width, as_toml, centre, classes, unknown_covered
from benchmarks.planner.published import rows
from benchmarks.planner.tables import (
    FAR,
    LEAST_LAYOUTS,
    assumptions,
    bubbles,
    by_source,
    choices,
    far_rows,
    memory,
    sweeps,
    table,
    unused,
)
from megalite.extras.planner.intervals import FILE

PAGE = Path(__file__).with_name("planner_validation.md")
DENSE_GOAL, EXPERTS_GOAL = 0.07, 0.15
"""Mean errors to reach."""


def page(fit: Fit, found: Sequence[Prediction]) -> str:
    """Return the page."""
    far = [each for each in found if abs(each.error) > FAR]
    slowdowns = [(each.run.seconds or 0) / (best.run.seconds or 1) - 1 for each, best, _ in choices(found)]
    groups = [("all", found), ("Megatron-LM and its descendants", of_lineage(found)), *by_model(found)]
    lines = [
        "# Validation of the planner",
        "",
        "Written by `python -m benchmarks.planner.validate` from `benchmarks/planner/published_runs.csv`, which has",
        "the source of each row; row numbers are lines of that file. A step is predicted from the records of what",
        "megalite's own code does on the meta device, by constants of the GPU and one number of the program that ran",
        "(`megalite/extras/planner/clusters.toml`). The runs of a source are predicted by a fit that left the source",
        "out, but for one run of each of its programs, which gives the program's number and is not counted.",
        "",
        f"Of {len(rows())} rows, {len(fit.runs)} have a step time and a configuration, and {len(found)} are predicted.",
        "",
        *table(
            ("runs", "number", "mean error of the step time", "within 15 %"),
            (
                (name, len(own), f"{mean_error(own):.1%}", f"{fmean(abs(each.error) <= FAR for each in own):.0%}")
                for name, own in groups
            ),
        ),
        "",
        "## What is missed",
        "",
        *_missed(found),
        "",
        "## By source",
        "",
        *by_source(found),
        "",
        "## Intervals",
        "",
        *_intervals(found),
        "",
        "## Choice of a layout",
        "",
        f"In published sweeps over at least {LEAST_LAYOUTS} layouts of one model, the layout that is predicted to be",
        f"the fastest is on average {fmean(slowdowns):.1%} slower than the one that was measured to be, at most",
        f"{max(slowdowns):.1%}.",
        "",
        *sweeps(found),
        "",
        "## Bubbles",
        "",
        "Eight stages of three layers each of the zero-bubble paper's 1.5B model, with 24 micro-batches: the share of",
        "the step in which the busiest rank waits, by the schedules that megalite runs, once with the times of passes",
        "and messages that the paper has measured, and once with those that the planner predicts. The paper's values",
        "are at second hand.",
        "",
        *bubbles(),
        "",
        "## Memory",
        "",
        "The rank that holds most, without what the driver takes. Of attention without fusion, the scores are added",
        "that it keeps: five bytes each.",
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


def _missed(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield what the goals are, how far the dense runs are from theirs, and what no row lets a fit find."""
    dense = dict(by_model(found))["dense"]
    of_source = {each.run.source: [other for other in dense if other.run.source == each.run.source] for each in dense}
    worst = sorted(of_source, key=lambda source: mean_error(of_source[source]))[-3:]
    rest = [each for each in dense if each.run.source not in worst]
    yield f"The goal is a mean error of {DENSE_GOAL:.0%} for dense runs, which have {mean_error(dense):.1%}, and of"
    yield f"{EXPERTS_GOAL:.0%} for runs with experts. Without the three sources with the largest errors, which have"
    yield f"{len(dense) - len(rest)} of the {len(dense)} dense runs, it is {mean_error(rest):.1%}. From a source that"
    yield "is left out, a fit learns one number for each program: where machine or program differ in anything else, the"
    yield "error stays."
    yield ""
    ours = [each for each in dense if each.run.program == "megatron-deepspeed-2023"]
    one = [each for each in ours if each.run.config.training.micro_batch_size == 1]
    more = [each for each in ours if each not in one]
    yield f"- No term is a cost of each micro-batch: Megatron-DeepSpeed's runs with one sample in it are {_signed(one)}"
    yield f"  off in the median, those with more {_signed(more)}."
    yield "- Exchange of experts' tokens is priced as exposed, though DeepEP and HybridEP hide part of it: no rows"
    yield "  differ in that alone, so the factor of the program has it."
    yield "- NVFP4 has the datasheet's peak: no published row of it has the sizes of its layers. FP8 has one speed,"
    yield "  scaled by tensors, rows or blocks: rows name recipes, but none differ in the recipe alone."


def _signed(found: Sequence[Prediction]) -> str:
    return f"{median(each.error for each in found):+.1%}"


def _intervals(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the intervals of the classes, and the shares of runs that they hold."""
    own = classes(found)
    middle = f"{math.exp(centre()):.2f}"
    yield "Nine times of ten, the measured seconds lie between the prediction divided and multiplied by the factor of"
    yield "the class of the run: the one that nine of ten of its runs are within, raised to a power, the smallest with"
    yield "which the factor of the other sources holds nine of ten runs in all (`hold`). For a program of which no run"
    yield f"is measured, such as megalite, the middle is the prediction times {middle}, the middle of the programs'"
    yield "factors. Its interval has their spread, too, and a power that holds the runs of other programs. The powers"
    yield "are chosen by these runs: of those of the next source, fewer may be held."
    yield ""
    yield f"A class with fewer than {FEW} runs, one that is missing, and a GPU generation of which the class has no run"
    yield "have the widest factor of all. By `unknown`, the widest one of the other classes holds the class's runs."
    yield ""
    yield from table(
        ("class", "GPUs", "runs", "sources", "factor", "hold", "unmeasured program", "hold", "unknown"),
        (
            (
                name,
                ", ".join(each.generations),
                each.runs,
                each.sources,
                *_shown(each.measured),
                *_shown(each.unmeasured),
                f"{unknown_covered(own, name, found):.0%}",
            )
            for name, each in own.items()
        ),
    )


def _shown(width: Width | None) -> tuple[str, str]:
    return ("", "") if width is None else (f"{width.factor:.2f}", f"{width.covered:.1%}")


def main() -> None:
    """Predict all runs and write the page, and the intervals for the planner."""
    fit = Fit(timed_runs())
    found = predictions(fit)
    PAGE.write_text(page(fit, found))
    FILE.write_text("\n".join(as_toml(classes(found))) + "\n")
    print(f"{mean_error(found):.1%} over all, {mean_error(of_lineage(found)):.1%} of Megatron's lineage: {PAGE}")
    for name, own in by_model(found):
        print(f"{mean_error(own):.1%} of {len(own)} {name}")


if __name__ == "__main__":
    main()
