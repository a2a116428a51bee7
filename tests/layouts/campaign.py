"""Draws in turn, each judged, with a line for each and a table in the end."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import re
import shutil
import signal
import statistics
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megalite.extras.verify.judgement import LIMIT
from megalite.extras.verify.verdict import RIGHT, Verdict
from tests.layouts.draws import Draw
from tests.layouts.known import known
from tests.layouts.programs import Programs

_LIMIT = 300
"""Seconds for a draw: the processes of ranks that wait for one another do not end."""
Found = Literal["right", "accused", "known", "failed"]


@dataclass(frozen=True)
class Outcome:
    """Result of a draw.

    Attributes:
        found: known: accused of a difference that is known; failed: it did not run, or could not be judged.
        ratio: the largest distance, as a multiple of what rounding explains; None if nothing was judged.
        tensors: number of values that were judged.
        line: the verdict, or why there is none.
    """

    program: str
    number: int
    ranks: int
    flags: str
    how: str
    found: Found
    ratio: float | None
    tensors: int
    line: str
    seconds: float
    command: str

    @property
    def precision(self) -> str:
        """The precision that the flags name."""
        kinds = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "fp64": "fp64"}
        return next((kind for word, kind in kinds.items() if word in self.flags.replace("--", "").split()), "fp32")

    @property
    def shown(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (
            f"{self.program:12} {self.number:4} {self.found:7} {ratio:>9} {self.seconds:5.1f} s, {self.ranks} ranks, "
            f"{self.how}: {self.flags}" + ("" if self.found == "right" else f"\n    {self.line}\n    {self.command}")
        )


def attempt(draw: Draw, programs: Programs, keep: Path) -> Outcome:
    """Run and judge a draw. What is accused or fails is left in a folder of its own."""
    begin, folder = time.monotonic(), keep / draw.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ratio: float | None = None
    tensors = 0
    try:
        with limited(_LIMIT):
            verdict = programs.verdict(draw, folder)
    except Exception as error:
        found: Found = "failed"
        line = f"{type(error).__name__}: {_reason(str(error))}"
        (folder / "failure.txt").write_text(traceback.format_exc())
    else:
        found, line = _found(draw, verdict)
        ratio, tensors = largest(verdict), len(verdict.judgements) + len(verdict.figures)
        (folder / "verdict.json").write_text(json.dumps(verdict.as_json(), indent=1))
    (folder / "REPRODUCE.txt").write_text(f"{draw.command}\n")
    if found == "right":
        shutil.rmtree(folder)
    return Outcome(
        draw.program, draw.number, draw.ranks, draw.text, f"{draw.how}{', masked' * draw.masked}", found, ratio,
        tensors, line, time.monotonic() - begin, draw.command,
    )  # fmt: skip


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so long, and kill the processes that it has started."""

    def stop(*_: object) -> None:
        for process in multiprocessing.active_children():
            process.kill()
        raise TimeoutError(f"it has not ended after {seconds} s")

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def _found(draw: Draw, verdict: Verdict) -> tuple[Found, str]:
    if verdict.exit_code == RIGHT:
        return "right", verdict.line
    if not verdict.judgements:
        return "failed", verdict.line
    cause = known(draw, verdict)
    return ("accused", verdict.line) if cause is None else ("known", f"{cause.what} ({cause.where}): {verdict.line}")


def largest(verdict: Verdict) -> float:
    """Return the largest distance, as a multiple of what rounding explains."""
    ratios = [*(each.ratio for each in verdict.judgements), *(LIMIT * each.ratio for each in verdict.figures)]
    return max(ratios, default=0.0)


def _reason(text: str) -> str:
    """Return the first line that names an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\b\w+(Error|Exception): ", line)), (lines or [""])[-1])[:300]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the figures of each program and precision, a line each."""
    rows = ["program      precision  draws  median  95 %  largest  accused  known upstream  failed"]
    kinds = sorted({(each.program, each.precision) for each in outcomes})
    for program, kind in kinds:
        own = [each for each in outcomes if (each.program, each.precision) == (program, kind)]
        judged = sorted(each.ratio for each in own if each.ratio is not None and each.found in ("right", "accused"))
        figures = (
            f"{statistics.median(judged):7.2f} {judged[math.ceil(0.95 * len(judged)) - 1]:5.2f} {judged[-1]:8.2f}"
            if judged
            else f"{'':7} {'':5} {'':8}"
        )
        counts = {found: sum(each.found == found for each in own) for found in ("accused", "known", "failed")}
        rows.append(
            f"{program:12} {kind:9} {len(own):6} {figures} {counts['accused']:8} {counts['known']:15} "
            f"{counts['failed']:7}"
        )
    return "\n".join(rows)


def as_lines(outcomes: Iterable[Outcome]) -> str:
    """Return outcomes as JSON, one a line."""
    return "".join(json.dumps(asdict(each)) + "\n" for each in outcomes)


def from_lines(text: str) -> list[Outcome]:
    """Return the outcomes of `as_lines`."""
    return [Outcome(**json.loads(line)) for line in text.splitlines()]
