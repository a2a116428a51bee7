"""Scores of the museum: of detectors that are commands, and their page."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from museum import page, score
from museum.cases import make_case
from museum.detectors import pairs
from museum.entries import Answer, Entry, entries
from museum.score import Score

pytestmark = pytest.mark.extra

NAME = "pipeline_loss_not_divided"


def says(**finding: str) -> str:
    """Return the command of a detector that says the same of each run."""
    program = f"import pathlib, sys; assert pathlib.Path(sys.argv[1], 'run').is_dir(); print({json.dumps(finding)!r})"
    return shlex.join([sys.executable, "-c", program, "{case}"])


def test_a_detector_that_accuses_each_run_catches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(score, "SCORES", tmp_path)
    found = {}
    for verdict in ("wrong", "unknown"):
        command = says(verdict=verdict, tensor="output gradient of lm_head")
        monkeypatch.setattr(sys, "argv", ["score", verdict, NAME, "--command", command])
        score.main()
        found[verdict] = score.read_scores(verdict)[NAME]
    assert not found["wrong"].caught
    assert found["wrong"].is_tensor
    assert found["unknown"].verdict == found["unknown"].of_right == "unknown"
    said = capsys.readouterr().out
    assert "0 of 1 caught, 0 at the right tensor, 0 with the right hypothesis first; 1 right runs accused" in said


def test_an_entry_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["score", "verify", "no_such_bug"])
    with pytest.raises(SystemExit):
        score.main()
    assert "the museum has no no_such_bug" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.parametrize("name", [NAME, "documents_merged", "head_norm_gradients_apart"])
def test_pairs_finds_the_tensor_by_the_reference(name: str, tmp_path: Path) -> None:
    entry = next(entry for entry in entries() if entry.name == name)
    found = score.score(entry, pairs.detect, tmp_path, make_case)
    assert found.caught
    assert found.is_tensor


def entry(name: str, *, late: bool = False) -> Entry:
    reported = ("someone/trainer#7", "a blog")
    return Entry(name, f"Title of {name}", "plain", reported, "", "", Answer("t", "h"), late=late)


def scored(name: str, verdict: str, of_right: str = "right", *, tensor: bool = False) -> Score:
    return Score(name, verdict, of_right, None, None, tensor, False, 1.0)


def test_the_page_says_who_catches_what() -> None:
    museum = [entry("one"), entry("two"), entry("three", late=True)]
    scores = {
        "verify": {each.entry: each for each in (scored("one", "wrong", tensor=True), scored("two", "right"))},
        "pairs": {each.entry: each for each in (scored("two", "wrong"), scored("three", "wrong", "wrong"))},
    }
    shown = page.shown_scores(museum, scores)
    early, late = shown.split("The 1 late entries")
    assert "| megalite-verify | 2 | 1 | 1 | 0 | 0 | 0 |" in early
    assert "| pairs | 1 | 1 | 0 | 0 | 0 | 0 |" in early
    assert "| pairs | 1 | 0 | 0 | 0 | 0 | 1 |" in late
    assert "- Title of two (`two`): pairs" in late
    link = "[trainer#7](https://github.com/someone/trainer/issues/7), a blog"
    assert f"| Title of one | plain | {link} | ct |  |" in late
    assert f"| Title of two | plain | {link} | – | c |" in late
    assert f"| Title of three (late) | plain | {link} |  | ! |" in late
    assert "Nothing." in page.shown_scores(museum, {"verify": scores["verify"]})


def test_the_page_of_the_museum_is_up_to_date() -> None:
    is_current = page.shown_scores(entries(), page.all_scores()) in page.PAGE.read_text()
    assert is_current, "python -m museum.score --page writes it again"
