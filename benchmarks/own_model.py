"""CPU time of a step of `megalite.Trainer` on a plain model, as ratios: against torch's loop, DDP and fully_shard.

    python -m benchmarks.own_model [--rounds 9]

A vision transformer of plain torch layers: 4 layers, width 256, 65 tokens, 4 micro-batches of 8 images, fp32, AdamW,
one thread a rank. The rivals read the same samples from torch's DataLoader, and accumulate their gradients: DDP reduces
in the last micro-batch; fully_shard, like ZeRO 3, reduces in each. All step in turn, round by round; a figure is the
median over rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import megalite
from benchmarks.cpu_step import Step, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.parallel.mesh import ParallelMesh

LAYERS, WIDTH, HEADS, PATCHES, CLASSES = 4, 256, 4, 64, 10
BATCH, MICRO_BATCHES, SAMPLES = 8, 4, 512
PORT = 29530


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(48, WIDTH)
        self.start = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, PATCHES + 1, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """[batch, patches, values of a patch] to [batch, classes]."""
        hidden = torch.cat([self.start.expand(len(images), -1, -1), self.patches(images)], dim=1) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden[:, 0])
        return logits


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, PATCHES, 48, generator=generator)
    return TensorDataset(images, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer()


def own_step(zero: int = 0) -> Step:
    run = megalite.Trainer(
        model(),
        loss=lambda outputs, batch: cross_entropy(outputs, batch[1]),
        dataset=dataset(),
        optimizer=megalite.AdamW(lr=1e-3, clip_grad=1.0),
        layout=megalite.Layout(zero=zero),
        micro_batch_size=BATCH,
        global_batch_size=BATCH * MICRO_BATCHES * (dist.get_world_size() if dist.is_initialized() else 1),
        watchdog=False,
        timing_interval=0,
        quiet=True,
    )
    return run.step


def micro_batches() -> Iterator[list[Tensor]]:
    """Read the samples of this rank without an end."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    while True:
        yield from DataLoader(dataset(), BATCH, sampler=range(rank, SAMPLES, size))


def torch_step(network: nn.Module, data: Iterator[list[Tensor]], *, syncs_once: bool = False) -> Step:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)

    def step() -> Tensor:
        for number, (images, labels) in enumerate(itertools.islice(data, MICRO_BATCHES), 1):
            if syncs_once:
                network.require_backward_grad_sync = number == MICRO_BATCHES
            (cross_entropy(network(images), labels) / MICRO_BATCHES).backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return step


def fully_sharded() -> nn.Module:
    network, mesh = model(), init_device_mesh("cpu", (2,))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def one_rank(rounds: int) -> dict[str, list[float]]:
    times = measure({"megalite": own_step(), "torch": torch_step(model(), micro_batches())}, rounds, ParallelMesh())
    found = ratios(times, "megalite", "torch")
    print(f"one rank: megalite / torch loop {quartiles(found)}  (target 1.02)")
    return {"megalite / torch": found}


def two_ranks(rank: int, rounds: int, compared: dict[str, list[float]]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(PORT)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {f"ZeRO {stage}": own_step(stage) for stage in (0, 1, 3)}
    distributed = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    steps |= {
        "DDP": torch_step(distributed, micro_batches(), syncs_once=True),
        "fully_shard": torch_step(fully_sharded(), micro_batches()),
    }
    times = measure(steps, rounds, ParallelMesh(rank=rank, world_size=2))
    if rank == 0:
        for ours, rival in (("ZeRO 0", "DDP"), ("ZeRO 1", "DDP"), ("ZeRO 3", "fully_shard")):
            compared[f"{ours} / {rival}"] = found = ratios(times, ours, rival)
            print(f"two ranks: {ours} / {rival} {quartiles(found)}  (target 1.0)")
        milliseconds = {name: 1e3 * statistics.median(each) for name, each in times.items()}
        write_results("own_model", {"milliseconds": milliseconds, "ratios": compared})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {rounds} rounds, median [quartiles] of CPU time")
    multiprocessing.spawn(two_ranks, (rounds, one_rank(rounds)), nprocs=2)


if __name__ == "__main__":
    main()
