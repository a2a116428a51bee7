"""`spmd_types` 0.3.1 over the plain trainer: a step in one process, in which tensors have types over axes of ranks.

The types (R and I: equal on all ranks; V: differs; P: a term of a sum) of parameters, samples and collectives are said
here, and are all that is known of the trainer: `spmd_types` infers the others, and refuses what does not fit. A pair of
functions for forward and backward (`both`) has the types that its backward asks for: the gradient of R is P, of I is I.
After forward, gradients of parameters have the types that belong to theirs, and none may be P when the optimizer comes.
Values are never looked at: no communication is done.

    python -m museum.detectors.spmd_types NAME FOLDER [--right]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from spmd_types import _checker
from spmd_types._mesh import set_current_mesh
from spmd_types._mesh_axis import MeshAxis
from spmd_types._state import current_mesh
from spmd_types._type_attr import get_local_type
from spmd_types.runtime import _set_local_type, no_typecheck
from spmd_types.types import I, P, R, SpmdTypeError, V
from torch import Tensor

from museum import trainer
from museum.cases import ROOT
from museum.detectors.finding import Finding
from museum.detectors.instrumented import is_plain
from museum.entries import FOLDER, Entry, read_entry
from museum.plain import ranks as plain_ranks
from museum.plain import tensor_parallel
from museum.plain.data import Batch
from museum.plain.network import Stage
from museum.plain.ranks import Ranks
from museum.plain.settings import Settings
from museum.plain.tensor_parallel import Weight

Types = dict[Any, Any]
AFTER: dict[str, dict[Any, Any]] = {
    "sum": {V: R, P: R},  # a sum of equal values would count them once per rank
    "max": {V: R, R: R, I: I},
    "all_gather": {V: R},
    "all_to_all": {V: V},
}
"""Type after a collective, by that before."""


def make_case(entry: Entry, folder: Path, *, wrong: bool) -> None:
    """Make a case with finding.json; nothing is trained."""
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps({"program": entry.program}))
    if entry.program == "plain":
        words = [sys.executable, "-m", __name__, entry.name, str(folder), *([] if wrong else ["--right"])]
        subprocess.run(words, cwd=ROOT, check=True)


def detect(case: Path) -> Finding:
    """Return what the types say."""
    if not is_plain(case):
        return Finding("unknown")
    return Finding(**json.loads((case / "finding.json").read_text()))


def finding(settings: Settings, patches: Mapping[str, Callable[..., Any]]) -> Finding:
    """Return what the types of a step say; unknown, if it cannot be run without communication."""
    try:
        for stage in range(settings.pp):
            with ExitStack() as stack:
                for name, function in patches.items():
                    for module in trainer._modules():
                        if hasattr(module, name):
                            stack.enter_context(mock.patch.object(module, name, function))
                _Step(settings, stage).check()
    except _NotSummed as error:
        return Finding("wrong", f"gradient of {error.name}", str(error))
    except SpmdTypeError as error:
        return Finding("wrong", None, str(error).strip().splitlines()[0])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return Finding("unknown")
    return Finding("right")


class _NotSummed(SpmdTypeError):
    """Gradient of a parameter that is still a term of a sum."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class _Step:
    """Step of the first rank of a stage, with types."""

    def __init__(self, settings: Settings, stage: int) -> None:
        self.settings = settings
        shared = max(settings.tp // settings.key_value_heads, 1)
        tp, cp, dp = settings.tp, settings.cp, settings.dp
        starts = sorted({1, shared, tp, tp * cp, tp * settings.ep, tp * cp * dp})
        self._axes = [(MeshAxis.of(end // start, start), start, end // start) for start, end in pairwise(starts)]
        with mock.patch.object(dist, "new_group", lambda members: tuple(members)):
            self.ranks = Ranks(settings, stage * tp * cp * dp)

    def along(self, *members: Sequence[int]) -> set[MeshAxis]:
        """Return the axes along which the ranks of some groups differ."""
        stage = self.settings.world // self.settings.pp
        return {
            axis
            for ranks in members
            for axis, stride, size in self._axes
            if len({rank % stage // stride % size for rank in ranks}) > 1
        }

    def _name(self, axis: MeshAxis) -> str:
        """Return the names of those axes of the trainer that an axis is, or is a part of."""
        groups = {name: getattr(self.ranks, name).members for name in ("tp", "cp", "dp")}
        return " or ".join(name for name, members in groups.items() if axis in self.along(members))

    def types(self, *, otherwise: Any = R, **given: set[MeshAxis]) -> Types:
        """Return the type of a tensor: `V` along some axes, `P` or `I` along others."""
        kinds = {"V": V, "P": P, "I": I}
        found = {axis: otherwise for axis, *_ in self._axes}
        for name, axes in given.items():
            found |= dict.fromkeys(axes, kinds[name])
        return found

    def of_weight(self, name: str, weight: Weight) -> Types:
        """Return the type of a parameter: R where a rank has a part of its gradient, I where each has all of it."""
        part, ranks = weight.part, self.ranks
        tp = self.along(ranks.tp.members)
        if part.shares_heads:
            return self.types(V=tp - self.along(ranks.key_value.members))
        if part.range is not None:
            return self.types(V=tp | (self.along(ranks.ep.members) if part.is_expert else set()))
        is_of_heads = name.endswith(("q_norm.weight", "k_norm.weight"))
        return self.types(I=set() if self.settings.sp or is_of_heads else tp)

    def batch(self, batch: Batch) -> Batch:
        """Return a micro-batch of which other data-parallel ranks have other samples, and those of cp other tokens."""
        dp, cp = self.along(self.ranks.dp.members), self.along(self.ranks.cp.members)
        over = {"places": cp, "key_documents": dp}
        values = {each.name: getattr(batch, each.name).clone() for each in fields(batch)}
        return replace(
            batch, **{name: set_type(each, self.types(V=over.get(name, dp | cp))) for name, each in values.items()}
        )

    def check(self) -> None:
        """Check forward, the pairs of functions for backward, and the sums of gradients. Raises SpmdTypeError."""
        settings, ranks = self.settings, self.ranks
        stage, data, tp = Stage(ranks), self.along(ranks.data.members), self.along(ranks.tp.members)
        hidden = self.types(V=data | tp) if settings.sp else self.types(V=data, I=tp)
        for name, weight in stage.weights():
            torch.nn.init.constant_(weight, 0.01)
            set_type(weight, self.of_weight(name, weight))
        batches = [_now("next_batch")(settings, 1, number, ranks.dp) for number in range(settings.micro_batches)]
        batches = [self.batch(_now("part_of_rank")(batch, ranks.cp)) for batch in batches]
        with self._checking():
            tokens = _now("count_tokens")(batches, ranks)
            for batch in batches:
                length = batch.tokens.shape[1] // (settings.tp if settings.sp else 1)
                shape = settings.micro_batch, length, settings.hidden
                entered = None if ranks.is_first else set_type(torch.ones(shape, requires_grad=True), hidden)
                output = stage(batch, entered)
                for loss in stage.auxiliary_losses():
                    require(
                        type_of(_now("scale_auxiliary_loss")(loss, ranks)), self.types(otherwise=P), "balancing loss"
                    )
                if ranks.is_last:
                    losses = _now("vocab_parallel_loss")(output, batch.labels, ranks.tp)
                    loss = _now("scale_loss")(losses, batch.loss_mask, tokens, ranks)
                    require(type_of(loss), self.types(P=data, I=tp), "loss")
                else:
                    require(type_of(output), hidden, "hidden states for the next stage")
            for _, weight in stage.weights():
                set_type(weight.main_grad, of_gradient(type_of(weight)))
            _now("synchronize_gradients")(stage, ranks)
            for name, weight in stage.weights():
                if due := [self._name(axis) for axis, kind in type_of(weight.main_grad).items() if kind is P]:
                    raise _NotSummed(
                        name, f"the sum over axis {' and '.join(due)} is missing where the optimizer begins"
                    )

    @contextmanager
    def _checking(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(_checker, "_SpmdTypeMode", _Mode))
            stack.enter_context(mock.patch.dict(_checker._DECOMP_TYPE_RULES, clear=True))
            for name in ("all_reduce", "all_gather", "all_to_all_single"):
                stack.enter_context(mock.patch.object(dist, name, getattr(self, f"_{name}")))
            stack.enter_context(mock.patch.object(plain_ranks._Both, "apply", self._both))
            scatter = tensor_parallel.scatter_sequence
            stack.enter_context(mock.patch.object(tensor_parallel, "scatter_sequence", self._own_part(scatter)))
            axes = frozenset(axis for axis, *_ in self._axes)
            stack.enter_context(set_current_mesh(axes))
            stack.enter_context(_checker.typecheck())
            yield

    def _after(self, tensor: Tensor, handle: Any, kind: str) -> Types:
        """Return the type of the result of a collective. Raises SpmdTypeError if it may not have such an input."""
        found = dict(type_of(tensor))
        for axis in self.along(handle or range(self.settings.world)):
            if found[axis] not in AFTER[kind]:
                raise SpmdTypeError(f"{kind} over {axis} of a tensor that is {found[axis]} there")
            found[axis] = AFTER[kind][found[axis]]
        return found

    def _all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> None:
        set_type(tensor, self._after(tensor, group, "sum" if operation == dist.ReduceOp.SUM else "max"))

    def _all_gather(self, parts: list[Tensor], tensor: Tensor, group: Any = None, **_: Any) -> None:
        types = self._after(tensor, group, "all_gather")
        for part in parts:
            with no_typecheck():
                part.copy_(tensor)
            set_type(part, types)

    def _all_to_all_single(
        self, received: Tensor, rows: Tensor, back: Any = None, out: Any = None, group: Any = None, **_: Any
    ) -> None:
        """Receive as much as this rank sends."""
        types = self._after(rows, group, "all_to_all")
        with no_typecheck():
            received.copy_(rows)
        set_type(received, types)

    def _own_part(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that takes this rank's part of what all have: by its number, which types do not see."""

        def part(tensor: Tensor, group: Any) -> Tensor:
            found = function(tensor, group)
            return set_type(found, type_of(found) | dict.fromkeys(self.along(group.members), V))

        return part

    def _both(self, tensor: Tensor, ahead: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
        """Return `ahead(tensor)` with the type for which `back` gives the gradient that belongs to the tensor's."""
        made, before = ahead(tensor), type_of(tensor)
        with no_typecheck():
            found = made.view_as(made)
            if tensor.requires_grad and not found.requires_grad:
                found.requires_grad_()
        kinds = type_of(made)
        choices = {
            axis: (R, I) if kind in (R, I) and before[axis] is not R else (kind,) for axis, kind in kinds.items()
        }
        refused: SpmdTypeError | None = None
        for choice in product(*choices.values()):
            types = dict(zip(choices, choice, strict=True))
            with no_typecheck():
                gradient = torch.zeros_like(made)
            try:
                require(
                    type_of(back(set_type(gradient, of_gradient(types)))), of_gradient(before), "gradient of an input"
                )
                return set_type(found, types)
            except SpmdTypeError as error:
                refused = refused or error
        raise refused or SpmdTypeError("no type")


class _Mode(_checker._SpmdTypeMode):
    """Mode of `spmd_types` in which constants are R, or what the other tensors are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [each for value in (*args, *kwargs.values()) for each in _checker._iter_tensors_in(value)]
        constant = [each for each in found if not type_of(each)]
        if self._disabled or len(constant) == len(found):
            return func(*args, **kwargs)
        for each in constant:
            set_type(each, dict.fromkeys(current_mesh() or (), R))
        return super().__torch_function__(func, types, args, kwargs)


def _now(name: str) -> Callable[..., Any]:
    """Return a function of the trainer, which may be replaced by an entry's."""
    found: Callable[..., Any] = getattr(trainer, name)
    return found


def type_of(tensor: Tensor) -> Types:
    return dict(get_local_type(tensor))


def set_type(tensor: Tensor, types: Types) -> Tensor:
    """Give a tensor a type that does not follow from an operation."""
    found: Tensor = _set_local_type(tensor, dict(types))
    return found


def of_gradient(types: Types) -> Types:
    return {axis: kind.backward_type() for axis, kind in types.items()}


def require(found: Types, wanted: Types, name: str) -> None:
    """Raise SpmdTypeError if a value of one type stands where another is due.

    Equal values serve as values that may differ, and values that differ as terms of a sum; equal ones are no terms.
    """
    serves = {R: (R, I), I: (I, R), V: (V, R, I), P: (P, V)}
    for axis, kind in wanted.items():
        if found[axis] not in serves[kind]:
            raise SpmdTypeError(f"{name} is {found[axis]} over {axis}, where {kind} is due")


def main() -> None:
    """Write finding.json of an entry's program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="of the entry")
    parser.add_argument("folder", type=Path, help="for finding.json")
    parser.add_argument("--right", action="store_true", help="check the program as it should be")
    given = parser.parse_args()
    bug = read_entry(FOLDER / given.name).bug
    settings, patches = bug["SETTINGS"], bug.get("PATCHES", {})
    if given.right:
        settings, patches = settings | bug.get("RIGHT", {}), {}
    (given.folder / "finding.json").write_text(json.dumps(asdict(finding(Settings(**settings), patches))))


if __name__ == "__main__":
    main()
