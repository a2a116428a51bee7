"""Offloading of what layers save for backward: what goes, what stays, and when buffers are used again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.offload import transfers as copies
from megalite.offload.activations import ActivationOffload, around
from megalite.offload.transfers import ThreadTransfers, Transfers
from megalite.parallel.stage import StageOutput
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.offloading import proved
from megalite.pipeline.schedules import SCHEDULES, Action, orders_of
from megalite.pipeline.stages import Stages
from megalite.torch_internals import storage_identity
from tests.harness.host_arena import host_arena
from tests.harness.late_copies import LateTransfers

CPU = torch.device("cpu")
WIDTH, TOKENS = 8, 5


class Layer(nn.Module):
    """Layer that saves its input by two views, a part of it, an activation, a mask, numbers of tokens, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mixed = hidden @ self.weight + hidden.t().t() * self.scale[0]
        return hidden + torch.tanh(mixed) * mask


class Network(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, inputs: Any, micro_batch: Tensor) -> StageOutput:
        hidden, mask = self.first(micro_batch), torch.linspace(0, 1, WIDTH, dtype=torch.float64)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return StageOutput({}, {"loss": hidden.square().sum()})


def offloaded(
    network: Network, count: int, engine: type[Transfers] = ThreadTransfers, **options: Any
) -> ActivationOffload:
    offload = ActivationOffload(engine(CPU), [network], [list(range(count))], **options)
    for index in range(count):
        around(
            network.layers[index],
            lambda arguments, index=index: offload.around_layer(0, index, arguments, everything=True),
        )
    return offload


def step(network: Network, offload: ActivationOffload | None, actions: list[Action]) -> list[Tensor]:
    """Run a step; return the gradients."""
    network.zero_grad()
    engine: PipelineEngine[Tensor] = PipelineEngine([network])
    engine.offloading = offload
    count = 1 + max(action.micro_batch for action in actions)
    batch = torch.linspace(-1, 1, count * TOKENS * WIDTH, dtype=torch.float64).view(count, TOKENS, WIDTH)
    engine.run(actions, list(batch), {"loss": 0.5})
    return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]


GPIPE = orders_of(SCHEDULES["gpipe"], Stages(), 3, None)[0]
IN_TURN = orders_of(SCHEDULES["1f1b"], Stages(), 3, None)[0]


@contextmanager
def copied(offload: ActivationOffload) -> Iterator[Counter[str]]:
    """Count the bytes of copies by direction."""
    found: Counter[str] = Counter()
    offload.transfers.begun = lambda direction, size: found.update({direction: size})
    yield found
    offload.transfers.begun = None


MATRIX = TOKENS * WIDTH * 8  # bytes


