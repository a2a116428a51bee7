"""Flags by which a program runs one rank without the others, to learn what it holds and does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.command_line import flag_groups
from megalite.errors import ConfigurationError

HELP = (
    "--dry-run builds one rank (--rank, by default 0) of --world-size ranks without a device, runs a step in which "
    "nothing is computed, and prints what the rank holds, sends and computes; --dry-run-json FILE writes all of it. "
    "--as-rank R --of N runs a few steps of rank R of N on this device, as if the other ranks were there."
)
_NUMBERS = ("world-size", "rank", "as-rank", "of")


@dataclass(frozen=True)
class Alone:
    """The rank to run without the others."""

    rank: int
    world_size: int
    computes: bool
    """False for a dry run."""
    json: str | None = None
    """File for the results of a dry run."""


def take_alone(argv: Sequence[str], world_size: int) -> tuple[Alone | None, list[str]]:
    """Return the rank that the flags want to run alone, if they do, and the other flags.

    `world_size`: the number of ranks of a dry run for which the flags give none.

    Raises ConfigurationError for values that do not fit.
    """
    found: dict[str, str | None] = {}
    rest: list[str] = []
    for flag, values in flag_groups(argv):
        if flag not in ("dry-run", "dry-run-json", *_NUMBERS):
            rest += [*([f"--{flag}"] if flag else []), *values]
            continue
        if len(values) != (flag != "dry-run"):
            raise ConfigurationError(f"--{flag}: give it {'no value' if flag == 'dry-run' else 'one value'}")
        found[flag] = values[0] if values else None
    numbers = {flag: _number(flag, found[flag]) for flag in _NUMBERS if flag in found}
    if "as-rank" in found or "of" in found:
        if set(found) != {"as-rank", "of"}:
            raise ConfigurationError("--as-rank R and --of N belong together, without --dry-run and its flags")
        return _alone(numbers["as-rank"], numbers["of"], "--as-rank", "--of", computes=True), rest
    if "dry-run" in found:
        ranks = numbers.get("world-size", world_size)
        alone = _alone(numbers.get("rank", 0), ranks, "--rank", "--world-size", json=found.get("dry-run-json"))
        return alone, rest
    if found:
        raise ConfigurationError(f"--{next(iter(found))} is for --dry-run, which is not given")
    return None, rest


def _alone(
    rank: int, world_size: int, of_rank: str, of_size: str, *, computes: bool = False, json: str | None = None
) -> Alone:
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigurationError(f"{of_rank} {rank}: with {of_size} {world_size}, ranks are 0 to {world_size - 1}")
    return Alone(rank, world_size, computes, json)


def _number(flag: str, text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise ConfigurationError(f"--{flag} {text}: give a whole number") from None
