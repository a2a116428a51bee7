"""Mistakes of a distributed step: which of them are errors of types, and which are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from spmd_types.types import SpmdTypeError
from torch import Tensor

from megalite.model import gpt, router
from megalite.optim.accumulator import Accumulator, StepCollective
from megalite.optim.buckets import ParameterBucket
from megalite.optim.reduction import Reduction
from megalite.parallel import collectives, cross_entropy, embedding, key_value_exchange, linear, linear_cross_entropy
from megalite.parallel.collectives import completed
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.sharding import Sharding
from tests.rank_types.cells import CLASSES, Layout, model_of, step

Plant = Callable[[], AbstractContextManager[Any]]


class _LeftOut:
    """The collectives as a module calls them, one of which sends nothing and returns what this rank has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(collectives, name)
        own: Callable[..., Tensor] = _own_slice if "scatter" in name else _itself
        return (lambda *arguments: completed(own(*arguments))) if "async" in name else own


def _itself(tensor: Any, *_: object) -> Any:
    return tensor


def _own_slice(tensor: Tensor, group: Group, *_: object) -> Tensor:
    return tensor.chunk(group.size)[group.rank]


def left_out(module: Any, name: str) -> Plant:
    return lambda: mock.patch.object(module, "collectives", _LeftOut(name))


def replaced(owner: Any, name: str, replacement: Any) -> Plant:
    return lambda: mock.patch.object(owner, name, replacement)


def _complete(context: ParallelContext, tensor: Any, **options: Any) -> Any:
    return replace(_REPLICATED(context, tensor, **options), grad_is_partial=False)


_REPLICATED = ParallelContext.replicated


def _twice(tensor: Tensor, group: Group) -> Tensor:
    return collectives.all_reduce_(collectives.all_reduce_(tensor, group), group)


class _Twice:
    def __getattr__(self, name: str) -> Any:
        return _twice if name == "all_reduce_" else getattr(collectives, name)


def _no_operation(accumulator: Accumulator) -> StepCollective[object]:
    return StepCollective("nothing", (), lambda: None)


def _wrong_axes(network: gpt.GPT) -> tuple[Any, ...]:
    return tuple(replace(term, axes=("dp", "cp")) for term in _LOSS_TERMS.fget(network))  # type: ignore[misc]


_LOSS_TERMS: property = gpt.GPT.loss_terms  # type: ignore[assignment]
_SLICED = replaced(
    Reduction, "begin", lambda self, gradients, out: completed(_own_slice(gradients, self.groups.shards))
)
_DP_ALONE = replaced(Sharding, "data_parallel_axes", property(lambda record: ("edp",) if record.expert else ("dp",)))

SEEN: dict[str, tuple[str, str, Plant]] = {
    "row-parallel sum": ("llama", "tp", left_out(linear, "all_reduce_")),
    "row-parallel sum, split sequence": ("llama", "tp-sp", left_out(linear, "reduce_scatter")),
    "row-parallel sum twice": ("llama", "tp", lambda: mock.patch.object(linear, "collectives", _Twice())),
    "gradient of a column-parallel input": ("llama", "tp", left_out(linear, "all_reduce_async_")),
    "the same, split sequence": ("llama", "tp-sp", left_out(linear, "reduce_scatter_async")),
    "the same, fused with the loss": ("llama", "fused", left_out(linear_cross_entropy, "all_reduce_")),
    "gradient of latents that all heads share": ("deepseek_v2", "tp-sp", left_out(linear, "reduce_scatter")),
    "rows of the embedding": ("llama", "tp", left_out(embedding, "all_reduce_")),
    "loss over the vocabulary": ("llama", "tp", replaced(cross_entropy, "over_ranks", _itself)),
    "gradients of norms, split sequence": ("llama", "tp-sp", replaced(ParallelContext, "replicated", _complete)),
    "their sum at the end of a step": ("llama", "tp-sp", replaced(Accumulator, "sum_partial", _no_operation)),
    "gradients over data-parallel ranks": ("llama", "dp", _SLICED),
    "the same, ZeRO 2": ("llama", "zero2", _SLICED),
    "the same, of experts": ("mixtral", "ep", _SLICED),
    "gradients over context-parallel ranks": ("llama", "cp-ring", _DP_ALONE),
    "axes of a term of the loss": ("mixtral", "tp-sp", replaced(gpt.GPT, "loss_terms", property(_wrong_axes))),
    "gather of updated weights": ("llama", "dp", replaced(ParameterBucket, "begin_parameter_gather", _itself)),
}
"""Each with a family and a class of layout."""


@pytest.mark.parametrize("name", SEEN)
def test_a_planted_mistake_is_an_error_of_types(name: str) -> None:
    family, kind, plant = SEEN[name]
    with plant(), pytest.raises(SpmdTypeError):
        step(model_of(family), Layout(**CLASSES[kind]))


_OWN_ALONE = replaced(key_value_exchange._RingSum, "total", lambda ring: ring.own)
_LOOKUP = embedding._VocabParallelRows.forward
_FIRST_ID = replaced(
    embedding._VocabParallelRows,
    "forward",
    staticmethod(lambda ctx, table, ids, first, *rest: _LOOKUP(ctx, table, ids, first + 1, *rest)),
)

UNSEEN: dict[str, tuple[str, str, Plant]] = {
    "rows of the embedding, split sequence": ("llama", "tp-sp", left_out(embedding, "reduce_scatter")),
    "gradients of gathered keys": ("llama", "cp-gather", left_out(key_value_exchange, "reduce_scatter_async")),
    "gradients of keys in a ring": ("llama", "cp-ring", _OWN_ALONE),
    "tokens per expert over the ranks of a sample": ("mixtral", "tp-sp", left_out(router, "all_reduce_")),
    "sum of a tied weight over stages": ("gemma", "pp", replaced(Accumulator, "sum_partial", _no_operation)),
    "first row of a rank's table": ("llama", "tp", _FIRST_ID),
}
"""Mistakes in what is V before and after, in what a rank's number decides, over stages of a pipeline, and in values."""


@pytest.mark.parametrize("name", UNSEEN)
def test_types_do_not_see_every_mistake(name: str) -> None:
    """If this fails, types see more than the documentation says."""
    family, kind, plant = UNSEEN[name]
    with plant():
        step(model_of(family), Layout(**CLASSES[kind]))
