"""Types of tensors over ranks (`spmd_types`), for a step of a network that knows nothing of them.

A tensor has for each axis of ranks one of four types: R and I are equal on all ranks, V differs, P is a term of a sum
that is still due. They say what a gradient is, too: that of R is P, of I is I, of V is V, of P is R. `spmd_types` infers
them for torch's operations and refuses those that mix them wrongly.

Only four things are said by hand, here, once for all networks: what each function of `megalite.parallel.collectives` does to
types; that parameters and states have the types that their `Sharding` declares; that data are split over data-parallel and
context-parallel ranks; and which results of autograd functions are R, not I (`REPLICATED`). The bodies of megalite's
autograd functions, forward and backward, are checked operation by operation: a backward gets gradients of the types that
belong to its outputs, and must return those that belong to its inputs.

Axes are the finest ones of which all groups are products: the dense and the expert view share them, and so do ranks that
have the same key-value head. Stages of a pipeline run different programs, so there is no axis over them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import spmd_types
import torch
from spmd_types import I, MeshAxis, P, R, SpmdTypeError, V, _checker
from spmd_types.runtime import _set_local_type
from spmd_types.types import PerMeshAxisLocalSpmdType as Type
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megalite.optim.accumulator import Accumulator
from megalite.parallel import collectives, dispatch
from megalite.parallel.collectives import Pending
from megalite.parallel.linear import _SharedByHeads
from megalite.parallel.mesh import DENSE_AXES, EXPERT_AXES, Group, ParallelMesh
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter
from megalite.parallel.state import states_of, tallies_of
from megalite.parallel.transfer import _End

Types = dict[MeshAxis, Type]

REPLICATED = (_SharedByHeads, _End)
"""Autograd functions whose results, where equal on all ranks, are R: their backward sums over the ranks. Others' are I."""


