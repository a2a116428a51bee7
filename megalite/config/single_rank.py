"""Flags by which a program runs one rank without the others, to learn what it holds and does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.atomic_files import require_output
from megalite.config.command_line import asked_help, split_flags
from megalite.config.fields import NonNegativeInt, PositiveInt, changed, flag_of
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class Flags:
    """The flags, which --help describes (parse.py)."""

    dry_run: bool = False
    dry_run_json: str | None = None
    world_size: PositiveInt | None = None
    rank: NonNegativeInt | None = None
    as_rank: NonNegativeInt | None = None
    of: PositiveInt | None = None


@dataclass(frozen=True)
class SingleRank:
    """The rank to run without the others."""

    rank: int
    world_size: int
    computes: bool
    """False for a dry run."""
    json: str | None = None
    """File for the results of a dry run."""


def take_single_rank(argv: Sequence[str], world_size: int) -> tuple[SingleRank | None, list[str]]:
    """Return the rank that the flags want to run alone, if they do, and the other flags.

    `world_size`: the number of ranks of a dry run for which the flags give none.

    Raises ConfigurationError for values that do not fit.
    """
    if asked_help(argv) is not None:
        return None, list(argv)
    own, rest = split_flags(Flags, argv)
    if not own:
        return None, rest
    from megalite.config.tool_arguments import parse_tool_arguments  # imported here: few runs have these flags

    flags = parse_tool_arguments(Flags, "", own)
    if flags.as_rank is not None or flags.of is not None:
        if flags.as_rank is None or flags.of is None or flags != Flags(as_rank=flags.as_rank, of=flags.of):
            raise ConfigurationError("--as-rank R and --of N belong together, without --dry-run and its flags")
        _require_rank("--as-rank", flags.as_rank, "--of", flags.of)
        return SingleRank(flags.as_rank, flags.of, computes=True), rest
    given = changed(flags, "*")
    if not given:
        return None, rest
    if not flags.dry_run:
        raise ConfigurationError(f"{flag_of(given[0])} is for --dry-run, which is not given")
    rank, ranks = flags.rank or 0, flags.world_size or world_size
    _require_rank("--rank", rank, "--world-size", ranks)
    if flags.dry_run_json is not None:
        require_output("--dry-run-json", flags.dry_run_json)
    return SingleRank(rank, ranks, computes=False, json=flags.dry_run_json), rest


def _require_rank(of_rank: str, rank: int, of_size: str, world_size: int) -> None:
    if rank >= world_size:
        raise ConfigurationError(f"{of_rank} {rank}: with {of_size} {world_size}, ranks are 0 to {world_size - 1}")
