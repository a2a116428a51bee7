"""Small runs of megalite on this process, with a checkpoint after each step and the records of their steps."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from megalite.config import parse_arguments, resolve
from megalite.extras.verify.command import Command, Program, read_command
from megalite.extras.verify.saved import Saved, open_saved
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from megalite.training.display import Display
from tests.harness.gpt_trainer import gpt_trainer

NETWORK = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 --group-query-attention "
    "--ffn-hidden-size 24 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1"
)
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 63 --seq-length 16 --max-position-embeddings 16"
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 0.01 --min-lr 0.001 --lr-warmup-iters 2 "
    "--lr-decay-style cosine --clip-grad 0.5 --weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
)
FLAGS = f"{NETWORK} {DATA} {TRAINING}"


def command_of(flags: str, ranks: int = 1, program: Program = "megalite") -> Command:
    """Return the command of a run with these flags."""
    return read_command(flags, ranks=ranks, program=program)


def train(folder: Path, flags: str, steps: int = 3) -> Path:
    """Train, and save the initial weights and each step. Returns the run directory, with its metrics.jsonl.

    Called by all ranks together, with a folder that they share, if there are several.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(f"{flags} --save {folder}".split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh, folder)
    display = Display(steps, 100, enabled=False)
    records = []
    for last in (*[False] * steps, True):
        trainer.save(display, last=last)
        if not last:
            records.append(json.dumps(trainer.step().record()))
    if rank == 0:
        (folder / "metrics.jsonl").write_text("\n".join(records) + "\n")
    return folder


def saved(folder: Path, step: int) -> Saved:
    """Open the checkpoint of a step."""
    return open_saved(folder / f"iter_{step:07d}")


def megatron_line(step: int, loss: float, norm: float, rate: float, *, skipped: int = 0) -> str:
    """Return the line that Megatron-LM prints about a step. `rate`: that of the next step, as there."""
    return (
        f" [2026-01-01 00:00:00.000000] iteration {step:8d}/     100 | consumed samples: {8 * step:12d} | elapsed time "
        f"per iteration (ms): 50.0 | learning rate: {rate:.6E} | global batch size:     8 | lm loss: {loss:.6E} | loss "
        f"scale: 1.0 | grad norm: {norm:.3f} | number of skipped iterations: {skipped:3d} | number of nan iterations: "
        "  0 |"
    )
