"""The task of a run that trains a model of one's own: plain modules, a loss, and datasets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megalite.config.optimizer import OptimizerConfig
from megalite.config.pipeline_layout import shape
from megalite.config.run import TaskConfig
from megalite.data.any_dataset import Batch
from megalite.data.sample_source import SampleSource
from megalite.errors import ConfigurationError, MegaliteError
from megalite.modules.alike import check_alike, check_apart
from megalite.modules.assignment import assign
from megalite.modules.balance import balance, counted_costs, measured_costs
from megalite.modules.buffers import KeptBuffers, Rule
from megalite.modules.calling import Layers
from megalite.modules.forward_state import ForwardState
from megalite.modules.messages import Message, NotOnMetaError, StagePlan, copies_on_meta, find_messages
from megalite.modules.records import Initial, check_tied_buckets, decays, give_records, matrix_names, value_setter
from megalite.modules.sequences import PlainAttentionWatch, SequenceDims, check_mixes_no_tokens, own_part
from megalite.modules.stage import ModuleStage, Objective, mean_over_samples
from megalite.offload.activations import ActivationOffload, around
from megalite.offload.transfers import make_transfers
from megalite.optim.optimizer import Optimizer
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.nested import in_dtype
from megalite.parallel.parameter import Parameter
from megalite.parallel.stage import LossTerm
from megalite.pipeline.stages import Stages
from megalite.tasks.dataset_task import DatasetTask
from megalite.tasks.loss_functions import Count, Function, checked_mean, counted_terms, padded_fields, with_terms
from megalite.training.builder import attention_ways, count_parameters
from megalite.training.task import Summarized

Build = nn.Module | Callable[[ParallelContext], nn.Module]
"""A module, or a function that builds it on a rank, from parallel layers."""
Costs = Literal["counted", "measured"] | Sequence[float]


@dataclass(frozen=True)
class ModuleOptions:
    """Description of a model of one's own; `Trainer` says what each field means."""

    stages: Sequence[Build]
    loss: Function | None = None
    count: Count | None = None
    metrics: Mapping[str, Function] = field(default_factory=dict)
    sequence_dims: SequenceDims = field(default_factory=dict)
    terms: Sequence[LossTerm] = ()
    initial: Initial | None = None
    decays: Callable[[str, Tensor], bool] = decays
    buffers: Mapping[str, Rule] = field(default_factory=dict)
    recompute: bool | Sequence[str] = False
    allow_unused: bool = False
    messages: Sequence[Message] | None = None
    costs: Costs = "counted"
    optimizers: Mapping[str, OptimizerConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count is not None and self.loss is None:
            raise ConfigurationError("count is for a loss of one's own: give Trainer(loss=...), too")
        if isinstance(self.costs, str) and self.costs not in ("counted", "measured"):
            raise ConfigurationError(f"costs={self.costs!r}: choose counted or measured, or give numbers")


class ModuleTask(DatasetTask):
    """Training of a model of one's own on this rank. Create it on all ranks together."""

    def __init__(
        self,
        config: TaskConfig,
        mesh: ParallelMesh,
        options: ModuleOptions,
        train: SampleSource | None,
        valid: SampleSource | None = None,
    ) -> None:
        super().__init__(config, mesh, train, valid)
        self.options, self.allow_unused, self.optimizers = options, options.allow_unused, options.optimizers
        self._updated: Collection[str] = self.optimizers
        self._ranges: list[range] = []  # the layers of each stage
        if mesh.size("cp") > 1 and not options.sequence_dims:
            raise ConfigurationError(
                f"Layout(cp={mesh.size('cp')}) cuts samples along their sequence: give Trainer(sequence_dims=...), "
                'for example {"tokens": 1}, the fields of a batch that are cut, each with its dimension'
            )
        plain = [each for each in options.stages if isinstance(each, nn.Module)]
        check_apart(plain)
        self._modules = self._build(mesh, plain)
        self._in_evaluation = in_evaluation(self._modules)
        self._pristine = copies_on_meta(plain)  # for other ranks' stages; functions build theirs again
        self._example = self.first_micro_batch()
        self._modules = self._into_stages(self._modules)
        self.any_size = options.messages is None or len(self._modules) == 1
        # Only evaluations have micro-batches of other sizes. BatchNorm trains on no single sample.
        copies = copies_on_meta(self._modules) if self.any_size and len(self._modules) > 1 else []
        self._copies = [copy.eval() for copy in copies]
        self._plans = self._find_plans()
        self._objective = self._declare_loss()
        self.terms = self._objective.terms
        self.loss_name = self.terms[0].name
        self.evaluated, self.metrics = self.terms, tuple(options.metrics)
        self._set_values: Callable[[Parameter], None] | None = None
        self.aliases: dict[str, str] = {}
        """Further names of tied weights, each with the name in checkpoints."""

    # ------------------------------------------------------------------------------------------------ the network

    def _build(self, mesh: ParallelMesh, plain: Sequence[nn.Module]) -> list[nn.Module]:
        """Build the stages on a mesh's rank. `plain`: those of them that are given as modules."""
        parallel, given = self.config.parallel, iter(plain)
        split, ways = parallel.sequence_parallel and mesh.size("tp") > 1, attention_ways(parallel)
        context = ParallelContext(mesh, split, self.dtype, ways)
        self._splits_sequences = context.sequence_parallel and len(plain) < len(self.options.stages)
        with mesh.device:
            found = [next(given) if isinstance(each, nn.Module) else each(context) for each in self.options.stages]
        for number, module in enumerate(found):
            if not isinstance(module, nn.Module):
                raise ConfigurationError(f"stage {number} was built as {type(module).__name__}, which is no module")
            if any(getattr(each, "gradient_buffer", None) is not None for each in module.parameters()):
                raise MegaliteError(f"stage {number}, {type(module).__name__}, is part of another run: build it again")
        if mesh.size("cp") > 1:
            check_mixes_no_tokens(found)
        return [self._placed(module) for module in found]

    def _placed(self, module: nn.Module) -> nn.Module:
        """Move a module that is on the CPU to the device of the run, and to its precision."""
        tensors = (*module.parameters(), *module.buffers())
        device = self.mesh.device if all(each.device.type == "cpu" for each in tensors) else None

        def placed(tensor: Tensor) -> Tensor:
            if tensor.is_complex():  # a real dtype would drop the imaginary part
                return tensor.to(device, torch.complex128 if self.dtype == torch.float64 else tensor.dtype)
            return tensor.to(device, self.dtype if tensor.is_floating_point() else tensor.dtype)

        for parameter in module.parameters():
            parameter.data = placed(parameter.data)
        for part in module.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, placed(buffer))
        return module

    def stages(self) -> Stages:
        return self._stages(self._plans)

    def stages_for(self, micro_batch: Batch) -> Stages:
        copies = self._copies
        return self._stages(find_messages(copies, in_dtype(micro_batch.values, self.dtype)) if copies else self._plans)

    def _stages(self, plans: Sequence[StagePlan]) -> Stages:
        parallel = self.config.parallel
        ranks, chunks = parallel.pipeline_model_parallel_size, self._chunks
        return Stages(ranks, chunks, shape(parallel).v_shaped, tuple(plan.passes for plan in plans[:-1]))

    @property
    def _chunks(self) -> int:
        return self.config.parallel.num_virtual_stages_per_pipeline_rank or shape(self.config.parallel).chunks or 1

    def _into_stages(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Divide layers over the stages of the layout. Tensors have the same names under any layout."""
        wanted = self.config.parallel.pipeline_model_parallel_size * self._chunks
        is_sequence = len(modules) == 1 and type(modules[0]).forward is nn.Sequential.forward
        if len(modules) == wanted == 1:
            return list(modules)
        named = modules[0]._modules if is_sequence else {str(number): each for number, each in enumerate(modules)}
        layers = [(name, layer) for name, layer in named.items() if layer is not None]
        if len(layers) < wanted:
            raise ConfigurationError(
                f"the layout has {wanted} pipeline stages, and the model is {len(layers)} module"
                f"{'s' if len(layers) > 1 else ''}: give Trainer(stages=[...]) one module per stage or more, or an "
                "nn.Sequential of as many layers or more"
            )
        if not self._ranges:
            alone = wanted in (1, len(layers))
            costs = [1.0] * len(layers) if alone else self._costs_of([layer for _, layer in layers])
            self._ranges = balance(costs, wanted)
        parts = [OrderedDict(layers[numbers.start : numbers.stop]) for numbers in self._ranges]
        if is_sequence:
            return [nn.Sequential(part) for part in parts]
        return [Layers(part, is_last=part is parts[-1]) for part in parts]

    def _costs_of(self, layers: Sequence[nn.Module]) -> Sequence[float]:
        """Return the relative cost of each layer: as given, or counted or measured on the example.

        Raises ConfigurationError if their number differs, or if there is no example.
        """
        costs = self.options.costs
        if not isinstance(costs, str):
            if len(costs) != len(layers):
                raise ConfigurationError(f"there are {len(costs)} costs for {len(layers)} layers: give one for each")
            return costs
        if self._example is None:
            raise ConfigurationError("without a dataset, give Trainer(costs=[...]), the cost of each layer")
        values = in_dtype(self._example.values, self.dtype)
        if costs == "counted":
            return counted_costs(layers, values)
        return all_gather_json(measured_costs(layers, values), self.mesh)[0]  # all ranks cut alike

    def _find_plans(self) -> list[StagePlan]:
        """Return what passes between the stages, found by a run of them on the meta device.

        Raises ConfigurationError if several stages have neither an example nor given messages.
        """
        if self.options.messages is None and self._example is None:
            if len(self._modules) > 1:
                raise ConfigurationError(
                    "without a dataset, give Trainer(messages=[...]), the tensors between stages (megalite.TensorSpec)"
                )
            return [StagePlan()]
        values = None if self._example is None else in_dtype(self._example.values, self.dtype)
        try:
            with PlainAttentionWatch() if self.mesh.size("cp") > 1 else nullcontext():
                return find_messages(self._modules, values, self.options.messages)
        except NotOnMetaError:
            if len(self._modules) > 1:
                raise
            return [StagePlan()]  # a network in one stage needs no messages, and is one block

    def make_chunks(self, mesh: ParallelMesh, stages: Stages) -> list[ModuleStage]:
        """Return this rank's stages with records for their parameters and rules for their buffers.

        For another mesh than that of the run, new modules on the meta device take their place.
        """
        own, options, training = mesh is self.mesh, self.options, self.config.training
        modules = self._modules if own else self._into_stages(self._build(mesh, copies_on_meta(self._pristine)))
        numbers = stages.of_rank(mesh.coordinate("pp"))
        if own:
            self.aliases = _aliases(modules)
        uses_of_stages = give_records(
            modules,
            mesh,
            stages,
            weight_decay=options.decays,
            initial=options.initial,
            seed=training.seed,
            splits_sequences=self._splits_sequences,
        )
        if own:
            check_alike([modules[number] for number in numbers], mesh)
            self._set_values = value_setter([modules[number] for number in numbers], training.seed)
        if self.optimizers:
            assign(modules, self.optimizers)
        buffers = [[name for name, _ in module.named_buffers()] for module in modules]
        parts = [[name for name, _ in module.named_modules() if name] for module in modules]
        recompute: Sequence[str] = () if isinstance(options.recompute, bool) else options.recompute
        _require_matches(options.buffers, buffers, "no buffer is called {}, for which there is a rule")
        _require_matches(recompute, parts, "no submodule is called {}, to be recomputed")
        chunks = []
        for number, uses in zip(numbers, uses_of_stages, strict=True):
            module, of_buffers = modules[number], _matching(options.buffers, buffers[number])
            rules = {each: options.buffers[each] for each in of_buffers}
            chunks.append(
                ModuleStage(
                    module,
                    mesh,
                    self._plans[number],
                    number=number,
                    count=stages.count,
                    objective=self._objective,
                    kept=KeptBuffers(module, mesh, rules),
                    uses=uses,
                    seed=training.seed,
                    recompute=options.recompute is True or _matching(recompute, parts[number]),
                    one_block=options.allow_unused,
                    dtype=self.dtype,
                )
            )
        if own:
            self.chunks = chunks
            self._require_matrices(modules)
            self._offload_blocks()
        return chunks

    def _offload_blocks(self) -> None:
        """Let the first blocks of this rank offload what they save for backward, if the run says so."""
        options, most = self.config.offload, sum(max(len(plan.blocks), 1) for plan in self._plans)
        if options.fine_grained_activation_offloading:
            raise ConfigurationError(
                f"offload_modules={options.offload_modules} are modules of a GPT's layers: give "
                "cpu_offloading_num_layers, the number of blocks that are offloaded"
            )
        if (count := options.cpu_offloading_num_layers) > most:
            raise ConfigurationError(f"cpu_offloading_num_layers={count} is more than the {most} blocks of the model")
        if not count:
            return
        layers: list[list[int]] = []
        for chunk in self.chunks:
            layers.append(list(range(min(count, len(chunk.parts())))))
            count -= len(layers[-1])
        transfers, retains = make_transfers(self.mesh.device), options.cpu_offloading_retain_pinned_cpu_buffers
        ends = [number for number, chunk in enumerate(self.chunks) if len(layers[number]) == len(chunk.parts())]
        self.offloading = offload = ActivationOffload(transfers, self.chunks, layers, ends=ends, retains=retains)
        for number, chunk in enumerate(self.chunks):
            for index, (_, part) in zip(layers[number], chunk.parts(), strict=False):
                around(part, partial(offload.around_layer, number, index, everything=True))

    def _require_matrices(self, modules: Sequence[nn.Module]) -> None:
        own = [modules[number] for number in self.stages().of_rank(self.mesh.coordinate("pp"))]
        for name, config in (self.optimizers or {"": self.config.optimizer}).items():
            if config.optimizer != "muon":
                continue
            if not any(all_gather_json(bool(matrix_names(own, name)), self.mesh)):  # a stage may have none
                which = f"{name!r} has" if name else "the model has"
                raise ConfigurationError(f"{which} no matrix that Muon could update: choose megalite.AdamW")

    @property
    def set_values(self) -> Callable[[Parameter], None] | None:
        return self._set_values

    def check(self, optimizer: Optimizer) -> None:
        check_tied_buckets([*optimizer.buckets, *optimizer.frozen], self.mesh)

    def saved_config(self, consumed_samples: int) -> dict[str, Any]:
        for kept in self._kept():
            kept.check()  # one rank saves what must be the same on all
        several = {"optimizers": {name: asdict(config) for name, config in self.optimizers.items()}}
        return {**super().saved_config(consumed_samples), **(several if self.optimizers else {})}

    def loaded(self) -> None:
        for kept in self._kept():
            kept.restore()

    def forward_state(self) -> ForwardState:
        loss = self.options.loss
        return ForwardState([*self.chunks, *([loss] if isinstance(loss, nn.Module) else ())])

    def _kept(self) -> list[KeptBuffers]:
        """Return the buffers of this rank's stages."""
        return [chunk.kept for chunk in self.chunks if chunk.kept is not None]

    def model_section(self) -> dict[str, Any]:
        return {"kind": "a model of one's own"}

    # ------------------------------------------------------------------------------------------------ the loss

    def _declare_loss(self) -> Objective:
        """Return the terms of the loss, with the functions that return their sums and those of the metrics."""
        loss, count, metric = self.options.loss, self.options.count, self._metric if self.options.metrics else None
        if loss is None:
            if not self.options.terms:
                raise ConfigurationError("the run has no loss: give Trainer(loss=...), or terms that a stage returns")
            return Objective(terms=tuple(self.options.terms), metric=metric)
        if named := [term.name for term in self.options.terms if term.name in self.optimizers]:
            raise ConfigurationError(
                f"terms=...: {named[0]} is the name of an optimizer, which only a term of the loss has"
            )
        if count is None:
            return Objective(checked_mean(loss), True, (mean_over_samples(), *self.options.terms), metric)
        own = counted_terms(count, self._example)
        function = with_terms(loss, [term.name for term in own])
        function = self._of_updated(function) if self.optimizers else function
        return Objective(function, terms=(*own, *self.options.terms), metric=metric)

    def _of_updated(self, loss: Function) -> Function:
        """Return the loss without the terms that have the name of an optimizer which the step does not update."""

        def total(outputs: Any, values: Any) -> Any:
            sums = loss(outputs, values)
            if not isinstance(sums, Mapping):
                return sums
            return {name: sums[name] for name in sums if self.has_term(self._updated, name)}

        return total

    @contextmanager
    def updating(self, names: Collection[str]) -> Iterator[None]:
        self._updated = names
        try:
            yield
        finally:
            self._updated = self.optimizers

    def _metric(self, outputs: Any, values: Any) -> dict[str, Any]:
        return {name: function(outputs, values) for name, function in self.options.metrics.items()}

    # ------------------------------------------------------------------------------------------------ the data

    def to_micro_batch(self, batch: Batch) -> Batch:
        values = own_part(batch.values, self.options.sequence_dims, self.mesh)
        return Batch(self.on_device(values), batch.sample_ids)

    def end_step(self, micro_batches: Sequence[Any], *, updated: bool) -> None:
        for kept in self._kept() if updated else ():
            kept.synchronize()

    # ------------------------------------------------------------------------------------------------ reports

    def summary(self, trainer: Summarized) -> Mapping[str, object]:
        names = " + ".join(type(module).__name__ for module in self._modules)
        lines = {"model": f"{count_parameters(trainer.chunks, self.mesh):,} parameters: {names}"}
        return lines if self._example is None else {**lines, **self.lines(trainer, self._example)}

    def notes(self, trainer: Summarized) -> tuple[str, ...]:
        """Return the messages of any task, and those on a loss that is a mean and on modules in evaluation mode."""
        mean = self.options.loss is not None and self.options.count is None
        found = [*super().notes(trainer)]
        if mean:
            found.append(
                "note: the loss is taken as a mean over the samples of a micro-batch, so each sample counts one; with "
                "count=..., it is a sum"
            )
        if mean and self._example is not None and (fields := padded_fields(self._example.values)):
            found.append(
                f"WARNING: samples have {' and '.join(fields)}: a mean over the tokens that count is then of another "
                "number of them in each micro-batch, and the numbers of the run depend on the micro-batch size and on "
                "the data-parallel ranks. Give Trainer(count=...), the number of these tokens, and multiply the loss "
                "by it (docs/library.md)"
            )
        if self._in_evaluation:
            found.append(
                f"note: {shortened(self._in_evaluation)} in evaluation mode, as given: without dropout, and with the "
                "running statistics of norms. Call train() of what should train otherwise"
            )
        return tuple(found)


def _aliases(modules: Sequence[nn.Module]) -> dict[str, str]:
    """Return the further names of parameters that are in several places, each with the first name."""
    first: dict[int, str] = {}
    names = ((name, each) for module in modules for name, each in module.named_parameters(remove_duplicate=False))
    return {name: first[id(each)] for name, each in names if first.setdefault(id(each), name) != name}


def in_evaluation(modules: Sequence[nn.Module]) -> list[str]:
    """Return the names of the modules that stay in evaluation mode, without those within them.

    If all of them are in it, as a library may load a model, none was chosen: they are set to train.
    """
    parts = [(name, part) for number, module in enumerate(modules) for name, part in _with_names(number, module)]
    if not any(part.training for _, part in parts):
        for module in modules:
            module.train()
        return []
    found: dict[str, None] = {}
    for name, part in parts:
        if not part.training and not any(name.startswith(f"{each}.") for each in found):
            found[name] = None
    return list(found)


def _with_names(number: int, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((name or f"stage {number}", part) for name, part in module.named_modules())


def shortened(names: Sequence[str]) -> str:
    """Return the subject of a sentence about modules."""
    others = f"{len(names) - 1} other module{'s' if len(names) > 2 else ''}"
    return f"{names[0]} stays" if len(names) == 1 else f"{names[0]} and {others} stay"


def _matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the patterns that name something of this stage; the others are for other stages."""
    return [each for each in patterns if any(fnmatchcase(name, each) for name in names)]


def _require_matches(patterns: Iterable[str], of_stages: Sequence[Sequence[str]], message: str) -> None:
    names = [name for names in of_stages for name in names]
    for each in patterns:
        if not _matching([each], names):
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise ConfigurationError(f"{message.format(each)}: there {'are' if names else 'is'} {shown or 'none'}")
