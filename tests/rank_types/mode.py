"""The mode of `spmd_types` that gives results of torch's operations their types, with what it lacks for megalite.

It learns that a product with a split weight may be a term of a sum, that a backward is linear in its gradients, and
what becomes of a tensor when a view of it is written to. Constants of a network count as equal on all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from spmd_types import _checker, _mesh_axis
from spmd_types._mesh import set_current_mesh
from spmd_types._mesh_axis import MeshAxis
from spmd_types._state import _current_mode
from spmd_types.runtime import no_typecheck
from spmd_types.types import I, P, R, SpmdTypeError, V
from spmd_types.types import PerMeshAxisLocalSpmdType as Type
from torch import Tensor

from megalite.parallel.parameter import Parameter
from tests.rank_types.axes import Axes, Types, set_type, type_of

PRODUCTS: dict[Any, tuple[int, int, bool]] = {
    F.linear: (0, 1, True),
    torch.mm: (0, 1, False),
    Tensor.matmul: (0, 1, False),
    Tensor.addmm_: (1, 2, False),
}
"""Places of the two factors among the arguments of a product, and if it sums over the columns of the second."""
PLACES = {torch.empty, Tensor.new_empty, torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
"""Functions whose results are equal on all ranks, whatever tensors they take, until something is written there."""


class Mode(_checker._SpmdTypeMode):
    """Mode in which operations are checked.

    Attributes:
        axes: the axes of types.
        is_linear: what runs now is linear in all terms of sums that it gets: a backward, or a sum over ranks.
    """

    axes: Axes
    is_linear = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._disabled or not self._type_constants(func, args, kwargs):
            return func(*args, **kwargs)
        result = self._product(func, args, kwargs)
        if result is None:
            result = super().__torch_function__(func, types, args, kwargs)
        written = _checker._get_mutated_tensors(func, args, kwargs, result)
        if func is Tensor.__setitem__:
            written = [set_type(args[0], _joined(args[0], args[2]))] if isinstance(args[2], Tensor) else []
        for tensor in written:
            if tensor._base is not None and type_of(tensor._base):
                set_type(tensor._base, _joined(tensor._base, tensor))
        return result

    @contextmanager
    def entered(self, *, is_linear: bool | None = None) -> Iterator[None]:
        """Check what runs within the block: inside an autograd function, which an operation of this mode has called."""
        outer, self.is_linear = self.is_linear, self.is_linear if is_linear is None else is_linear
        with ExitStack() as stack:
            if self not in torch.overrides._get_current_function_mode_stack():
                stack.enter_context(self)
            yield
        self.is_linear = outer

    def infer(self, function: Callable[..., Type]) -> Callable[..., Type]:
        """Return the rule for an operation's result along an axis, given that of `spmd_types`."""

        @functools.wraps(function)
        def infer(axis: MeshAxis, kinds: list[Type], *arguments: Any, **options: Any) -> Type:
            if self.is_linear and P in kinds and V not in kinds:
                return P
            return function(axis, kinds, *arguments, **options)

        return infer

    def _product(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return a product with a weight that is split along what it sums over: a term of a sum. None if it is none."""
        if func not in PRODUCTS:
            return None
        first, second, of_columns = PRODUCTS[func]
        factor, weight = args[first], args[second]
        over = _split_over(weight, self.axes, columns=of_columns) if isinstance(weight, Parameter) else frozenset()
        if not over:
            return None
        types = _checker.infer_output_type([type_of(factor), type_of(weight)], no_grad=[True, True])
        if any(type_of(factor)[axis] is not V for axis in over):
            raise SpmdTypeError(f"{weight.sharding.name} is split over {over}, and what it is multiplied with is not")
        types |= dict.fromkeys(over, P)
        place = kwargs.get("out", args[0] if first else None)
        if place is not None:
            _check_writing(func, [place], types, {id(place)})
        with no_typecheck():
            result: Tensor = func(*args, **kwargs)
        return set_type(result, types)

    def _type_constants(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Give constants among the arguments a type. Returns False for an operation on constants alone."""
        found = [each for value in (*args, *kwargs.values()) for each in _checker._iter_tensors_in(value)]
        constants = [each for each in found if not type_of(each)]
        if found and len(constants) == len(found):
            return False
        for each in constants:
            if each.requires_grad:
                raise SpmdTypeError(f"{func.__name__} of a tensor that takes a gradient and has no type")
            set_type(each, self.axes.types())
        return True


@contextmanager
def checking(axes: Axes) -> Iterator[Mode]:
    """Check the types of all operations within the block."""
    with ExitStack() as stack:

        def change(name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(_checker, name, value))

        change("_SpmdTypeMode", Mode)
        change("_DETERMINISTIC_NEW_FACTORIES", _checker._DETERMINISTIC_NEW_FACTORIES | PLACES)
        change("_PASSTHROUGH", _checker._PASSTHROUGH | {torch.autograd.backward})
        change("_DECOMP_TYPE_RULES", {})  # which know of no gradients, and let R stand for no I
        change("_validate_mutation_types", _check_writing)
        change("_auto_reinterpret_cross_mesh", lambda types, specs: (types, specs))  # all types have the same axes
        stack.callback(_mesh_axis._reset)
        for axis, name in axes.names.items():
            _mesh_axis._register_name(axis, name)
        stack.enter_context(set_current_mesh(frozenset(axes.all)))
        stack.enter_context(_checker.typecheck())
        mode = _current_mode()
        mode.axes = axes
        change("infer_local_type_for_axis", mode.infer(_checker.infer_local_type_for_axis))
        yield mode


def _split_over(parameter: Parameter, axes: Axes, *, columns: bool) -> frozenset[MeshAxis]:
    """Return the axes along which the columns, or the rows, of a parameter are split."""
    piece = parameter.sharding.pieces[0]
    sizes = range(1, len(piece.box.size) + 1)
    rows = next(count for count in sizes if math.prod(piece.box.size[:count]) == piece.rows)
    return axes.along(*(name for dimension, name in piece.splits if columns == (dimension >= rows)))


def _joined(tensor: Tensor, added: Tensor) -> Types:
    """Return the type of a tensor some of whose elements are replaced by others."""
    before = type_of(tensor)
    return before | {axis: kind for axis, kind in type_of(added).items() if kind in (V, P) and before[axis] in (R, I)}


def _check_writing(func: Any, places: list[Tensor], found: Types, no_grads: set[int]) -> None:
    """Raise SpmdTypeError if a tensor may not become what is written to it. One that was equal on all ranks may."""
    for place in places:
        for axis, before in type_of(place).items():
            kind = found.get(axis, before)
            if before is not kind and not (before in (R, I) and id(place) in no_grads):
                raise SpmdTypeError(
                    f"{func.__name__} writes {kind.value} over {axis!r} to what is {before.value} there"
                )
