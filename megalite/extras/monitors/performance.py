"""Shares of a step that sections, waits and communication take, from the figures of its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megalite.extras.monitors.planned import Planned
from megalite.process.output import in_words
from megalite.run.monitor import Observation
from megalite.run.timing import key_of
from megalite.training.metrics import StepMetrics
from megalite.watchdog.sections import OF_A_STEP, WAITING

_LEAST = 0.05
"""Share of a step that is worth a word."""


class PerformanceMonitor:
    """Monitor that says in words where the time of a step goes. It measures nothing: records have the figures."""

    def __init__(self, planned: Planned | None = None) -> None:
        """Begin. `planned`: the step as it was predicted, if it was."""
        self._planned = planned

    def after_step(self, metrics: StepMetrics) -> Observation:
        """Return the lines of a step whose record has the times of sections."""
        return Observation(lines=list(performance_lines(metrics.extra, self._planned)))


def performance_lines(figures: Mapping[str, float], planned: Planned | None = None) -> Iterator[str]:
    """Yield lines for the screen: the shares of a step, the bytes that rank 0 sends, what costs the most, the plan."""
    sections = {name: figures.get(key_of(name), 0.0) for name in OF_A_STEP}
    if not (step := sum(sections.values())):
        return
    several = any(key.startswith("wait_s/") for key in figures)
    shares = [f"{name} {seconds / step:.0%}" for name, seconds in sections.items() if several or name != WAITING]
    waits = {axis: figures[f"wait_s/{axis}"] / step for axis in _axes(figures, "wait_s")}
    longest = {axis: figures[f"wait_s/{axis}/max"] / step for axis in waits}
    by_axis = [
        f"{axis} {share:.0%} (rank {figures[f'wait_s/{axis}/max_rank']:.0f}: {longest[axis]:.0%})"
        for axis, share in waits.items()
    ]
    yield f"share of a step: {', '.join(shares)}{': ' * bool(by_axis)}{', '.join(by_axis)}"
    sent = {axis: figures[f"bytes_sent/{axis}"] for axis in _axes(figures, "bytes_sent")}
    if any(sent.values()):
        yield f"sent in the step: {', '.join(f'{axis} {in_words(size)}' for axis, size in sent.items())}"
    yield from _finding(figures, sections, step, waits)
    if planned is not None:
        found = {name: seconds / step for name, seconds in sections.items()} | waits
        beside = [
            f"{name} {found.get(name, 0.0):.0%} (planned {share:.0%})"
            for name, share in planned.shares.items()
            if share or name in found
        ]
        ratio = step / planned.seconds
        yield f"a step takes {1000 * step:,.1f} ms, {ratio:.2f} times its plan: {', '.join(beside)}"


def _finding(
    figures: Mapping[str, float], sections: Mapping[str, float], step: float, waits: Mapping[str, float]
) -> Iterator[str]:
    """Yield a line about the largest cost beside computation, if there is one worth a word."""
    data, optimizer = OF_A_STEP[0], OF_A_STEP[2]
    costs = {"reading data": sections[data] / step, "the optimizer": sections[optimizer] / step}
    if (communication := figures.get("communication_share")) is not None:
        most = max(waits, key=waits.__getitem__)
        costs[f"communication that nothing hides, most of it along {most}"] = communication
        slowest, work = figures[key_of("slowest_rank")], figures[key_of("slowest_rank_work")]
        unequal = 1.0 - figures["scaling_efficiency"] - communication
        costs[f"unequal work: rank {slowest:.0f} works {work / step:.0%} of a step, and others wait for it"] = unequal
    cost, share = max(costs.items(), key=lambda each: each[1])
    if share >= _LEAST:
        yield f"beside computation, {share:.0%} of a step is {cost}"


def _axes(figures: Mapping[str, float], kind: str) -> list[str]:
    return [axis for key in figures for name, _, axis in [key.partition("/")] if name == kind and "/" not in axis]
