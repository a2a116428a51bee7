"""The planner's command: layouts, files and commands that come out, and wrong flags."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from tests.end_to_end.runs import GPT2, NO_DROPOUT, ROOT, Run, words

RUN = words("""--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 --bf16
    --position-embedding-type rope --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0""")
KEPT = words("--keep context recompute micro_batch expert")
SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
    --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 \\
    --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 --train-iters 10 --bf16 --use-mcore-models \\
    --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
"""


def plan(*flags: str | Path, expected: int = 0, folder: Path | None = None) -> str:
    command = [sys.executable, str(ROOT / "tools/plan.py"), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240, check=False)
    assert ended.returncode == expected, ended.stderr
    return ended.stderr if expected else ended.stdout


def test_layouts_come_out_as_table_files_and_commands(tmp_path: Path) -> None:
    names = ["plan.json", "plan.csv", "plan.html"]
    more = words("--top 3 --explain --scaling 2..32 --tokens 300B --failures-per-gpu-hour 1e-4")
    text = plan(*RUN, *KEPT, "--gpus", "4", *more, "--output", *names, folder=tmp_path)
    for part in ("Tokens / sec / GPU", "layouts of 4 x H100-SXM", "dry run of rank", "matrix products", "Amdahl"):
        assert part in text
    found = json.loads((tmp_path / "plan.json").read_text())
    rows = list(csv.DictReader((tmp_path / "plan.csv").open()))
    assert len(found["plans"]) == len(rows) == 3
    assert [str(each["row"]["TP"]) for each in found["plans"]] == [row["TP"] for row in rows]
    seconds = [each["seconds"] for each in found["plans"]]
    assert seconds == sorted(seconds)
    assert {"misfits", "neighbours", "scaling", "days", "goodput", "notes", "commands"} <= found.keys()
    assert all(each["change"] in text for each in found["neighbours"])
    assert [each["gpus"] for each in found["scaling"]] == [2, 4, 8, 16, 32]
    assert all(note in text for note in found["notes"])
    least, most = found["plans"][0]["seconds_nine_times_of_ten"]
    assert f"a step of the first takes {least:.3f} to {most:.3f} s" in text
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 1 + (int(rows[0]["PP"]) > 1)  # the memory, and the pipeline if there is one
    assert 'content="light dark"' in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6]) is not None
    torchrun, sbatch = found["commands"]
    assert sbatch.split("\\")[0].strip() == "RUN=run/plan sbatch --nodes=1 --gpus-per-node=4 slurm/pretrain_gpt.sbatch"
    command = shlex.split(torchrun.replace("\\\n", ""))
    start = command.index("pretrain_gpt.py") + 1
    assert command[:start] == shlex.split(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 pretrain_gpt.py"
    )
    needed = words("--lr 1e-4 --train-iters 1 --mock-data --tokenizer-type NullTokenizer")
    config = resolve(parse_arguments([*command[start:], *needed]).config, 4)
    assert config.parallel.tensor_model_parallel_size == found["plans"][0]["row"]["TP"]
    assert config.parallel.zero_stage == found["plans"][0]["row"]["ZeRO"]
    assert config.training.micro_batch_size == found["plans"][0]["row"]["MBS"]


@pytest.mark.wide
def test_the_layout_of_a_script_is_planned(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    text = plan("--translate", "train.sh", "--cluster", "A100-SXM-80GB", "--explain", folder=tmp_path)
    header, row, *_ = text[text.index("#-GPUs") :].splitlines()
    found = dict(zip(header.split(), row.split(), strict=False))
    assert [found[name] for name in ("#-GPUs", "GBS", "MBS")] == ["16", "64", "2"]
    assert "TP 2 -> 4" in text
    assert "layouts of" not in text


@pytest.mark.wide
def test_what_does_not_fit_says_what_would_save_it() -> None:
    large = words("--num-layers 4 --hidden-size 65536 --num-attention-heads 8")
    text = plan(*RUN, *large, *KEPT, "--gpus", "2", expected=64)
    assert re.search(r"no layout fits 2 x H100-SXM: [\d.]+ GiB are missing \(TP ", text)
    assert "--grad-reduce-in-bf16: " in text
    assert "Traceback" not in text


@pytest.mark.wide
def test_automatic_stages_are_written_out(run: Run, tmp_path: Path) -> None:
    flags = words("--num-layers 5 --micro-batch-size 1 --train-iters 1 --pp 2 --pipeline-model-parallel-layout auto")
    run(*GPT2, *NO_DROPOUT, *flags, "--save", tmp_path / "run", world_size=2)
    found = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    letters = found["parallel"]["pipeline_model_parallel_layout"]
    assert letters.count("|") == 1
    assert letters[0] + letters[-1] == "EL"
