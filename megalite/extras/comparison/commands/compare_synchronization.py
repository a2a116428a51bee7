"""Train one small model under each method of synchronization, and compare what they cost.

    python tools/compare_synchronization.py --methods int8 diloco-10 --steps 200
    python tools/compare_synchronization.py --ranks 4 -- pretrain_gpt.py --config small.yaml --global-batch-size 16

Behind -- stand flags of pretrain_gpt.py, or a program that takes them and --metrics-path. Without them a small Llama
learns the data of `make train` if it is there, or else mock data. torchrun starts each method on the same ranks of this
machine. Prints the loss of each method, its bytes, and the time that a step would take over a link of the given speed;
writes them as JSON, each step as CSV, and a picture. A method that fails is listed with its error.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megalite.atomic_files import require_output, write_atomically
from megalite.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt
from megalite.config.synchronization import SynchronizationConfig
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.comparison.runs import is_own, run_on, without_python
from megalite.extras.comparison.synchronization_methods import METHODS, PLAIN, Method
from megalite.lifecycle.failure import run_tool
from megalite.process.host import cores
from megalite.process.output import say
from megalite.process.programs import pretrain

if TYPE_CHECKING:
    from megalite.extras.comparison.synchronization import Curve, Outcome

SMALL_MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0
--attention-dropout 0 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 8 --lr 4e-3
--lr-decay-style cosine --lr-warmup-fraction 0.05 --eval-iters 0"""
CORPUS = "run/corpus_text_document"
CORPUS_FLAGS = f"--data-path {CORPUS} --tokenizer-type SentencePieceTokenizer --tokenizer-model run/tokenizer.model"
MOCK_FLAGS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
LEFT_OUT = ("--save", "--metrics-path", "--train-iters")
SKIPPED_STEPS = 2
"""First steps, whose time does not count."""


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Methods that are compared with plain data parallelism."""
    ranks: PositiveInt = 2
    """Ranks that train. A parameter server has one more."""
    steps: PositiveInt = 200
    """Steps of each training."""
    alpha: NonNegativeFloat = 0.01
    """Seconds that the link adds to each step that sends anything."""
    beta: PositiveFloat = 1.6e-7
    """Seconds per byte on the link; by default those of 50 Mbit/s."""
    sgd_lr: PositiveFloat = 0.3
    """Learning rate of the methods that need --optimizer sgd."""
    output: str = "synchronization"
    """Folder for comparison.json, comparison.csv and comparison.svg."""


def main() -> None:
    """Train under each method, and report."""
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "", argv=argv[:at])
    program = argv[at + 1 :] or [*SMALL_MODEL.split(), *default_data()]
    methods = check(arguments, program)
    from megalite.extras.comparison.synchronization import Link, compare, rows, table
    from megalite.extras.comparison.synchronization_chart import chart

    curves: dict[str, Curve] = {}
    failed: dict[str, str] = {}
    for name, method in methods.items():
        say(f"{name} ...", to_error=True)
        try:
            curves[name] = train(method, arguments, program)
        except MegaliteError as error:
            if name == PLAIN:
                raise
            failed[name] = str(error)
    link = Link(arguments.alpha, arguments.beta)
    outcomes = compare(curves, PLAIN, link)
    say(*table(outcomes), sep="\n")
    for name, reason in failed.items():
        say(f"{name} failed: {reason}")
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    output = {"arguments": asdict(arguments), "command": program, "cores": cores()}
    output |= {"methods": [figures(each) for each in outcomes], "failed": failed}
    lines = io.StringIO()
    csv.writer(lines).writerows([("method", "step", "loss", "bytes", "seconds"), *rows(curves, link)])
    write_atomically(folder / "comparison.json", (json.dumps(output, indent=1) + "\n").encode())
    write_atomically(folder / "comparison.csv", lines.getvalue().encode())
    write_atomically(folder / "comparison.svg", chart(curves, link).encode())
    say(f"written to {folder}/comparison.json, .csv and .svg")


def figures(outcome: Outcome) -> dict[str, object]:
    """Return the figures as JSON has them, which has no infinity."""
    own = asdict(outcome)
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in own.items()
    }


def default_data() -> list[str]:
    """Return the flags of the data of `make train`, or of mock data."""
    return (CORPUS_FLAGS if Path(f"{CORPUS}.idx").exists() else MOCK_FLAGS).split()


def check(arguments: Arguments, program: Sequence[str]) -> dict[str, Method]:
    """Return the methods, plain data parallelism first. Raises ConfigurationError for what cannot be compared."""
    if unknown := [each for each in arguments.methods if each not in METHODS]:
        raise ConfigurationError(f"--methods {unknown[0]}: choose from {', '.join(METHODS)}")
    if arguments.ranks == 1:
        raise ConfigurationError("--ranks 1 has nothing to synchronize: give 2 or more")
    require_output("--output", Path(arguments.output) / "comparison.json")
    for flag in LEFT_OUT:
        if any(each.split("=")[0] == flag for each in program):
            instead = "give --steps instead" if flag == "--train-iters" else "each run has a place of its own"
            raise ConfigurationError(f"{flag} behind --: leave it out, {instead}")
    if (flags := own_flags(program)) is not None:
        of_plain = [*flags, "--train-iters", str(arguments.steps)]
        if resolved(of_plain, arguments.ranks) != SynchronizationConfig():
            raise ConfigurationError("flags of synchronization behind --: leave them out, each method has its own")
    return {name: METHODS[name] for name in dict.fromkeys((PLAIN, *arguments.methods))}


def own_flags(program: Sequence[str]) -> list[str] | None:
    """Return the flags if the program is pretrain_gpt.py, or if there are only flags."""
    if program[0].startswith("-"):
        return list(program)
    return without_python(program)[1:] if is_own(program) else None


def resolved(flags: Sequence[str], ranks: int) -> SynchronizationConfig:
    """Return what a run of pretrain_gpt.py synchronizes by. Raises ConfigurationError if it cannot run on the ranks."""
    from megalite.config.parse import parse_arguments
    from megalite.config.validate import resolve
    from megalite.training.resume import saved_fields

    return resolve(parse_arguments(flags, saved_fields).config, ranks).synchronization


def train(method: Method, arguments: Arguments, program: Sequence[str]) -> Curve:
    """Train under a method. Raises MegaliteError if that fails."""
    words = [*program, *method.words(arguments.steps, arguments.sgd_lr), "--train-iters", str(arguments.steps)]
    ranks = arguments.ranks + method.servers
    if (flags := own_flags(words)) is not None:
        resolved(flags, ranks)
        words += ["--timing-interval", str(max(1, arguments.steps // 20))]
    with TemporaryDirectory(prefix="megalite-synchronization-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        run_on(ranks, pretrain(*words) if words[0].startswith("-") else without_python(words), metrics)
        return read_curve(metrics, method.delay)


def read_curve(metrics: Path, delay: int) -> Curve:
    """Return what a training has recorded of its steps. Raises MegaliteError if that is not enough."""
    from megalite.extras.comparison.synchronization import Curve

    try:
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps: list[Mapping[str, float]] = [record for record in records if "iteration_time_s" in record]
        losses = [float(next(value for name, value in each.items() if name.endswith("loss"))) for each in steps]
        sent = [int(each["bytes_sent"]) for each in steps]
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise MegaliteError(f"the program wrote no metrics that can be read to --metrics-path: {error!r}") from None
    if not steps:
        raise MegaliteError("the run had no step")
    # The slowest rank's own work where it is recorded, as means over parts of the run: the time between ranks of one
    # machine says nothing of a link. The least of them, since what else the machine does only adds to it.
    work = [each[name] for each in steps if (name := "iteration_time_s/slowest_rank_work") in each]
    times = [each["iteration_time_s"] for each in steps]
    return Curve(losses, sent, min(work) if work else statistics.median(times[SKIPPED_STEPS:] or times), delay)


command = partial(run_tool, main)
