"""Measure how a training scales over ranks of this machine, beside what the planner expects.

    python tools/scaling.py --ranks 1 2 4 -- pretrain_gpt.py --config small.yaml --global-batch-size 16 --train-iters 12

Behind -- stand a program and its flags: pretrain_gpt.py, or any that takes --global-batch-size and --metrics-path and
writes metrics.jsonl there. torchrun starts it on each number of ranks: with the same global batch (strong scaling), and
with one that grows with the ranks (weak scaling). Prints speed-up, efficiency and the ratio of communication to
computation, and writes them as JSON and as a picture. Ranks share the machine: give each its own cores or GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from megalite.atomic_files import require_output, write_atomically
from megalite.config.fields import NonNegativeInt, PositiveInt
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.comparison.runs import is_own, run_on, without_python
from megalite.lifecycle.failure import run_tool
from megalite.process.host import cores
from megalite.process.output import say

if TYPE_CHECKING:
    from megalite.config import RunConfig
    from megalite.extras.comparison.scaling import Point, Run

Kind = Literal["strong", "weak"]
BATCH = "--global-batch-size"


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    ranks: tuple[PositiveInt, ...] = (1, 2, 4)
    """Numbers of ranks, from few to many; all others are compared with the first."""
    scaling: tuple[Kind, ...] = ("strong", "weak")
    """Strong: the global batch stays. Weak: it grows with the ranks, from that of the command."""
    warmup: NonNegativeInt = 2
    """First steps of each run, which do not count."""
    output: str = "scaling"
    """Beginning of the names of the files: OUTPUT.json and OUTPUT.svg."""


def main() -> None:
    """Run the command on each number of ranks, and report."""
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "", argv=argv[:at])
    program = argv[at + 1 :]
    batch = check(arguments, program)
    for suffix in ("json", "svg"):
        require_output("--output", f"{arguments.output}.{suffix}")
    from megalite.extras.comparison.scaling import Run, compare, table
    from megalite.extras.comparison.scaling_chart import chart

    runs: dict[tuple[int, int], Run] = {}
    found: dict[str, list[Point]] = {}
    for kind in arguments.scaling:
        sizes = [(ranks, batch * ranks // arguments.ranks[0] if kind == "weak" else batch) for ranks in arguments.ranks]
        for ranks, size in sizes:
            if (ranks, size) not in runs:
                say(f"{ranks} ranks, global batch {size} ...", to_error=True)
                runs[ranks, size] = Run(ranks, size, seconds_of(program, ranks, size, arguments.warmup))
        series = [runs[each] for each in sizes]
        found[kind] = compare(series, predictions(program, series))
        say(f"{kind} scaling", *table(found[kind]), sep="\n")
    figures = {kind: [asdict(point) for point in points] for kind, points in found.items()}
    output = {"command": program, "cores": cores(), "scaling": figures}
    write_atomically(Path(f"{arguments.output}.json"), (json.dumps(output, indent=1) + "\n").encode())
    write_atomically(Path(f"{arguments.output}.svg"), chart(found).encode())
    say(f"written to {arguments.output}.json and {arguments.output}.svg")


def check(arguments: Arguments, program: Sequence[str]) -> int:
    """Return the global batch size. Raises ConfigurationError for flags that cannot be measured."""
    if not program:
        raise ConfigurationError("give a program and its flags behind --, such as -- pretrain_gpt.py --config FILE")
    if not arguments.ranks or list(arguments.ranks) != sorted(set(arguments.ranks)):
        raise ConfigurationError(
            f"--ranks {' '.join(map(str, arguments.ranks))}: give them from few to many, each once"
        )
    for flag in ("--save", "--metrics-path"):
        if any(each.split("=")[0] == flag for each in program):
            raise ConfigurationError(f"{flag} behind --: leave it out, each run has a place of its own")
    text = value_of(program, BATCH)
    if text is None or not text.isdigit() or not int(text):
        raise ConfigurationError(f"{BATCH} behind -- must be given, 1 or more: it is the batch of the first run")
    batch = int(text)
    if "weak" in arguments.scaling and (uneven := [each for each in arguments.ranks if each % arguments.ranks[0]]):
        raise ConfigurationError(
            f"--ranks {uneven[0]} is no multiple of {arguments.ranks[0]}, so weak scaling has no batch"
        )
    if is_own(program):
        from megalite.config.validate import resolve

        for ranks in arguments.ranks:
            resolve(configuration(program, batch), ranks)
    elif uneven := [each for each in arguments.ranks if batch % each]:
        raise ConfigurationError(f"{BATCH} {batch} behind -- is not divisible by --ranks {uneven[0]}")
    return batch


def value_of(program: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag."""
    found = None
    for at, word in enumerate(program):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag and at + 1 < len(program):
            found = program[at + 1]
    return found


def with_batch(program: Sequence[str], batch: int) -> list[str]:
    """Return the command with another global batch size."""
    words: list[str] = []
    skip = False
    for word in program:
        if not (skip or word == BATCH or word.startswith(f"{BATCH}=")):
            words.append(word)
        skip = word == BATCH
    return [*words, BATCH, str(batch)]


def configuration(program: Sequence[str], batch: int) -> RunConfig:
    """Return the configuration of a run of pretrain_gpt.py."""
    from megalite.config.parse import parse_arguments
    from megalite.training.resume import saved_fields

    return parse_arguments(with_batch(without_python(program)[1:], batch), saved_fields).config


def seconds_of(program: Sequence[str], ranks: int, batch: int, warmup: int) -> float:
    """Return the median time of a step. Raises MegaliteError with the message and the exit code of a run that fails."""
    with TemporaryDirectory(prefix="megalite-scaling-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        run_on(ranks, with_batch(without_python(program), batch), metrics)
        return median_of(metrics, warmup)


def median_of(metrics: Path, warmup: int) -> float:
    """Return the median time of the steps after the first ones. Raises MegaliteError if there are none."""
    try:
        records: list[Mapping[str, object]] = [json.loads(line) for line in metrics.read_text().splitlines()]
        times = [float(str(record["iteration_time_s"])) for record in records if "iteration_time_s" in record]
    except (OSError, ValueError) as error:
        raise MegaliteError(f"the program wrote no metrics that can be read to --metrics-path: {error}") from None
    if len(times) <= warmup:
        raise MegaliteError(f"the run had {len(times)} steps, of which --warmup {warmup} do not count: give it more")
    return statistics.median(times[warmup:])


def predictions(program: Sequence[str], series: Sequence[Run]) -> list[float | None]:
    """Return the seconds that the planner expects of each run, after the first; None where it cannot tell."""
    from megalite.extras.comparison.scaling import calibrated, predict
    from megalite.parallel.device import local_device

    if not is_own(program) or local_device(0).type != "cpu":
        return [None] * len(series)
    cluster = calibrated(configuration(program, series[0].batch), series[0])
    return [predict(configuration(program, run.batch), run.ranks, cluster) for run in series]


command = partial(run_tool, main)
"""Measure how a training scales over ranks of this machine, beside what the planner expects."""
