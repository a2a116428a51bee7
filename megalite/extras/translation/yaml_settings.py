"""Settings in YAML or JSON: Megatron-LM's flags in a section, such as a test's MODEL_ARGS or Primus' overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from megalite.config.run import fields_by_name
from megalite.config.yaml_file import LimitedLoader
from megalite.errors import ConfigurationError
from megalite.extras.translation.dialects import PRIMUS, is_megatrons, translated, words_of
from megalite.extras.translation.environment import add_environment
from megalite.extras.translation.report import Report
from megalite.small_files import shown

_MOST_VALUES = 25_000
"""Limit for the values of a file, each counted where it is used: an alias repeats those of its anchor."""
_OTHER_FILES = ("extends", "bases", "includes")
"""Keys of Primus for files whose flags a file begins with."""
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return a mapping of texts, numbers, lists and mappings, and notes on keys that are given more than once.

    Raises ConfigurationError if the text is not such a mapping, or is too large.
    """
    try:
        reader = _Reader(text)
        node = reader.loader.get_single_node()
        value = reader.value(node) if isinstance(node, yaml.MappingNode) else None
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"not YAML that can be translated: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, dict):
        raise ConfigurationError("not a mapping of keys")
    return value, reader.notes


class _Reader:
    """Reader of one text. Attribute `notes`: lines on keys that are given again, of which the last value counts."""

    def __init__(self, text: str) -> None:
        self.loader, self.notes, self._count = LimitedLoader(text), list[str](), 0

    def value(self, node: yaml.Node) -> Any:
        """Return a node as Python values. Raises ConfigurationError for keys that are no names, and too many values."""
        self._count += 1
        if self._count > _MOST_VALUES:
            raise ConfigurationError(f"has more than {_MOST_VALUES:,} values, with those that aliases repeat")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(each) for each in node.value]
        if not isinstance(node, yaml.MappingNode):
            return self.loader.value_of(node)
        found: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigurationError(f"line {line}: {shown(key.value)} is no name of a setting")
            if key.tag == _MERGE:
                merged = self.value(value)
                for each in reversed(merged if isinstance(merged, list) else [merged]):
                    if not isinstance(each, dict):
                        raise ConfigurationError(f"line {line}: << needs a mapping")
                    inherited |= each
                continue
            if key.value in found:
                self.notes.append(f"line {line}: {shown(key.value)} is given again: this value is taken")
            found[key.value] = self.value(value)
        return inherited | found


def from_section(settings: Mapping[str, Any], variables: Mapping[str, str]) -> Report | None:
    """Translate a mapping of which one section has Megatron-LM's flags; None if no section has."""
    path, flags = _section(settings)
    if not flags:
        return None
    report = Report(whole="MODEL_ARGS" in path)
    beside = dict(_beside(settings, path))
    for name in [name for name in flags if name in _OTHER_FILES]:
        beside[name] = flags[name]
    environment = beside.get("ENV_VARS")
    if isinstance(environment, Mapping):
        add_environment({name: as_text(value) for name, value in environment.items()}, report)
    left = []
    for name, value in beside.items():
        if re.search(r"\.ya?ml\b", str(value)):
            report.missing.append(f"{name}: {shown(value)} has flags, too, which are not read here: copy them into it")
        elif name != "ENV_VARS" or not isinstance(environment, Mapping):
            left.append(name if value is None or isinstance(value, Mapping | list) else f"{name} {shown(value)}")
    report.notes += [f"not read, as no flags of Megatron-LM: {', '.join(left)}"] if left else []
    words = [
        word
        for name, value in flags.items()
        if name not in _OTHER_FILES
        for word in as_flag(name, value, variables, report)
    ]
    report.add_megatron(words)
    return report


def _section(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the section with most flags of Megatron-LM, of which half its keys must be, and the path to it."""
    if isinstance(settings.get("MODEL_ARGS"), Mapping):
        return ("MODEL_ARGS",), settings["MODEL_ARGS"]
    known = sum(_plain(name) in words_of(PRIMUS) or is_megatrons(_plain(name)) for name in settings)
    best, most = ((path, settings), known) if 2 * known >= len(settings) and known > 2 else (((), {}), 0)
    for name, inner in settings.items():
        if isinstance(inner, Mapping):
            found = _section(inner, (*path, name))
            if len(found[1]) > most:
                best, most = found, len(found[1])
    return best


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")


def _beside(settings: Mapping[str, Any], path: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what stands beside the section at a path, with its own path."""
    for name, value in settings.items():
        if path and name == path[0]:
            if len(path) > 1:
                yield from _beside(value, path[1:], f"{prefix}{name}.")
        elif path:
            yield f"{prefix}{name}", value


def as_flag(
    name: str, given: Any, variables: Mapping[str, str], report: Report, program: str = PRIMUS
) -> Sequence[str]:
    """Return a setting as a flag with its values; nothing if all that is to be said of it is in the report.

    Args:
        program: the program whose own words the name may be.
    """
    if isinstance(given, Mapping) or (
        isinstance(given, list) and any(isinstance(each, list | Mapping) for each in given)
    ):
        report.refused.append(f"{shown(name)}: holds settings of its own, where a value of a flag is expected")
        return []
    flag = _plain(name)
    place = fields_by_name().get(flag.replace("-", "_"))
    switch = place is not None and place.kind is bool and given in (0, 1) and given is not None
    value = bool(given) if switch else given
    text = _settled(
        name, " ".join(map(as_text, value)) if isinstance(value, list) else as_text(value), variables, report
    )
    dashed = name.startswith("--")
    if not dashed and translated(program, flag, [text], f"{name}: {text}", report):
        return []
    if value is None and not dashed:
        report.idle.append(f"{name}: not set")
    elif value is False and not dashed and is_megatrons(f"no-{flag}"):
        return [f"--no-{flag}"]
    elif value is False and not (dashed and is_megatrons(flag)):
        report.idle.append(f"{name}: off")
    elif value is True and not is_megatrons(flag) and is_megatrons(f"no-{flag}"):
        report.idle.append(f"{name}: on by default")
    elif value is True or value is None:
        return [f"--{flag}"]
    elif value is not False:
        listed = re.fullmatch(r"\[(.*)\]", text)
        several = listed or isinstance(value, list) or "tuple" in str(place.kind if place else "")
        return [f"--{flag}", *((listed[1] if listed else text).replace(",", " ").split() if several else [text])]
    return []


def as_text(value: Any) -> str:
    """Return a value as a flag takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _settled(name: str, text: str, variables: Mapping[str, str], report: Report) -> str:
    """Return a text with its variables, of which `${NAME:default}` has a value if none is given."""
    text = re.sub(r"\$\{(\w+):-?([^{}]*)\}", lambda found: variables.get(found[1], found[2]), text)
    names = [name for pair in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text) for name in pair if name]
    report.missing += [f"{name} needs ${each}: give --set {each}=VALUE" for each in names if each not in variables]
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables.get(found[1] or found[2], found[0]), text)
