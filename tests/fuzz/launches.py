"""Launch scripts and settings of other programs: valid ones, and what a hostile one might have in it."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.fuzz.edits import BYTES, JSON, YAML, Edit
from tests.fuzz.programs import command

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8
export GPUS=${GPUS:-8} ; SAVE=${1:-"run/it's"}
MODEL=( --num-layers $((2*GPUS)) --hidden-size 64 "--split '99,1,0'" )
if [[ "$GPUS" == "8" ]]; then MODEL+=(--swiglu); else MODEL=(); fi
case $SAVE in run*) A=1 ;; *) A=2 ;; esac
for x in a b; do echo $x; done
f() { B=$1; }; f 3
OPTIONS=" --lr 1e-4 --seed ${A}${#MODEL[@]} "
cat <<EOF
--nothing $OPTIONS
EOF
srun bash -c "torchrun --nproc_per_node $GPUS pretrain_gpt.py ${MODEL[*]} $OPTIONS --save $SAVE 2>&1 | tee log"
"""
HOSTILE = (
    "$(touch executed)", "`touch executed`", "${A:-", "${A[", "$((", "((", "'", '"', "(", ")", "{", "}", "<<EOF", "\\",
    "|", "&&", "||", ";;", "\n", "\0", "\ue0000\ue001", "$((9**9**9))", "$((1/0))", "${!A}", "A=$A$A$A;" * 30, "eval ",
    "f() { f; f; }; f\n", "while true; do ", "if ", "[[ ", "bash -c ", "$@", "source /etc/passwd\n", "<a b>", "{1..9}",
    "MODEL+=(", "${MODEL[9**9]}", "${A:=", "shift 99999999999;", "A[$(touch executed)]=1;", "$((A[$(touch executed)]))",
)  # fmt: skip
"""Texts to put anywhere into the script."""
DEEPSPEED = {
    "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0, "steps_per_print": 10, "wall_clock_breakdown": True, "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
    "tensorboard": {"enabled": True, "output_path": "tb", "job_name": "run"},
}  # fmt: skip
TEST = {"MODEL_ARGS": {"--num-layers": 2, "--lr": 0.1, "--bf16": True, "--data-path": "$A ${B}", "--seed": "[1 2]"}}
FILES = {"train.sh": BYTES, "ds.json": JSON, "test.yaml": YAML}


def prepare(base: Path) -> None:
    (base / "in" / "train.sh").write_text(SCRIPT)
    for file, content in (("ds.json", DEEPSPEED), ("test.yaml", TEST)):
        (base / "in" / file).write_text(json.dumps(content))


def program(base: Path, edits: Sequence[Edit]) -> partial[None]:
    return partial(command, "tools/translate.py", base / "in" / edits[0][0], "--check")


def draw(draw: random.Random, _: Path) -> Edit | None:
    """An edit of the script; None for one of any file."""
    if draw.random() < 0.4:
        return None
    text = base64.b64encode(draw.choice(HOSTILE).encode()).decode()
    return ["train.sh", draw.choice(["insert", "put"]), draw.randrange(len(SCRIPT)), text]
