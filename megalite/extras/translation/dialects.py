"""Words of programs that speak Megatron-LM's flags and have their own beside them; `dialects.toml` lists them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from megalite.config.megatron_flags import names, tables
from megalite.config.run import fields_by_name
from megalite.extras.translation.report import Report

MEGATRON_DEEPSPEED, NEOX, PRIMUS = "Megatron-DeepSpeed", "GPT-NeoX", "Primus"
_OFF = ("false", "0", "none", "None", "")


@cache
def _tables() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Read the file, whose comments explain each table."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


@cache
def words_of(program: str) -> Mapping[str, tuple[str, str]]:
    """Return the table that each of a program's own words stands in, and its reason there or its flags."""
    found: dict[str, tuple[str, str]] = {}
    for table, entries in _tables()[program].items():
        for key, text in entries.items():
            if table in ("flags", "values"):
                found.setdefault(key.partition(" ")[0], (table, text))
            else:
                found |= dict.fromkeys(text.split(), (table, "" if table == "read" else key))
    return found


@cache
def own_words(program: str) -> frozenset[str]:
    """Return the words that tell a program: those that Megatron-LM does not have."""
    return frozenset(name for name in words_of(program) if not is_megatrons(name))


def is_megatrons(flag: str) -> bool:
    """Tell whether a flag (without dashes) is one of Megatron-LM's or of megalite's."""
    name = flag.replace("-", "_")
    return flag in _names() or name in fields_by_name() or name.removeprefix("no_") in fields_by_name()


@cache
def _names() -> frozenset[str]:
    return frozenset(names()) | frozenset(tables()["value_shorthands"])


def translated(program: str, name: str, values: Sequence[str], given: str, report: Report) -> bool:
    """Translate one of a program's own words that a table translates, and report what became of it.

    Args:
        name: the word, without dashes and with hyphens.
        values: its values; `true` or `false` for a key that is one of them.
        given: the word and its values as the file has them.

    Returns:
        False for words that are left to code, or are Megatron-LM's.
    """
    programs, text = _tables()[program], " ".join(values)
    meant = programs.get("values", {}).get(f"{name} {text}".strip())
    if meant is None and name in programs.get("flags", {}):
        meant = f"{programs['flags'][name]} {text}"
    if meant:
        report.add(given, *meant.split())
        return True
    table, reason = words_of(program).get(name, ("read", ""))
    if meant is not None:
        report.idle.append(f"{given}: already so")
    elif table == "notes":
        report.notes.append(f"{given}: {reason}")
    elif table == "idle":
        report.idle.append(f"{given.split()[0].rstrip(':')}: {reason}")
    elif table == "refused" and text in _OFF and values:
        report.idle.append(f"{given.split()[0].rstrip(':')}: off")
    elif table == "refused":
        report.refused.append(f"{given}: {reason}")
    else:
        return False
    return True