@pytest.mark.parametrize("actions", [GPIPE, IN_TURN], ids=["gpipe", "1f1b"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("engine", [ThreadTransfers, LateTransfers])
def test_gradients_have_the_same_bits_and_each_storage_travels_once(
    engine: type[Transfers], actions: list[Action], count: int
) -> None:
    plain = step(Network(), None, actions)
    network = Network()
    offload = offloaded(network, count, engine, ends=[0] if count == 3 else [])
    with host_arena(), copied(offload) as found:
        assert all(map(torch.equal, step(network, offload, actions), plain))
    # The input, which three operations save by two views, and what tanh saves. The mask is given, and stays.
    assert found == {"to host": 3 * count * 2 * MATRIX, "to device": 3 * count * 2 * MATRIX}


WARM_UP = [Action("F", 0), Action("F", 1), Action("B", 0), Action("F", 2), Action("B", 1), Action("B", 2)]


@pytest.mark.wide
@pytest.mark.parametrize("engine", [ThreadTransfers, LateTransfers])
def test_the_last_layer_comes_back_before_its_backward_begins(engine: type[Transfers]) -> None:
    network = Network()
    plain, offload = step(network, None, WARM_UP), offloaded(network, 3, engine, ends=[0])
    told: list[tuple[str, int, int]] = []
    offload.begun = lambda direction, place: told.append((direction, place.layer, place.micro_batch))
    back = offload.before_backward

    def begin_backward(chunk: int, micro_batch: int) -> None:
        assert ("to device", 2, micro_batch) in told
        assert ("to device", 1, micro_batch) not in told
        back(chunk, micro_batch)

    with host_arena(), mock.patch.object(offload, "before_backward", begin_backward):
        assert all(map(torch.equal, step(network, offload, WARM_UP), plain))
    assert told == [(each.direction, each.layer, each.micro_batch) for each in proved(WARM_UP, offload.layers, [0])]


@contextmanager
def alive_after_forward(network: Network, offload: ActivationOffload | None) -> Iterator[Callable[[], int]]:
    """Run a forward; yield a function that returns the bytes of the device that its graph keeps."""
    kept: list[Any] = []
    plain = torch.autograd.graph.saved_tensors_hooks

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
            def remember(tensor: Tensor) -> Any:
                packed = pack(tensor)
                kept.append(packed)
                return packed

            super().__init__(remember, unpack)

    with (
        mock.patch("megalite.offload.activations.saved_tensors_hooks", Watched),
        Watched(lambda tensor: tensor.detach(), lambda tensor: tensor),
    ):
        if offload is not None:
            offload.begin_step({(0, 0): 0})
            offload.before_forward(0, 0)
        graph = network({}, torch.ones(TOKENS, WIDTH, dtype=torch.float64)).terms["loss"]
        if offload is not None:
            offload.after_forward()
    weights = {storage_identity(parameter) for parameter in network.parameters()}

    def size() -> int:
        there = {storage_identity(each): each.untyped_storage().nbytes() for each in kept if isinstance(each, Tensor)}
        return sum(size for storage, size in there.items() if storage not in weights)

    yield size
    del graph


def test_the_device_keeps_less_by_what_is_offloaded_to_the_byte() -> None:
    with alive_after_forward(Network(), None) as size:
        plain = size()
    network = Network()
    offload = offloaded(network, 2)
    with copied(offload) as found, alive_after_forward(network, offload) as size:
        # The loss saves the last hidden states, and the third layer its input, which is no longer the second's output.
        assert plain - size() == found["to host"] == 2 * 2 * MATRIX


def test_memory_of_the_device_is_free_as_soon_as_the_layer_after_has_run() -> None:
    network, alive = Network(), []
    storages: list[Any] = []

    def look(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        alive.append([storage() is not None for storage in storages])
        storages.append(weakref.ref(arguments[0].untyped_storage()))

    offload = offloaded(network, 3)
    for layer in network.layers:
        layer.register_forward_pre_hook(look)
    step(network, offload, [Action("F", 0), Action("B", 0)])
    assert alive == [[], [True], [False, True]]


def test_what_would_be_offloaded_is_counted_without_a_copy() -> None:
    network = Network()
    offload = offloaded(network, 2)
    sizes: dict[int | None, dict[int, int]] = {0: {}, 1: {}, None: {}}

    def keep(tensor: Tensor) -> Tensor:
        sizes[offload.taken_by(tensor)][storage_identity(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with copied(offload) as found, offload.counting(0), hooks:
        graph = network({}, torch.ones(TOKENS, WIDTH, dtype=torch.float64))
    del graph
    assert [sum(sizes[layer].values()) for layer in (0, 1)] == [2 * MATRIX] * 2
    assert (found, offload.host_bytes) == ({}, 0)


@pytest.mark.parametrize(("actions", "in_flight"), [(GPIPE, 3), (IN_TURN, 1)], ids=["gpipe", "1f1b"])
def test_buffers_are_used_again(actions: list[Action], in_flight: int) -> None:
    network = Network()
    offload = offloaded(network, 2)
    sizes = []
    for _ in range(3):
        step(network, offload, actions)
        sizes.append(offload.host_bytes)
    assert sizes == [in_flight * 2 * 2 * MATRIX] * 3


def test_buffers_are_freed_after_each_step_unless_they_are_retained() -> None:
    network = Network()
    offload = offloaded(network, 2, retains=False)
    with host_arena() as arena:
        for number in (1, 2):
            step(network, offload, IN_TURN)
            assert (offload.host_bytes, arena.allocated) == (0, number * 2 * 2 * MATRIX)


def test_a_buffer_grows_with_what_a_layer_saves() -> None:
    network = Network(1)
    offload = offloaded(network, 1)
    for tokens in (2, 5, 3):
        engine: PipelineEngine[Tensor] = PipelineEngine([network])
        engine.offloading = offload
        engine.run(IN_TURN[:2], [torch.ones(tokens, WIDTH, dtype=torch.float64)], {"loss": 1.0})
        assert offload.host_bytes == 2 * max(tokens, 5 if tokens == 3 else 0) * WIDTH * 8


def test_small_tensors_stay() -> None:
    network = Network()
    offload = offloaded(network, 2, minimum=TOKENS * WIDTH + 1)
    with copied(offload) as found:
        step(network, offload, IN_TURN)
    assert found == {}


def test_forwards_that_are_not_of_a_step_offload_nothing() -> None:
    """Evaluation, and a forward outside the engine."""
    network = Network()
    offload = offloaded(network, 3)
    with copied(offload) as found:
        step(network, offload, [Action("F", 0), Action("F", 1)])
        step(network, offload, IN_TURN)
        found.clear()
        network({}, torch.ones(TOKENS, WIDTH, dtype=torch.float64)).terms["loss"].backward()
    assert found == {}


def test_a_layer_that_runs_twice_offloads_its_first_call() -> None:
    def made() -> Network:
        network = Network(2)
        network.layers.append(network.layers[0])
        return network

    plain, network = step(made(), None, GPIPE), made()
    offload = offloaded(network, 2)
    assert all(map(torch.equal, step(network, offload, GPIPE), plain))


def test_what_changes_after_it_was_saved_is_copied_again() -> None:
    """Two operations save parts of one storage, and in between the second part gets its values. Backward needs only
    that one."""

    class Parts(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            whole = torch.zeros(2, *hidden.shape, dtype=hidden.dtype)
            _Square.apply(hidden, whole[0])
            second: Tensor = _Square.apply(hidden, whole[1])
            return second

    class _Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, place: Tensor) -> Tensor:
            ctx.save_for_backward(place.copy_(input))
            return input.square()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            return 2 * ctx.saved_tensors[0] * gradients[0], None

    parts, hidden = Parts(), torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    offload = ActivationOffload(Transfers(CPU), [parts], [[0]])  # which copies at once
    around(parts, lambda arguments: offload.around_layer(0, 0, arguments, everything=True))
    offload.begin_step({(0, 0): 0})
    offload.before_forward(0, 0)
    output = parts(hidden * 1)
    offload.after_forward()
    offload.before_backward(0, 0)
    output.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("minimum", [0, 100])
def test_a_tensor_that_changes_after_it_was_saved_is_an_error_as_without_offloading(minimum: int) -> None:
    """Also of one that stays, as it is small."""

    class Changed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            squared = hidden.square()
            hidden.add_(1.0)
            return squared

    changed, hidden = Changed(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(hidden * 1).sum().backward()
    offload = ActivationOffload(ThreadTransfers(CPU), [changed], [[0]], minimum=minimum)
    around(changed, lambda arguments: offload.around_layer(0, 0, arguments, everything=True))
    offload.begin_step({(0, 0): 0})
    offload.before_forward(0, 0)
    output = changed(hidden * 1)
    offload.before_backward(0, 0)
    with pytest.raises(MegaliteError, match="a tensor that was saved for backward has been changed"):
        output.sum().backward()


def test_a_copy_that_fails_is_an_error_that_names_the_layer() -> None:
    network = Network()
    offload = offloaded(network, 2)
    step(network, offload, IN_TURN)

    def fail(source: Tensor, target: Tensor, after: object) -> None:
        raise RuntimeError("the bus is gone")

    with mock.patch.object(copies, "_copy", fail), pytest.raises(MegaliteError) as raised:
        step(network, offload, IN_TURN)
    assert str(raised.value) == (
        "layer 0 of chunk 0, micro-batch 0: a tensor saved for backward could not be copied to the host and back: "
        "RuntimeError: the bus is gone"
    )


def test_a_host_without_room_is_an_error_with_the_numbers_and_the_flags() -> None:
    network = Network()
    offload = offloaded(network, 2)
    full = RuntimeError("can't allocate memory")
    with mock.patch.object(copies, "host_memory", side_effect=full), pytest.raises(MegaliteError) as raised:
        step(network, offload, IN_TURN)
    assert f"layer 0 of chunk 0, micro-batch 0: the host has no room for {MATRIX:,} more bytes" in str(raised.value)
    assert "--cpu-offloading-num-layers" in str(raised.value)


class Failing(Layer):
    """Layer that fails when it is told to, after it has saved some tensors."""

    fails = False

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        output = super().forward(hidden, mask)
        if self.fails:
            raise MegaliteError("told to fail")
        return output


def test_a_step_that_fails_leaves_nothing_for_the_next() -> None:
    plain = step(Network(), None, GPIPE)
    network = Network()
    failing = Failing()
    failing.load_state_dict(network.layers[1].state_dict())
    network.layers[1] = failing
    offload = offloaded(network, 2)
    for _ in range(2):
        failing.fails = True
        with pytest.raises(MegaliteError, match="told to fail"):
            step(network, offload, GPIPE)
        failing.fails = False
        assert all(map(torch.equal, step(network, offload, GPIPE), plain))
    assert offload.host_bytes == 3 * 2 * 2 * MATRIX


def test_a_buffer_is_written_after_it_has_been_read() -> None:
    network = Network()
    offload = offloaded(network, 2)
    begin, read = offload.transfers.begin, dict[int, copies.Copy]()
    waited = []

    def record(direction: copies.Direction, source: Tensor, target: Tensor, after: Any = None) -> copies.Copy:
        made = begin(direction, source, target, after)
        if direction == "to device":
            read[source.data_ptr()] = made
        elif (last := read.pop(target.data_ptr(), None)) is not None:
            waited.append(after is last)
        return made

    with mock.patch.object(offload.transfers, "begin", record):
        for _ in range(2):
            step(network, offload, IN_TURN)
    assert waited == [True] * (2 * 3 - 1) * 2 * 2


def test_a_buffer_that_a_failed_step_still_writes_is_not_freed() -> None:
    network = Network()
    offload = offloaded(network, 2, LateTransfers, retains=False)
    offload.begin_step({(0, 0): 0})
    offload.before_forward(0, 0)
    network(None, torch.ones(TOKENS, WIDTH, dtype=torch.float64))  # its copies have begun, and nothing reads them
    *_, (buffer, *_) = offload._buffers.values()  # those of the layers before have been waited for
    assert not buffer.memory.any()
    offload.end_step()
    assert buffer.memory.any()
