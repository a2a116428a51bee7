"""Replay of micro-batches in fp64, and beside it in the run's precision with several orders of summation.

The network is computed layer by layer. The weights of a layer are read when it is its turn, and freed after it, so that
memory holds one layer, the hidden states before each, and what is compared at the moment.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint.tensors import Source
from megalite.config import ModelConfig
from megalite.config.pipeline_layout import StageLayers, check_choices
from megalite.conversion.opened import states_of_training
from megalite.data.loader import MicroBatchArrays
from megalite.errors import ConfigurationError
from megalite.extras.verify.doubtful_choices import other_choices
from megalite.extras.verify.points import Values, captured
from megalite.extras.verify.rounding import Numerics
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, HIDDEN_STATES
from megalite.model.head import LossConfig
from megalite.model.router import Router, Routing
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm, StageOutput
from megalite.training.batches import Cutting, to_micro_batches

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


@dataclass(frozen=True)
class Seen:
    """Points of one stage for one micro-batch, computed in each of the numerics."""

    stage: StageLayers
    micro_batch: int
    values: Sequence[Values]
    """The points of each of the numerics, of which the first is fp64."""
    terms: Sequence[Mapping[str, float]]
    """Sums of the terms of the loss that the stage returns, for each of the numerics."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of the logical tensors of one stage, summed over the micro-batches, for each of the numerics."""

    stage: StageLayers
    values: Sequence[Mapping[str, Tensor]]


def stages_of(model: ModelConfig) -> tuple[StageLayers, ...]:
    """Return a stage for each layer, the embedding with the first and the loss with the last; one if layers share."""
    last = model.num_layers - 1
    each = tuple(StageLayers(layer, 1, layer == 0, layer == last) for layer in range(model.num_layers))
    try:
        check_choices(model, each)
    except ConfigurationError:
        return (StageLayers(0, model.num_layers, embedding=True, loss=True),)
    return each


