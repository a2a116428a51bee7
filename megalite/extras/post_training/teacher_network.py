"""A teacher on the ranks of the network: divided as the network is, or in a layout of its own.

In both cases the output layer of the teacher is on the ranks of that of the network, and divided as it is: a rank has
the same columns of the logits of both, and only hidden states move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.checkpoint import load_weights
from megalite.config import ModelConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.conversion.opened import OpenedModel, states_of_training
from megalite.extras.post_training.other_grid import OtherGrid, Share, redistributed
from megalite.extras.post_training.reference import frozen, load_teacher
from megalite.inference.network import stage_parts
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT, HIDDEN_STATES, make_chunks, messages
from megalite.optim.optimizer import Optimizer
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import Runs, SequenceLayout, zigzag
from megalite.parallel.stage import StageOutput
from megalite.pipeline.engine import PipelineEngine, Stage
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.stages import Stages
from megalite.tasks.experts import with_dispatcher
from megalite.training.builder import count_parameters


class TeacherNetwork(ABC):
    """Layers of a teacher, and its output layer.

    Attributes:
        output: the output layer, if this rank has the last stage of the network that is trained.
        network: all that this rank has.
        optimizers: the holders of its parameters, all of them frozen.
    """

    config: ModelConfig
    output: list[GPT]
    network: nn.ModuleList
    optimizers: list[Optimizer]

    @abstractmethod
    def hidden_states(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run over the micro-batches of a step, without labels. Called by all ranks together.

        Returns the last hidden states of each, as the last stage of the network has its own, and none on other stages.
        """

    @abstractmethod
    def parameters(self) -> int:
        """Return the number of parameters of the whole teacher. Called by all ranks together."""


class _KeptStates:
    """Stages of which the last one keeps its hidden states."""

    def __init__(self, chunks: Sequence[GPT], stages: Stages, rank: int) -> None:
        last = [stage == stages.count - 1 for stage in stages.of_rank(rank)]
        self.stages = [self._keep(chunk) if is_last else chunk for chunk, is_last in zip(chunks, last, strict=True)]
        self._found: list[Tensor] = []

    def _keep(self, chunk: GPT) -> Stage[MicroBatch]:
        def run(inputs: Mapping[str, Tensor], micro_batch: MicroBatch) -> StageOutput:
            self._found.append(chunk(inputs, micro_batch).tensors[HIDDEN_STATES])
            return StageOutput({})

        return run

    def taken(self) -> list[Tensor]:
        """Return what was kept, and keep it no longer."""
        found, self._found = self._found, []
        return found


