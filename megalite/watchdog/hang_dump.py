"""Dump files: each rank writes one into a folder when the run hangs. Writer and reader.

A rank writes `rank_00003.json`, complete or not at all: an object with the fields of `RankDump`, the flight recorder as
a `Snapshot`, and the format's version. NCCL's own watchdog may write files into the same folder: pickles of the flight
recorder alone. They are read by the restricted unpickler, and used if a rank's own file has no recorder.
"""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megalite.atomic_files import write_at_once
from megalite.errors import ConfigurationError
from megalite.small_files import read_json, read_small_file, shown
from megalite.watchdog.snapshot import COMPLETED, Operation, Snapshot, restored

VERSION = 1
_MOST_RANKS = 1_000_000
_FEW_RANKS = 128
"""Ranks of which rank 0 can read whole dumps within its seconds."""
_OWN = re.compile(r"rank_(\d+)\.json")
_FROM_TORCH = re.compile(r".*\D(\d+)")  # TORCH_FR_DUMP_TEMP_FILE with the rank behind it


@dataclass(frozen=True)
class RankDump:
    """State of one rank when the run hangs."""

    rank: int
    world_size: int
    host: str = ""
    pid: int = 0
    section: str = ""
    """Section that the rank was in, in the watchdog's words."""
    seconds: float = 0.0
    """Seconds that it had been in the section."""
    stacks: str = ""
    """Python stacks of its threads, the main one first: "thread NAME:" and the lines of `traceback.format_stack`."""
    flight_recorder: Snapshot | None = None
    step: int = 0
    """Step that it was in, or in last."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RankDump:
        """Restore from `dataclasses.asdict` and JSON. Raises ValueError, TypeError or KeyError if the values do not
        fit."""
        recorded = values["flight_recorder"]
        return restored(cls, values, flight_recorder=None if recorded is None else Snapshot.of(recorded))

    def shortened(self) -> RankDump:
        """Return what rank 0 gets. In a large run, these are only the operations at which each group has stopped."""
        recorded = self.flight_recorder
        if self.world_size <= _FEW_RANKS or recorded is None:
            return self
        groups = tuple(replace(group, operations=_last_ones(group.operations)) for group in recorded.groups)
        return replace(self, flight_recorder=replace(recorded, groups=groups))


def _last_ones(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Return the first operations that have not ended, and the last that have."""
    ended = next((at for at, one in enumerate(operations) if one.state != COMPLETED), len(operations))
    return operations[max(ended - 2, 0) : ended + 2]


def stacks() -> str:
    """Return the Python stacks of all threads of this process except the caller's, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    order = sorted(frames, key=lambda ident: ident != threading.main_thread().ident)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}" for ident in order
    )


def write_dump(folder: Path, dump: RankDump) -> Path:
    """Write a rank's file, and make the folder if needed. Raises FileError."""
    path = folder / f"rank_{dump.rank:05}.json"
    write_at_once(path, json.dumps({"version": VERSION, **asdict(dump)}).encode())
    return path


@dataclass(frozen=True)
class Dumps:
    """Contents of a folder of dumps."""

    ranks: Mapping[int, RankDump]
    silent: tuple[int, ...]
    """Ranks of the run whose flight recorder is not known."""
    problems: tuple[str, ...]
    """Files that cannot be used, with the reason."""

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """Return the flight recorders, by rank."""
        return {rank: dump.flight_recorder for rank, dump in self.ranks.items() if dump.flight_recorder is not None}


def read_dumps(folder: Path) -> Dumps:
    """Read the ranks' dumps. Raises ConfigurationError if the folder does not exist or holds none."""
    ranks: dict[int, RankDump] = {}
    problems: list[str] = []
    for path in _files(folder):
        try:
            dump = _read_own(path) if path.suffix == ".json" else _read_from_torch(path)
            if dump.world_size > _MOST_RANKS:
                raise ValueError(f"a run of {shown(dump.world_size)} ranks")
        except Exception as error:  # a damaged file can be wrong in any way, and the others still tell
            problems.append(f"{path.name} cannot be read ({type(error).__name__}: {str(error)[:200]})")
        else:
            if (own := ranks.get(dump.rank)) is not None:
                dump = replace(own, flight_recorder=own.flight_recorder or dump.flight_recorder)
            ranks[dump.rank] = dump
    if not ranks:
        raise ConfigurationError("; ".join([f"{folder} has no file of a rank{_hint(folder)}", *problems]))
    world_size = max(dump.world_size for dump in ranks.values())
    world = set(range(world_size)) if world_size > 1 else set()  # one process alone has nothing to record
    known = {rank for rank, dump in ranks.items() if dump.flight_recorder is not None}
    return Dumps(dict(sorted(ranks.items())), tuple(sorted(world - known)), tuple(problems))


def _hint(folder: Path) -> str:
    """Return a hint for a user who gives a run directory, or the folder in it that has a folder for each hang."""
    hangs = {file.parent for pattern in ("*", "hangs/*") for file in folder.glob(f"{pattern}/rank_*.json")}
    return f": give a folder in it; the newest is {max(hangs)}" if hangs else ""


def _files(folder: Path) -> list[Path]:
    """Return the files of the ranks first, then those of torch."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read ({error.strerror}): give the folder of the dumps") from error
    own = [name for name in names if _OWN.fullmatch(name)]
    return [folder / name for name in (*own, *(name for name in names if _FROM_TORCH.fullmatch(name)))]


def _read_own(path: Path) -> RankDump:
    values = read_json(path)
    if values.pop("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION} of the format")
    return RankDump.of(values)


def _read_from_torch(path: Path) -> RankDump:
    from megalite.restricted_pickle import load
    from megalite.watchdog.flight_recorder import group_records

    groups = tuple(group_records(load(io.BytesIO(read_small_file(path)))))
    match = _FROM_TORCH.fullmatch(path.name)
    assert match is not None
    rank = int(match[1])
    world_size = 1 + max((member for group in groups for member in group.ranks), default=rank)
    return RankDump(rank, world_size, flight_recorder=Snapshot(None, groups))
