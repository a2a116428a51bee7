"""The end of a program with a loop of its own: what it has trained is saved, or the program fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.errors import EXIT_FATAL
from tests.end_to_end.runs import ROOT
from tests.harness.job import run_script
from tests.harness.wide import wide_except

PROGRAM = """
import sys, torch, megalite
torch.manual_seed(0)
if "notebook" in sys.argv:
    sys.last_value = ValueError("an error of an earlier cell")
model = torch.nn.Linear(256, 256)  # which is larger than what is written without a thread for checksums
data = [(torch.randn(256), torch.randn(256)) for _ in range(8)]
run = megalite.Trainer(
    model,
    loss=lambda outputs, batch: torch.nn.functional.mse_loss(outputs, batch[1]),
    dataset=data,
    micro_batch_size=4,
    optimizer=megalite.AdamW(lr=1e-3),
    save="run",
    async_save="async_save" in sys.argv,
)
if "train" in sys.argv:
    run.train(steps=2)
for _ in range(3):
    run.step()
if "fail" in sys.argv:
    from pathlib import Path
    Path("run/iter_0000003.tmp").write_text("in the way")
    Path("run/iter_0000003").write_text("in the way")
"""


def program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # else a copy of the tree would test what is installed
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words", wide_except([(), ("notebook",), ("train",), ("train", "async_save")], [()]), ids=" ".join
)
def test_what_a_loop_has_trained_is_saved_when_the_program_ends(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = program(tmp_path, *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    last = 5 if "train" in words else 3
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)


def test_a_program_that_cannot_save_at_its_end_fails(tmp_path: Path) -> None:
    """Forked: the test above has the end of an interpreter."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run_script([tmp_path / "program.py", "fail"], tmp_path / "job", cwd=tmp_path)
    assert ended.code == EXIT_FATAL, ended.stdout + ended.stderr
    assert "saving iteration 3" in ended.stderr
