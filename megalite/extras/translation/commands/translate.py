"""Translate a launch script of Megatron-LM, or settings of DeepSpeed, GPT-NeoX or Primus, into flags.

    python tools/translate.py examples/gpt3/train_gpt3_175b_distributed.sh --set CHECKPOINT_PATH=run/gpt3 --check
    python tools/translate.py ds_config.json --ranks 8

Prints the command, and what is accepted, changed and refused, each with the reason. The file is read, never executed.
What only a shell can tell is asked for by its name (--set). Exit codes: 0, or 64 if something is refused or missing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from megalite.config.command_line import flag_groups
from megalite.config.fields import PositiveInt
from megalite.config.parse import parse_arguments
from megalite.config.tool_arguments import POSITIONAL, parse_tool_arguments
from megalite.config.validate import resolve
from megalite.config.yaml_file import dump
from megalite.errors import ConfigurationError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import printable, say, shell_word
from megalite.process.programs import pretrain, python, run

if TYPE_CHECKING:
    from megalite.extras.translation.report import Report

_KEPT = re.compile(
    "node-rank|master-addr|master-port|rdzv-id|rdzv-backend|rdzv-endpoint|rdzv-conf|max-restarts|local-addr|log-dir|"
    "redirects|tee|monitor-interval|start-method|role|local-ranks-filter|numa-binding|logs-specs|event-log-handler|"
    "signals-to-handle|duplicate-stdout-filters|duplicate-stderr-filters"
)
"""Options of torchrun that stay as they are."""
_OF_ACCELERATE = {"machine-rank": "node-rank", "main-process-ip": "master-addr", "main-process-port": "master-port"}
_STARTS_TASKS = {"srun", "mpirun", "mpiexec", "horovodrun"}
_STARTS = ("torchrun", "python", "deepspeed", "accelerate", "ft_launcher")


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    file: str = field(metadata=POSITIONAL)
    """The launch script; a YAML of Megatron-LM's tests, GPT-NeoX or Primus; or a JSON of DeepSpeed."""
    set: tuple[str, ...] = field(default=())
    """NAME=VALUE ...: variables of the script, which take precedence; 1=VALUE is its first argument."""
    ranks: PositiveInt | None = None
    """Number of ranks, if the file does not say it; data-parallel ones for a JSON of DeepSpeed."""
    check: bool = False
    """Build the model without memory, and print its sizes beside those that the file implies."""
    yaml: bool = False
    """Print a YAML file for --config instead of the command."""
    run: bool = False
    """Run the command on this machine, if nothing is refused or missing."""


def main() -> None:
    """Parse the flags, translate the file, and print or run the result."""
    arguments = parse_tool_arguments(Arguments, __doc__ or "", one_by_one(sys.argv[1:]), repeated=True)
    from megalite.extras.translation.source import translate

    report = translate(arguments.file, variables(arguments.set), arguments.ranks)
    if (
        report.per_node is None
        and arguments.ranks
        and arguments.ranks % (report.nodes or 1) == 0
        and not report.missing
    ):
        report.per_node = arguments.ranks // (report.nodes or 1)
    world_size = report.world_size or arguments.ranks
    together = _problems(report, world_size) if report.whole and not report.missing else []
    for line in report.lines():
        say(line)
    for problem in together:
        say(f"refused: {problem}")
    wrong = bool(report.refused or report.missing or together)
    if arguments.check:
        _check(report, world_size)
    if arguments.yaml:
        say(dump(parse_arguments(report.flags).config), end="")
    else:
        part = "without data" if "--num-layers" in report.flags else "for any network"
        left = "without what is refused or needed" if wrong else "complete" if report.whole else part
        say(f"# the command, {left}:")
        say(_printed(report))
    if wrong:
        counts = f"{len(report.refused) + len(together)} refused and {len(report.missing)} needed"
        raise ConfigurationError(f"{arguments.file}: {counts}, as above" + "; nothing is run" * arguments.run)
    if arguments.run:
        _run(report, arguments.ranks)


def one_by_one(argv: Sequence[str]) -> list[str]:
    """Return a command line in which each NAME=VALUE behind a --set has a --set of its own."""
    found: list[str] = []
    for word in argv:
        follows = len(found) > 1 and found[-2] == "--set" and re.match(r"\w+=", word)
        found += ["--set", word] if follows else [word]
    return found


def variables(settings: Sequence[str]) -> dict[str, str]:
    """Return the variables that --set gives."""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not (name.isidentifier() or name.isdecimal()):
            raise ConfigurationError(f"--set {setting}: expected NAME=VALUE")
        found[name] = value
    return found


