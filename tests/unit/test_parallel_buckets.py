"""Flat buffers: the places of parameters, and `accumulate_grad`."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.optimizer import OptimizerConfig
from megalite.errors import MegaliteError
from megalite.model.gpt import GPT
from megalite.optim.buckets import Bucket, DataParallel, make_buckets
from megalite.optim.layout import BucketShardSpec, bucket_length, lay_out
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import DenseGradient, Parameter, ProductGradient, RowsGradient, accumulate_grad
from megalite.parallel.placement import replicated, split
from megalite.parallel.sharding import LogicalTensor, Normal, Use
from tests.distributed.layout_cell import Cell, model_config
from tests.distributed.layout_run import accumulate_gradients, local_micro_batches

numels = st.lists(st.integers(1, 1000), min_size=1, max_size=20)


@given(numels=numels, bucket_size=st.none() | st.integers(1, 1500), shards=st.integers(1, 9))
def test_parameters_stand_in_order_aligned_and_apart(numels: list[int], bucket_size: int | None, shards: int) -> None:
    buckets = lay_out(numels, bucket_size)
    assert [index for bucket in buckets for index, _, _ in bucket] == list(range(len(numels)))
    for number, bucket in enumerate(buckets):
        for index, start, stop in bucket:
            assert start % 64 == 0
            assert stop - start == numels[index]
        for before, after in itertools.pairwise(bucket):
            assert before[2] <= after[1] < before[2] + 64
        length = bucket_length(bucket, shards)
        assert 0 <= length - bucket[-1][2] < 64 * shards
        assert length % (64 * shards) == 0
        if bucket_size is None:
            assert number == 0
        else:
            assert len(bucket) == 1 or bucket[-2][2] < bucket_size  # it was open when the last one came
            assert number == len(buckets) - 1 or bucket[-1][2] >= bucket_size


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = ParallelMesh()

        def parameter(name: str, rows: int) -> Parameter:
            tensor = LogicalTensor(name, (rows, 3), Normal(1.0), True)
            made = Parameter(replicated(mesh, tensor, grad_is_partial=False), torch.float32, mesh.device)
            made.allocate()
            nn.init.normal_(made)
            return made

        self.first, self.second = parameter("first", 2), parameter("second", 4)


def one_bucket(module: nn.Module, dtype: torch.dtype = torch.float32) -> Bucket:
    (bucket,) = make_buckets([module], ParallelMesh(), DataParallel(gradient_dtype=dtype))
    return bucket


def gradient(bucket: Bucket, parameter: Parameter) -> Tensor:
    (accumulator,) = bucket.accumulators
    return accumulator.gradient(parameter, 0)


def test_parameters_keep_their_values_and_live_in_the_buffer() -> None:
    module = Two()
    before = module.second.detach().clone()
    bucket = one_bucket(module)
    assert bucket.slots[0].parameter is module.second  # backward reaches it first
    assert torch.equal(module.second, before)
    bucket.parameters.zero_()
    assert not module.second.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_gradient_of_a_step_replaces_what_was_left(dtype: torch.dtype) -> None:
    """Even a NaN is replaced; later gradients are added. All kinds of gradient can do both."""
    module = Two()
    bucket = one_bucket(module, dtype)
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    rows, values = torch.tensor([1, 3, 1]), torch.randn(3, 3)
    by_rows = torch.zeros(4, 3).index_add_(0, rows, values)
    for _ in range(2):
        bucket.gradients.fill_(float("nan"))
        bucket.begin_step(3)
        for kind in (ProductGradient(x, y), DenseGradient(torch.ones(4, 3)), RowsGradient(rows, values)):
            bucket.accumulate(module.second, kind)
        expected = (x.t() @ y + 1 + by_rows).to(dtype)
        torch.testing.assert_close(gradient(bucket, module.second), expected, rtol=1e-6, atol=1e-6)
        bucket.begin_step(2)
        for kind in (RowsGradient(rows, values), ProductGradient(x, y)):
            bucket.accumulate(module.second, kind)
        expected = (x.t() @ y + by_rows).to(dtype)
        torch.testing.assert_close(gradient(bucket, module.second), expected, rtol=1e-6, atol=1e-6)


def test_an_ordinary_gradient_comes_through_the_same_door() -> None:
    module = Two()
    bucket = one_bucket(module)
    bucket.begin_step(2)
    for factor in (1.0, 10.0):
        ((module.first.sum() + 2 * module.second.sum()) * factor).backward()
    assert module.first.grad is None
    assert torch.equal(gradient(bucket, module.first), torch.full((2, 3), 11.0))
    assert torch.equal(gradient(bucket, module.second), torch.full((4, 3), 22.0))


class Chunk(nn.Module):
    def __init__(self, tied: Parameter | None, uses: tuple[Use, ...] = ()) -> None:
        super().__init__()
        if tied is None:
            self.own, self.tied = Two().first, Two().second
            self.tied.sharding = replace(self.tied.sharding, uses=uses)
        else:
            self.own, self.tied = Two().first, tied


def test_chunks_share_no_bucket_and_are_reduced_apart() -> None:
    """A parameter that two chunks use is in the lower chunk's bucket, with a sum for each."""
    lower = Chunk(None, uses=(Use(), Use(chunk=1)))
    upper = Chunk(lower.tied)
    optimizer = make_optimizer([lower, upper], ParallelMesh(), OptimizerConfig(lr=0.1), DataParallel(torch.float32))
    parameters = [[slot.parameter for slot in bucket.slots] for bucket in optimizer.buckets]
    assert [[id(p) for p in bucket] for bucket in parameters] == [[id(upper.own)], [id(lower.tied)], [id(lower.own)]]
    tied = optimizer.buckets[1]
    assert [(a.chunk, list(a.flats)) for a in tied.accumulators] == [(0, [0]), (1, [1])]
    optimizer.begin_step(2)
    for value in (1.0, 2.0):
        accumulate_grad(upper.own, DenseGradient(torch.full((2, 3), value)))
        accumulate_grad(lower.tied, DenseGradient(torch.full((4, 3), 10 * value)), use=1)
    optimizer.reduce(1, 2)  # of chunk 0 nothing has arrived
    with pytest.raises(MegaliteError, match="received 0 of the 2 gradients due"):
        optimizer.reduce(0, 2)
    for value in (1.0, 2.0):
        accumulate_grad(lower.own, DenseGradient(torch.full((2, 3), value)))
        accumulate_grad(lower.tied, DenseGradient(torch.full((4, 3), value)), use=0)
    optimizer.reduce(0, 2)
    for part in tied.completion():
        part.run()
    assert torch.equal(tied.gradient_shard[:12], torch.full((12,), 33.0))


