"""torchrun shows an error as the root cause, and the ranks of a node report it once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megalite.lifecycle import torchrun_record


def test_torchrun_shows_the_first_error_as_the_root_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {rank: tmp_path / "attempt_0" / str(rank) / "error.json" for rank in range(2)}
    for file in files.values():
        file.parent.mkdir(parents=True)
    for rank, first in ((1, True), (0, False)):
        monkeypatch.setenv(torchrun_record.VARIABLE, str(files[rank]))
        assert torchrun_record.record(f"--lr is wrong, says rank {rank}") is first
    failures = {rank: ProcessFailure(rank, 10 + rank, 64, str(file)) for rank, file in files.items()}
    root = str(ChildFailedError("pretrain_gpt.py", failures)).partition("Root Cause")[2]
    assert "traceback : --lr is wrong, says rank 1\n" in root
    again = tmp_path / "attempt_1" / "0" / "error.json"
    monkeypatch.setenv(torchrun_record.VARIABLE, str(again))
    assert torchrun_record.record("another attempt reports anew")
    assert again.exists()


def test_a_rank_that_explains_the_death_of_another_is_the_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun has seen the death before, and gives the others 30 seconds to end."""
    file = tmp_path / "attempt_0" / "1" / "error.json"
    file.parent.mkdir(parents=True)
    killed = ProcessFailure(0, 10, -9, str(tmp_path / "attempt_0" / "0" / "error.json"))
    killed.timestamp -= 30  # of torchrun
    monkeypatch.setenv(torchrun_record.VARIABLE, str(file))
    assert torchrun_record.record("error: rank 0 has ended without a message")
    failures = {0: killed, 1: ProcessFailure(1, 11, 85, str(file))}
    block = str(ChildFailedError("pretrain_gpt.py", failures))
    assert re.search(r"traceback : error: rank 0 has ended without a message\n=+$", block)


def test_without_torchrun_every_error_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(torchrun_record.VARIABLE, raising=False)
    assert torchrun_record.record("wrong")
    monkeypatch.setenv(torchrun_record.VARIABLE, str(tmp_path / "file" / "error.json"))
    (tmp_path / "file").touch()
    assert torchrun_record.record("a file that cannot be written hides nothing")
    monkeypatch.chdir(tmp_path)
    for path in ("error.json", str(tmp_path / "4711" / "error.json")):  # a file that a person has named
        monkeypatch.setenv(torchrun_record.VARIABLE, path)
        for _ in range(2):
            assert torchrun_record.record("an error of an earlier run hides nothing")
