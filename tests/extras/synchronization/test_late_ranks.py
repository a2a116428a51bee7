"""Late ranks leave out micro-batches: the rest is trained on as by one process that never had the others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import CommunicationError
from megalite.extras.synchronization.late_ranks import Board, LateRanksTrainer, Vote, _Step
from megalite.mailbox import Mailbox
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.schedules import Action
from megalite.torch_internals import HashStore
from megalite.training.data import open_data
from megalite.training.ledger import Decision
from tests.distributed.layout_expected import assemble, one_thread
from tests.distributed.layout_run import held
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ended, metrics, words
from tests.extras.synchronization.late_run import (
    Plan,
    Reversed,
    Steps,
    batch_norm_refused,
    own_model,
    refused,
    run_steps,
    spoiled_steps,
    squares,
)
from tests.harness.close import assert_number_close, assert_parameter_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.job import Job
from tests.harness.rank_pool import RankPools
from tests.initial_weights import Network
from tests.oracle import Oracle, loss_sum_and_count

STEPS, BATCH, LENGTH, VOCABULARY, RATE = 4, 12, 12, 29, 0.02
SECONDS = 60.0  # ranks that do not agree wait for each other for ever
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
"""Two pipelines: one leaves out most of its micro-batches, then the other its last one, then the first all."""
THREE: Plan = {2: {1: 1, 2: 3}, 4: {0: 0, 2: 2}}
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 2000"


def left_out(plan: Plan, step: int, copies: int) -> dict[int, list[int]]:
    """Return the samples that each pipeline leaves out in a step: pipelines take turns, by micro-batches of one."""
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


def check(ranks: Sequence[Steps], plan: Plan, copies: int, loss_scale: float = 1.0) -> None:
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
            assert (metrics.consumed_samples, metrics.loss_scale, metrics.skipped) == (step * BATCH, loss_scale, False)
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


@pytest.mark.wide_except("overlap", "tp", "zb-v")
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
    ids=["plain", "overlap", "zero 1", "three", "tp", "1f1b", "interleaved", "zb-v", "zb-h1", "cp"],
)
def test_the_rest_is_trained_as_by_one_process(world_size: int, copies: int, flags: str, rank_pools: RankPools) -> None:
    plan = THREE if copies == 3 else TWO
    check(rank_pools(world_size).run_within(SECONDS, run_steps, f"{FLAGS} {flags}", plan, STEPS), plan, copies)


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"


@pytest.mark.wide_except("experts", "muon in instances")
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, f"{EXPERTS} {OVERLAP}"),
        (4, f"{EXPERTS} --tp 2 --sequence-parallel --ep 2 --etp 1 --use-distributed-optimizer"),
        (4, "--cp 2 --pp 1 --use-distributed-optimizer --num-distributed-optimizer-instances 2 --optimizer muon"),
        (2, "--cpu-offloading-num-layers 2 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"),
    ],
    ids=["experts", "experts of a pipeline", "muon in instances", "offloading"],
)
def test_the_rest_is_trained_as_if_the_others_did_not_count(world_size: int, flags: str, rank_pools: RankPools) -> None:
    """One process computes these samples, too, and their loss has no weight."""
    ranks = rank_pools(world_size).run_within(SECONDS, run_steps, f"{FLAGS} {flags}", TWO, STEPS)
    of_network = [
        f"--{each}" for each in flags.split("--") if each.startswith(("num-experts", "moe", "optimizer muon"))
    ]
    steps, weights = masked(f"{PLAIN} {' '.join(of_network)}", TWO)
    for rank in ranks:
        assert [each.loss for each in rank.metrics] == pytest.approx(steps, rel=1e-10)
    for name, value in assemble(rank.final for rank in ranks).items():
        assert_parameter_close(value, weights[name], RATE, name)


def masked(flags: str, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the weights of one process for which samples that two pipelines leave out do not count."""
    config = resolve(parse_arguments(flags.split()).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh())
    losses = []
    with trainer.loader, one_thread():
        for step in range(1, STEPS + 1):
            gone = {number for numbers in left_out(plan, step, 2).values() for number in numbers}
            micro_batches = [
                replace(each, loss_mask=torch.zeros_like(each.loss_mask)) if gone & set(each.sample_ids) else each
                for each in trainer.next_micro_batches()
            ]
            losses.append(trainer.step(micro_batches).loss)
    return losses, assemble([held(nn.ModuleList(trainer.chunks), trainer.mesh, lambda parameter: parameter)])


def test_a_loss_scale_is_recorded_as_it_was(rank_pools: RankPools) -> None:
    """The gradients are divided by it once, and by the count of what was trained on."""
    check(rank_pools(2).run_within(SECONDS, run_steps, FLAGS, TWO, STEPS, 1024.0), TWO, 2, 1024.0)


