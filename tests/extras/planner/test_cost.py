"""Seconds of kernels and messages, against arithmetic by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.parallel import ParallelConfig
from megalite.extras.planner.cluster import Cluster, Gpu, Link, Stack
from megalite.extras.planner.cost import CONTENTION, Cost, Prices, axis_of, exposed, ring, switched, tree
from megalite.extras.planner.records import Message, MessageKind, Operation, Work

GPU = Gpu(
    "round",
    memory=1e11,
    reserved=1e9,
    bandwidth=1e12,
    peak={"float32": 1e13, "bfloat16": 1e14, "float8": 2e14},
    attention={"flash-2": 0.5},
    efficiency=0.8,
    half=100.0,
    share=0.5,
    kernel=0.0,
    launch=0.0,
)
NODE, NETWORK = Link(1e-6, 1e-11), Link(1e-5, 1e-10)
CLUSTER = Cluster("round", GPU, 8, NODE, NETWORK)
PRICES = Prices(CLUSTER)
KINDS: tuple[MessageKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")


def product(*shape: int, size: int = 0, dtype: str = "bfloat16") -> Operation:
    batch, rows, columns, inner = shape
    return Operation("mm", "product", (batch, rows, columns, inner), 2 * math.prod(shape), size, dtype)


def elementwise(size: int) -> Operation:
    return Operation("add", "elementwise", (0, 0, 0, 0), 0, size, "bfloat16")


def test_product_by_hand() -> None:
    expected = 2 * 1024**3 / (1e14 * 0.8 / (1 + 100 * 3 / 1024))
    assert PRICES.operation(product(1, 1024, 1024, 1024)).total == pytest.approx(expected)


def test_float32_has_its_own_peak() -> None:
    small, large = (PRICES.operation(product(1, 512, 512, 512, dtype=each)).total for each in ("bfloat16", "float32"))
    assert large == pytest.approx(10 * small)


def test_sizes_that_tensor_cores_do_not_divide_are_slower() -> None:
    times = [
        PRICES.product((1, 4096, columns, 4096), "bfloat16") / columns for columns in (4096, 4112, 4104, 4098, 4097)
    ]
    assert times == sorted(times)
    assert times[-1] > 3 * times[0]


def test_narrow_product_reads_its_matrices() -> None:
    operation = product(1, 1, 8192, 8192, size=2 * 8192**2)
    slow = replace(GPU, bandwidth=1e9)
    assert Prices(replace(CLUSTER, gpu=slow)).operation(operation).products == pytest.approx(2 * 8192**2 / (1e9 * 0.5))


def test_elementwise_kernel_moves_bytes_and_takes_its_least_time() -> None:
    prices = Prices(replace(CLUSTER, gpu=replace(GPU, kernel=3e-6)))
    assert prices.operation(elementwise(10**6)).elementwise == pytest.approx(10**6 / 5e11 + 3e-6)


def test_attention_by_hand() -> None:
    operation = Operation("flash", "attention", (32, 2**20, 2**20, 128), 10**15, 0, "bfloat16")
    assert PRICES.operation(operation).attention == pytest.approx(10**15 / (1e14 * 0.5), rel=1e-3)


def test_unfused_attention_writes_the_scores() -> None:
    scores = 16 * 1024 * 1024
    operation = Operation("flash", "attention", (16, 1024, 1024, 64), 4 * scores * 64, 0, "bfloat16")
    unfused = Prices(CLUSTER, Stack(attention="unfused")).operation(operation).attention
    passes = 5 * 2 * scores / 5e11
    assert unfused > passes
    assert unfused > PRICES.operation(operation).attention
    backward = Prices(CLUSTER, Stack(attention="unfused")).operation(operation._replace(name="flash_backward"))
    assert backward.attention > unfused


def test_low_precision_is_for_layers_and_casts_cost() -> None:
    prices = Prices(CLUSTER, Stack(low_precision="float8"))
    of_layer, of_head = (prices.operation(product(1, 8192, 8192, 8192), of_layer=each) for each in (True, False))
    assert of_head == PRICES.operation(product(1, 8192, 8192, 8192))
    assert of_layer.products < of_head.products
    assert of_layer.elementwise == pytest.approx(4 * 8192**2 / 5e11)
    of_weight = product(1, 8192, 8192, 8192)._replace(name="addmm")
    assert prices.operation(of_weight).elementwise == 0.0


def test_ring_and_tree_by_hand() -> None:
    link = Link(1e-6, 1e-10)
    assert ring(8e6, 4, link) == pytest.approx(3e-6 + 0.75 * 8e6 * 1e-10)
    assert tree(8e6, 4, link) == pytest.approx(4e-6 + 2 * 8e6 * 1e-10)
    assert switched(8e6, 4, link, reduced=True) == pytest.approx(2e-6 + 1.25 * 8e6 * 1e-10)
    assert switched(8e6, 4, link, reduced=False) == pytest.approx(2e-6 + 0.75 * 8e6 * 1e-10)


def test_all_reduce_within_a_node_is_the_faster_of_ring_and_tree() -> None:
    ranks = range(8)
    assert PRICES.collective("all-reduce", ranks, 1e9) == pytest.approx(2 * ring(1e9, 8, NODE))
    assert PRICES.collective("all-reduce", ranks, 8) == pytest.approx(tree(8, 8, NODE))


def test_switches_help_where_they_are() -> None:
    multicast = Prices(replace(CLUSTER, node=replace(NODE, multicast=True)))
    assert multicast.collective("all-reduce", range(8), 1e9) == pytest.approx(switched(1e9, 8, NODE, reduced=True))


def test_messages_over_nodes_use_all_links_of_a_node() -> None:
    one_each = PRICES.collective("all-gather", range(0, 64, 8), 1e9)
    assert one_each == pytest.approx(ring(1e9, 8, NETWORK))
    all_of_two = PRICES.collective("all-gather", range(16), 1e9)
    assert all_of_two == pytest.approx(15 / 16 * 1e9 * 1e-10 / 8 + 14e-6 + 2e-5)  # eight links at once


def test_send_depends_on_the_place() -> None:
    assert PRICES.collective("send", (0, 7), 1e6) == pytest.approx(1e-6 + 1e-5)
    assert PRICES.collective("send", (0, 8), 1e6) == pytest.approx(1e-5 + 1e-4)
    assert PRICES.collective("receive", (0, 8), 1e6) == 0.0


def test_all_to_all_sends_to_other_nodes_what_is_for_them() -> None:
    assert PRICES.collective("all-to-all", range(8), 1e9) == pytest.approx(7 / 8 * 1e9 * 1e-11 + 7e-6)
    assert PRICES.collective("all-to-all", range(16), 1e9) == pytest.approx(8 / 16 * 1e9 * 1e-10 + 1e-5)


def test_tokens_that_go_to_nodes_first_are_fewer() -> None:
    first = Prices(CLUSTER, Stack(node_first=True))
    nodes, ranks = 2 * (1 - 0.5**8), 16 * (1 - (15 / 16) ** 8)
    expected = nodes / ranks * 8 / 16 * 1e9 * 1e-10 + 1e-5
    assert first.collective("all-to-all", range(16), 1e9, experts=8) == pytest.approx(expected)


@given(st.sampled_from(KINDS), st.integers(2, 64), st.integers(1, 10**9), st.integers(1, 10**9))
def test_larger_messages_never_take_less(kind: MessageKind, ranks: int, size: int, more: int) -> None:
    group = (0, ranks) if kind == "send" else range(ranks)
    assert PRICES.collective(kind, group, size) <= PRICES.collective(kind, group, size + more) * (1 + 1e-12)


@given(st.sampled_from(KINDS), st.integers(2, 32), st.integers(1, 10**9), st.floats(1.0, 10.0))
def test_slower_links_never_help(kind: MessageKind, ranks: int, size: int, times: float) -> None:
    group = (0, ranks) if kind == "send" else range(ranks)
    slow = replace(CLUSTER, node=Link(NODE.alpha * times, NODE.beta * times))
    assert PRICES.collective(kind, group, size) <= Prices(slow).collective(kind, group, size) * (1 + 1e-12)


@given(st.tuples(*[st.integers(1, 128)] * 4), st.integers(2, 4))
def test_larger_products_never_take_less(quarters: tuple[int, int, int, int], times: int) -> None:
    shape = tuple(64 * each for each in quarters)
    for axis in range(4):
        larger = [size * (times if index == axis else 1) for index, size in enumerate(shape)]
        assert PRICES.product(shape, "bfloat16") <= PRICES.product(larger, "bfloat16")


def test_host_is_the_bottleneck_of_small_kernels() -> None:
    prices = Prices(replace(CLUSTER, gpu=replace(GPU, launch=1e-5)))
    work = Work(Counter({elementwise(1): 100}))
    assert prices.work(work, ParallelConfig()).total == pytest.approx(100 * 1e-5)
    graphs = Prices(prices.cluster, Stack(graphs=True))
    assert graphs.work(work, ParallelConfig()).launch == 0.0
    assert prices.work(Work(Counter({elementwise(10**9): 1})), ParallelConfig()).launch == 0.0


def test_waits_cost_launches() -> None:
    prices = Prices(replace(CLUSTER, gpu=replace(GPU, launch=1e-5)))
    assert prices.work(Work(), ParallelConfig(), waits=2).launch == pytest.approx(2 * 10 * 1e-5)


def test_messages_are_told_apart() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=4)
    assert axis_of(Message("all-reduce", (0, 1), 1), parallel) == "tensor"
    assert axis_of(Message("send", (0, 2), 1), parallel) == "context"
    assert axis_of(Message("all-to-all", (0, 1, 2, 3), 1), parallel) == "expert"
    assert axis_of(Message("all-to-all", (0, 1), 1), parallel) == "expert"
    dense = replace(parallel, expert_model_parallel_size=1, cp_comm_type=("a2a",))
    assert axis_of(Message("all-to-all", (0, 2), 1), dense) == "context"


def test_hidden_messages_cost_little() -> None:
    assert exposed(1.0, 0.0) == 1.0
    assert exposed(1.0, 10.0) == pytest.approx(CONTENTION)
    assert exposed(3.0, 1.0) == pytest.approx(2.0 + CONTENTION)


def test_stack_hides_what_it_says() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=8)
    work = Work(Counter(), Counter({Message("all-gather", tuple(range(8)), 10**8): 1}))
    shown, hidden = (Prices(CLUSTER, Stack(hidden_tensor=each)).work(work, parallel).tensor for each in (0.0, 0.75))
    assert hidden == pytest.approx(shown / 4)


def test_costs_add_up() -> None:
    cost = Cost(products=1.0, data=2.0) + Cost(products=0.5) * 2.0
    assert cost == Cost(products=2.0, data=2.0)
    assert cost.total == 4.0
