"""Recurrences over runs of tokens on a rank, by a chain of messages and alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sequence import SequenceLayout, zigzag
from megalite.parallel.state_chain import StateChain
from megalite_kernels.recurrence import Segment, recurrence

TOKENS, HEADS, WIDTH, CHUNK = 96, 2, 16, 8  # widths are multiples of 64 bytes: products take the same kernels


def inputs(delta: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the arguments of a recurrence, the first keys of documents, and the gradient of its output."""
    generator = torch.Generator().manual_seed(3)
    shape = (TOKENS, 2, HEADS, WIDTH)
    query, key, value, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    decay = -torch.rand(shape[:3], generator=generator, dtype=torch.float64)
    step = torch.rand(shape[:3], generator=generator, dtype=torch.float64)
    first = torch.zeros(2, TOKENS, dtype=torch.int64)
    first[0, 40:], first[1, 61:] = 40, 61
    return [query, key / key.norm(dim=-1, keepdim=True) if delta else key, value, decay, step], first, gradient


def computed(ranks: int, delta: bool) -> list[Tensor]:
    """Return this rank's outputs and gradients, where `ranks` context-parallel ranks pass states on."""
    mesh = ParallelMesh()
    if ranks > 1:
        rank = torch.distributed.get_rank()
        mesh = ParallelMesh(rank=rank, world_size=ranks, context_parallel_size=ranks)
    layout = SequenceLayout.cut(TOKENS, zigzag(ranks), mesh.coordinate("cp"))
    whole, first, gradient = inputs(delta)
    own = [layout.own(each, 0).requires_grad_() for each in whole]
    options: dict[str, Any] = {} if ranks == 1 else {"chain": StateChain(mesh.group("cp"), layout)}
    segments = [Segment(run, first[:, run.start : run.stop]) for run in layout.runs]
    output, _ = recurrence(*own, delta=delta, chunk=CHUNK, segments=segments, **options)
    output.backward(layout.own(gradient, 0))
    return [output.detach(), *(each.grad for each in own if each.grad is not None)]
