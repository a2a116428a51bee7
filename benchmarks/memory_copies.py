"""Price of copies in memory: seconds of the CPU of a step with copies after every step, and without any.

    python -m benchmarks.memory_copies [--rounds 9] [--layers 8] [--hidden 256]

Two ranks on this machine stand for two nodes, and are each other's partners: data-parallel, Llama-style, fp32, AdamW,
one thread a rank. Steps with a copy and steps without one take turns; a figure is the median over rounds of the seconds
of the CPU of all threads of a rank, in which the background work of the copy is included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.recovery.copies import memory_copies
from megalite.extras.recovery.interval import SHARE
from megalite.parallel.collectives import all_gather_json, on_any_rank
from megalite.parallel.mesh import ParallelMesh
from megalite.process.launchers import MEMORY_FILES
from megalite.run.run import make_trainer
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import open_data

SHAPE = """--mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --seq-length {sequence}
--max-position-embeddings {sequence} --num-layers {layers} --hidden-size {hidden} --num-attention-heads 8 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
--micro-batch-size 4 --global-batch-size 16 --train-iters 1000 --lr 1e-4 --eval-iters 0 {zero}
--warm-restart --resume auto --memory-checkpoint-interval 1 --save {folder}"""


def _rank(rank: int, files: list[list[int]], flags: str, rounds: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["SLURMD_NODENAME"], os.environ[MEMORY_FILES] = (
        f"node{rank}",
        f"{os.getpid()} {','.join(map(str, files[rank]))}",
    )
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # without nodes that are replaced, ranks have no partners
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = resolve(parse_arguments(flags.split()).config, 2)
    mesh = ParallelMesh(rank=rank, world_size=2)
    trainer = make_trainer(config, GPTTask(config, open_data(config), mesh), mesh, Path(config.checkpoint.save or ""))
    copies = memory_copies(config, mesh)
    assert copies is not None
    copies.begin(trainer)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    blocking: list[float] = []
    with trainer.loader:
        for number in range(2 * rounds + 4):
            copied = number % 2 == 1
            began = time.process_time()
            trainer.step()
            if copied:
                before = time.perf_counter()
                copies.after_step(busy=False)
                blocking.append(time.perf_counter() - before)
                while copies.busy:
                    time.sleep(0.005)
            used = time.process_time() - began
            if number >= 4:
                seconds[copied].append(used)
            while on_any_rank([copies.busy], mesh)[0]:
                time.sleep(0.005)
    with_copy, without = (statistics.median(seconds[each]) for each in (True, False))
    size = sum(region.part.size for region in copies._regions(trainer))
    parameters = sum(each.numel() for each in trainer.network.parameters())
    found = all_gather_json((with_copy, without, statistics.median(blocking)), mesh)
    if rank == 0:
        with_copy, without, stop = (max(values) for values in zip(*found, strict=True))
        price = with_copy / without - 1
        every = max(1, -(-price // SHARE))
        print(f"{parameters / 1e6:.1f}M parameters, {size / 2**20:.0f} MiB a copy, 16 samples a step on 2 ranks")
        print(f"step without a copy {without:.3f} s of the CPU, with one {with_copy:.3f} s: {100 * price:.1f}%")
        print(
            f"training stops for {1000 * stop:.0f} ms of the clock; every {every:.0f} steps: {100 * price / every:.1f}%"
        )
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--zero", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = SHAPE.format(folder=folder, **vars(given))
        files = [[os.memfd_create("slot") for _ in range(5)] for _ in range(2)]
        context = torch.multiprocessing.start_processes(
            _rank, (files, flags, given.rounds, f"{folder}/store"), nprocs=2, start_method="fork"
        )
        assert context is None or context.join()


if __name__ == "__main__":
    main()
