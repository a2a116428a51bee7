"""Seconds of a step, from parts whose times are round numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import RunConfig
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.training import TrainingConfig
from megalite.extras.planner.cluster import Cluster, Gpu, Link, Stack
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.parts import Parts
from megalite.extras.planner.records import Operation, PartRecord, Update, Work
from megalite.extras.planner.step import Step
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.simulator import durations, simulate
from megalite.pipeline.stages import Stages

GPU = Gpu(
    "round",
    memory=1e11,
    reserved=1e9,
    bandwidth=1e12,
    peak={"float32": 1e12, "bfloat16": 1e12},
    attention={"flash-2": 0.5},
    efficiency=1.0,
    half=0.0,
    share=1.0,
    kernel=0.0,
    launch=0.0,
)
FREE = Link(0.0, 1e-30)
CLUSTER = Cluster("round", GPU, 8, FREE, FREE)


def work(product_seconds: float, others: float = 0.0) -> Work:
    """Work of one product and one other kernel that take so many seconds on the round GPU."""
    inner = 64 * round(product_seconds * 1e12 / 2 / 64**3)
    operations = Counter({Operation("mm", "product", (1, 64, 64, inner), 0, 0, "bfloat16"): 1})
    operations[Operation("add", "elementwise", (0, 0, 0, 0), 0, int(others * 1e12), "bfloat16")] += 1
    return Work(operations)


def record(forward: Work, backward: Work, parameters: int = 0, experts: int = 0) -> PartRecord:
    return PartRecord(forward, backward, 0, 0, 0, parameters, experts)


NOTHING = record(Work(), Work())
LAYER = record(work(0.1), work(0.2))


def config(layers: int = 8, micro_batch: int = 1, batch: int = 8, **parallel: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=64,
            num_attention_heads=4,
            vocab_size=128,
            position_embedding_type="rope",
            untie_embeddings_and_output_weights=True,
        ),
        data=DataConfig(seq_length=64),
        optimizer=OptimizerConfig(lr=1e-4),
        training=TrainingConfig(micro_batch_size=micro_batch, global_batch_size=batch, bf16=True, train_iters=1),
        parallel=ParallelConfig(**parallel),
    )


def step(
    run: RunConfig,
    world_size: int,
    *,
    layer: PartRecord = LAYER,
    head: PartRecord = NOTHING,
    cluster: Cluster = CLUSTER,
    stack: Stack | None = None,
) -> Step:
    parts = Parts(NOTHING, NOTHING, (layer,) * run.model.num_layers, head)
    return Step(run, world_size, parts, Prices(cluster, stack))


def test_one_rank_runs_its_layers_for_each_micro_batch() -> None:
    found = step(config(), 1).simulated
    assert found.seconds == pytest.approx(8 * 8 * 0.3, rel=1e-6)
    assert found.cost.products == pytest.approx(found.seconds, rel=1e-6)
    assert found.bubble == pytest.approx(0.0, abs=1e-9)
    assert found.tokens_per_second == pytest.approx(8 * 64 / found.seconds)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (4, 3), (8, 64), (4, 1000)])
def test_bubble_of_1f1b(ranks: int, micro_batches: int) -> None:
    found = step(config(batch=micro_batches, pipeline_model_parallel_size=ranks), ranks).simulated
    busy = micro_batches * 8 / ranks * 0.3
    assert found.cost.bubble / busy == pytest.approx((ranks - 1) / micro_batches, rel=1e-5)


def test_virtual_stages_divide_the_bubble() -> None:
    run = config(batch=8, pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2)
    found = step(run, 4).simulated
    assert found.cost.bubble / (8 * 2 * 0.3) == pytest.approx(3 / 8 / 2, rel=1e-5)


def test_zero_bubble_schedule_has_fewer() -> None:
    runs = {
        name: step(config(batch=8, pipeline_model_parallel_size=4, pipeline_schedule=name), 4).simulated
        for name in ("1f1b", "zb-h1", "zb-v")
    }
    assert runs["zb-h1"].seconds < runs["1f1b"].seconds
    assert runs["zb-v"].seconds < runs["zb-h1"].seconds
    busy = 8 * 2 * 0.3
    assert runs["zb-h1"].cost.bubble == pytest.approx(busy / 8, rel=1e-5)  # (p - 1)(F + I - W), and F = I = W


def test_slowest_stage_sets_the_pace() -> None:
    found = step(config(batch=64, pipeline_model_parallel_size=4), 4, head=record(work(0.1), work(0.2))).simulated
    assert found.seconds == pytest.approx(64 * 0.9 + 3 * 0.6, rel=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "gpipe"])
@pytest.mark.parametrize("micro_batches", [21, 32])
def test_what_is_not_simulated_takes_as_long(
    schedule: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = {"interleaved-1f1b": 2, "zb-v": 2}.get(schedule)
    run = config(
        batch=micro_batches,
        pipeline_model_parallel_size=4,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=chunks,
    )
    head = record(work(0.05), work(0.1))
    found = step(run, 4, head=head).simulated.seconds
    monkeypatch.setattr("megalite.extras.planner.step._PERIODS", (100, 101))
    assert found == pytest.approx(step(run, 4, head=head).simulated.seconds, rel=1e-6)


def test_messages_between_stages_take_time() -> None:
    slow = replace(CLUSTER, node=Link(0.05, 1e-30))
    run = config(batch=4, pipeline_model_parallel_size=4, overlap_p2p_communication=False)
    waiting, hidden = (
        step(replace(run, parallel=replace(run.parallel, overlap_p2p_communication=each)), 4, cluster=slow).simulated
        for each in (False, True)
    )
    assert waiting.cost.pipeline == pytest.approx(4 * 2 * 0.05)
    assert hidden.cost.pipeline == 0.0
    assert step(run, 4).simulated.seconds < hidden.seconds < waiting.seconds


def data_parallel(zero: str, **more: Any) -> Step:
    link = Link(0.0, 1e-9)
    run = config(batch=16, data_parallel_sharding_strategy=zero, **more)
    layer = replace(LAYER, parameters=10**6, update=Update(bytes=38 * 10**6))
    return step(run, 4, layer=layer, cluster=replace(CLUSTER, node=link))


def test_gradients_are_reduced_once_or_every_micro_batch() -> None:
    gradients = 8 * 10**6 * 4 * 1e-9 * 3 / 4  # of a ring
    weights = gradients / 2
    assert data_parallel("no_shard").simulated.cost.data == pytest.approx(2 * gradients, rel=1e-6)
    assert data_parallel("optim").simulated.cost.data == pytest.approx(gradients + weights, rel=1e-6)
    of_micro_batches = data_parallel("optim_grads").simulated.cost.data
    assert of_micro_batches == pytest.approx(4 * 0.2 * gradients + weights, rel=1e-6)  # hidden, but for contention
    assert data_parallel("optim_grads_params").simulated.cost.data < 4 * (gradients + 2 * weights)


def test_overlap_hides_reductions() -> None:
    buckets = {"ddp_bucket_size": 10**5}
    apart = data_parallel("optim", **buckets).simulated.cost.data
    reduced = data_parallel("optim", overlap_grad_reduce=True, **buckets).simulated.cost.data
    both = data_parallel("optim", overlap_grad_reduce=True, overlap_param_gather=True, **buckets).simulated.cost.data
    assert both < reduced < apart
    assert both == pytest.approx(0.2 * apart, rel=1e-6)


def test_shards_make_the_update_faster() -> None:
    whole, part = (data_parallel(zero).simulated.cost.optimizer for zero in ("no_shard", "optim"))
    assert part < 0.5 * whole


def test_gradients_that_are_summed_in_bf16_are_half_as_large() -> None:
    half = OptimizerConfig(lr=1e-4, use_precision_aware_optimizer=True, main_grads_dtype="bf16")
    layer, cluster = replace(LAYER, parameters=10**6), replace(CLUSTER, node=Link(0.0, 1e-9))
    run = config(batch=16, data_parallel_sharding_strategy="no_shard")
    wide = step(run, 4, layer=layer, cluster=cluster).simulated.cost.data
    narrow = step(replace(run, optimizer=half), 4, layer=layer, cluster=cluster).simulated.cost.data
    assert narrow == pytest.approx(wide / 2, rel=1e-6)


@pytest.mark.parametrize(("ends", "busiest"), [((1, 3), 1), ((3, 1), 0)])
def test_the_time_is_that_of_the_rank_with_most_to_do(ends: tuple[int, int], busiest: int) -> None:
    first, last = ends
    run = config(
        layers=first + last,
        batch=32,
        pipeline_model_parallel_size=2,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    found = step(run, 2).simulated
    assert found.cost.products == pytest.approx(32 * 3 * 0.3, rel=1e-6)
    assert found.bubble < 0.1
    assert found.cost.total == pytest.approx(found.seconds)


def test_experts_are_exchanged_among_fewer_ranks() -> None:
    link = Link(0.0, 1e-9)
    run = config(batch=16, data_parallel_sharding_strategy="no_shard", expert_model_parallel_size=4)
    layer = replace(LAYER, expert_parameters=10**6)
    assert step(run, 4, layer=layer, cluster=replace(CLUSTER, node=link)).simulated.cost.data == 0.0


def test_tied_embedding_is_summed_over_the_first_and_last_stage() -> None:
    run = config(pipeline_model_parallel_size=2)
    run = replace(run, model=replace(run.model, untie_embeddings_and_output_weights=False))
    found = step(run, 2, cluster=replace(CLUSTER, node=Link(0.0, 1e-9))).simulated
    assert found.cost.data == pytest.approx(128 * 64 * 4 * 1e-9, rel=1e-6)


def test_a_slice_of_a_tied_embedding_is_summed_over_the_first_and_last_stage() -> None:
    run = config(pipeline_model_parallel_size=2)
    run = replace(run, model=replace(run.model, untie_embeddings_and_output_weights=False))
    found = step(run, 8, cluster=replace(CLUSTER, node=Link(0.0, 1e-9))).simulated
    assert found.cost.data == pytest.approx(128 * 64 * 4 * 1e-9 / 4, rel=1e-6)
    both = config(pipeline_model_parallel_size=2, pipeline_schedule="zb-v")
    both = replace(both, model=replace(both.model, untie_embeddings_and_output_weights=False))
    assert step(both, 8, cluster=replace(CLUSTER, node=Link(0.0, 1e-9))).simulated.cost.data == 0.0


@pytest.mark.parametrize("zero", ["optim", "optim_grads"])
def test_instances_sum_their_slices_once_in_a_step(zero: str) -> None:
    run = config(batch=16, data_parallel_sharding_strategy=zero, num_distributed_optimizer_instances=2)
    layer = replace(LAYER, parameters=10**6)
    found = step(run, 4, layer=layer, cluster=replace(CLUSTER, node=Link(0.0, 1.0)))
    within = across = 8 * 10**6 * 4 / 2
    reduce = sum(stage.exchange.reduce for stage in found.stages)
    assert reduce == pytest.approx(across + (within if zero == "optim" else 0.0), rel=1e-6)


def test_instances_of_a_node_each_sum_their_slices_between_nodes() -> None:
    run = config(batch=16, data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2)
    layer = replace(LAYER, parameters=10**6)
    nodes = replace(CLUSTER, node_ranks=2, network=Link(0.0, 1.0))
    found = step(run, 4, layer=layer, cluster=nodes)
    assert sum(stage.exchange.reduce for stage in found.stages) == pytest.approx(8 * 10**6 * 4 / 2, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_that_embedding_and_head_share_is_updated_once_where_both_are(ranks: int) -> None:
    run = config(pipeline_model_parallel_size=ranks)
    run = replace(run, model=replace(run.model, untie_embeddings_and_output_weights=False))
    shared, of_layer = 128 * 64, 1000
    ends = replace(NOTHING, parameters=shared, update=Update(bytes=38 * shared))
    layers = (replace(LAYER, parameters=of_layer, update=Update(bytes=38 * of_layer)),) * 8
    found = Step(run, ranks, Parts(NOTHING, ends, layers, ends), Prices(CLUSTER)).stages
    assert sum(stage.exchange.elements for stage in found) == ranks * shared + 8 * of_layer
    updated = sum(stage.exchange.update for stage in found)
    assert updated == pytest.approx(38 * (ranks * shared + 8 * of_layer) / GPU.bandwidth)


def test_number_of_a_stack_scales_everything() -> None:
    plain = step(config(pipeline_model_parallel_size=2), 2)
    scaled = step(config(pipeline_model_parallel_size=2), 2, stack=Stack(factor=1.5))
    assert scaled.simulated.seconds == pytest.approx(1.5 * plain.simulated.seconds)
    assert scaled.bound == pytest.approx(1.5 * plain.bound)


@given(
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("zb-v", 2)]),
    st.sampled_from([2, 4]),
    st.integers(1, 40),
    st.floats(0.01, 0.2),
)
def test_bound_is_below_the_time(schedule: tuple[str, int], ranks: int, micro_batches: int, of_head: float) -> None:
    name, chunks = schedule
    run = config(
        batch=micro_batches,
        pipeline_model_parallel_size=ranks,
        pipeline_schedule=name,
        num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
    )
    found = step(
        run, ranks, head=record(work(of_head), work(2 * of_head)), cluster=replace(CLUSTER, node=Link(0.01, 1e-30))
    )
    assert found.bound <= found.simulated.seconds * (1 + 1e-9)
    assert found.bound >= 0.3 * found.simulated.seconds


@pytest.mark.parametrize(
    ("schedule", "chunks", "paper"), [("1f1b", 1, 0.243), ("interleaved-1f1b", 3, 0.106), ("zb-h1", 1, 0.159)]
)
def test_bubbles_are_those_of_the_zero_bubble_paper(schedule: str, chunks: int, paper: float) -> None:
    """Compare by the times that arXiv:2401.10241 measured for its 1.5B model on eight ranks, 24 micro-batches."""
    orders = orders_of(SCHEDULES[schedule], Stages(8, chunks), 24, None)
    passes = [milliseconds / chunks for milliseconds in (18.522, 18.086, 9.337)]
    spans = simulate(Stages(8, chunks), orders, durations(*passes), 0.601)
    end = max(of_rank[-1].end for of_rank in spans)
    assert 1 - 24 * sum(passes) * chunks / end == pytest.approx(paper, abs=0.005)
