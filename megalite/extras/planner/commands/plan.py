"""Find the fastest layouts of a run on a cluster that fit, before it starts.

    python tools/plan.py --config 7b.yaml --global-batch-size 512 --cluster H100-SXM --gpus 64 --explain
    python tools/plan.py --translate examples/gpt3/train_gpt3_175b_distributed.sh --cluster A100-SXM-80GB --explain

Other flags are pretrain_gpt.py's. Of them, the layout, the recomputation and the size of micro-batches are replaced,
but for what --keep names. The best layout is printed as a command, and its memory is checked by a dry run of the
fullest rank. Exit codes: 0, or 64 for wrong flags and for runs that no layout can split or fit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from megalite.atomic_files import require_output, write_atomically
from megalite.config import RunConfig
from megalite.config.command_line import flag_groups, split_flags
from megalite.config.data import DataConfig
from megalite.config.fields import NonNegativeFloat, PositiveInt, Range, at_most, changed, flag_of
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import is_automatic
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.config.yaml_file import read_file, read_sections
from megalite.errors import ConfigurationError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say

if TYPE_CHECKING:
    from megalite.extras.planner.cluster import Cluster
    from megalite.extras.planner.goodput import Length
    from megalite.extras.planner.plan import Plan, Planner
    from megalite.extras.planner.report import Results

FAILURES = Range("0, or from 1e-12 to 1000", lambda value: value == 0 or 1e-12 <= value <= 1000)
HOURS = Range("from 0.001 to 1e12", lambda value: 0.001 <= value <= 1e12)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SUFFIXES = (".json", ".csv", ".html")
UNMEASURED = " (no GPU has measured megalite yet)"
_ASSUMED = {"micro_batch_size": "1", "lr": "1e-4"}
"""Values of required flags that a plan can do without."""


@dataclass(frozen=True)
class Options:
    """The flags of this program."""

    cluster: str = "H100-SXM"
    """A known cluster or GPU, or a file that describes one (megalite/extras/planner/clusters.toml says how)."""
    gpus: Annotated[PositiveInt, at_most(1_000_000)] | None = None
    """GPUs of the run; unset: those that the script of --translate starts."""
    stack: str | None = None
    """Program that trains, of those in clusters.toml; unset: megalite."""
    top: Annotated[PositiveInt, at_most(1000)] | None = None
    """Layouts to find; unset: 5."""
    keep: tuple[str, ...] | None = None
    """Axes that stay as the flags have them: tensor sequence pipeline chunks schedule context expert expert_tensor zero
    recompute micro_batch; or all of them, as "layout". Unset: none, or all of them with --translate."""
    explain: bool = False
    """Show where the time goes, what each change of the layout would buy, and the memory of each stage."""
    scaling: str | None = None
    """A..B: show the steps of the best layout on A, 2 A, ... B GPUs."""
    tokens: str | None = None
    """Tokens of the training, such as 15T: show how many days it takes."""
    failures_per_gpu_hour: Annotated[float, FAILURES] | None = None
    """Failures that end the run, per hour of a GPU: show the best interval between checkpoints and the goodput."""
    node_mtbf_hours: Annotated[float, HOURS] | None = None
    """Hours between two failures of a node, in place of the rate per GPU."""
    save_seconds: NonNegativeFloat = 10.0
    """Seconds for which a checkpoint stops the training."""
    restart_seconds: NonNegativeFloat = 300.0
    """Seconds from a failure until the run trains again."""
    translate: str | None = None
    """Plan the layout of a launch script or of settings of another program, as megalite-translate reads it."""
    set: tuple[str, ...] = field(default=())
    """NAME=VALUE: variables of that script."""
    output: tuple[str, ...] = ()
    """Files to write: .json with everything, .csv with the table, .html with the pictures."""


def main() -> None:
    """Parse the flags, find the layouts, and print them."""
    own, argv = split_flags(Options, sys.argv[1:])
    options = parse_tool_arguments(Options, description=__doc__ or "", argv=own)
    check(options)
    keep = kept(options)
    gpus = options.gpus
    if options.translate is not None:
        argv, gpus = translated(options, argv)
    if gpus is None:
        raise ConfigurationError("--gpus is missing: give the number of GPUs")
    config = completed(argv)
    from megalite.extras.planner.cluster import find_cluster, find_stack
    from megalite.extras.planner.plan import Planner

    cluster, stack = find_cluster(options.cluster), find_stack(options.stack) if options.stack else None
    if config.parallel.device_classes is not None:
        from megalite.extras.planner.device_plan import MixedPlanner

        mixed = MixedPlanner(with_classes(config, options, gpus, keep), stack)
        for line in report(mixed, options, argv, keep):
            say(line)
        return
    if cluster.nodes is not None and gpus > cluster.nodes * cluster.node_ranks:
        raise ConfigurationError(
            f"--gpus {gpus}: --cluster {options.cluster} has {cluster.nodes * cluster.node_ranks} GPUs"
        )
    planner = Planner(with_letters(config, gpus, keep), cluster, gpus, stack)
    for line in report(planner, options, argv, keep):
        say(line)


def check(options: Options) -> None:
    """Raise ConfigurationError for values that cannot be used."""
    for path in options.output:
        if Path(path).suffix not in _SUFFIXES:
            raise ConfigurationError(f"--output {path}: the name must end in {', '.join(_SUFFIXES)}")
        require_output("--output", path)
    if options.scaling is not None:
        two_numbers(options.scaling)
    if options.tokens is not None:
        count(options.tokens)
    if options.failures_per_gpu_hour is not None and options.node_mtbf_hours is not None:
        raise ConfigurationError("--failures-per-gpu-hour and --node-mtbf-hours both give the failures: drop one")
    if options.set and options.translate is None:
        raise ConfigurationError("--set is for --translate, which is not given")


def kept(options: Options) -> tuple[str, ...]:
    """Return the axes that stay as they are. Raises ConfigurationError for names of none, and if all do with --top."""
    from megalite.extras.planner.layouts import AXES

    names = options.keep if options.keep is not None else ("layout",) if options.translate is not None else ()
    keep = AXES if names == ("layout",) else names
    if unknown := [name for name in keep if name not in AXES]:
        raise ConfigurationError(f"--keep {unknown[0]}: give layout, or some of {', '.join(AXES)}")
    if options.top is not None and set(keep) == set(AXES):
        raise ConfigurationError(
            f"--top {options.top}: nothing is searched if the layout stays: give --keep with the axes that stay, "
            f"such as --keep {AXES[0]}, or drop --top"
        )
    return keep


def translated(options: Options, argv: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the flags of a script of another program, with those given here, and the number of its ranks."""
    from megalite.extras.translation.commands.translate import variables
    from megalite.extras.translation.source import translate

    assert options.translate is not None
    found = translate(options.translate, variables(options.set), options.gpus)
    if found.missing:
        raise ConfigurationError("\n".join(found.missing))
    for line in found.refused:
        say(f"not planned: {line}")
    return [*found.flags, *argv], options.gpus or found.world_size


