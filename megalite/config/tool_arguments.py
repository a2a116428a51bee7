"""Flags of a command, from a frozen dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from megalite.config.command_line import flag_groups, refuse_blank
from megalite.config.fields import flag_of, range_problems
from megalite.config.megatron_flags import tables
from megalite.config.parse import field_value
from megalite.errors import ConfigurationError
from megalite.process.output import say
from megalite.small_files import shown
from megalite.version import __version__

Arguments = TypeVar("Arguments")
POSITIONAL = {"positional": True}
"""Metadata of the field without a flag, which takes the value that no flag takes."""
ALSO_POSITIONAL = {"positional": "also"}
"""Metadata of a field with a flag that may be left out: the field takes the value that no flag takes, too."""


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
        ConfigurationError: a flag is unknown or missing, or a value is blank, of the wrong type, or not in its range.
        SystemExit: 0 after --help or --version.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        from megalite.config.help import show_help  # imported here: few programs show their help

        show_help(description, {"options": arguments})
    if "--version" in argv:
        say(f"megalite {__version__}")
        sys.exit(0)
    kinds, entries = get_type_hints(arguments), dataclasses.fields(arguments)  # type: ignore[arg-type]
    positional = next((entry.name for entry in entries if entry.metadata.get("positional")), None)
    flagged = [entry.name for entry in entries if entry.metadata != POSITIONAL]
    found: dict[str, Any] = {}
    free: list[str] = []
    with_values = {token[2:].partition("=")[0].replace("_", "-") for token in argv if "=" in token}
    for flag, values in flag_groups(argv):
        refuse_blank(flag, values)
        name, wanted = _field(flag, flagged, kinds)
        kind = kinds.get(name)
        form = next((each for each in (kind, *get_args(kind)) if get_origin(each) is tuple), kind)
        several = get_origin(form) is tuple and Ellipsis in get_args(form)
        takes = 0 if not flag or kind is bool else 1
        if get_origin(form) is tuple and not (several and repeated):
            takes = len(values) if several else len(get_args(form))
        own, others = values[:takes], values[takes:]
        if kind is bool and flag in with_values:
            raise ConfigurationError(f"--{flag} takes no value")
        if several and repeated and not own:
            raise ConfigurationError(f"--{flag} needs a value")
        if others and positional is None:
            what = f"--{flag} takes {takes or 'no'} value{'s' * (takes > 1)}, got" if flag else "no flag takes"
            raise ConfigurationError(f"{what} {shown(' '.join(values))}")
        free += others
        if flag:
            value: Any = field_value(flag, kind, own) if wanted else False
            found[name] = (*found.get(name, ()), *value) if several and repeated else value
    if positional is not None and free:
        if positional in found:
            raise ConfigurationError(
                f"{flag_of(positional)} is given, and {shown(' '.join(free))} without a flag: give one"
            )
        is_one = get_origin(kinds[positional]) is not tuple
        if (is_one and len(free) > 1) or not all(word.strip() for word in free):
            what = "is one word" if is_one else "are words"
            raise ConfigurationError(f"{positional.upper()} {what}, got {shown(' '.join(free))}")
        found[positional] = field_value(positional, kinds[positional], free)
    needed = [entry.name for entry in entries if entry.default is dataclasses.MISSING and entry.name not in found]
    if needed:
        missing = ", ".join(flag_of(name) if name in flagged else name.upper() for name in needed)
        raise ConfigurationError(f"missing: {missing} (--help describes all flags)")
    parsed = arguments(**found)
    if problems := list(range_problems(parsed)):
        raise ConfigurationError("\n".join(problems))
    return parsed


def _field(flag: str, names: Sequence[str], kinds: dict[str, Any]) -> tuple[str, bool]:
    """Return the field of a flag, and false if the flag turns it off. Raises ConfigurationError for an unknown flag."""
    name = (tables()["aliases"][flag] if flag in ("tp", "pp", "cp") else flag).replace("-", "_")
    if not flag or name in names:
        return name, True
    if (positive := name.removeprefix("no_")) in names and kinds[positive] is bool:
        return positive, False
    known = ["--help", "--version", *map(flag_of, names)]
    near = difflib.get_close_matches(f"--{flag}", known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the flags are {', '.join(known)}"
    raise ConfigurationError(f"there is no flag --{flag}: {hint}")
