"""Runs of cells of the layout matrix on a rank, with megalite's parts; tensors are returned with their global
places."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite import checkpoint
from megalite.checkpoint import FORMATS, Contents, Plan, Saver, TrainingState
from megalite.checkpoint.plan import held_regions
from megalite.config.parallel import STRATEGIES, ParallelConfig
from megalite.config.validate_shares import ranks_together
from megalite.data.loader import MicroBatchArrays, emptied
from megalite.data.sampler import Shares
from megalite.model import gpt
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.head import LossConfig
from megalite.model.offloading import offload_layers
from megalite.offload.activations import Place
from megalite.offload.transfers import Direction, make_transfers
from megalite.optim import optimizer as optim
from megalite.optim.buckets import Bucket, DataParallel
from megalite.optim.offloaded import HostState, declared_copies
from megalite.optim.optimizer import Optimizer, StepResult
from megalite.optim.statistics import zeros_in_gradients
from megalite.parallel import collectives, linear_cross_entropy
from megalite.parallel.adapter import add_adapters
from megalite.parallel.context import AttentionWay
from megalite.parallel.initialization import initial_values, initialize
from megalite.parallel.largest_logits import largest_of_all
from megalite.parallel.linear import RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DeferredGradients, Gradient, Parameter, named_pieces
from megalite.parallel.rounded_products import kept_codes
from megalite.parallel.sharding import Box, Constant, Normal
from megalite.parallel.stage import StageOutput
from megalite.parallel.state import states_of
from megalite.pipeline.engine import PipelineEngine, Stage
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.offloading import proved
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.schedules import Action
from megalite.pipeline.stages import Stages
from megalite.training import loss_terms as terms
from megalite.training.batches import Cutting, to_micro_batches
from megalite.training.kernels import compile_layers
from megalite.training.unequal_shares import UnequalShares
from tests.distributed.layout_cell import (
    ADAPTERS,
    RECOMPUTE,
    Cell,
    Split,
    batch,
    head_ranks,
    loss_terms,
    model_config,
    optimizer_config,
    rates,
    roundings,
    sample_numbers,
)
from tests.harness.host_arena import host_arena
from tests.harness.late_copies import LateTransfers
from tests.harness.stages import LOSS
from tests.harness.unsharded import unsharded_parameters

SEED = 1234
BUCKET_SIZE = 700  # elements: gives several buckets of this small model, for the overlap


@dataclass(frozen=True)
class Held:
    """Box of a logical tensor that a rank has."""

    name: str
    shape: tuple[int, ...]
    """Shape of the unsharded logical tensor."""
    box: Box
    digest: bytes
    """Digest of the values' bits."""
    values: Tensor | None
    """Values; None if a data-parallel peer returns them."""


@dataclass(frozen=True)
class RankResult:
    """Result of a cell on one rank."""

    initial: list[Held]
    gradients: list[Held]
    """Gradients of the first step, reduced over all ranks and clipped."""
    final: list[Held]
    losses: list[float]
    """Means over the global batch, one per step."""
    gradient_norms: list[float]
    skipped: list[bool]
    sample_losses: dict[int, Tensor]
    """Loss sums of this rank's micro-batches in the first step, by their first sample."""
    states: list[Held]
    """States of the modules after the last step."""
    means: list[Held]
    """Means of the weights after the last step."""
    figures: dict[str, float]
    """Norms by group, of the first step's gradient and of the final parameters; number of zeros in that gradient; the
    largest logit of the last step if it is measured."""


def run_cells(cells: Sequence[Cell]) -> list[RankResult]:
    """Run every cell in turn on this rank; each cell needs exactly this number of processes."""
    meshes, results = make_meshes(cells), []
    for cell in cells:
        with host_arena() if cell.on_host or cell.offload is not None else nullcontext():
            results.append(run_cell(meshes[cell.split], cell))
    return results


