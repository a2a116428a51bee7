"""The tensors of a network that can be compared: inputs and outputs of its modules, and gradients with respect to them.

A point is named by the module's path in the network, with the layer's number in the whole network:
`layers.3.attention.query_key_value`. What enters a norm that adds a residual is the sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from megalite.extras.verify.trace import Role
from megalite.model.block import Block
from megalite.model.gpt import GPT
from megalite.model.head import Head, OutputLayer
from megalite.model.norm import LayerNorm
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.parallel.parameter import Parameter
from megalite.training.kernels import is_compiled

HEAD = "head"
"""The last module, whose output here is the loss of each token, [sequence, batch, 1]."""
LOGITS = "head.output"
PRODUCT = ".product"
"""Suffix of the name of a linear layer that has a bias, for its output without it."""


class Point(NamedTuple):
    """Tensor that a module of the network takes or gives, or its gradient."""

    module: str
    role: Role


Values = dict[Point, Tensor]


def global_name(path: str, first_layer: int) -> str:
    """Return the name of a module in the whole network. `first_layer`: the number of the stage's first layer."""
    return re.sub(r"^layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first_layer}", path)


def owners(stage: GPT) -> Iterator[tuple[str, str, Parameter]]:
    """Yield each parameter of a stage with the path of the module that uses it, and the parameter's own name there."""
    for path, module in stage.named_modules():
        if isinstance(module, nn.ParameterList):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            yield path, name, cast(Parameter, parameter)
        for name, child in module.named_children():
            if isinstance(child, nn.ParameterList):
                yield from ((path, f"{name}.{at}", cast(Parameter, each)) for at, each in enumerate(child))


def _first(value: Any) -> Tensor | None:
    """Return the first floating-point tensor among a module's arguments or results."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return (
        next((found for each in value if (found := _first(each)) is not None), None)
        if isinstance(value, tuple | list)
        else None
    )


class Points(Protocol):
    """Receiver of the points of one micro-batch in one stage."""

    def __contains__(self, point: Point, /) -> bool: ...

    def __setitem__(self, point: Point, tensor: Tensor, /) -> None: ...

    def follow(self, tensor: Tensor, point: Point) -> None:
        """Take the gradient with respect to a tensor as a point, when it is there."""


class _Kept(Values):
    """Points without their graph."""

    def __setitem__(self, point: Point, tensor: Tensor) -> None:
        super().__setitem__(point, tensor.detach())

    def follow(self, tensor: Tensor, point: Point) -> None:
        tensor.register_hook(partial(self.__setitem__, point))


@contextmanager
def watched(stage: nn.Module, first_layer: int, points: Callable[[], Points | None]) -> Iterator[None]:
    """Give the points of a stage to what `points` returns, if anything: tensors in forward, and gradients in backward.

    Of a module that is called several times, the first call counts. What is in a compiled layer is not seen.
    """

    def look(name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        values = points()
        if values is not None:
            _look(values, name, module, arguments, output)

    compiled = tuple(f"{path}." for path, module in stage.named_modules() if is_compiled(module))
    handles = [
        module.register_forward_hook(partial(look, global_name(path, first_layer)))
        for path, module in stage.named_modules()
        if path and not isinstance(module, nn.ModuleList | nn.ParameterList) and not path.startswith(compiled)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def captured(stage: GPT) -> Iterator[Values]:
    """Collect the points of a stage that runs once during the block, and its logits."""
    values = _Kept()
    output = None if stage.head is None else stage.head.output
    if output is not None:
        output._losses = partial(_losses, output, values)  # type: ignore[method-assign]
    try:
        with watched(stage, stage.stage_layers.first_layer, lambda: values):
            yield values
    finally:
        if output is not None:
            del output._losses


def _look(values: Points, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """Keep the points of a call of a module."""
    entered, left = _first(arguments), _first(output)
    if isinstance(module, Block):
        if arguments[1] is None:
            _keep(values, name, "input", entered)
        _keep(values, name, "output", (output.hidden + output.branch).detach(), output.branch)  # read only in the sum
    elif isinstance(module, LayerNorm) and isinstance(output, tuple):
        _keep(values, name, "input", output[1], entered)  # the gradient of the sum from all that read it
        _keep(values, name, "output", left)
    elif isinstance(module, Head):
        _keep(values, name, "input", entered)
        if left is not None and left.dim() == 2:
            _keep(values, name, "output", left.detach().unsqueeze(-1))
    else:
        _keep(values, name, "input", entered)
        if name != LOGITS and left is not None:
            _keep_output(values, name, module, left)


def _keep(values: Points, module: str, role: Role, tensor: Tensor | None, source: Tensor | None = None) -> None:
    """Keep a tensor, and its gradient when it is there. `source`: a tensor with the same gradient; None: itself."""
    if tensor is None or Point(module, role) in values:
        return
    values[Point(module, role)] = tensor
    source = tensor if source is None else source
    if source.requires_grad:
        gradient: Role = "input_gradient" if role == "input" else "output_gradient"
        values.follow(source, Point(module, gradient))


_LINEAR = ColumnParallelLinear | ReplicatedLinear | RowParallelLinear


def _keep_output(values: Points, name: str, module: nn.Module, output: Tensor) -> None:
    """Keep an output; that of a linear layer with its bias, and without it: programs differ in what adds the bias."""
    bias = module.bias.detach() if isinstance(module, _LINEAR) and module.bias is not None else None
    plain = output.detach()
    if bias is None:
        _keep(values, name, "output", output)
    elif isinstance(module, ColumnParallelLinear) and not module.adds_bias:
        _keep(values, name, "output", plain + bias, output)
        _keep(values, f"{name}{PRODUCT}", "output", plain)
    else:
        _keep(values, name, "output", output)
        wide = torch.promote_types(output.dtype, torch.float32)
        _keep(values, f"{name}{PRODUCT}", "output", plain.to(wide) - bias)


def _losses(
    layer: OutputLayer,
    values: Points,
    input: Tensor,
    labels: Tensor,
    options: Any,
    frozen: bool = False,
) -> Tensor:
    """Compute the losses as the layer does without fusing them, and keep the logits, which backward overwrites."""
    logits = ColumnParallelLinear.forward(layer, input, frozen=frozen)
    kept = logits.clone()
    _keep(values, LOGITS, "output", kept)
    return vocab_parallel_cross_entropy(kept * 1, labels, layer.group, layer.vocab_size, options)
