"""Generator of the page of all flags: `python -m megalite.config.flags_page > docs/flags.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

from megalite.config import megatron_flags
from megalite.config.command_line import flag_groups
from megalite.config.help import default_words, field_docstrings, spelled, value_words
from megalite.config.megatron_latents import RopeType
from megalite.config.run import RunConfig, section_types
from megalite.process.output import say

_HEAD = """\
# All flags

<!-- Written by `python -m megalite.config.flags_page > docs/flags.md`: do not edit. -->

The flags of `pretrain_gpt.py` (`megalite-pretrain`), by section. `--config FILE` reads a YAML file of the same fields
by section, spelled with underscores, and flags override it. "Also" has other spellings, most of them Megatron-LM's,
with the value that they stand for. Megatron-LM's flags that are not on this page are refused, with the reason.
"""
_COLUMNS = """\
| flag | value | default | meaning |
|---|---|---|---|
"""
_SETTLED = """
## Flags of Megatron-LM that change nothing

They are accepted, with a note when a run starts.

| why | flags |
|---|---|
"""


def page() -> str:
    """Return the page."""
    tables, parts, titles = megatron_flags.tables(), [_HEAD], field_docstrings(RunConfig)
    for section, kind in section_types().items():
        kinds, meanings = get_type_hints(kind), field_docstrings(kind)
        parts.append(f"\n## `{section}`\n\n{titles[section]}\n\n{_COLUMNS}")
        parts += [_row(entry, kinds[entry.name], meanings[entry.name]) for entry in fields(kind)]
    parts.append(_SETTLED)
    for fact, flags in (entry for table in megatron_flags.ACCEPTED for entry in tables[table].items()):
        names = ", ".join(f"`--{flag.partition('=')[0]}`" for flag in flags.split())
        parts.append(f"| {_cell(fact)} | {names} |\n")
    accepted = tables["accepted_values"].items()
    values = [f"`--{flag} {value}`" for flag, row in accepted for value in row["values"].split()]
    return "".join([*parts, f"| these flags have these values, and take no others | {', '.join(values)} |\n"])


def _row(entry: Field[Any], kind: Any, meaning: str) -> str:
    flag = entry.name.replace("_", "-")
    also = ", ".join(_others(flag))
    text = f"{_cell(meaning)} Also {also}." if also else _cell(meaning)
    return f"| {spelled(entry, kind)} | {value_words(kind)} | {default_words(entry)} | {text} |\n"


def _others(flag: str) -> Iterator[str]:
    """Yield the other spellings of a flag."""
    tables = megatron_flags.tables()
    for other, name in tables["aliases"].items():
        if name == flag:
            yield f"`--{other}`"
    shorthands = {f"--{other}": meant for other, meant in tables["shorthands"].items()}
    for other, by_value in tables["value_shorthands"].items():
        shorthands |= {f"--{other} {value}": meant for value, meant in by_value.items()}
    shorthands[f"--{megatron_flags.NO_POSITION_EMBEDDING}"] = "--position-embedding-type none"
    for kind in get_args(RopeType):
        shorthands[f"--{megatron_flags.ROPE_TYPE} {kind}"] = f"--position-embedding-type {kind}"
    for name in megatron_flags.USE_FSDP:
        shorthands[f"--{name}"] = "--data-parallel-sharding-strategy optim_grads_params"
    for other, meant in shorthands.items():
        for name, values in flag_groups(meant.split()):
            if name in (flag, f"no-{flag}"):
                yield f"`{other}` ({' '.join(values) or ('off' if name != flag else 'on')})"


def _cell(text: str) -> str:
    """Return the text with the characters escaped that have a meaning in a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    say(page(), end="")