def make_meshes(cells: Iterable[Cell]) -> dict[Split, ParallelMesh]:
    """Return this rank's meshes: one for all cells with the same split."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {
        split: ParallelMesh(rank=rank, world_size=world_size, **split._asdict())
        for split in dict.fromkeys(cell.split for cell in cells)
    }


def run_cell(mesh: ParallelMesh, cell: Cell) -> RankResult:
    """Build the model, train it for the cell's steps, and return all results that must not depend on the layout."""
    chunks = initialized_chunks(mesh, cell)
    initial = held(nn.ModuleList(chunks), mesh, lambda parameter: parameter)
    training = Training(mesh, cell, chunks)
    network, optimizer = training.network, training.optimizer
    gradients: list[Held] = []
    figures: dict[str, float] = {}
    losses, norms, skipped = [], [], []

    for step in cell.step_numbers:
        if mesh.rank == cell.infinity_on:
            plant_infinity(network, active=step == 0)
        loss, update = training.step(step)
        losses.append(loss)
        norms.append(update.gradient_norm)
        skipped.append(update.skipped)
        if step == cell.first_step:
            gradients = whole_gradients(network, mesh, optimizer.buckets)
            figures = {f"gradient {group}": norm for group, norm in update.gradient_norms.items()}
            figures["zeros"] = zeros_in_gradients(optimizer.buckets, mesh)
    figures |= {f"parameter {group}": norm for group, norm in optimizer.parameter_norms().items()}
    if model_config(cell).measures_logits:
        figures["largest logit"] = largest_of_all(chunks, mesh)
    with unsharded_parameters(optimizer):
        assert_padding_is_zero(network)
        final = held(network, mesh, lambda parameter: parameter)
    states, means, seen = held_states(network, mesh), held_means(optimizer), training.sample_losses
    return RankResult(initial, gradients, final, losses, norms, skipped, seen, states, means, figures)


