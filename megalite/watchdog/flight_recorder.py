"""Reader of torch's flight recorder: a ring buffer of this process's last collectives, always on.

torch (2.11 to 2.14) records by default, 2000 collectives with the stack of each. On gloo, recording takes 1 to 1.5 µs
of the 8 µs of a collective. The stacks cannot be turned off. Nothing is recorded if TORCH_FR_BUFFER_SIZE is 0. The
recorder can be read at any time and from any thread, because reading needs no lock that a blocked collective holds. On
gloo, a collective that has ended is not marked completed but `retired`, and messages are not recorded, only counted.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalite.parallel import collectives
from megalite.torch_internals import flight_records, groups_and_members, sequence_number
from megalite.watchdog.snapshot import COMPLETED, GroupRecord, Operation, Snapshot

KEPT = 100  # collectives of each group in a snapshot

_NAME = re.compile(r"megalite (group|link) (\d+(?:-\d+)*) #\d+")  # as parallel/mesh.py names its groups
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}


def snapshot() -> Snapshot:
    """Return what this rank has recorded, and whether it waits now; empty without a process group."""
    # Counted before the entries are read: an operation that begins meanwhile is then missing from both or has an entry.
    groups = {record.name: record for record in map(_counts, groups_and_members())}
    for recorded in flight_records():
        for record in group_records(recorded):
            # On gloo, the count is of collectives and messages together: what is recorded of either comes first.
            counted = groups.get(record.name, record)
            groups[record.name] = replace(
                record,
                ranks=counted.ranks,
                collectives=record.collectives or counted.collectives,
                messages=record.messages or counted.messages,
            )
    return Snapshot(_waiting(), tuple(record for record in groups.values() if len(record.ranks) != 1))


def _counts(group_and_members: tuple[Any, Mapping[int, int]]) -> GroupRecord:
    """Return the counts of the group itself: its operations may have left the ring, and gloo's messages never enter
    it."""
    group, members = group_and_members
    count = 0
    with suppress(RuntimeError):  # a backend that does not count
        count = sequence_number(group)
    named = _NAME.fullmatch(group.group_name)
    link = named is not None and named[1] == "link"
    ranks = tuple(sorted(members, key=members.__getitem__))
    return GroupRecord(group.group_name, ranks, 0 if link else count, messages=count if link else 0)


def group_records(trace: Mapping[str, Any]) -> list[GroupRecord]:
    """Return the groups in a dump of torch's, read from JSON or from a pickle of plain containers.

    Raises TypeError, KeyError, IndexError or ValueError if it is not such a dump.
    """
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in trace.get("entries", ()):
        name, numbers = entry["process_group"][0], (entry["collective_seq_id"], entry["p2p_seq_id"])
        if not isinstance(name, str) or not all(type(number) is int for number in numbers):
            raise TypeError("an entry whose group has no name, or which has no number")  # else they may hash for ever
        entries.setdefault(name, []).append(entry)
    return [_record(name, trace["pg_config"].get(name), of_group) for name, of_group in entries.items()]


def _record(name: str, configuration: Mapping[str, str] | None, entries: Iterable[Mapping[str, Any]]) -> GroupRecord:
    """Return what a group did: how many operations and messages, and the last KEPT operations."""
    # Operations that NCCL was given together have one number: the last entry is of all of them.
    operations = {entry["collective_seq_id"]: _operation(entry) for entry in entries if not entry["is_p2p"]}
    messages = {entry["p2p_seq_id"]: _state(entry) for entry in entries if entry["is_p2p"]}
    # NCCL records the ranks of a group; gloo does not, but the names of megalite's own groups contain them.
    named = _NAME.fullmatch(name)
    members = json.loads(configuration["ranks"]) if configuration else named[2].split("-") if named else ()
    return GroupRecord(
        name=name,
        ranks=tuple(map(int, members)),
        collectives=max(operations, default=0),
        operations=tuple(operations[number] for number in sorted(operations)[-KEPT:]),
        messages=max(messages, default=0),
        finished_messages=max((number for number, state in messages.items() if state == COMPLETED), default=0),
    )


def _operation(entry: Mapping[str, Any]) -> Operation:
    dtypes = entry["input_dtypes"]
    return Operation(
        number=entry["collective_seq_id"],
        name=entry["profiling_name"].partition(":")[2],
        shapes=tuple(map(tuple, entry["input_sizes"])),
        dtype=_DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else "",
        state=_state(entry),
        time=entry["time_created_ns"] / 1e9,
    )


def _state(entry: Mapping[str, Any]) -> str:
    # On NCCL, what is retired and not completed has timed out.
    ended_on_gloo = entry["retired"] and entry["profiling_name"].startswith("gloo:")
    return COMPLETED if ended_on_gloo else str(entry["state"])


def _waiting() -> bool | None:
    """Tell whether the main thread is in a communication: its innermost frame is in torch or collectives.py."""
    if any(dist.get_backend(group) != "gloo" for group, _ in groups_and_members()):
        return None
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None
    file = frame.f_code.co_filename
    return file == collectives.__file__ or Path(file).is_relative_to(Path(dist.__file__).parent)
