"""Gathers of parameters: between the optimizer's step and the next forward, or around every use.

With overlap a gather runs while what comes before it computes, and is waited for by the module that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from megalite.optim.buckets import Bucket
from megalite.optim.layout import unique_parameters


def gather_around_forward(network: nn.Module, blocks: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
    """Make the modules of a chunk's network wait for the gathers of their parameters; under ZeRO 3, begin them."""
    if any(bucket.stage == 3 for bucket in buckets):
        BlockGathers(network, blocks, buckets)
    elif any(bucket.prefetch for bucket in buckets):
        _wait_before_use(network, buckets)


Outputs = Tensor | tuple[Tensor | Mapping[str, Tensor], ...]
"""The results of a block: one tensor, or some and its terms of the loss."""


class BlockGathers:
    """ZeRO 3: gathers a block's parameters before its forward and frees them after it; gathers them again in backward
    and frees them after its last weight gradient (W may add that later). The order is fixed by the blocks, so it is the
    same on all ranks.

    A recomputed block is gathered once for its second forward and its backward together. With overlap the next block is
    gathered while one computes.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
        bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
        in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
        for parameter in unique_parameters(network):
            if bucket_of[id(parameter)].stage == 3 and id(parameter) not in in_blocks:
                raise ValueError(f"ZeRO 3 would never gather {parameter.sharding.name}: it is in no block")
        self._buckets = [tuple(dict.fromkeys(bucket_of[id(p)] for p in block.parameters())) for block in blocks]
        self._in_backward = False
        network.register_forward_pre_hook(lambda *_: self._enter(backward=False))
        network.register_forward_hook(lambda *_: self._enter(backward=True))
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_forward, index))
            block.register_forward_hook(partial(self._after_forward, index))

    def _enter(self, *, backward: bool) -> None:
        # A block's forward that runs outside the network's forward is one of recomputation, in backward.
        self._in_backward = backward

    def _before_forward(self, index: int, module: nn.Module, arguments: object) -> None:
        self._gather(index, following=None if self._in_backward else index + 1)

    def _after_forward(self, index: int, module: nn.Module, arguments: object, outputs: Outputs) -> None:
        if self._in_backward:  # recomputation: the block's backward follows, and its last gradient frees it
            return
        for bucket in self._buckets[index]:
            bucket.free_parameters()
        in_backward = self._once_in_backward(index)
        for tensor in _ends(outputs):
            if tensor.requires_grad:
                tensor.register_hook(in_backward)

    def _once_in_backward(self, index: int) -> Callable[[Tensor], None]:
        """Make the hook that gathers a block at the first gradient that reaches it, for one micro-batch.

        A later gradient must not gather again: the block may have been freed by then (the gradient of a term of its
        input comes last), and nothing would free it a second time.
        """
        begun = False

        def hook(gradient: Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._gather(index, following=index - 1)

        return hook

    def _gather(self, index: int, following: int | None) -> None:
        for bucket in self._buckets[index]:
            bucket.begin_parameter_gather()
        if following is not None and 0 <= following < len(self._buckets):
            for bucket in self._buckets[following]:
                if bucket.prefetch:
                    bucket.begin_parameter_gather()
        for bucket in self._buckets[index]:
            bucket.finish_parameter_gather()


def _ends(outputs: Outputs) -> list[Tensor]:
    """Collect the outputs whose gradient reaches a block before that of any parameter: its last tensor, and its terms
    of the loss, which may use parameters after the last tensor was computed.
    """
    if isinstance(outputs, Tensor):
        return [outputs]
    terms = [term for part in outputs if not isinstance(part, Tensor) for term in part.values()]
    return [[part for part in outputs if isinstance(part, Tensor)][-1], *terms]


def _wait_before_use(network: nn.Module, buckets: Sequence[Bucket]) -> None:
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


def _finish_gathers(buckets: tuple[Bucket, ...], module: nn.Module, arguments: object) -> None:
    for bucket in buckets:
        bucket.finish_parameter_gather()
