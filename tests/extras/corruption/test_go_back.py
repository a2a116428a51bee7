"""Runs in which a bit flips go back, and end with the bits of one in which none did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.extras.chaos.faults import Fault
from megalite.extras.chaos.trial import Limits, Running, Trial
from tests.end_to_end.runs import words
from tests.extras.chaos.test_megalite import SITES, WARM, command, judged, undisturbed
from tests.extras.corruption.corruption_run import HASHES

__all__ = ["undisturbed"]

FLIP = Fault("bit-in-memory", 1, "data", 8, seed=1)


def run(folder: Path, flags: str, undisturbed: Trial, fault: Fault = FLIP) -> tuple[Trial, str, int]:
    """Run with a fault, to the bits of the undisturbed run. Returns it, what its first start has said, and how many
    steps it has run again."""
    whole = [*command(2), *words(flags), "--on-corruption", "go-back"]
    trial = Running(whole, folder, [fault], SITES, Limits(120.0), cut=False).run_to_its_end()
    log = (trial.folder / "start0.log").read_text()
    verdict = judged(trial, undisturbed)
    assert verdict.holds, (verdict.why, log)
    return trial, log, verdict.repeated


def sick(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "run" / "sick_nodes.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.wide
def test_a_flipped_weight_costs_steps_and_no_bits(undisturbed: Trial, tmp_path: Path) -> None:
    """The run saves every three steps: it goes back from step 8, before its update, to 6."""
    trial, log, repeated = run(tmp_path / "trial", f"{HASHES} 1", undisturbed)
    assert trial.codes == [85, 0]
    assert repeated == 1  # step 7
    assert "rank 1 (" in log
    assert "has weights or state that have changed between two updates: " in log
    assert "--resume auto goes back to step 6" in log
    (line,) = sick(trial.folder)
    assert (line["rank"], line["why"], line["step"]) == (1, "memory changed", 8)


@pytest.mark.wide
def test_suspect_checkpoints_are_not_loaded(undisturbed: Trial, tmp_path: Path) -> None:
    """Weights are compared at step 10 only, without ZeRO: those of steps 6 and 9 are suspect."""
    fault = Fault("bit-in-memory", 1, "data", 7, seed=1)
    flags = f"{HASHES} 5 --data-parallel-sharding-strategy no_shard --no-use-distributed-optimizer"
    _, log, _ = run(tmp_path / "trial", flags, undisturbed, fault)
    assert "and so may iter_0000006, iter_0000009" in log
    assert "goes back to step 3" in log


@pytest.mark.wide
def test_suspect_copies_in_memory_are_not_loaded(undisturbed: Trial, tmp_path: Path) -> None:
    trial, log, _ = run(tmp_path / "trial", f"{HASHES} 1 {' '.join(WARM)}", undisturbed)
    assert trial.codes == [0]
    assert "rank 1 (" in log
    assert "or to newer copies in memory" in log
    assert "went on after step" in log
