"""Rank, local rank and world size of this process, and the address of rank 0, from the launcher; without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TypeVar

from megalite.errors import ConfigurationError
from megalite.process.launchers import (
    GENERATION,
    HOROVOD_SETTINGS,
    RANK_VARIABLES,
    UNCLEAR_RANKS,
    LauncherInfo,
    Number,
    launchers,
    read_number,
)
from megalite.process.output import say

Value = TypeVar("Value")
_MEANINGS = {
    "RANK": "its RANK",
    "LOCAL_RANK": "its LOCAL_RANK within its node (0 if it is alone there)",
    "MASTER_ADDR": "the same MASTER_ADDR, rank 0's host, which all reach",
    "MASTER_PORT": "the same MASTER_PORT, a free port there",
}


@dataclass(frozen=True)
class Place:
    """Position of this process among those that a launcher started, and where rank 0 is."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None = None
    """Number of ranks on this node; None if the launcher does not tell."""
    host: str = "localhost"
    """Host of rank 0, which all ranks reach."""
    port: int = 0
    """Port of the store on it; 0 for one process alone."""
    servers: int = 0
    """Number of the last ranks that the launcher calls parameter servers."""

    @property
    def on_one_machine(self) -> bool:
        """Tell whether all ranks run on this machine, as far as the launcher tells."""
        return self.local_world_size == self.world_size

    def require_servers(self, number: int) -> None:
        """Raise ConfigurationError if the launcher tells of parameter servers, and the run has not as many."""
        if self.servers not in (0, number):
            raise ConfigurationError(
                f"TF_CONFIG's cluster has {self.servers} ps, but {number} of the ranks are servers: give "
                f"megalite-pretrain --asynchronous parameter-server --num-servers {self.servers}, or leave ps out of "
                "the cluster"
            )


def place_from_environment(*, with_servers: bool = False) -> Place:
    """Return this process's place. Without a launcher it is rank 0 of 1.

    torchrun's variables come first. If torchrun itself did not set them, a person or a script did: then they must agree
    with those of the launcher, and only what they leave out is taken from it. RANK=0 WORLD_SIZE=1 is always alone, with
    a warning if a launcher has started several processes.

    Args:
        with_servers: whether the program may have parameter servers, and checks their number.

    Raises:
        ConfigurationError: a variable is wrong or missing; or two variables contradict each other.
    """
    environment = os.environ
    told = _torchrun(environment)
    alone = (told.rank, told.world_size) == (Number(0, "RANK"), Number(1, "WORLD_SIZE"))
    of_agent = GENERATION in environment and told.rank is not None  # of a warm restart, which may number ranks anew
    if "TORCHELASTIC_RUN_ID" not in environment and not alone and not of_agent:
        for launcher in _launchers(environment):
            told = told.within(launcher)
    if alone and not of_agent:
        with suppress(ConfigurationError):  # a contradiction does not matter
            for launcher in _launchers(environment):
                _warn_of_others(launcher)
    if told.world_size is None:
        unclear = (read_number(environment, name) for name in UNCLEAR_RANKS)
        number = told.rank or told.local_rank or next(filter(None, unclear), None)
        if number is None:
            return Place(0, 0, 1)
        raise ConfigurationError(
            f"{_who_set(told)}{number} without WORLD_SIZE, the number of ranks: set it on all ranks, or for one "
            f"process alone set RANK=0 WORLD_SIZE=1"
        )
    if told.world_size.value < 1:
        raise ConfigurationError(f"{told.world_size}: must be at least 1, the number of ranks")
    place = _place(told, told.world_size.value)
    if not with_servers:
        place.require_servers(0)
    if place.rank == 0 and told.launcher == "horovodrun":
        for name in filter(environment.get, HOROVOD_SETTINGS):
            _warn(f"{name} changes nothing here: {HOROVOD_SETTINGS[name]} does")
    return place


def _launchers(environment: Mapping[str, str]) -> Iterator[LauncherInfo]:
    yield from launchers(environment)
    if "TF_CONFIG" in environment:
        from megalite.process.tf_config import read_tf_config

        yield read_tf_config(environment)


