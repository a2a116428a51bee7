"""A plain module as a stage of the engine."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megalite.errors import MegaliteError
from megalite.modules.buffers import KeptBuffers
from megalite.modules.calling import arguments_of, arguments_of_stage, named, results
from megalite.modules.forward_state import ForwardState
from megalite.modules.messages import StagePlan, parts_of
from megalite.parallel.device import default_generator
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.nested import in_dtype
from megalite.parallel.parameter import DenseGradient, Parameter, accumulate_grad
from megalite.parallel.stage import NO_SUMS, LossTerm, StageOutput, TermSums, add_sums, items_of
from megalite.parallel.stage_module import Inside, StageModule, inside_forward

Sums = Callable[[Any, Any], "Tensor | Mapping[str, Tensor]"]
"""Function from the last stage's output and the batch to a sum over its samples, or several by name."""
Metrics = Callable[[Any, Any], "Mapping[str, Any]"]
LOSS = "loss"
"""Name of a loss that is one tensor."""


class Samples(Protocol):
    """A micro-batch: values as the collate function returned them, and the global number of each sample."""

    @property
    def values(self) -> Any: ...

    @property
    def sample_ids(self) -> Sequence[int]: ...


def mean_over_samples(name: str = LOSS, weight: float = 1.0) -> LossTerm:
    """Return a term of the loss that is a mean over samples. Context-parallel ranks return parts of its sum."""
    return LossTerm(name, lambda micro_batch: torch.tensor(len(micro_batch.sample_ids)), weight, count_axes=("dp",))


@dataclass(frozen=True)
class Objective:
    """Loss and metrics that the last stage computes from its output and the batch.

    Attributes:
        loss: returns the sums of the terms of the loss. None: the output is that of the network.
        is_mean: True if `loss` returns a mean over the samples instead. Context-parallel ranks are averaged.
        terms: the terms of the loss.
        metric: returns further sums by name, in evaluations only, or pairs of a sum and the number of its items. Those
            of samples alone are averaged over context-parallel ranks.
    """

    loss: Sums | None = None
    is_mean: bool = False
    terms: tuple[LossTerm, ...] = (mean_over_samples(),)
    metric: Metrics | None = None