def completed(argv: Sequence[str]) -> RunConfig:
    """Return the run, with values for what a plan does not need: data, tokenizer, length, learning rate."""
    given = {flag.replace("-", "_") for flag, _ in flag_groups(argv)}
    for flag, values in flag_groups(argv):
        if flag == "config" and len(values) == 1:
            sections = read_sections(read_file(values[0]), values[0])
            given |= {name for section in sections.values() for name in section}
    added = [word for name, value in _ASSUMED.items() if name not in given for word in (f"--{name}", value)]
    config = parse_arguments([*argv, *added]).config
    data, training = config.data, config.training
    if not (data.data_path or data.data_args_path or data.train_data_path or data.per_split_data_args_path):
        data = replace(data, mock_data=True, split=DataConfig.split)
    if data.tokenizer_type is None and config.model.vocab_size is not None:
        data = replace(data, tokenizer_type="NullTokenizer")
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    if unpriced := changed(
        config.synchronization, "gradient_compression all_reduce_algorithm local_update asynchronous"
    ):
        raise ConfigurationError(
            f"{', '.join(map(flag_of, unpriced))}: plans do not know its memory and time; "
            "megalite-compare-synchronization measures, and pretrain_gpt.py --dry-run shows memory and messages, but "
            "not of parameter servers"
        )
    if config.parallel.data_parallel_shares is not None:
        raise ConfigurationError("--data-parallel-shares: plans count equal shares. Leave it out")
    if config.distillation.distill_from is not None:
        raise ConfigurationError("--distill-from: plans do not count a teacher. Leave it out, and leave room for it")
    adapters = config.adapters
    for flag, names in (("--freeze", adapters.freeze), ("--lora-target-modules", adapters.lora_target_modules)):
        if numbered := [name for name in names if re.search(r"[0-9?\[]", name)]:
            raise ConfigurationError(
                f"{flag} {numbered[0]}: plans take all layers of a kind to be trained alike: give names without "
                "numbers, or see what a rank needs by pretrain_gpt.py --dry-run"
            )
    return replace(config, data=data, training=training)


