"""Recipes: the layout that the planner chooses for models of 124 million to 405 billion parameters on usual machines.

    python -m benchmarks.planner.recipes

Writes recipes.md beside it. The flags of a recipe are those of `pretrain_gpt.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.commands.plan import completed
from megalite.extras.planner.flags import layout_flags
from megalite.extras.planner.plan import GIB, Planner
from megalite.extras.planner.search import search

PAGE = Path(__file__).with_name("recipes.md")
_HEAD = """\
# Recipes

Written by `python -m benchmarks.planner.recipes`: the fastest layout that fits, as `megalite-plan` finds it
(`docs/planner.md`), of models on usual machines. Memory is that of the fullest rank, confirmed by a dry run. Times are
predicted, none of them is measured; `benchmarks/planner/planner_validation.md` tells how far such predictions are off.
All in bf16, with fp32 sums of gradients and fp32 optimizer state.
"""
_LLAMA = """--swiglu --disable-bias-linear --position-embedding-type rope --normalization RMSNorm
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16"""


@dataclass(frozen=True)
class Model:
    """Network, as flags, with the samples of a step."""

    name: str
    flags: str
    samples: int


MODELS = (
    Model(
        "GPT-2 124M",
        """--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --bf16
        --max-position-embeddings 1024 --attention-dropout 0 --hidden-dropout 0""",
        512,
    ),
    Model(
        "Llama 1B",
        f"""--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 8192 --seq-length 4096
        --group-query-attention --num-query-groups 8 --vocab-size 128256 {_LLAMA}""",
        512,
    ),
    Model(
        "Llama 8B",
        f"""--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --seq-length 8192
        --group-query-attention --num-query-groups 8 --vocab-size 128256 {_LLAMA}""",
        512,
    ),
    Model(
        "Llama 70B",
        f"""--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 --seq-length 8192
        --group-query-attention --num-query-groups 8 --vocab-size 128256 {_LLAMA}""",
        1024,
    ),
    Model(
        "GPT-3 175B",
        """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 50257 --bf16
        --max-position-embeddings 2048 --attention-dropout 0 --hidden-dropout 0""",
        1536,
    ),
    Model(
        "Llama 405B",
        f"""--num-layers 126 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248 --seq-length 8192
        --group-query-attention --num-query-groups 8 --vocab-size 128256 {_LLAMA}""",
        2048,
    ),
)
MACHINES = (
    ("1 x 24 GB (RTX 4090)", "RTX-4090", 1),
    ("1 node of 8 x 80 GB (H100)", "H100-SXM", 8),
    ("16 nodes of 8 x 80 GB (H100)", "H100-SXM", 128),
    ("128 nodes of 8 x 80 GB (H100)", "H100-SXM", 1024),
)


def main() -> None:
    """Write the page."""
    PAGE.write_text("\n".join([_HEAD, *(line for model in MODELS for line in section(model)), ""]))


def section(model: Model) -> Iterator[str]:
    """Yield the lines of a model."""
    argv = [*shlex.split(model.flags), "--global-batch-size", str(model.samples)]
    yield f"## {model.name}, {model.samples:,} samples a step\n"
    yield f"```text\n{shlex.join(argv)}\n```\n"
    yield "| machine | layout | GiB | seconds a step | tokens/s/GPU | TFLOP/s/GPU | measured |"
    yield "|---|---|---|---|---|---|---|"
    for machine, cluster, gpus in MACHINES:
        yield f"| {machine} | {recipe(argv, cluster, gpus)} |"
    yield ""


def recipe(argv: list[str], cluster: str, gpus: int) -> str:
    """Return the cells of a machine."""
    config = completed(argv)
    planner = Planner(config, find_cluster(cluster), gpus)
    try:
        found = search(planner, top=1)
    except ConfigurationError:
        return "the batch cannot be divided | | | | | "
    if not found.plans:
        nearest = found.nearest(planner)
        missing = f": {nearest.missing / GIB:,.1f} GiB or more are missing" if nearest is not None else ""
        return f"does not fit{missing} | | | | | "
    plan = found.plans[0]
    flags = " ".join(word for flag in layout_flags(plan.config, config) for word in flag)
    _, peak = planner.confirm(plan)
    step = plan.step
    numbers = f"{peak / GIB:.1f} | {step.seconds:,.2f} | {step.tokens_per_second:,.0f} | {step.flops / 1e12:.0f} | no"
    bar = "\\|"  # of a layout's letters, in a table
    return f"`{flags.replace('|', bar)}` | {numbers}"


if __name__ == "__main__":
    main()
