"""Intervals of predicted seconds, by what published runs tell about runs of the same class (intervals.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megalite.config import RunConfig
from megalite.extras.planner.cluster import Cluster, Stack

FILE = Path(__file__).with_name("intervals.toml")
HALF = "16 bits"


def rounded_dtype(config: RunConfig) -> str | None:
    """Return the dtype to which a run rounds the operands of its products, as records name it, or None."""
    recipe = config.low_precision.recipe
    return recipe and ("float4" if recipe == "nvfp4" else "float8")


@dataclass(frozen=True)
class Class:
    """Class of runs whose errors are alike.

    Attributes:
        model: "dense" or "experts".
        precision: what the products of layers are computed in.
    """

    model: str
    precision: str

    @classmethod
    def of(cls, config: RunConfig, stack: Stack) -> Class:
        """Return the class of a run that a program trains."""
        dtype = config.training.dtype
        whole = HALF if dtype in ("bfloat16", "float16") else dtype
        precision = stack.low_precision or rounded_dtype(config) or whole
        return cls("experts" if config.model.num_experts else "dense", precision)

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}"


@dataclass(frozen=True)
class Measured:
    """Facts about the runs of a class.

    Attributes:
        generations: GPU generations that have such runs.
        within: nine times of ten, measured seconds are between the prediction divided and multiplied by this.
        unmeasured: the same for a program of which no run is measured, whose interval has its middle elsewhere.
    """

    generations: tuple[str, ...]
    within: float
    unmeasured: float


@dataclass(frozen=True)
class Interval:
    """Seconds between which a measured step lies nine times of ten.

    Attributes:
        unknown: the class and the GPU of the run, as words, if nothing is known of such runs; the interval is then
            the widest of all classes.
    """

    least: float
    most: float
    unknown: str | None = None


def interval(seconds: float, config: RunConfig, cluster: Cluster, stack: Stack) -> Interval:
    centre, classes = _known()
    own, generation = Class.of(config, stack), cluster.gpu.generation
    found, unknown = classes.get(own), None
    if found is None or generation not in found.generations:
        unknown = f"{own}, on {generation or cluster.gpu.name}"
        widest = (max(each.within for each in classes.values()), max(each.unmeasured for each in classes.values()))
        found = Measured((), *widest)
    if stack.measured:
        return Interval(seconds / found.within, seconds * found.within, unknown)
    return Interval(seconds * centre / found.unmeasured, seconds * centre * found.unmeasured, unknown)


@cache
def _known() -> tuple[float, dict[Class, Measured]]:
    table = tomllib.loads(FILE.read_text())
    return table["centre"], {
        Class(each["model"], each["precision"]): Measured(
            tuple(each["generations"]), each["within"], each["unmeasured"]
        )
        for each in table["class"]
    }