@dataclass(frozen=True)
class Lookup(RowsGradient):
    """Gradient of an embedding that takes `kept_bytes`; None if it must not be kept."""

    kept_bytes: int | None = 0


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([64, 64, 64, 64], [1, 2, 3, 4]),
        ([65, 65, 65, 65], [0, 0, 0, 0]),
        ([16, 16, 209, 16], [1, 2, 0, 0]),
        ([16, None, 16, 16], [1, 0, 0, 0]),
    ],
    ids=["small", "many", "grows", "at once"],
)
def test_kept_gradients_have_the_bits_of_a_sum_of_their_own(
    stage: int, sizes: list[int | None], kept: list[int]
) -> None:
    """They are kept while the four of a step can take no more bytes than their sum, the 256 of a bucket."""
    draw, found = torch.Generator().manual_seed(1), []
    products = [torch.randn(4, 3, generator=draw) * 1e3 for _ in range(8)]
    lookups = [(torch.randint(4, (9,), generator=draw), torch.randn(9, 3, generator=draw)) for _ in range(8)]
    for late_sum in (False, True):
        module = Chunk(None, uses=(Use(late_sum=late_sum), Use()))
        optimizer = make_optimizer(
            [module], ParallelMesh(), OptimizerConfig(lr=0.1), DataParallel(torch.float32, zero_stage=stage)
        )
        bucket = next(bucket for bucket in optimizer.buckets if bucket.slots[0].parameter is module.tied)
        (accumulator,) = bucket.accumulators
        assert len(accumulator.flats) == 2 - late_sum
        for step in range(2):
            optimizer.begin_step(4)
            alive = []
            for number in range(4 * step, 4 * step + 4):
                accumulate_grad(module.own, DenseGradient(torch.ones(2, 3)))
                accumulate_grad(module.tied, DenseGradient(products[number]), use=1)
                lookup = Lookup(lookups[number][0].clone(), lookups[number][1].clone(), sizes[number % 4])
                alive.append(weakref.ref(lookup))
                accumulate_grad(module.tied, lookup, use=0)
                del lookup
                if late_sum and stage == 1:
                    assert sum(reference() is not None for reference in alive) == kept[number % 4]
            optimizer.reduce(0, 4)
            for part in bucket.completion():
                part.run()
            found.append(bucket.gradient_shard.clone())
    assert torch.equal(torch.stack(found[:2]), torch.stack(found[2:]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("arrivals", [0, 1, 3])
def test_a_missing_or_a_surplus_gradient_is_an_error_not_a_number(arrivals: int, overlap: bool) -> None:
    module = Two()
    options = DataParallel(gradient_dtype=torch.float32, overlap_reduce=overlap)
    (bucket,) = make_buckets([module], ParallelMesh(), options)
    bucket.begin_step(2)
    for _ in range(2):
        bucket.accumulate(module.first, DenseGradient(torch.ones(2, 3)))
    with pytest.raises(MegaliteError, match=r"second received (0 of the 2|1 of the 2|more than the 2) gradients due"):
        for _ in range(arrivals):
            bucket.accumulate(module.second, DenseGradient(torch.ones(4, 3)))
        bucket.begin_reduction(0, 2)


def test_a_network_and_its_buckets_go_with_the_last_reference() -> None:
    """A hook that torch keeps for ever would keep them, with their process groups and threads."""
    network = GPT(model_config(Cell()), ParallelMesh(), dtype=torch.float64)
    initialize(network, seed=1)
    options = DataParallel(torch.float64)
    optimizer = make_optimizer([network], ParallelMesh(), OptimizerConfig(lr=0.1), options, blocks=[network.blocks()])
    accumulate_gradients(optimizer, network, list(local_micro_batches(Cell(), 0, 0)))
    references = [weakref.ref(kept) for kept in (network, network.layers[0].mlp_norm.weight, optimizer.buckets[0])]
    del network, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_replicas_of_copies_and_instances_share_what_is_saved() -> None:
    """Two tensor-parallel copies of eight data-parallel peers in four instances: each element is saved once."""
    parameter = SimpleNamespace(sharding=SimpleNamespace(replica_ranks=(0, 1)))
    layout: Any = SimpleNamespace(slots=[SimpleNamespace(parameter=parameter)], length=48, frozen=False)
    specs = [
        BucketShardSpec.of(layout, rank=copy, peers=8, position=position, zero_stage=1, instances=4)
        for copy in (0, 1)
        for position in range(8)
    ]
    saved = sorted(spec.saved for spec in specs)
    assert saved == [(start, start + 3) for start in range(0, 48, 3)]
    assert [spec.counted_here for spec in specs] == [True, True] + [False] * 14


class Experts(nn.Module):
    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        tensor = LogicalTensor("experts", (4, 3, 5), Normal(1.0), True)
        self.weight = Parameter(split(mesh, tensor, {0: ("ep",)}), torch.float32, mesh.device)
        self.weight.allocate()


@pytest.mark.parametrize(("ranks", "ep", "instances"), [(4, 4, 2), (6, 2, 2)])
def test_instances_that_do_not_divide_the_experts_copies_are_an_error(ranks: int, ep: int, instances: int) -> None:
    mesh = UnconnectedMesh(world_size=ranks, expert_parallel_size=ep)
    options = DataParallel(gradient_dtype=torch.float32, zero_stage=1, instances=instances)
    with pytest.raises(ValueError, match=f"{instances} instances .* do not divide {ranks // ep} data-parallel ranks"):
        make_buckets([Experts(mesh)], mesh, options)


class Copies(TorchDispatchMode):
    """Counter of the elements that are copied."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_bucket_of_one_rank_is_not_copied_onto_itself(stage: int) -> None:
    """Use one rank per expert: there is nothing to gather or to copy."""
    mesh = UnconnectedMesh(world_size=2, expert_parallel_size=2)
    (bucket,) = make_buckets([Experts(mesh)], mesh, DataParallel(gradient_dtype=torch.float32, zero_stage=stage))
    with Copies() as copies:
        bucket.begin_parameter_gather()
        bucket.finish_parameter_gather()
        bucket.gradient_gather().run().wait()
    assert copies.count == 0


@pytest.mark.parametrize(("stage", "each"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_rank_without_parameters_reduces_when_the_others_do(stage: int, each: bool) -> None:
    """An empty stage of a pipeline: its list of actions is proved with those of the others."""
    mesh = ParallelMesh(rank=0, world_size=2)
    empty = make_optimizer([torch.nn.Module()], mesh, OptimizerConfig(lr=0.1), DataParallel(torch.float32, stage))
    assert empty.reduces_each_micro_batch is each
