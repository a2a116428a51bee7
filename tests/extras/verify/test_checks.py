"""Checks without a trace of tensors, as the program prints them: logs, pairs of checkpoints, samples."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megalite.extras.verify.checks import verify_metrics, verify_step
from megalite.extras.verify.commands import verify as program
from megalite.extras.verify.verdict import RIGHT, WRONG
from tests.extras.verify.recorded_run import FLAGS, command_of, train

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), FLAGS)


def test_a_right_log_and_a_right_step_are_right(run: Path) -> None:
    command, before = command_of(FLAGS), run / "iter_0000000"
    metrics = verify_metrics(command, before, run / "metrics.jsonl")
    assert metrics.exit_code == RIGHT, metrics.line
    assert {figure.name for figure in metrics.figures} >= {"loss of step 1", "grad_norm of step 3"}
    step = verify_step(command, before, run / "iter_0000001")
    assert step.exit_code == RIGHT, step.line
    assert len(step.judgements) > 20


def test_another_decay_is_named_with_the_first_tensor_that_it_moves(run: Path) -> None:
    found = verify_step(command_of(f"{FLAGS} --weight-decay 0.3"), run / "iter_0000001", run / "iter_0000002")
    assert found.exit_code == WRONG
    assert found.first is not None
    assert found.first.entry.name == "embedding.word"
    assert found.hypotheses[0].text == "weight decay is 0.1, not 0.3"
    assert found.line.startswith("parameter after of embedding.word")


def test_a_wrong_rate_in_a_log_is_the_verdict(run: Path) -> None:
    found = verify_metrics(command_of(f"{FLAGS} --lr 0.02"), run / "iter_0000000", run / "metrics.jsonl")
    assert found.exit_code == WRONG
    assert "learning_rate of step 2 is" in found.line  # both begin at 0


def test_the_program_takes_all_of_them_and_its_exit_code_is_that_of_the_worst(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--command", f"megalite-pretrain {FLAGS}", "--ranks", "1", "--checkpoint", str(run / "iter_0000001")]
    flags += ["--next", str(run / "iter_0000003"), "--metrics", str(run / "metrics.jsonl")]
    monkeypatch.setattr("sys.argv", ["megalite-verify", *flags])
    with pytest.raises(SystemExit) as ended:
        program.command()
    assert ended.value.code == 93
    assert "save two steps in a row" in capsys.readouterr().err
    del flags[-4:-2]
    monkeypatch.setattr("sys.argv", ["megalite-verify", *flags])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == RIGHT
    assert "no bug" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to verify"),
        (["--trace", "x"], "give --command"),
        (["--next", "x", "--command", "pretrain_gpt.py"], "--checkpoint"),
        (["--against", "x", "--metrics", "y", "--command", "pretrain_gpt.py"], "--against compares with a trace"),
    ],
)
def test_what_is_missing_is_said(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["megalite-verify", *flags])
    with pytest.raises(SystemExit) as ended:
        program.command()
    assert ended.value.code == 64
    assert said in capsys.readouterr().err


def test_a_trace_that_is_none_names_what_is_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "empty"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    flags = ["--command", f"megalite-pretrain {FLAGS}", "--ranks", "1", "--trace", str(folder)]
    monkeypatch.setattr("sys.argv", ["megalite-verify", *flags, "--checkpoint", str(run / "iter_0000001")])
    with pytest.raises(SystemExit) as ended:
        program.command()
    assert ended.value.code == 64
    assert "megalite_trace.py" in capsys.readouterr().err
