"""Plans of runs that offload: seconds of copies and of updates on the host, and hosts that are too small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.config.offload import OffloadConfig
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import Host
from megalite.extras.planner.memory import Element
from megalite.extras.planner.plan import Plan, Planner
from megalite.extras.planner.records import Update
from megalite.extras.planner.report import as_json, memory_lines, row
from megalite.extras.planner.savings import savings
from megalite.extras.planner.search import search
from tests.extras.planner.test_search import CLUSTER, run_config
from tests.extras.planner.test_step import CLUSTER as ROUND
from tests.extras.planner.test_step import config, record, step, work

HOST = Host(memory=1e12, bandwidth=1e9, beta=1e-9)
ELEMENTS = 10**6
LAYER = replace(record(work(0.001), work(0.002), ELEMENTS), update=Update(bytes=20 * ELEMENTS))


def seconds(zero: str = "no_shard", **options: Any) -> float:
    """Return what the host takes of a step of two layers on two ranks."""
    run = replace(config(2, batch=2, data_parallel_sharding_strategy=zero), offload=OffloadConfig(True, **options))
    return step(run, 2, layer=LAYER, cluster=replace(ROUND, host=HOST)).simulated.cost.host


def test_copies_and_updates_take_their_bytes() -> None:
    copies, update = 2 * 6e-3, 2 * 20e-3
    assert seconds() == pytest.approx(copies + update)
    assert seconds("optim") == pytest.approx((copies + update) / 2)
    assert seconds(optimizer_offload_fraction=0.25) == pytest.approx((copies + update) / 4)
    hidden = min(2 * 2e-3, 2 * 4e-3), min(2 * 1e-3, 2 * 2e-3)  # behind the backward and the forward of the layers
    overlapped = seconds(overlap_cpu_optimizer_d2h_h2d=True)
    assert overlapped == pytest.approx(copies + update - 0.8 * sum(hidden))  # they cost a part of what they hide behind
    # Slices on the host are updated there, and fetched for each use.
    sliced = seconds("optim_grads_params", parameter_offload=True)
    assert sliced == pytest.approx((2 * 4e-3 + update) / 2)
    assert seconds("optim_grads_params") == pytest.approx((copies + update) / 2)


def test_slices_are_fetched_in_each_pass() -> None:
    run = config(2, batch=2, data_parallel_sharding_strategy="optim_grads_params")
    found = {}
    for parameter_offload in (False, True):
        offload = OffloadConfig(optimizer_cpu_offload=True, parameter_offload=parameter_offload)
        made = step(replace(run, offload=offload), 2, layer=LAYER, cluster=replace(ROUND, host=HOST))
        found[parameter_offload] = made.stages[0].exchange
    fetched = 1e-9 * 2 * ELEMENTS / 2  # bf16, of half of a layer
    assert found[False].forward == pytest.approx(0.0)
    assert found[True].forward == pytest.approx(
        0.2 * 2 * fetched, rel=1e-2
    )  # of two layers, behind a forward of as long
    assert found[True].backward == pytest.approx(0.2 * 2 * fetched, rel=1e-2)


def test_elements_are_on_the_device_or_on_the_host() -> None:
    plain = Element.of(run_config())
    assert plain.of_host == (0, 0)
    for fraction in (0.0, 0.25, 1.0):
        each = Element.of(offloading(run_config(), optimizer_offload_fraction=fraction))
        assert each.of_device == (plain.parameter, plain.gradient, (1 - fraction) * plain.state)
        assert each.of_host == (0, pytest.approx(fraction * (plain.parameter + plain.gradient + plain.state)))
    each = Element.of(offloading(run_config(), parameter_offload=True))
    assert (each.of_device, each.of_host) == ((0, plain.gradient, 0), (plain.parameter, plain.gradient + plain.state))


def offloading(run: RunConfig, **options: Any) -> RunConfig:
    return replace(run, offload=OffloadConfig(optimizer_cpu_offload=True, **options))


def planned(host: Host | None, run: RunConfig) -> Plan:
    return Planner(run, replace(CLUSTER, host=host), 1).plan(run)


def test_a_plan_tells_what_is_on_the_host_and_whether_it_fits() -> None:
    run = offloading(run_config(1))
    fits = planned(HOST, run)
    assert fits.missing == 0
    size = fits.memory[0].host
    assert row(fits)["Host GiB"] == round(size / 2**30, 1) > 0
    assert "on the host" in list(memory_lines(fits))[-1]
    small = planned(replace(HOST, memory=size - 2**30), run)
    assert small.missing == pytest.approx(2**30)
    assert small.too_large.endswith("GiB of the host")
    assert as_json(small)["host_room"] == size - 2**30
    assert row(planned(None, run_config(1)))["Host GiB"] == "n/a"
    with pytest.raises(ConfigurationError, match="nothing is known of the hosts"):
        planned(None, run)


def test_a_search_leaves_out_what_the_host_cannot_hold() -> None:
    run = offloading(run_config(1))
    small = Planner(run, replace(CLUSTER, host=replace(HOST, memory=1e6)), 1)
    found = search(small, 1, ("recompute", "micro_batch"))
    assert not found.plans
    assert found.misfits["the host"].words.endswith("of the host")


def test_slices_on_the_host_keep_zero_3() -> None:
    run = offloading(run_config(2), parameter_offload=True)
    found = search(Planner(run, replace(CLUSTER, host=HOST), 2), 3, ("recompute", "micro_batch", "tensor", "pipeline"))
    assert {plan.layout.zero for plan in found.plans} == {3}


def test_the_host_is_named_where_memory_is_missing() -> None:
    run = run_config(1)
    tight = replace(CLUSTER, gpu=replace(CLUSTER.gpu, memory=4e9), host=HOST)
    planner = Planner(run, tight, 1)
    lines = [line for line in savings(planner, planner.plan(run)) if line.startswith("--optimizer-cpu-offload")]
    assert len(lines) == 1
