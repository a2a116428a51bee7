"""Dumps of torch's as gloo makes them, and as NCCL does by its documentation: that does not run here."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megalite.process.place import Place
from megalite.watchdog import flight_recorder
from megalite.watchdog.flight_recorder import group_records
from megalite.watchdog.hang_dump import read_dumps
from megalite.watchdog.sections import Limits, Sections
from megalite.watchdog.snapshot import GroupRecord, Operation
from megalite.watchdog.watchdog import Watchdog


def entry(number: int, name: str, state: str, group: str = "0", retired: bool = False, p2p: int = 0) -> dict[str, Any]:
    """An entry of the recorder; a message where `p2p` numbers it."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (group, "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": p2p,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": 1_500_000_000,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "retired": retired,
        "is_p2p": p2p > 0,
    }


def test_states_of_nccl() -> None:
    trace = {
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "entries": [
            entry(1, "nccl:all_reduce", "completed", retired=True),
            entry(2, "nccl:_all_gather_base", "started", retired=True),
            entry(3, "nccl:_all_gather_base", "scheduled"),
        ],
    }
    (record,) = group_records(trace)
    assert (record.name, record.ranks, record.collectives) == ("0", (0, 1), 3)
    assert [one.state for one in record.operations] == ["completed", "started", "scheduled"]
    assert record.operations[1] == Operation(2, "_all_gather_base", ((4, 2),), "bfloat16", "started", 1.5)


def test_what_gloo_retires_has_ended() -> None:
    trace = {
        "pg_config": {"": {"ranks": "[]"}},
        "entries": [
            entry(1, "gloo:all_reduce", "scheduled", "megalite group 2-5 #1", retired=True),
            entry(2, "gloo:all_reduce", "scheduled", "megalite group 2-5 #1"),
        ],
    }
    (record,) = group_records(trace)
    assert record.ranks == (2, 5)
    assert [one.state for one in record.operations] == ["completed", "scheduled"]


def test_messages_of_nccl_are_counted_on_their_link() -> None:
    name = "megalite link 1-0 #1"
    trace = {
        "pg_config": {},
        "entries": [
            entry(0, "nccl:send 0->1", "completed", name, p2p=1),
            entry(0, "nccl:send 0->1", "completed", name, p2p=2),
            entry(0, "nccl:send 0->1", "started", name, p2p=3),
        ],
    }
    assert group_records(trace) == [GroupRecord(name, (1, 0), 0, (), messages=3, finished_messages=2)]


def test_a_ring_without_entries_has_no_groups() -> None:
    assert group_records({"pg_config": {}, "version": "2.10"}) == []


@pytest.mark.parametrize(("key", "value"), [("process_group", [()]), ("collective_seq_id", ()), ("p2p_seq_id", 1.0)])
def test_a_foreign_entry_without_a_name_or_a_number_is_refused(key: str, value: object) -> None:
    """One of nested tuples would be hashed for ever."""
    entry = {"process_group": ["0", "default"], "collective_seq_id": 1, "p2p_seq_id": 0, "is_p2p": False, key: value}
    with pytest.raises(TypeError, match="no name"):
        group_records({"entries": [entry], "pg_config": {}})


def test_a_rank_whose_recorder_cannot_be_read_tells_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("pg_config")

    monkeypatch.setattr(flight_recorder, "snapshot", broken)
    watchdog = Watchdog(Sections(), Limits(), lambda *_: 0, Place(1, 1, 2), folder=tmp_path)
    thread = Thread(target=watchdog._dump, args=("hang",))
    thread.start()
    thread.join()
    dump = read_dumps(tmp_path / "hang").ranks[1]
    assert dump.flight_recorder is None
    assert "thread MainThread" in dump.stacks
