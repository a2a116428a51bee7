"""Time that a rank takes to know what every rank of a large run saves of a checkpoint.

    python -m benchmarks.checkpoint_plan [--rounds 7]

A Llama-style model of 144 layers, 1,011 parameters, in bf16 with AdamW: master weights and two states of each. 4,096
ranks in three layouts, ZeRO 1. The time is the CPU's, from nothing: the other stages and shares of the model are looked
at on the meta device. Target: 2 s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from benchmarks.cpu_step import llama
from benchmarks.results import write_results
from megalite.checkpoint import Contents, Plan
from megalite.config import ModelConfig, OptimizerConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.model.gpt import make_chunks
from megalite.optim.buckets import DataParallel
from megalite.parallel.mesh import ParallelMesh

RANKS = 4096
LAYOUTS = {"TP 1 x PP 1 x DP 4096": (1, 1), "TP 8 x PP 4 x DP 128": (8, 4), "TP 8 x PP 12 x DP 42": (8, 12)}


def whole_plan(model: ModelConfig, tensor_parallel: int, pipeline_parallel: int) -> tuple[int, int]:
    """Plan for all ranks; how many boxes and tensors there are."""
    world = tensor_parallel * pipeline_parallel * (RANKS // (tensor_parallel * pipeline_parallel))
    sizes = {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": pipeline_parallel}
    mesh = ParallelMesh(world_size=world, **sizes)
    options = DataParallel(torch.float32, zero_stage=1)
    each = model.num_layers // pipeline_parallel

    def contents_at(mesh: ParallelMesh) -> Contents:
        stage = mesh.coordinate("pp")
        part = StageLayers(stage * each, each, embedding=stage == 0, loss=stage == pipeline_parallel - 1)
        chunks = make_chunks(model, mesh, [part], (mesh.rank,), dtype=torch.bfloat16)
        return Contents.of(chunks, mesh, options, blocks=[chunk.blocks() for chunk in chunks])

    plan = Plan(mesh, contents_at, OptimizerConfig(lr=0.1), zero_stage=1, instances=1)
    parts = [part for rank in range(world) for part in plan.saved(rank)]
    return len(parts), len({part.name for part in parts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    model = replace(llama(144, 8192, 64, 28672, 128256), untie_embeddings_and_output_weights=True)
    figures: dict[str, object] = {"ranks": RANKS, "rounds": rounds}
    for name, sizes in LAYOUTS.items():
        times = []
        for _ in range(rounds):
            began = time.process_time()
            boxes, tensors = whole_plan(model, *sizes)
            times.append(time.process_time() - began)
        quartiles = statistics.quantiles(times, n=4)
        median, spread = quartiles[1], f"[{quartiles[0]:.2f}, {quartiles[2]:.2f}]"
        print(f"{name}: {median:.2f} {spread} s for {boxes:,} boxes of {tensors:,} tensors")
        figures[name] = {"seconds": quartiles, "boxes": boxes, "tensors": tensors}
    write_results("checkpoint_plan", figures)


if __name__ == "__main__":
    main()
