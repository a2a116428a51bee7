"""Layers with experts on layouts of both views of the ranks: steps against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.model.moe import MoE
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from tests.distributed.layout_cell import EXPERTS, RECOMPUTE, Cell, make_cell, rates
from tests.distributed.layout_expected import (
    assemble,
    assert_as_expected,
    assert_same_bits,
    expected,
    on_ranks,
    run,
    run_each,
)
from tests.distributed.layout_run import (
    Training,
    held,
    held_states,
    initialized_chunks,
    local_micro_batches,
    make_meshes,
)
from tests.harness.close import assert_bits_equal, assert_number_close, assert_parameter_close
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters
from tests.harness.wide import wide_except

LAYOUTS: dict[str, Row] = {
    "alone": {"dp": 1, "recompute": "uniform", "dropout": 0.1},
    "dp2": {"dp": 2, "zero": 1, "documents": True, "vocabulary": "odd"},
    "ep2": {"dp": 2, "ep": 2, "loss_mask": "random"},
    "etp2": {"dp": 2, "etp": 2, "zero": 3, "recompute": "block"},
    "ep2-experts-again": {"dp": 2, "ep": 2, "zero": 3, "recompute": "experts"},
    "tp2-sp": {"dp": 1, "tp": 2, "sequence_parallel": True, "recompute": "selective"},
    "tp2-sp-etp2": {"dp": 1, "tp": 2, "sequence_parallel": True, "etp": 2, "zero": 1},
    "tp2-sp-ep2": {"dp": 1, "tp": 2, "sequence_parallel": True, "ep": 2, "dropout": 0.1},
    "pp2": {"dp": 1, "pp": 2, "schedule": "zb-v"},
    "pp2-ep2": {"dp": 2, "pp": 2, "ep": 2, "schedule": "interleaved-2", "overlap": "reduce", "zero": 2},
    "pp2-tp2-sp": {"dp": 1, "tp": 2, "sequence_parallel": True, "pp": 2, "ep": 2, "schedule": "zb-h1"},
    "ep4": {"dp": 4, "ep": 4, "zero": 3, "overlap": "reduce and gather"},
    "ep2-etp2": {"dp": 4, "ep": 2, "etp": 2, "zero": 2},
    "tp2-sp-ep4": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 4, "zero": 1, "recompute": "uniform"},
    "tp2-sp-ep2-etp2": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "etp": 2, "optimizer": "muon"},
    "dp4-instances": {"dp": 4, "ep": 2, "zero": 2, "instances": 2},
}
DATA: list[Row] = [{"padding": True}, {"drop_policy": "position"}, {"padded_experts": True, "padding": True}, {}]


def some_of(
    families: Iterable[str], others: Iterable[str], also: Collection[str] = (), later: Collection[str] = ()
) -> list[object]:
    """Return each pair for a test: CI runs each of `others` with two of four families. The rest is `slow`.

    `make test` runs each of `others` with one family, except for those named in `later`, and the pairs named in `also`.
    """
    found = []
    for (row, a), (column, b) in itertools.product(enumerate(families), enumerate(others)):
        name, mark = f"{a}-{b}", ()
        if (row + column) % 2 == 0:
            mark = pytest.mark.slow
        elif name not in also and ((row // 2 + column // 2) % 2 or b in later):
            mark = pytest.mark.wide
        found.append(pytest.param(a, b, marks=mark, id=name))
    return found


LATER = (
    *("alone", "ep2", "pp2-ep2", "dp4-instances"),
    *("ep2-experts-again", "tp2-sp-etp2", "tp2-sp-ep2", "pp2-tp2-sp", "tp2-sp-ep4", "tp2-sp-ep2-etp2"),
)
"""Layouts whose parts the others have."""


@pytest.mark.wide_except(
    *("mixtral-tp2-sp", "deepseek-pp2", "switch-ep4", "deepseek-ep2-etp2"),
)
@pytest.mark.parametrize(("family", "layout"), some_of(EXPERTS, LAYOUTS, also=("switch-tp2-sp",), later=LATER))
def test_steps_are_the_oracles(family: str, layout: str, rank_pools: RankPools) -> None:
    """The loads of a step decide the biases and the global balancing loss of the next ones."""
    turn = list(EXPERTS).index(family) + list(LAYOUTS).index(layout)
    data = DATA[turn % 4] if family == "switch" else {"padding": turn % 2 == 0}
    dispatcher = ("alltoall", "allgather")[turn % 2]
    cell = make_cell(LAYOUTS[layout] | data | {"family": family}, dispatcher=dispatcher, steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.parametrize("layout", wide_except(["tp2-sp-ep2", "pp2"], ["pp2"]))
def test_experts_beside_attention_are_the_oracles(layout: str, rank_pools: RankPools) -> None:
    cell = make_cell(LAYOUTS[layout] | {"family": "mixtral", "parallel_residual": True}, steps=2)
    (result,) = run(rank_pools, [cell])
    assert_as_expected(cell, result)


SAME_BITS: dict[str, list[Row]] = {
    "dispatchers": [
        {"dp": 4, "ep": 2, "etp": 2, "dispatcher": dispatcher, "padded_experts": padded}
        for padded in (False, True)
        for dispatcher in ("alltoall", "allgather")
    ],
    "schedules": [
        {"dp": 2, "ep": 2, "pp": pp, "schedule": schedule, "tied": False}
        for pp, schedule in [(1, "1f1b"), (2, "1f1b"), (2, "gpipe"), (2, "zb-h1"), (2, "interleaved-2"), (2, "zb-v")]
    ],
    "recomputation": [{"dp": 2, "ep": 2, "recompute": recompute} for recompute in RECOMPUTE],
    "stages that shard no gradients": [{"dp": 2, "ep": 2, "zero": zero} for zero in (0, 1)],
    "shared experts during the exchange": [
        {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "dispatcher": dispatcher, "shared_overlap": overlap}
        for dispatcher in ("alltoall", "allgather")
        for overlap in (False, True)
    ],
    "stages that shard gradients": [{"dp": 4, "ep": 2, "zero": zero} for zero in (2, 3)],
}


@pytest.mark.wide_except("deepseek-dispatchers")
@pytest.mark.parametrize(("family", "which"), some_of(EXPERTS, SAME_BITS, later=set(SAME_BITS) - {"dispatchers"}))
def test_bits_are_the_same(family: str, which: str, rank_pools: RankPools) -> None:
    """Padding to the capacity changes the number of rows of a product, and so its bits: each way has its own.

    The stages' sums of the balancing losses are added stage by stage: these alone may be rounded in another way.
    """
    cells = [make_cell(row | {"family": family}, steps=2) for row in SAME_BITS[which]]
    if family != "switch":
        cells = [cell for cell in cells if not cell.padded_experts]
    results = run_each(rank_pools, cells)
    for cell, result in zip(cells[1:], results[1:], strict=True):
        first = next(n for n, other in enumerate(cells) if other.padded_experts == cell.padded_experts)
        for loss, other in zip(result.losses, results[first].losses, strict=True):
            assert_number_close(loss, other, str(cell))
        assert_same_bits(replace(result, losses=results[first].losses), results[first], str(cell))
        for name, values in results[first].states.items():
            assert_bits_equal(result.states[name], values, f"{cell}: {name}")


@pytest.mark.wide
def test_micro_batches_of_another_size_train_the_same(rank_pools: RankPools) -> None:
    """The terms per sequence, and those with the previous step's loads, do not depend on micro-batches."""
    cells = [make_cell({"dp": 1, "family": "deepseek", "micro_batch_size": size}, steps=2) for size in (1, 2)]
    for cell, result in zip(cells, run(rank_pools, cells), strict=True):
        assert_as_expected(cell, result)


