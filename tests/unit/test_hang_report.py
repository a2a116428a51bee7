"""`tools/hang_report.py`: the files that ranks leave, whole and damaged, put together."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.watchdog.hang_dump import RankDump, read_dumps, write_dump
from megalite.watchdog.snapshot import GroupRecord, Operation, Snapshot
from tests.harness.tool import Ended, run_tool
from tests.unit.test_flight_recorder import entry

STACKS = """thread MainThread:
  File "train.py", line {line}, in step
    step()

thread {name}:
  File "/python/threading.py", line 1002, in _bootstrap
    self._bootstrap_inner()
  File "/python/{file}", line 81, in {name}
    wait()
"""


def report(*arguments: object) -> Ended:
    return run_tool("hang_report", *arguments)


def leave(folder: Path, rank: int, collectives: int, line: int, waiting: bool = True) -> Path:
    operations = (Operation(2, "all_reduce", ((4,),), "float32", "scheduled", 1.5),) if collectives == 2 else ()
    group = GroupRecord("0", (0, 1, 2, 3), collectives, operations)
    name, file = ("monitor", "link.py") if rank == 0 else (f"loader_{rank}", "concurrent/futures/thread.py")
    stacks = STACKS.format(line=line, name=name, file=file)
    dump = RankDump(rank, 4, f"node{rank // 2}", 100 + rank, "step", 60.0 + rank, stacks, Snapshot(waiting, (group,)))
    return write_dump(folder, dump)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 2 is not in the second all-reduce, and stands at a line of its own."""
    for rank in (0, 1, 3):
        leave(tmp_path, rank, collectives=2, line=7)
    leave(tmp_path, 2, collectives=1, line=90, waiting=False)
    return tmp_path


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    group = GroupRecord("g", (1, 0), 1, (Operation(1, "all_gather", ((2, 3), ()), "int64", "started", 0.25),), 5, 4)
    dump = RankDump(1, 2, "node", 17, "data", 3.5, "stacks", Snapshot(False, (group,)), 12)
    write_dump(tmp_path, dump)
    assert read_dumps(tmp_path).ranks == {1: dump}


@pytest.mark.parametrize(("ended", "kept"), [(10, [9, 10]), (5, [4, 5, 6, 7]), (1, [1, 2, 3]), (0, [1, 2])])
def test_rank_0_of_a_large_run_gets_the_operations_where_a_rank_has_stopped(ended: int, kept: list[int]) -> None:
    states = ["completed"] * ended + ["started"] * (10 - ended)
    operations = tuple(Operation(n, "all_reduce", (), "float32", state, 0.0) for n, state in enumerate(states, 1))
    recorded = Snapshot(None, (GroupRecord("g", (0, 1), 10, operations),))
    whole = RankDump(1, 100, flight_recorder=recorded)
    assert whole.shortened() == whole
    short = replace(whole, world_size=1000).shortened().flight_recorder
    assert short is not None
    assert [one.number for one in short.groups[0].operations] == kept


def test_the_report_names_the_rank_and_sets_the_outlier_apart(folder: Path) -> None:
    assert report(folder).stdout == (
        "4 of 4 ranks have left a file\n\n"
        "BLOCKED BY rank 2\n"
        "because:\n"
        "  - all_reduce #2 of ranks 0-3 (float32 [4]): ranks 0, 1, 3 are in it, rank 2 is not: the last one was #1\n"
        "\n"
        "rank 2 on node1 (process 102) in step for 62 s:\n"
        "    thread MainThread:\n"
        '      File "train.py", line 90, in step\n'
        "        step()\n"
        "\n"
        "ranks 0, 1, 3 on node0, node1 in step for 60 s:\n"
        "    thread MainThread:\n"
        '      File "train.py", line 7, in step\n'
        "        step()\n"
    )


def test_a_thread_that_is_at_something_is_shown(folder: Path) -> None:
    busy = STACKS.format(line=7, name="loader_0", file="storage.py")
    write_dump(folder, RankDump(1, 4, section="step", stacks=busy))
    place = report(folder).stdout.partition("\nrank 1 in step for 0 s:\n")[2].partition("\nrank 2 ")[0]
    assert place.count("thread ") == 2
    assert 'File "/python/storage.py", line 81, in loader_0' in place


