"""A translated launch script trains, and nothing in it is executed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.end_to_end.runs import ROOT, iterations

SCRIPT = """#!/bin/bash
touch executed; $(touch executed) `touch executed`
export PYTHONPATH=$PWD/evil PATH=$PWD/evil LD_PRELOAD=$PWD/evil.so
export TORCH_LOGS=+all TORCH_LOGS_OUT=$PWD/executed TORCH_LOGS_FORMAT="touch executed"
GPUS=2
SAVE=$1
MODEL_ARGS=(
    --num-layers 2 --hidden-size 16 --num-attention-heads 4   # tiny
    --seq-length 16 --max-position-embeddings 16
    --swiglu --disable-bias-linear --use-mcore-models --use-flash-attn
)
TRAINING_ARGS=" \\
    --micro-batch-size 2 --global-batch-size $((2 * 2 * GPUS)) --lr 1e-2 --train-iters 3 \\
    --eval-iters 0 --log-interval 1"
DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 60 "--split '99,1,0'")
eval "touch executed"
python -m torch.distributed.launch --nproc_per_node $GPUS pretrain_gpt.py ${MODEL_ARGS[@]} \\
    $TRAINING_ARGS ${DATA_ARGS[@]} --tensor-model-parallel-size $GPUS --save "$SAVE" 2>&1 | tee "$(touch executed)"
"""


def test_a_translated_script_trains(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "json.py").write_text("open('executed', 'w')")  # beside the script that came from somebody
    ended = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools/translate.py"),
            "train.sh",
            "--set",
            "1=it's a run; touch executed",
            "--run",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert iterations(tmp_path / "it's a run; touch executed") == [1, 2, 3]
    assert not (tmp_path / "executed").exists()
    assert "changed: --disable-bias-linear -> --no-add-bias-linear" in ended.stdout