def collectives_called(cell: Cell) -> list[tuple[int, int]]:
    """Return, for forward and backward of a micro-batch, how many collectives run over ep x etp, and those declared."""
    mesh = make_meshes([cell])[cell.split]
    (chunk,) = initialized_chunks(mesh, cell)
    chunk.train()
    group, calls = mesh.group("ep", "etp"), 0

    def counting(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += arguments[-1] == group
            return real(*arguments, **options)

        return call

    names = ("all_to_all_rows_async", "all_gather_async")
    with mock.patch.multiple(collectives, **{name: counting(getattr(collectives, name)) for name in names}):
        output = chunk({}, next(local_micro_batches(cell, 0, mesh.coordinate("dp"))))
        forward = calls
        sum(term.sum() for term in output.terms.values() if term.requires_grad).backward()
    return [(forward, len(chunk.inside(backward=False))), (calls - forward, len(chunk.inside(backward=True)))]


@pytest.mark.wide
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    "more",
    [{}, {"recompute": "block"}, {"recompute": "experts"}, {"family": "switch", "padded_experts": True}],
    ids=str,
)
def test_what_layers_do_together_is_declared(more: Row, dispatcher: str, rank_pools: RankPools) -> None:
    cell = make_cell({"dp": 2, "ep": 2, "family": "mixtral", "dispatcher": dispatcher} | more)
    for rank in rank_pools(2).run(collectives_called, cell):
        for called, declared in rank:
            assert called == declared > 0


