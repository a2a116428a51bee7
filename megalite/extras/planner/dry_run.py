"""Dry run: one step of any rank of any layout, on the meta device, through the code of a real run.

The other ranks do not exist (`UnconnectedMesh`), and nothing is computed. Tokens are taken to be spread evenly over
experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.config import RunConfig
from megalite.config.kernels import KernelsConfig
from megalite.config.validate import resolve
from megalite.data.sampler import Deal
from megalite.data.tokenizers.null import NullTokenizer
from megalite.extras.planner.host_time import host_speed
from megalite.extras.planner.recording import Recorder
from megalite.extras.planner.records import Work
from megalite.lifecycle.launch import require_sends
from megalite.model.batch import FurtherTokens, MicroBatch
from megalite.optim.buckets import Bucket
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.randomness import RandomKey
from megalite.pipeline.engine import RunningStep
from megalite.pipeline.schedules import Action
from megalite.run.run import make_trainer
from megalite.tasks.gpt_task import GPTTask
from megalite.tasks.memory import Memory
from megalite.tasks.summary import measured_memory
from megalite.torch_internals import mend_products_on_meta, mend_sgd_on_meta
from megalite.training import builder
from megalite.training.batches import Cutting
from megalite.training.data import RunData, known_vocabulary
from megalite.training.kernels import require_equal_dropout, require_recipe
from megalite_kernels.implementation import Kernels, current, use

META = torch.device("meta")
OPTIMIZER = "optimizer"
"""Name of the phase after the list of actions."""


@dataclass(frozen=True)
class Held:
    """A parameter, or a part of one, that the rank holds."""

    name: str
    """Name of the logical tensor."""
    shape: tuple[int, ...]
    """Shape of the logical tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """The rank's box of it."""
    axes: tuple[str, ...]
    """Axes of the mesh over which the logical tensor is split."""
    dtype: str
    bucket: int


@dataclass(frozen=True)
class Moment:
    """Memory during an action of the step, in bytes."""

    action: str
    peak: int
    after: int


@dataclass(frozen=True)
class DryRun:
    """Figures of what one rank holds, sends and computes in one step.

    Attributes:
        coordinates: place of the rank on each axis of the mesh.
        memory: bytes by kind, as the summary of a run measures them.
        before: bytes of all tensors before the step.
        peak: most bytes of all tensors during the step, and `peak_blocks` the same in blocks of the GPU's allocator.
        highest_on_host: most bytes of all tensors during the step that offloading keeps in the host's memory.
        moments: memory of the device during each action.
        work: launches and messages by kind of action, and of the optimizer.
        waits: times that the host waits for the device, by the place in the code.
        misplaced: operations on tensors of the device together with tensors of the host, by the place in the code.
        seconds: the host's own time for a step in which the device computes nothing.
        optimizer_seconds: part of it after the gradients, which does not grow with the micro-batches.
    """

    rank: int
    world_size: int
    layout: str
    coordinates: Mapping[str, int]
    held: Sequence[Held]
    buckets: Sequence[int]
    """Elements of each bucket."""
    memory: Memory
    before: int
    peak: int
    peak_blocks: int
    highest_on_host: int
    moments: Sequence[Moment]
    work: Mapping[str, Work]
    waits: Mapping[str, int]
    misplaced: Mapping[str, int]
    micro_batches: int
    layers: int
    """Number of layers of the rank."""
    seconds: float
    optimizer_seconds: float
    kernels: str

    @property
    def total(self) -> Work:
        return sum(self.work.values(), Work())

    @property
    def host_seconds(self) -> float:
        """Seconds of the host per layer and micro-batch; embedding and head count as a part of the layers."""
        return (self.seconds - self.optimizer_seconds) / max(self.layers * self.micro_batches, 1)