def with_classes(config: RunConfig, options: Options, gpus: int, keep: Collection[str]) -> RunConfig:
    """Return the run with the text of its classes of devices, and its stages written out.

    Raises:
        ConfigurationError: the options ask for what is planned only on devices that are alike.
    """
    from megalite.extras.planner.device_classes import require_valid_classes, with_device_classes
    from megalite.extras.planner.layouts import AXES

    if set(keep) != set(AXES):
        raise ConfigurationError(
            "--device-classes: layouts are searched for devices that are alike; plan that of the flags by --keep layout"
        )
    if options.cluster != Options.cluster:
        raise ConfigurationError(
            f"--cluster {options.cluster}: the classes of --device-classes have the devices: drop one"
        )
    if options.explain or options.scaling is not None:
        raise ConfigurationError(
            "--explain and --scaling compare layouts on devices that are alike: drop --device-classes"
        )
    config = with_letters(with_device_classes(config, gpus), gpus, keep)
    require_valid_classes(config, gpus)
    return config


def with_letters(config: RunConfig, gpus: int, keep: Collection[str]) -> RunConfig:
    """Return the run with its stages written out, if the flags leave them to the planner (auto) and they stay."""
    if not is_automatic(config.parallel):
        return config
    if not {"pipeline", "chunks"} <= set(keep):  # the search divides layers in the same way
        return replace(config, parallel=replace(config.parallel, pipeline_model_parallel_layout=None))
    from megalite.extras.planner.stage_layout import with_stages

    return with_stages(config, gpus)[0]


