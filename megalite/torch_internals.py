"""Uses of what is not public in torch, each with its reason: the file to look at when torch has a new release.

tests/unit/test_torch_internals.py asks for all of it, under the releases that pyproject.toml allows.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore as HashStore  # torch.distributed's are hidden from type checkers
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.distributed import distributed_c10d as c10d

Made = TypeVar("Made", bound=Tensor)
_FLIGHT_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # gloo's; and NCCL's, where there is NCCL


def default_store() -> Store:
    """The store that the default group was made with, which torch keeps to itself; without one a ValueError."""
    return c10d._get_default_store()


def new_process_group(
    rank: int, ranks: Sequence[int], name: Callable[[Store], str], timeout: datetime.timedelta | None
) -> dist.ProcessGroup:
    """Make a process group that only its members make, under a name of our own.

    This is what `dist.new_group(ranks, use_local_synchronization=True)` does, but for the name: torch's has the number
    of the process's groups in it, so that members with different numbers of other groups wait for each other for ever,
    and comes again after a group is destroyed, when the store still holds the addresses of the one before.

    Args:
        name: gives the name, from the default group's store.

    Raises:
        RuntimeError: a member has gone.
    """
    world = c10d._get_default_group()
    backend_name, store = c10d._world.pg_map[world]
    backend, group_name = dist.Backend(backend_name), name(store)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        backend,
        store,
        group_name=group_name,  # type: ignore[arg-type]
        timeout=timeout or c10d._get_default_timeout(backend),
        device_id=world.bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
    return group


def groups_and_members() -> list[tuple[Any, Mapping[int, int]]]:
    """Every process group of this process, with the members' ranks and positions: torch lists them nowhere."""
    return list(c10d._world.pg_group_ranks.items())


def flight_records() -> list[Any]:
    """Return what each flight recorder of torch holds: there is no public way to read one while it records."""
    dumps = (getattr(_distributed_c10d, name, None) for name in _FLIGHT_RECORDERS)
    return [json.loads(dump()) for dump in dumps if dump is not None]


def sequence_number(group: Any) -> int:
    """The number of a group's operations so far. Raises RuntimeError if its backend does not count."""
    return group._get_sequence_number_for_group()


def is_profiling() -> bool:
    """Tell if a profiler of torch's, or nsys with its ranges, is on: `record_function` costs time without one, too."""
    return bool(torch._C._autograd._profiler_enabled())


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Do as `torch.autograd.backward` does, less its checks of shapes in Python: two fifths of what a call costs."""
    _engine_run_backward(tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def make_subclass(kind: type[Made], data: Tensor) -> Made:
    """A tensor of a class of our own over `data`, as `nn.Parameter` makes itself: it requires a gradient."""
    return torch.Tensor._make_subclass(kind, data, True)


def storage_identity(tensor: Tensor) -> int:
    """Return what tells the storage under a tensor from all others, also on the meta device, without addresses."""
    return tensor.untyped_storage()._cdata


def record_memory(entries: int, out_of_memory: Callable[[int, int, int, int], None]) -> None:
    """Record the last allocations on CUDA; `out_of_memory` is called before anything is freed. Snapshots of memory are
    documented by torch, and their functions private all the same."""
    torch.cuda.memory._record_memory_history(max_entries=entries)
    torch._C._cuda_attach_out_of_memory_observer(out_of_memory)  # type: ignore[attr-defined]


def dump_memory(path: str) -> None:
    """Write what `record_memory` has recorded. Raises OSError."""
    torch.cuda.memory._dump_snapshot(path)


def rebuild_tensor() -> Callable[..., Tensor]:
    """The function by whose name `torch.save` pickles a tensor: a part of its format."""
    return torch._utils._rebuild_tensor_v2


def storage_info(path: str, offset: int, length: int) -> Any:
    """Place of a part in a folder of distributed checkpoints, of a class whose name is a part of the format."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # takes a second

    return _StorageInfo(path, offset, length)
