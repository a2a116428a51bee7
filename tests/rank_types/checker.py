"""Types of tensors over ranks (`spmd_types`), for a step of a network that knows nothing of them.

A tensor has, for each axis of ranks, one of four types: R and I are equal on all ranks, V differs, P is a term of a sum
that is still due. They say what its gradient is, too: that of R is P, of I is I, of V is V, of P is R. `spmd_types`
infers them for torch's operations and refuses those that mix them wrongly.

Said by hand, once for all networks, is only this: what the functions of `megalite.parallel.collectives` do to types
(`RULES`), with two sums that are made of others; that parameters have the types that their `Sharding` declares; that
data-parallel ranks have other samples, and context-parallel ranks other tokens; and which results of autograd functions
are not what they seem (`RESULTS`).

The bodies of megalite's autograd functions, forward and backward, are checked operation by operation. A backward gets
gradients of the types that belong to the function's results, and must return those that belong to its arguments; each
gradient that reaches a parameter's buffer must have the type that belongs to the parameter; and the optimizer must get
no term of a sum.

Stages of a pipeline run different programs: there is no axis over them. A stage gets what the one before it has sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from spmd_types import _checker
from spmd_types.runtime import _TYPECHECK_AUTOGRAD_FUNCTIONS, no_typecheck
from spmd_types.types import I, P, R, SpmdTypeError, V
from spmd_types.types import PerMeshAxisLocalSpmdType as Type
from torch import Tensor, nn

from megalite.model import recurrent_weights
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.recurrent_weights import SumOverSharers
from megalite.optim.accumulator import Accumulator
from megalite.optim.buckets import Bucket
from megalite.parallel import collectives, dispatch
from megalite.parallel.collectives import Pending
from megalite.parallel.linear import _SharedByHeads
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter
from megalite.parallel.stage import StageOutput
from megalite.parallel.state import states_of, tallies_of
from megalite.parallel.state_scan import _TokensBefore
from megalite.parallel.transfer import _End
from tests.rank_types.axes import Axes, Types, of_gradient, require, set_type, type_of
from tests.rank_types.mode import Mode, checking

RULES: dict[str, Mapping[Type, Type]] = {
    "sum": {V: R, P: R},  # a sum of equal values would count them once per rank
    "max": {V: R, R: R, I: R},
    "all_gather": {V: R},
    "reduce_scatter": {V: V, P: V},
    "all_to_all": {V: V},
}
"""Type after a collective by that before, along each axis of its ranks. Others are errors."""
RESULTS: dict[type, Type] = {
    _SharedByHeads: R,
    SumOverSharers: R,
    _End: R,  # of tokens that all ranks have gathered
    _TokensBefore: V,  # those before this rank's own tokens, cut from what all have gathered
}
"""Type of results of autograd functions that collectives have made equal on all ranks, or so it seems.

