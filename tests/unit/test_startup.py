"""The first line of a run."""

from __future__ import annotations

import io
import sys

import pytest

from megalite.config import parse_arguments
from megalite.lifecycle.startup import Startup
from megalite.process.place import Place

SIZES = "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 --lr 1"
CONFIG = parse_arguments(f"{SIZES} --tp 2 --pp 2 --sequence-parallel".split()).config


def test_the_layout_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(8):
        Startup(Place(rank, rank, 8)).announce(CONFIG)
    assert capsys.readouterr().out == "starting: 4 layers, hidden 8, on TP 2 with SP x PP 2 x DP 2\n"


class Unwritable(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def flush(self) -> None:
        raise self.error


def test_a_full_disk_does_not_end_a_run_and_a_reader_who_has_gone_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Unwritable(OSError(28, "No space left on device")))
    Startup(Place(0, 0, 8)).announce(CONFIG)
    monkeypatch.setattr(sys, "stdout", Unwritable(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        Startup(Place(0, 0, 8)).announce(CONFIG)