class Training:
    """Training of a cell on this rank."""

    def __init__(self, mesh: ParallelMesh, cell: Cell, chunks: Sequence[GPT]) -> None:
        self.mesh, self.cell = mesh, cell
        if cell.compiled is not None:
            compile_layers(chunks, cell.compiled)
        self.network = nn.ModuleList(chunks)
        self.terms = terms.declared_terms(chunks)
        self.optimizer = make_optimizer(chunks, mesh, cell)
        self.plan = make_plan(mesh, cell)
        self.sample_losses: dict[int, Tensor] = {}
        """Loss sums, as in `RankResult`."""
        stages, rank = with_messages(cell.stages, cell), mesh.coordinate("pp")
        recording = [recording_losses(chunk, self.sample_losses) for chunk in chunks]
        self.engine = PipelineEngine(recording, stages, rank, make_links(mesh, stages), mesh.device)
        if cell.recipe is not None:
            self.engine.within = partial(kept_codes, chunks)
        if cell.offload is not None:
            self.engine.offloading = offloading = offload_layers(chunks, cell.offload)
            if cell.late_copies:
                offloading.transfers = LateTransfers(mesh.device)
        self.schedules = ProvedSchedules(
            stages,
            rank,
            schedule=cell.schedule_name,
            reductions=Reductions(self.optimizer.reduces_each_micro_batch, cell.overlap != "none", align_ranks=True),
        ).prove(slots := shares_of(cell, mesh.coordinate("dp")).slots(micro_batches_of(cell)), mesh=mesh)
        lists = {number: self.schedules.training(number) for number in slots}
        orders = {number: [each.chunk for each in actions if each.kind == "R"] for number, actions in lists.items()}
        shares_of(cell, mesh.coordinate("dp")).check(orders)

    def step(self, number: int) -> tuple[float, StepResult]:
        """Run one step on the samples of this number; return the mean loss over the global batch, and the update's
        result."""
        mesh, optimizer = self.mesh, self.optimizer
        micro_batches = list(local_micro_batches(self.cell, number, mesh.coordinate("dp"), mesh.coordinate("cp")))
        self.network.train()
        own = terms.counted(self.terms, micro_batches, mesh.device)
        counts = terms.total_counts(self.terms, own, mesh)
        optimizer.begin_step(len(micro_batches))
        factors = terms.loss_multipliers(self.terms, counts, 1.0)
        begun: list[tuple[Direction, int]] = []
        if optimizer.host is not None:
            optimizer.host.transfers.begun = lambda direction, size: begun.append((direction, size))
        actions = self.schedules.training(len(micro_batches))
        with several_chunks_of_logits(), self._as_declared(actions):
            sums = self.engine.run(actions, micro_batches, factors, optimizer)
        update = optimizer.step(rates(self.cell, number))
        # Slices are fetched by the blocks, too, and clipped weights are sent once more.
        if not (update.skipped or self.cell.slices_on_host or self.cell.qk_clip):
            assert_as_declared(optimizer, begun)
        means = terms.means(terms.total_sums(self.terms, sums, mesh), counts)
        return sum(term.weight * means[term.name] for term in self.terms), update

    @contextmanager
    def _as_declared(self, actions: Sequence[Action]) -> Iterator[None]:
        """Require of the offloading, if there is any, the copies that are declared and proved."""
        if (offloading := self.engine.offloading) is None:
            yield
            return
        begun: list[tuple[str, Place]] = []
        offloading.begun = lambda direction, place: begun.append((direction, place))
        yield
        wanted = [
            (each.direction, Place(each.chunk, each.layer, each.micro_batch, each.slot))
            for each in proved(actions, offloading.layers, offloading.ends)
        ]
        assert begun == wanted, f"{self.cell}: {begun} instead of {wanted}"

    def save(self, directory: Path, iteration: int, ckpt_format: str = "megalite") -> Path:
        file_format = FORMATS[ckpt_format]
        path = Saver(directory, self.optimizer, self.plan, file_format=file_format).save(
            self._state(iteration), {"model": {}}
        )
        assert isinstance(path, Path)
        return path

    def save_while_training(self, directory: Path, iteration: int, ckpt_format: str = "megalite") -> Path:
        """Save asynchronously, and take a step during the save; return the checkpoint."""
        file_format = FORMATS[ckpt_format]
        saver = Saver(directory, self.optimizer, self.plan, file_format=file_format, asynchronous=True)
        saver.begin(self._state(iteration), {"model": {}})
        self.step(iteration)
        while (path := saver.advance()) is None:
            pass
        saver.close()
        return path

    def _state(self, iteration: int) -> TrainingState:
        return TrainingState(iteration, iteration * self.cell.samples, self.optimizer.steps)

    def load(self, path: Path) -> TrainingState:
        return checkpoint.load(path, self.network, self.optimizer, self.mesh, plan=self.plan)


def assert_as_declared(optimizer: Optimizer, begun: list[tuple[Direction, int]]) -> None:
    """Assert that the copies of a step are those that were proved."""
    sizes = {
        "to host": optimizer.buckets[0].gradients.itemsize if optimizer.buckets else 0,
        "to device": optimizer.buckets[0].parameters.itemsize if optimizer.buckets else 0,
    }
    for direction, size in sizes.items():
        declared = [t for t in declared_copies(optimizer.rules, optimizer.buckets) if t.direction == direction]
        expected = [(t.stop - t.start) * size for t in declared]
        assert sorted(bytes for way, bytes in begun if way == direction) == sorted(expected), direction


def several_chunks_of_logits() -> AbstractContextManager[object]:
    """Make a fused loss cut even these few tokens into chunks, the last of which is shorter."""
    return mock.patch.multiple(linear_cross_entropy, CPU_CHUNK_ELEMENTS=1, CPU_CHUNK_TOKENS=5)