class Axes:
    """The finest axes of ranks of which all groups of a pipeline stage are products."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh, self._ranks = mesh, mesh.world_size // mesh.size("pp")
        starts = {1, self._ranks}
        for view in (DENSE_AXES, EXPERT_AXES):
            stride = 1
            for axis in reversed(view[1:]):
                size = mesh.size(axis)
                parts = _primes(size) if axis in ("tp", "cp") else [size]
                for part in parts:
                    stride *= part
                    starts.add(stride)
        strides = sorted(starts)
        self._layout = [(stop // start, start) for start, stop in zip(strides, strides[1:], strict=False)]
        assert all(stop % start == 0 for start, stop in zip(strides, strides[1:], strict=False))
        self._axes = [MeshAxis.of(size, stride) for size, stride in self._layout]
        self._of: dict[tuple[int, ...], frozenset[MeshAxis]] = {}
        self.all = frozenset(self._axes)

    def named(self) -> dict[str, MeshAxis]:
        """Return the axes by what `spmd_types` calls them in messages."""
        return {f"{'x'.join(self._names(axis))}@{axis.layout.stride}": axis for axis in self._axes}

    def _names(self, axis: MeshAxis) -> list[str]:
        return [name for name in ("tp", "cp", "dp", "etp", "ep", "edp") if axis in self.along(name)]

    def along(self, *names: str) -> frozenset[MeshAxis]:
        """Return the axes along which ranks differ that differ along these axes of the mesh."""
        return frozenset().union(*(self.of_ranks(self._mesh.ranks(name)) for name in names))

    def of_ranks(self, ranks: Sequence[int]) -> frozenset[MeshAxis]:
        """Return the axes along which these ranks differ.

        Raises AssertionError if they are not all the ranks that do.
        """
        ranks = tuple(ranks)
        if ranks not in self._of:
            places = torch.tensor(ranks) % self._ranks
            found = [
                axis
                for axis, (size, stride) in zip(self._axes, self._layout, strict=True)
                if len((places // stride % size).unique()) > 1
            ]
            stages = len({rank // self._ranks for rank in ranks})
            assert math.prod(axis.size() for axis in found) * stages == len(ranks), f"{ranks} are no product of axes"
            self._of[ranks] = frozenset(found)
        return self._of[ranks]

    def types(self, *, V: Sequence[str] = (), I: Sequence[str] = ()) -> Types:  # noqa: E741, N803
        """Return a type that is V, and I, along these axes of the mesh, and R along the others."""
        varying, invariant = self.along(*V), self.along(*I)
        return {
            axis: spmd_types.V if axis in varying else spmd_types.I if axis in invariant else R for axis in self._axes
        }


def _primes(number: int) -> list[int]:
    for divisor in range(2, number + 1):
        if number % divisor == 0:
            return [divisor, *_primes(number // divisor)]
    return []


def type_of(tensor: Tensor) -> Types:
    found: Types = spmd_types.get_local_type(tensor)
    return found


def set_type(tensor: Tensor, types: Types) -> Tensor:
    """Give a tensor a type that does not follow from an operation."""
    found: Tensor = _set_local_type(tensor, dict(types))
    return found


def of_gradient(types: Types) -> Types:
    return {axis: kind.backward_type() for axis, kind in types.items()}


def fits(found: Type, wanted: Type) -> bool:
    """Tell if a gradient of one type serves where one of the other is due.

    Terms of a sum differ between ranks, and equal values are no terms: they would count once per rank.
    """
    return found is wanted or {R: found is I, I: found is R, V: found in (R, I), P: found is V}[wanted]


def require(found: Types, wanted: Types, what: str) -> None:
    """Raise SpmdTypeError if a value of one type stands where the other is due."""
    wrong = [axis for axis, kind in wanted.items() if not fits(found[axis], kind)]
    if wrong:
        shown = ", ".join(f"{found[axis]} where {wanted[axis]} is due over {axis!r}" for axis in wrong)
        raise SpmdTypeError(f"{what}: {shown}")


# ---------------------------------------------------------------------------------------------------- collectives


Rule = Callable[[Type], Type | None]
"""Type after a collective by that before, along an axis of its ranks; None if it may not be."""

RULES: dict[str, Rule] = {
    "sum": lambda before: R if before in (V, P) else None,  # a sum of equal values would count them once per rank
    "max": lambda before: None if before is P else R,
    "all_gather": lambda before: R if before is V else None,
    "reduce_scatter": lambda before: V if before in (V, P) else None,
    "all_to_all": lambda before: V if before is V else None,
    "broadcast": lambda before: None if before is P else R,
}


def after(before: Types, axes: frozenset[MeshAxis], kind: str) -> Types:
    """Return the type of the result of a collective. Raises SpmdTypeError if it may not have such an input."""
    found = dict(before)
    for axis in axes:
        kind_after = RULES[kind](before[axis])
        if kind_after is None:
            raise SpmdTypeError(f"{kind} over {axis!r} of a tensor that is {before[axis]} there")
        found[axis] = kind_after
    return found


class Checked:
    """Check of types in everything that runs between `begin` and the end of the block."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.axes = Axes(mesh)
        self.outputs: list[list[Types | None]] = []

    # ------------------------------------------------------------------------------------------------ declarations

    def declare(self, network: nn.Module) -> None:
        """Give parameters and states the types that they declare."""
        for parameter in network.parameters():
            set_type(parameter, self.of_parameter(parameter))
        for state in states_of(network):
            set_type(state.values, self.axes.types())
        for tally in tallies_of(network):
            set_type(tally.own, self.axes.types(V=("dp", "cp", "tp")))
        for module in network.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not spmd_types.has_local_type(value):
                    set_type(value, self.axes.types())

    def of_parameter(self, parameter: Parameter) -> Types:
        """Return the type of a parameter, as its `Sharding` tells.

        It is V along the axes that split it, R along those that see different tokens, and along the others of its stage
        R if each rank computes a part of its gradient, I if each computes all of it.
        """
        record = parameter.sharding
        split = {axis for piece in record.pieces for _, axis in piece.splits}
        whole = self.axes.along(*(("ep", "etp") if record.expert else ("tp",))) - self.axes.along(*split)
        found = self.axes.types(V=tuple(split))
        if not record.grad_is_partial:
            found |= dict.fromkeys(whole, I)
        return found

    # ------------------------------------------------------------------------------------------------ the block

    @contextmanager
    def checking(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(_checker, "_SpmdTypeMode", _Mode))
            stack.enter_context(spmd_types.set_current_mesh(self.axes.named()))
            stack.enter_context(spmd_types.checker.typecheck())
            self._mode = _checker._current_mode()
            for owner, name, replacement in self._replaced():
                stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
            stack.callback(_checker._TYPECHECK_AUTOGRAD_FUNCTIONS.difference_update, functions())
            _checker._TYPECHECK_AUTOGRAD_FUNCTIONS.update(functions())
            yield

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what takes the place of megalite's functions: their owner, name and replacement."""
        for name, kind in (
            ("all_reduce_", None),
            ("all_reduce_async_", None),
            ("all_reduce_in_rank_order_", None),
            ("all_gather_async", "all_gather"),
            ("reduce_scatter_async", "reduce_scatter"),
            ("all_to_all_rows_async", "all_to_all"),
        ):
            yield collectives, name, self._collective(getattr(collectives, name), kind)
        in_order = dispatch._add_in_rank_order_async
        yield dispatch, "_add_in_rank_order_async", self._collective(in_order, "reduce_scatter")
        yield Accumulator, "add", self._adding(Accumulator.add)
        yield Parameter, "frozen_alias", _alias(Parameter.frozen_alias)
        for function in functions():
            yield function, "forward", staticmethod(self._forward(function))
            yield function, "backward", staticmethod(self._backward(function))
            yield function, "typecheck_forward", staticmethod(self._apply(function))

    def _collective(self, function: Callable[..., Any], kind: str | None) -> Callable[..., Any]:
        """Return a collective that gives its result its type."""

        @functools.wraps(function)
        def called(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            group = next(each for each in arguments if isinstance(each, Group))
            others = [each for each in arguments if isinstance(each, str)]
            done = kind or options.get("op", (others or ["sum"])[0])
            axes, before = self.axes.of_ranks(group.ranks), type_of(tensor)
            with spmd_types.no_typecheck():
                result = function(tensor, *arguments, **options)
            types = after(before, axes, done)
            return _typed(result, types, same=group.size == 1)

        return called

    def _adding(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return `Accumulator.add`, which takes only gradients of the type that the parameter's asks for."""

        @functools.wraps(function)
        def add(accumulator: Accumulator, parameter: Parameter, gradient: Gradient, use: int) -> None:
            values = torch.zeros_like(parameter, requires_grad=False)
            wanted = of_gradient(type_of(parameter))
            if isinstance(gradient, DenseGradient) and not spmd_types.has_local_type(gradient.values):
                set_type(gradient.values, wanted)  # of autograd's own functions
            set_type(values, dict.fromkeys(self.axes.all, R))
            with self._mode:
                gradient.add_to(values, overwrite=True)
            require(type_of(values), wanted, f"gradient of {parameter.sharding.name}")
            with spmd_types.no_typecheck():
                function(accumulator, parameter, DenseGradient(values), use)

        return add

    def _forward(self, function: type) -> Callable[..., Any]:
        original = function.forward

        def forward(ctx: FunctionCtx, *arguments: Any) -> Any:
            with self._mode:
                results = original(ctx, *arguments)
            ctx.types = [_maybe(each) for each in arguments]
            ctx.saved_types = [_maybe(each) for each in getattr(ctx, "to_save", None) or ()]
            found = [_maybe(each) for each in results] if isinstance(results, tuple) else [_maybe(results)]
            if function not in REPLICATED:
                inputs = [kinds for kinds in ctx.types if kinds]
                found = [kinds and _invariant(kinds, inputs) for kinds in found]
            ctx.result_types = found
            self.outputs.append(found)
            return results

        return forward

    def _apply(self, function: type) -> Callable[..., Any]:
        def typecheck_forward(*arguments: Any) -> Any:
            results = function.apply(*arguments)
            for result, kinds in zip(_several(results), self.outputs.pop(), strict=True):
                if isinstance(result, Tensor) and kinds is not None:
                    set_type(result, kinds)
            return results

        return typecheck_forward

    def _backward(self, function: type) -> Callable[..., Any]:
        original = function.backward

        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            for gradient, kinds in zip(gradients, ctx.result_types, strict=True):
                if gradient is not None and kinds is not None:
                    set_type(gradient, of_gradient(kinds))
            saved = ctx.saved_tensors
            for tensor, kinds in zip(saved, ctx.saved_types, strict=True):
                if tensor is not None and kinds is not None:
                    set_type(tensor, kinds)
            with self._mode:
                results = original(_Context(ctx, saved), *gradients)
            for number, (result, kinds) in enumerate(zip(_several(results), ctx.types, strict=False)):
                if isinstance(result, Tensor) and kinds:
                    what = f"{function.__name__}.backward, gradient of argument {number}"
                    require(type_of(result), of_gradient(kinds), what)
            return results

        return backward


def functions() -> list[type]:
    """Return megalite's autograd functions."""
    found: list[type] = []
    left = list(torch.autograd.Function.__subclasses__())
    while left:
        one = left.pop()
        left += one.__subclasses__()
        if one.__module__.startswith("megalite") and "backward" in vars(one):
            found.append(one)
    return found


def _maybe(value: Any) -> Types | None:
    return dict(type_of(value)) if isinstance(value, Tensor) else None


def _several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _invariant(found: Types, inputs: list[Types]) -> Types:
    """Return the type of a result with I for R, along axes along which no input is R with a gradient."""
    return {
        axis: I if kind is R and any(each.get(axis) in (V, I, P) for each in inputs) else kind
        for axis, kind in found.items()
    }


class _Context:
    """Context of a backward whose saved tensors have types."""

    def __init__(self, context: Any, saved: tuple[Tensor | None, ...]) -> None:
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "saved_tensors", saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)


def _alias(function: Callable[[Parameter], Parameter]) -> Callable[[Parameter], Parameter]:
    def frozen_alias(parameter: Parameter) -> Parameter:
        found = function(parameter)
        set_type(found, type_of(parameter))
        return found

    return frozen_alias


def _typed(result: Any, types: Types, *, same: bool) -> Any:
    """Give the result of a collective its type, now or when it is waited for."""
    if isinstance(result, Tensor):
        return result if same else set_type(result, types)
    pending: Pending = result
    made = pending.result
    if isinstance(made, Tensor):
        if not same:
            set_type(made, types)
    else:

        def when_made() -> Tensor:
            with spmd_types.no_typecheck():
                return set_type(made(), types)

        pending.result = when_made
    return pending


class _Mode(_checker._SpmdTypeMode):  # type: ignore[misc]
    """Mode of `spmd_types` that also knows what becomes of a tensor if a view of it is written to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)
