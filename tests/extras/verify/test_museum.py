"""Entries of the museum can be read, and the plain ones are caught at the right tensor."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from museum.cases import make_case
from museum.entries import Entry, entries, read_entry
from museum.plain.settings import Settings
from museum.score import detector, read_scores, score
from museum.trainer import can_be_replaced

pytestmark = pytest.mark.extra

ENTRIES = entries()
PLAIN = [entry for entry in ENTRIES if entry.program == "plain"]


def test_titles_are_unique_and_say_where_it_was_reported() -> None:
    assert len({entry.title for entry in ENTRIES}) == len(ENTRIES)
    assert not [entry.name for entry in ENTRIES if not (entry.title and entry.reported and entry.happened.strip())]
    assert all(re.fullmatch(r"[a-z0-9_]+", entry.name) for entry in ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_has_what_its_program_needs(entry: Entry) -> None:
    for pattern in (entry.answer.tensor, entry.answer.hypothesis):
        re.compile(pattern)
        assert not re.fullmatch(pattern, "")  # an answer that is always right is none
    bug = entry.bug
    if entry.program == "plain":
        known = {field.name for field in fields(Settings)}
        for name in ("SETTINGS", "RIGHT", "REFERENCE"):
            assert bug.get(name, {}).keys() <= known
        Settings(**bug["SETTINGS"])  # raises ValueError if the layout does not fit
        assert bug.get("RIGHT") or bug["PATCHES"]
        assert all(callable(patch) and can_be_replaced(name) for name, patch in bug.get("PATCHES", {}).items())
    else:
        assert isinstance(bug["FLAGS"], str)
        assert bug["RANKS"] >= 1
        ways = {"wrong", "right", "RIGHT"} if entry.is_real else {"wrong"}
        assert ways & bug.keys()  # else the wrong run and the right one are the same


def test_a_field_that_is_unknown_or_missing_is_named(tmp_path: Path) -> None:
    text = 'title = "t"\nprogram = "plain"\nreported = []\nhappened = "h"\nright = "r"\n[answer]\ntensor = "t"\n'
    file = tmp_path / "bug.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match="hypothesis"):
        read_entry(tmp_path)
    file.write_text(f'colour = "red"\n{text}hypothesis = "h"\n')
    with pytest.raises(ValueError, match="no use for colour"):
        read_entry(tmp_path)
    file.write_text(text.replace("plain", "fancy") + 'hypothesis = "h"\n')
    with pytest.raises(ValueError, match="not fancy"):
        read_entry(tmp_path)


def test_an_entry_is_scored_on_a_wrong_run_and_on_a_right_one(tmp_path: Path) -> None:
    entry = next(entry for entry in PLAIN if entry.name == "pipeline_loss_not_divided")
    found = score(entry, detector("verify"), tmp_path)
    assert found.caught
    assert found.is_tensor
    assert found.is_hypothesis
    assert found.of_right == "right"


def test_verify_has_a_score_on_each_entry() -> None:
    scores = read_scores("verify")
    assert [entry.name for entry in ENTRIES if entry.name not in scores] == []
    known = [scores[entry.name] for entry in ENTRIES if not entry.late]
    assert [each.entry for each in known if not (each.caught and each.is_tensor)] == []
    assert sum(each.is_hypothesis for each in known) >= 0.8 * len(known)


@pytest.mark.wide
@pytest.mark.parametrize(
    "entry", [each for each in ENTRIES if each.program != "megatron-core"], ids=lambda entry: entry.name
)
def test_a_wrong_run_is_caught_as_the_score_says(entry: Entry, tmp_path: Path) -> None:
    make_case(entry, tmp_path / "case", wrong=True)
    found, stored = detector("verify")(tmp_path / "case"), read_scores("verify")[entry.name]
    assert found.verdict == "wrong" or stored.verdict != "wrong"
    assert entry.answer.is_tensor(found.tensor) >= stored.is_tensor, found.tensor
    assert entry.answer.is_hypothesis(found.hypothesis) >= stored.is_hypothesis, found.hypothesis
