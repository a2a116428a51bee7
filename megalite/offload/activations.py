"""Tensors that layers save for backward, in host memory until backward needs them.

A layer's tensors travel to the host while its forward and that of the next one run, each storage once, into buffers of
the layer that later micro-batches use again. They come back while the backward of the offloaded layer after it runs;
those of the last one, when the backward of the micro-batch begins or, if no layer comes after it, during the
computation before. `pipeline/offloading.py` declares these copies.

These stay where they are: parameters and what shares their memory, the input of a stage (which the engine keeps), what
a layer is given without a gradient (such as masks and rotary tables, which all layers share), tensors that are not of
floating-point numbers, and those with fewer elements than the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, is_dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalite.errors import MegaliteError
from megalite.offload.transfers import Copy, Direction, Ended, Ready, Transfers
from megalite.torch_internals import storage_identity

Result = TypeVar("Result")


class Place(NamedTuple):
    """Layer of a forward: its chunk, its number in the chunk, the micro-batch, and the slot of its host buffers."""

    chunk: int
    layer: int
    micro_batch: int
    slot: int

    def __str__(self) -> str:
        return f"layer {self.layer} of chunk {self.chunk}, micro-batch {self.micro_batch}"


@dataclass
class _Buffer:
    """Host memory of one storage that a layer saves, and the copies that wrote and read it last."""

    memory: Tensor
    written: Copy = field(default_factory=Ended)
    read: Copy | None = None

    def finish(self) -> None:
        """Wait until no copy uses it: of a step that failed, it may still be written."""
        self.written.wait()
        if self.read is not None:
            self.read.release()


@dataclass(frozen=True)
class _Released(Ready):
    """End of a copy, for another copy in the other direction."""

    copy: Copy

    def wait(self) -> None:
        self.copy.release()


@dataclass(eq=False)
class _Saved:
    """Storage that a layer has saved: in host memory and, once it comes back, on the device."""

    size: int
    buffer: _Buffer
    on_device: Tensor | None = None
    back: Copy | None = None
    was_read: bool = False

    def __del__(self) -> None:
        """Let the memory on the device be used again after the copy, also if nothing has read it."""
        if self.back is not None and not self.was_read:
            with suppress(Exception):  # nobody misses what could not be copied
                self.back.wait()


@dataclass(eq=False)
class _Layer:
    """Storages that a layer saves in one forward.

    Attributes:
        before: the offloaded layer whose backward is next, until that one comes back.
        staying: storages that stay on the device.
        sources: storages by identity and version, kept until their copies have ended.
    """

    place: Place
    before: _Layer | None
    staying: set[int]
    storages: list[_Saved] = field(default_factory=list)
    sources: dict[tuple[int, int], tuple[torch.UntypedStorage, _Saved]] = field(default_factory=dict)
    comes_back: bool = False


class _Kept(NamedTuple):
    """Place holder of a tensor in the graph.

    Attributes:
        tensor: the tensor, if it stays. Otherwise it is empty; both count the changes in place, `version` at first.
        saved: the storage of one that goes.
    """

    layer: _Layer
    tensor: Tensor
    version: int
    saved: _Saved | None
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Offloading of what a rank's layers save for backward.

    Attributes:
        layers: numbers of the offloaded layers of each chunk, ascending.
        ends: chunks whose last layer is among them.
        begun: called when the copies of a layer begin; None: nobody listens.
    """

    begun: Callable[[Direction, Place], None] | None = None

    def __init__(
        self,
        transfers: Transfers,
        networks: Sequence[nn.Module],
        layers: Sequence[Sequence[int]],
        *,
        ends: Collection[int] = (),
        minimum: int = 0,
        retains: bool = True,
    ) -> None:
        """Connect no layers yet: `around_layer` and `around_module` do.

        Args:
            networks: the chunks of this rank.
            layers, ends: those of the attributes.
            minimum: least number of elements of a tensor that is offloaded.
            retains: keep host memory from one step to the next.
        """
        self.transfers, self.layers, self.ends = transfers, layers, ends
        self._networks, self._minimum, self._retains = networks, max(minimum, 1), retains
        self._buffers: dict[tuple[int, int, int], list[_Buffer]] = {}
        self._slots: Mapping[tuple[int, int], int] = {}
        self._running: tuple[int, int] | None = None  # chunk and micro-batch whose forward runs
        self._counts = False
        self._takes: _Layer | None = None  # the layer whose tensors are counted
        self._parameters: set[int] = set()
        self._open: _Layer | None = None
        self._seen: set[int] = set()  # layers that have run in this forward
        self._last: dict[tuple[int, int], _Layer] = {}
        self._leaving: list[_Layer] = []
        transfers.holds = True

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's buffers."""
        return sum(buffer.memory.nbytes for buffers in self._buffers.values() for buffer in buffers)

    # ------------------------------------------------------------------------------------------------ the step

    def begin_step(self, slots: Mapping[tuple[int, int], int]) -> None:
        """Begin a step. `slots`: the slot of the host buffers of each forward, by chunk and micro-batch."""
        self._slots, self._last, self._leaving = slots, {}, []

    def before_forward(self, chunk: int, micro_batch: int) -> None:
        """Let the layers offload in the forward that follows, if it is one of the step."""
        self._running = (chunk, micro_batch) if (chunk, micro_batch) in self._slots else None
        self._parameters, self._seen = _storages_of(self._networks[chunk]), set()

    def after_forward(self) -> None:
        """Free what has been offloaded. What backward runs forward again offloads nothing."""
        self._running = None
        self._free_sources()

    def before_computation(self, chunk: int, micro_batch: int, following: tuple[int, int]) -> None:
        """Let the last layer of the backward that follows come back during a computation of a micro-batch: at once or,
        if that is a backward of offloaded layers, after these.

        Args:
            following: chunk and micro-batch of the backward.
        """
        last, layer = self._last.get(following), self._last.get((chunk, micro_batch))
        if last is not None and layer is None:
            self._bring_back(last)
        elif layer is not None:
            while layer.before is not None:
                layer = layer.before
            layer.before = last

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        """Let the last layer come back, unless it has come during the computation before."""
        if (last := self._last.pop((chunk, micro_batch), None)) is not None:
            self._bring_back(last)

    def end_step(self) -> None:
        """End the step. Without `retains`, wait for its copies and free the host memory."""
        self._running = None
        if not self._retains:
            for buffers in self._buffers.values():
                for buffer in buffers:
                    buffer.finish()
            self._buffers.clear()

    @contextmanager
    def counting(self, chunk: int) -> Iterator[None]:
        """Copy nothing of a forward of the chunk in the block; `takes` tells what a step would offload."""
        self._counts, self._parameters, self._seen = True, _storages_of(self._networks[chunk]), set()
        try:
            yield
        finally:
            self._counts = False

    def taken_by(self, tensor: Tensor) -> int | None:
        """Return, in a block of `counting`, the layer that would offload a tensor that is saved now; None: it stays."""
        layer = self._takes
        return layer.place.layer if layer is not None and self._goes(layer, tensor) else None

    # ------------------------------------------------------------------------------------------------ the layers

    @contextmanager
    def around_layer(self, chunk: int, layer: int, arguments: object, *, everything: bool) -> Iterator[None]:
        """Offload what the layer saves within the block: everything, or what is saved in `around_module`."""
        runs = (self._running is not None or self._counts) and torch.is_grad_enabled()
        if not runs or layer in self._seen:  # what a second call saves would overwrite what the first has saved
            yield
            return
        self._seen.add(layer)
        staying = self._parameters | {storage_identity(each) for each in _tensors(arguments) if not each.requires_grad}
        micro_batch = 0 if self._running is None else self._running[1]
        place = Place(chunk, layer, micro_batch, self._slots.get((chunk, micro_batch), 0))
        opened = self._open = _Layer(place, self._last.get((chunk, micro_batch)), staying)
        try:
            with self._hooks(opened) if everything else nullcontext():
                yield
        finally:
            self._open = None
        self._free_sources()  # those of the layer before: this layer has run beside their copies
        if opened.storages:
            self._leaving.append(opened)
            self._last[chunk, micro_batch] = opened

    @contextmanager
    def around_module(self) -> Iterator[None]:
        """Offload what a module of the layer that runs saves within the block."""
        with nullcontext() if self._open is None else self._hooks(self._open):
            yield

    @contextmanager
    def _hooks(self, layer: _Layer) -> Iterator[None]:
        if self._counts:
            self._takes = layer
            yield
            self._takes = None
        else:
            with saved_tensors_hooks(partial(self._keep, layer), self._tensor):
                yield

    def _keep(self, layer: _Layer, tensor: Tensor) -> _Kept | Tensor:
        """Return what the graph keeps of a tensor that an operation of the layer saves."""
        goes = self._goes(layer, tensor)
        if tensor.is_leaf and not goes:
            return tensor
        view = tensor.detach()  # an output that its own node keeps is never freed
        as_saved = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        if not goes:
            return _Kept(layer, view, tensor._version, None, *as_saved)
        view.data = view.new_empty(0)
        storage = tensor.untyped_storage()
        # The version: what was changed in place since it was saved is another tensor.
        key = storage_identity(storage), tensor._version
        if key not in layer.sources:
            layer.sources[key] = storage, self._send(layer, storage, tensor.device)
        return _Kept(layer, view, tensor._version, layer.sources[key][1], *as_saved)

    def _goes(self, layer: _Layer, tensor: Tensor) -> bool:
        """Tell whether a tensor is offloaded."""
        return (
            tensor.is_floating_point()
            and tensor.numel() >= self._minimum
            and tensor.device == self.transfers.device
            and tensor.layout == torch.strided
            and not tensor.is_neg()
            and not (tensor.is_leaf and tensor.requires_grad)
            and storage_identity(tensor) not in layer.staying
        )

    # ------------------------------------------------------------------------------------------------ the copies

    def _free_sources(self) -> None:
        """Let the device's memory of layers that have run be used again after their copies."""
        for layer in self._leaving:
            with _said(layer):
                for saved in layer.storages:
                    saved.buffer.written.release()
            layer.sources.clear()
        self._leaving.clear()

    def _send(self, layer: _Layer, storage: torch.UntypedStorage, device: torch.device) -> _Saved:
        """Begin to copy a storage to the host."""
        size = storage.nbytes()
        if not layer.storages:
            self._tell("to host", layer)
        buffer = self._buffer(layer.place, len(layer.storages), size)
        source, target = _bytes(storage, device), buffer.memory[:size]
        buffer.written = self.transfers.begin("to host", source, target, after=buffer.read)
        saved = _Saved(size, buffer)
        layer.storages.append(saved)
        return saved

    def _buffer(self, place: Place, number: int, size: int) -> _Buffer:
        """Return the buffer of the storage with this number, with room for so many bytes."""
        buffers = self._buffers.setdefault((place.chunk, place.layer, place.slot), [])
        if number < len(buffers) and buffers[number].memory.nbytes >= size:
            return buffers[number]
        if number < len(buffers):
            buffers[number].finish()
            del buffers[number].memory  # before the larger one takes its place
        try:
            memory = self.transfers.on_host(size, torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise MegaliteError(
                f"{place}: the host has no room for {size:,} more bytes of activations ({error}): offload fewer layers "
                "by --cpu-offloading-num-layers, or less of them by --activation-offload-fraction"
            ) from error
        buffers[number : number + 1] = [_Buffer(memory)]
        return buffers[number]

    def _bring_back(self, layer: _Layer) -> None:
        """Begin to copy what a layer has saved back to the device, the last storage first, unless that has begun."""
        if layer.comes_back:
            return
        layer.comes_back = True
        self._tell("to device", layer)
        for saved in reversed(layer.storages):
            saved.on_device = torch.empty(saved.size, dtype=torch.uint8, device=self.transfers.device)
            source, after = saved.buffer.memory[: saved.size], _Released(saved.buffer.written)
            saved.back = saved.buffer.read = self.transfers.begin("to device", source, saved.on_device, after)
        layer.storages = []  # from here on the graph alone keeps them, each until its last use

    def _tensor(self, kept: _Kept | Tensor) -> Tensor:
        """Return a saved tensor on the device, and let the layer before its own come back."""
        if isinstance(kept, Tensor):
            return kept
        layer, saved = kept.layer, kept.saved
        if kept.tensor._version != kept.version:  # torch itself does not look where tensors are packed
            raise MegaliteError(f"{layer.place}: a tensor that was saved for backward has been changed in place since")
        if saved is None:
            return kept.tensor
        self._bring_back(layer)
        if layer.before is not None:
            before, layer.before = layer.before, None
            self._bring_back(before)
        assert saved.back is not None
        assert saved.on_device is not None
        with _said(layer):
            saved.back.wait()
        saved.was_read = True
        whole = saved.on_device.untyped_storage()
        tensor = torch.empty(0, dtype=kept.dtype, device=self.transfers.device)
        return tensor.set_(whole, kept.offset, kept.shape, kept.stride)

    def _tell(self, direction: Direction, layer: _Layer) -> None:
        if self.begun is not None:
            self.begun(direction, layer.place)


def within_module(offload: ActivationOffload, run: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that runs another as a module whose saved tensors are offloaded."""

    @wraps(run, updated=())
    def running(*by_position: Any, **by_name: Any) -> Result:
        with offload.around_module():
            return run(*by_position, **by_name)

    return running


def around(module: nn.Module, context: Callable[[object], AbstractContextManager[None]]) -> None:
    """Run each forward of a module within a context, which is made from the arguments."""
    entered: list[AbstractContextManager[None]] = []

    def enter(_: nn.Module, *arguments: object) -> None:
        made = context(arguments)
        made.__enter__()
        entered.append(made)

    def leave(*_: object) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


@contextmanager
def _said(layer: _Layer) -> Iterator[None]:
    """Raise MegaliteError that names the layer if its copies fail."""
    try:
        yield
    except Exception as error:  # whatever a copy raises
        raise MegaliteError(
            f"{layer.place}: a tensor saved for backward could not be copied to the host and back: "
            f"{type(error).__name__}: {error}"
        ) from error


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Return the bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def _storages_of(network: nn.Module) -> set[int]:
    """Return the storages of the parameters and buffers of a network."""
    return {storage_identity(each) for each in (*network.parameters(), *network.buffers())}


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping | tuple | list):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(each)
    elif is_dataclass(values) and not isinstance(values, type):
        yield from _tensors(vars(values))
