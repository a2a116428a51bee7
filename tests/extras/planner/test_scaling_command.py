"""The command that measures scaling: runs under torchrun, their failures, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAINING = """pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 2
--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
--global-batch-size 8 --train-iters 5 --lr 1e-3"""
FAILS_ON_TWO = """
import json, os, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if os.environ["WORLD_SIZE"] == "2":
    sys.exit("error: no memory for two" if os.environ["RANK"] == "0" else 1)  # two at once would share a line
with open(flags["--metrics-path"], "w") as file:
    file.write(json.dumps({"iteration_time_s": 1.0}) + chr(10))
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/scaling.py", "--ranks", "1", "2", "--output", str(folder / "found"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.wide
def test_a_training_is_measured_on_one_and_two_ranks(tmp_path: Path) -> None:
    ran = run(tmp_path, "--scaling", "strong", "--", *TRAINING.split())
    assert ran.returncode == 0, ran.stderr
    one, two = json.loads((tmp_path / "found.json").read_text())["scaling"]["strong"]
    assert (one["ranks"], one["batch"], one["efficiency"]) == (1, 8, 1.0)
    assert (two["ranks"], two["batch"]) == (2, 8)
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"])
    assert two["efficiency"] == pytest.approx(two["speed_up"] / 2)
    assert 0 < two["predicted"] < one["predicted"]
    assert (tmp_path / "found.svg").read_text().startswith("<svg")
    assert "strong scaling" in ran.stdout


def test_a_command_that_fails_shows_its_message_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILS_ON_TWO)
    ran = run(tmp_path, "--ranks", "2", "--warmup", "0", "--", str(tmp_path / "program.py"), "--global-batch-size", "4")
    assert ran.returncode == 93
    *_, ended, why = ran.stderr.splitlines()
    assert ended == f"error: {tmp_path / 'program.py'} on 2 ranks ended with exit code 1:"
    assert why == "error: no memory for two"
    assert not (tmp_path / "found.json").exists()
