"""Predictions of runs that nobody has published yet, with the date on which they were made: predictions.md.

    python -m benchmarks.planner.predictions

They stay as they are, right or wrong: a new date adds a section, and changes none.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.planner.cluster import find_cluster, find_stack
from megalite.extras.planner.plan import Planner, with_vocabulary
from megalite.extras.planner.step import StepTime

PAGE = Path(__file__).with_name("predictions.md")
_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention "
    "--num-query-groups 8 --untie-embeddings-and-output-weights --vocab-size 128255 --seq-length 8192"
)
_GPT = "--vocab-size 51199 --seq-length 2048"
_8B = f"{_LLAMA} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336"
_70B = f"{_LLAMA} --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672"
_405B = f"{_LLAMA} --num-layers 126 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248"
_175B = f"{_GPT} --num-layers 96 --hidden-size 12288 --num-attention-heads 96"
_EXPERTS = (
    f"{_LLAMA} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --num-experts 8 "
    "--moe-router-topk 2"
)
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_ENDS = "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7"


@dataclass(frozen=True)
class Run:
    """A run that could be measured."""

    name: str
    cluster: str
    gpus: int
    layout: str
    batch: int
    model: str
    stack: str = "megalite"

    @property
    def config(self) -> RunConfig:
        length = self.model.split("--seq-length ")[1].split()[0]
        flags = (
            f"{self.model} {self.layout} --global-batch-size {self.batch} --max-position-embeddings {length} --bf16 "
            "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --mock-data --hidden-dropout 0 "
            "--attention-dropout 0"
        )
        return with_vocabulary(resolve(parse_arguments(flags.split()).config, self.gpus))


RUNS = (
    Run("Llama 3 8B", "H100-SXM", 8, f"--micro-batch-size 1 --tp 2 --sequence-parallel {_OVERLAP}", 128, _8B),
    Run(
        "Llama 3 8B, ZeRO 3",
        "H200",
        8,
        "--micro-batch-size 1 --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
        "--overlap-param-gather",
        128,
        _8B,
    ),
    Run(
        "Llama 3 70B",
        "H100-SXM",
        128,
        f"--micro-batch-size 1 --tp 4 --sequence-parallel --pp 4 --num-virtual-stages-per-pipeline-rank 5 {_OVERLAP}",
        256,
        _70B,
    ),
    Run(
        "Llama 3 70B",
        "B200",
        64,
        f"--micro-batch-size 1 --tp 4 --sequence-parallel --pp 2 --num-virtual-stages-per-pipeline-rank 5 {_OVERLAP}",
        256,
        _70B,
    ),
    Run(
        "Llama 3.1 405B",
        "H100-SXM",
        16384,
        f"--micro-batch-size 1 --tp 8 --sequence-parallel --pp 16 {_ENDS} {_OVERLAP}",
        2048,
        _405B,
    ),
    Run(
        "GPT-3 175B",
        "H200",
        1024,
        f"--micro-batch-size 1 --tp 4 --sequence-parallel --pp 8 --num-virtual-stages-per-pipeline-rank 6 {_OVERLAP}",
        1536,
        _175B,
        "bridge",
    ),
    Run("8 x 7B experts", "H200", 64, f"--micro-batch-size 1 --ep 8 {_OVERLAP}", 256, _EXPERTS),
    Run("8 x 7B experts", "B200", 64, f"--micro-batch-size 1 --ep 8 {_OVERLAP}", 256, _EXPERTS),
)


def predicted(run: Run) -> StepTime:
    config = run.config
    return Planner(config, find_cluster(run.cluster), run.gpus, find_stack(run.stack)).plan(config).step


def section(date: datetime.date) -> Iterator[str]:
    """Yield the lines of the predictions of a day."""
    yield f"## {date.isoformat()}"
    yield ""
    yield "| model | GPUs | program | layout | samples | seconds (nine times of ten) | tokens/s/GPU | TFLOP/s/GPU |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in RUNS:
        found = predicted(run)
        least, most = found.interval.least, found.interval.most
        yield (
            f"| {run.name} | {run.gpus:,} {run.cluster} | {run.stack} | `{run.layout}` | {run.batch} | "
            f"{found.seconds:.2f} ({least:.2f} to {most:.2f}) | {found.tokens_per_second:,.0f} | "
            f"{found.flops / 1e12:,.0f} |"
        )


def main() -> None:
    text = PAGE.read_text().rstrip() if PAGE.exists() else ""
    date = datetime.date.today()
    if f"## {date.isoformat()}" in text:
        raise SystemExit(f"{PAGE} has predictions of {date} already: they stay as they are")
    PAGE.write_text("\n".join([text, "", *section(date), ""]))


if __name__ == "__main__":
    main()