class DividedAsTheNetwork(TeacherNetwork):
    """Teacher in the layout of the network."""

    def __init__(
        self,
        opened: OpenedModel,
        chunks: Sequence[GPT],
        engine: PipelineEngine[MicroBatch],
        optimizer: Optimizer,
        schedules: ProvedSchedules,
    ) -> None:
        """Load the teacher onto the ranks of the network. All ranks make it together."""
        loaded = load_teacher(opened, chunks, engine, optimizer, output_apart=True)
        self.config, self.output, self.network = loaded.config, loaded.output, loaded.network
        self.optimizers, self._chunks, self._schedules = [loaded.optimizer], loaded.chunks, schedules
        own = loaded.engine
        self._kept = _KeptStates(loaded.chunks, own.stages, own.rank)
        self._engine = PipelineEngine(self._kept.stages, own.stages, own.rank, own.links, own.device)
        self._mesh = chunks[0].mesh

    def hidden_states(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        count = len(micro_batches)
        actions = self._schedules.prove(evaluation=[count], mesh=self._mesh).evaluation(count)
        self._engine.run(actions, micro_batches)
        return self._kept.taken()

    def parameters(self) -> int:
        return count_parameters([*self._chunks, *self.output], self._mesh)


@dataclass(frozen=True)
class Division:
    """Division of a step's samples among all ranks, in the layout of one of the two networks.

    Attributes:
        mesh: the layout.
        sequence_parallel: whether tensor-parallel ranks divide the hidden states between layers.
        last: pipeline rank of the last stage.
        length: number of tokens of a sample.
    """

    mesh: ParallelMesh
    sequence_parallel: bool
    last: int
    length: int

    def cut(self, rank: int) -> SequenceLayout:
        """Return the tokens of each sample on a context-parallel rank."""
        return SequenceLayout.cut(self.length, zigzag(self.mesh.size("cp")), rank)

    def samples(self, each: int, every: int) -> list[Share]:
        """Return the tokens of each rank, if data-parallel ranks have `each` micro-batches, and all have `every`."""
        return self._shares(each, every, lambda place: self.cut(place["cp"]).runs)

    def whole_samples(self, each: int, every: int) -> list[Share]:
        """Return the same without a division of samples."""
        return self._shares(each, every, lambda place: (range(self.length),))

    def last_states(self, each: int, every: int) -> list[Share]:
        """Return the tokens of each rank whose last hidden states it has."""
        parts = self.mesh.size("tp") if self.sequence_parallel else 1

        def places(place: Mapping[str, int]) -> Runs:
            return self.cut(place["cp"]).part(place["tp"] % parts, parts) if place["pp"] == self.last else ()

        return self._shares(each, every, places)

    def _shares(self, each: int, every: int, places: Callable[[Mapping[str, int]], Runs]) -> list[Share]:
        found = []
        for place in map(self.mesh.coordinates_of, range(self.mesh.world_size)):
            first, own = place["dp"] * each, places(place)
            found.append(Share(range(min(first, every), min(first + each, every)), own) if own else Share())
        return found


class DividedOtherwise(TeacherNetwork):
    """Teacher in a layout of its own. Its data-parallel ranks divide the micro-batches of a step among themselves."""

    def __init__(
        self,
        layout: ParallelConfig,
        samples: tuple[int, int],
        opened: OpenedModel,
        chunks: Sequence[GPT],
        engine: PipelineEngine[MicroBatch],
        optimizer: Optimizer,
    ) -> None:
        """Load the teacher in this layout. All ranks make it together.

        `samples`: number of samples of a micro-batch, and of their tokens.
        """
        opened, first, (batch, length) = opened.without_depths(), chunks[0], samples
        base, context, dtype, ends = first.mesh, first.context, first.dtype, (first.mesh.rank,)
        mesh = OtherGrid(base, layout.mesh_sizes)
        self.config, _ = with_dispatcher(opened.config, dtype, mesh)
        count, rank, layers = mesh.size("pp"), mesh.coordinate("pp"), self.config.num_layers
        part = replace(stage_parts(layers, count)[rank], loss=False)
        sequence = length // layout.sequence_parts
        passed = messages(self.config, count, sequence=sequence, batch=batch, dtype=dtype)
        stages, of_network = Stages(count, messages=passed), engine.stages
        self._chunks = make_chunks(
            self.config, mesh, [part], ends, sequence_parallel=layout.sequence_parallel, dtype=dtype
        )
        last = StageLayers(layers, 0, embedding=False, loss=True)
        self.output = make_chunks(
            self.config,
            base,
            [last] * (of_network.count - 1 in of_network.of_rank(engine.rank)),
            ends,
            sequence_parallel=context.sequence_parallel,
            dtype=dtype,
            attention_ways=context.attention_ways,
        )
        self.network, self.optimizers = nn.ModuleList(), []
        apart = replace(optimizer.options, instances=1)  # of which the other layout may have no equal parts
        for own, grid, options in ((self._chunks, mesh, apart), (self.output, base, optimizer.options)):
            network, holder = frozen(own, optimizer.config, options, grid)
            load_weights(opened.source, opened.what, network, holder, grid, states_of_training(self.config))
            self.network.append(network)
            self.optimizers.append(holder)
        self._kept, self._batch = _KeptStates(self._chunks, stages, rank), batch
        self._engine = PipelineEngine(self._kept.stages, stages, rank, make_links(mesh, stages), engine.device)
        self._schedules = ProvedSchedules(stages, rank)
        self._own = Division(mesh, layout.sequence_parallel, count - 1, length)
        end = of_network.place(of_network.count - 1)[0]
        self._networks = Division(base, context.sequence_parallel, end, length)

    def hidden_states(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run over what falls to this rank's replica of the teacher; see `TeacherNetwork`."""
        own, networks, count = self._own, self._networks, len(micro_batches)
        every = count * networks.mesh.size("dp")
        each = -(-every // own.mesh.size("dp"))
        samples = redistributed(
            _packed(micro_batches), networks.samples(count, every), own.whole_samples(each, every), networks.mesh
        )
        empty = samples.new_zeros(each - len(samples), *samples.shape[1:])  # pipelines run as many micro-batches
        layout, apart = own.cut(own.mesh.coordinate("cp")), micro_batches[0].first_keys is not None
        batches = [_micro_batch(values, layout, apart) for values in torch.cat([samples, empty])]
        self._engine.run(self._schedules.prove(evaluation=[each], mesh=own.mesh).evaluation(each), batches)
        held, needed = own.last_states(each, every), networks.last_states(count, every)
        return list(redistributed(self._kept_states(len(samples)), held, needed, networks.mesh))

    def _kept_states(self, count: int) -> Tensor:
        """Return the hidden states of the first `count` micro-batches, [micro-batches, sequence, batch, hidden].

        On other stages than the last, they are those of no micro-batch and no token.
        """
        if states := self._kept.taken()[:count]:
            return torch.stack(states)
        shape, first = (0, 0, self._batch, self.config.hidden_size), self._chunks[0]
        return torch.empty(shape, dtype=first.dtype, device=first.mesh.device)

    def parameters(self) -> int:
        found = count_parameters(self._chunks, self._own.mesh) + count_parameters(self.output, self._networks.mesh)
        if not self.config.untie_embeddings_and_output_weights:  # the output layer has a copy of the embedding
            found -= (self.config.vocab_size or 0) * self.config.hidden_size
        return found


def _packed(micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Return this rank's tokens, with what the teacher needs beside them: [micro-batches, sequence, 4, batch] int64."""
    found = []
    for each in micro_batches:
        first = torch.zeros_like(each.tokens) if each.first_keys is None else each.layout.own(each.first_keys)
        padding = torch.zeros_like(each.tokens) if each.padding is None else each.padding.long()
        found.append(torch.stack([each.tokens, each.positions, first, padding]).permute(2, 0, 1))
    return torch.stack(found)


def _micro_batch(values: Tensor, layout: SequenceLayout, documents_are_apart: bool) -> MicroBatch:
    """Return a rank's part of whole samples that were packed, [sequence, 4, batch]."""
    tokens, positions, first, padding = values.permute(1, 2, 0).contiguous()
    padded, bounds = bool(padding.any()), FirstKeys()
    if documents_are_apart:
        bounds = FirstKeys(first.amin(0).cpu().numpy(), first.amax(0).cpu().numpy())
    return MicroBatch(
        layout.own(tokens),
        layout.own(positions),
        first_keys=first if documents_are_apart else None,
        labels=None,
        loss_mask=None,
        key=RandomKey(0, ()),
        layout=layout,
        bounds=bounds,
        padding=layout.own(padding.bool()) if padded else None,
        lengths=(padding == 0).sum(1) if padded else None,
    )
