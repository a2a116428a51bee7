"""Configuration of a run as YAML: sections of fields. Writing is exact; reading checks every key and type."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from megalite.config import megatron_flags
from megalite.config.command_line import BLANK, blank
from megalite.config.run import RunConfig, TaskConfig, fields_by_name, fits, section_types
from megalite.errors import ConfigurationError
from megalite.small_files import MIB, read_small_file, reason, shown

Sections = dict[str, dict[str, Any]]
_LARGEST = MIB
"""Largest size of a file in bytes: enough for the paths of ten thousand datasets."""
_MOST_NODES, _MOST_LEVELS, _LONGEST_NUMBER, _SHOWN = 25_000, 8, 100, 8
_MAPPING, _LIST, _TEXT, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "null"))


def dump(config: TaskConfig) -> str:
    """Return the complete configuration as YAML; `load_yaml` returns an equal configuration from it."""
    found = asdict(config)
    sections = {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in found[section].items()}
        for section in section_types()
        if section in found
    }
    return yaml.safe_dump(sections, sort_keys=False)  # in ASCII: U+0085 without an escape would be read as a space


def read_file(path: str) -> str:
    """Read the file of a configuration. Raises ConfigurationError if it cannot be read."""
    try:
        return read_small_file(Path(path), largest=_LARGEST).decode()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--config {path}: {reason(error)}") from error


def load_yaml(text: str, source: str = "YAML") -> RunConfig:
    """Return the configuration in `text`, with defaults for fields that it does not give.

    Raises:
        ConfigurationError: a key is unknown, given twice, missing or has a value of the wrong type; the message names
            `source`, the line and the key.
    """
    sections = read_sections(text, source)
    missing = missing_fields(sections)
    if missing:
        raise ConfigurationError(f"{source}: missing {', '.join(missing)}")
    return from_sections(sections)


def from_sections(sections: Sections) -> RunConfig:
    """Return the configuration with these fields, by section, and defaults for the others."""
    return RunConfig(**{name: kind(**sections[name]) for name, kind in section_types().items()})


def missing_fields(sections: Sections) -> list[str]:
    """Return the required fields that no section gives."""
    return [name for name, place in fields_by_name().items() if place.required and name not in sections[place.section]]


def read_sections(text: str, source: str) -> Sections:
    """Return the fields in `text` by section, converted to their types. The result has every section.

    Raises:
        ConfigurationError: the text has mistakes; one line per mistake.
    """
    sections: Sections = {name: {} for name in section_types()}
    problems: list[str] = []
    try:
        loader = LimitedLoader(text)
        document = loader.get_single_node()
        for section, _, body in _entries(document, "sections", source):
            if section not in sections:
                near = nearest(section, sections) if len(problems) < _SHOWN else ""  # `nearest` is slow
                problems.append(f"{_place(source, body)}: unknown section {shown(section)}{near}")
            else:
                _read_fields(loader, section, body, source, sections[section], problems)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source}: not YAML: {' '.join(str(error).split())[:300]}") from error
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigurationError("\n".join(problems[:_SHOWN] + more))
    return sections


class LimitedLoader(yaml.SafeLoader):
    """Loader that limits the number and depth of nodes. Aliases (`*name`) refer to existing nodes without expansion."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._count, self._depth = 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._count, self._depth = self._count + 1, self._depth + 1
        if self._count > _MOST_NODES or self._depth > _MOST_LEVELS:
            what = f"more than {_MOST_NODES} entries" if self._depth <= _MOST_LEVELS else "lists in lists, too deep"
            raise yaml.composer.ComposerError(None, None, what, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def value_of(self, node: yaml.Node) -> Any:
        """Return a scalar or a list of scalars. Raises TypeError if the node is neither, or cannot be converted."""
        if isinstance(node, yaml.SequenceNode) and node.tag == _LIST:
            if all(isinstance(each, yaml.ScalarNode) for each in node.value):
                return [self.value_of(each) for each in node.value]
        elif isinstance(node, yaml.ScalarNode):
            try:
                if node.tag == _TEXT or len(node.value) <= _LONGEST_NUMBER:
                    return self.construct_object(node)
            except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):  # errors of the constructors
                pass
            raise TypeError(
                f"{shown(node.value)} is not of type {node.tag.rpartition(':')[2][:20]} (put text in quotes)"
            )
        raise TypeError("expected one value, or a list of values")


