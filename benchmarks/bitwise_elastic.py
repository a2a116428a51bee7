"""CPU time of a step of two data-parallel ranks with sums in fixed point, and without, in turns.

    python -m benchmarks.bitwise_elastic [--rounds 9] [--layers 4] [--hidden 256] [--sequence 256]

A rank has one thread and two micro-batches a step. The figures are those of the slower rank: medians, with quartiles,
and their ratio, and the bytes that a rank sends in a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.results import write_results
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.run.run import make_trainer
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import open_data
from megalite.training.trainer import Trainer

SHAPE = """--mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --seq-length {sequence}
--max-position-embeddings {sequence} --num-layers {layers} --hidden-size {hidden} --num-attention-heads 8 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
--micro-batch-size 4 --global-batch-size 16 --train-iters 1000 --lr 1e-4 --eval-iters 0"""
NAMES = ("as always", "fixed point")


def measured(rank: int, store: str, flags: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = ParallelMesh(rank=rank, world_size=2)
    trainers: dict[str, Trainer] = {}
    for name, more in zip(NAMES, ("", " --deterministic-mode --bitwise-elastic"), strict=True):
        config = resolve(parse_arguments((flags + more).split()).config, 2)
        trainers[name] = make_trainer(config, GPTTask(config, open_data(config), mesh), mesh, None)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    sent: dict[str, int] = {}
    for number in range(rounds + 2):
        for name, trainer in trainers.items():
            began = time.process_time()
            with trainer.loader:
                sent[name] = trainer.step().bytes_sent
            if number >= 2:
                seconds[name].append(time.process_time() - began)
    told = all_gather_json(seconds, mesh)
    if rank == 0:
        report(trainers[NAMES[0]], max(told, key=lambda each: statistics.median(each[NAMES[0]])), sent)


def report(trainer: Trainer, seconds: dict[str, list[float]], sent: dict[str, int]) -> None:
    figures: dict[str, Any] = {"parameters": sum(each.numel() for each in trainer.network.parameters())}
    for name, found in seconds.items():
        low, middle, high = statistics.quantiles(found, n=4)
        figures[name] = {"seconds": middle, "quartiles": [low, high], "bytes_sent": sent[name]}
        print(f"{name:12} {middle:.3f} s of the CPU ({low:.3f} to {high:.3f}), {sent[name] / 1e6:.1f} MB sent a step")
    figures["ratio"] = figures[NAMES[1]]["seconds"] / figures[NAMES[0]]["seconds"]
    print(f"{figures['parameters'] / 1e6:.1f}M parameters: {figures['ratio']:.2f} times the CPU time")
    print(write_results("bitwise_elastic", figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    for name, default in (("layers", 4), ("hidden", 256), ("sequence", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    flags = SHAPE.format(**vars(arguments))
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measured, (f"{folder}/store", flags, arguments.rounds), nprocs=2)


if __name__ == "__main__":
    main()
