"""Score a detector of silent bugs on the museum.

    python -m museum.score verify [NAME ...]
    python -m museum.score mine --command "python my_detector.py {case}"
    python -m museum.score --page

Each entry is run twice, wrong and right, and the detector sees each run as a case (`museum/cases.py`) without being
told which it is. It prints one line of JSON: {"verdict": "wrong" | "right" | "unknown", "tensor": "gradient of ...",
"hypothesis": "..."}. An entry is caught if the wrong run is accused and the right one is not. Whether the first tensor
and the hypothesis are the right ones is scored apart. Scores go to museum/scores/DETECTOR.json, each in the place of
an earlier one of the same entry; --page writes them into docs/museum.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from museum.cases import MissingProgram, make_case
from museum.detectors.finding import Finding
from museum.entries import Entry, entries

SCORES = Path(__file__).parent / "scores"
Detector = Callable[[Path], Finding]
Maker = Callable[..., None]
"""Function that makes a case, as `make_case`: of a detector that needs to see the run itself."""


@dataclass(frozen=True)
class Score:
    """Score of a detector on an entry.

    Attributes:
        verdict: on the wrong run.
        of_right: verdict on the right run.
        tensor, hypothesis: what the detector said of the wrong run.
        seconds: for both runs of the detector.
    """

    entry: str
    verdict: str
    of_right: str
    tensor: str | None
    hypothesis: str | None
    is_tensor: bool
    is_hypothesis: bool
    seconds: float

    @property
    def caught(self) -> bool:
        return self.verdict == "wrong" and self.of_right != "wrong"


def detector(name: str, command: str | None = None) -> Detector:
    """Return a detector of museum/detectors, or one that is a command with {case} for the folder."""
    if command is None:
        found: Detector = importlib.import_module(f"museum.detectors.{name}").detect
        return found

    def run(case: Path) -> Finding:
        words = [word.replace("{case}", str(case)) for word in shlex.split(command)]
        said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        try:
            return Finding(**json.loads(said.stdout.strip().splitlines()[-1]))
        except (LookupError, TypeError, ValueError) as error:
            print(f"{command}: exit code {said.returncode}, and its last line is no finding ({error})", file=sys.stderr)
            return Finding("unknown")

    return run


def maker(name: str, command: str | None = None) -> Maker:
    """Return what makes the cases of a detector: its own function, if it must see the program run."""
    own = None if command is not None else importlib.import_module(f"museum.detectors.{name}")
    return getattr(own, "make_case", make_case)


def score(entry: Entry, detect: Detector, folder: Path, make: Maker = make_case) -> Score:
    """Return the score of a detector on an entry, whose cases are made in a folder.

    Raises:
        MissingProgram: the entry's program is not on this machine.
    """
    findings: dict[bool, Finding] = {}
    seconds = 0.0
    for wrong in random.sample((True, False), 2):
        case = folder / secrets.token_hex(4)  # neither names nor the order tell which it is
        make(entry, case, wrong=wrong)
        start = time.monotonic()
        findings[wrong] = detect(case)
        seconds += time.monotonic() - start
    found, answer = findings[True], entry.answer
    return Score(
        entry.name,
        found.verdict,
        findings[False].verdict,
        found.tensor,
        found.hypothesis,
        answer.is_tensor(found.tensor),
        answer.is_hypothesis(found.hypothesis),
        round(seconds, 1),
    )


def read_scores(name: str) -> dict[str, Score]:
    """Return the scores of a detector by entry, by the answers that the entries have now."""
    path = SCORES / f"{name}.json"
    answers = {entry.name: entry.answer for entry in entries()}
    found = {}
    for row in json.loads(path.read_text()) if path.exists() else []:
        if (answer := answers.get(row["entry"])) is not None:
            row["is_tensor"], row["is_hypothesis"] = (
                answer.is_tensor(row["tensor"]),
                answer.is_hypothesis(row["hypothesis"]),
            )
            found[row["entry"]] = Score(**row)
    return found


def write_scores(name: str, scores: Mapping[str, Score]) -> None:
    """Write the scores of a detector, those of entries that are there."""
    SCORES.mkdir(exist_ok=True)
    rows = [asdict(scores[entry.name]) for entry in entries() if entry.name in scores]
    (SCORES / f"{name}.json").write_text(f"{json.dumps(rows, indent=1)}\n")


def summary(scores: Sequence[Score]) -> str:
    """Return the sums in one line."""
    caught = [each for each in scores if each.caught]
    tensors = sum(each.is_tensor for each in caught)
    hypotheses = sum(each.is_hypothesis for each in caught)
    accused = sum(each.of_right == "wrong" for each in scores)
    return (
        f"{len(caught)} of {len(scores)} caught, {tensors} at the right tensor, {hypotheses} with the right hypothesis "
        f"first; {accused} right runs accused"
    )


def shown(score: Score) -> str:
    """Return a score in one line."""
    marks = f"{'caught' if score.caught else 'MISSED'} {'tensor' if score.is_tensor else '-':6}"
    marks += f" {'hypothesis' if score.is_hypothesis else '-':10}"
    right = "" if score.of_right == "right" else f" (right run: {score.of_right})"
    return f"{marks} {score.entry}: {score.tensor}: {score.hypothesis}{right}"


def main() -> None:
    """Score a detector, print a line an entry, and write the scores; or write the page of all scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("detector", nargs="?", help="of museum/detectors, or a name for one of your own with --command")
    parser.add_argument("entries", nargs="*", help="names of entries; all, if none is given")
    parser.add_argument("--command", help="command of a detector, with {case} for the folder of a case")
    parser.add_argument("--page", action="store_true", help="write the scores that are there into docs/museum.md")
    given = parser.parse_args()
    known = {entry.name: entry for entry in entries()}
    if unknown := [name for name in given.entries if name not in known]:
        parser.error(f"the museum has no {', '.join(unknown)}; it has {', '.join(known)}")
    if not given.detector and not given.page:
        parser.error("name a detector, or give --page")
    if given.detector:
        detect, make = detector(given.detector, given.command), maker(given.detector, given.command)
        now, missing = [], 0
        for name in given.entries or known:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    now.append(score(known[name], detect, Path(folder), make))
                except MissingProgram as error:
                    missing += 1
                    print(f"NOT RUN {name}: {error}", flush=True)
                    continue
            print(shown(now[-1]), flush=True)
            write_scores(given.detector, {**read_scores(given.detector), name: now[-1]})  # other runs may write, too
        print(summary(now) + (f"; {missing} not run" if missing else ""))
    if given.page:
        from museum.page import write_page

        write_page()


if __name__ == "__main__":
    main()