def report(planner: Planner, options: Options, argv: Sequence[str], keep: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the report, and write the files.

    Raises:
        ConfigurationError: nothing fits; the lines before say what is missing.
    """
    from megalite.extras.planner import scaling
    from megalite.extras.planner.layouts import AXES
    from megalite.extras.planner.neighbours import neighbours
    from megalite.extras.planner.report import Results, explained, length_lines, misfits, missing, scaling_lines, table
    from megalite.extras.planner.search import Found, search

    as_given = set(keep) == set(AXES)
    found = Found([planner.plan(planner.config)]) if as_given else search(planner, options.top or 5, keep)
    if not found.plans:
        yield from misfits(found)
        raise ConfigurationError(missing(planner, found))
    best = found.plans[0]
    yield from table(found.plans)
    yield ""
    expected = best.step.interval
    unmeasured = "" if planner.prices.stack.measured else UNMEASURED
    yield f"nine times of ten, a step of the first takes {expected.least:.3f} to {expected.most:.3f} s{unmeasured}"
    if expected.unknown is not None:
        yield f"nothing is known of runs of its class ({expected.unknown}): the interval is the widest of all"
    if planner.config.low_precision.recipe is not None:
        how = "are emulated, as a run does on CPUs"
        if not planner.cluster.gpu.is_cpu and planner.config.kernels.kernels != "reference":
            how = "are taken to reach the share of FP8's peak that those of bf16 reach of theirs; MFU is of bf16's peak"
        yield f"products of {planner.config.low_precision.flag} {how}"
    if not as_given:
        yield f"{found.counts['possible']:,} layouts of {planner.gpus:,} x {planner.cluster.gpu.name} were compared"
        yield from misfits(found)
    if best.missing:
        yield f"does not fit: {best.too_large}"
    rank, peak = planner.confirm(best)
    words = f"of stage {best.fullest}, " if best.layout.pipeline > 1 else ""
    over = "" if peak <= best.room or best.missing else f": more than the {best.room / 2**30:.1f} GiB of a GPU"
    yield f"a dry run of rank {rank}, {words}needs {peak / 2**30:.1f} GiB{over}"
    length = length_of(best, options, planner.cluster)
    notes = list(length_lines(length, options.tokens, best.step.seconds))
    yield from notes
    others = neighbours(planner, best) if options.explain else []
    if options.explain:
        yield from explained(best, others)
    sizes = scaling.sizes(planner, best, *two_numbers(options.scaling)) if options.scaling is not None else []
    if sizes:
        yield ""
        yield from scaling_lines(sizes)
    starts = commands_of(planner, best, argv)
    yield from ("", *starts)
    write_files(options, planner, Results(found, starts, notes, length, others, sizes))


def commands_of(planner: Planner, plan: Plan, argv: Sequence[str]) -> list[str]:
    """Return the commands that run a plan, by torchrun and by SLURM."""
    from megalite.extras.planner.flags import commands, layout_flags, without_layout

    rest = without_layout(argv)
    own = [word for flag in layout_flags(plan.config, completed(rest)) for word in flag]
    per_host = planner.cluster.per_host(planner.gpus)
    return list(commands([*rest, *own], planner.gpus // per_host, per_host))


def write_files(options: Options, planner: Planner, results: Results) -> None:
    """Write the files of --output."""
    from megalite.extras.planner.html import page
    from megalite.extras.planner.report import as_csv, everything

    plans = results.found.plans
    for path in map(Path, options.output):
        if path.suffix == ".csv":
            text = as_csv(plans)
        elif path.suffix == ".json":
            text = json.dumps(everything(results), indent=1)
        else:
            title = f"Layouts on {planner.gpus:,} x {planner.cluster.gpu.name}"
            text = page(title, plans, planner.time_line(plans[0]), results.starts, results.notes)
        write_atomically(path, text.encode())


def length_of(plan: Plan, options: Options, cluster: Cluster) -> Length:
    """Return the length of the training, with the failures that the flags give."""
    from megalite.extras.planner.goodput import Failures, Length

    tokens = None if options.tokens is None else count(options.tokens)
    by_gpu, by_node = options.failures_per_gpu_hour, options.node_mtbf_hours
    hosts = plan.gpus // cluster.per_host(plan.gpus)
    rate = by_gpu * plan.gpus if by_gpu is not None else hosts / by_node if by_node is not None else None
    failures = None if rate is None else Failures(rate / 3600, options.save_seconds, options.restart_seconds)
    return Length(tokens, plan.step.tokens_per_second * plan.gpus, failures)


def two_numbers(text: str) -> tuple[int, int]:
    """Return the numbers of --scaling. Raises ConfigurationError if they are none."""
    first, _, last = text.partition("..")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= 2**20):
        raise ConfigurationError(f"--scaling {text}: give two numbers of GPUs, as in 8..16384")
    return int(first), int(last)


def count(text: str) -> float:
    """Return a number of tokens, such as 15T. Raises ConfigurationError if it is none."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        number = float(text if unit is None else text[:-1]) * (unit or 1.0)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e18:
        raise ConfigurationError(f"--tokens {text}: give a number, as in 300B or 15T")
    return number


command = partial(run_tool, main)