def test_a_line_of_code_that_begins_like_a_thread_is_code(folder: Path) -> None:
    frames = '  File "a.py", line 1, in run\n    thread = begin()\n  File "/python/threading.py", line 2, in begin\n'
    write_dump(folder, RankDump(1, 4, section="step", stacks=f"thread MainThread:\n{frames}"))
    assert "line 2, in begin" in report(folder).stdout


def test_a_thread_of_the_run_itself_that_waits_for_signals_is_not(folder: Path) -> None:
    write_dump(folder, RankDump(1, 4, section="step", stacks=STACKS.format(line=7, name="signals", file="signals.py")))
    assert "thread signals" not in report(folder).stdout


@pytest.mark.parametrize("given", ["", "hangs"])
def test_the_folder_of_the_last_hang_is_told_to_who_gives_another(folder: Path, tmp_path: Path, given: str) -> None:
    run = tmp_path / "run"
    for name in ("20260314T021500", "20260315T021500"):
        write_dump(run / "hangs" / name, RankDump(0, 1))
    ended = report(run / given)
    assert ended.code == 64
    assert ended.stderr.endswith(f"give a folder in it; the newest is {run}/hangs/20260315T021500\n")


def test_the_report_for_machines_says_the_same(folder: Path) -> None:
    found = json.loads(report(folder, "--json").stdout)
    assert found["culprits"] == [2]
    assert [finding["cause"] for finding in found["findings"]] == [True]
    assert [place["ranks"] for place in found["places"]] == [[2], [0, 1, 3]]
    assert found["without_file"] == found["problems"] == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1}', b'{"version": 1, "flight_recorder": {}}']
)
def test_a_damaged_file_is_told_and_the_rest_used(folder: Path, content: bytes) -> None:
    (folder / "rank_00002.json").write_bytes(content)
    ended = report(folder)
    assert ended.code == 0
    assert "note: rank_00002.json cannot be read (" in ended.stdout
    assert "; the rest is used\n" in ended.stdout
    assert "BLOCKED BY rank 2\n" in ended.stdout
    assert "rank 2 left no record: suspended, ended or unreachable" in ended.stdout


def test_a_missing_file_is_told(folder: Path) -> None:
    (folder / "rank_00002.json").unlink()
    assert report(folder).stdout.startswith("3 of 4 ranks have left a file\nwithout one: rank 2\n\nBLOCKED BY rank 2\n")


def test_of_one_process_alone_there_is_where_it_stood(tmp_path: Path) -> None:
    write_dump(tmp_path, RankDump(0, 1, stacks="at home"))
    expected = "1 of 1 ranks have left a file\n\nNo rank is known to block the run.\n\nrank 0:\n    at home\n"
    assert report(tmp_path).stdout == expected


def test_a_rank_without_a_recorder_still_shows_where_it_stood(folder: Path) -> None:
    write_dump(folder, RankDump(2, 4, stacks="at home"))
    ended = report(folder)
    assert "BLOCKED BY rank 2" in ended.stdout
    assert "\nrank 2:\n    at home\n" in ended.stdout


def test_dumps_of_nccls_own_watchdog_stand_in(folder: Path) -> None:
    """Files of torch, as pickles, for the ranks that have no file of their own, or one without a recorder."""
    (folder / "rank_00003.json").unlink()
    write_dump(folder, RankDump(2, 4, stacks="at home"))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    first = entry(1, "nccl:all_reduce", "completed")
    second = entry(2, "nccl:all_reduce", "started") | {"input_sizes": [[4]], "input_dtypes": ["Float"]}
    for rank, entries in ((2, [first]), (3, [first, second])):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"pg_config": config, "entries": entries}))
    found = json.loads(report(folder, "--json").stdout)
    assert found["without_file"] == found["problems"] == []
    assert found["culprits"] == [2]


class Hostile:
    """Runs something where it is unpickled freely."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("harm"),)


def test_a_pickle_that_is_no_dump_does_nothing(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    (folder / "nccl_trace_rank_2").write_bytes(pickle.dumps({"pg_config": {}, "entries": Hostile()}))
    (folder / "nccl_trace_rank_3").write_bytes(b"\x80")
    ended = report(folder)
    assert not Path("harm").exists()
    assert ended.stdout.count("cannot be read") == 2
    assert "BLOCKED BY rank 2\n" in ended.stdout


@pytest.mark.parametrize("name", ["absent", "file", "empty"])
def test_a_folder_without_dumps_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    ended = report(tmp_path / name)
    assert ended.code == 64
    assert str(tmp_path / name) in ended.stderr
