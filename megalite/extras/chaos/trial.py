"""One run of a command from its first start to its end, with the faults of a schedule and a restart after each end."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalite.atomic_files import open_itself, write_at_once
from megalite.errors import EXIT_CONFIGURATION, EXIT_FATAL, EXIT_FINISHED, ConfigurationError
from megalite.extras.chaos import processes
from megalite.extras.chaos.faults import Fault, Observed
from megalite.extras.chaos.plan import Sites
from megalite.process import programs

RUN = "{run}"
"""Word in a command that stands for the run directory."""
_INJECTED = Path(__file__).parent / "injected"
_POLL = 0.01


@dataclass(frozen=True)
class Limits:
    """Limits of a run.

    Attributes:
        seconds: without a step, a new process or a fault for so long, the run hangs.
        restarts: number of restarts, beyond one for each fault, after which it is given up.
        ending: seconds in which the command's processes must have ended after the command itself.
    """

    seconds: float = 120.0
    restarts: int = 3
    ending: float = 30.0


@dataclass
class Trial:
    """Run of a command, as it was seen.

    Attributes:
        folder: holds the records, the output and the run directory.
        faults: the schedule.
        records: lines of records.jsonl.
        codes: exit code of each start.
        hung: the run made no progress, and was killed.
        occurred: the record of each fault that has occurred, by its number in the schedule.
        recovered: the time of the first step after each of these faults.
        given_up: why the run was not restarted, "" if it finished.
        processes_left: processes that had not ended within `Limits.ending` after their command.
        memory_left: names in /dev/shm that the run has left behind.
        seconds: from the first start to the end.
    """

    folder: Path
    faults: Sequence[Fault]
    records: list[dict[str, Any]] = field(default_factory=list)
    occurred: dict[int, dict[str, Any]] = field(default_factory=dict)
    recovered: dict[int, float] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    hung: bool = False
    given_up: str = ""
    processes_left: list[str] = field(default_factory=list)
    memory_left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the records of a kind ("process", "step", "fault", "note")."""
        return (record for record in self.records if record["record"] == kind)

    @property
    def observed(self) -> Observed:
        """Calls of the sites, and the duration, of an undisturbed run."""
        calls: dict[int, dict[str, int]] = {}
        steps = [record["time"] for record in self.of_kind("step")]
        for record in self.records:
            if record["record"] in ("process", "site", "step"):
                calls.setdefault(record["rank"], {}).update(record.get("calls", {}))
        numbers = {record["number"] for record in self.of_kind("step")}
        return Observed(calls, max(steps, default=0.0) - min(steps, default=0.0), len(numbers))

    def add(self, record: dict[str, Any]) -> None:
        """Add a record. A step after a fault is the recovery from it.

        While power is being lost, the rank goes on: then it is a step of the process that takes its place.
        """
        self.records.append(record)
        if record["record"] == "fault":
            self.occurred[record["fault"]] = record
        elif record["record"] == "step":
            for number, occurred in self.occurred.items():
                lost = record["process"] == occurred["process"] and self.faults[number].kind == "lying-fsync"
                if number not in self.recovered and record["rank"] == occurred["rank"] and not lost:
                    self.recovered[number] = record["time"]

    def recovery(self, number: int) -> float | None:
        """Return the seconds from a fault to the next finished step; None if there was none, or no such fault."""
        after = self.recovered.get(number)
        return None if after is None else float(after - self.occurred[number]["time"])

    def repeated(self) -> int:
        """Return how many steps were computed again, as the rank that repeated most."""
        counts: dict[int, dict[int, int]] = {}
        for record in self.of_kind("step"):
            of_rank = counts.setdefault(record["rank"], {})
            of_rank[record["number"]] = of_rank.get(record["number"], 0) + 1
        return max((sum(count - 1 for count in of_rank.values()) for of_rank in counts.values()), default=0)