@dataclass
class Replay:
    """Computation of a step's micro-batches.

    Attributes:
        model: the network, with its vocabulary size.
        source: its weights, by logical name.
        what: where they come from, for messages.
        batches: the micro-batches, whole samples.
        numerics: the first one is the truth; one with other choices of experts, if any, is the last.
        seed: key of the dropout masks, which only megalite's runs have.
        balanced_so_far: number of micro-batches of a data-parallel rank, if the balancing loss of the global batch
            takes the choices of the step so far, over all ranks, as Megatron-LM's does; None: those of the step before.
    """

    model: ModelConfig
    source: Source
    what: str
    batches: Sequence[MicroBatchArrays]
    numerics: Sequence[Numerics]
    loss: LossConfig = field(default_factory=LossConfig)
    seed: int = 0
    stages: tuple[StageLayers, ...] = ()
    balanced_so_far: int | None = None

    def __post_init__(self) -> None:
        """Prepare the micro-batches in each precision."""
        self.stages = self.stages or stages_of(self.model)
        self._mesh = ParallelMesh()
        dtypes = dict.fromkeys(each.dtype for each in self.numerics)
        cutting = Cutting(depths=self.model.depths)
        self._batches = {
            dtype: to_micro_batches(self.batches, self.seed, dtype, self._mesh.device, cutting) for dtype in dtypes
        }
        self._entered: list[dict[tuple[int, int], Tensor]] = []
        """Hidden states before each stage, by number of the numerics and micro-batch."""
        self._returned: dict[tuple[int, int], Tensor] = {}
        """True gradients with respect to what each stage sends, by place of the stage and micro-batch."""
        self._replayed: dict[int, Tensor] = {}
        """Other choices of experts of each micro-batch, as `MicroBatch.replayed`."""
        self._chosen: dict[tuple[int, int], Tensor] = {}
        """Tokens of each expert, by number of the router and micro-batch."""
        self._fresh = states_of_training(self.model) if self.model.num_experts is not None else set()

    def network(self, stage: StageLayers, dtype: torch.dtype, model: ModelConfig | None = None) -> GPT:
        """Return a stage with its weights."""
        found = GPT(model or self.model, self._mesh, stage_layers=stage, loss=self.loss, dtype=dtype)
        checkpoint.load_weights(self.source, self.what, found, None, self._mesh, self._fresh)
        return found

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The terms of the loss."""
        return GPT(self.model, ParallelMesh(device=torch.device("meta"))).loss_terms

    def micro_batch(self, number: int) -> MicroBatch:
        """Return a micro-batch in fp64."""
        return self._batches[self.numerics[0].dtype][number]

    def _batch(self, numerics: Numerics, number: int) -> MicroBatch:
        """Return a micro-batch, with the other choices of experts if they are taken."""
        batch = self._batches[numerics.dtype][number]
        if numerics.other_choices and number in self._replayed:
            return replace(batch, replayed=self._replayed[number])
        return batch

    def _choose_otherwise(self, number: int, choices: Mapping[int, Tensor]) -> None:
        """Add the other choices of a stage's routers to those of a micro-batch."""
        routers = sum(layer.feed_forward == "moe" for layer in self.model.all_layers)
        for router, chosen in choices.items():
            if number not in self._replayed:
                self._replayed[number] = torch.full((*chosen.shape[:2], routers, chosen.shape[2]), -1)
            self._replayed[number][:, :, router] = chosen

    @torch.no_grad()
    def forward(self) -> Iterator[Seen]:
        """Run the stages from the first to the last, and yield what each micro-batch shows of each."""
        hidden: dict[tuple[int, int], Tensor] = {}
        self._entered = []
        for stage in self.stages:
            networks = {dtype: self.network(stage, dtype) for dtype in self._batches}
            self._entered.append(dict(hidden))
            for number in range(len(self.batches)):
                values: list[Values] = []
                terms: list[dict[str, float]] = []
                for at, numerics in enumerate(self.numerics):
                    network = networks[numerics.dtype]
                    if numerics.other_choices:
                        self._choose_otherwise(number, other_choices(network, values))
                    batch = self._batch(numerics, number)
                    with captured(network) as found, numerics.applied(), self._counting(network, at, number):
                        output: StageOutput = network(_inputs(hidden.get((at, number))), batch)
                    values.append(found)
                    terms.append({name: float(total) for name, total in output.terms.items()})
                    if not stage.loss:
                        hidden[at, number] = output.tensors[HIDDEN_STATES]
                yield Seen(stage, number, values, terms)
            del networks, network  # before those of the next stage are made

    def backward(self, multipliers: Sequence[Mapping[str, float]]) -> Iterator[Seen | Gradients]:
        """Run the stages backward after `forward`, and yield the points with gradients, then the weights' gradients.

        `multipliers`: for each micro-batch, the factor of each term's sum in the loss. The gradient of a weight that
        two stages have comes with the second of them.
        """
        gradients: dict[tuple[int, int], Tensor] = {}
        shared: list[dict[str, Tensor]] = [{} for _ in self.numerics]
        for place in reversed(range(len(self.stages))):
            stage, entered = self.stages[place], self._entered[place]
            networks = {dtype: self.network(stage, dtype) for dtype in self._batches}
            sums: list[dict[str, Tensor]] = [{} for _ in self.numerics]
            for number, factors in enumerate(multipliers):
                values: list[Values] = []
                terms: list[dict[str, float]] = []
                if (0, number) in gradients:
                    self._returned[place, number] = gradients[0, number]
                for at, numerics in enumerate(self.numerics):
                    network, batch = networks[numerics.dtype], self._batch(numerics, number)
                    self._set_loads(network, number)
                    before = entered.get((at, number))
                    before = None if before is None else before.detach().requires_grad_()
                    with captured(network) as found, numerics.applied():
                        output: StageOutput = network(_inputs(before), batch)
                        _differentiate(output, factors, gradients.get((at, number)))
                    values.append(found)
                    terms.append({name: float(total.detach()) for name, total in output.terms.items()})
                    _add_gradients(network, sums[at])
                    if before is not None and before.grad is not None:
                        gradients[at, number] = before.grad
                yield Seen(stage, number, values, terms)
            del networks, network
            yield Gradients(stage, self._complete(stage, sums, shared))

    def place_of(self, module: str) -> int:
        """Return the place of the stage that has a module, in `stages`."""
        layer = re.match(r"layers\.(\d+)", module)
        if layer is None:
            return 0 if module.startswith("embedding") else len(self.stages) - 1
        numbers = (place for place, stage in enumerate(self.stages) if stage.first_layer <= int(layer[1]))
        return max(numbers)

    def again(
        self,
        place: int,
        number: int,
        *,
        numerics: Numerics | None = None,
        model: ModelConfig | None = None,
        batch: MicroBatch | None = None,
        change: Callable[[GPT], None] = lambda network: None,
        factors: Mapping[str, float] | None = None,
    ) -> tuple[Values, Mapping[str, Tensor]]:
        """Run a stage once more, from the true hidden states, after `forward`: its points, and its weights' gradients.

        Args:
            numerics: how to compute; None: in fp64.
            model: another network that has the same weights.
            batch: another micro-batch.
            change: changes the stage before it runs.
            factors: the factor of each term's sum in the loss, to run backward, too, after `backward`; None: do not.
        """
        numerics = numerics or self.numerics[0]
        network = self.network(self.stages[place], numerics.dtype, model)
        change(network)
        self._set_loads(network, number)
        before = self._entered[place].get((0, number))
        before = None if before is None else before.detach().to(numerics.dtype).requires_grad_(factors is not None)
        batch = batch or self.micro_batch(number)
        sums: dict[str, Tensor] = {}
        with torch.set_grad_enabled(factors is not None), captured(network) as found, numerics.applied():
            output: StageOutput = network(_inputs(before), batch)
            if factors is not None:
                gradient = self._returned.get((place, number))
                _differentiate(output, factors, None if gradient is None else gradient.to(numerics.dtype))
                _add_gradients(network, sums)
        return found, sums

    @contextmanager
    def _counting(self, network: GPT, at: int, number: int) -> Iterator[None]:
        """Keep how many tokens of a micro-batch choose each expert, in the truth, during the block."""
        handles = []
        if self.balanced_so_far is not None and at == 0:
            for module in _routers(network):

                def keep(module: Router, _: object, found: Routing) -> None:
                    assert found.counts is not None  # the network trains
                    self._chosen[module.number, number] = found.counts[module.num_experts : 2 * module.num_experts]

                handles.append(module.register_forward_hook(keep))
        yield
        for handle in handles:
            handle.remove()

    def _set_loads(self, network: GPT, number: int) -> None:
        """Set the shares of experts that the balancing loss of the global batch takes for a micro-batch."""
        per_rank = self.balanced_so_far
        if per_rank is None:
            return
        for router in _routers(network):
            so_far = (at for at in range(len(self.batches)) if at % per_rank <= number % per_rank)
            counts = torch.stack([self._chosen[router.number, at] for at in so_far]).sum(0).double()
            if router.previous_load is not None:
                router.previous_load.values.copy_(counts / counts.sum())

    def _complete(
        self, stage: StageLayers, sums: Sequence[dict[str, Tensor]], shared: Sequence[dict[str, Tensor]]
    ) -> Sequence[Mapping[str, Tensor]]:
        """Keep the gradient of a tied embedding until both of its stages have been here."""
        word = "embedding.word"
        for own, kept in zip(sums, shared, strict=True):
            if stage.embedding and word in kept:
                own[word] = _sum(own[word], kept.pop(word))
            elif not stage.embedding and word in own:
                kept[word] = own.pop(word)
        return sums


