"""Bytes that pipeline ranks send to neighbours and data-parallel peers; times when ZeRO 3 has a block unsharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.optim.buckets import Bucket
from megalite.optim.flat import is_storage_free
from megalite.optim.layout import unique_parameters
from megalite.optim.learning_rate import Rates
from megalite.parallel import collectives
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.engine import PipelineEngine, Recording
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.schedules import Action
from tests.distributed.layout_cell import HIDDEN, SEQUENCE, Cell
from tests.distributed.layout_run import local_micro_batches, make_chunks, make_optimizer, with_messages
from tests.distributed.test_volume import GRADIENT, NORM, PARAMETER
from tests.harness.rank_pool import RankPools
from tests.harness.stages import LOSS
from tests.harness.wide import wide_except

Bytes = Counter[tuple[str, tuple[int, ...]]]
"""Bytes sent by this rank, by operation and by participating ranks."""


class Run:
    """Run of one step of a cell on this rank."""

    def __init__(self, cell: Cell) -> None:
        world = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        self.cell, self.mesh = cell, ParallelMesh(**world, pipeline_parallel_size=cell.pp)
        self.chunks = make_chunks(self.mesh, cell)
        for chunk in self.chunks:
            initialize(chunk, seed=1)
        self.optimizer = make_optimizer(self.chunks, self.mesh, cell)
        stages = with_messages(cell.stages, cell)
        rank = self.mesh.coordinate("pp")
        self.engine = PipelineEngine(self.chunks, stages, rank, make_links(self.mesh, stages), self.mesh.device)
        reductions = Reductions(self.optimizer.reduces_each_micro_batch)
        self.schedules = ProvedSchedules(stages, rank, schedule=cell.schedule_name, reductions=reductions)
        self.schedules.prove([cell.samples // (cell.dp * cell.micro_batch_size)], mesh=self.mesh)

    def step(self, recording: Recording | None = None) -> None:
        micro_batches = list(local_micro_batches(self.cell, 0, self.mesh.coordinate("dp")))
        self.optimizer.begin_step(len(micro_batches))
        self.engine.run(
            self.schedules.training(len(micro_batches)), micro_batches, {LOSS: 1.0}, self.optimizer, recording
        )
        self.optimizer.step(Rates(0.01, 0.01, 0.01))


def counted(sent: Bytes, name: str, original: Callable[..., Any], part: Callable[[Tensor, int], int]) -> Any:
    """Wrap `original` to count its bytes: `part` of its input, for the number of ranks."""

    def call(*tensors: Any, group: Any, **options: Any) -> Any:
        tensor = tensors[1] if name in ("gathered", "scattered") else tensors[0]
        sent[name, tuple(dist.get_process_group_ranks(group))] += part(tensor, dist.get_world_size(group))
        return original(*tensors, group=group, **options)

    return call


def sent_in_a_step(cell: Cell) -> dict[str, Any]:
    run, sent = Run(cell), Bytes()
    gather = counted(sent, "gathered", collectives._all_gather_single, lambda tensor, size: tensor.nbytes * (size - 1))
    original = dist.ProcessGroup.send

    def send(group: dist.ProcessGroup, tensors: list[Tensor], *arguments: int) -> Any:
        sent["sent", tuple(dist.get_process_group_ranks(group))] += tensors[0].nbytes
        return original(group, tensors, *arguments)

    scatter = counted(sent, "scattered", dist.all_to_all_single, lambda t, size: t.nbytes * (size - 1) // size)
    with (
        mock.patch.object(collectives, "_all_gather_single", gather),
        mock.patch.object(dist, "all_to_all_single", scatter),
        mock.patch.object(dist, "all_reduce", counted(sent, "reduced", dist.all_reduce, lambda t, _: t.nbytes)),
        mock.patch.object(dist.ProcessGroup, "send", send),
    ):
        run.step()
    used = [bucket.length * len(bucket.accumulators) for bucket in run.optimizer.buckets]
    whole = [bucket.length for bucket in run.optimizer.buckets]
    shared = [bucket.length for bucket in run.optimizer.buckets if bucket.slots[0].parameter.sharding.partial_group]
    counts = {"elements": sum(whole), "used": sum(used), "shared": sum(shared)}
    return counts | {"sent": dict(sent), "peers": run.mesh.ranks("dp")}


BORDERS = {"1f1b": 1, "interleaved-2": 3, "zb-h1": 1, "zb-v": 2}
"""Borders between stages of two ranks."""
MICRO_BATCHES = 4


@pytest.mark.parametrize(
    ("zero", "schedule", "tied"),
    [
        pytest.param(
            *(zero, schedule, tied),
            id=f"{zero}-{schedule}-{'tied' if tied else 'untied'}",
            marks=[pytest.mark.wide] * (zero != (1, 3)[number % 2] or (zero // 2 + number + tied) % 2),  # in turn
        )
        for zero in range(4)
        for number, schedule in enumerate(BORDERS)
        for tied in (True, False)
    ],
)
def test_a_pipeline_sends_hidden_states_and_no_more(
    zero: int, schedule: str, tied: bool, rank_pools: RankPools
) -> None:
    """Data-parallel peers get as many bytes as without a pipeline.

    Neighbours get the hidden states of each micro-batch at each border, their gradients, and the sum over the replicas
    of a tied weight. With V-shaped stages that sum sends nothing, but its uses are reduced and gathered, each in its
    own chunk.
    """
    cell = Cell(family="llama", tied=tied, pp=2, dp=2, samples=8, zero=zero, schedule=schedule, dtype="bfloat16")
    sent_along: Counter[int] = Counter()
    for rank, found in enumerate(rank_pools(4).run(sent_in_a_step, cell)):
        others, used = found["elements"] // 2, found["used"] // 2
        rounds = MICRO_BATCHES if zero >= 2 else 1
        gathered = {
            0: GRADIENT * others,
            1: PARAMETER * others,
            2: PARAMETER * others,
            3: 2 * MICRO_BATCHES * PARAMETER * used,
        }
        pipeline = (rank % 2, rank % 2 + 2)
        wanted = {
            ("scattered", found["peers"]): rounds * GRADIENT * used,
            ("gathered", found["peers"]): gathered[zero],
            ("reduced", (0, 1, 2, 3)): NORM,
        }
        if tied and schedule != "zb-v":
            assert found["shared"] > 0
            wanted["gathered", pipeline] = GRADIENT * found["shared"] // 2
        messages = {key: size for key, size in found["sent"].items() if key[0] == "sent"}
        assert {key: size for key, size in found["sent"].items() if key[0] != "sent"} == wanted
        assert {ranks for _, ranks in messages} <= {pipeline, pipeline[::-1]}
        sent_along[rank % 2] += sum(messages.values())
    message = SEQUENCE * HIDDEN * PARAMETER
    assert set(sent_along.values()) == {2 * MICRO_BATCHES * BORDERS[schedule] * message}


class Watch(Recording):
    """Recorder of the unsharded weights after each action."""

    def __init__(self, buckets: list[Bucket]) -> None:
        super().__init__(torch.device("cpu"))
        self.buckets, self.left = buckets, list[str]()

    def execute(self, action: Action, step: Any) -> None:
        step.execute(action)
        self.left += [f"behind {action}"] * any(not is_storage_free(bucket.parameters) for bucket in self.buckets)


def whole_blocks(cell: Cell) -> tuple[list[str], int]:
    """Return the actions after which a block is unsharded, and the largest number of unsharded blocks."""
    run = Run(cell)
    sharded = [bucket for bucket in run.optimizer.buckets if bucket.zero_stage == 3]
    block_of = {
        id(parameter.gradient_buffer): (chunk, block)
        for chunk, network in enumerate(run.chunks)
        for block, module in enumerate(network.blocks())
        for parameter in unique_parameters(module)
    }
    watch, most, begin = Watch(sharded), 0, Bucket.begin_parameter_gather

    def count(bucket: Bucket) -> None:
        nonlocal most
        begin(bucket)
        most = max(most, len({block_of[id(other)] for other in sharded if not is_storage_free(other.parameters)}))

    with mock.patch.object(Bucket, "begin_parameter_gather", count):
        run.step(watch)
    return watch.left, most


@pytest.mark.parametrize("schedule", wide_except(["zb-h1", "zb-v", "interleaved-2"], ["zb-v"]))
@pytest.mark.parametrize(("overlap", "most"), [("none", 1), ("reduce and gather", 2)])
def test_a_blocks_weights_are_whole_in_its_forward_and_in_the_backward_of_its_input(
    schedule: str, overlap: str, most: int, rank_pools: RankPools
) -> None:
    """No block is unsharded after any action: deferred gradients need no parameters."""
    cell = Cell(family="llama", pp=2, dp=2, samples=8, zero=3, schedule=schedule, overlap=overlap)
    for left, found in rank_pools(4).run(whole_blocks, cell):
        assert left == []
        assert 1 <= found <= most
