"""ledger.jsonl has the decisions that depart from the plain rule, and those of one trajectory after a resume."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn

import megalite
from megalite.errors import CheckpointError
from megalite.storage import open_directory
from megalite.training.ledger import Decision, Ledger, ranges
from tests.harness.object_store import ObjectStore

LATE = Decision("late", [1], [(4, 5), (12, 13)], "left out", "2.5 s, the limit is 2.0")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("numbers", "found"),
    [([], []), ([3], [(3, 3)]), ([7, 5, 6, 5, 2, 9], [(2, 2), (5, 7), (9, 9)]), (range(4), [(0, 3)])],
)
def test_samples_are_ranges(numbers: Any, found: list[tuple[int, int]]) -> None:
    assert ranges(numbers) == found


def test_a_line_is_a_decision_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    ledger = Ledger(path, 0)
    assert ledger.write(3, [LATE, Decision("shares", [0, 1], [(0, 7)], "trained", "1:1 to 3:2")]) is None
    late, shares = lines(path)
    assert late == {
        "step": 3,
        "kind": "late",
        "source": [1],
        "samples": [[4, 5], [12, 13]],
        "outcome": "left out",
        "why": "2.5 s, the limit is 2.0",
    }
    assert (shares["kind"], shares["source"], shares["outcome"]) == ("shares", [0, 1], "trained")


def test_a_resume_leaves_one_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, 0) as ledger:
        for step in (2, 3, 3, 4, 5):
            ledger.write(step, [LATE])
    path.write_text(path.read_text() + '{"step": 6, "ki')  # killed in the middle of a line
    with Ledger(path, 3) as ledger:
        assert ledger.note is not None
        assert ledger.note.startswith(f"WARNING: {path} has 1 damaged line: it was changed, or could not be written.")
        ledger.write(4, [LATE])
    assert [line["step"] for line in lines(path)] == [2, 3, 3, 4]
    assert list(tmp_path.iterdir()) == [path]
    assert Ledger(path, 0).note is None
    assert not path.read_bytes()


@pytest.mark.parametrize("damage", [b"\xff{", b"5", b"{}", b'{"step": "2"}', b'{"step": true}', b"[" * 99999])
def test_a_damaged_line_is_left_out_and_told(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path, 0).write(1, [LATE])
    whole = path.read_bytes()
    path.write_bytes(damage + b"\n" + whole)
    assert "has 1 damaged line:" in str(Ledger(path, 1).note)
    assert path.read_bytes() == whole


def test_what_is_no_regular_file_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"ledger\.jsonl failed: not a regular file, but a pipe.*--save"):
        Ledger(path, 1)
    assert path.is_fifo()


def test_an_object_has_all_lines_whenever_it_is_published(tmp_path: Path) -> None:
    file = tmp_path / "run" / "ledger.jsonl"
    path = open_directory(f"{ObjectStore.protocol}://{file}")
    with Ledger(path, 0) as ledger:
        for step in (1, 2, 3):
            ledger.write(step, [LATE])
            if step == 2:
                ledger.publish()
        assert [line["step"] for line in lines(file)] == [1, 2]
    assert [line["step"] for line in lines(file)] == [1, 2, 3]
    Ledger(path, 1).publish()
    assert [line["step"] for line in lines(file)] == [1]


def test_a_full_disk_keeps_the_lines_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", 0)
    with monkeypatch.context() as patch:
        patch.setattr(ledger._lines, "_file", open("/dev/full", "ab", buffering=0))  # noqa: SIM115
        told = ledger.write(1, [LATE])
        assert told is not None
        assert told.endswith("failed: No space left on device. They will be written later")
        assert ledger.write(2, [LATE]) is None
    ledger.close()
    assert [line["step"] for line in lines(tmp_path / "ledger.jsonl")] == [1, 2]


def train(save: Path, steps: int, decisions: dict[int, list[Decision]]) -> list[int]:
    """Train to a step, with these decisions by step, and fail. Returns the steps of the ledger, if there is one."""
    dataset = [(torch.ones(2), torch.ones(1))] * 8
    with (
        suppress(KeyError),
        megalite.Trainer(
            nn.Linear(2, 1),
            loss=lambda outputs, batch: (outputs - batch[1]).square().mean(),
            dataset=dataset,
            micro_batch_size=2,
            optimizer=megalite.SGD(lr=0.1),
            save=save,
            save_interval=2,
            quiet=True,
        ) as run,
    ):
        while run.iteration < steps:
            run._trainer.decisions = decisions.get(run.iteration + 1, ())
            run.step()
        raise KeyError("otherwise the last step would be saved")
    path = save / "ledger.jsonl"
    return [line["step"] for line in lines(path)] if path.exists() else []


def test_a_run_writes_it_if_something_was_decided_and_cuts_it_also_without(tmp_path: Path) -> None:
    assert train(tmp_path / "plain", 3, {}) == []
    assert not (tmp_path / "plain" / "ledger.jsonl").exists()
    assert train(tmp_path / "run", 3, {1: [LATE], 3: [LATE]}) == [1, 3]
    copytree(tmp_path / "run", tmp_path / "resumed")
    assert train(tmp_path / "resumed", 4, {}) == [1]  # it went on from step 2