def events(cell: Cell) -> list[str]:
    """Return when rows begin to travel over ep x etp and when a rank waits for them, and when shared experts run."""
    mesh = make_meshes([cell])[cell.split]
    (chunk,) = initialized_chunks(mesh, cell)
    chunk.train()
    group, found = mesh.group("ep", "etp"), list[str]()

    def noting(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            pending = real(*arguments)
            if arguments[-1] != group:
                return pending
            found.append("begin")

            def waited() -> Any:
                found.append("wait")
                return pending.wait()

            return Pending(None, waited)

        return call

    for layer in chunk.layers:
        if isinstance(layer.mlp, MoE):
            assert layer.mlp.shared_experts is not None
            layer.mlp.shared_experts.register_forward_hook(lambda *_: found.append("shared"))
            layer.mlp.shared_experts.register_full_backward_hook(lambda *_: found.append("shared back"))
    with mock.patch.object(collectives, "all_to_all_rows_async", noting(collectives.all_to_all_rows_async)):
        output = chunk({}, next(local_micro_batches(cell, 0, mesh.coordinate("dp"))))
        sum(term.sum() for term in output.terms.values() if term.requires_grad).backward()
    return found


def test_shared_experts_run_while_tokens_travel(rank_pools: RankPools) -> None:
    counts, tokens, back = ["begin", "wait"], ["begin", "begin"], ["begin", "wait"]
    for overlap in (True, False):
        cell = make_cell({"dp": 2, "ep": 2, "family": "switch", "shared_overlap": overlap})
        first, last = (["shared"], []) if overlap else ([], ["shared"])
        forward = [*counts, *tokens, *first, "wait", "wait", *back, *last]
        first, last = (["shared back"], []) if overlap else ([], ["shared back"])
        backward = [*last, *back, *tokens, *first, "wait", "wait"]
        for found in rank_pools(2).run(events, cell):
            assert found == [*forward, *forward, *backward, *backward], overlap


def resumed(save: Cell, load: Cell, directory: Path) -> Any:
    """Train a step and save it under one layout; load it and train the next one under another."""
    meshes = make_meshes([save, load])
    first = Training(meshes[save.split], save, initialized_chunks(meshes[save.split], save))
    first.step(0)
    path = first.save(directory, 1)
    second = Training(meshes[load.split], load, initialized_chunks(meshes[load.split], load, seed=99))
    second.load(path)
    loss, update = second.step(1)
    with unsharded_parameters(second.optimizer):
        final = held(second.network, second.mesh, lambda parameter: parameter)
    return loss, update.gradient_norm, final, held_states(second.network, second.mesh)


def unbroken(cell: Cell) -> Any:
    """Train two steps; return what `resumed` returns."""
    mesh = make_meshes([cell])[cell.split]
    training = Training(mesh, cell, initialized_chunks(mesh, cell))
    training.step(0)
    loss, update = training.step(1)
    with unsharded_parameters(training.optimizer):
        final = held(training.network, mesh, lambda parameter: parameter)
    return loss, update.gradient_norm, final, held_states(training.network, mesh)


@pytest.mark.bits
@pytest.mark.parametrize("layout", wide_except(["alone", "ep2-etp2"], ["ep2-etp2"]))
def test_a_training_that_is_resumed_has_the_same_bits(layout: str, rank_pools: RankPools, tmp_path: Path) -> None:
    """Biases and loads of the previous step go with the weights."""
    cell = make_cell(LAYOUTS[layout] | {"family": "deepseek"}, optimizer="adam")
    ranks = on_ranks(rank_pools, cell.world_size, resumed, cell, cell, tmp_path)
    for found, wanted in zip(ranks, on_ranks(rank_pools, cell.world_size, unbroken, cell), strict=True):
        assert found[:2] == wanted[:2]
        for ours, theirs in zip((*found[2], *found[3]), (*wanted[2], *wanted[3]), strict=True):
            assert (ours.name, ours.box, ours.digest) == (theirs.name, theirs.box, theirs.digest)
    names = {state.name.rpartition(".")[2] for state in ranks[0][3]}
    assert names == {"expert_bias", "previous_load"}


SPLITS: list[Row] = [
    {"dp": 4, "ep": 2, "etp": 2, "zero": 3},
    {"dp": 1, "tp": 2, "sequence_parallel": True, "pp": 2, "ep": 2, "zero": 1},
    {"dp": 4, "ep": 4, "zero": 2},
    {"dp": 4},
    {"dp": 2, "pp": 2, "schedule": "zb-v", "etp": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "zero": 3},
]


@pytest.mark.parametrize(
    ("number", "family"),
    [
        pytest.param(number, family, marks=[pytest.mark.wide] * (number + turn > 0))
        for number in range(len(SPLITS))
        for turn, family in enumerate(("deepseek", "switch", "kimi"))
    ],
)
def test_a_checkpoint_of_experts_goes_on_under_another_layout(
    number: int, family: str, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Each layout saves, and the next one loads; biases and loads go with the weights."""
    save, load = (make_cell(SPLITS[each % len(SPLITS)] | {"family": family}) for each in (number, number + 1))
    ranks = rank_pools(4).run(resumed, save, load, tmp_path)
    wanted = expected(replace(load, steps=2).alone())
    for loss, norm, _, _ in ranks:
        assert_number_close(loss, wanted.losses[1], "loss")
        assert_number_close(norm, wanted.gradient_norms[1], "gradient norm")
    final = assemble(rank[2] for rank in ranks)
    for name, values in wanted.final.items():
        assert_parameter_close(final[name], values, rates(load, 0).learning_rate, name)
    states = assemble(rank[3] for rank in ranks)
    assert set(states) == set(wanted.states)
    for name, values in wanted.states.items():
        assert_bits_equal(states[name], values, name)
