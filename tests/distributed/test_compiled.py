"""Layers under torch.compile: same training as the oracle, without recompilation per layer, step or layout.

The backend here does everything except code generation; tests/end_to_end/test_compile.py tests Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from megalite.errors import ConfigurationError
from megalite.training.kernels import require_compiler
from tests.distributed import layout_run
from tests.distributed.layout_cell import Cell, make_cell
from tests.distributed.layout_expected import Result, assert_as_expected, on_ranks, result_of
from tests.harness.close import assert_bits_equal, assert_number_close
from tests.harness.covering_array import Row
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

LAYOUTS: list[Row] = [
    {"tp": 1, "dp": 2, "zero": 3, "overlap": "reduce and gather", "recompute": "block"},
    {"tp": 1, "dp": 2, "zero": 1, "overlap": "reduce and gather"},
    {"tp": 1, "dp": 1, "pp": 2, "schedule": "zb-h1", "recompute": "selective"},
    {"tp": 1, "dp": 1, "pp": 2, "schedule": "zb-v", "recompute": "uniform"},
]
"""Cells with the same shapes of layers."""
ALONE: list[Row] = [{"tp": 1, "dp": 1, "recompute": how} for how in ("block", "none")]
"""The same on one rank: on each rank, torch takes seconds to begin."""


def graphs_of_cells(cells: Sequence[Cell]) -> list[tuple[layout_run.RankResult, int]]:
    """Run each cell on this rank; return the results and the number of graphs compiled so far after each."""
    torch._dynamo.reset()  # an earlier test may have compiled the same layers on these ranks
    counters.clear()
    meshes = layout_run.make_meshes(cells)
    return [(layout_run.run_cell(meshes[cell.split], cell), counters["stats"]["unique_graphs"]) for cell in cells]


def run(rank_pools: RankPools, cells: Sequence[Cell]) -> tuple[list[Result], list[int]]:
    by_rank = on_ranks(rank_pools, cells[0].world_size, graphs_of_cells, cells)
    graphs = [max(count for _, count in ranks) for ranks in zip(*by_rank, strict=True)]
    results = [
        result_of(cell, [result for result, _ in ranks])
        for cell, ranks in zip(cells, zip(*by_rank, strict=True), strict=True)
    ]
    return results, graphs


@pytest.mark.parametrize("layouts", wide_except([ALONE, LAYOUTS], [ALONE]), ids=["alone", "all"])
def test_every_layout_is_the_oracles_with_what_one_has_compiled(layouts: list[Row], rank_pools: RankPools) -> None:
    rest = {"family": "llama", "documents": True, "qk_layernorm": True, "optimizer": "adam", "compiled": "aot_eager"}
    first, *others = (make_cell(layout | rest) for layout in layouts)
    cells = [first, replace(first, steps=2), *others]
    results, graphs = run(rank_pools, cells)
    for cell, result in zip(cells, results, strict=True):
        assert_as_expected(cell, result)
    assert graphs[0] > 0
    assert graphs == graphs[:1] * len(cells)


@pytest.mark.wide
def test_experts_are_left_out_and_nothing_is_compiled_again(rank_pools: RankPools) -> None:
    """The numbers of rows differ in each step. Recomputed experts are left out, too."""
    rest = {"family": "mixtral", "dp": 2, "ep": 2, "compiled": "aot_eager"}
    cells = [make_cell(rest, recompute=recompute) for recompute in ("uniform", "experts")]
    cells.append(replace(cells[0], steps=3))
    results, graphs = run(rank_pools, cells)
    for cell, result in zip(cells, results, strict=True):
        assert_as_expected(cell, result)
    assert graphs[0] == graphs[1] == graphs[2] > 0


@pytest.mark.wide
def test_tensor_and_sequence_parallel_layers_are_the_oracles(rank_pools: RankPools) -> None:
    """Cells with biases, learned positions and LayerNorm."""
    cell = make_cell({"tp": 2, "dp": 1, "sequence_parallel": True}, steps=2, compiled="aot_eager")
    (result,), _ = run(rank_pools, [cell])
    assert_as_expected(cell, result)


@pytest.mark.wide
def test_dropout_is_that_of_layers_which_are_not_compiled(rank_pools: RankPools) -> None:
    """The same elements are dropped, but the order of summation differs.

    With and without recomputation the bits are the same, as always. Other samples cause no recompilation.
    """
    plain = make_cell({"tp": 1, "dp": 1}, dropout=0.1)
    cells = [replace(plain, compiled="aot_eager"), replace(plain, compiled="aot_eager", recompute="uniform")]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        (eager, compiled, recomputed), _ = run(rank_pools, [plain, *cells])
    for ours, theirs in zip(compiled.losses, eager.losses, strict=True):
        assert_number_close(ours, theirs, "loss")
    assert recomputed.losses == compiled.losses
    for name, gradient in compiled.gradients.items():
        assert_bits_equal(recomputed.gradients[name], gradient, name)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match=r"--compile needs a C\+\+ compiler on a CPU: no no-such-c"):
        require_compiler()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"--compile needs Triton on a GPU.*pip install triton"):
        require_compiler()


@pytest.mark.wide
def test_recurrent_layers_are_left_out_but_for_their_projections(rank_pools: RankPools) -> None:
    """Letters of one kind share what is compiled. Of latent attention its norms and its rotation are compiled, too."""
    rest = {"dp": 1, "cp": 2, "documents": True, "compiled": "aot_eager"}
    cells = [make_cell(rest | {"pattern": pattern}, steps=2) for pattern in ("MGL*K-", "MMGLLL*KK--")]
    latents = {"latents": "narrow values", "qk_layernorm": True, "family": "llama", "pattern": "+-+-"}
    cells += [make_cell(rest | latents | more, steps=2) for more in ({}, {"cp": 1, "tp": 2})]
    sparse = latents | {"pattern": "D-D-", "indexing": "few"}
    cells += [make_cell(rest | sparse | more, steps=2) for more in ({}, {"cp": 1, "tp": 2})]
    results, graphs = run(rank_pools, cells)
    for cell, result in zip(cells, results, strict=True):
        assert_as_expected(cell, result)
    assert graphs[0] > 0
