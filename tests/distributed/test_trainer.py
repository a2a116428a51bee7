"""Steps of a run, from its flags: equal to a plain loop over the same samples, on one process and on two."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.parallel import device
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.simulator import ScheduleError
from megalite.run.evaluation import evaluate
from megalite.training.builder import make_chunks, make_optimizer, make_proved_schedules, make_stages
from megalite.training.data import open_data
from megalite.training.metrics import StepMetrics
from tests.distributed.layout_expected import on_ranks
from tests.harness.close import assert_number_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.initial_weights import Network
from tests.oracle import Dropout, Oracle, loss_sum_and_count

STEPS, BATCH, LENGTH, VOCABULARY = 5, 4, 12, 29
FLAGS = f"""--fp64 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
--make-vocab-size-divisible-by 4 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24
--seq-length {LENGTH} --max-position-embeddings {LENGTH} --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0
--micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS} --eval-iters 2 --eval-interval 3 --eod-mask-loss
--lr 0.02 --min-lr 0.002 --lr-warmup-iters 2 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 0.5
--adam-eps 1e-6 --seed 77"""
DROPPING = FLAGS.replace("dropout 0", "dropout 0.1")
NETWORK = Network(
    layers=2, hidden=16, heads=2, groups=2, head_dim=8, ffn=24, vocabulary=VOCABULARY, std=0.2, positions=LENGTH
)


def run(flags: str, *, evaluates: bool = True) -> tuple[list[StepMetrics], list[float | None], float]:
    """Return each step's figures, the evaluations after each step, and the final norm of all weights."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(
        rank=rank,
        world_size=size,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_model_parallel_size,
    )
    trainer = gpt_trainer(config, open_data(config), mesh)
    assert trainer.task.data.valid is not None
    steps, evaluations = [], []
    with trainer.loader:
        for _ in range(STEPS):
            steps.append(trainer.step())
            if evaluates:
                evaluations.append((evaluate(trainer) or {})["lm_loss"])
    return steps, evaluations, math.hypot(*trainer.optimizer.parameter_norms().values())


