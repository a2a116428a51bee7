"""CPU time, memory and checkpoint of a step that trains adapters, over those of a step that trains all weights.

    python -m benchmarks.lora [--rank 16] [--vocabulary 32000] [--rounds 9]

Llama-style, 4 layers, hidden 512, 8 heads, ffn 1376, sequence 256, 2 micro-batches of 4, fp32, AdamW, one thread.
Adapters are of all matrices of the layers. The two step in turn, round by round; a figure is the median over rounds of
the ratio of CPU times, with quartiles. A rank keeps its weights and, of what is trained, gradients and two moments: the
formula is 4 bytes a weight and 12 a trained one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cpu_step import Step, llama, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.checkpoint import Plan, Saver, TrainingState
from megalite.config import OptimizerConfig
from megalite.config.adapters import AdaptersConfig
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.head import LM_LOSS
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.adapter import add_adapters
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.proved_schedules import ProvedSchedules

LAYERS, HIDDEN, HEADS, FFN, SEQUENCE, BATCH, MICRO_BATCHES = 4, 512, 8, 1376, 256, 4, 2
TOKENS = SEQUENCE * BATCH * MICRO_BATCHES
GOAL, CHECKPOINT_GOAL = 0.75, 0.03


def make(vocabulary: int, rank: int | None) -> tuple[Step, Optimizer, Plan, int]:
    """Return a step, its optimizer, the plan of its checkpoints, and the bytes that it keeps by the formula."""
    mesh = ParallelMesh()
    model = GPT(llama(LAYERS, HIDDEN, HEADS, FFN, vocabulary), mesh)
    if rank is not None:
        add_adapters(model, AdaptersConfig(lora_rank=rank))
    initialize(model, seed=1)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kept = 4 * sum(parameter.numel() for parameter in model.parameters()) + 12 * trained
    optimizer = make_optimizer([model], mesh, OptimizerConfig(lr=1e-3), DataParallel(torch.float32))
    plan = Plan.alone(optimizer)
    plan.saves_frozen = rank is None
    actions = ProvedSchedules().prove([MICRO_BATCHES]).training(MICRO_BATCHES)
    engine, micro_batches = PipelineEngine([model]), list(batches(vocabulary))

    def step() -> None:
        optimizer.begin_step(MICRO_BATCHES)
        engine.run(actions, micro_batches, {LM_LOSS.name: 1.0 / TOKENS}, optimizer)
        optimizer.step(Rates(1e-3, 1e-3, 0.01))

    return step, optimizer, plan, kept


def batches(vocabulary: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (MICRO_BATCHES, BATCH, SEQUENCE + 1), generator=generator)
    positions, ones = torch.arange(SEQUENCE).expand(BATCH, -1), torch.ones(BATCH, SEQUENCE)
    keys = (RandomKey(1, tuple(range(first, first + BATCH))) for first in itertools.count(0, BATCH))
    return [
        MicroBatch(each[:, :-1].contiguous(), positions, None, each[:, 1:].contiguous(), ones, key)
        for each, key in zip(tokens, keys, strict=False)
    ]


def bytes_kept(optimizer: Optimizer) -> int:
    """Return the bytes of the parameters, gradients and state that a rank keeps."""
    tensors = [bucket.parameters for bucket in (*optimizer.buckets, *optimizer.frozen)]
    tensors += [bucket.gradients for bucket in optimizer.buckets]
    tensors += [tensor for shard in optimizer.shards for tensor in shard.tensors()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def checkpoint_bytes(optimizer: Optimizer, plan: Plan) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Saver(Path(folder), optimizer, plan).save(TrainingState(1, 1, 1), {"model": {}})
        assert isinstance(path, Path)
        return sum(file.stat().st_size for file in path.iterdir())


def held(value: float, goal: float) -> str:
    return f"(goal {goal:g}: {'held' if value <= goal * 1.02 else 'missed'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    made: dict[str, Callable[[], object]] = {}
    kept, sizes = dict[str, tuple[int, int]](), dict[str, int]()
    for name, rank in (("all weights", None), ("adapters", arguments.rank)):
        made[name], optimizer, plan, formula = make(arguments.vocabulary, rank)
        kept[name], sizes[name] = (bytes_kept(optimizer), formula), checkpoint_bytes(optimizer, plan)
    times = measure(made, arguments.rounds, ParallelMesh())
    found = ratios(times, "adapters", "all weights")
    median, size = sorted(found)[len(found) // 2], sizes["adapters"] / sizes["all weights"]
    print(f"rank {arguments.rank}, vocabulary {arguments.vocabulary}, {arguments.rounds} rounds")
    print(f"  CPU time of a step, adapters / all weights   {quartiles(found)} {held(median, GOAL)}")
    print(f"  checkpoint, adapters / all weights           {size:.4f} {held(size, CHECKPOINT_GOAL)}")
    for name, (measured, formula) in kept.items():
        print(f"  kept for {name:12} {measured:,} bytes, by the formula {formula:,} ({measured / formula:.4f})")
    figures = {"cpu_time": found, "checkpoint_bytes": sizes, "kept_bytes_and_formula": kept}
    write_results("lora", {"rank": arguments.rank, "vocabulary": arguments.vocabulary, **figures})


if __name__ == "__main__":
    main()
