"""What forward changes beside gradients: the buffers of modules, and generators of random numbers.

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


class _Generator(NamedTuple):
    """Access to the state of a generator of random numbers."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class ForwardState:
    """Buffers of modules, and the generators that they may draw from: attributes of theirs, and the global ones of
    Python, NumPy and torch. Without modules, the global generators alone.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = list(dict.fromkeys(part for module in modules for part in module.modules()))
        attributes = [each for part in self._modules for each in vars(part).values()]
        found = {id(each): _access(each) for each in (*default_generators(), *attributes)}
        of_programs = _Generator(random.getstate, random.setstate), _Generator(np.random.get_state, np.random.set_state)
        self._generators = [*of_programs, *(each for each in found.values() if each is not None)]

    def copy(self) -> Copies:
        """Copy the buffers and the states of the generators as they are now."""
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
        self._buffers = [(part._buffers, dict(part._buffers)) for part in modules]
        tensors = {id(each): each for _, named in self._buffers for each in named.values() if each is not None}
        self._values = {key: each.detach().clone() for key, each in tensors.items()}
        self._generators, self._states = generators, [generator.get() for generator in generators]

    def restore(self) -> None:
        """Set everything to the copies. Each buffer is the tensor again that it was."""
        self._assign(self._buffers)
        for _, named in self._buffers:
            for tensor in named.values():
                if tensor is not None:
                    _overwrite(tensor, self._values[id(tensor)])
        self._draw_from(self._states)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let forward run on the copies within the block, as it did when they were made. Call it once.

        The buffers themselves are not written to: backward may have saved them.
        """
        buffers = [(held, dict(held)) for held, _ in self._buffers]
        states = [generator.get() for generator in self._generators]
        copied = [
            (held, {name: None if each is None else self._values[id(each)] for name, each in named.items()})
            for held, named in self._buffers
        ]
        try:
            self._assign(copied)
            self._draw_from(self._states)
            yield
        finally:
            self._assign(buffers)
            self._draw_from(states)

    def _assign(self, buffers: Iterable[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]]) -> None:
        for held, named in buffers:
            held.clear()
            held.update(named)

    def _draw_from(self, states: Iterable[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
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