def batch(samples: Any, numbers: range) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and the loss mask; no loss where the input is an end of document."""
    rows = [samples[number] for number in numbers]
    tokens, labels = (torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in ("tokens", "labels"))
    return tokens, labels, (tokens != VOCABULARY - 1).double()


def expected_rate(consumed: int) -> float:
    """Return the rate: linear warm-up over two steps, then half a cosine down to a tenth."""
    if consumed <= 2 * BATCH:
        return 0.02 * consumed / (2 * BATCH)
    passed = (consumed - 2 * BATCH) / ((STEPS - 2) * BATCH)
    return 0.002 + 0.018 * 0.5 * (1 + math.cos(math.pi * passed))


def expected() -> tuple[list[tuple[float, float, float]], list[float], float]:
    """Return loss, gradient norm and learning rate of each step; the rest as in `run`."""
    data = open_data(resolve(parse_arguments(FLAGS.split()).config, 1))
    weights = {name: value.requires_grad_() for name, value in NETWORK.weights(77, torch.float64).items()}
    decay = {True: 0.1, False: 0.0}
    groups = [{"params": [w], "weight_decay": decay[name in NETWORK.drawn()]} for name, w in weights.items()]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-6)

    def mean_loss(samples: Any, numbers: range, dropout: float) -> Tensor:
        tokens, labels, mask = batch(samples, numbers)
        positions = torch.arange(LENGTH).expand_as(tokens)
        dropped = Dropout(77, numbers, dropout, dropout)
        logits = Oracle().logits(weights, tokens, positions, dropout=dropped)
        total, count = loss_sum_and_count(logits, labels, mask)
        return total / count

    steps, evaluations = [], []
    for step in range(STEPS):
        loss = mean_loss(data.train, range(step * BATCH, (step + 1) * BATCH), 0.1)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5).item()
        for group in optimizer.param_groups:
            group["lr"] = expected_rate(step * BATCH)
        optimizer.step()
        steps.append((loss.item(), norm, expected_rate(step * BATCH)))
        with torch.no_grad():
            evaluations.append(mean_loss(data.valid, range(2 * BATCH), 0.0).item())
    return steps, evaluations, math.sqrt(sum(w.detach().square().sum().item() for w in weights.values()))


@pytest.mark.wide_except("parts")
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--use-distributed-optimizer --overlap-grad-reduce",
        "--tp 2 --sequence-parallel",
        *(pytest.param(flags, marks=pytest.mark.wide) for flags in ("--pp 2", "--tp 2")),
    ],
    ids=["alone", "copies", "parts", "stages", "heads"],
)
def test_a_run_is_the_plain_loop(flags: str, rank_pools: RankPools) -> None:
    """Dropout is on. The ranks of two replicas count different numbers of tokens; norms are above the limit."""
    wanted, losses, norm = expected()
    assert {step[1] > 0.5 for step in wanted} == {True}
    for steps, evaluations, last in on_ranks(rank_pools, 2 if flags else 1, run, f"{DROPPING} {flags}"):
        for number, (step, (loss, gradient_norm, rate)) in enumerate(zip(steps, wanted, strict=True)):
            assert_number_close(step.loss, loss, f"loss {number}", 1e-9)
            assert_number_close(step.grad_norm, gradient_norm, f"gradient norm {number}", 1e-7)
            assert_number_close(step.learning_rate, rate, f"learning rate {number}", 1e-12)
            consumed = (number + 1) * BATCH
            told = (step.iteration, step.consumed_samples, step.consumed_tokens, step.loss_scale, step.skipped)
            assert told == (number + 1, consumed, consumed * LENGTH, 1.0, False)
            assert step.throughput["tokens_per_second"] == pytest.approx(BATCH * LENGTH / step.iteration_time_s)
            assert step.throughput["tokens_per_second_per_device"] == step.throughput["tokens_per_second"] / (
                2 if flags else 1
            )
        for ours, theirs in zip(evaluations, losses, strict=True):
            assert ours is not None
            assert_number_close(ours, theirs, "validation loss", 1e-8)
        assert_number_close(last, norm, "norm of the weights", 1e-9)


def test_every_size_of_a_growing_batch_is_proved() -> None:
    """The proofs happen before the first step."""
    flags = f"{FLAGS} --rampup-batch-size 1 1 12 --train-samples 40".replace(f"--train-iters {STEPS} ", "")
    config = resolve(parse_arguments(flags.replace("-iters 2 --lr-decay", "-samples 2 --lr-decay").split()).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh(rank=0, world_size=1))
    for micro_batches in range(1, BATCH + 1):
        assert len(trainer.schedules.training(micro_batches)) == 2 * micro_batches + 1
    assert len(trainer.schedules.evaluation(BATCH)) == BATCH


@pytest.mark.parametrize(("level", "of_a_step", "of_an_evaluation"), [(0, 0, 0), (1, 1, 1), (2, 2, 1)])
def test_unused_memory_is_returned_as_often_as_asked(
    level: int, of_a_step: int, of_an_evaluation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.device] = []
    monkeypatch.setattr(device, "return_unused_memory", calls.append)
    config = resolve(parse_arguments(f"{FLAGS} --empty-unused-memory-level {level}".split()).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh(rank=0, world_size=1))
    assert trainer.task.data.valid is not None
    with trainer.loader:
        trainer.step()
        assert len(calls) == of_a_step
        evaluate(trainer)
    assert len(calls) == of_a_step + of_an_evaluation


def unlike(fault: str, layout: str = "--pp 2") -> str:
    """Return the messages on four ranks if the second of two replicas does something else."""
    flags = f"{FLAGS} {layout} --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 500"
    config = resolve(parse_arguments(flags.split()).config, 4)
    mesh, stages = ParallelMesh(rank=dist.get_rank(), world_size=4, **config.parallel.mesh_sizes), make_stages(config)
    model = replace(config.model, vocab_size=VOCABULARY)
    chunks = make_chunks(config, model, mesh, stages)
    optimizer = make_optimizer(config, chunks, mesh, stages, partial(set_initial_values, seed=1))
    if mesh.coordinate("dp") == 1:
        if fault == "behind":
            every = [each for each in optimizer.collectives() if "gather" not in each[0]]
            optimizer.collectives = lambda: every  # type: ignore[method-assign]
        if fault == "buckets":
            optimizer.buckets = optimizer.buckets[::-1]
    try:
        make_proved_schedules(config, mesh, stages, chunks, optimizer, ()).prove([2], mesh=mesh)
    except ScheduleError as error:
        return str(error)
    return ""


def test_copies_that_do_something_else_behind_their_lists_are_named(rank_pools: RankPools) -> None:
    (told,) = set(rank_pools(4).run(unlike, "behind"))
    assert told.startswith("ranks 1, 3: declares nothing more, but rank 0 declares gather of parameters among 2 ranks")


def test_copies_with_other_buckets_are_named(rank_pools: RankPools) -> None:
    """The number of buckets may be equal: reductions inside the lists follow the order of buckets."""
    pool = rank_pools(4)
    for layout in ("--pp 2", "--tp 2 --optimizer muon --swiglu --num-layers 1"):
        assert set(pool.run(unlike, "", layout)) == {""}, layout
    (told,) = set(pool.run(unlike, "buckets"))
    assert told.startswith("ranks 1, 3: declares that a bucket of ")


@pytest.mark.wide
def test_evaluations_drop_nothing_and_leave_no_trace() -> None:
    """Later steps drop the same elements, by the sample, as without evaluations."""
    (with_evaluations, found, _), (without, _, _) = run(DROPPING), run(DROPPING, evaluates=False)
    assert [step.loss for step in with_evaluations] == [step.loss for step in without]
    still = run(DROPPING.replace("--lr 0.02 --min-lr 0.002", "--lr 0 --min-lr 0"))
    assert len(set(still[1])) == 1
    assert still[1][0] == run(FLAGS.replace("--lr 0.02 --min-lr 0.002", "--lr 0 --min-lr 0"))[1][0]
    assert found[0] == still[1][0]  # the first step of a warm-up moves nothing
    assert without[0].loss != run(FLAGS, evaluates=False)[0][0].loss
