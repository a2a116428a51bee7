"""Flags of other programs, such as DeepSpeed and Hugging Face's Trainer; `foreign_flags.toml` lists them."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path


@cache
def tables() -> dict[str, dict[str, str]]:
    """Read the file when it is first needed. Returns the answer for each flag, by program."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


def answer(flag: str) -> str | None:
    """Return whose flag this is (without dashes) and what to use here instead, or None if it is not listed."""
    found = (f"is a flag of {name}, here {flags[flag]}" for name, flags in tables().items() if flag in flags)
    return next(found, None)
