"""Many inputs, drawn from a seed, each in a process of its own; what does wrong is kept as a file that replays it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.fuzz import child
from tests.fuzz.child import Outcome
from tests.fuzz.edits import NATURE, Edit, apply
from tests.fuzz.kinds import KINDS
from tests.fuzz.strangers import Strangers

WATCHDOG = "watchdog"
NAMES = (*KINDS, WATCHDOG)
MOST_SHRINKING = 12
"""Runs that are spent on finding the edits of an input that matter."""


@dataclass(frozen=True)
class Finding:
    """An input that shows a fault.

    Attributes:
        kind, seed, number: what the input was drawn from.
        edits: the input, without those edits that the fault does not need.
        fault, place, output: how it ended.
        second: of the campaign.
    """

    kind: str
    seed: str
    number: int
    edits: Sequence[Edit]
    fault: str
    place: str
    output: str
    second: float

    @property
    def signature(self) -> tuple[str, str, str]:
        """Properties in which two reports of the same finding agree."""
        return self.kind, self.fault, self.place

    def corpus_entry(self) -> str:
        """The file that replays it."""
        fields = {name: getattr(self, name) for name in ("kind", "edits", "fault", "place")}
        return json.dumps(fields, indent=1) + "\n"


class Samples:
    """The valid samples of kinds, made when they are first asked for.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Sequence[object], Path] = {}
        """Paths by the steps that made them."""

    def of(self, kind: str) -> Path:
        """The folder with the sample of a kind. Raises RuntimeError where a valid sample cannot be made."""
        steps = KINDS[kind].prepare
        if steps not in self._made:
            base = self._folder / kind
            child.make_folders(base)
            begun = max((made for made in self._made if steps[: len(made)] == made), key=len, default=())
            if begun:
                shutil.copytree(self._made[begun], base, dirs_exist_ok=True)
            for step in steps[len(begun) :]:
                process = child.start(lambda step=step: step(base), base)
                _, status = os.waitpid(process, 0)
                if status:
                    said = (base / "program.stderr").read_text(errors="replace")
                    raise RuntimeError(f"the valid sample of {kind} cannot be made: {said[-2000:]}")
            self._made[steps] = base
        return self._made[steps]


