"""CPU time, bytes and memory of context parallelism against one rank: a training step, and attention alone.

    python -m benchmarks.context_parallel [--rounds 9]

A step is that of a Llama-style network with 4 layers, hidden 256, 4 heads and ffn 688, over one sample of 4,096 tokens
in fp32, with AdamW. Attention alone is forward and backward of the core of one of these layers. Counted is the CPU time
of all ranks together, with one thread each; waiting for others costs none. One rank and the ways of context
parallelism step in turn, round by round; a figure is the median over rounds of their ratio, with quartiles.

Then the bytes that a rank sends per layer, what it keeps for backward, and the time to plan attention to a million
tokens, in documents, for all of 64 ranks, and to build one of these ranks on the meta device.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.cpu_step import FFN, HEADS, HIDDEN, LAYERS, Step, llama, measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.config import OptimizerConfig
from megalite.data.loader import MicroBatchArrays
from megalite.model.attention_core import LocalCore
from megalite.model.batch import MicroBatch, first_keys
from megalite.model.context_parallel import ContextParallelCore
from megalite.model.gpt import GPT
from megalite.model.head import LM_LOSS
from megalite.model.sample_mask import SampleMask
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel import collectives
from megalite.parallel.attention_plan import FirstKeys, balanced, rounds
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import Site
from megalite.parallel.sequence import SequenceLayout, zigzag
from megalite.tasks import memory
from megalite.training.batches import Cutting, to_micro_batches
from megalite_kernels.attention import Mask

SEQUENCE, VOCABULARY, WIDTH = 4096, 1024, HIDDEN // HEADS
MILLION, MANY, CHUNKS = 2**20, 64, 8
"""Tokens of the plan, its ranks, and the chunks per rank if they are dealt by the work of documents."""
RING, GATHER = AttentionWay(), AttentionWay(gathers=True)
WAYS = {
    2: {"p2p": RING, "all_gather": GATHER, "a2a": AttentionWay(2)},
    4: {"p2p": RING, "all_gather": GATHER, "a2a": AttentionWay(4), "a2a+p2p": AttentionWay(2)},
}
"""The ways of so many ranks."""
GOALS = {
    "step, C 2 p2p": 1.10,
    "step, C 2 all_gather": 1.15,
    "step, C 2 a2a": 1.15,
    "attention, C 2 p2p": 1.12,
    "attention, C 4 p2p": 1.25,
    "kept, C 4 p2p": 0.30,
    "plan, seconds": 10.0,
}
"""The most that each figure should be."""
Found = dict[str, Any]


def micro_batch(mesh: ParallelMesh) -> MicroBatch:
    """Return this rank's part of one sample."""
    shape = 1, SEQUENCE
    words = np.random.default_rng(0).integers(VOCABULARY, size=(1, SEQUENCE + 1))
    fields = MicroBatchArrays(
        tokens=words[:, :-1],
        labels=words[:, 1:],
        loss_mask=np.ones(shape, dtype=np.float32),
        positions=np.arange(SEQUENCE).reshape(shape),
        document_ids=None,
        padding=None,
        replayed=None,
        sample_ids=range(1),
    )
    cutting = Cutting(mesh.size("cp"), mesh.coordinate("cp"))
    (found,) = to_micro_batches([fields], 1, torch.float32, mesh.device, cutting)
    return found


def network(mesh: ParallelMesh, way: AttentionWay) -> tuple[GPT, Optimizer]:
    """Return the network of one rank, with its optimizer."""
    model = GPT(llama(LAYERS, HIDDEN, HEADS, FFN, VOCABULARY), mesh, attention_ways=(way,))
    initialize(model, seed=1)
    options = DataParallel(torch.float32, 0)
    return model, make_optimizer([model], mesh, OptimizerConfig(lr=1e-3), options, blocks=[model.blocks()])


def training_step(mesh: ParallelMesh, way: AttentionWay = RING) -> Step:
    """Return a training step over one sample."""
    (model, optimizer), batch = network(mesh, way), micro_batch(mesh)

    def step() -> None:
        optimizer.begin_step(1)
        loss = model({}, batch).terms[LM_LOSS.name] / SEQUENCE
        loss.backward()
        optimizer.reduce(0, 1)
        optimizer.step(Rates(1e-3, 1e-3, 0.01))

    return step


def make_mask(layout: SequenceLayout) -> Mask | SampleMask:
    """Return the causal mask of a rank with these tokens."""
    if layout.is_whole:
        return None
    first = torch.zeros(1, layout.length, dtype=torch.int64)
    return SampleMask(layout, first, FirstKeys(), lambda: None, in_blocks=False)


