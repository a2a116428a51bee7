"""Average the weights of checkpoints of one run, or of branches of it, into a checkpoint without optimizer state.

    python tools/checkpoint/merge.py --load run/trunk --steps 1000 2000 3000 --save run/average
    python tools/checkpoint/merge.py --load run/trunk --steps 1000 2000 3000 --method wsm --decay-style minus_sqrt \\
        --save run/merged
    python tools/checkpoint/merge.py --load run/a/iter_0003000 run/b --weights 0.25 0.75 --save run/soup

Sums are computed in float64, from master weights where they are saved, and rounded once. The result is a run directory
for evaluation, generation, conversion, and training with --finetune (from step 0) or --no-load-optim (from the last).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megalite.config.fields import CORES, ShareInside, Workers, needs
from megalite.config.near_checkpoints import require_checkpoint
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import CheckpointError, ConfigurationError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say

if TYPE_CHECKING:
    from megalite.checkpoint.reader import CheckpointReader

FILE = 5 * 10**9
"""Size in bytes of a file of weights."""


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    load: tuple[str, ...]
    """The run directory whose --steps are averaged; or several checkpoints (iter_0000100), or run directories, of which
    the latest is taken. The oldest comes first."""
    save: str
    """The run directory to write to, which must not have a checkpoint of the last step."""
    steps: tuple[int, ...] = ()
    """Steps of the checkpoints in --load."""
    method: Literal["uniform", "ema", "wsm"] = "uniform"
    """Weights of the checkpoints: equal; those of an exponential mean with --decay; or those after which the average
    is about that of a learning rate that decays over them (--decay-style)."""
    decay: ShareInside | None = None
    """Decay of ema, from one checkpoint to the next."""
    decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] | None = None
    """Decay of wsm, with the shape of the same --lr-wsd-decay-style."""
    weights: tuple[float, ...] = ()
    """Weight of each checkpoint, in place of --method. Together they are 1; some may be negative."""
    ema: bool = False
    """Average the means of weights that runs have kept (--ema-decay), in place of weights."""
    workers: Workers = CORES
    """Threads that compute sums; by default one per core."""


def main() -> None:
    """Parse the flags, write the average, and print of what it is."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    check(arguments)
    for load in arguments.load:
        require_checkpoint(load)
    from megalite.checkpoint.file_writer import cut_evenly, write_checkpoint
    from megalite.extras.averages.averages import MERGED, WeightedSum, check_alike
    from megalite.process.progress import show_progress
    from megalite.storage import place_of

    readers = open_all(arguments)
    check_alike(readers, means=arguments.ema)
    weights = weights_of(arguments, readers)
    source = WeightedSum(readers, weights, arguments.ema)
    size = sum(kind.size for kind in source.tensors.values())
    last = max(readers, key=lambda reader: reader.manifest.training.iteration).manifest
    origin: dict[str, Any] = {
        "method": "weights" if arguments.weights else arguments.method,
        "ema": arguments.ema,
        "checkpoints": [
            {"path": place_of(reader.path), "step": reader.manifest.training.iteration, "weight": weight}
            for reader, weight in zip(readers, weights, strict=True)
        ],
    }
    training = replace(last.training, loss_scale=None, optimizers=None, evaluation_left=False)
    cut = cut_evenly(source.tensors, -(-size // FILE))
    with show_progress("averaging", size) as advance:
        written = write_checkpoint(
            source, training, {**last.config, MERGED: origin}, Path(arguments.save), cut, arguments.workers, advance
        )
    say(f"{written}: {len(source.tensors):,} tensors, {size:,} bytes")
    for reader, weight in zip(readers, weights, strict=True):
        say(f"{weight:.6g} of {reader.path}")
    say(f"train from it with --finetune, or from step {training.iteration} on with --no-load-optim")


def check(arguments: Arguments) -> None:
    """Raise ConfigurationError for flags that contradict each other."""
    count = len(arguments.steps or arguments.load)
    problems = []
    if arguments.steps and len(arguments.load) > 1:
        problems.append("--steps are of one run directory: give one --load, or the checkpoints (RUN/iter_0001000)")
    if count < 2:
        problems.append("there is nothing to average: give at least two --steps of one --load, or several checkpoints")
    if arguments.method != "ema" or arguments.weights:
        problems += needs(arguments, "decay", "--method ema")
    if arguments.method != "wsm" or arguments.weights:
        problems += needs(arguments, "decay_style", "--method wsm")
    if arguments.weights:
        problems += [f"{flag} has no effect with --weights: drop one" for flag in given_method(arguments)]
        total = math.fsum(arguments.weights)
        if len(arguments.weights) != count:
            problems.append(f"--weights: there are {len(arguments.weights)} for {count} checkpoints")
        elif not math.isclose(total, 1.0, rel_tol=1e-9):
            shares = " ".join(f"{weight / total:.17g}" for weight in arguments.weights) if total else ""
            advice = f": divided by their sum they are {shares}" if shares else ""
            problems.append(f"--weights are {total:.6g} together, and must be 1{advice}")
    elif arguments.method == "ema" and arguments.decay is None:
        problems.append("--method ema needs --decay, such as 0.9")
    elif arguments.method == "wsm" and arguments.decay_style is None:
        problems.append("--method wsm needs --decay-style: exponential, linear, cosine or minus_sqrt")
    if problems:
        raise ConfigurationError("\n".join(problems))


def given_method(arguments: Arguments) -> list[str]:
    """Return the flag of the method, if it is given."""
    return [f"--method {arguments.method}"] if arguments.method != "uniform" else []


def open_all(arguments: Arguments) -> list[CheckpointReader]:
    """Open the checkpoints.

    Raises CheckpointError if one is missing, is there twice, or has another network than the last.
    """
    from megalite.checkpoint import check_same_function, directory, model_config
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.storage import open_directory

    loads = [open_directory(load) for load in arguments.load]
    if arguments.steps:
        there = directory.complete(loads[0])
        if missing := [step for step in arguments.steps if step not in there]:
            holds = f"only steps {', '.join(map(str, sorted(there)))}" if there else "no checkpoint"
            raise CheckpointError(f"--steps {missing[0]}: {loads[0]} has {holds}")
        loads = [there[step] for step in arguments.steps]
    readers = [CheckpointReader(directory.resolve(load)) for load in loads]
    checksums = [reader.manifest.checksum for reader in readers]
    for place, reader in enumerate(readers):
        if checksums.index(checksums[place]) < place:
            raise CheckpointError(f"{reader.path} is there twice, or is a copy: give each checkpoint once")
    last = readers[-1]
    if "kind" not in last.manifest.config.get("model", {}):  # a program's own model, of which only tensors are known
        network = model_config(last.path, last.manifest.config)
        for reader in readers[:-1]:
            check_same_function(str(reader.path), model_config(reader.path, reader.manifest.config), network)
    return readers


def weights_of(arguments: Arguments, readers: Sequence[CheckpointReader]) -> list[float]:
    """Return the weight of each checkpoint.

    Raises ConfigurationError if the method goes by the order of the checkpoints, and their steps do not increase.
    """
    from megalite.extras.averages.averages import exponential, of_decay, uniform

    count = len(readers)
    if arguments.weights:
        return list(arguments.weights)
    if arguments.method == "uniform":
        return uniform(count)
    steps = [reader.manifest.training.iteration for reader in readers]
    if steps != sorted(set(steps)):
        raise ConfigurationError(
            f"--method {arguments.method} goes by the order of the checkpoints, whose steps are "
            f"{', '.join(map(str, steps))}: give the oldest first, of one run"
        )
    if arguments.decay is not None:
        return exponential(count, arguments.decay)
    assert arguments.decay_style is not None
    return of_decay(count, arguments.decay_style)


command = partial(run_tool, main)
