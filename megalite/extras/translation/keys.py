"""Settings of other programs by their keys: the tables of the keys, their values, and the flags of both."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.yaml_file import nearest
from megalite.errors import ConfigurationError
from megalite.extras.translation.report import Report
from megalite.small_files import shown


@cache
def tables() -> dict[str, dict[str, str]]:
    """Read the tables of keys, whose comments explain them."""
    with Path(__file__).with_name("settings.toml").open("rb") as file:
        return tomllib.load(file)


def by_key(table: str) -> dict[str, str]:
    """Return the reason for each key of a table."""
    return {key: reason for reason, keys in tables()[table].items() for key in keys.split()}


@cache
def keys() -> frozenset[str]:
    """Return every key of DeepSpeed that is known, by its path."""
    return frozenset([*tables()["flags"], *tables()["read"]["keys"].split(), *by_key("idle"), *by_key("refused")])


def is_deepspeeds(key: str) -> bool:
    """Tell whether a key, or a section, stands at the top of DeepSpeed's configurations."""
    return any(key == name or name.startswith(f"{key}.") for name in keys())


def leaves(settings: Mapping[str, Any], whole: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return values by their path, such as `zero_optimization.stage`, except for sections that are treated as one."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        inner = isinstance(value, Mapping) and path not in whole
        found |= leaves(value, whole, f"{path}.") if inner else {path: value}
    return found


def as_number(key: str, value: Any, kind: Callable[[Any], bool] = lambda value: True) -> str:
    """Return a number as a flag takes it. Raises ConfigurationError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not kind(value):
        raise ConfigurationError(f"{key} is {shown(value)}: expected a number")
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def add_number(values: Mapping[str, Any], report: Report, key: str, flag: str, note: str = "") -> None:
    """Add the flag of a number, and a note to its key."""
    report.add(f"{key}{note}", flag, as_number(key, values[key]))


def is_on(values: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return whether something is on. Raises ConfigurationError if the value is not true or false."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"{key} is {shown(value)}: expected true or false")
    return default if value is None else value


def whole_number(values: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number above 0, or None if it is not given."""
    if key not in values:
        return None
    return as_count(key, values[key], least=1)


def as_count(key: str, value: Any, *, least: int = 0, most: int = 2**53 - 1) -> int:
    """Return a whole number between two. Raises ConfigurationError if it is none."""
    return int(as_number(key, value, lambda number: least <= number <= most and number == int(number)))


def add_others(
    values: Mapping[str, Any],
    report: Report,
    known: Collection[str],
    idle: Mapping[str, str],
    refused: Mapping[str, str],
) -> None:
    """Name the keys that have no flag: without effect, refused, or unknown."""
    for key, value in values.items():
        off = value is False or value is None or (type(value) is int and value <= 1)  # True is not of this type
        off = off or value in ("", [])
        off = off or (isinstance(value, Mapping) and False in (value.get("enabled"), value.get("enable")))
        if key in idle or (key in refused and off):
            report.idle.append(f"{key}: {idle.get(key, 'off')}")
        elif key in refused:
            report.refused.append(f"{key}: {refused[key]}")
        elif key not in known:
            name = key if key.isprintable() and len(key) <= 100 else shown(key)
            report.refused.append(f"{name}: unknown key{nearest(key[:100], known)}")
