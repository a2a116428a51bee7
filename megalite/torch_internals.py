"""All uses of torch functions that are not public, each with its reason. Check this file for each new torch release.

tests/unit/test_torch_internals.py tests all of them with the torch releases that pyproject.toml allows.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore as HashStore  # type checkers do not see those of torch.distributed
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

Made = TypeVar("Made", bound=Tensor)
no_torch_function: Any = torch._C._disabled_torch_function_impl
"""Value of `__torch_function__` in classes of tensors whose operators go to `__torch_dispatch__` alone."""
_FLIGHT_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo; of NCCL, if torch is built with it


def operator(name: str, overload: str = "default") -> Any:
    """Return an operator as a dispatch mode sees it, such as that of `mm` which writes into an output (`out`)."""
    return getattr(getattr(torch.ops.aten, name), overload)


def default_store() -> Store:
    """Return the store of the default process group, which torch does not expose.

    Raises ValueError if there is no default group.
    """
    return c10d._get_default_store()


def new_process_group(
    rank: int,
    ranks: Sequence[int],
    name: Callable[[Store], str],
    timeout: datetime.timedelta | None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Create a process group that only its members create, with our own name.

    Otherwise the same as `dist.new_group(ranks, use_local_synchronization=True)`. torch's names have two problems. A
    name contains the number of groups of this process, so members with different numbers of other groups wait for each
    other for ever. And a name is used again after a group is destroyed, while the store still has the addresses of the
    old group.

    Args:
        name: called with the default group's store; returns the name.
        backend: None for that of the default group.

    Raises:
        RuntimeError: a member has ended.
    """
    world = c10d._get_default_group()
    backend_name, store = c10d._world.pg_map[world]
    own, group_name = dist.Backend(backend or backend_name), name(store)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        own,
        store,
        group_name=group_name,  # type: ignore[arg-type]
        timeout=timeout or c10d._get_default_timeout(own),
        device_id=world.bound_device_id if backend is None else None,
    )
    c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
    return group


def groups_and_members() -> list[tuple[Any, Mapping[int, int]]]:
    """Return all process groups of this process, each with its members' ranks and positions. torch has no public list
    of them."""
    return list(c10d._world.pg_group_ranks.items())


def flight_records() -> list[Any]:
    """Return the contents of each of torch's flight recorders. There is no public way to read one while it records."""
    dumps = (getattr(_distributed_c10d, name, None) for name in _FLIGHT_RECORDERS)
    return [json.loads(dump()) for dump in dumps if dump is not None]


def sequence_number(group: Any) -> int:
    """Return the number of operations of a group so far. Raises RuntimeError if its backend does not count them."""
    return group._get_sequence_number_for_group()


def is_profiling() -> bool:
    """Tell whether torch's profiler or NVTX ranges for nsys are on.

    Callers then skip `record_function`, which costs time even if nothing records.
    """
    return bool(torch._C._autograd._profiler_enabled())


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Run `torch.autograd.backward` without its shape checks in Python, which take two fifths of the time of a call."""
    _engine_run_backward(tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def make_subclass(kind: type[Made], data: Tensor) -> Made:
    """Return a tensor of our own class that shares `data` and requires a gradient, created as `nn.Parameter` is."""
    return torch.Tensor._make_subclass(kind, data, True)


def make_wrapper(kind: type[Made], data: Tensor, device: torch.device) -> Made:
    """Return a tensor of our own class, which has no storage, on a device, with the shape and the dtype of `data`."""
    strides, offset = data.stride(), data.storage_offset()
    return torch.Tensor._make_wrapper_subclass(
        kind, data.shape, strides=strides, storage_offset=offset, dtype=data.dtype, device=device
    )


def storage_identity(of: Tensor | torch.UntypedStorage) -> int:
    """Return an identifier of a tensor's storage. It also works on the meta device, where there are no addresses."""
    return (of.untyped_storage() if isinstance(of, Tensor) else of)._cdata


def flash_operator(*, of_gpu: bool) -> Callable[..., Sequence[Any]]:
    """Return torch's operator of flash attention, whose first result is the output."""
    operators = torch.ops.aten
    if of_gpu:
        return operators._scaled_dot_product_flash_attention
    return operators._scaled_dot_product_flash_attention_for_cpu


def masked_attention_operator() -> Callable[..., Sequence[Any]]:
    """Return torch's operator of attention with numbers that are added to the scores, whose first result is the
    output."""
    return torch.ops.aten._scaled_dot_product_efficient_attention


def argument_names(operator: str) -> list[str]:
    """Return the names of the arguments of an operator of torch, in order."""
    return [each.name for each in getattr(torch.ops.aten, operator).default._schema.arguments]


@functools.cache
def mend_products_on_meta() -> torch.library.Library | None:
    """Make torch add a product of another dtype on the meta device, which torch 2.11 and 2.12 fail to do.

    They take the dtype for `beta`.
    """
    target = torch.empty(1, 1, device="meta")
    factor = target.bfloat16()
    try:
        torch.addmm(target, factor, factor, out_dtype=target.dtype, beta=0.0, out=target)
    except TypeError:
        library = torch.library.Library("aten", "IMPL", "Meta")
        library.impl("addmm.dtype_out", lambda *given, out, **options: out, allow_override=True)
        return library  # whose end would undo it
    return None


@functools.cache
def mend_sgd_on_meta() -> torch.library.Library | None:
    """Give torch's fused SGD a kernel of the meta device, where it has nothing to compute and returns nothing."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_sgd_", "Meta"):
        return None
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_fused_sgd_", lambda *given, **options: None)
    return library  # whose end would undo it


def record_memory(entries: int, out_of_memory: Callable[[int, int, int, int], None]) -> None:
    """Record the last `entries` CUDA allocations. `out_of_memory` is called before any memory is freed.

    torch documents memory snapshots, although their functions are private.
    """
    torch.cuda.memory._record_memory_history(max_entries=entries)
    torch._C._cuda_attach_out_of_memory_observer(out_of_memory)  # type: ignore[attr-defined]


def dump_memory(path: str) -> None:
    """Write the allocations that `record_memory` has recorded. Raises OSError."""
    torch.cuda.memory._dump_snapshot(path)


def rebuild_tensor() -> Callable[..., Tensor]:
    """Return the function whose name `torch.save` writes in the pickle of a tensor. The name is part of the format."""
    return torch._utils._rebuild_tensor_v2


def storage_info(path: str, offset: int, length: int) -> Any:
    """Return the location of a part in a torch distributed checkpoint. The class's name is part of the format."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # imported here: it takes a second

    return _StorageInfo(path, offset, length)
