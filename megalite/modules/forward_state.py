"""Changes that forward makes beside gradients: to buffers of modules, and to generators of random numbers.

A step keeps these changes if it updates the weights. A step that is skipped or raises leaves none, and neither does a
forward that is not a step's: of a measurement, an evaluation, a search for NaN. A recomputation repeats the first run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megalite.parallel.device import default_generators
from megalite.parallel.state import State

_Place = tuple[dict[str, Any], dict[str, Tensor | None]]
"""A dictionary that holds tensors, and those that it held at one time."""


class _Generator(NamedTuple):
    """Access to the state of a generator of random numbers."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class ForwardState:
    """Buffers and `State` of modules, and the generators that they may draw from: attributes of theirs, and the global
    ones of Python, NumPy and torch. Without modules, the global generators alone.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = list(dict.fromkeys(part for module in modules for part in module.modules()))
        attributes = [each for part in self._modules for each in vars(part).values()]
        found = {id(each): _access(each) for each in (*default_generators(), *attributes)}
        of_programs = _Generator(random.getstate, random.setstate), _Generator(np.random.get_state, np.random.set_state)
        self._generators = [*of_programs, *(each for each in found.values() if each is not None)]

    def copy(self) -> Copies:
        """Copy everything as it is now."""
        return Copies(self._modules, self._generators)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore everything after the block, also after an error."""
        copies = self.copy()
        try:
            yield
        finally:
            copies.restore()


class Copies:
    """Copies of what a `ForwardState` has, as it was at one time."""

    def __init__(self, modules: Sequence[nn.Module], generators: Sequence[_Generator]) -> None:
        self._modules, self._generators = modules, generators
        self._places = self._places_now()
        tensors = {id(each): each for _, named in self._places for each in named.values() if each is not None}
        self._values = {key: (each, each.detach().clone()) for key, each in tensors.items()}
        self._random_states = self._random_states_now()

    def restore(self) -> None:
        """Set everything to the copies. Each buffer is the tensor again that it was."""
        self._assign(self._places)
        for tensor, values in self._values.values():
            _overwrite(tensor, values)
        self._draw_from(self._random_states)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let forward run on the copies within the block, as it did when they were made. Call it once.

        The tensors themselves are not written to: backward may have saved them.
        """
        places, random_states = self._places_now(), self._random_states_now()
        copied = [
            (held, {name: None if each is None else self._values[id(each)][1] for name, each in named.items()})
            for held, named in self._places
        ]
        try:
            self._assign(copied)
            self._draw_from(self._random_states)
            yield
        finally:
            self._assign(places)
            self._draw_from(random_states)

    def _places_now(self) -> list[_Place]:
        buffers: list[_Place] = [(part._buffers, dict(part._buffers)) for part in self._modules]
        states: list[_Place] = [(vars(s), {"values": s.values}) for s in self._modules if isinstance(s, State)]
        return buffers + states

    def _random_states_now(self) -> list[Any]:
        return [generator.get() for generator in self._generators]

    def _assign(self, places: Iterable[_Place]) -> None:
        for part in self._modules:
            part._buffers.clear()  # forward may have registered more
        for held, named in places:
            held.update(named)

    def _draw_from(self, random_states: Iterable[Any]) -> None:
        for generator, state in zip(self._generators, random_states, strict=True):
            generator.set(state)


def _access(value: object) -> _Generator | None:
    """Return the access to a generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _Generator(value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _Generator(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    return None


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Set the values of a tensor, which autograd does not count as a change."""
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if is_expanded or tensor.shape != values.shape:
        tensor.data = values.clone()
    else:
        tensor.data.copy_(values)
