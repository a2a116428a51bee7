"""Context parallelism on GPUs: attention by parts against float64, losses of each way, and what a ring hides."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.errors import largest, relative
from benchmarks.gpu_training import train
from megalite.model.attention_core import LocalCore
from megalite.model.batch import first_keys
from megalite.model.context_parallel import ContextParallelCore, _AttentionByParts, _Calls
from megalite.model.sample_mask import SampleMask
from megalite.parallel.attention_plan import FirstKeys, Round, rounds
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.key_value_exchange import Ring
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import Site
from megalite.parallel.sequence import SequenceLayout, zigzag
from megalite.parallel.stage_module import Inside
from megalite_kernels.attention import dense_mask, goes_in_blocks
from megalite_kernels.measure import time_interleaved
from megalite_kernels.torch_internals import operator_of_attention

BATCH, HEADS, GROUPS, WIDTH = 2, 8, 2, 64
RANKS, CHUNK = 2, {"cuda": 256, "cpu": 32}
"""Ranks of a ring, and the tokens of each of their two chunks."""
SCALE = 1.0 / math.sqrt(WIDTH)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
"""Norm of the error. Each factor is rounded by 4e-3 in bf16."""
LOSS_TOLERANCE = 2e-3  # of a bf16 loss


class Case(NamedTuple):
    """Precision, soft cap, and whether there are documents: without them, parts are whole or causal."""

    dtype: torch.dtype
    documents: bool = False
    cap: float | None = None


CASES = {
    "flash": Case(torch.bfloat16),
    "flash, fp16": Case(torch.float16),
    "in blocks": Case(torch.bfloat16, documents=True),
    "in blocks, fp32": Case(torch.float32, documents=True),
    "in blocks, capped": Case(torch.bfloat16, documents=True, cap=30.0),
    "unfused": Case(torch.float32),
    "unfused, capped": Case(torch.float64, documents=True, cap=30.0),
}
CONTEXT = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 "
    "--train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 --hidden-dropout 0 "
    "--attention-dropout 0 --bf16"
)
WAYS = {
    "p2p": "--cp-comm-type p2p",
    "all_gather": "--cp-comm-type all_gather",
    "a2a": "--cp-comm-type a2a",
    "a2a+p2p": "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1",
}
LENGTH = 32768
"""Tokens of the sample whose attention is timed."""


@dataclass
class Present:
    """Exchange of a single process, which has the keys and values of all ranks in the order of the sample."""

    length: int
    rounds: Sequence[Round]
    width: int = WIDTH
    inside: Sequence[Inside] = ()

    def prepare(self, own: Tensor) -> Tensor:
        return own

    def blocks(self, prepared: Tensor) -> Iterator[Tensor]:
        for each in self.rounds:
            yield prepared[..., _places(each).to(prepared.device), :]

    def gradient_sum(self) -> PresentSum:
        return PresentSum(self.length, self.width, iter(self.rounds))


@dataclass
class PresentSum:
    """Sum of the gradients of all blocks, in the order of the sample."""

    length: int
    width: int
    rounds: Iterator[Round]
    sum: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        places = _places(next(self.rounds)).to(gradient.device)
        if self.sum is None:
            self.sum = gradient.new_zeros(*gradient.shape[:-2], self.length, self.width)
        self.sum.index_add_(-2, places, gradient)

    def total(self) -> Tensor:
        assert self.sum is not None
        return self.sum


def _places(each: Round) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in each.keys])


def check_parts(device: str) -> dict[str, float]:
    """Return the largest error of attention by the parts of each rank of a ring over what is tolerated, by case.

    Compared with float64 on the CPU are the merged output and log-sum-exp, and the gradients of queries, keys and
    values.
    """
    return {
        name: max(_error_of_parts(case, rank, torch.device(device)) for rank in range(RANKS))
        for name, case in CASES.items()
    }


def _error_of_parts(case: Case, rank: int, device: torch.device) -> float:
    generator, chunk = torch.Generator().manual_seed(rank), CHUNK[device.type]
    length = 2 * RANKS * chunk
    layout = SequenceLayout.cut(length, zigzag(RANKS), rank)
    own = layout.places(torch.device("cpu"))
    ids = torch.zeros(BATCH, length, dtype=torch.int64)
    if case.documents:  # one ends in a chunk, another with one
        ids = torch.stack([(torch.arange(length) >= end).long() for end in (chunk // 2 + 3, 2 * chunk)])
    first = first_keys(ids)
    bounds = FirstKeys(first.amin(0).numpy(), first.amax(0).numpy())

    def drawn(heads: int, tokens: int) -> Tensor:
        return torch.randn(BATCH, heads, tokens, WIDTH, generator=generator).to(case.dtype)

    query, key, value = drawn(HEADS, len(own)), drawn(GROUPS, length), drawn(GROUPS, length)
    gradient = drawn(HEADS, len(own))
    expected = _written_out(query, key, value, gradient, dense_mask(first[:, own], own, torch.arange(length)), case.cap)
    in_blocks = goes_in_blocks(device, case.dtype, chunk, WIDTH, 0.0)
    mask = SampleMask(layout, first.to(device), bounds, lambda: None, in_blocks)
    planned = rounds(layout, bounds)
    calls = _Calls(
        rounds=mask.rounds(layout, gathers=False),
        exchange=Present(length, planned),
        groups=None,
        scale=SCALE,
        cap=case.cap,
        dropout=None,
        length=length,
    )
    inputs = [each.to(device).requires_grad_() for each in (query, torch.stack([key, value]))]
    output = _AttentionByParts.apply(*inputs, None, None, calls)
    *_, lse, _ = output.grad_fn.saved_tensors
    of_query, of_key_value = torch.autograd.grad(output, inputs, gradient.to(device))
    worst = largest(
        relative(ours.cpu(), exact)
        for ours, exact in zip((output.detach(), lse, of_query, *of_key_value.unbind(0)), expected, strict=True)
    )
    return worst / TOLERANCE[case.dtype]


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, mask: Tensor, cap: float | None
) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of attention in float64."""
    inputs = [each.double().requires_grad_() for each in (query, key, value)]
    keys, values = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in inputs[1:])
    scores = inputs[0] @ keys.transpose(2, 3) * SCALE
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -math.inf)
    output = scores.softmax(dim=-1) @ values
    gradients = torch.autograd.grad(output, inputs, gradient.double())
    return [output.detach(), scores.detach().logsumexp(dim=-1), *gradients]


