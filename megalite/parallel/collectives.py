"""Collectives over a `Group`: out of place, shapes along dimension 0, no-ops in a group of one.

The asynchronous forms return a `Pending` whose `wait()` gives the result. On gloo, reduce-scatter is an all-to-all
followed by a sum in rank order: a third of the cost of gloo's own, and the order of the sum depends on nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megalite.errors import CommunicationError
from megalite.parallel.mesh import Group, WaitTimer

_LOST = (
    "another rank has ended (its own message says why, or the system's log where it ran out of "
    "memory) or does not answer. The last checkpoint is as it was; --resume auto continues from it. The backend says: "
)

# torch 2.13 renamed these two and warns at the old names.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Pending:
    """A collective under way."""

    work: Any
    finish: Callable[[], Tensor]
    waits: WaitTimer | None = None
    """Counter to which the time spent waiting is added."""

    def wait(self, what: str = "a collective failed", *details: object) -> Tensor:
        """The result. Raises CommunicationError, which begins with `what % details`, where a rank of the group has gone
        or does not answer.
        """
        if self.work is not None:
            began = time.perf_counter()
            try:
                self.work.wait()
            except RuntimeError as error:
                raise CommunicationError(f"{what % details}: {_LOST}{str(error).splitlines()[0]}") from error
            if self.waits is not None:
                self.waits.seconds += time.perf_counter() - began
        return self.finish()


def launch(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The work that one of the backend's operations begins. Raises CommunicationError if the backend knows already
    that a rank has gone.
    """
    try:
        return operation(*arguments, **options)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo/" in str(error):  # else the arguments are wrong: a defect
            raise CommunicationError(f"a collective failed: {_LOST}{str(error).splitlines()[0]}") from error
        raise


def completed(result: Tensor) -> Pending:
    return Pending(None, lambda: result)


def _is_gloo(group: Group) -> bool:
    return dist.get_backend(group.process_group) == "gloo"


def all_reduce_(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place ("sum" or "max"); for buffers that no autograd graph has saved."""
    return all_reduce_async_(tensor, group, op).wait()


def all_reduce_async_(tensor: Tensor, group: Group, op: str = "sum") -> Pending:
    if group.size == 1:
        return completed(tensor)
    if group.size == 2 and op == "sum" and _is_gloo(group):
        return _gather_and_add(tensor, group)  # as many bytes as gloo's own, in one phase instead of two: half the cost
    if not tensor.is_contiguous():  # gloo adds memory in its own order, which need not be that of other ranks
        pending = all_reduce_async_(tensor.contiguous(), group, op)
        return Pending(None, lambda: tensor.copy_(pending.wait()))
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    work = launch(dist.all_reduce, tensor, reduce_op, group=group.process_group, async_op=True)
    return Pending(work, lambda: tensor, group.waits)


def all_reduce_in_rank_order_(tensor: Tensor, group: Group) -> Tensor:
    """Sum `tensor` in place; on gloo the bits of an element do not depend on where in the tensor it stands.

    (gloo's own all-reduce adds the ranks' numbers in an order that changes along the tensor.) For what is small or
    seldom summed: each rank receives the tensors of all.
    """
    if group.size == 1 or not _is_gloo(group):
        return all_reduce_(tensor, group)
    return _gather_and_add(tensor, group).wait()


def _gather_and_add(tensor: Tensor, group: Group) -> Pending:
    gathered = all_gather_async(tensor.contiguous().view(1, -1), group)

    def add() -> Tensor:
        first, second, *others = gathered.wait()
        total = first + second
        for other in others:
            total.add_(other)
        return tensor.copy_(total.view(tensor.shape))

    return Pending(None, add)


def all_gather_async(tensor: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """[n, ...] on each rank to [size * n, ...] on all; `out`, if given, receives it.

    `tensor` may be this rank's slice of `out` itself.
    """
    if group.size == 1:
        return completed(tensor if out is None or out.data_ptr() == tensor.data_ptr() else out.copy_(tensor))
    tensor = tensor.contiguous()
    gathered = tensor.new_empty((group.size * tensor.shape[0], *tensor.shape[1:])) if out is None else out
    work = launch(_all_gather_single, gathered, tensor, group=group.process_group, async_op=True)
    return Pending(work, lambda: gathered, group.waits)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    return all_gather_async(tensor, group).wait()


def all_gather_text(text: str, group: Group, device: torch.device) -> list[str]:
    """The text of every rank of the group, in rank order, on every rank; it must not be empty."""
    if group.size == 1:
        return [text]
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([encoded.numel()], device=device)
    lengths = all_gather(length, group).tolist()
    gathered = all_gather(pad(encoded, (0, max(lengths) - encoded.numel())), group)
    rows = gathered.view(group.size, -1).cpu().numpy()
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def gather_numbers(numbers: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """The numbers of every rank of the group, in rank order, on its first rank; nothing on the others."""
    if group.size == 1:
        return [list(numbers)]
    own = torch.tensor([len(numbers), *numbers], device=device)
    length = int(all_reduce_(torch.tensor([own.numel()], device=device), group, "max"))
    own = pad(own, (0, length - own.numel()))
    # All ranks receive them, few as they are: to gather them on one, NCCL would buffer there for each of the others.
    gathered = all_gather(own, group).view(group.size, length)
    return [row[1 : row[0] + 1] for row in gathered.tolist()] if group.rank == 0 else []


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Flat parts, one for each rank, to what the ranks had for this one: from rank i so many elements as sizes[i]."""
    if group.size == 1:
        return list(parts)
    received = all_to_all_rows(torch.cat(list(parts)), [part.numel() for part in parts], sizes, group)
    return list(received.split(list(sizes)))


def all_to_all_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """[n, ...] to [m, ...]: the next sent[i] rows are for rank i, and received[i] come from it, in rank order."""
    if group.size == 1:
        return rows
    rows = rows.contiguous()
    result = rows.new_empty(sum(received), *rows.shape[1:])
    process_group = group.process_group
    work = launch(dist.all_to_all_single, result, rows, list(received), list(sent), group=process_group, async_op=True)
    return Pending(work, lambda: result, group.waits).wait()


def reduce_scatter_async(tensor: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """[size * n, ...] on each rank to the sum's slice [n, ...] that this rank owns; `out`, if given, receives it.

    `out` may be this rank's slice of `tensor` itself.
    """
    if group.size == 1:
        return completed(tensor if out is None or out.data_ptr() == tensor.data_ptr() else out.copy_(tensor))
    tensor = tensor.contiguous()
    result = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:])) if out is None else out
    if not _is_gloo(group):
        work = launch(_reduce_scatter_single, result, tensor, group=group.process_group, async_op=True)
        return Pending(work, lambda: result, group.waits)
    received = torch.empty_like(tensor)
    work = launch(dist.all_to_all_single, received, tensor, group=group.process_group, async_op=True)

    def sum_in_rank_order() -> Tensor:
        slices = received.view(group.size, *result.shape)
        torch.add(slices[0], slices[1], out=result)
        for other in slices[2:]:
            result.add_(other)
        return result

    return Pending(work, sum_in_rank_order, group.waits)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    return reduce_scatter_async(tensor, group).wait()
