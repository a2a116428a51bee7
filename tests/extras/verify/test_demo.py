"""The demonstration finds its bug, leaves no files, and accuses the same trainer without the bug of nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from megalite.errors import ConfigurationError
from megalite.extras.verify import demo_trainer
from megalite.extras.verify.demo import demo, verdict_on
from megalite.extras.verify.verdict import RIGHT, WRONG, Verdict

pytestmark = pytest.mark.extra


def test_the_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = tmp_path / "temporary", tmp_path / "page.html"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    shown: list[Verdict] = []
    assert demo(str(page), lambda title, verdict: shown.append(verdict)) == 0
    (verdict,) = shown
    assert verdict.exit_code == WRONG
    assert {each.entry.name.split(".")[-2] for each in verdict.judgements if each.differs} == {
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
    }
    assert "Its losses look fine" in capsys.readouterr().out
    assert "sequence-parallel" in page.read_text()
    assert not list(folder.glob("megalite-verify-*"))


@pytest.mark.wide
def test_the_trainer_without_the_bug_is_accused_of_nothing(tmp_path: Path) -> None:
    right, wrong = demo_trainer.run(tmp_path)
    assert right[0] == wrong[0]  # the bug is in the gradients
    assert right[1] != wrong[1]
    assert right[1] == pytest.approx(wrong[1], rel=1e-3)
    assert right[1] < right[0]
    verdict = verdict_on(tmp_path / "right")
    assert verdict.exit_code == RIGHT, verdict.line


def test_a_page_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--page"):
        demo(str(tmp_path), lambda title, verdict: None)