class Taken:
    """A running step that notes what is executed."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def execute(self, action: Action) -> None:
        self.actions.append(action)

    def wait_for_message(self, action: Action) -> None:
        raise AssertionError("nobody asks for it")


@pytest.mark.parametrize("leads", [True, False])
def test_all_ranks_of_a_pipeline_leave_out_the_same(leads: bool) -> None:
    """Each asks once before it begins a micro-batch, the first rank by its clock, the others that one's decision."""
    decisions = board()
    decisions.vote(5, Vote(1.0, 0.5))
    clock = iter([0.0, 1.9, 2.0, 2.1])
    trainer = SimpleNamespace(
        leads=leads,
        has_followers=True,
        pipeline=1,
        after=2.0,
        mesh=ParallelMesh(),
        board=decisions,
        clock=lambda: next(clock),
        decided=lambda step, micro_batch: decisions.decided(step, 1, micro_batch),
    )
    step = _Step(cast(LateRanksTrainer, trainer), 5, None)
    if leads:
        step.began = trainer.clock()
    else:
        for micro_batch in range(3):
            decisions.decide(5, 1, micro_batch, is_late=micro_batch == 2)
    listed = [Action(kind, number, chunk) for number in range(4) for chunk in (0, 1) for kind in ("F", "I", "W", "R")]
    taken = Taken()
    for action in listed:
        step.execute(action, taken)
    assert step.border == 2
    late = [action for action in listed if action.micro_batch >= 2 and action.kind != "R"]
    assert [before for before, after in zip(listed, taken.actions, strict=True) if before != after] == late
    assert all(f"skip {a.kind}" == b.kind for a, b in zip(listed, taken.actions, strict=True) if a in late)
    if leads:
        assert [decisions.decided(5, 1, micro_batch) for micro_batch in range(3)] == [False, False, True]
        assert step.why == (
            "2.100 s before micro-batch 2; the limit is 2.000 s: the 1.000 s of the first pipeline, and 2 x its median "
            "of 0.500 s"
        )


def test_old_votes_and_decisions_are_deleted(rank_pools: RankPools) -> None:
    plan = {step: {1: 2} for step in range(2, STEPS + 1)}
    for steps in rank_pools(4).run_within(SECONDS, run_steps, f"{FLAGS} --pp 2", plan, STEPS):
        assert steps.left == [STEPS]  # others might still have waited for it


@pytest.mark.parametrize(("spoiled", "is_skipped"), [([13], True), ([21, 23], False)])
def test_a_loss_that_is_not_finite_counts_if_it_is_computed(
    spoiled: list[int], is_skipped: bool, rank_pools: RankPools
) -> None:
    """Pipeline 1 leaves out samples 17, 19, 21 and 23 of the second step; 13 is its first one."""
    found = rank_pools(2).run_within(SECONDS, spoiled_steps, FLAGS, spoiled, {1: 2})
    for skipped, (report,), changed in found:
        assert skipped == [False, is_skipped, False]
        assert changed is not is_skipped
        if is_skipped:
            assert "NaN came first on rank 1 (" in report
            assert "in micro-batch 0 (sample 13), forward" in report
            assert report.endswith("Of the step's 12 micro-batches 1 are affected")
        else:
            assert report is None


def test_the_search_leaves_out_what_the_step_did(rank_pools: RankPools) -> None:
    """Sample 23 is not finite, either, but was not computed."""
    for _, (report,), _ in rank_pools(2).run_within(SECONDS, spoiled_steps, FLAGS, [12, 23], {1: 2}):
        assert "on rank 0 (" in report
        assert report.endswith("Of the step's 12 micro-batches 1 are affected")