def make_plan(mesh: ParallelMesh, cell: Cell) -> Plan:
    """Return the plan of each rank's tensors and of the parts that it saves."""
    options = data_parallel(cell)

    def contents_at(mesh: ParallelMesh) -> Contents:
        chunks = make_chunks(mesh, cell)
        return Contents.of(chunks, mesh, options, blocks=[chunk.blocks() for chunk in chunks])

    return Plan(
        mesh,
        contents_at,
        optimizer_config(cell),
        zero_stage=options.zero_stage,
        instances=options.instances,
        fraction_on_host=lambda rank: cell.on_host,
    )


def initialized_chunks(mesh: ParallelMesh, cell: Cell, seed: int = SEED) -> list[GPT]:
    """Return this rank's stages with their initial values, none of which is zero or one."""
    chunks = make_chunks(mesh, cell)
    network = nn.ModuleList(chunks)
    initialize(network, seed)
    perturb_constants(network)
    return chunks


def make_chunks(mesh: ParallelMesh, cell: Cell) -> list[GPT]:
    """Return the stages of the cell's model on the mesh's rank, which need not be a rank of a process."""
    parts, stages, ranks = cell.parts(), cell.stages, mesh.ranks("pp")
    chunks = gpt.make_chunks(
        model_config(cell),
        mesh,
        [parts[stage] for stage in stages.of_rank(mesh.coordinate("pp"))],
        tuple(ranks[rank] for rank in stages.ends),
        sequence_parallel=cell.sequence_parallel,
        recompute=replace(RECOMPUTE[cell.recompute], mlp_parts=cell.mlp_parts),
        loss=LossConfig(fused=cell.fused_loss, **loss_terms(cell)),
        dtype=cell.torch_dtype,
        attention_ways=(AttentionWay(head_ranks(vars(cell)), cell.way == "all_gather", cell.chains),),
        roundings=roundings(cell),
    )
    for chunk in chunks if cell.adapters is not None else ():
        add_adapters(chunk, ADAPTERS[cell.adapters])
    return chunks


def with_messages(stages: Stages, cell: Cell) -> Stages:
    """Return the stages, with declarations of the tensors that the stages of the cell's network pass on."""
    sequence = cell.sequence // cell.cp // (cell.tp if cell.sequence_parallel else 1)
    batch, dtype = cell.micro_batch_size, cell.torch_dtype
    passed = gpt.messages(model_config(cell), stages.count, sequence=sequence, batch=batch, dtype=dtype)
    return replace(stages, messages=passed)


def recording_losses(chunk: GPT, sample_losses: dict[int, Tensor]) -> Stage[MicroBatch]:
    """Return the chunk as a stage that records losses by the first sample of their micro-batch, if it is the last
    one."""

    def stage(inputs: Mapping[str, Tensor], micro_batch: MicroBatch) -> StageOutput:
        output: StageOutput = chunk(inputs, micro_batch)
        if chunk.stage_layers.loss:
            sample_losses.setdefault(micro_batch.key.samples[0], output.terms[LOSS].detach().clone())
        return output

    return stage


def accumulate_gradients(
    optimizer: Optimizer,
    stage: Stage[MicroBatch],
    micro_batches: Sequence[MicroBatch],
    factor: float = 1.0,
) -> Tensor:
    """Run forward and backward of all micro-batches, without the update; return the sum of their losses."""
    optimizer.begin_step(len(micro_batches))
    steps = ProvedSchedules(reductions=Reductions(optimizer.reduces_each_micro_batch)).prove([len(micro_batches)])
    actions = steps.training(len(micro_batches))
    return PipelineEngine([stage]).run(actions, micro_batches, {LOSS: factor}, optimizer)[LOSS]


