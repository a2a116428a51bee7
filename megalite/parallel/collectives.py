"""Collectives over a `Group`. They gather and scatter along dimension 0, and do nothing in a group of one rank.

They are out of place, except functions with a trailing underscore. The asynchronous forms return a `Pending`, and its
`wait()` returns the result. Tensors on the meta device are not sent; their results have the right shapes. In a group
that is not connected, every other rank is taken to have sent what this one has.

Each collective is recorded once, where it starts, with the bytes of the whole tensor: the input of an all-reduce, a
reduce-scatter or an all-to-all, and the result of an all-gather.

On gloo, reduce-scatter is an all-to-all followed by a sum in rank order. This costs a third of gloo's own
reduce-scatter, and the order of the sum is always the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megalite.errors import CommunicationError
from megalite.parallel.mesh import Group, ParallelMesh

_LOST = (
    "another rank has ended (its own message says why, or the system's log if it ran out of "
    "memory) or does not answer. The last checkpoint is unchanged; --resume auto continues from it. The backend says: "
)

# torch 2.13 renamed these two and warns at the old names.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Pending:
    """A collective in progress."""

    work: Any
    result: Tensor | Callable[[], Tensor]
    """The result, or the function that makes it when the work is done."""
    group: Group | None = None
    """Group to whose waits the time spent waiting is added."""

    def wait(self, what: str = "a collective failed", *details: object) -> Tensor:
        """Wait for the collective and return its result.

        Raises:
            CommunicationError: a rank of the group has ended or does not answer. The message begins with
                `what % details`.
        """
        if self.work is not None:
            began = time.perf_counter()
            try:
                self.work.wait()
            except RuntimeError as error:
                raise CommunicationError(f"{what % details}: {_LOST}{str(error).splitlines()[0]}") from error
            if self.group is not None:
                self.group.waits.by_axis[self.group.axis] += time.perf_counter() - began
        return self.result if isinstance(self.result, Tensor) else self.result()


@dataclass(frozen=True)
class _Failed:
    """Work of an operation that could not start, because the backend had already noticed that a rank has ended."""

    error: RuntimeError

    def wait(self) -> None:
        raise self.error


def launch(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Start an operation of the backend and return its work handle.

    If the backend has already noticed that a rank has ended, the returned work raises this error when it is waited for,
    so that `Pending.wait` reports what the rank was doing.
    """
    try:
        return operation(*arguments, **options)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo/" in str(error):  # otherwise the arguments are wrong: a bug
            return _Failed(error)
        raise


def completed(result: Tensor) -> Pending:
    return Pending(None, result)


def _is_gloo(group: Group) -> bool:
    return dist.get_backend(group.process_group) == "gloo"


