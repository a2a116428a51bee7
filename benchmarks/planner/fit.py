"""Fit of the constants in clusters.toml to published runs.

    python -m benchmarks.planner.fit [--write]

Fitted are a few constants of each kind of GPU and one number of each program, by the logarithms of predicted to
measured seconds, with a loss that outliers do not dominate. Each constant has a prior, as wide as such constants are
known without these runs, so that one that few runs depend on stays near it. The runs of a source count as the root of
their number. Leaving a source out (`without`) starts from the fit of all and follows its derivatives.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.planner.predict import step_of
from benchmarks.planner.published import Run, published
from megalite.extras.planner import cluster as cluster_module
from megalite.extras.planner.cluster import Cluster, find_cluster, find_stack

Array = NDArray[np.float64]
_STACK_WIDTH = 0.25
_STEP = 0.02
_SCALE = 0.08
"""Residual from which on the loss grows linearly, as a logarithm."""
_TOML = Path(cluster_module.__file__).with_name("clusters.toml")


@dataclass(frozen=True)
class Constant:
    """Constant of some GPUs, which the fit multiplies by a number.

    Attributes:
        name: field of `Gpu`, or kernel of attention as "attention.KERNEL".
        prior: what is known of the first GPU's constant without these runs.
        width: standard deviation of its logarithm, that is, how well it is known.
        per: another GPU; then the prior is of the first GPU's constant as a multiple of that of this one.
    """

    gpus: tuple[str, ...]
    name: str
    prior: float
    width: float
    per: str | None = None

    def on(self, cluster: Cluster, factor: float) -> Cluster:
        """Return a cluster with the constant times `factor`, if its GPU is one of these."""
        if cluster.gpu.name not in self.gpus:
            return cluster
        field, _, kernel = self.name.partition(".")
        gpu, value = cluster.gpu, getattr(cluster.gpu, field)
        changed = dict(value) | {kernel: value[kernel] * factor} if kernel else value * factor
        return replace(cluster, gpu=replace(gpu, **{field: changed}))

    @property
    def expected(self) -> float:
        """Logarithm of the number that would give the constant its prior."""
        present = self._present(self.gpus[0]) / (self._present(self.per) if self.per else 1.0)
        return math.log(self.prior / present)

    def _present(self, gpu: str) -> float:
        field, _, kernel = self.name.partition(".")
        value = getattr(find_cluster(gpu).gpu, field)
        return float(value[kernel] if kernel else value)


def _constants(gpus: tuple[str, ...], **priors: tuple[float, float]) -> list[Constant]:
    return [Constant(gpus, name.replace("__", ".").replace("_", "-"), *prior) for name, prior in priors.items()]


CONSTANTS = (
    *_constants(
        ("A100-SXM-80GB", "A100-SXM-40GB"),
        efficiency=(0.8, 0.1),
        half=(100, 0.5),
        attention__flash_2=(0.6, 0.2),
        attention__triton=(0.36, 0.3),
        share=(0.8, 0.15),
        launch=(50e-6, 0.3),
    ),
    *_constants(
        ("H100-SXM", "H100-96GB"),
        efficiency=(0.75, 0.1),
        half=(150, 0.5),
        attention__flash_2=(0.36, 0.1),
        attention__cudnn=(0.55, 0.2),
        attention__triton=(0.2, 0.3),
        share=(0.8, 0.15),
        launch=(35e-6, 0.3),
    ),
    Constant(("H100-96GB",), "efficiency", 0.87, 0.15, per="H100-SXM"),  # less power
    *_constants(
        ("GB200", "B200", "GB300", "B300"),
        efficiency=(0.75, 0.1),
        half=(200, 0.3),
        attention__cudnn=(0.5, 0.2),
        share=(0.75, 0.15),
        launch=(30e-6, 0.3),
    ),
    Constant(("GB300", "B300"), "efficiency", 1.0, 0.15, per="GB200"),
    Constant(("GB300", "B300"), "share", 1.0, 0.15, per="GB200"),
    Constant(("B200", "B300"), "efficiency", 1.0, 0.1, per="GB200"),
)


class Fit:
    """Fit to runs. `logs` are the logarithms of the numbers: first of the constants, then of the programs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.programs = sorted({run.program for run in runs})
        self.widths = np.array([each.width for each in CONSTANTS] + [_STACK_WIDTH] * len(self.programs))
        self.program = np.array([len(CONSTANTS) + self.programs.index(run.program) for run in runs])
        self.measured = np.log([run.seconds for run in runs])
        of_source = Counter(run.source for run in runs)
        self.weights = np.array([of_source[run.source] ** -0.25 for run in runs])
        numbers = [math.log(find_stack(program).factor) for program in self.programs]
        self.expected = np.array([each.expected for each in CONSTANTS] + [-number for number in numbers])
        self.logs = np.zeros(len(self.widths))
        self.predicted, self.slopes = self._at(self.logs)

    def improve(self, rounds: int) -> None:
        """Solve the fit by so many linear ones."""
        for _ in range(rounds):
            self.logs = self.solved(np.ones(len(self.runs)))
            self.predicted, self.slopes = self._at(self.logs)

    def solved(self, kept: Array) -> Array:
        """Return the best logarithms by the present derivatives. `kept`: weight of each run."""
        weights = self.weights * kept

        def residuals(logs: Array) -> Array:
            linear = self.predicted - self.measured + self.slopes @ (logs - self.logs)
            return np.concatenate((_soft(linear / _SCALE) * weights, (logs - self.expected) / self.widths))

        least, most = self.expected - 3 * self.widths, self.expected + 3 * self.widths
        return least_squares(residuals, np.clip(self.logs, least + 1e-9, most - 1e-9), bounds=(least, most)).x

    def seconds(self, run: Run, logs: Array) -> float:
        """Return the predicted seconds of a run."""
        cluster = run.cluster
        for constant, log in zip(CONSTANTS, logs, strict=False):
            cluster = constant.on(cluster, math.exp(log))
        factor = math.exp(logs[len(CONSTANTS) + self.programs.index(run.program)])
        stack = run.stack
        return step_of(run, cluster, replace(stack, factor=stack.factor * factor)).simulated.seconds

    def _at(self, logs: Array) -> tuple[Array, Array]:
        """Return the logarithms of the predictions and their derivatives."""
        predicted = np.array([math.log(self.seconds(run, logs)) for run in self.runs])
        slopes = np.zeros((len(self.runs), len(logs)))
        slopes[np.arange(len(self.runs)), self.program] = 1.0
        for column, constant in enumerate(CONSTANTS):
            moved = logs.copy()
            moved[column] += _STEP
            for row, run in enumerate(self.runs):
                if run.cluster.gpu.name in constant.gpus:
                    slopes[row, column] = (math.log(self.seconds(run, moved)) - predicted[row]) / _STEP
        return predicted, slopes

    def without(self, source: str) -> dict[int, tuple[float, float]]:
        """Return predictions of the runs of a source, fitted to the others and one run of each of its programs, each
        with the factor of its program in that fit."""
        own = [index for index, run in enumerate(self.runs) if run.source == source]
        kept = np.ones(len(self.runs))
        kept[own] = 0.0
        for program in {self.runs[index].program for index in own}:
            kept[self._kept([index for index in own if self.runs[index].program == program])] = 1.0
        logs = self.solved(kept)
        found = [(self.runs[index], float(logs[self.program[index]])) for index in own if not kept[index]]
        return {run.number: (self.seconds(run, logs), run.stack.factor * math.exp(log)) for run, log in found}

    def _kept(self, rows: Sequence[int]) -> int:
        """Return the run of the middle size, by predicted seconds of a sample."""
        sizes = {
            row: self.predicted[row] - math.log(self.runs[row].config.training.global_batch_size or 1) for row in rows
        }
        return sorted(rows, key=lambda row: sizes[row])[len(rows) // 2]


def _soft(residuals: Array) -> Array:
    """Return residuals whose square is the pseudo-Huber loss."""
    return np.sign(residuals) * np.sqrt(2 * (np.sqrt(1 + residuals**2) - 1))


def timed_runs() -> list[Run]:
    """Return the runs whose seconds are published."""
    return [run for run in published()[0] if run.seconds is not None]


def write(fit: Fit) -> None:
    """Multiply the constants in clusters.toml by what was fitted."""
    sections = re.split(r"(?m)^(?=\[)", _TOML.read_text())
    factors: Mapping[str, float] = dict(zip(fit.programs, np.exp(fit.logs[len(CONSTANTS) :]), strict=True))
    written = []
    for section in sections:
        kind, _, name = section.partition("]")[0].removeprefix("[").partition(".")
        if kind == "gpu":
            for constant, log in zip(CONSTANTS, fit.logs, strict=False):
                if name in constant.gpus:
                    section = _scaled(section, constant.name, math.exp(log))
        if kind == "stack" and name in factors:
            section = _with_factor(section, factors[name])
        written.append(section)
    _TOML.write_text("".join(written))


def _scaled(section: str, name: str, factor: float) -> str:
    field, _, kernel = name.partition(".")
    pattern = rf"(?m)^({field} = .*?{kernel} = )([0-9.e-]+)" if kernel else rf"(?m)^({field} = )([0-9.e-]+)"
    return re.sub(pattern, lambda found: f"{found[1]}{float(found[2]) * factor:.3g}", section)


def _with_factor(section: str, factor: float) -> str:
    found = re.search(r"(?m)^factor = (.*)\n", section)
    if found:
        return section.replace(found[0], f"factor = {float(found[1]) * factor:.3f}\n")
    head, _, rest = section.partition("\n")
    return f"{head}\nfactor = {factor:.3f}\n{rest}"


def main() -> None:
    """Fit, show the numbers, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="change clusters.toml")
    options = parser.parse_args()
    fit = Fit(timed_runs())
    fit.improve(options.rounds)
    for constant, log in zip(CONSTANTS, fit.logs, strict=False):
        print(f"{constant.gpus[0]:14} {constant.name:20} x {math.exp(log):.3f}")
    errors = np.abs(np.exp(fit.predicted - fit.measured) - 1)
    for program, log in zip(fit.programs, fit.logs[len(CONSTANTS) :], strict=True):
        own = errors[[run.program == program for run in fit.runs]]
        number = f"{program:28} x {math.exp(log):.3f}"
        print(f"{number}  {len(own):4} runs, mean error {own.mean():6.1%}, most {own.max():6.1%}")
    if options.write:
        write(fit)


if __name__ == "__main__":
    main()
