"""Backward split in two: weight gradients are deferred and added later, with the same bits and bytes."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from megalite.model.head import OutputLayer
from megalite.parallel import collectives
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.parameter import DeferredGradients
from megalite.pipeline.schedules import Action
from tests.distributed.chunks_run import Case, Rank, actions, trained
from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_run import local_micro_batches
from tests.distributed.test_memory import settled_bytes
from tests.harness.rank_pool import RankPools
from tests.harness.stages import loss_of
from tests.harness.wide import wide_except

WHOLE = "F0 F1 B0 F2 B1 F3 B2 B3"
SPLIT = "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
ONE_AFTER_THE_OTHER = "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"


def assert_same_bits(results: list[Any], wanted: list[Any]) -> None:
    for (norms, tensors), (wanted_norms, wanted_tensors) in zip(results, wanted, strict=True):
        assert norms == wanted_norms
        for ours, theirs in zip(tensors, wanted_tensors, strict=True):
            assert ours.digest == theirs.digest, ours.name


CELLS = [
    {"tp": 2, "dp": 1, "sequence_parallel": True, "family": "gpt2", "recompute": "uniform", "key_values": "mqa"},
    {"tp": 2, "dp": 1, "sequence_parallel": True, "family": "llama", "recompute": "selective", "dtype": "bfloat16"},
    {"tp": 2, "dp": 2, "zero": 3, "overlap": "reduce and gather", "tied": False, "fused_loss": True},
    {"tp": 2, "dp": 1, "family": "gpt2"},
    {"tp": 1, "dp": 2, "zero": 1, "overlap": "reduce", "family": "llama"},
    {"tp": 1, "dp": 2, "zero": 3, "family": "llama", "recompute": "block"},
]
WIDE = [
    {"tp": 2, "dp": 1, "sequence_parallel": True, "family": "llama", "fused_loss": True, "dtype": "bfloat16"},
    {"tp": 2, "dp": 2, "zero": 2, "overlap": "reduce", "sequence_parallel": True, "family": "gpt2"},
    {"tp": 2, "dp": 2, "zero": 3, "overlap": "reduce and gather", "sequence_parallel": True, "recompute": "uniform"},
]


@pytest.mark.bits
@pytest.mark.parametrize(
    "row",
    wide_except(CELLS + WIDE, CELLS[5:]),
    ids=lambda row: "-".join(f"{key}={value}" for key, value in row.items()),
)
def test_split_backward_changes_no_bit(row: dict[str, Any], rank_pools: RankPools) -> None:
    cell = make_cell(row | {"samples": 4 * row["dp"]}, optimizer="adam", clip_grad=0.5, dropout=0.1)
    cases = [Case(cell, 1, actions(order, reduce_each=cell.zero >= 2)) for order in (WHOLE, SPLIT, ONE_AFTER_THE_OTHER)]
    for whole, *split in rank_pools(cell.world_size).run(trained, cases):
        for result in split:
            assert_same_bits([result], [whole])


class Packed:
    """Tensor that a graph has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_between(tp: int, sequence_parallel: bool, fused_loss: bool) -> dict[str, Any]:
    """Return the bytes that a micro-batch's I keeps, and their formula; the tensors kept by the graph; and the rest."""
    parallel = {"tp": tp, "sequence_parallel": sequence_parallel}
    cell = Cell(family="llama", tied=False, dtype="float32", micro_batch_size=4, fused_loss=fused_loss, **parallel)
    rank = Rank.build(cell, chunks=1)
    (network,) = rank.network
    (batch,) = local_micro_batches(cell, 0, 0)
    rank.optimizer.begin_step(1)
    wanted = 0

    def count(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal wanted
        wanted += arguments[0].nbytes + output.nbytes
        if isinstance(module, OutputLayer):  # its output, the losses, is not the product
            columns = module.weights[0].shape[0]
            wanted += output.numel() * (8 + 4 if fused_loss else 4 * columns - 4)  # labels, log-sums and weights

    for module in network.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.register_forward_hook(count)
        elif module is network.embedding.word:
            wanted += (8 + 1) * batch.tokens.numel()  # ids, and whether they belong to another rank
            module.register_forward_hook(lambda module, arguments, output: count(module, (output[:0],), output))
        else:
            wanted += sum(parameter.nbytes for parameter in module.parameters(recurse=False) if parameter.dim() == 1)
    saved: weakref.WeakSet[Packed] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Packed:
        packed = Packed(tensor)
        saved.add(packed)
        return packed

    gc.collect()
    gc.freeze()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        loss = loss_of(network, batch)
    before = len(saved)
    with rank.optimizer.deferring(0) as deferred:
        loss.backward()
    del loss
    found = {"kept": settled_bytes(wanted), "wanted": wanted, "saved": before, "still saved": len(saved)}
    found["nodes"] = sum(issubclass(type(node), BackwardCFunction) for node in gc.get_objects())
    deferred.add()
    return found | {"left": settled_bytes(0)}


@pytest.mark.wide
@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_inputs_and_output_gradients_are_kept_and_no_more(
    tp: int, sequence_parallel: bool, fused_loss: bool, rank_pools: RankPools
) -> None:
    """The kept inputs are split under sequence parallelism; of vectors the gradients are kept; of a fused loss 3
    numbers/token."""
    for found in rank_pools(2).run(kept_between, tp, sequence_parallel, fused_loss):
        assert found["saved"] > 0
        assert found["still saved"] == found["nodes"] == 0
        assert found["kept"] == found["wanted"]
        assert found["left"] == 0


def gathers(order: str) -> dict[str, int]:
    """Return the number of gathers in one step by kind of action."""
    cell = Cell(family="llama", tied=False, tp=2, sequence_parallel=True)
    rank = Rank.build(cell, chunks=1)
    calls: Counter[str] = Counter()
    with mock.patch.object(collectives, "_all_gather_single", wraps=collectives._all_gather_single) as gather:

        def count(action: Action) -> None:
            calls[action.kind] += gather.call_count - calls.total()

        rank.execute(list(local_micro_batches(cell, 0, 0)), actions(order, reduce_each=False), count)
    return calls


def test_a_column_parallel_layers_input_is_gathered_when_its_gradient_is_added(rank_pools: RankPools) -> None:
    """The gather happens then and not before: as often as in an undivided backward.

    The same holds for the embedding's output gradient. A row-parallel layer needs its own twice.
    """
    layers, micro_batches = 4, 4
    once, twice = (2 * layers + 1 + 1) * micro_batches, 2 * layers * micro_batches
    (whole, _), (split, _) = rank_pools(2).run(gathers, WHOLE), rank_pools(2).run(gathers, SPLIT)
    assert split["F"] == whole["F"]
    assert split["I"] == whole["B"] - once
    assert split["W"] == once + twice


def test_each_gradient_is_let_go_of_as_it_is_added() -> None:
    deferred, alive, order = DeferredGradients(), [], []

    class Gradient:
        pass

    references = []
    for number in range(3):
        gradient = Gradient()
        references.append(weakref.ref(gradient))

        def add(gradient: Gradient = gradient, number: int = number) -> None:
            order.append(number)
            alive.append(sum(reference() is not None for reference in references))

        deferred.keep(add)
    del gradient, add
    deferred.add()
    assert order == [0, 1, 2]
    assert alive == [3, 2, 1]
