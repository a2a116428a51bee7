"""Calls of plain modules: which tensor, or field of the batch, goes to which argument of `forward`, and its results.

Tensors go from layer to layer of a stage (`Layers`) as they do from stage to stage.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.parallel.stage import NO_SUMS, StageOutput, TermSums, add_sums

HIDDEN = "hidden"
_BY_POSITION = re.compile(f"{HIDDEN}|output_[0-9]+")
_ANY_POSITION, _ANY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def named(number: int, module: nn.Module) -> str:
    return f"stage {number} ({type(module).__name__})"


def arguments_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the arguments that a module's forward takes."""
    return inspect.signature(module.forward).parameters


def goes_by_position(name: str) -> bool:
    """Tell if a tensor is a result without a name, which goes to the next stage by its position."""
    return _BY_POSITION.fullmatch(name) is not None


def arguments(
    number: int,
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    values: Any,
    of_forward: Mapping[str, inspect.Parameter] | None = None,
) -> tuple[list[Any], dict[str, Any], set[str]]:
    """Return the arguments of a stage's forward, by position and by name, and the names of the inputs that it takes.

    Arguments are filled by name from the previous stages' tensors, then from the fields of a batch that is a mapping.
    What has no name goes to the first arguments that are left: results of the previous stage, or for the first stage
    the batch itself if it is a tensor, or its first element if it is a tuple or list. If none are left, results take
    the place of fields.

    Args:
        of_forward: the arguments that forward takes, if they are known.

    Raises:
        MegaliteError: an argument has no value, or the stage cannot take a tensor of the previous one.
    """
    of_forward = arguments_of(module) if of_forward is None else of_forward
    fields = dict(values) if isinstance(values, Mapping) else {}
    unnamed: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if goes_by_position(name)}
    if number == 0 and not isinstance(values, Mapping):
        unnamed = {"the batch": values[0] if isinstance(values, tuple | list) else values}
    given: dict[str, Any] = {}
    missing, taken = [], set()
    for name, parameter in of_forward.items():
        if parameter.kind in (_ANY_POSITION, _ANY_NAME):
            continue
        if name in inputs or name in fields:
            given[name] = inputs[name] if name in inputs else fields[name]
            taken.add(name)
            unnamed.pop(name, None)
        elif unnamed and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            first = next(iter(unnamed))
            given[name] = unnamed.pop(first)
            taken.add(first)
        elif parameter.default is inspect.Parameter.empty:
            missing.append(name)
    kinds = {parameter.kind for parameter in of_forward.values()}
    takes_rest = _ANY_POSITION in kinds
    if number and not takes_rest:  # as for stages that are nn.Sequential, whose argument is always called input
        for name in [name for name in given if name in fields and name not in inputs][: len(unnamed)]:
            taken.add(first := next(iter(unnamed)))
            given[name] = unnamed.pop(first)
    if missing or (unnamed and not takes_rest):
        wrong = f"needs {', '.join(missing)}" if missing else f"has no argument left for {', '.join(unnamed)}"
        before = "" if number == 0 else f"; the stages before it give {', '.join(inputs) or 'nothing'}"
        raise MegaliteError(
            f"the forward of {named(number, module)} {wrong}. It takes {', '.join(of_forward) or 'nothing'}; the batch "
            f"has {', '.join(fields) or 'no named fields'}{before}. Give a field of the batch, or a result of a stage "
            "before, the name of the argument"
        )
    if _ANY_NAME in kinds:
        for name, tensor in inputs.items():
            if name not in given and not goes_by_position(name):
                given[name] = tensor
                taken.add(name)
    by_position = []
    for name, parameter in of_forward.items():
        if name not in given or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            break
        by_position.append(given.pop(name))
    if takes_rest:
        taken |= set(unnamed)
        by_position += unnamed.values()
    return by_position, given, taken


def results(number: int, module: nn.Module, output: Any) -> dict[str, Tensor]:
    """Return the tensors that a stage returned, by name.

    Raises:
        MegaliteError: it returned something else.
    """
    if isinstance(output, StageOutput):
        output = output.tensors
    if isinstance(output, Tensor):
        return {HIDDEN: output}
    if isinstance(output, tuple | list):
        output = {f"output_{index}": each for index, each in enumerate(output)}
    if not isinstance(output, Mapping):
        raise MegaliteError(
            f"{named(number, module)} returned {type(output).__name__}: let it return a tensor, a tuple of tensors, or "
            "tensors by name"
        )
    for name, each in output.items():
        if not isinstance(each, Tensor):
            raise MegaliteError(f"{named(number, module)} returned {type(each).__name__} as {name}, which is no tensor")
    return dict(output)


class Layers(nn.Module):
    """Consecutive layers of a network, called by their numbers in it, so that names are the same in any layout."""

    def __init__(self, layers: Mapping[str, nn.Module], *, is_last: bool = True) -> None:
        """`is_last`: the network ends with these layers, so that the output is the last layer's alone."""
        super().__init__()
        self._is_last = is_last
        self._running = ""
        for number, layer in layers.items():
            self.add_module(number, layer)

    def running(self) -> str:
        """Return the name of the layer that ran last, for messages."""
        return named(int(self._running), self.get_submodule(self._running))

    def forward(self, inputs: Mapping[str, Tensor], values: Any, taken: set[str]) -> Any:
        """Run the layers. `inputs`: tensors of earlier stages; the names of those that are used are added to `taken`.

        Raises MegaliteError if a layer does not fit what is before it.
        """
        found: dict[str, Tensor] = {}
        output: Any = None
        terms: TermSums = NO_SUMS
        live = dict(inputs)
        for name, layer in self._modules.items():
            assert layer is not None
            self._running = name
            by_position, by_name, used = arguments(int(name), layer, live, values, arguments_of(layer))
            taken |= {each for each in used if live.get(each) is inputs.get(each)}
            output = layer(*by_position, **by_name)
            if isinstance(output, StageOutput):
                output, terms = output.tensors, add_sums(terms, output.terms)
            if self._is_last and name == next(reversed(self._modules)):
                break
            made = results(int(name), layer, output)
            found, live = _without_positions(found) | made, _without_positions(live) | made
        else:
            output = found
        return StageOutput(output, terms) if terms else output


def arguments_of_stage(
    number: int,
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    values: Any,
    of_forward: Mapping[str, inspect.Parameter] | None = None,
) -> tuple[list[Any], dict[str, Any], set[str]]:
    """Return what `arguments` does, for a module or for `Layers`, which add the names when they run."""
    if isinstance(module, Layers):
        taken = set[str]()
        return [inputs, values, taken], {}, taken
    return arguments(number, module, inputs, values, of_forward)


def _without_positions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not goes_by_position(name)}