def _problems(report: Report, world_size: int | None) -> list[str]:
    """Return why the flags, which are right one by one, are not right together."""
    try:
        config = parse_arguments(report.flags).config
        resolve(config, world_size or config.parallel.ranks_needed)
    except ConfigurationError as error:
        return str(error).splitlines()
    return []


def _check(report: Report, world_size: int | None) -> None:
    from megalite.extras.translation.sizes import sizes

    try:
        for line in sizes(parse_arguments(report.flags).config, world_size):
            say(f"check: {line}")
    except ConfigurationError as error:
        for line in str(error).splitlines():
            say(f"check: {line}")


def _printed(report: Report) -> str:
    """Return the command as a shell takes it; what is to be expanded within another shell is given to that one."""
    before = report.launcher[: report.shell]
    if not before or not _expanded(report):
        return _joined(_command(report))
    inner = _joined(_command(replace(report, launcher=report.launcher[report.shell :]), started=True))
    return f"{_joined([before])} bash -c {shell_word(inner)}"


def _joined(parts: Sequence[Sequence[str]]) -> str:
    return " \\\n    ".join(" ".join(map(_quoted, part)) for part in parts)


def _quoted(word: str) -> str:
    """Return a word in quotes that leave to a shell what it is to expand, between marks in the word."""
    pieces = re.split("\ue000(.*?)\ue001", word)
    if len(pieces) == 1:
        return shell_word(word)
    if printable(word) != word:
        return "".join(f'"{piece}"' if at % 2 else shell_word(piece) for at, piece in enumerate(pieces))
    escaped = [piece if at % 2 else re.sub(r'([\\"$`])', r"\\\1", piece) for at, piece in enumerate(pieces)]
    return f'"{"".join(escaped)}"'


def _expanded(report: Report) -> list[str]:
    """Return the words that a shell is to expand."""
    return [word for word in (*report.launcher, *report.environment.values()) if "\ue000" in word]


def _command(report: Report, *, started: bool = False) -> list[list[str]]:
    """Return the command that starts megalite as the file starts its program, in parts: one for each flag.

    Args:
        started: whether another command starts one process for each rank.
    """
    environment = [f"{name}={value}" for name, value in report.environment.items()]
    flags = [[f"--{flag}", *values] for flag, values in flag_groups(report.flags)]
    names = [PurePath(word).name for word in report.launcher]
    start = next((at for at, name in enumerate(names) if name.startswith(_STARTS)), 0)
    tasks = report.launcher[:start] if (_STARTS_TASKS | {"numactl"}) & set(names[:start]) else ()
    before = [*(["env", *environment] if environment else []), *tasks]
    by_torch = any(name.startswith(("torch", "deepspeed", "accelerate")) for name in names)
    given, kept = _options_of_torchrun(report.launcher[start:] if by_torch else ())
    by_tasks = (started or _STARTS_TASKS & set(names[:start])) and not by_torch
    count = [str(report.per_node)] if report.per_node else given.get("nproc-per-node", [])
    if by_tasks or report.world_size == 1 or not count:
        return [[*before, "megalite-pretrain"], *flags]
    nodes = [str(report.nodes)] if report.nodes else []
    if ":" in "".join(given.get("nnodes", [])):  # MIN:MAX
        nodes = given["nnodes"]
    places = [*(["--nnodes", *nodes] if nodes else []), "--nproc-per-node", *count, *kept]
    return [[*before, "torchrun", *places, "--no-python", "megalite-pretrain"], *flags]


def _options_of_torchrun(launcher: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the numbers that options of a launcher give, and the options that stay as they are."""
    given, kept = dict[str, list[str]](), list[str]()
    for at, word in enumerate(launcher):
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("_", "-")
        name = _OF_ACCELERATE.get(name, name)
        values = [value] if equals else [*launcher[at + 1 : at + 2]]
        if not option.startswith("-"):
            continue
        if name in ("nnodes", "nproc-per-node"):
            given[name] = values
        elif _KEPT.fullmatch(name):
            kept += [f"--{name}", *values]
        elif name == "standalone":
            kept.append("--standalone")
    return given, kept


def _run(report: Report, ranks: int | None) -> None:
    """Run the translated command on this machine, without a shell."""
    count = report.world_size or ranks or 1
    if words := _expanded(report):
        texts = re.sub("[\ue000\ue001]", "", " ".join(words))
        raise ConfigurationError(
            f"--run: only a shell can tell {texts}: give --set NAME=VALUE, or run the command in one"
        )
    if (report.nodes or 1) > 1:
        raise ConfigurationError(f"--run: the file is for {report.nodes} nodes: start the command on each of them")
    program = pretrain(*report.flags)
    launcher = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    sys.stdout.flush()
    ended = run(program if count == 1 else [*launcher, "--no-python", *program], env=os.environ | report.environment)
    sys.exit(ended.returncode)


command = partial(run_tool, main)
