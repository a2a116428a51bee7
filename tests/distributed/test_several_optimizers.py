"""Several optimizers in one run: any step of some of them is that of plain torch with as many optimizers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.layout_expected import assemble
from tests.distributed.several_run import MIXED, MIXED_STEPS, Mixed, Run, plainly, run_steps
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except


@functools.cache
def expected() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return plainly()


LAYOUTS = [
    {"dp": 1},
    pytest.param({"dp": 1, "recompute": True, "allow_unused": True}, marks=pytest.mark.wide),
    {"dp": 2, "zero": 1},
    pytest.param({"dp": 2, "zero": 0}, marks=pytest.mark.wide),
    pytest.param({"dp": 2, "zero": 1, "overlap": True}, marks=pytest.mark.wide),
    {"dp": 2, "zero": 2},
    pytest.param({"dp": 2, "zero": 2, "overlap": True, "allow_unused": True}, marks=pytest.mark.wide),
    {"dp": 2, "zero": 3},
    pytest.param({"dp": 2, "zero": 3, "overlap": True, "recompute": True}, marks=pytest.mark.wide),
    pytest.param({"dp": 2, "tp": 2, "zero": 3}, marks=pytest.mark.wide),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_of_some_optimizers_are_those_of_plain_torch(layout: dict[str, Any], rank_pools: RankPools) -> None:
    ranks: list[Run] = rank_pools(layout["dp"] * layout.get("tp", 1)).run(run_steps, **layout)
    records, parameters = expected()
    for rank in ranks:
        for step, wanted in enumerate(records):
            assert {name: rank.records[step][name] for name in wanted} == pytest.approx(wanted, rel=1e-10, abs=0.0)
            assert ("generator" in rank.records[step]) == ("generator" in wanted)
    found = assemble(rank.parameters for rank in ranks)
    assert found.keys() == parameters.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.wide)])
def test_a_run_that_is_saved_continues_each_optimizer_bit_for_bit(
    stage: int, tmp_path: Path, rank_pools: RankPools
) -> None:
    pools, options = rank_pools(2), {"dp": 2, "zero": stage}
    whole = assemble(rank.parameters for rank in pools.run(run_steps, **options))
    pools.run(run_steps, steps=(("critic",), ("generator",), ("critic",)), save=tmp_path, **options)
    continued = assemble(rank.parameters for rank in pools.run(run_steps, save=tmp_path, **options))
    for name, parameter in whole.items():
        assert_bits_equal(continued[name], parameter, name)


@pytest.mark.parametrize("stage", wide_except([1, 2, 3], [3]))
def test_other_rules_continue_under_another_layout(stage: int, tmp_path: Path, rank_pools: RankPools) -> None:
    options: dict[str, Any] = {"model": Mixed, "optimizer": MIXED}
    whole = assemble(rank.parameters for rank in rank_pools(1).run(run_steps, 1, MIXED_STEPS, **options))
    options["save"] = tmp_path
    rank_pools(2).run(run_steps, 2, MIXED_STEPS[:3], zero=stage, **options)
    continued = assemble(rank.parameters for rank in rank_pools(1).run(run_steps, 1, MIXED_STEPS, **options))
    assert len(whole) == 10
    for name, parameter in whole.items():
        torch.testing.assert_close(continued[name], parameter, rtol=1e-9, atol=1e-12, msg=name)
