"""Gathers of parameters: between the optimizer step and the next forward (ZeRO 1 and 2), or around each use (ZeRO 3).

With overlap, a gather runs while the modules before it compute. The module that needs the parameters waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megalite.optim.buckets import ParameterBucket
from megalite.optim.layout import unique_parameters


def gather_around_forward(network: nn.Module, blocks: Sequence[nn.Module], buckets: Sequence[ParameterBucket]) -> None:
    """Register hooks that wait for the gathers of parameters before their use. Under ZeRO 3 they also start them.

    Args:
        network: the network of one chunk.
        blocks: the blocks of the network, in order of execution.
        buckets: the buckets of this rank.
    """
    if any(bucket.zero_stage == 3 for bucket in buckets):
        BlockGathers(network, blocks, buckets)
    elif any(bucket.waits_before_use for bucket in buckets):
        _wait_before_use(network, buckets)


Outputs = Tensor | Sequence[Any] | Mapping[str, Any] | None
"""Results of a block: one tensor, or tensors in tuples, lists and mappings."""


class BlockGathers:
    """Hooks of ZeRO 3 that gather the parameters of a block before each use and free them after it.

    In forward, parameters are gathered before the block and freed after it. In backward, they are gathered again at the
    first gradient that reaches the block and freed after its last weight gradient (which W may add later). The order of
    gathers follows from the order of the blocks, so it is the same on all ranks.

    A recomputed block is gathered once for both its second forward and its backward. With overlap, the next block is
    gathered while the current one computes.

    Frozen parameters have no last gradient. In backward they are freed when the next block is reached, which autograd
    does after all operations of this one, and by the optimizer at the end of the backward.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module], buckets: Sequence[ParameterBucket]) -> None:
        bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
        in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
        for parameter in unique_parameters(network):
            if bucket_of[id(parameter)].zero_stage == 3 and id(parameter) not in in_blocks:
                raise ValueError(f"ZeRO 3 would never gather {parameter.sharding.name}: it is in no block")
        self._buckets = [tuple(dict.fromkeys(bucket_of[id(p)] for p in block.parameters())) for block in blocks]
        self._frozen = [tuple(bucket for bucket in those if bucket.layout.frozen) for those in self._buckets]
        self._fetches = any(bucket.slice_on_host for those in self._buckets for bucket in those)
        self._in_backward = False
        self._reached = 0  # the block that backward has reached last
        self._differentiated = set[int]()  # blocks whose outputs need gradients
        network.register_forward_pre_hook(lambda *_: self._enter(backward=False))
        network.register_forward_hook(lambda *_: self._enter(backward=True))
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_forward, index))
            block.register_forward_hook(partial(self._after_forward, index))

    def _enter(self, *, backward: bool) -> None:
        # A forward of a block outside the forward of the network is a recomputation during backward.
        self._in_backward = backward

    def _before_forward(self, index: int, module: nn.Module, arguments: object) -> None:
        following = () if self._in_backward else range(index + 1, len(self._buckets))
        self._gather(index, following[:2])

    def _after_forward(self, index: int, module: nn.Module, arguments: object, outputs: Outputs) -> None:
        if self._in_backward:  # Recomputation: the block's backward follows. Its last gradient frees the parameters.
            return
        for bucket in self._buckets[index]:
            bucket.free_parameters()
        in_backward = self._once_in_backward(index)
        for tensor in _ends(outputs):
            if tensor.requires_grad:
                tensor.register_hook(in_backward)
                self._differentiated.add(index)

    def _once_in_backward(self, index: int) -> Callable[[Tensor], None]:
        """Return a hook that gathers a block at the first gradient that reaches it, for one micro-batch.

        Later gradients must not gather again: the block may already have been freed, and nothing would free it a second
        time. (The gradient of a term of the loss that is computed from the block's input comes last.)
        """
        begun = False

        def hook(gradient: Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                for bucket in self._frozen[self._reached]:
                    if bucket not in self._frozen[index]:
                        bucket.free_parameters()
                self._reached = index
                before = sorted((n for n in self._differentiated if n < index), reverse=True)
                self._gather(index, before[:2])

        return hook

    def _gather(self, index: int, following: Sequence[int]) -> None:
        """Gather a block, and begin with the next: gather it with overlap. `following`: the next two, if there are."""
        for bucket in self._buckets[index]:
            bucket.begin_parameter_gather()
        gathered = 0
        for bucket in self._buckets[following[0]] if following else ():
            if bucket.prefetch:
                bucket.begin_parameter_gather()
                gathered = 1
        for number in following[gathered : gathered + 1] if self._fetches else ():
            for bucket in self._buckets[number]:
                bucket.begin_fetch()
        for bucket in self._buckets[index]:
            bucket.finish_parameter_gather()


def _ends(outputs: Outputs) -> list[Tensor]:
    """Return the outputs through which the first gradient can enter a block in backward: any of its tensors."""
    if isinstance(outputs, Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
    return [tensor for part in parts for tensor in _ends(part)]


def _wait_before_use(network: nn.Module, buckets: Sequence[ParameterBucket]) -> None:
    bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
    for module in network.modules():
        needed = tuple(dict.fromkeys(bucket_of[id(parameter)] for parameter in _own_parameters(module)))
        if needed:
            module.register_forward_pre_hook(partial(_finish_gathers, needed))


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList):
            yield from child.parameters()


def _finish_gathers(buckets: tuple[ParameterBucket, ...], module: nn.Module, arguments: object) -> None:
    for bucket in buckets:
        bucket.finish_parameter_gather()