def place_or_alone() -> Place:
    """Return this process's place, to report its failure. If it cannot be found out, it is one process alone.

    The rank is then that of the first variable that has one: it decides how soon a rank reports what all have met.
    """
    try:
        return place_from_environment(with_servers=True)
    except ConfigurationError:
        texts = (os.environ.get(name, "") for name in RANK_VARIABLES)
        return Place(next((int(text) for text in texts if text.isascii() and text.isdigit()), 0), 0, 1)


def _torchrun(environment: Mapping[str, str]) -> LauncherInfo:
    """Return what the variables say that torchrun sets, or a person for it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world_size, local_rank, local_size = (read_number(environment, name) for name in names)
    port = environment.get("MASTER_PORT", "")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigurationError(f"MASTER_PORT={port!r} is not a port: give a number from 1 to 65535")
    host = environment.get("MASTER_ADDR") or None
    return LauncherInfo("", rank, world_size, local_rank, local_size, host, int(port) if port else None)


def _warn_of_others(launcher: LauncherInfo) -> None:
    """Warn, in the first of several processes that a launcher started, that each runs alone."""
    size, rank = launcher.world_size, launcher.rank
    if size and size.value > 1 and not (rank and rank.value):
        _warn(f"RANK=0 WORLD_SIZE=1: each process runs alone, despite {size}, which {launcher.launcher} set")


@cache
def _warn(text: str) -> None:
    say(f"warning: {text}", to_error=True)


def _who_set(told: LauncherInfo) -> str:
    return f"{told.launcher} set " if told.launcher else ""


def _place(told: LauncherInfo, world_size: int) -> Place:
    """Return the place of one of `world_size` ranks. Raises ConfigurationError if the launcher does not tell enough."""
    rank, local_rank, local_size = (
        number.value if number else None for number in (told.rank, told.local_rank, told.local_world_size)
    )
    if rank is not None and rank >= world_size:
        raise ConfigurationError(f"{told.rank}: {told.world_size} ranks are numbered 0 to {world_size - 1}")
    if world_size == 1:
        return Place(0, local_rank or 0, 1)
    host, port = told.host, told.port
    if local_size is not None and local_size > world_size:
        raise ConfigurationError(f"{told.local_world_size}: there are only {told.world_size} ranks in all")
    if local_size is not None and local_rank is not None and local_rank >= local_size:
        raise ConfigurationError(
            f"{told.local_rank}: {told.local_world_size} ranks are numbered 0 to {local_size - 1}, on each node"
        )
    if rank is None or local_rank is None or host is None or port is None:
        given = {"RANK": rank, "LOCAL_RANK": local_rank, "MASTER_ADDR": host, "MASTER_PORT": port}
        missing = [name for name, value in given.items() if value is None]
        raise ConfigurationError(
            f"{_who_set(told)}{told.world_size} without {', '.join(missing)}, which torchrun sets: "
            f"give each rank {', '.join(_MEANINGS[name] for name in missing)}"
        )
    return Place(rank, local_rank, world_size, local_size, host, port, told.servers or 0)


def ranks_by_value(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Return the ranks that have each value. `values`: by rank."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_text(ranks: Iterable[int], most: int = 16) -> str:
    """Return ranks as text: `rank 3` or `ranks 0, 2-5`. If there are more than `most` pieces, the rest is counted."""
    return numbered("rank", ranks, most)


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Return the numbers in order, each once, in runs of those that follow each other."""
    by_distance = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    return [[number for _, number in run] for _, run in by_distance]


def numbered(what: str, numbers: Iterable[int], most: int = 16) -> str:
    """Return numbers as text: `step 3` or `steps 0, 2-5`, shortened as in `ranks_text`."""
    runs = consecutive(numbers)
    ordered = [number for run in runs for number in run]
    pieces = [piece for run in runs for piece in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(pieces) > most:
        pieces = [*pieces[:most], f"... ({len(ordered)} of them)"]
    return f"{what}{'s' if len(ordered) > 1 else ''} {', '.join(pieces)}"
