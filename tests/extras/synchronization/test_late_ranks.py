"""Late ranks leave out micro-batches: the rest is trained on as by one process that never had the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.training.data import open_data
from megalite.training.ledger import Decision
from tests.distributed.layout_expected import assemble
from tests.extras.synchronization.late_run import Plan, Steps, run_steps
from tests.harness.close import assert_number_close, assert_parameter_close
from tests.harness.rank_pool import RankPools
from tests.initial_weights import Network
from tests.oracle import Oracle, loss_sum_and_count

STEPS, BATCH, LENGTH, VOCABULARY, RATE = 4, 12, 12, 29, 0.02
PLAIN = f"""--fp64 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
--make-vocab-size-divisible-by 4 --num-layers 4 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24
--seq-length {LENGTH} --max-position-embeddings {LENGTH} --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0
--micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS} --eval-iters 0 --eod-mask-loss
--lr {RATE} --lr-decay-style constant --weight-decay 0.1 --clip-grad 0.5 --adam-eps 1e-6 --seed 77"""
FLAGS = f"{PLAIN} --drop-stragglers-after 2"
NETWORK = Network(
    layers=4, hidden=16, heads=2, groups=2, head_dim=8, ffn=24, vocabulary=VOCABULARY, std=0.2, positions=LENGTH
)
TWO: Plan = {2: {1: 2}, 3: {0: 5}, 4: {1: 0}}
"""Of two pipelines, one leaves out most of its micro-batches, then the other its last one, then the first all."""
THREE: Plan = {2: {1: 1, 2: 3}, 4: {0: 0, 2: 2}}
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 2000"


def pipelines(world_size: int, sizes: int) -> int:
    return world_size // sizes


def left_out(plan: Plan, step: int, copies: int) -> dict[int, list[int]]:
    """Return the samples that each pipeline leaves out in a step: micro-batch m of rank d has the one after m x dp + d."""
    start, micro_batches = (step - 1) * BATCH, BATCH // copies
    return {
        pipeline: [start + number * copies + pipeline for number in range(border, micro_batches)]
        for pipeline, border in plan.get(step, {}).items()
    }


def expected(trained: Sequence[Sequence[int]]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Return the loss and the norm of each step on these samples, and the weights at the end."""
    samples = open_data(resolve(parse_arguments(PLAIN.split()).config, 1)).train
    weights = {name: value.requires_grad_() for name, value in NETWORK.weights(77, torch.float64).items()}
    groups = [{"params": [w], "weight_decay": 0.1 * (name in NETWORK.drawn())} for name, w in weights.items()]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-6)
    steps = []
    for numbers in trained:
        rows = [samples[number] for number in numbers]
        tokens, labels = (torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in ("tokens", "labels"))
        logits = Oracle().logits(weights, tokens, torch.arange(LENGTH).expand_as(tokens))
        total, count = loss_sum_and_count(logits, labels, (tokens != VOCABULARY - 1).double())
        optimizer.zero_grad()
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5).item()
        optimizer.step()
        steps.append(((total / count).item(), norm))
    return steps, {name: weight.detach() for name, weight in weights.items()}


def check(ranks: Sequence[Steps], plan: Plan, copies: int) -> None:
    """Compare a run with one process that has only the samples which the ledger does not leave out."""
    trained: list[list[int]] = []
    for step in range(1, STEPS + 1):
        wanted = left_out(plan, step, copies)
        decisions = ranks[0].decisions[step - 1]
        assert {each.source[0]: told(each) for each in decisions} == wanted
        gone = {number for numbers in wanted.values() for number in numbers}
        trained.append([number for number in range((step - 1) * BATCH, step * BATCH) if number not in gone])
        for rank in ranks:
            metrics = rank.metrics[step - 1]
            assert metrics.extra.get("left_out_samples", 0) == len(gone)
            assert (metrics.consumed_samples, metrics.loss_scale, metrics.skipped) == (step * BATCH, 1.0, False)
            assert metrics.throughput["tokens_per_second"] == pytest.approx(
                (BATCH - len(gone)) * LENGTH / metrics.iteration_time_s
            )
    steps, weights = expected(trained)
    for rank in ranks:
        for number, (metrics, (loss, norm)) in enumerate(zip(rank.metrics, steps, strict=True), 1):
            assert_number_close(metrics.loss, loss, f"loss of step {number}", 1e-10)
            # The norm is that of tens of thousands of numbers in another order of sums, after steps of Adam.
            assert_number_close(metrics.grad_norm, norm, f"norm of step {number}", 1e-9)
    final = assemble(rank.final for rank in ranks)  # replicas have the same bits
    assert final.keys() == weights.keys()
    for name, value in final.items():
        assert_parameter_close(value, weights[name], RATE, name)


def told(decision: Decision) -> list[int]:
    assert (decision.kind, decision.outcome) == ("late", "left out")
    return [number for first, last in decision.samples for number in range(first, last + 1)]


@pytest.mark.parametrize(
    ("world_size", "copies", "flags"),
    [
        (2, 2, ""),
        (2, 2, OVERLAP),
        (2, 2, f"--use-distributed-optimizer {OVERLAP} --overlap-param-gather"),
        (3, 3, f"--use-distributed-optimizer {OVERLAP}"),
        (4, 2, f"--tp 2 --sequence-parallel --use-distributed-optimizer {OVERLAP}"),
        (4, 2, f"--pp 2 {OVERLAP}"),
        (4, 2, f"--pp 2 --num-layers-per-virtual-pipeline-stage 1 {OVERLAP}"),
        (4, 2, f"--pp 2 --pipeline-schedule zb-v {OVERLAP}"),
        (4, 2, f"--pp 2 --pipeline-schedule zb-h1 --use-distributed-optimizer {OVERLAP}"),
        (4, 2, f"--cp 2 {OVERLAP}"),
    ],
)
def test_the_rest_is_trained_as_by_one_process(
    world_size: int, copies: int, flags: str, rank_pools: RankPools
) -> None:
    plan = THREE if copies == 3 else TWO
    check(rank_pools(world_size).run(run_steps, f"{FLAGS} {flags}", plan, STEPS), plan, copies)
