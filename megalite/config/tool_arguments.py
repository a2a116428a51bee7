"""Flags of a command, from a frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from megalite.config.command_line import flag_groups, refuse_blank
from megalite.config.fields import flag_of, range_problems
from megalite.config.megatron_flags import tables
from megalite.errors import EXIT_CONFIGURATION, ConfigurationError

Arguments = TypeVar("Arguments")


def parse_tool_arguments(
    arguments: type[Arguments], description: str, argv: Sequence[str] | None = None, *, repeated: bool = False
) -> Arguments:
    """Return the dataclass with values from the command line; the field `output_prefix` has the flag `--output-prefix`.

    `--tp`, `--pp` and `--cp` are short for the tensor-, pipeline- and context-parallel sizes.

    Args:
        arguments: the dataclass.
        description: text for --help.
        argv: the command line without the program's name; None: that of this process.
        repeated: a flag with several values is given once per value; otherwise once with all values.

    Raises:
        ConfigurationError: a flag is unknown, a value is blank, or a number is not in its range.
        SystemExit: 0 after --help; 64 after a missing flag or a value of the wrong type, with a message.
    """
    import tyro

    argv = [_in_full(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    _refuse_unknown_flags(arguments, argv)
    for flag, values in flag_groups(argv):
        refuse_blank(flag, values)
    try:
        parsed = tyro.cli(
            arguments,
            args=argv,
            description=_as_called(description),
            config=(tyro.conf.UseAppendAction,) if repeated else (),
        )
    except SystemExit as ending:
        sys.exit(EXIT_CONFIGURATION if ending.code == 2 else ending.code)  # another code comes from --help or a signal
    if problems := list(range_problems(parsed)):
        raise ConfigurationError("\n".join(problems))
    return parsed


def split_flags(arguments: type[Any], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of a command, which are the fields of a dataclass, and those of the run that it is about."""
    names = {"help", *(field.name for field in dataclasses.fields(arguments))}
    own: list[str] = []
    others: list[str] = []
    for flag, values in flag_groups(argv):
        mine = flag.removeprefix("no-").replace("-", "_") in names or "-h" in values
        (own if mine else others).extend([f"--{flag}", *values] if flag else values)
    return own, others


def _as_called(description: str) -> str:
    """Return the help of a script in tools/, with the name of the installed command if this command was called."""
    name = Path(sys.argv[0]).name
    if not name.startswith("megalite-"):
        return description
    return re.sub(r"(python )?tools/\S+\.py", lambda found: name if found[1] else f"--no-python {name}", description)


def _in_full(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return f"--{tables()['aliases'][flag[2:]]}{equals}{value}" if flag in ("--tp", "--pp", "--cp") else argument


def _refuse_unknown_flags(arguments: type[Arguments], argv: Sequence[str]) -> None:
    # If a flag is missing, tyro makes no suggestion for a misspelt flag, which is probably the missing one.
    known = ["--help", *(flag_of(field.name) for field in dataclasses.fields(arguments))]  # type: ignore[arg-type]
    for argument in argv:
        flag = argument.split("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in known or flag.replace("--no-", "--") in known:
            continue
        near = difflib.get_close_matches(flag, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the flags are {', '.join(known)}"
        raise ConfigurationError(f"there is no flag {flag}: {hint}")