def _routers(network: GPT) -> list[Router]:
    return [module for module in network.modules() if isinstance(module, Router)]


def _inputs(hidden: Tensor | None) -> dict[str, Tensor]:
    return {} if hidden is None else {HIDDEN_STATES: hidden}


def _differentiate(output: StageOutput, factors: Mapping[str, float], gradient: Tensor | None) -> None:
    """Run backward from the terms of the loss, times their factors, and from the gradient of what the stage sends."""
    ends = [
        (total, torch.full_like(total, factors[name])) for name, total in output.terms.items() if total.requires_grad
    ]
    if gradient is not None:
        ends.append((output.tensors[HIDDEN_STATES], gradient))
    torch.autograd.backward([end for end, _ in ends], [start for _, start in ends])


def _add_gradients(network: GPT, sums: dict[str, Tensor]) -> None:
    """Add the gradients of a stage's weights to sums by logical name, in fp32 or wider, and clear them."""
    for parameter in dict.fromkeys(network.parameters()):
        if parameter.grad is None:
            continue
        for piece in parameter.sharding.pieces:  # type: ignore[attr-defined]  # all are `Parameter`s
            own, name = piece.view(parameter.grad), piece.tensor.name
            sums[name] = _sum(sums[name], own) if name in sums else own
        parameter.grad = None


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two tensors, in fp32 or wider."""
    wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    return one.to(wide) + other.to(wide)


def keep_freed_memory() -> None:
    """Have the C library of this process, if it is glibc, use freed memory again instead of returning it.

    Otherwise each tensor of more than 32 MB gets new pages, whose first use takes longer than most of what is computed
    with them: 20 of 42 seconds of a layer of `benchmarks/verify.py`.
    """
    with suppress(OSError, AttributeError):
        of_process = ctypes.CDLL(None)
        of_process.mallopt(_M_MMAP_MAX, 0)
        of_process.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