class ModuleStage(StageModule):
    """A stage that runs a plain module, with the parameters of `give_records`."""

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        plan: StagePlan | None = None,
        *,
        number: int = 0,
        count: int = 1,
        objective: Objective = Objective(),
        kept: KeptBuffers | None = None,
        uses: Mapping[str, int] | None = None,
        seed: int = 0,
        recompute: bool | Sequence[str] = False,
        one_block: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Wrap a module, in place.

        Args:
            plan: what the stage passes on, and its blocks (`find_messages`).
            number: the number of the stage among `count`.
            kept: the module's buffers.
            uses: the numbers of uses of tied weights (`give_records`).
            recompute: True to recompute each block in backward, or patterns of names of submodules to recompute.
            dtype: dtype in which the module gets floating-point fields of the batch; the loss gets them as they are.
                None: the module does, too.
            one_block: keep the parameters of the whole stage together, as unused parameters require under ZeRO 3.

        Raises:
            MegaliteError: a pattern of `recompute` matches no submodule.
        """
        super().__init__()
        self.module, self.kept = module, kept
        self.plan, self.number, self.count = plan or StagePlan(), number, count
        self._objective, self._seed, self._dtype, self._device = objective, seed, dtype, mesh.device
        self._parts, self._part = mesh.size("cp"), mesh.coordinate("cp")  # of each sample
        self._shared = {name: (module.get_parameter(name), use) for name, use in (uses or {}).items()}
        self._one_block = one_block or not self.plan.blocks
        self._in_evaluation = [part for part in module.modules() if not part.training]
        self._generators = list(dict.fromkeys((torch.default_generator, default_generator(mesh.device))))
        for part in module.modules():
            if callable(bind := getattr(part, "bind", None)):
                bind(mesh)
        self._arguments = arguments_of(module)
        self._recomputed = self._to_recompute(recompute)
        self._sample: int | None = None  # first sample of the micro-batch that runs forward
        self._calls: Counter[str] = Counter()
        within = {id(part) for top in self._recomputed for part in list(top.modules())[1:]}
        for name, part in parts_of(module):
            if id(part) not in within:
                part.register_forward_pre_hook(partial(self._seed_part, name))
        for part in self._recomputed:
            call = partial(_recomputing, part, part.forward, ForwardState([part]))
            call.__signature__ = inspect.signature(part.forward)  # type: ignore[attr-defined]  # for `Layers`
            part.forward = call

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        return self._objective.terms

    def train(self, mode: bool = True) -> ModuleStage:
        """Set the mode of all modules but those that were given in evaluation mode, which stay in it."""
        super().train(mode)
        for part in self._in_evaluation:
            part.training = False
        return self

    def blocks(self) -> list[nn.Module]:
        return [self.module] if self._one_block else [part for _, part in self.parts()]

    def parts(self) -> list[tuple[str, nn.Module]]:
        return [(name, self.module.get_submodule(name)) for name in self.plan.blocks] or [("module", self.module)]

    def inside(self, *, backward: bool) -> list[Inside]:
        """List the collectives of submodules with an attribute `inside`. Recomputed ones run twice in backward."""
        if not backward:
            return inside_forward([self.module])
        around = {part: top for top in self._recomputed for part in top.modules()}
        found, done = list[Inside](), set[nn.Module]()
        for part in reversed(list(self.module.modules())):
            if (top := around.get(part)) is not None and top not in done:
                done.add(top)
                found += inside_forward([top])
            found += [each for each in reversed(getattr(part, "inside", ())) for _ in range(each.backward)]
        return found

    def forward(self, inputs: Mapping[str, Tensor], micro_batch: Samples) -> StageOutput:
        """Run the module on the tensors of the stages before and on the batch.

        Raises:
            MegaliteError: the module does not fit its inputs, or its outputs do not fit the next stage or the loss.
        """
        objective = self._objective
        values = micro_batch.values if self._dtype is None else in_dtype(micro_batch.values, self._dtype)
        if self.plan.changes_inputs:
            inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        by_position, by_name, _ = arguments_of_stage(self.number, self.module, inputs, values, self._arguments)
        with self._seeded(micro_batch.sample_ids):
            if self._shared:
                views = {name: _UseOf.apply(parameter, use) for name, (parameter, use) in self._shared.items()}
                output = functional_call(self.module, views, tuple(by_position), by_name)
            else:
                output = self.module(*by_position, **by_name)
            own = self._wide(output.terms) if isinstance(output, StageOutput) else NO_SUMS
            if self.number < self.count - 1:
                return StageOutput(self._passed_on(inputs, results(self.number, self.module, output)), own)
            if objective.loss is None:
                return StageOutput(results(self.number, self.module, output), own)
            result = output.tensors if isinstance(output, StageOutput) else output
            found = self._wide(objective.loss(result, micro_batch.values))
            if objective.is_mean:
                samples = len(micro_batch.sample_ids) / self._parts
                found = {name: mean * samples for name, mean in found.items()}
            sums = add_sums(own, found)
            if objective.metric is not None and not self.training:
                sums = add_sums(sums, self._measured(objective.metric(result, micro_batch.values), micro_batch))
        return StageOutput({}, sums)

    def _passed_on(self, inputs: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for the next stage: own results, and tensors that only later stages need."""
        passed = {}
        for spec in self.plan.passes:
            if spec.name not in own and spec.name not in inputs:
                raise MegaliteError(
                    f"{named(self.number, self.module)} did not return {spec.name}, which a later stage takes: it "
                    f"returned {', '.join(own) or 'nothing'}"
                )
            tensor = own.get(spec.name)
            if tensor is not None and tensor.requires_grad and not spec.gradient:
                raise MegaliteError(
                    f"{named(self.number, self.module)} returned {spec.name} of {tensor.dtype} that needs a gradient, "
                    f"and its message of {spec.dtype} is declared without one: declare it with gradient=True and its "
                    "dtype, or detach it"
                )
            # A view, so that what is passed through has an edge of its own in the graph.
            passed[spec.name] = tensor if tensor is not None else inputs[spec.name].view_as(inputs[spec.name])
        return passed

    def _measured(self, metrics: Mapping[str, Any], micro_batch: Samples) -> TermSums:
        """Return the sum of each metric, and the number of items that it is over."""
        found = dict[str, Tensor]()
        for name, value in metrics.items():
            if not isinstance(value, tuple):  # context-parallel ranks have parts of the same samples
                value = value / self._parts, len(micro_batch.sample_ids) / self._parts
            if len(value) != 2 or any(isinstance(each, Tensor) and each.dim() for each in value):
                raise MegaliteError(
                    f"the metric {name} returned {_shapes(value)}: return a sum over the samples of the micro-batch, "
                    "or a sum and the number of its items, in tensors without dimensions"
                )
            for each, number in zip((name, items_of(name)), value, strict=True):
                found[each] = torch.as_tensor(number, dtype=torch.float64, device=self._device)
        return found

    def _wide(self, sums: Tensor | TermSums) -> TermSums:
        """Return sums by name, in fp32 or wider. Raises MegaliteError if they are not scalars."""
        wide = {}
        for name, value in ({LOSS: sums} if not isinstance(sums, Mapping) else sums).items():
            if not isinstance(value, Tensor) or value.dim():
                shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise MegaliteError(
                    f"the loss of {named(self.number, self.module)} returned {shown} as {name}: return the sum over "
                    "the samples of the micro-batch, a tensor without dimensions"
                )
            wide[name] = value.to(torch.promote_types(value.dtype, torch.float32))
        return wide

    @contextmanager
    def _seeded(self, sample_ids: Sequence[int]) -> Iterator[None]:
        """Seed torch's random numbers by the micro-batch, and the part of it, within the block, and then restore them.

        They are seeded again by the name of each part that runs, so that the same layers in other stages drop the same.
        """
        states = [generator.get_state() for generator in self._generators]
        self._sample = int(sample_ids[0]) if len(sample_ids) else 0
        self._calls.clear()
        try:
            self._seed_generators(f"stage {self.number}")
            yield
        finally:
            self._sample = None
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def _seed_part(self, name: str, *_: object) -> None:
        if self._sample is not None:  # otherwise it is recomputed, with the random numbers of its first forward
            self._calls[name] += 1
            self._seed_generators(f"{name}/{self._calls[name]}")

    def _seed_generators(self, where: str) -> None:
        of_part = f"part {self._part}/" if self._part else ""
        key = f"{self._seed}/{self._sample}/{of_part}{where}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        for generator in self._generators:
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def _to_recompute(self, recompute: bool | Sequence[str]) -> list[nn.Module]:
        """Return the submodules to recompute. Raises MegaliteError for a pattern that names none."""
        if isinstance(recompute, bool):
            return [part for _, part in self.parts() if next(part.parameters(), None) is not None] if recompute else []
        parts = dict(self.module.named_modules())
        chosen: dict[str, nn.Module] = {}
        for pattern in recompute:
            found = {name: part for name, part in parts.items() if name and fnmatchcase(name, pattern)}
            if not found:
                raise MegaliteError(
                    f"no submodule of {named(self.number, self.module)} is called {pattern}, to be recomputed: "
                    f"it has {', '.join(name for name in parts if name)}"
                )
            chosen |= found
        within = {id(part) for top in chosen.values() for part in list(top.modules())[1:]}
        return [part for part in chosen.values() if id(part) not in within]


