"""Help of a command, and the words of the page of all flags: from the dataclasses of the flags and their docstrings."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from megalite.process.names import as_installed
from megalite.process.output import say

_WORDS = {int: "whole number", float: "number", str: "text"}


def show_help(description: str, sections: Mapping[str, Any]) -> NoReturn:
    """Print the description and the flags of each dataclass under its title. Raises SystemExit: 0."""
    lines = [f"usage: {sys.argv[0]} [flags]", "", description.strip()]
    for title, kind in sections.items():
        kinds, meanings = get_type_hints(kind), field_docstrings(kind)
        lines += ["", f"{title}:"]
        for entry in fields(kind):
            also = entry.metadata.get("positional")
            flag = entry.name.upper() if also is True else spelled(entry, kinds[entry.name])
            flag = f"[{flag}]" if also == "also" else flag
            meaning = f"{meanings.get(entry.name, '')} ({default_words(entry)})"
            for text, indent in ((f"{flag} {value_words(kinds[entry.name])}", " " * 2), (meaning, " " * 6)):
                text = text.replace("`", "")
                lines += textwrap.wrap(
                    text, width(), initial_indent=indent, subsequent_indent=" " * 6, break_on_hyphens=False
                )
    say(as_installed("\n".join(lines)))
    sys.exit(0)


def width() -> int:
    """Return the characters of a line of help: those of the terminal, but at most 112, as without a terminal."""
    return max(40, min(112, shutil.get_terminal_size((112, 24)).columns))


def spelled(entry: Field[Any], kind: Any) -> str:
    """Return the flag of a field, and for a switch also the one that turns it off."""
    flag = entry.name.replace("_", "-")
    return f"`--{flag}`, `--no-{flag}`" if kind is bool else f"`--{flag}`"


def value_words(kind: Any) -> str:
    """Return a description of the values that a field of this type takes; empty for a switch."""
    options = [each for each in get_args(kind) if each is not type(None)]
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in options)
    if get_origin(kind) is tuple:
        return f"{'several' if Ellipsis in options else len(options)} × {value_words(options[0])}"
    return _WORDS[kind] if kind in _WORDS else value_words(options[0])


def default_words(entry: Field[Any]) -> str:
    """Return a description of the default of a field."""
    value = entry.default
    if value is MISSING:
        return "must be given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == ():
        return "unset"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass and its base classes, as one line."""
    found: dict[str, str] = {}
    for each in kind.__mro__[-2::-1]:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = " ".join(meaning.split())
    return found