R: backward sums over the ranks. Results of other functions are I: it does not."""


def after(before: Types, axes: frozenset[Any], kind: str) -> Types:
    """Return the type of the result of a collective. Raises SpmdTypeError if it may not have such an input."""
    if wrong := [axis for axis in axes if before[axis] not in RULES[kind]]:
        raise SpmdTypeError(f"{kind} over {wrong} of a tensor that is {before[wrong[0]].value} there")
    return before | {axis: RULES[kind][before[axis]] for axis in axes}


class Checked:
    """Check of the types of one rank's step."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.axes = Axes(mesh)
        self._results: list[list[Types | None]] = []
        self._mode: Mode

    # ------------------------------------------------------------------------------------------------ the step

    def step(
        self, network: GPT, buckets: Sequence[Bucket], arriving: Mapping[str, Tensor], batch: MicroBatch
    ) -> Mapping[str, Tensor]:
        """Run forward, backward and the sums of gradients of a stage, and return what the next one gets.

        Raises SpmdTypeError where types do not fit.
        """
        self._declare(network, batch)
        with self._checking():
            for bucket in buckets:
                self._gather(bucket)
                self._begin(bucket)
            inputs = {name: set_type(each.detach().requires_grad_(), type_of(each)) for name, each in arriving.items()}
            output = network(inputs, batch)
            ends = self._ends(network, output)
            torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
            for bucket in buckets:
                self._complete(bucket)
        return output.tensors

    def _declare(self, network: nn.Module, batch: MicroBatch) -> None:
        """Give parameters, states and data their types."""
        for parameter in network.parameters():
            assert isinstance(parameter, Parameter)
            set_type(parameter, self._of_parameter(parameter))
        for state in states_of(network):
            set_type(state.values, self.axes.types())
        for tally in tallies_of(network):
            set_type(tally.own, self.axes.types(varying=("dp", "cp", "tp")))
        for value in vars(batch).values():
            if isinstance(value, Tensor):
                set_type(value, self.axes.types(varying=("dp", "cp")))

    def _of_parameter(self, parameter: Parameter) -> Types:
        """Return the type of a parameter, as its `Sharding` tells.

        Along the axes of its replica it is R if each rank computes a part of its gradient, and I if each computes all
        of it; along the others that split a stage it is V; and along those with other tokens it is R.
        """
        record = parameter.sharding
        found = self.axes.types(varying=("ep", "etp") if record.expert else ("tp",))
        return found | dict.fromkeys(self.axes.of_ranks(record.replica_ranks), R if record.grad_is_partial else I)

    def _gather(self, bucket: Bucket) -> None:
        """Gather a bucket's parameters from the ranks' slices, after which they must be equal on them."""
        first = bucket.slots[0].parameter
        over = self.axes.along(*first.sharding.data_parallel_axes)
        for each in (bucket.parameters, bucket.parameter_shard):
            set_type(each, type_of(first) | dict.fromkeys(over, V))
        bucket.begin_parameter_gather()
        bucket.finish_parameter_gather()
        if any(type_of(bucket.parameters)[axis] is V for axis in over):
            raise SpmdTypeError(f"{first.sharding.name} and others are {type_of(bucket.parameters)} in forward")

    def _begin(self, bucket: Bucket) -> None:
        """Begin a step. A bucket gets terms of sums along the axes along which its parameters are R."""
        kinds = type_of(bucket.slots[0].parameter)
        flat = {axis: P if kind is R else V for axis, kind in kinds.items()}
        bucket.begin_step(1)
        for accumulator in bucket.accumulators:
            for each in accumulator.flats.values():
                set_type(each, flat)
            for kept in accumulator._kept.values():
                kept.total = lambda kept=kept: set_type(kept._add_up(), flat)  # type: ignore[method-assign,misc]
            is_slice = accumulator.gradient_shard._base is accumulator.gradients
            set_type(accumulator.gradient_shard, flat if is_slice else self.axes.types())

    def _ends(self, network: GPT, output: StageOutput) -> list[Tensor]:
        """Return the tensors at which backward begins.

        A sum of the loss must differ between the ranks over which its term is summed, and be equal on the others.
        """
        split = network.context.sequence_parallel
        message = self.axes.types(varying=("dp", "cp", *(["tp"] if split else [])), invariant=[] if split else ["tp"])
        for name, tensor in output.tensors.items():
            require(type_of(tensor), message, name)
        for term in network.loss_terms:
            if (total := output.terms.get(term.name)) is None:
                continue
            invariant = [axis for axis in ("tp", "cp", "dp") if axis not in term.axes]
            wanted, found = self.axes.types(varying=term.axes, invariant=invariant), type_of(total)
            if (
                found != wanted
                if total.requires_grad
                else any(found[axis] is not V for axis in self.axes.along(*term.axes))
            ):
                raise SpmdTypeError(f"the sum of {term} is {found}")
        return [each for each in (*output.tensors.values(), *output.terms.values()) if each.requires_grad]

    def _complete(self, bucket: Bucket) -> None:
        """Sum a bucket's gradients, of which the optimizer must get no term."""
        with self._mode.entered(is_linear=True):
            for accumulator in bucket.accumulators:
                accumulator.begin_reduction(1)
            for operation in bucket.completion():
                operation.run()
        if P in (found := type_of(bucket.gradient_shard)).values():
            name = bucket.slots[0].parameter.sharding.name
            raise SpmdTypeError(f"the gradients of {name} and others are {found} where the optimizer takes them")

    # ------------------------------------------------------------------------------------------------ its functions

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Check all operations, collectives and autograd functions within the block."""
        with checking(self.axes) as self._mode, ExitStack() as stack:
            for owner, name, replacement in self._replaced():
                stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
            known = _TYPECHECK_AUTOGRAD_FUNCTIONS | set(functions())
            stack.enter_context(mock.patch.object(_checker, "_TYPECHECK_AUTOGRAD_FUNCTIONS", known))
            yield

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what takes the place of megalite's functions: their owner, name and replacement."""
        for name, rule in {
            "all_reduce_": "sum",
            "all_reduce_async_": "sum",
            "all_reduce_in_rank_order_": "sum",
            "all_gather_async": "all_gather",
            "reduce_scatter_async": "reduce_scatter",
            "all_to_all_rows_async": "all_to_all",
        }.items():
            yield collectives, name, self._collective(getattr(collectives, name), rule)
        of_experts = dispatch._add_in_rank_order_async  # an exchange, and a sum of what arrives
        yield dispatch, of_experts.__name__, self._collective(of_experts, "reduce_scatter")
        yield recurrent_weights, "_summed", self._summed(recurrent_weights._summed)
        yield Accumulator, "add", self._adding(Accumulator.add)
        alias = Parameter.frozen_alias
        yield Parameter, alias.__name__, lambda parameter: set_type(alias(parameter), type_of(parameter))
        for function in functions():
            yield function, "forward", staticmethod(self._forward(function))
            yield function, "backward", staticmethod(self._backward(function))
            yield function, "typecheck_forward", staticmethod(functools.partial(self._apply, function))

    def _collective(self, function: Callable[..., Any], rule: str) -> Callable[..., Any]:
        """Return a collective that gives its result a type. `rule`: that of its default operation."""

        def called(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            group = next(each for each in arguments if isinstance(each, Group))
            if self._mode._disabled or group.size == 1:  # within another one, or nothing is sent
                return function(tensor, *arguments, **options)
            operation = next((each for each in arguments if isinstance(each, str)), rule)
            types = after(type_of(tensor), self.axes.of_ranks(group.ranks), operation)
            with no_typecheck():
                return _typed(function(tensor, *arguments, **options), types)

        return called

    def _summed(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the sum over ranks that share a group, which gathers from all ranks and adds up the terms of some."""

        def summed(input: Tensor, over: Group, ranks: Sequence[int]) -> Tensor:
            types = after(type_of(input), self.axes.of_ranks(ranks), "sum")
            with no_typecheck():
                return set_type(function(input, over, ranks), types)

        return summed

    def _adding(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return `Accumulator.add`, which takes only gradients of the type that belongs to the parameter."""

        def add(accumulator: Accumulator, parameter: Parameter, gradient: Gradient, use: int) -> None:
            wanted = of_gradient(type_of(parameter))
            with self._mode.entered(is_linear=True):  # a reduction may begin
                if isinstance(gradient, DenseGradient):  # without a type if torch's own functions have made it
                    values = gradient.values
                    set_type(values, type_of(values) or wanted)
                else:
                    values = torch.zeros_like(parameter, requires_grad=False)
                    gradient.add_to(values, overwrite=True)
                require(type_of(values), wanted, f"gradient of {parameter.sharding.name}")
                function(accumulator, parameter, _CheckedGradient(values), use)

        return add

    def _apply(self, function: type[torch.autograd.Function], *arguments: Any) -> Any:
        """Apply an autograd function, and give its results the types that its forward has found."""
        results = function.apply(*arguments)
        for result, types in zip(_several(results), self._results.pop(), strict=True):
            if types is not None:
                set_type(result, types)
        return results

    def _forward(self, function: Any) -> Callable[..., Any]:
        """Return a forward whose body is checked."""
        original = function.forward

        def forward(ctx: Any, *arguments: Any) -> Any:
            with self._mode.entered():
                results = original(ctx, *arguments)
            found = [types and self._of_result(function, types, arguments) for types in _types(_several(results))]
            ctx.types = _types(arguments), found, _types(getattr(ctx, "to_save", None) or ())
            self._results.append(found)
            return results

        return forward

    @staticmethod
    def _of_result(function: type, found: Types, arguments: Sequence[Any]) -> Types:
        """Return the type of an autograd function's result, given that of its body.

        What is equal on all ranks, and made of nothing that is R and takes a gradient, is I, or what `RESULTS` says.
        """
        trained = [type_of(each) for each in arguments if isinstance(each, Tensor) and each.requires_grad]
        made = [axis for axis, kind in found.items() if kind is R and not any(each[axis] is R for each in trained)]
        return found | dict.fromkeys(made, RESULTS.get(function, I))

    def _backward(self, function: Any) -> Callable[..., Any]:
        """Return a backward whose body is checked, and what it returns."""
        original = function.backward

        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            of_arguments, of_results, of_saved = ctx.types
            for gradient, types in zip(gradients, of_results, strict=True):
                if gradient is not None and types is not None:
                    set_type(gradient, of_gradient(types))
            saved = ctx.saved_tensors
            for tensor, types in zip(saved, of_saved, strict=True):
                if tensor is not None and types is not None:
                    set_type(tensor, types)
            with self._mode.entered(is_linear=True):
                results = original(_Context(ctx, saved), *gradients)
            for number, (result, types) in enumerate(zip(_several(results), of_arguments, strict=False)):
                if isinstance(result, Tensor) and types:
                    what = f"gradient of argument {number} that {function.__name__}.backward returns"
                    require(type_of(result), of_gradient(types), what)
            return results

        return backward


class _CheckedGradient(DenseGradient):
    """A gradient whose type has been checked. It is added to the gradients of other parameters, with other types."""

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        with no_typecheck():
            super().add_to(target, overwrite=overwrite)


class _Context:
    """Context of an autograd function whose saved tensors keep their types."""

    def __init__(self, context: Any, saved: Sequence[Tensor | None]) -> None:
        vars(self).update(_context=context, saved_tensors=saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)


def functions() -> list[type[torch.autograd.Function]]:
    """Return megalite's autograd functions."""
    found, left = list[Any](), list(torch.autograd.Function.__subclasses__())
    while left:
        left += (one := left.pop()).__subclasses__()
        if one.__module__.startswith("megalite") and "backward" in vars(one):
            found.append(one)
    return found


def _several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _types(values: Sequence[Any]) -> list[Types | None]:
    return [dict(type_of(value)) if isinstance(value, Tensor) else None for value in values]


def _typed(result: Any, types: Types) -> Any:
    """Give the result of a collective its type, which a pending one gets when it is waited for."""
    if isinstance(result, Tensor):
        return set_type(result, types)
    pending: Pending = result
    if isinstance(made := pending.result, Tensor):
        set_type(made, types)
        return pending

    def finish() -> Tensor:
        with no_typecheck():
            return set_type(made(), types)

    pending.result = finish
    return pending