def attention_step(mesh: ParallelMesh, way: AttentionWay = RING) -> Step:
    """Return forward and backward of the attention of a layer, with random queries, keys and values."""
    local = LocalCore(range(HEADS), range(HEADS), None, None, 0.0, Site(0, "attention"), recompute=False)
    core = ContextParallelCore(local, ParallelContext(mesh), way) if mesh.size("cp") > 1 else local
    layout = SequenceLayout.cut(SEQUENCE, zigzag(mesh.size("cp")), mesh.coordinate("cp"))
    mask, tokens = make_mask(layout), sum(map(len, layout.runs))
    generator = torch.Generator().manual_seed(mesh.rank)
    query, key, value = (
        torch.randn(tokens, 1, HEADS, WIDTH, generator=generator, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(tokens, 1, HIDDEN, generator=generator)

    def step() -> None:
        output = core(query, key, value, mask, layout, None)
        torch.autograd.grad(output, (query, key, value), gradient)

    return step


@dataclass
class Sent:
    """Counter of the bytes that this rank sends to others."""

    bytes: int = 0

    def all_gather(self, original: Callable[..., Any], out: Tensor, tensor: Tensor, *, group: Any, **more: Any) -> Any:
        self.bytes += (dist.get_world_size(group) - 1) * tensor.nbytes
        return original(out, tensor, group=group, **more)

    def all_to_all(
        self,
        original: Callable[..., Any],
        out: Tensor,
        rows: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        *,
        group: Any,
        **more: Any,
    ) -> Any:
        size, own = dist.get_world_size(group), dist.get_rank(group)
        counts = [len(rows) // size] * size if sent is None else sent
        of_row = rows.nbytes // max(len(rows), 1)
        self.bytes += of_row * sum(count for rank, count in enumerate(counts) if rank != own)
        return original(out, rows, received, sent, group=group, **more)


@contextmanager
def counted() -> Iterator[Sent]:
    """Count the bytes that this rank sends by gathers and by all-to-alls, of which its other collectives consist."""
    sent = Sent()
    gather, exchange = collectives._all_gather_single, dist.all_to_all_single
    with (
        mock.patch.object(collectives, "_all_gather_single", partial(sent.all_gather, gather)),
        mock.patch.object(dist, "all_to_all_single", partial(sent.all_to_all, exchange)),
    ):
        yield sent


def kept(mesh: ParallelMesh, way: AttentionWay = RING) -> int:
    """Return the bytes that a rank keeps for backward of a step, on average over ranks."""
    (model, optimizer), batch = network(mesh, way), micro_batch(mesh)
    own = torch.tensor([memory.measured(optimizer, [partial(model, {}, batch)]).activations], dtype=torch.float64)
    return round(collectives.all_reduce_(own, mesh.group("cp")).item() / mesh.size("cp"))


def compare(rank: int, size: int, port: int, count: int, answers: multiprocessing.Queue[Found]) -> None:
    """Run all of `size` context-parallel ranks against one rank, and put what is found into the queue."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    one, mesh = ParallelMesh(), ParallelMesh(rank=rank, world_size=size, context_parallel_size=size)
    kinds: dict[str, Callable[..., Step]] = {"attention": attention_step}
    if size == 2:
        kinds["step"] = training_step
    found: Found = {}
    for kind, make in kinds.items():
        steps = {"one": make(one)} | {name: make(mesh, way) for name, way in WAYS[size].items()}
        times = measure(steps, count, mesh)
        times["one"] = [seconds / size for seconds in times["one"]]  # all ranks ran one
        found |= {f"{kind}, C {size} {name}": ratios(times, name, "one") for name in WAYS[size]}
        found[f"{kind}, one of {size}, seconds"] = times["one"]
    for name, way in WAYS[size].items():
        with counted() as sent:
            attention_step(mesh, way)()
        found[f"bytes sent, C {size} {name}"] = sent.bytes
    found |= {f"kept, C {size} {name}": kept(mesh, way) / kept(one) for name, way in WAYS[size].items()}
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def documents(length: int) -> FirstKeys:
    """Return the first keys of a sample in documents of random, mostly short lengths."""
    lengths = np.random.default_rng(0).pareto(1.2, size=length // 100) * 500 + 1
    ends = np.minimum(np.cumsum(lengths.astype(np.int64)), length)
    ids = torch.from_numpy(np.searchsorted(ends, np.arange(length), side="right"))
    first = first_keys(ids[None])[0].numpy()
    return FirstKeys(first, first)


def plan() -> Found:
    """Return the seconds to plan attention to a million tokens for each of 64 ranks, and to build one of them."""
    first, seconds = documents(MILLION), {}
    tables = {
        "zigzag": lambda: zigzag(MANY),
        "documents": lambda: balanced(MILLION, MANY, CHUNKS, {None: LAYERS}, first),
    }
    for name, make in tables.items():
        began = time.perf_counter()
        table = make()
        scores = [
            sum(each.scores for each in rounds(SequenceLayout.cut(MILLION, table, rank), first)) for rank in range(MANY)
        ]
        seconds[f"plan by {name}, seconds"] = time.perf_counter() - began
        seconds[f"plan by {name}, busiest rank over mean"] = max(scores) * MANY / sum(scores)
    began = time.perf_counter()
    mesh = ParallelMesh(world_size=MANY, context_parallel_size=MANY).at(MANY // 3)
    model = GPT(llama(LAYERS, HIDDEN, HEADS, FFN, VOCABULARY), mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    seconds["a rank on the meta device, seconds"] = time.perf_counter() - began
    seconds["plan, seconds"] = max(seconds["plan by zigzag, seconds"], seconds["plan by documents, seconds"])
    return seconds


def spawned(size: int, count: int) -> Found:
    """Return what ranks in processes of their own find."""
    queue: multiprocessing.Queue[Found] = multiprocessing.get_context("spawn").Queue()
    multiprocessing.spawn(compare, (size, 29530 + size, count, queue), nprocs=size)
    return queue.get()


def tell(found: Mapping[str, Any]) -> None:
    """Print the figures, each with its goal."""
    for name, value in found.items():
        goal = f"  (goal {GOALS[name]})" if name in GOALS else ""
        number = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else ""
        words = quartiles(value) if isinstance(value, list) else number
        print(f"  {name:42} {words}{goal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    count = parser.parse_args().rounds
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {count} rounds, median [quartiles] of CPU time over that of one rank")
    found: Found = {}
    for size in WAYS:
        found |= (of_size := spawned(size, count))
        tell(of_size)
    found |= (of_plan := plan())
    tell(of_plan)
    write_results("context_parallel", {"load": os.getloadavg(), "found": found, "goals": GOALS})


if __name__ == "__main__":
    main()
