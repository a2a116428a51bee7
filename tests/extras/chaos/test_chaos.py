"""Faults at named sites and moments, and the verdict on a run, with a program of milliseconds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalite.errors import ConfigurationError
from megalite.extras.chaos import injection, processes
from megalite.extras.chaos.faults import KINDS, Fault, Observed, draw, every_site, read_schedules, written
from megalite.extras.chaos.plan import read_sites
from megalite.extras.chaos.trial import Limits, Running, Trial, lose_writes, require_namespaces
from megalite.extras.chaos.verdict import Verdict, judge, summary
from tests.extras.chaos import toy
from tests.harness.tool import run_tool

TOY = Path(__file__).with_name("toy.toml")
SITES = read_sites(TOY)
COMMAND = (sys.executable, "-c", "from tests.extras.chaos.toy import main; main()", "--run", "{run}")
LIMITS = Limits(seconds=20.0, ending=0.5)


def run(folder: Path, faults: Sequence[Fault] = (), *flags: str, limits: Limits = LIMITS, cut: bool = False) -> Trial:
    return Running([*COMMAND, *flags], folder, faults, SITES, limits, cut=cut).run_to_its_end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    trial = run(tmp_path_factory.mktemp("chaos") / "undisturbed")
    assert trial.codes == [0]
    return trial


def judged(trial: Trial, undisturbed: Trial) -> Verdict:
    return judge(trial, undisturbed, SITES.results)


# ---------------------------------------------------------------------------------------------------- what occurs

RESTARTS = {"kill": 1, "stop": 1, "exception": 1, "bit-in-file": 1, "lying-fsync": 1}
AT_SITES = tuple(kind for kind in KINDS if kind not in ("network", "bit-in-memory"))


@pytest.mark.parametrize("kind", AT_SITES)
def test_a_fault_occurs_once_at_its_site_and_rank(kind: str, undisturbed: Trial, tmp_path: Path) -> None:
    seconds = {"gil": 1.0, "lying-fsync": 0.05, "full-disk": 0.015, "slow-disk": 0.05}.get(kind)
    site = "save" if "disk" in kind else "step"
    trial = run(tmp_path / "trial", [Fault(kind, 1, site, 4, seconds=seconds, seed=3)])
    (occurred,) = trial.of_kind("fault")
    assert (occurred["rank"], occurred["calls"][site]) == (1, 4)
    assert trial.codes == [85 if kind != "lying-fsync" else -9] * RESTARTS.get(kind, 0) + [0]
    assert trial.recovery(0) is not None
    verdict = judged(trial, undisturbed)
    assert verdict.holds, verdict.why
    if kind == "full-disk":
        assert "No space left on device" in (trial.folder / "failed1").read_text()
    if kind in ("slow-rank", "gil"):
        assert trial.seconds > undisturbed.seconds + 0.5
    if kind == "kill":
        assert verdict.repeated > 0


def test_a_fault_hits_the_recovery_from_another(undisturbed: Trial, tmp_path: Path) -> None:
    trial = run(tmp_path / "trial", [Fault("kill", 0, "step", 5), Fault("kill", 1, "loading", 1, after=0)])
    first, second = trial.of_kind("fault")
    assert (first["fault"], second["fault"]) == (0, 1)
    assert trial.codes == [85, 85, 0]
    assert judged(trial, undisturbed).holds


def test_faults_come_at_moments(undisturbed: Trial, tmp_path: Path) -> None:
    trial = run(tmp_path / "trial", [Fault("kill", 0, moment=0.02), Fault("stop", 1, moment=0.02)])
    assert trial.codes == [85, 85, 0]
    assert [record["fault"] for record in trial.of_kind("fault")] == [0, 1]
    assert judged(trial, undisturbed).holds


def test_the_network_of_a_command_is_cut(undisturbed: Trial, tmp_path: Path) -> None:
    try:
        require_namespaces()
    except ConfigurationError:
        pytest.skip("no network namespaces here")
    faults = [Fault("network", 1, "step", 3, seconds=0.3)]
    trial = run(tmp_path / "trial", faults, "--send", cut=True)
    assert trial.codes == [0]
    assert (trial.folder / "cut").exists()
    assert judged(trial, undisturbed).holds


def test_a_run_that_stands_still_is_named_and_ended(undisturbed: Trial, tmp_path: Path) -> None:
    trial = run(tmp_path / "trial", [Fault("gil", 0, "step", 3)], limits=Limits(1.0))
    verdict = judged(trial, undisturbed)
    assert trial.hung
    assert "it hung" in verdict.why[0]
    assert not verdict.finished


def test_a_sitecustomize_of_the_environment_is_run_too(
    monkeypatch: pytest.MonkeyPatch, undisturbed: Trial, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(f"open({str(own / 'ran')!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(own))
    trial = run(tmp_path / "trial", [Fault("kill", 0, "step", 3)])
    assert (own / "ran").exists()
    assert trial.codes == [85, 0]


def test_one_bit_of_one_parameter_is_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.arange(12, dtype=dtype).reshape(3, 4).t())
        monkeypatch.setattr(injection.gc, "get_objects", lambda parameter=parameter: [1, parameter])
        before = parameter.detach().contiguous().view(torch.uint8).clone()
        text = injection.flip_in_memory(random.Random(5))
        changed = before ^ parameter.detach().contiguous().view(torch.uint8)
        assert sum(int(byte).bit_count() for byte in changed.flatten()) == 1, text


def test_a_power_loss_takes_what_was_written_since(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    (tmp_path / "log").write_text("kept")
    kept = injection.sizes_of(tmp_path)
    with (tmp_path / "log").open("a") as file:
        file.write(", lost")
    (tmp_path / "new").write_text("lost")
    os.replace(tmp_path / "new", tmp_path / "renamed")
    lose_writes(tmp_path, kept)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "kept", "log": "kept", "renamed": ""}


# ---------------------------------------------------------------------------------------------------- the verdict

LIES = {
    "loss": "other bits: line",
    "weights": "the final weights differ: final0.bin",
    "skip": "step 12 is missing",
    "repeat": "is repeated in metrics.jsonl",
    "sample": "samples are lost or repeated",
    "orphan": "a process was left: ",
    "memory": "shared memory was left: /dev/shm/megalite_chaos_toy_",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_broken_promise_is_told(lie: str, undisturbed: Trial, tmp_path: Path) -> None:
    trial = run(tmp_path / "trial", [Fault("kill", 0, "step", 7)], "--lie", lie)
    verdict = judged(trial, undisturbed)
    for name in verdict.memory_left:
        Path("/dev/shm", name).unlink()
    assert any(LIES[lie] in line for line in verdict.why), verdict.why
    assert not summary(undisturbed, [verdict])["holds"]


# ---------------------------------------------------------------------------------------------------- the schedule

OBSERVED = Observed({0: {"step": 12, "save": 6}, 1: {"step": 12}}, 2.0)


def drawn(seed: int, **changed: Any) -> list[list[Fault]]:
    values: dict[str, Any] = {
        "trials": 20,
        "faults": 3,
        "kinds": ("kill", "exception"),
        "sites": ("step", "save", "loading"),
    }
    return draw(seed, **(values | changed), recovery=("loading",), observed=OBSERVED)


def test_the_same_seed_draws_the_same_faults() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_drawn_faults_can_occur() -> None:
    faults = [fault for trial in drawn(0) for fault in trial]
    for fault in faults:
        if fault.site is None:
            assert fault.kind == "kill"
        elif fault.site == "loading":
            assert fault.after is not None
        else:
            assert fault.occurrence <= OBSERVED.calls[fault.rank][fault.site]
    assert {fault.rank for fault in faults} == {0, 1}
    assert any(fault.after is not None for fault in faults)
    assert any(fault.moment is not None for fault in faults)


def test_every_site_and_rank_has_a_trial() -> None:
    trials = every_site(("kill", "stop"), ("step", "save", "loading"), ("loading",), OBSERVED, seed=0)
    places = [(fault.kind, fault.site, fault.rank) for (fault,) in trials]
    assert sorted(places) == sorted(
        (kind, site, rank)  # type: ignore[misc]
        for kind in ("kill", "stop")
        for site, rank in (("step", 0), ("save", 0), ("step", 1))
    )


def test_several_sites_share_a_trial_in_which_the_run_gets_on() -> None:
    """One after the other, at most one of two while it starts, and those of a step two steps after the restart."""
    calls = {"start": 1, "loading": 1, "forward": 24, "save": 4}
    observed = Observed({0: calls, 1: calls}, 10.0, steps=12)
    trials = every_site(("kill",), tuple(calls), ("start", "loading"), observed, seed=0, faults=2)
    assert sorted((fault.site, fault.rank) for trial in trials for fault in trial) == sorted(
        (site, rank) for site in calls for rank in (0, 1)
    )
    for first, second in trials:
        assert (first.after, second.after) == (None, 0)
        assert first.site in ("start", "loading")
        assert second.site in ("forward", "save")
        assert second.occurrence in ((5, 6) if second.site == "forward" else (1,))


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    trials = drawn(4)
    (tmp_path / "schedule.json").write_text(written(trials))
    assert read_schedules(tmp_path / "schedule.json", SITES.sites) == trials


# ---------------------------------------------------------------------------------------------------- the program


def test_the_program_tells_what_holds(tmp_path: Path) -> None:
    flags = ("--sites-file", TOY, "--trials", 2, "--seed", 4, "--output", tmp_path / "out")
    done = run_tool("chaos", *flags, "--", *COMMAND)
    assert done.code == 0, done.stdout + done.stderr
    assert "verdict                 all of it holds\n" in done.stdout
    found = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (found["trials"], found["hung"]) == (2, 0)
    assert found["occurred"] >= 1  # one is at a site; before the moment of the other a quick run may be over
    schedule = tmp_path / "out" / "schedule.json"
    certain = [
        {"kind": "kill", "rank": 0, "site": "step", "occurrence": 7}
    ]  # a quick run may be over before the others
    schedule.write_text(json.dumps([*json.loads(schedule.read_text()), certain]))
    again = run_tool("chaos", "--sites-file", TOY, "--schedule", schedule, "--", *COMMAND, "--lie", "skip")
    assert again.code == 93, again.stdout + again.stderr
    assert "step 12 is missing" in again.stdout


def trials(**values: Any) -> str:
    return json.dumps([[{"kind": "kill", "rank": 0, "site": "step", **values}]])


@pytest.mark.parametrize(
    ("flags", "command", "text"),
    [
        ((), (), "no command: give it after --"),
        ((), ("true",), "the command nowhere has {run}"),
        (("--kinds", "fire"), COMMAND, "--kinds fire: there is no such kind; the kinds are kill, stop"),
        (("--sites", "moon"), COMMAND, "--sites moon: there is no such site; the sites are loading, loaded"),
        (("--every-site", "--schedule", "x"), COMMAND, "give one of them"),
        (("--schedule", "/nowhere"), COMMAND, "--schedule /nowhere: "),
        ((trials(site="moon"),), COMMAND, "fault 0: there is no site 'moon'"),
        ((trials(kind="fire"),), COMMAND, "fault 0: there is no kind 'fire'"),
        ((trials(rank=2),), COMMAND, "kill of rank 2 at step, call 1: the command has 2 ranks, 0 to 1"),
        ((trials(moment=1.0),), COMMAND, "give either a site or a moment"),
        ((trials(site=None, moment=1.0, kind="gil"),), COMMAND, "give gil a site"),
        ((trials(after=0),), COMMAND, "must be the index of an earlier fault"),
        ((trials(rank="0"),), COMMAND, "rank is '0'"),
        ((trials(color=1),), COMMAND, "must be a list of lists of objects with some of kind, rank"),
        ((), (sys.executable, "-c", "print('{run}')"), "0 steps of rank 0 were seen"),
    ],
)
def test_wrong_input_is_refused(flags: tuple[str, ...], command: tuple[str, ...], text: str, tmp_path: Path) -> None:
    if flags and flags[0].startswith("["):
        (tmp_path / "schedule.json").write_text(flags[0])
        flags = ("--schedule", str(tmp_path / "schedule.json"))
    done = run_tool("chaos", "--sites-file", TOY, *flags, "--output", tmp_path / "out", "--", *command)
    assert text in done.stderr
    assert done.code in (64, 93)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('function = "tests.extras.chaos.toy:load"', 'function = "load"', "must have function = 'module:name'"),
        ("[step]", "[steps]", "'step' is missing"),
        ('recovery = ["loading"]', 'recovery = ["moon"]', "not understood: moon"),
        ('loss = "lm_loss"', "loss = 1", "[results] has texts"),
        ('loss = "lm_loss"', "", "missing"),
    ],
)
def test_a_wrong_sites_file_is_refused(old: str, new: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(TOY.read_text().replace(old, new))
    with pytest.raises(ConfigurationError, match="--sites-file") as raised:
        read_sites(path)
    assert text in str(raised.value)


def test_every_function_of_the_sites_file_exists() -> None:
    import importlib
    from operator import attrgetter

    sites = read_sites()
    for entry in (*sites.sites.values(), sites.step):
        module, _, name = entry["function"].partition(":")
        assert callable(attrgetter(name)(importlib.import_module(module)))
    assert asdict(sites.results)["loss"] == "lm_loss"
    assert toy.RANKS == 2


def test_memory_that_another_program_has_removed_meanwhile_is_not_left() -> None:
    assert list(processes.unused({"sem.removed-meanwhile"})) == []