class _UseOf(torch.autograd.Function):
    """A view of a weight whose gradient goes to one of the weight's uses."""

    @staticmethod
    def forward(ctx: Any, parameter: Parameter, use: int) -> Tensor:
        ctx.parameter, ctx.use = parameter, use
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return accumulate_grad(ctx.parameter, DenseGradient(gradients[0]), ctx.use), None


def _recomputing(
    module: nn.Module, forward: Callable[..., Any], state: ForwardState, *by_position: Any, **by_name: Any
) -> Any:
    """Run forward, and once more in backward: from the same buffers and random numbers, which it does not change."""
    if not torch.is_grad_enabled():
        return forward(*by_position, **by_name)
    from torch.utils.checkpoint import checkpoint  # imported here: it imports torch's compiler

    before = state.copy()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), before.repeating()

    versions = [(tensor, tensor._version) for tensor in _tensors((by_position, by_name))]
    output = checkpoint(forward, *by_position, use_reentrant=False, context_fn=contexts, **by_name)
    if any(tensor._version != version for tensor, version in versions):
        raise MegaliteError(
            f"a {type(module).__name__} changes its input in place, so it cannot be recomputed: let it work on a copy, "
            "or give recompute=[...] without it"
        )
    return output


def _shapes(values: Sequence[Any]) -> str:
    return ", ".join(f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else str(each) for each in values)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping | tuple | list):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(each)
