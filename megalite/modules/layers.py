"""Several layers as one stage: tensors go from layer to layer as they do from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from torch import Tensor, nn

from megalite.modules.calling import arguments, arguments_of, goes_by_position, named, results
from megalite.parallel.stage import NO_SUMS, StageOutput, TermSums, add_sums


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
    of_forward: Mapping[str, Parameter] | None = None,
) -> tuple[list[Any], dict[str, Any], set[str]]:
    """Return what `arguments` does, for a module or for `Layers`, which add the names when they run."""
    if isinstance(module, Layers):
        taken = set[str]()
        return [inputs, values, taken], {}, taken
    return arguments(number, module, inputs, values, of_forward)


def _without_positions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not goes_by_position(name)}
