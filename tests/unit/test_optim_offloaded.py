"""Parts of shards on the host: where a shard is divided, what an update copies, and slices that are fetched."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.offload.transfers import Copy, Direction, Transfers, make_transfers
from megalite.optim.buckets import DataParallel
from megalite.optim.layout import BucketShardSpec, bucket_layouts
from megalite.optim.learning_rate import Rates
from megalite.optim.offloaded import ElementCopy, HostState, check_copies, elements_on_host
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient, accumulate_grad, named_pieces
from tests.distributed.layout_cell import Cell, model_config
from tests.harness.late_copies import LateTransfers

CPU = torch.device("cpu")


def specs(bucket_size: int | None) -> list[BucketShardSpec]:
    mesh, network = ParallelMesh(), GPT(model_config(Cell()), ParallelMesh(), dtype=torch.float64)
    parameters = list({id(parameter): parameter for parameter, _ in named_pieces(network)}.values())
    layouts = bucket_layouts(parameters, mesh, bucket_size, {id(parameter): (0,) for parameter in parameters})
    return [BucketShardSpec.of(each, 0, peers=1, position=0, alone=True, zero_stage=3) for each in layouts]


@given(fraction=st.floats(0, 1), bucket_size=st.none() | st.integers(1, 4000))
def test_the_first_elements_are_on_the_host_and_few_more_than_their_share(
    fraction: float, bucket_size: int | None
) -> None:
    """A shard is divided at a block of 256 elements from the start of a group of parameters, so no block is divided."""
    shards = specs(bucket_size)
    counts, lengths = elements_on_host(shards, fraction), [spec.updated[1] - spec.updated[0] for spec in shards]
    wanted = math.ceil(fraction * sum(lengths))
    assert wanted <= sum(counts) < wanted + 256
    divided = [number for number, (count, length) in enumerate(zip(counts, lengths, strict=True)) if count < length]
    assert not any(counts[number] for number in divided[1:])
    for spec, count in zip(shards, counts, strict=True):
        for _, _, start, stop in spec.layout.stretches():
            if start < spec.updated[0] + count < stop:
                assert (spec.updated[0] + count - start) % 256 == 0


def offloading(
    transfers: Transfers, options: DataParallel, prepare: Callable[[GPT], object] = lambda network: None
) -> Optimizer:
    network = GPT(model_config(Cell()), ParallelMesh(), dtype=torch.float64)
    initialize(network, seed=1)
    prepare(network)
    host = HostState(transfers, 1.0)
    return make_optimizer(
        [network], ParallelMesh(), OptimizerConfig(lr=0.1), options, blocks=[network.blocks()], host=host
    )


def test_a_slice_fetched_before_an_update_is_not_gathered_after_it() -> None:
    """A forward may end by an error when slices of its next blocks have been fetched."""
    transfers = make_transfers(CPU)
    optimizer = offloading(transfers, DataParallel(torch.float64, zero_stage=3, slices_on_host=transfers))
    bucket = optimizer.buckets[0]
    bucket.begin_fetch()
    bucket.release_slice()
    bucket.parameter_shard.fill_(3.0)
    bucket.begin_parameter_gather()
    bucket.finish_parameter_gather()
    assert bool((bucket.parameters == 3.0).all())


def test_a_slice_fetched_before_a_load_is_not_gathered_after_it() -> None:
    transfers = Transfers(CPU)
    optimizer = offloading(transfers, DataParallel(torch.float64, zero_stage=3, slices_on_host=transfers))
    bucket = optimizer.buckets[0]
    bucket.begin_fetch()
    with optimizer.settable_for_load():
        bucket.parameter_shard.fill_(3.0)
    bucket.begin_parameter_gather()
    bucket.finish_parameter_gather()
    assert bool((bucket.parameters == 3.0).all())


@pytest.mark.parametrize("skipped", [False, True])
def test_slices_that_backward_has_not_gathered_are_released_with_the_step(skipped: bool) -> None:
    """Also those of frozen parameters, which no update changes, and those of a step that is skipped."""
    transfers = Transfers(CPU)

    def freeze(network: GPT) -> None:
        for parameter in network.layers[0].parameters():
            parameter.requires_grad_(False)

    options = DataParallel(torch.float64, zero_stage=3, slices_on_host=transfers)
    optimizer = offloading(transfers, options, prepare=freeze)
    assert optimizer.frozen
    optimizer.begin_step(1)
    for parameter in (slot.parameter for bucket in optimizer.buckets for slot in bucket.slots):
        gradient = torch.full(parameter.shape, math.nan if skipped else 1.0, dtype=torch.float64)
        for use in range(len(parameter.sharding.uses)):
            accumulate_grad(parameter, DenseGradient(gradient), use)
    places = []
    for bucket in (*optimizer.buckets, *optimizer.frozen):
        bucket.begin_fetch()
        assert bucket._fetched is not None
        places.append(weakref.ref(bucket._fetched[0]))
    assert all(place() is not None for place in places)
    assert optimizer.step(Rates(0.1, 0.1, 0.0)).skipped == skipped
    assert [place() for place in places] == [None] * len(places)


def test_a_slice_is_not_changed_while_it_is_being_fetched() -> None:
    transfers = LateTransfers(CPU)
    optimizer = offloading(transfers, DataParallel(torch.float64, zero_stage=3, slices_on_host=transfers))
    bucket = optimizer.buckets[0]
    before = bucket.parameter_shard.clone()
    bucket.begin_parameter_gather()
    bucket.release_slice()
    bucket.parameter_shard.fill_(3.0)
    bucket.finish_parameter_gather()
    assert torch.equal(bucket.parameters, before)


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        ([("to host", 0, 0, 512)], "elements 0 to 512 of bucket 0 are not copied to device once"),
        ([("to host", 0, 0, 256), ("to device", 0, 0, 512)], "elements 256 to 512 of bucket 0 are not copied to host"),
        ([("to host", 0, 0, 512), ("to host", 0, 256, 512), ("to device", 0, 0, 512)], "elements 512 to 256"),
        ([("to host", 0, 256, 512), ("to device", 0, 0, 512)], "elements 0 to 256 of bucket 0 are not copied to host"),
    ],
)
def test_copies_that_leave_out_or_repeat_elements_are_refused(
    transfers: list[tuple[Direction, int, int, int]], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        check_copies([ElementCopy(*each) for each in transfers], [range(512)], ())


def test_a_run_that_offloads_nothing_has_no_engine() -> None:
    network = GPT(model_config(Cell()), ParallelMesh(), dtype=torch.float64)
    optimizer = make_optimizer([network], ParallelMesh(), OptimizerConfig(lr=0.1), DataParallel(torch.float64))
    assert optimizer.host is None
    assert not any(shard.copies for shard in optimizer.shards)


class Failing(Transfers):
    def _begin(self, *arguments: Any) -> Copy:
        raise RuntimeError("no memory is left to copy")


def test_a_copy_that_cannot_begin_says_why() -> None:
    with pytest.raises(RuntimeError, match="no memory is left"):
        offloading(Failing(CPU), DataParallel(torch.float64))
