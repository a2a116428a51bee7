"""Recording of code that runs on the meta device: its kernel launches, the bytes alive, and the waits of the host.

Nothing is computed, so a rank of any layout runs here. Every operator of torch goes through `Recorder`, and every
launch of a Triton kernel, whose launcher runs as it does on a GPU: what it keeps for backward is what it really keeps.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalite.extras.planner.host_tensor import HostTensor, host_tensors
from megalite.extras.planner.records import HostKind, Message, MessageKind, Operation, OperationKind, Work
from megalite.parallel.mesh import Traffic
from megalite.torch_internals import (
    TorchDispatchMode,
    argument_names,
    flash_operator,
    masked_attention_operator,
    storage_identity,
    tree_leaves,
)
from megalite_kernels.attention import as_addend
from megalite_kernels.implementation import on_gpu
from megalite_kernels.launch import recorded_launches

BLOCK = 512
"""Bytes to which torch's allocator on GPUs rounds each tensor."""
_ROOT = Path(__file__).parents[2]
_NO_SHAPE = (0, 0, 0, 0)
_NO_LAUNCH = frozenset(
    ["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "set_", "_unsafe_view"]
)
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "_scaled_mm_v2"})
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # of one speed
_KERNELS_OF_PRODUCTS = frozenset({"multiply_groups", "add_products", "multiply_codes"})
_ASKING = frozenset({"_local_scalar_dense", "nonzero", "_to_copy", "copy_"})
_COPIES = frozenset({"_to_copy", "copy_", "_copy_from"})
_FUSED = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")


