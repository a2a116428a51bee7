"""Disturb a command with faults, at named sites and random moments, and tell what it loses.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python tools/chaos.py --trials 5 --faults 2 --output /tmp/chaos -- \\
        torchrun --standalone --nproc-per-node 2 pretrain_gpt.py ... --save {run} --resume auto

The command runs undisturbed once, and then once for each trial, in a run directory of its own that takes the place of
{run}. If it ends before it has finished, it is started again. Exit codes: 0 every trial finished with the bits of the
undisturbed run, each step once, and nothing left behind; 93 not so, or the undisturbed run failed; 64 flags or files
are wrong. docs/chaos.md describes faults, sites and the verdict.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megalite.atomic_files import write_atomically
from megalite.config.fields import PositiveFloat, PositiveInt
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import EXIT_FATAL, EXIT_FINISHED, ConfigurationError, MegaliteError
from megalite.extras.chaos.faults import KINDS, Fault, draw, every_site, read_schedules, require_ranks, written
from megalite.extras.chaos.plan import SITES, Sites, read_sites
from megalite.extras.chaos.trial import Limits, Running, Trial, require_namespaces, require_run
from megalite.extras.chaos.verdict import Verdict, judge, shown, summary
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say

RESTARTS = 3
"""Starts of a disturbed run beyond one for each fault, and the first."""


@dataclass(frozen=True)
class Options:
    """Flags of the program; the command stands after --."""

    trials: PositiveInt = 1
    """Number of disturbed runs with drawn faults."""
    faults: PositiveInt = 1
    """Number of faults drawn for each of them; with --every-site, the most of a run, one after the other."""
    every_site: bool = False
    """Each of --kinds at each site and rank, in as many runs as --faults leaves, in place of drawn ones."""
    schedule: str | None = None
    """File with the faults of each run (a schedule.json that an earlier call has left), in place of drawn ones."""
    kinds: tuple[str, ...] = ("kill",)
    """Kinds of faults to draw from: kill, stop, exception, gil, bit-in-memory, bit-in-file, full-disk, slow-disk,
    slow-rank, network, lying-fsync."""
    sites: tuple[str, ...] | None = None
    """Sites to draw from; default: all of the sites file."""
    sites_file: str | None = None
    """TOML file with the sites and results of another program than megalite's."""
    seed: int = 0
    """Seed of the drawn faults: the same seed disturbs the same command in the same way."""
    timeout: PositiveFloat = 120.0
    """Seconds without a step, a new process or a fault after which a run hangs, and is killed."""
    output: str | None = None
    """Folder for the runs, their logs, schedule.json and verdict.json; default: a temporary one, which is removed."""


def main() -> None:
    """Disturb a command."""
    argv = sys.argv[1:]
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parse_tool_arguments(Options, description=__doc__ or "", argv=own)
    sites = read_sites(SITES if options.sites_file is None else Path(options.sites_file))
    check(options, sites, command)
    given = None if options.schedule is None else read_schedules(Path(options.schedule), sites.sites)
    with tempfile.TemporaryDirectory(prefix="chaos") as temporary:
        folder = Path(options.output or temporary).resolve()
        if (folder / "undisturbed").exists():
            raise ConfigurationError(f"--output {folder}: has runs of an earlier call; name another folder")
        sys.exit(disturb(options, sites, command, given, folder))


def check(options: Options, sites: Sites, command: Sequence[str]) -> None:
    """Raise ConfigurationError for flags that are wrong."""
    require_run(command)
    for kind in options.kinds:
        if kind not in KINDS:
            raise ConfigurationError(f"--kinds {kind}: there is no such kind; the kinds are {', '.join(KINDS)}")
    for site in options.sites or ():
        if site not in sites.sites:
            raise ConfigurationError(f"--sites {site}: there is no such site; the sites are {', '.join(sites.sites)}")
    if options.schedule is not None and options.every_site:
        raise ConfigurationError("--schedule and --every-site: give one of them")


def disturb(
    options: Options, sites: Sites, command: Sequence[str], given: list[list[Fault]] | None, folder: Path
) -> int:
    """Run the command undisturbed and disturbed, show the verdict, and return the exit code."""
    cut = "network" in (options.kinds if given is None else [fault.kind for trial in given for fault in trial])
    if cut:
        require_namespaces()

    def run(name: str, faults: Sequence[Fault]) -> Trial:
        limits = Limits(options.timeout, restarts=RESTARTS if faults else 0)
        return Running(command, folder / name, faults, sites, limits, cut=cut).run_to_its_end()

    undisturbed = run("undisturbed", [])
    if undisturbed.codes != [0] or not any(undisturbed.of_kind("step")):
        log = (undisturbed.folder / "start0.log").read_text(errors="replace")[-2000:]
        steps = sum(record["rank"] == 0 for record in undisturbed.of_kind("step"))
        raise MegaliteError(
            f"the undisturbed run ended with exit codes {undisturbed.codes}, and {steps} steps of rank 0 were seen; it "
            f"must finish by itself, in steps that the sites file names:\n{log}"
        )
    observed = undisturbed.observed
    wanted = tuple(options.sites or sites.sites)
    trials = given or (
        every_site(options.kinds, wanted, sites.recovery, observed, options.seed, options.faults)
        if options.every_site
        else draw(options.seed, options.trials, options.faults, options.kinds, wanted, sites.recovery, observed)
    )
    for trial in trials:
        require_ranks(trial, observed)
    write_atomically(folder / "schedule.json", written(trials).encode())
    say(f"undisturbed: {undisturbed.seconds:.1f} s on {observed.world_size} ranks; {len(trials)} disturbed runs follow")
    verdicts: list[Verdict] = []
    for number, trial in enumerate(trials):
        verdicts.append(judge(run(f"trial{number}", trial), undisturbed, sites.results))
        say("\n".join(lines_of(number, verdicts[-1])))
    found = {"command": list(command), "seed": options.seed, **summary(undisturbed, verdicts)}
    write_atomically(folder / "verdict.json", (json.dumps(found, indent=1) + "\n").encode())
    say("\n".join(shown(found)))
    return EXIT_FINISHED if found["holds"] else EXIT_FATAL


def lines_of(number: int, verdict: Verdict) -> list[str]:
    """Return the lines that show one trial."""
    faults = [
        f"{fault['text']} "
        + ("(did not occur)" if not fault["occurred"] else "(no step followed)" if fault["recovery"] is None
           else f"({fault['recovery']:.2f} s to the next step)")
        for fault in verdict.faults
    ]  # fmt: skip
    state = "holds" if verdict.holds else "DOES NOT HOLD"
    return [
        f"trial {number}: {state}, {verdict.seconds:.1f} s, {verdict.repeated} steps repeated: {'; '.join(faults)}",
        *(f"    {line}" for line in verdict.why),
    ]


command = partial(run_tool, main)
