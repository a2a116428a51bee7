"""Score a detector of silent bugs on the museum.

    python -m museum.score verify [NAME ...]
    python -m museum.score mine --command "python my_detector.py {case}"

Each entry is run twice, wrong and right, and the detector sees each run as a case (`museum/cases.py`) without being
told which it is. It prints one line of JSON: {"verdict": "wrong" | "right" | "unknown", "tensor": "gradient of ...",
"hypothesis": "..."}. An entry is caught if the wrong run is accused and the right one is not. Whether the first tensor
and the hypothesis are the right ones is scored apart. Scores go to museum/scores/DETECTOR.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from museum.cases import MissingProgram, make_case
from museum.detectors.finding import Finding
from museum.entries import Entry, entries

SCORES = Path(__file__).parent / "scores"
Detector = Callable[[Path], Finding]


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
        words = [str(case) if word == "{case}" else word for word in shlex.split(command)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return Finding(**json.loads(said.strip().splitlines()[-1]))

    return run


def score(entry: Entry, detect: Detector, folder: Path) -> Score:
    """Return the score of a detector on an entry, whose cases are made in a folder.

    Raises:
        MissingProgram: the entry's program is not on this machine.
    """
    findings: dict[bool, Finding] = {}
    seconds = 0.0
    for wrong in (True, False):
        case = folder / str(len(findings))  # no name tells which it is
        make_case(entry, case, wrong=wrong)
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


def main() -> None:
    """Score a detector, print a line an entry, and write the scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("detector", help="of museum/detectors, or a name for one of your own with --command")
    parser.add_argument("entries", nargs="*", help="names of entries; all, if none is given")
    parser.add_argument("--command", help="command of a detector, with {case} for the folder of a case")
    given = parser.parse_args()
    known = {entry.name: entry for entry in entries()}
    if unknown := [name for name in given.entries if name not in known]:
        parser.error(f"the museum has no {', '.join(unknown)}; it has {', '.join(known)}")
    detect = detector(given.detector, given.command)
    scores, missing = [], []
    for name in given.entries or known:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = score(known[name], detect, Path(folder))
            except MissingProgram as error:
                missing.append(name)
                print(f"NOT RUN {name}: {error}", flush=True)
                continue
        scores.append(found)
        marks = f"{'caught' if found.caught else 'MISSED'} {'tensor' if found.is_tensor else '-':6}"
        marks += f" {'hypothesis' if found.is_hypothesis else '-':10}"
        right = "" if found.of_right == "right" else f" (right run: {found.of_right})"
        print(f"{marks} {name}: {found.tensor}: {found.hypothesis}{right}", flush=True)
    print(summary(scores) + (f"; {len(missing)} not run" if missing else ""))
    if not given.entries and not missing:
        SCORES.mkdir(exist_ok=True)
        text = json.dumps([asdict(each) for each in scores], indent=1)
        (SCORES / f"{given.detector}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