def require_run(command: Sequence[str]) -> None:
    """Raise ConfigurationError unless the command names the run directory."""
    if not command:
        raise ConfigurationError(f"no command: give it after --, with {RUN} where its run directory stands")
    if not any(RUN in word for word in command):
        raise ConfigurationError(
            f"the command nowhere has {RUN}, which stands for the run directory: each run needs its own, as with "
            f"--save {RUN} --resume auto"
        )


class Running:
    """Command that is being disturbed."""

    def __init__(
        self, command: Sequence[str], folder: Path, faults: Sequence[Fault], sites: Sites, limits: Limits, *, cut: bool
    ) -> None:
        """Prepare the folder. `cut`: the command gets a network of its own, which faults may cut."""
        self.trial = Trial(folder, faults)
        self._limits, self._cut = limits, cut
        self._command = [word.replace(RUN, str(self.trial.run)) for word in command]
        self._mark = secrets.token_hex(8)
        self._position = 0
        self._progress = time.monotonic()
        self._until_recovered = False
        self._pending = dict(enumerate(faults))
        self._kept: dict[str, int] = {}
        self._network_until = 0.0
        (folder / "fired").mkdir(parents=True)
        plan = {
            "run": str(self.trial.run),
            "sites": sites.sites,
            "step": sites.step,
            "checkpoints": sites.results.checkpoints,
            "faults": [{**asdict(fault), "seconds": fault.duration} for fault in faults],
        }
        write_at_once(folder / "plan.json", json.dumps(plan).encode())
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_INJECTED), os.environ.get("PYTHONPATH")))),
            "MEGALITE_CHAOS": str(folder / "plan.json"),
            processes.MARK: self._mark,
        }

    def run_to_its_end(self, *, until_recovered: bool = False) -> Trial:
        """Start the command, and again as long as it ends without having finished.

        `until_recovered`: its end is the recovery from the last fault, after which it is killed.
        """
        self._until_recovered = until_recovered
        trial, began, before = self.trial, time.monotonic(), processes.shared_memory()
        try:
            while self._start_once():
                pass
        finally:
            processes.end(self._mark)
        self._read()
        trial.seconds = time.monotonic() - began
        trial.memory_left = list(processes.unused(processes.shared_memory() - before))
        return trial

    def _start_once(self) -> bool:
        """Run the command once. Returns whether it must be started again."""
        trial, exit_file = self.trial, self.trial.folder / "exit_code"
        exit_file.unlink(missing_ok=True)
        words = (
            ["unshare", "--net", "--", sys.executable, "-c", _LOOPBACK, *self._command] if self._cut else self._command
        )
        with open_itself(trial.folder / f"start{len(trial.codes)}.log", "wb") as log:
            process = programs.start(
                words,
                stdout=log,
                stderr=log,
                env={**self._environment, "MEGALITE_EXIT_FILE": str(exit_file)},
                start_new_session=True,
            )
        self._progress = time.monotonic()
        power = False
        while process.poll() is None and not trial.hung and not self._is_over:
            time.sleep(_POLL)
            self._read()
            power = self._act(process.pid)
            if power:
                break
            trial.hung = time.monotonic() - self._progress > self._limits.seconds
        if power or trial.hung or self._is_over:
            processes.end(self._mark)
        code = process.wait()
        if power:
            lose_writes(trial.run, self._kept)
        left = processes.wait_for_end(self._mark, self._limits.ending)
        trial.processes_left += [f"{each} {processes.name_of(each)}" for each in left]
        processes.end(self._mark)
        trial.codes.append(code)
        told = exit_file.read_text().strip() if exit_file.exists() else ""
        if code == EXIT_FINISHED or trial.hung or self._is_over:
            return False
        if told in (str(EXIT_CONFIGURATION), str(EXIT_FATAL)):
            trial.given_up = f"exit code {told}"
        elif len(trial.codes) > len(trial.faults) + self._limits.restarts:
            trial.given_up = f"not finished after {len(trial.codes)} starts"
        return not trial.given_up

    @property
    def _is_over(self) -> bool:
        return self._until_recovered and len(self.trial.recovered) == len(self.trial.faults)

    def _read(self) -> None:
        """Read the records that have been added."""
        path = self.trial.folder / "records.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        if whole:
            self._progress = time.monotonic()
            for line in whole.splitlines():
                self.trial.add(json.loads(line))

    # ------------------------------------------------------------------------------------------------ the tool's faults

    def _act(self, process: int) -> bool:
        """Let faults occur that are not a rank's own. Returns whether the power is lost."""
        now = time.monotonic()
        if self._network_until and now >= self._network_until:
            self._network_until = 0.0
            _set_loopback(process, "up")
        for number, fault in list(self._pending.items()):
            if number not in self.trial.occurred and not (self._is_due(number, now) and self._strike(number, fault)):
                continue
            if fault.kind == "lying-fsync":
                if now < self.trial.occurred[number]["time"] + fault.duration:
                    continue
            elif fault.kind == "network":
                self._network_until = now + fault.duration
                _set_loopback(process, "down")
            del self._pending[number]
            if fault.kind == "lying-fsync":
                self._kept = self.trial.occurred[number]["sizes"]
                return True
        return False

    def _is_due(self, number: int, now: float) -> bool:
        """Tell whether the moment of a fault has come."""
        fault, trial = self.trial.faults[number], self.trial
        if fault.moment is None:
            return False
        if fault.after is not None:
            since = trial.occurred.get(fault.after, {}).get("time")
        elif number:
            since = trial.recovered.get(number - 1)
        else:
            since = next((record["time"] for record in trial.of_kind("step")), None)
        return since is not None and now >= since + fault.moment

    def _strike(self, number: int, fault: Fault) -> bool:
        """Send the signal of a fault at a moment to its rank, if there is such a process now."""
        trial = self.trial
        victim = next((each["process"] for each in reversed(trial.records) if each["rank"] == fault.rank), None)
        if fault.kind != "network":
            if victim is None or victim not in processes.marked(self._mark):
                return False
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        line = {"record": "fault", "rank": fault.rank, "process": victim, "time": time.monotonic(), "fault": number}
        with open_itself(trial.folder / "records.jsonl", "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
        write_at_once(trial.folder / "fired" / str(number), b"")
        self._read()
        return True


def lose_writes(run: Path, kept: Mapping[str, int]) -> None:
    """Cut the files below a folder to the sizes that they had, as after a power loss; newer files are empty.

    Names survive, as they may: a file system writes its journal apart from the contents.
    """
    for path in run.rglob("*"):
        if path.is_file():
            size = kept.get(str(path.stat().st_ino), 0)
            if size < path.stat().st_size:
                os.truncate(path, size)


_LOOPBACK = (
    "import os, subprocess, sys; subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def _set_loopback(process: int, state: str) -> None:
    """Set the loopback network of the command up or down."""
    command = ["nsenter", f"--net=/proc/{process}/ns/net", "ip", "link", "set", "lo", state]
    if programs.run(command, capture_output=True).returncode:
        raise ConfigurationError(f"the network of the command could not be set {state}: {' '.join(command)} failed")


def require_namespaces() -> None:
    """Raise ConfigurationError unless this user can give a command a network of its own."""
    try:
        tried = programs.run(
            ["unshare", "--net", "--", "ip", "link", "set", "lo", "up"], capture_output=True, text=True
        )
        wrong = "" if tried.returncode == 0 else (tried.stderr.strip() or f"exit code {tried.returncode}")
    except OSError as error:
        wrong = str(error)
    if wrong:
        raise ConfigurationError(
            f"--kinds network needs a network namespace of the command's own: as root, with the programs unshare, "
            f"nsenter and ip ({wrong}); leave it out of --kinds"
        )
