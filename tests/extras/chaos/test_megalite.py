"""Faults in real runs of megalite: nothing is lost, to the bit. The marked ones take hours, and print their figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalite.extras.chaos.faults import Fault
from megalite.extras.chaos.plan import read_sites
from megalite.extras.chaos.trial import Limits, Running, Trial
from megalite.extras.chaos.verdict import Verdict, judge
from tests.end_to_end.runs import GPT2, MOCK, words
from tests.harness.tool import run_tool

SITES = read_sites()
FLAGS = (
    *MOCK,
    *GPT2,
    *words("--train-iters 12 --save-interval 3 --eval-interval 4 --lr-decay-style constant"),
    *words("--eval-iters 1 --use-distributed-optimizer --watchdog-min-seconds 30"),
    *words("--distributed-timeout-minutes 1"),
    *words("--save {run} --resume auto"),
)


def command(ranks: int) -> list[str]:
    own = [sys.executable, "-m", "benchmarks.recovery", "--as-srun", str(ranks), "--"]
    return [*own, sys.executable, "pretrain_gpt.py", *FLAGS]


def run(folder: Path, faults: Sequence[Fault] = (), ranks: int = 2) -> Trial:
    return Running(command(ranks), folder, faults, SITES, Limits(120.0), cut=False).run_to_its_end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    trial = run(tmp_path_factory.mktemp("chaos") / "undisturbed")
    assert trial.codes == [0], (trial.folder / "start0.log").read_text()
    return trial


def judged(trial: Trial, undisturbed: Trial) -> Verdict:
    return judge(trial, undisturbed, SITES.results)


@pytest.mark.wide  # test_chaos.py has a program of a few lines
@pytest.mark.parametrize(
    "faults",
    [
        (Fault("kill", 1, "reduce", 5), Fault("kill", 0, "connected", 1, after=0)),
        (Fault("bit-in-file", 0, "save.done", 3, seed=5),),
        (Fault("lying-fsync", 1, "save.begin", 3, seconds=0.1),),
    ],
    ids=lambda faults: faults[0].kind,
)
def test_a_run_loses_nothing(faults: tuple[Fault, ...], undisturbed: Trial, tmp_path: Path) -> None:
    trial = run(tmp_path / "trial", faults)
    verdict = judged(trial, undisturbed)
    assert verdict.holds, verdict.why
    assert len(trial.occurred) == len(faults)
    assert verdict.repeated > 0


@pytest.mark.wide
def test_a_flipped_weight_is_told(undisturbed: Trial, tmp_path: Path) -> None:
    """Nothing in a run without copies of it notices: then the verdict must not call it the same."""
    verdict = judged(run(tmp_path / "trial", [Fault("bit-in-memory", 0, "data", 2, seed=1)]), undisturbed)
    assert verdict.finished
    assert not verdict.same_records
    assert verdict.why[0].startswith("other bits: ")


WARM = words("--warm-restart --memory-checkpoint-interval 1")


@pytest.mark.wide
def test_a_rank_that_is_suspended_while_it_starts_again_is_replaced(undisturbed: Trial, tmp_path: Path) -> None:
    faults = (Fault("kill", 1, "reduce", 5), Fault("stop", 1, "copy.load", 1, after=0))
    trial = Running([*command(2), *WARM], tmp_path / "trial", faults, SITES, Limits(120.0), cut=False).run_to_its_end()
    verdict = judged(trial, undisturbed)
    assert verdict.holds, verdict.why
    assert len(trial.occurred) == 2
    assert trial.codes == [0]


OF_FOUR = words("--tp 2 --train-iters 24 --watchdog-min-seconds 10")
"""Flags for four ranks: enough steps for several faults, and a short limit, as most of a trial is waiting for it."""


def under_torchrun(ranks: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "pretrain_gpt.py", *FLAGS]


def disturb(output: Path, flags: Sequence[object], command: Sequence[str]) -> dict[str, Any]:
    """Disturb a command, show the verdicts, and return them once all hold."""
    done = run_tool("chaos", *flags, "--output", output, "--", *command)
    sys.stdout.write(done.stdout)
    assert done.code == 0, done.stdout
    found: dict[str, Any] = json.loads((output / "verdict.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_every_site_and_rank(kind: str, tmp_path: Path) -> None:
    disturb(tmp_path / "out", ("--every-site", "--kinds", kind), [*under_torchrun(4), *OF_FOUR])


@pytest.mark.slow
def test_every_site_and_rank_with_copies_in_memory(tmp_path: Path) -> None:
    flags = ("--every-site", "--faults", 5, "--kinds", "kill", "--timeout", 180)
    found = disturb(tmp_path / "out", flags, [*command(4), *OF_FOUR, *WARM])
    faults = [fault for verdict in found["verdicts"] for fault in verdict["faults"]]
    assert {fault["site"] for fault in faults} >= {"copy.load", "copy.take", "copy.commit", "copy.done"}
    assert all(fault["occurred"] for fault in faults)
    # The copy of a step is complete within the next step or, where that one is faster, the one after it.
    assert all(verdict["repeated"] <= 3 * len(verdict["faults"]) for verdict in found["verdicts"])


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True], ids=["torchrun", "warm"])
def test_two_hundred_random_trials(warm: bool, tmp_path: Path) -> None:
    kinds = ("kill", "stop", "bit-in-file", "slow-rank", "slow-disk", "lying-fsync")
    ran = [*command(4), *OF_FOUR, *WARM] if warm else under_torchrun(2)
    found = disturb(tmp_path / "out", ("--trials", 200, "--faults", 2, "--timeout", 180, "--kinds", *kinds), ran)
    assert found["trials"] == 200