def make_optimizer(chunks: Sequence[GPT], mesh: ParallelMesh, cell: Cell) -> Optimizer:
    blocks, options = [chunk.blocks() for chunk in chunks], data_parallel(cell)
    host = None
    if cell.on_host:
        transfers = LateTransfers(mesh.device) if cell.late_copies else make_transfers(mesh.device)
        host = HostState(transfers, cell.on_host, overlap=cell.arrive_late)
        on_host = host.transfers if cell.slices_on_host else None
        options = replace(options, overlap_arrival=cell.arrive_late, slices_on_host=on_host)
    return optim.make_optimizer(chunks, mesh, optimizer_config(cell), options, blocks=blocks, host=host)


def data_parallel(cell: Cell) -> DataParallel:
    """Return the distribution of the cell's optimizer over the data-parallel ranks."""
    overlap, chunks = cell.overlap != "none", cell.stages.chunks
    return DataParallel(
        gradient_dtype=cell.torch_gradient_dtype,
        zero_stage=cell.zero,
        instances=cell.instances,
        bucket_size=BUCKET_SIZE if overlap else None,
        overlap_reduce=overlap and (chunks == 1 or cell.zero >= 2 or cell.stages.v_shaped),  # otherwise the list does
        overlap_gather=cell.overlap == "reduce and gather",
    )


def local_micro_batches(cell: Cell, step: int, dp_rank: int, cp_rank: int = 0) -> Iterator[MicroBatch]:
    """Yield this rank's part of the step's samples, in Megatron-LM's order."""
    whole, size = batch(cell, step), cell.micro_batch_size
    attention = [layer for layer in model_config(cell).passed_layers if layer.mixer is not None]
    layers = Counter((layer.keys_before, head_ranks(vars(cell))) for layer in attention)
    cutting = Cutting(cell.cp, cp_rank, cell.chunks, layers, cell.depths)
    deal = shares_of(cell, dp_rank).deal(micro_batches_of(cell))
    for slot, samples in enumerate(deal.samples(0, size) + [range(size)] * deal.empty):
        own = slice(samples.start, samples.stop)
        fields = MicroBatchArrays(
            tokens=whole.tokens[own].numpy(),
            labels=whole.labels[own].numpy(),
            loss_mask=whole.loss_mask[own].to(torch.promote_types(cell.torch_dtype, torch.float32)).numpy(),
            positions=whole.positions[own].numpy(),
            document_ids=None if whole.document_ids is None else whole.document_ids[own].numpy(),
            padding=None if whole.padding is None else whole.padding[own].numpy(),
            replayed=None,
            sample_ids=sample_numbers(cell, step)[own],
        )
        if slot >= len(deal.numbers):
            fields = emptied(fields)
        yield from to_micro_batches([fields], SEED, cell.torch_dtype, torch.device("cpu"), cutting)


def micro_batches_of(cell: Cell) -> int:
    return cell.samples // cell.micro_batch_size


def shares_of(cell: Cell, dp_rank: int) -> Shares:
    """Return the shares of the cell, as a run makes them from its flags."""
    if cell.shares is None:
        return Shares(dp_rank, cell.dp)
    parallel = ParallelConfig(
        tensor_model_parallel_size=cell.tp,
        context_parallel_size=cell.cp,
        pipeline_model_parallel_size=cell.pp,
        expert_model_parallel_size=cell.ep,
        expert_tensor_parallel_size=cell.etp,
        data_parallel_sharding_strategy=STRATEGIES[cell.zero],
        num_distributed_optimizer_instances=cell.instances,
    )
    return UnequalShares(dp_rank, cell.shares, sum(cell.shares), ranks_together(parallel, cell.world_size))


def perturb_constants(network: nn.Module) -> None:
    """Change norms and biases from one and zero to other values, because many errors have no effect at one and zero."""
    with torch.no_grad():
        for parameter, piece in named_pieces(network):
            if isinstance(piece.tensor.initial, Constant):
                noise = replace(piece.tensor, initial=Normal(0.2))
                piece.view(parameter).add_(initial_values(noise, piece.box, SEED))