def dry_run(config: RunConfig, world_size: int, rank: int, *, of_gpu: bool = True) -> DryRun:
    """Build a rank on the meta device, in place of a GPU or a CPU, and run one step of its list of actions, with the
    optimizer.

    Raises ConfigurationError if the configuration does not fit the ranks or the device, and DataError if the tokenizer
    is needed for the size of the vocabulary and cannot be opened.
    """
    config = resolve(config, world_size)
    if of_gpu:
        require_sends(config.parallel.distributed_backend or "nccl", config.parallel.pipeline_model_parallel_size)
    mesh = UnconnectedMesh(rank=rank, world_size=world_size, device=META, **config.parallel.mesh_sizes)
    recorder = Recorder()
    with planned_kernels(config.kernels, of_gpu=of_gpu), recorder:
        require_equal_dropout(config, META)
        require_recipe(config, META)
        task = DryTask(config, mesh)
        trainer = make_trainer(config, task, mesh)
        memory = measured_memory(trainer, task)
        recorder.forget()
        before = recorder.alive
        recorder.listen(mesh.traffic)
        observer = _Observer(recorder)
        gradients = trainer.forward_backward(observer=observer)
        recorder.phase = OPTIMIZER
        trainer.update(gradients)
        observer.note(OPTIMIZER)
        micro_batches = len(gradients.micro_batches)
        del gradients
        mesh.traffic.listener = None
    with planned_kernels(config.kernels, of_gpu=of_gpu), host_speed():
        began = time.process_time()  # of the CPU: other processes take some of the time that passes
        gradients = trainer.forward_backward()
        half_way = time.process_time()
        trainer.update(gradients)
        ended = time.process_time()
        kernels = "Triton's" if current().runs_triton("norm", torch.empty(0, device=META)) else "the references"
    return DryRun(
        rank=rank,
        world_size=world_size,
        layout=config.parallel.layout(world_size),
        coordinates=mesh.coordinates_of(rank),
        held=list(_held(trainer.optimizer.buckets)),
        buckets=[bucket.length for bucket in trainer.optimizer.buckets],
        memory=memory,
        before=before,
        peak=recorder.highest,
        peak_blocks=recorder.highest_blocks,
        highest_on_host=recorder.highest_on_host,
        moments=observer.moments,
        work=recorder.work,
        waits=dict(recorder.waits),
        misplaced=dict(recorder.misplaced),
        micro_batches=micro_batches,
        layers=sum(len(chunk.layers) for chunk in task.chunks),
        seconds=ended - began,
        optimizer_seconds=ended - half_way,
        kernels=kernels,
    )


@contextmanager
def planned_kernels(config: KernelsConfig, *, of_gpu: bool = True) -> Iterator[None]:
    """Let the meta device stand for a GPU or a CPU within the block, with the kernels that the flags choose there.

    A GPU has Triton's if Triton is installed here.
    """
    mend_products_on_meta()
    mend_sgd_on_meta()
    before = current()
    use(Kernels(config.kernels, config.to_reference, meta_is_gpu=of_gpu))
    try:
        yield
    finally:
        use(before)


class DryTask(GPTTask):
    """Pre-training of a GPT on samples without values."""

    def __init__(self, config: RunConfig, mesh: ParallelMesh) -> None:
        tokenizer = NullTokenizer(known_vocabulary(config)[0] - 1)
        super().__init__(config, RunData(tokenizer, [], None, None), mesh)

    @property
    def set_values(self) -> Callable[[Parameter], None]:
        return lambda parameter: None

    def train_loader(self) -> Any:
        return self

    def micro_batches(self, consumed_samples: int, deal: Deal) -> Sequence[MicroBatch]:
        return [dry_micro_batch(self.config, self.mesh, self.cutting) for _ in range(deal.slots)]


def dry_micro_batch(config: RunConfig, mesh: ParallelMesh, cutting: Cutting) -> MicroBatch:
    """Return a micro-batch of this rank, on the mesh's device."""
    count, length, device = config.training.micro_batch_size, config.data.seq_length, mesh.device
    # Where documents begin is not known: all begin with the sample, so that each token sees the most keys.
    layout = cutting.layout(length, FirstKeys())
    shape = count, sum(map(len, layout.runs))
    first = torch.zeros(count, length, dtype=torch.int64, device=device) if config.data.reset_attention_mask else None
    tokens, positions, labels = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(3))
    wide = torch.promote_types(builder.model_dtype(config), torch.float32)
    key = RandomKey(config.training.seed, tuple(range(count)))
    mask = torch.ones(shape, dtype=wide, device=device)
    found = MicroBatch(tokens, positions, first, labels, mask, key, layout)
    if cutting.depths == 0:
        return found
    every = (values.expand(cutting.depths, *shape) for values in (tokens, labels, mask))
    return replace(found, further=FurtherTokens(*every))


class _Observer:
    """Observer of a step's actions, which are the phases of the record."""

    def __init__(self, recorder: Recorder) -> None:
        self.moments: list[Moment] = []
        self._recorder = recorder

    def execute(self, action: Action, step: RunningStep) -> None:
        """Run an action under its own phase."""
        self._recorder.phase = action.kind
        step.execute(action)
        self.note(str(action))

    def note(self, action: str) -> None:
        """Note the memory since the last note."""
        recorder = self._recorder
        self.moments.append(Moment(action, recorder.peak, recorder.alive))
        recorder.restart_peak()


def _held(buckets: Sequence[Bucket]) -> Iterator[Held]:
    """Yield the boxes of tensors that this rank holds, with the number of the bucket in which they are."""
    for number, bucket in enumerate(buckets):
        for slot in bucket.slots:
            for piece in slot.parameter.sharding.pieces:
                yield Held(
                    piece.tensor.name,
                    piece.tensor.shape,
                    piece.box.offset,
                    piece.box.size,
                    tuple(axis for _, axis in piece.splits),
                    str(slot.parameter.dtype).removeprefix("torch."),
                    number,
                )