class Recorder(TorchDispatchMode):
    """Recorder of all that runs on the meta device within its context.

    Attributes:
        work: launches and messages by phase, the `phase` at the time of each.
        alive: bytes of all tensors on the device. `highest` is their maximum, and `peak` that since `restart_peak`.
        blocks: the same as the allocator of a GPU rounds them; `highest_blocks` is their maximum.
        on_host: bytes of all tensors that offloading keeps on the host; `highest_on_host` is their maximum.
        waits: times that the host needed a value from the device, by the place in the code.
        misplaced: operations on tensors of the device together with tensors on the host, by the place in the code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase: Any = ""
        self.work: dict[Any, Work] = {}
        self.alive = self.peak = self.highest = self.blocks = self.highest_blocks = 0
        self.on_host = self.highest_on_host = 0
        self.waits: Counter[str] = Counter()
        self.misplaced: Counter[str] = Counter()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._of_host: set[int] = set()
        self._stack = ExitStack()

    # ------------------------------------------------------------------------------------------------ the context

    def __enter__(self) -> Recorder:
        self._stack.enter_context(recorded_launches(self._launched))
        self._stack.enter_context(_FusedAttention())
        self._stack.enter_context(_resized(self._resize))
        self._stack.enter_context(host_tensors())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def listen(self, traffic: Traffic) -> None:
        """Record the messages of a mesh."""
        traffic.listener = self._sent

    def restart_peak(self) -> None:
        """Let `peak` begin with the bytes that are alive now."""
        self.peak = self.alive

    def forget(self) -> None:
        """Forget all but the tensors that are alive."""
        self.work, self.phase = {}, ""
        self.waits.clear()
        self.misplaced.clear()
        self.peak = self.highest = self.alive
        self.highest_blocks, self.highest_on_host = self.blocks, self.on_host

    @property
    def total(self) -> Work:
        return sum(self.work.values(), Work())

    def _sent(self, kind: str, ranks: tuple[int, ...], size: int) -> None:
        self._phase().messages[Message(cast(MessageKind, kind), ranks, size)] += 1

    def _phase(self) -> Work:
        if self.phase not in self.work:
            self.work[self.phase] = Work()
        return self.work[self.phase]

    # ------------------------------------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and note its launch, its tensors, waits for the device, and arguments on the host."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in given if each.is_meta]
        if on_device and (value := value_on_host(name, args, kwargs)) is not None:
            self.waits[_place()] += 1
            if name == "_to_copy":
                self._phase().host["to host"] += value.nbytes
            return value
        result = func(*args, **kwargs)
        for tensor in on_device:  # made by torch.tensor, of which no operator tells
            self._keep(tensor)
        results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        made = [each for each in results if each.is_meta]
        offloaded = [each for each in (*given, *results) if isinstance(each, HostTensor)]
        for tensor in (*made, *offloaded):
            self._keep(tensor)
        if not made and not on_device and not offloaded:
            return result
        if on_device and name not in _COPIES and any(not each.is_meta and each.dim() for each in given):
            self.misplaced[_place()] += 1
        if func.is_view or name in _NO_LAUNCH:
            return result
        if offloaded and (name in _COPIES or not (on_device or made)):
            self._add_of_host(on_device, made, offloaded)
        else:
            kind, shape, flops = _counted(name, args, kwargs)
            self._add(name, kind, shape, flops, [*on_device, *made])
        return result

    def _add_of_host(self, given: Sequence[Tensor], made: Sequence[Tensor], offloaded: Sequence[Tensor]) -> None:
        """Count what is copied between the device and the host, or else what an operator on the host moves.

        Args:
            given, made: tensors of the device among the arguments and the results.
            offloaded: tensors of the host among both.
        """
        kind: HostKind = "to device" if made else "to host" if given else "on the host"
        of_copy = (*made, *given)[:1]
        self._phase().host[kind] += sum(each.nbytes for each in of_copy or offloaded)

    def _launched(self, name: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._keep(tensor)
        self._add(name, *_counted_kernel(name, tensors), tensors)

    def _add(
        self,
        name: str,
        kind: OperationKind,
        shape: tuple[int, int, int, int],
        flops: int,
        tensors: Iterable[Tensor],
    ) -> None:
        """Count a launch. Its bytes are those of all tensors; one that is expanded counts what it stores."""
        tensors = list(tensors)
        size = sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in tensors)
        # Without what addmm adds to. (The kernels of products have the same dtype in their first two tensors.)
        inputs = tensors[1:] if kind == "product" and len(tensors) > 3 else tensors
        dtype = next((each.dtype for each in inputs if each.is_floating_point()), torch.int64)
        named = "float8" if dtype in _FLOAT8 else str(dtype).removeprefix("torch.")
        operation = Operation(name, kind, shape, flops, size, named)
        self._phase().operations[operation] += 1

    # ------------------------------------------------------------------------------------------------ memory

    def _keep(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        on_host = isinstance(tensor, HostTensor)
        storage = (tensor.stand_in if isinstance(tensor, HostTensor) else tensor).untyped_storage()
        key = storage_identity(storage)
        if key not in self._storages and (size := storage.nbytes()):
            self._storages[key] = weakref.ref(storage, partial(self._free, key))
            if on_host:
                self._of_host.add(key)
            self._count(key, size)

    def _free(self, key: int, _: object) -> None:
        del self._storages[key]
        self._count(key, 0)
        self._of_host.discard(key)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        if (key := storage_identity(storage)) in self._storages:
            self._count(key, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        """Set the bytes of a storage of the device or the host; 0: it is freed."""
        before = self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size
        if key in self._of_host:
            self.on_host += size - before
            self.highest_on_host = max(self.highest_on_host, self.on_host)
            return
        self.alive += size - before
        self.blocks += _rounded(size) - _rounded(before)
        self.peak, self.highest = max(self.peak, self.alive), max(self.highest, self.alive)
        self.highest_blocks = max(self.highest_blocks, self.blocks)


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


@contextmanager
def _resized(call: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call a function after each change of a storage's size, which is how flat buffers are freed and allocated."""
    resize = torch.UntypedStorage.resize_

    def resize_and_call(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        call(storage)
        return found

    torch.UntypedStorage.resize_ = resize_and_call  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def value_on_host(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what the host gets in place of values of a tensor on the meta device; None if it does not ask for any.

    Numbers are 1; whole tensors are of ones or, if they hold whole numbers, of zeros, so that sums are finite.
    """
    first = args[0] if name in _ASKING else None
    if not isinstance(first, Tensor) or not (first.is_meta or name == "copy_"):
        return None
    if name == "copy_":
        return None if first.is_meta or isinstance(first, HostTensor) or not args[1].is_meta else first.fill_(1)
    if name == "_local_scalar_dense":
        return 1.0 if first.is_floating_point() else 1
    if name == "nonzero":  # as if there were one
        return torch.empty(1, first.dim(), dtype=torch.int64, device=first.device)
    if torch.device(kwargs.get("device") or "meta").type == "meta":
        return None
    values = torch.ones if first.is_floating_point() else torch.zeros
    return values(first.shape, dtype=kwargs.get("dtype") or first.dtype)


class _FusedAttention(TorchFunctionMode):
    """Attention by a fused operator of a device. On the meta device, torch would take plain products instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Compute scaled_dot_product_attention by the operator that torch takes on the device that is planned.

    With a mask, which torch adds to the scores as numbers (a bool one it makes them from), that of a GPU is the
    memory-efficient one. Where it lacks shared keys and values (torch 2.11), torch repeats them, as is done here.
    """
    if attn_mask is None:
        found = flash_operator(of_gpu=on_gpu(query))(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        bias = as_addend(attn_mask, query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        if on_gpu(query):
            heads, keeps = query.shape[1], torch.is_grad_enabled()
            key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
            bias = bias.expand(query.shape[0], heads, -1, -1)
            found = masked_attention_operator()(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)
        else:
            operator = flash_operator(of_gpu=False)
            found = operator(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)
    output: Tensor = found[0]
    return output


def _counted(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OperationKind, tuple[int, int, int, int], int]:
    """Return the kind, the shape and the floating-point operations of an operator."""
    if name in _PRODUCTS:
        left, right = args[1:3] if "add" in name or name.startswith("badd") else args[:2]
        *batch, rows, inner = left.shape
        columns = right.shape[-1]
        count = batch[0] if batch else 1
        if name == "_grouped_mm":  # rows of all groups, which are taken to have equally many
            count, rows = len(right), max(rows // len(right), 1)
        return "product", (count, rows, columns, inner), 2 * count * rows * columns * inner
    if name == "linalg_solve_triangular":
        *batch, rows, columns = args[1].shape
        count = math.prod(batch)
        return "product", (count, rows, columns, max(rows // 2, 1)), count * rows * rows * columns
    if name.startswith(_FUSED):
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        batch, heads, queries, width = query.shape
        keys = key.shape[2]
        # Two products of all scores; backward has five. A causal mask leaves half of them.
        halves = 1 if _is_causal(name, args, kwargs) else 2
        flops = 2 * (5 if backward else 2) * batch * heads * queries * keys * width * halves // 2
        return "attention", (batch * heads, queries, keys, width), flops
    return "elementwise", _NO_SHAPE, 0


def _counted_kernel(name: str, tensors: Sequence[Tensor]) -> tuple[OperationKind, tuple[int, int, int, int], int]:
    """Return the same of a Triton kernel. A grouped product is a batch of products, with the same rows in each."""
    if name not in _KERNELS_OF_PRODUCTS:
        return "elementwise", _NO_SHAPE, 0
    rows, other, *_, result = tensors
    if name == "multiply_groups":
        groups, inner, columns = other.shape
        shape = groups, -(-len(rows) // groups), columns, inner
    elif name == "multiply_codes":
        groups, columns, inner = len(other) // result.shape[1], result.shape[1], other.shape[1]
        shape = groups, -(-len(rows) // groups), columns, inner
    else:
        groups, columns, inner = result.shape
        shape = groups, columns, inner, -(-len(rows) // groups)
    return "product", shape, 2 * len(rows) * columns * inner


def _is_causal(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    number = argument_names(name).index("is_causal")
    return bool(args[number] if number < len(args) else kwargs.get("is_causal", False))


def _place() -> str:
    """Return the innermost place in megalite that called torch, as "file function"."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and path.parent.name != "planner":
            return f"{path.relative_to(_ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside of megalite"