def held(network: nn.Module, mesh: ParallelMesh, tensor_of: Callable[[Parameter], Tensor | None]) -> list[Held]:
    """Return this rank's boxes of `tensor_of(parameter)`, which has the layout of the parameter, if it is not None."""
    pieces = []
    for parameter, piece in named_pieces(network):
        if (tensor := tensor_of(parameter)) is None:
            continue
        values = piece.view(tensor.detach()).clone()
        digest = hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        peers = ("edp",) if parameter.sharding.expert else ("dp", "cp")
        sent = values if mesh.rank == mesh.ranks(*peers)[0] else None
        pieces.append(Held(piece.tensor.name, piece.tensor.shape, piece.box, digest, sent))
    return pieces


def held_states(network: nn.Module, mesh: ParallelMesh) -> list[Held]:
    """Return the boxes of the modules' states, from one data-parallel rank."""
    pieces = []
    for state in states_of(network):
        (piece,) = state.sharding.pieces
        values = piece.view(state.values).clone()
        digest = hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        sent = values if mesh.rank == mesh.ranks("dp", "cp")[0] else None
        pieces.append(Held(piece.tensor.name, piece.tensor.shape, piece.box, digest, sent))
    return pieces


def held_means(optimizer: Optimizer) -> list[Held]:
    """Return the boxes of the weights' means that this rank updates."""
    pieces = []
    for region in held_regions(nn.Module(), optimizer):
        part = region.part
        if part.name.startswith("optimizer/ema/"):
            values = region.values.clone()
            digest = hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
            pieces.append(Held(part.name.removeprefix("optimizer/ema/"), part.shape, part.box, digest, values))
    return pieces


def whole_gradients(network: nn.Module, mesh: ParallelMesh, buckets: Sequence[Bucket]) -> list[Held]:
    """Return the reduced gradients, gathered from their owners."""
    bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
    whole = {id(bucket): collectives.all_gather(bucket.gradient_shard, bucket.shard_group) for bucket in buckets}

    def gradient(parameter: Parameter) -> Tensor | None:
        if not parameter.requires_grad:
            return None
        bucket = bucket_of[id(parameter)]
        slot = next(slot for slot in bucket.slots if slot.parameter is parameter)
        return whole[id(bucket)][slot.start : slot.stop].view(parameter.shape)

    return held(network, mesh, gradient)


def assert_padding_is_zero(network: nn.Module) -> None:
    for parameter in {id(p): p for p, _ in named_pieces(network)}.values():
        covered = torch.zeros(parameter.shape[0], dtype=torch.bool)
        for piece in parameter.sharding.pieces:
            covered[piece.row : piece.row + piece.rows] = True
        assert not parameter[~covered].any(), f"the padding of {parameter.sharding.name} has moved"


@dataclass(frozen=True)
class _Infinite(Gradient):
    """Gradient with an infinity in it."""

    gradient: Gradient

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        self.gradient.add_to(target, overwrite=overwrite)
        target.view(-1)[-1] = float("inf")


@dataclass(frozen=True)
class _Infector:
    bucket: Bucket

    @property
    def deferred(self) -> DeferredGradients | None:
        return self.bucket.deferred

    @property
    def frees_parameters(self) -> bool:
        return self.bucket.frees_parameters

    def accumulate(self, parameter: Parameter, gradient: Gradient, use: int = 0) -> None:
        self.bucket.accumulate(parameter, _Infinite(gradient), use)


def plant_infinity(network: nn.Module, *, active: bool) -> None:
    """Make gradients of one weight of this rank infinite if `active`, otherwise restore them."""
    weight = next(module for module in network.modules() if isinstance(module, RowParallelLinear)).weight
    if isinstance(weight.gradient_buffer, _Infector):
        weight.gradient_buffer = weight.gradient_buffer.bucket
    if active:
        weight.gradient_buffer = _Infector(weight.gradient_buffer)
