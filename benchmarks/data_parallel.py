"""CPU time of a data-parallel step on two gloo ranks, as ratios: against torch's DDP, and against its fully_shard.

    python -m benchmarks.data_parallel [--vocabulary 1024] [--rounds 9]

The model, the rounds and what is counted are those of benchmarks/cpu_step.py; the rivals are its plain PyTorch model
with fused AdamW and clipping. DDP reduces once a step, in the last micro-batch (no_sync before it); fully_shard, like
ZeRO 3, gathers before each use and reduces each micro-batch.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import plain_pytorch
from benchmarks.cpu_step import (
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    TOKENS,
    Step,
    batches,
    measure,
    megalite_step,
    quartiles,
    ratios,
)
from benchmarks.results import write_results
from megalite.parallel.mesh import ParallelMesh

PORT = 29520


def ddp_step(vocabulary: int) -> Step:
    model = DistributedDataParallel(_model(vocabulary), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    *first, last = batches(vocabulary)

    def step() -> Tensor:
        with model.no_sync():
            for tokens, labels in first:
                (model(tokens, labels) / (len(first) + 1)).backward()
        tokens, labels = last
        (model(tokens, labels) / (len(first) + 1)).backward()
        return plain_pytorch.update(model, optimizer)

    return step


def fully_sharded_step(vocabulary: int) -> Step:
    model = _model(vocabulary)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = batches(vocabulary)
    return lambda: plain_pytorch.step(model, optimizer, data)


def _model(vocabulary: int) -> plain_pytorch.PlainLlama:
    return plain_pytorch.PlainLlama(vocabulary, LAYERS, HIDDEN, HEADS, FFN, SEQUENCE)


def compare(rank: int, vocabulary: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=2)
    mesh = ParallelMesh(rank=rank, world_size=2)
    steps = {f"ZeRO {stage}": megalite_step(vocabulary, mesh, stage=stage) for stage in (0, 1, 2, 3)}
    steps |= {"DDP": ddp_step(vocabulary), "fully_shard": fully_sharded_step(vocabulary)}
    times = measure(steps, rounds, mesh)
    if rank == 0:
        cost = {name: 1e6 * statistics.median(seconds) / (2 * TOKENS) for name, seconds in times.items()}
        print(f"vocabulary {vocabulary}, two ranks, CPU time of both in µs a token:")
        for name, value in cost.items():
            print(f"  {name:12} {value:6.0f}")
        compared = {}
        for ours, rival in (("ZeRO 0", "DDP"), ("ZeRO 1", "DDP"), ("ZeRO 3", "fully_shard")):
            compared[f"{ours} / {rival}"] = found = ratios(times, ours, rival)
            print(f"  {ours} / {rival:12} {quartiles(found)}")
        write_results("data_parallel", {"vocabulary": vocabulary, "cpu_us_a_token": cost, "ratios": compared})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"torch {torch.__version__}, {arguments.rounds} rounds, median [quartiles] of CPU time")
    multiprocessing.spawn(compare, (arguments.vocabulary, arguments.rounds), nprocs=2)


if __name__ == "__main__":
    main()