def time_parts(device: str) -> dict[str, object]:
    """Time the attention of one sample, forward and backward: whole, and as the parts of both ranks of a ring.

    Called by one process, which has the keys and values of all. Both compute the same scores, so what is above 1 is
    what parts cost: smaller calls, their merging, and the copies that stand for a ring.
    """
    length, heads, groups, width = (LENGTH, 32, 8, 128) if device == "cuda" else (64, 4, 2, 16)
    whole = SequenceLayout.whole(length)
    drawn = [
        torch.randn(length, 1, count, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        for count in (heads, groups, groups)
    ]
    core = LocalCore(
        range(heads),
        [head * groups // heads for head in range(heads)],
        None,
        None,
        0.0,
        Site(0, "attention"),
        recompute=False,
    )
    gradient = torch.randn(length, 1, heads * width, dtype=torch.bfloat16, device=device)

    def as_whole(_: object) -> None:
        torch.autograd.grad(core(*drawn, None, whole, None), drawn, gradient)

    key_value = torch.stack([each.detach().permute(1, 2, 0, 3) for each in drawn[1:]]).requires_grad_()
    of_ranks = []
    for rank in range(RANKS):
        layout = SequenceLayout.cut(length, zigzag(RANKS), rank)
        places = layout.places(gradient.device)
        mask = SampleMask(
            layout, torch.zeros(1, length, dtype=torch.int64, device=device), FirstKeys(), lambda: None, False
        )
        calls = _Calls(
            rounds=mask.rounds(layout, gathers=False),
            exchange=Present(length, rounds(layout, FirstKeys()), width),
            groups=None,
            scale=1.0 / math.sqrt(width),
            cap=None,
            dropout=None,
            length=length,
        )
        query = drawn[0].detach()[places].permute(1, 2, 0, 3).requires_grad_()
        of_output = gradient[places].unflatten(-1, (heads, width)).permute(1, 2, 0, 3)
        of_ranks.append((query, of_output, calls))

    def by_parts(_: object) -> None:
        for query, of_output, calls in of_ranks:
            output = _AttentionByParts.apply(query, key_value, None, None, calls)
            torch.autograd.grad(output, (query, key_value), of_output)

    times = time_interleaved([as_whole, by_parts], gradient.device)
    own, parts = (sum(each) for each in times)
    chosen = operator_of_attention(*(each.detach().permute(1, 2, 0, 3).requires_grad_() for each in drawn), True)
    return {
        "attention": chosen.name,  # parts take cuDNN's where the whole does, otherwise FlashAttention's
        "tokens": length,
        "milliseconds whole": 1e3 * own,
        "by parts": 1e3 * parts,
        "parts over whole": parts / own,
    }


def compare_ways(gpus: int, deadline: float) -> dict[str, object]:
    """Return the largest relative difference of the losses of two context-parallel ranks from those of one, by way."""
    if gpus < 2:
        return {"left out": "one GPU"}
    expected = train(CONTEXT, 1, gpu=True, deadline=deadline)
    differences: dict[str, object] = {}
    for name, flags in WAYS.items():
        found = train(f"{CONTEXT} --cp 2 {flags}", 2, gpu=True, deadline=deadline)
        # NaN is a word in the metrics
        pairs = [(float(a["lm_loss"]), float(b["lm_loss"])) for a, b in zip(found, expected, strict=True)]
        differences[name] = largest(abs(ours / theirs - 1) for ours, theirs in pairs)
    return differences


def blocks_in_turn(ring: Ring, prepared: Tensor) -> Iterator[Tensor]:
    """Yield the blocks of `Ring.blocks`, but wait for the next one before the current one is computed."""
    block, size = prepared, ring.group.size
    for number in range(2, size + 2):
        following = block if number > size else ring.wait(ring.pass_on(block), number, "keys and values")
        yield block
        block = following.view(block.shape)


def time_ring(mesh: ParallelMesh, length: int, dtype: torch.dtype, repeats: int = 10) -> dict[str, float]:
    """Return the seconds of forward and backward of causal attention: by a ring, with overlap and without, and alone.

    Called by all ranks together. Each rank has its part of the sample in the ring, and alone, all of it.
    """
    heads, groups = 2 * HEADS, 2 * GROUPS
    of_heads = [head * groups // heads for head in range(heads)]
    local = LocalCore(range(heads), of_heads, None, None, 0.0, Site(0, "attention"), recompute=False)
    ring = ContextParallelCore(local, ParallelContext(mesh), AttentionWay())
    layout = SequenceLayout.cut(length, zigzag(mesh.size("cp")), mesh.coordinate("cp"))
    first = torch.zeros(1, length, dtype=torch.int64, device=mesh.device)
    mask = SampleMask(layout, first, FirstKeys(), lambda: None, in_blocks=False)

    def make_step(core: Callable[..., Tensor], *arguments: object) -> Callable[[], None]:
        tokens = length if core is local else length // mesh.size("cp")
        inputs = [
            torch.randn(tokens, 1, count, 2 * WIDTH, dtype=dtype, device=mesh.device, requires_grad=True)
            for count in (heads, groups, groups)
        ]

        def step() -> None:
            output = core(*inputs, *arguments, None)
            torch.autograd.grad(output, inputs, torch.ones_like(output))

        return step

    by_ring, alone = make_step(ring, mask, layout), make_step(local, None, SequenceLayout.whole(length))
    found = {"ring": _median(by_ring, mesh, repeats)}
    with mock.patch.object(Ring, "blocks", blocks_in_turn):
        found["ring without overlap"] = _median(by_ring, mesh, repeats)
    return found | {"attention alone": _median(alone, mesh, repeats)}


def _median(step: Callable[[], None], mesh: ParallelMesh, repeats: int) -> float:
    """Return the median seconds of a step, which all ranks begin together."""
    seconds = []
    for _ in range(repeats + 3):  # the first three warm up
        dist.barrier()
        began = time.perf_counter()
        step()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def _rank(rank: int, size: int, port: int, answers: multiprocessing.Queue[dict[str, float]]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device)
    mesh = ParallelMesh(rank=rank, world_size=size, context_parallel_size=size, device=device)
    found = time_ring(mesh, LENGTH, torch.bfloat16)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def compare_overlap(gpus: int) -> dict[str, object]:
    """Return the times of `time_ring` on two GPUs, and a ring's relative to half of attention alone."""
    if gpus < 2:
        return {"left out": "one GPU"}
    answers: multiprocessing.Queue[dict[str, float]] = multiprocessing.get_context("spawn").Queue()
    multiprocessing.spawn(_rank, (2, 29541, answers), nprocs=2)
    return with_ratios(answers.get(), 2)


def with_ratios(seconds: dict[str, float], ranks: int) -> dict[str, object]:
    """Add the ratios of the ring's times to a rank's share of attention alone."""
    share = seconds["attention alone"] / ranks
    ratios = {f"{name} over attention alone": seconds[name] / share for name in ("ring", "ring without overlap")}
    return {**{f"seconds of {name}": value for name, value in seconds.items()}, **ratios}
