"""Pairs of what a layout, a precision and an optimizer say, planned from parts, against a dry run of the whole rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import schedule_name, shape, virtual_stages
from megalite.config.validate import resolve
from megalite.extras.planner import cost
from megalite.extras.planner.cluster import Cluster, Gpu, Link
from megalite.extras.planner.cost import Cost
from megalite.extras.planner.dry_run import DryRun, dry_run, planned_kernels
from megalite.extras.planner.memory import in_flight, memory_in_flight
from megalite.extras.planner.parts import part_records
from megalite.extras.planner.step import Step
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.stages import Stages
from megalite.training.data import known_vocabulary
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.wide import wide_except

RANKS, MICRO_BATCHES = 64, 4
FLAGS = """--num-layers 4 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 704 --seq-length 512
--max-position-embeddings 512 --normalization RMSNorm --disable-bias-linear
--vocab-size 8192 --tokenizer-type NullTokenizer --mock-data --lr 1 --train-iters 1
--hidden-dropout 0 --attention-dropout 0"""
FACTORS: Factors = {
    "tensor": ("", "--tp 2", "--tp 2 --sequence-parallel"),
    "pipeline": (
        "",
        "--pp 2",
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2",
        "--pp 4 --pipeline-schedule zb-h1",
        "--pp 2 --pipeline-schedule zb-v",
    ),
    "context": ("", "--cp 2"),
    "network": ("--swiglu", "--num-experts 4 --moe-router-topk 2", "--num-experts 4 --moe-router-topk 2 --ep 2"),
    "zero": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "instances": (1, 2),
    "overlap": ("", "--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather"),
    "untied": (False, True),
    "recompute": ("", "--recompute-activations", "--recompute-granularity full"),
    "precision": ("", "--bf16", "--fp16", "--bf16 --grad-reduce-in-bf16"),
    "optimizer": ("adam", "sgd", "lion"),
    "micro_batch_size": (1, 2),
}


def possible(row: Row) -> bool:
    """Tell whether the flags allow a row."""
    if row["tensor"] == "--tp 2" and "experts" in row["network"]:
        return False
    if row["instances"] == 2 and row["zero"] == "no_shard":
        return False
    return not ("param-gather" in row["overlap"] and row["zero"] == "no_shard")


def config_of(row: Row) -> RunConfig:
    names = ("tensor", "pipeline", "context", "network", "overlap", "recompute", "precision")
    flags = " ".join(row[name] for name in names)
    flags += f" --data-parallel-sharding-strategy {row['zero']} --optimizer {row['optimizer']}"
    flags += f" --micro-batch-size {row['micro_batch_size']}"
    flags += f" --num-distributed-optimizer-instances {row['instances']}" * (row["instances"] > 1)
    flags += " --untie-embeddings-and-output-weights" * row["untied"]
    flags += " --recompute-method uniform --recompute-num-layers 1" * ("full" in row["recompute"])
    parsed = parse_arguments(f"{FLAGS} {flags}".split()).config
    batch = MICRO_BATCHES * row["micro_batch_size"] * parsed.parallel.data_parallel_size(RANKS)
    found = resolve(replace(parsed, training=replace(parsed.training, global_batch_size=batch)), RANKS)
    return replace(found, model=replace(found.model, vocab_size=known_vocabulary(found)[0]))


ROWS = covering_array(FACTORS, possible, candidates=4)
FAST = Gpu(
    "fast",
    memory=1e11,
    reserved=0.0,
    bandwidth=1e30,
    peak=dict.fromkeys(("float32", "bfloat16", "float16"), 1e30),
    attention={"flash-2": 1.0},
    efficiency=1.0,
    half=0.0,
    share=1.0,
    kernel=0.0,
    launch=0.0,
)
"""Computes in no time, so that it hides no message."""
CLUSTER = Cluster("bytes", FAST, RANKS, Link(0.0, 1.0), Link(0.0, 1.0))
"""A message takes a second per byte that a rank sends."""


def shown(row: Row) -> str:
    return " ".join(f"{name} {value}" if isinstance(value, int) else value for name, value in row.items() if value)


class Prices(cost.Prices):
    """Prices under which passes take no time, so that they hide no message."""

    def passes(self, *arguments: Any, **options: Any) -> tuple[Cost, Cost]:
        return Cost(), Cost()


def data_parallel_bytes(found: DryRun, config: RunConfig) -> float:
    """Return what a rank sends to its data-parallel peers, and of a tied weight's gradient to the other stage."""
    parallel, instances = config.parallel, config.parallel.num_distributed_optimizer_instances
    of_stage = RANKS // parallel.pipeline_model_parallel_size
    experts = parallel.mesh_sizes["expert_tensor_parallel_size"] * parallel.mesh_sizes["expert_parallel_size"]
    groups = {(0, RANKS - of_stage)}  # distances from the first rank of a group
    for ranks in (range(0, of_stage, parallel.tensor_model_parallel_size), range(0, of_stage, experts)):
        groups |= {tuple(ranks[: len(ranks) // instances]), tuple(ranks[:: len(ranks) // instances])}
    sent = 0.0
    for message, count in found.total.messages.items():
        within = tuple(rank - message.ranks[0] for rank in message.ranks)
        is_of_figures = message.bytes < 1024
        if within not in groups or is_of_figures or message.kind in ("send", "receive", "all-to-all"):
            continue
        times = 2 if message.kind == "all-reduce" else 1
        sent += count * times * message.bytes * (len(within) - 1) / len(within)
    return sent


@pytest.mark.parametrize("row", wide_except(ROWS, every_value_once(ROWS)[:3]), ids=shown)
def test_memory_and_messages_are_those_of_a_dry_run(row: Row) -> None:
    config = config_of(row)
    with planned_kernels(config.kernels):
        parts = part_records(config)
    parallel, chunks = config.parallel, virtual_stages(config.model, config.parallel)
    stages = Stages(parallel.pipeline_model_parallel_size, chunks, shape(parallel).v_shaped)
    orders = orders_of(SCHEDULES[schedule_name(chunks, parallel)], stages, MICRO_BATCHES, None)
    memory = memory_in_flight(config, RANKS, parts, list(map(in_flight, orders)))
    whole = {rank: dry_run(config, RANKS, rank * (RANKS // stages.ranks)) for rank in {0, stages.ranks - 1}}
    for rank, wanted in whole.items():
        for kind in ("parameters", "gradients", "optimizer"):
            size = getattr(wanted.memory, kind)
            assert getattr(memory[rank], kind) == pytest.approx(size, rel=1e-2), kind  # but for the padding of shards
        assert memory[rank].activations == pytest.approx(wanted.memory.activations, rel=3e-2)
    seconds = Step(config, RANKS, parts, Prices(CLUSTER)).simulated.cost.data
    assert seconds == pytest.approx(max(data_parallel_bytes(each, config) for each in whole.values()), rel=2e-2)