def try_input(kind: str, edits: Sequence[Edit], samples: Samples, folder: Path) -> Outcome:
    """Run one input in a folder of its own, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    child.make_folders(folder)
    if kind == WATCHDOG:
        return Strangers(folder).run(edits)
    reader, sample = KINDS[kind], samples.of(kind)
    shutil.copytree(sample / "in", folder / "in", dirs_exist_ok=True, symlinks=True)
    apply(edits, folder / "in", reader.codecs, sample / "made")
    try:
        program = reader.program(folder, edits)
    except (ValueError, OSError):  # the edits leave nothing to run
        return Outcome(None, "", None, "", 0.0)
    return child.run(program, folder, lambda: reader.referee(folder), reader.allowed(folder, edits))


def draw_input(kind: str, seed: str, number: int, samples: Samples) -> list[Edit]:
    """The input of a number."""
    draw = random.Random(f"{kind} {seed} {number}")
    return Strangers.draw(draw) if kind == WATCHDOG else KINDS[kind].edits(draw, samples.of(kind))


def shrink(finding: Finding, again: Callable[[Sequence[Edit]], Outcome]) -> Finding:
    """Leave out edits, first many at once, as long as the same fault shows."""
    edits, size, left = list(finding.edits), len(finding.edits) // 2, MOST_SHRINKING
    while size and left:
        for at in range(0, len(edits), size):
            fewer = edits[:at] + edits[at + size :]
            if not fewer or not left:
                continue
            left -= 1
            outcome = again(fewer)
            if (finding.kind, outcome.fault, outcome.place) == finding.signature:
                edits = fewer
                break
        else:
            size //= 2
        size = min(size, len(edits) // 2)
    return replace(finding, edits=edits)


def campaign(
    kinds: Sequence[str], seed: str, seconds: float, inputs: int | None, jobs: int, samples: Samples, folder: Path
) -> tuple[Mapping[str, tuple[int, float]], list[Finding]]:
    """Try inputs of kinds on several processes, as much time on each kind.

    Returns:
        What of each kind was tried: inputs, and the seconds that they took; and the findings, each once.
    """
    for kind in kinds:
        if kind != WATCHDOG:
            samples.of(kind)
    begin = time.monotonic()
    workers = [_fork(_work, kinds, seed, begin, seconds, inputs, (job, jobs), samples, folder) for job in range(jobs)]
    tried: dict[str, tuple[int, float]] = dict.fromkeys(kinds, (0, 0.0))
    findings: dict[tuple[str, str, str], Finding] = {}
    for job, worker in enumerate(workers):
        _, status = os.waitpid(worker, 0)
        if status:
            raise RuntimeError("a process of the fuzzer itself has failed; what it said stands above")
        result = json.loads((folder / f"job{job}.json").read_text())
        for kind, (count, took) in result["tried"].items():
            tried[kind] = (tried[kind][0] + count, tried[kind][1] + took)
        for fields in result["findings"]:
            finding = Finding(**fields)
            findings.setdefault(finding.signature, finding)
    return tried, sorted(findings.values(), key=lambda finding: finding.second)


def _work(
    kinds: Sequence[str],
    seed: str,
    begin: float,
    seconds: float,
    inputs: int | None,
    job: tuple[int, int],
    samples: Samples,
    folder: Path,
) -> None:
    child.adopt_orphans()
    own, place = job[0], folder / f"job{job[0]}"
    numbers, took, findings = dict.fromkeys(kinds, own), dict.fromkeys(kinds, 0.0), dict[Any, Finding]()
    tried = dict.fromkeys(kinds, 0)
    known: list[Edit] = []
    """Edits that fail until the program is fixed, and each take the full time limit: files that are not regular."""
    while time.monotonic() - begin < seconds:
        open_kinds = [kind for kind in kinds if inputs is None or numbers[kind] < inputs]
        if not open_kinds:
            break
        kind = min(open_kinds, key=lambda kind: took[kind])
        number, started = numbers[kind], time.monotonic()
        numbers[kind] += job[1]
        edits = draw_input(kind, seed, number, samples)
        if any(edit[:2] in known for edit in edits):
            continue
        outcome = try_input(kind, edits, samples, place)
        tried[kind] += len(edits) if kind == WATCHDOG else 1
        if outcome.fault is not None:
            finding = Finding(
                kind, seed, number, edits, outcome.fault, outcome.place, outcome.output[-1500:], started - begin
            )
            if finding.signature not in findings:
                findings[finding.signature] = finding  # shrinking may find others on its way, which are not new
                least = shrink(finding, lambda fewer, kind=kind: try_input(kind, fewer, samples, place))
                findings[finding.signature] = least
                one = least.edits[0][1] if len(least.edits) == 1 else None
                known += [edit[:2] for edit in least.edits if isinstance(one, str) and one in NATURE]
        took[kind] += time.monotonic() - started
    result = {
        "tried": {kind: (tried[kind], took[kind]) for kind in kinds},
        "findings": [asdict(finding) for finding in findings.values()],
    }
    (folder / f"job{own}.json").write_text(json.dumps(result))


def _fork(function: Callable[..., None], *arguments: Any) -> int:
    process = os.fork()
    if not process:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            function(*arguments)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return process


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for samples and inputs, in memory where there is room."""
    memory = Path("/dev/shm")
    free = shutil.disk_usage(memory).free if memory.is_dir() else 0
    with tempfile.TemporaryDirectory(prefix="fuzz_", dir=memory if free > 2**31 else None) as folder:
        yield Path(folder)