@pytest.mark.parametrize("bucket_size", [20, 30])
def test_a_model_of_a_program_whose_buckets_end_in_another_order(bucket_size: int, rank_pools: RankPools) -> None:
    """A rank that leaves out the last micro-batch starts its reductions as the others do."""
    for late in ({2: {1: 2}, 3: {0: 0}}, {2: {0: 3}}):
        losses, weights = by_hand(late, 3)
        for found, values in rank_pools(2).run_within(SECONDS, own_model, late, 3, bucket_size):
            assert found == pytest.approx(losses, rel=1e-12)
            for ours, theirs in zip(values, weights, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def by_hand(late: Mapping[int, Mapping[int, int]], steps: int) -> tuple[list[float], list[Tensor]]:
    """Return what `own_model` does, on one process: 8 samples a step, of which ranks take turns."""
    model = Reversed()
    points = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        borders = late.get(step + 1, {})
        taken = [number for number in range(8) if number // 2 < borders.get(number % 2, 4)]
        numbers = [(8 * step + number) % 16 for number in taken]
        counts = torch.tensor([1.0 + number % 3 for number in numbers])
        loss = squares(model(points[numbers]), [points, counts]) / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def test_ranks_that_meet_within_micro_batches_are_refused(rank_pools: RankPools) -> None:
    told = (
        "drop_stragglers_after=2: in every micro-batch, data-parallel ranks meet for batch statistics over dp x cp, so "
        "nobody is late alone: leave out the flag, or let only ranks of the same samples meet there"
    )
    assert rank_pools(2).run(batch_norm_refused) == [told] * 2


def test_a_loss_of_several_terms_is_refused(rank_pools: RankPools) -> None:
    flags = f"{FLAGS} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"
    for told in rank_pools(2).run(refused, flags):
        assert told == (
            "--drop-stragglers-after 2: without the samples of late ranks, gradients of one term are divided by "
            "another count; this network has lm_loss, seq_load_balancing_loss: leave out the flag, or all terms but one"
        )


def board() -> Board:
    return Board(Mailbox(HashStore(), 1, 0.1, "the store", prefix="a run/"))


def test_the_first_vote_counts() -> None:
    votes = board()
    assert votes.first(2) is None
    votes.vote(2, Vote(1.25, 0.5))
    votes.vote(2, Vote(3.0, 4.0))
    assert votes.first(2) == Vote(1.25, 0.5)
    assert votes.first(3) is None


@pytest.mark.parametrize(
    "text",
    ["", "1.0 2.0", "nan 1.000000", "-1.000000 1.000000", "1.000000", "1e9 1e9", "1.000000 1.000000\n", "9" * 10**6],
)
def test_a_vote_of_another_form_is_refused(text: str) -> None:
    votes = board()
    votes._mailbox.put("the vote in step 2 since the start", text)
    with pytest.raises(
        CommunicationError,
        match=r"to the store: the vote in step 2 since the start is '.* \(a vote is two numbers\)$",
    ) as e:
        votes.first(2)
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("text", ["", "Late", "late ", "1"])
def test_a_decision_of_another_form_is_refused(text: str) -> None:
    decisions = board()
    decisions.decide(2, 1, 3, is_late=True)
    decisions.decide(2, 1, 4, is_late=False)
    assert [decisions.decided(2, 1, micro_batch) for micro_batch in (3, 4)] == [True, False]
    decisions._mailbox.put("the decision of pipeline 1 on micro-batch 5 in step 2 since the start", text)
    with pytest.raises(
        CommunicationError, match=r"the store: the decision of pipeline 1 on micro-batch 5 in step 2 .* is"
    ):
        decisions.decided(2, 1, 5)


def test_a_decision_that_does_not_come_is_an_error() -> None:
    decisions = board()
    with pytest.raises(
        CommunicationError,
        match=r"^the decision of pipeline 1 on micro-batch 3 in step 2 .* did not come, for 0 s, at the store$",
    ):
        decisions.decided(2, 1, 3)


# An entry script: pretrain_gpt.py, on a rank that is slow from the third step on.
SLOW = """
import os, runpy, sys, time

from megalite.model.gpt import GPT

network, calls = GPT.forward, []

def forward(self, inputs, micro_batch):
    calls.append(0)
    if os.environ["RANK"] == "1" and len(calls) > 2 * 8:
        time.sleep(0.25)
    return network(self, inputs, micro_batch)

GPT.forward = forward
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_slow_rank_leaves_out_samples_and_the_ledger_says_which(spawn: Callable[..., Job], tmp_path: Path) -> None:
    """A micro-batch takes a quarter of a second on the slow rank, and milliseconds on the other."""
    (script := tmp_path / "slow.py").write_text(SLOW)
    flags = [
        *MOCK,
        *GPT2,
        *words("--global-batch-size 32 --train-iters 4 --drop-stragglers-after 1 --overlap-grad-reduce"),
    ]
    ended(spawn([script, PRETRAIN, *flags, "--save", tmp_path / "run"], 2))
    records = metrics(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} >= {3, 4}  # a busy machine may make a rank late before
    for step in (3, 4):
        (line,) = [line for line in lines if line["step"] == step]
        assert (line["kind"], line["source"], line["outcome"]) == ("late", [1], "left out")
        assert re.fullmatch(
            r"\d+\.\d{3} s before micro-batch \d; the limit is \d+\.\d{3} s: the \d+\.\d{3} s of the first pipeline, "
            r"and 1 x its median of \d+\.\d{3} s \(of 8 micro-batches\)",
            line["why"],
        )
        samples = [number for first, last in line["samples"] for number in range(first, last + 1)]
        own = [number for number in range(32 * (step - 1), 32 * step) if number // 2 % 2]
        assert samples == own[-len(samples) :]
        assert records[step - 1]["left_out_samples"] == len(samples) >= 2
    assert [record["consumed_samples"] for record in records] == [32, 64, 96, 128]