def all_reduce_(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `tensor` in place ("sum" or "max"). No autograd graph may have saved it."""
    return tensor if group.size == 1 else all_reduce_async_(tensor, group, op).wait()


def all_reduce_async_(tensor: Tensor, group: Group, op: str = "sum") -> Pending:
    if group.size == 1:
        return completed(tensor)
    group.record("all-reduce", tensor.nbytes)
    return _all_reduce_async_(tensor, group, op)


def _all_reduce_async_(tensor: Tensor, group: Group, op: str) -> Pending:
    if tensor.is_meta or not group.is_connected:
        return completed(tensor)
    if group.size == 2 and op == "sum" and _is_gloo(group):
        return _gather_and_add(tensor, group)  # as many bytes as gloo's own, in one phase, not two: half the cost
    if not tensor.is_contiguous():  # gloo adds in memory order, and the ranks' strides may differ
        pending = _all_reduce_async_(tensor.contiguous(), group, op)
        return Pending(None, lambda: tensor.copy_(pending.wait()))
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    work = launch(dist.all_reduce, tensor, reduce_op, group=group.process_group, async_op=True)
    return Pending(work, tensor, group)


def all_reduce_in_rank_order_(tensor: Tensor, group: Group) -> Tensor:
    """Sum `tensor` in place. On gloo, the bits of an element do not depend on its position in the tensor.

    gloo's own all-reduce adds the ranks' values in an order that changes along the tensor. Use this only for small or
    rare sums on gloo: each rank receives the tensors of all ranks.
    """
    if group.size == 1 or tensor.is_meta or not group.is_connected or not _is_gloo(group):
        return all_reduce_(tensor, group)
    group.record("all-reduce", tensor.nbytes)
    return _gather_and_add(tensor, group).wait()


def _gather_and_add(tensor: Tensor, group: Group) -> Pending:
    gathered = _all_gather_async(tensor.contiguous().view(1, -1), group)

    def add() -> Tensor:
        first, second, *others = gathered.wait()
        total = first + second
        for other in others:
            total.add_(other)
        return tensor.copy_(total.view(tensor.shape))

    return Pending(None, add)


def broadcast_(tensor: Tensor, source: int, group: Group) -> Tensor:
    """Replace `tensor` by that of the rank at position `source` of the group, in place. It is not recorded."""
    if group.size == 1 or tensor.is_meta or not group.is_connected:
        return tensor
    work = launch(dist.broadcast, tensor, group.ranks[source], group=group.process_group, async_op=True)
    return Pending(work, tensor, group).wait()


def all_gather_async(tensor: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Gather [n, ...] of each rank into [size * n, ...] on all ranks, in `out` if given.

    `tensor` may be this rank's slice of `out`.
    """
    if group.size == 1:
        return completed(tensor if out is None or out.data_ptr() == tensor.data_ptr() else out.copy_(tensor))
    group.record("all-gather", group.size * tensor.nbytes)
    return _all_gather_async(tensor.contiguous(), group, out)


def _all_gather_async(tensor: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    gathered = tensor.new_empty((group.size * tensor.shape[0], *tensor.shape[1:])) if out is None else out
    if tensor.is_meta:
        return completed(gathered)
    if not group.is_connected:
        gathered.view(group.size, *tensor.shape).copy_(tensor.clone())  # which may be a part of the result
        return completed(gathered)
    work = launch(_all_gather_single, gathered, tensor, group=group.process_group, async_op=True)
    return Pending(work, gathered, group)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    return all_gather_async(tensor, group).wait()


def all_gather_last(tensor: Tensor, group: Group) -> Tensor:
    """Gather [..., n] of each rank into [..., size * n] on all ranks."""
    return tensor if group.size == 1 else torch.cat(all_gather(tensor, group).chunk(group.size), dim=-1)


def all_gather_json(value: object, mesh: ParallelMesh, *axes: str) -> list[Any]:
    """Return the values of all ranks along `axes`, by default of all ranks, in rank order, on every rank.

    They travel as JSON: tuples arrive as lists.
    """
    group, text = mesh.group(*axes) if axes else mesh.world(), json.dumps(value)
    if group.size == 1 or not group.is_connected:
        return [json.loads(text)] * group.size
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(mesh.device)
    return [json.loads(row.numpy().tobytes()) for row in _gather_uneven(encoded, group)]


def on_any_rank(flags: Sequence[bool], mesh: ParallelMesh) -> list[bool]:
    """Return for each flag whether it is set on any rank."""
    numbers = torch.tensor(flags, dtype=torch.float32, device=mesh.device)
    return [number > 0 for number in all_reduce_(numbers, mesh.world(), "max").tolist()]


def gather_numbers(numbers: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """Return the numbers of all ranks, in rank order, on the group's first rank, and an empty list on the others."""
    # All ranks receive the numbers, which are few. A gather to one rank would need NCCL buffers there for every peer.
    gathered = _gather_uneven(torch.tensor(numbers, dtype=torch.int64, device=device), group)
    return [row.tolist() for row in gathered] if group.rank == 0 else []


def _gather_uneven(values: Tensor, group: Group) -> list[Tensor]:
    """Gather [n] of each rank, whose n may differ, on the CPU of all ranks, in rank order."""
    lengths = all_gather(torch.tensor([values.numel()], device=values.device), group).tolist()
    rows = all_gather(pad(values, (0, max(lengths) - values.numel())), group).view(group.size, max(lengths)).cpu()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Send one flat part to each rank, and return the parts for this rank: sizes[i] elements from rank i."""
    if group.size == 1:
        return list(parts)
    received = all_to_all_rows(torch.cat(list(parts)), [part.numel() for part in parts], sizes, group)
    return list(received.split(list(sizes)))


def all_to_all_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Exchange rows [n, ...] for [m, ...]: sent[i] rows go to rank i and received[i] come from it, in rank order."""
    return all_to_all_rows_async(rows, sent, received, group).wait()


def all_to_all_rows_async(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Pending:
    """Begin `all_to_all_rows`. Without a connection, a copy of the rows or zeros stand for those received."""
    if group.size == 1:
        return completed(rows)
    rows = rows.contiguous()
    group.record("all-to-all", rows.nbytes)
    result = rows.new_empty(sum(received), *rows.shape[1:])
    if rows.is_meta:
        return completed(result)
    if not group.is_connected:
        return completed(rows.clone() if result.shape == rows.shape else result.zero_())
    process_group = group.process_group
    work = launch(dist.all_to_all_single, result, rows, list(received), list(sent), group=process_group, async_op=True)
    return Pending(work, result, group)


def reduce_scatter_async(tensor: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Sum [size * n, ...] over the ranks and return this rank's slice [n, ...], in `out` if given.

    `out` may be this rank's slice of `tensor`.
    """
    if group.size == 1:
        return completed(tensor if out is None or out.data_ptr() == tensor.data_ptr() else out.copy_(tensor))
    tensor = tensor.contiguous()
    group.record("reduce-scatter", tensor.nbytes)
    result = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:])) if out is None else out
    if tensor.is_meta:
        return completed(result)
    if not group.is_connected:
        own = tensor.view(group.size, *result.shape)[group.rank]
        return completed(result if own.data_ptr() == result.data_ptr() else result.copy_(own))
    if not _is_gloo(group):
        work = launch(_reduce_scatter_single, result, tensor, group=group.process_group, async_op=True)
        return Pending(work, result, group)
    received = torch.empty_like(tensor)
    work = launch(dist.all_to_all_single, received, tensor, group=group.process_group, async_op=True)

    def sum_in_rank_order() -> Tensor:
        slices = received.view(group.size, *result.shape)
        torch.add(slices[0], slices[1], out=result)
        for other in slices[2:]:
            result.add_(other)
        return result

    return Pending(work, sum_in_rank_order, group)


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    return reduce_scatter_async(tensor, group).wait()