def _read_fields(
    loader: LimitedLoader, section: str, body: yaml.Node, source: str, into: dict[str, Any], problems: list[str]
) -> None:
    """Add the valid fields of one section to `into`, and a line for each invalid field to `problems`."""
    for name, key, value in _entries(body, f"the fields of {section}", source):
        problem = _unknown(name, section, suggest=len(problems) < _SHOWN)
        if not problem and name in into:
            problem = f"{name} is given twice"
        elif not problem:
            try:
                into[name] = _read_value(name, loader.value_of(value))
            except TypeError as error:
                problem = f"{name}: {error}"
        if problem:
            problems.append(f"{_place(source, key)}: {problem}")


def _read_value(name: str, given: Any) -> Any:
    """Convert a YAML value to the type of its field. Raises TypeError with a message about the value."""
    flag = name.replace("_", "-")
    for text in given if isinstance(given, list) else [given]:
        if isinstance(text, str) and blank(flag, text):
            raise TypeError(f"{shown(text)} is {BLANK}")
    try:
        return _convert(given, fields_by_name()[name].kind)
    except TypeError as error:
        refused = megatron_flags.refused_value(flag, given) if isinstance(given, str) else None
        raise TypeError(f"expected {error}, got {shown(given)}" + (f" ({refused})" if refused else "")) from None


def _entries(node: yaml.Node | None, what: str, source: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield key, key node and value node of each entry of a mapping; nothing for an empty document or section."""
    if node is None or node.tag == _NULL:
        return
    keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING else [node]
    for key in keys:
        if not isinstance(key, yaml.ScalarNode) or key is node:
            raise ConfigurationError(f"{_place(source, key)}: expected {what} as `name: value` lines")
    for key, value in node.value:
        yield key.value, key, value


def _place(source: str, node: yaml.Node) -> str:
    return f"{source}, line {node.start_mark.line + 1}"


def _unknown(name: str, section: str, suggest: bool) -> str:
    """Return why there is no field of this name in this section; empty if there is. To `suggest` a name is slow."""
    place = fields_by_name().get(name)
    if place is None:
        reason = megatron_flags.refusal(name.replace("_", "-"))
        if reason:
            return f"{name} {reason}"
        return f"unknown key {shown(name)}" + (nearest(name, fields_by_name()) if suggest else "")
    return "" if place.section == section else f"{name} belongs under {place.section}, not {section}"


def nearest(
    name: str,
    known: Collection[str],
    prefix: str = "",
    refusal: Callable[[str], str | None] = lambda name: None,
) -> str:
    """Return a suggestion to append to a message about an unknown name; empty if no name is near or the nearest is
    refused."""
    matches = get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{matches[0]}?" if matches and refusal(matches[0]) is None else ""


def _convert(value: Any, kind: Any) -> Any:
    """Convert a YAML value to the field's type `kind`. Raises TypeError with a description of the expected values."""
    wanted = get_args(kind)[0] if type(None) in get_args(kind) else kind
    if wanted is float and type(value) in (int, float, str):
        return _number(value)  # YAML 1.1 reads 1e-4 as a string
    if (
        wanted == tuple[float, ...]
        and isinstance(value, list)
        and all(type(each) in (int, float, str) for each in value)
    ):
        return tuple(map(_number, value))
    if not fits(value, kind):
        raise TypeError(_expected(wanted))
    return tuple(value) if isinstance(value, list) else value


def _expected(kind: Any) -> str:
    """Return a description of the values that a field of this type takes."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(options)
    if get_origin(kind) is tuple and Ellipsis not in options:
        return f"a list of {len(options)} whole numbers"
    if get_origin(kind) is tuple and get_origin(options[0]) is Literal:
        return "a list of some of " + ", ".join(get_args(options[0]))
    if get_origin(kind) is tuple:
        return "a list of " + {int: "whole numbers", float: "numbers", str: "texts (numbers in quotes)"}[options[0]]
    words = {int: "a whole number", bool: "true or false", str: "a text (in quotes)", float: "a number"}
    return words[kind]


def _number(value: float | str) -> float:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise TypeError("a finite number") from None
    if isinstance(value, str) and not math.isfinite(number):  # the message about its range would show it as inf
        raise TypeError("a finite number")
    return number
