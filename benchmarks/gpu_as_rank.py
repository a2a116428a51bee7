"""One rank of published layouts on this GPU, with real kernels and memory: the other ranks do not exist.

    python -m benchmarks.gpu_as_rank [NAME ...]

Each runs in a process of its own, as `pretrain_gpt.py --as-rank R --of N`. The time of a step has no communication and,
for one rank of a pipeline, no bubble: published steps take longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

COMMON = (
    "--bf16 --tokenizer-type NullTokenizer --mock-data --train-iters 11 --lr 1e-4 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1"
)
GPT3 = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200"
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--vocab-size 128256"
)
SHARDED = "--use-distributed-optimizer"


@dataclass(frozen=True)
class Published:
    """Layout of a published run."""

    ranks: int
    flags: str
    rank: int = 0


FIGURES = ("layout", "device", "step", "speed", "memory")
"""Lines of `--as-rank`."""
LAYOUTS: Mapping[str, Published] = {
    "GPT-3 175B, Megatron SC21": Published(
        64,
        f"{GPT3} --max-position-embeddings 2048 --tp 8 --pp 8 --num-virtual-stages-per-pipeline-rank 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --global-batch-size 32",
        rank=8,
    ),
    "Llama 3 8B, NeMo 24.07": Published(
        8,
        f"{LLAMA} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 "
        f"--max-position-embeddings 8192 --cp 2 --global-batch-size 32 {SHARDED}",
    ),
    "Llama 3 70B, NeMo 24.07": Published(
        64,
        f"{LLAMA} --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
        "--max-position-embeddings 8192 --tp 4 --pp 4 --cp 2 --num-virtual-stages-per-pipeline-rank 5 "
        f"--sequence-parallel --global-batch-size 32 {SHARDED}",
        rank=8,
    ),
}
"""Published ones, in bf16 and with smaller global batches, so that a step is short."""
SMALL: Mapping[str, Published] = {
    "small": Published(
        8,
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        f"--vocab-size 255 --tp 2 --pp 2 --sequence-parallel --global-batch-size 8 {SHARDED}",
    )
}
"""Run of a CPU instead."""


def command(layout: Published) -> list[str]:
    """Return the command that runs the rank alone."""
    alone = ["--as-rank", str(layout.rank), "--of", str(layout.ranks)]
    return [sys.executable, "pretrain_gpt.py", *COMMON.split(), *layout.flags.split(), *alone]


def measure(layouts: Mapping[str, Published], deadline: float) -> Iterator[dict[str, object]]:
    """Run each layout, and yield what it printed. Raises TimeoutExpired at the deadline, of the monotonic clock."""
    for name, layout in layouts.items():
        left = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)
        ended = subprocess.run(command(layout), capture_output=True, text=True, timeout=left)
        if ended.returncode:
            yield {"name": name, "failed": ended.stderr.strip().splitlines()[-1:]}
        else:
            lines = (line.partition(" ") for line in ended.stdout.splitlines())
            figures = {key: words.strip() for key, _, words in lines if key in FIGURES}
            yield {"name": name, "rank": f"{layout.rank} of {layout.ranks}", **figures}


def main(only: Sequence[str]) -> None:
    chosen = {name: layout for name, layout in LAYOUTS.items() if not only or name in only}
    for row in measure(chosen, float("inf")):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
