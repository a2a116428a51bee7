"""Local updates: replicas that exchange their weights now and then, against a plain loop over several networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.synchronization.packer import key_of
from megalite.extras.synchronization.power import matrices_of
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box
from megalite.run.evaluation import evaluate
from megalite.training.data import open_data
from tests.distributed.layout_expected import on_ranks
from tests.distributed.test_trainer import BATCH, LENGTH, NETWORK, batch
from tests.distributed.test_trainer import FLAGS as OF_TRAINER
from tests.harness.close import assert_bits_equal, assert_number_close, assert_parameter_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.oracle import Oracle, loss_sum_and_count

STEPS, RATE = 9, 0.02
FLAGS = f"{OF_TRAINER} --train-iters {STEPS} --lr {RATE} --min-lr 0 --lr-decay-style constant --lr-warmup-iters 0"
Tensors = dict[str, Tensor]


@dataclass
class Outcome:
    """Outcome of a run on one rank.

    Attributes:
        losses: the loss of each step.
        held: parameters by logical name.
        slots: what each bucket has: name of the logical tensor, first element, one past the last, and the length.
        keys: number that names each bucket.
        matrices: ranges of each bucket's matrices that rank 2 compresses, by their rows and columns.
        evaluations: validation losses.
    """

    losses: list[float]
    held: dict[str, tuple[Box, Tensor]]
    slots: list[list[tuple[str, int, int, int]]]
    keys: list[int]
    matrices: list[dict[tuple[int, int], list[tuple[int, int]]]]
    evaluations: list[float]


def run(flags: str, steps: int = STEPS, *, evaluates: bool = False) -> Outcome:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    with trainer.loader:
        losses = [trainer.step().loss for _ in range(steps)]
    evaluations = [(evaluate(trainer) or {})["lm_loss"]] if evaluates else []
    with trainer.optimizer.gathered_parameters():
        held = {
            piece.tensor.name: (piece.box, piece.view(parameter.detach()).clone())
            for parameter, piece in named_pieces(trainer.network)
        }
    layouts = [bucket.layout for bucket in trainer.optimizer.buckets]
    slots = [[(*piece, each.length) for piece in each.pieces(0, each.length)] for each in layouts]
    matrices = [matrices_of(each, 2) for each in layouts]
    return Outcome(losses, held, slots, [key_of(each) for each in layouts], matrices, evaluations)


@dataclass
class Method:
    """A method, as its paper writes it down."""

    replicas: int
    period: int
    warmup: int = 0
    outer_lr: float = 1.0
    momentum: float | None = None  # of Nesterov's outer optimizer
    by_tokens: bool = False
    elastic: float | None = None
    delay: int = 0
    mixing: float = 0.0
    fragments: list[set[str]] | None = None  # names of the tensors in each
    batch: int = BATCH

    def train(self, steps: int = STEPS) -> tuple[list[float], list[Tensors]]:
        """Return the mean loss of each step, and the weights of each replica in the end."""
        data = open_data(resolve(parse_arguments(f"{FLAGS} --global-batch-size {self.batch}".split()).config, 1)).train
        begin = NETWORK.weights(77, torch.float64)
        replicas = [{name: w.clone().requires_grad_() for name, w in begin.items()} for _ in range(self.replicas)]
        optimizers = [adam(weights) for weights in replicas]
        anchor, momentum = clone(begin), {name: torch.zeros_like(w) for name, w in begin.items()}
        tokens, under_way, losses = [0.0] * self.replicas, dict[int, Tensors](), list[float]()
        fragments = self.fragments or [set(begin)]
        for number in range(steps):
            local = number + 1 - self.warmup
            totals = []
            for replica, weights in enumerate(replicas):
                size = self.batch // self.replicas
                begin = number * self.batch + replica * size
                numbers = [*range(begin, begin + size)]
                totals.append(loss_of(weights, data, numbers))
                tokens[replica] += totals[-1][1]
            losses.append(sum(total.item() for total, _ in totals) / sum(count for _, count in totals))
            if local <= 0:
                everything = sum(count for _, count in totals)
                gradients = [
                    torch.autograd.grad(t / everything, w.values()) for (t, _), w in zip(totals, replicas, strict=True)
                ]
                summed = [sum(each) for each in zip(*gradients, strict=True)]
                gradients = [summed] * self.replicas
                tokens = [0.0] * self.replicas
            else:
                gradients = [torch.autograd.grad(t / c, w.values()) for (t, c), w in zip(totals, replicas, strict=True)]
            for weights, gradient, optimizer in zip(replicas, gradients, optimizers, strict=True):
                for weight, value in zip(weights.values(), gradient, strict=True):
                    weight.grad = value.clone()
                torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
                optimizer.step()
            if local == 0:
                anchor = clone(replicas[0])
            with torch.no_grad():
                self._exchange(local, replicas, anchor, momentum, tokens, under_way, fragments)
        return losses, replicas

    def _exchange(self, local, replicas, anchor, momentum, tokens, under_way, fragments) -> None:
        for number, names in enumerate(fragments):
            begins = local - number * self.period // len(fragments)
            if local > 0 and begins % self.period == 0:
                shares = [t / sum(tokens) if self.by_tokens else 1 / self.replicas for t in tokens]
                under_way[number] = {
                    n: sum(share * (anchor[n] - r[n]) for share, r in zip(shares, replicas, strict=True)) for n in names
                }
                if self.elastic is not None:
                    before = clone(anchor)
                    for n in names:
                        anchor[n] += sum(self.elastic * (r[n] - before[n]) for r in replicas)
                        for r in replicas:
                            r[n] += self.elastic * (before[n] - r[n])
                tokens[:] = [0.0] * self.replicas
            if local > self.delay and (begins - self.delay) % self.period == 0 and self.elastic is None:
                for n, gradient in under_way[number].items():
                    if self.momentum is not None:
                        momentum[n] = self.momentum * momentum[n] + gradient
                        gradient = gradient + self.momentum * momentum[n]
                    anchor[n] -= self.outer_lr * gradient
                    for r in replicas:
                        r[n].copy_(self.mixing * r[n] + (1 - self.mixing) * anchor[n])


def clone(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def adam(weights: Tensors) -> torch.optim.Optimizer:
    decay = {True: 0.1, False: 0.0}
    groups = [{"params": [w], "weight_decay": decay[name in NETWORK.drawn()]} for name, w in weights.items()]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-6)


GELU = Oracle()


def loss_of(weights: Tensors, samples: Any, numbers: list[int], oracle: Oracle = GELU) -> tuple[Tensor, float]:
    """Return the sum of the loss over samples, and the number of its tokens."""
    tokens, labels, mask = batch(samples, numbers)
    logits = oracle.logits(weights, tokens, torch.arange(LENGTH).expand_as(tokens))
    total, count = loss_sum_and_count(logits, labels, mask)
    return total, float(count)


CASES = {
    "local sgd": ("--local-update local-sgd --local-update-period 4", 2, Method(2, 4)),
    "local sgd of three": (
        "--local-update local-sgd --local-update-period 2 --global-batch-size 6",
        3,
        Method(3, 2, batch=6),
    ),
    "post-local sgd": (
        "--local-update post-local-sgd --local-update-period 3 --local-update-warmup-iters 3",
        2,
        Method(2, 3, warmup=3),
    ),
    "fedavg": ("--local-update fedavg --local-update-period 3", 2, Method(2, 3, by_tokens=True)),
    "fedavg after a warm-up": (
        "--local-update fedavg --local-update-period 2 --local-update-warmup-iters 2",
        2,
        Method(2, 2, warmup=2, by_tokens=True),
    ),
    "easgd": ("--local-update easgd --local-update-period 2 --elastic-rate 0.3", 2, Method(2, 2, elastic=0.3)),
    "diloco": ("--local-update diloco --local-update-period 3", 2, Method(2, 3, outer_lr=0.7, momentum=0.9)),
    "delayed": (
        "--local-update diloco --local-update-period 4 --local-update-delay 2 --local-update-mixing 0.5 --outer-lr 0.9",
        2,
        Method(2, 4, outer_lr=0.9, momentum=0.9, delay=2, mixing=0.5),
    ),
    "tensor parallel": (
        "--local-update diloco --local-update-period 3 --tp 2 --sequence-parallel",
        4,
        Method(2, 3, 0, 0.7, 0.9),
    ),
    "stages": ("--local-update diloco --local-update-period 3 --pp 2", 4, Method(2, 3, 0, 0.7, 0.9)),
    "sites": ("--local-update local-sgd --local-update-period 4 --sites 2", 4, Method(2, 4)),
    "sharded sites": (
        "--local-update diloco --local-update-period 3 --sites 2 --data-parallel-sharding-strategy optim_grads_params",
        4,
        Method(2, 3, 0, 0.7, 0.9),
    ),
    "sharded optimizer": (
        "--local-update diloco --local-update-period 3 --sites 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
        4,
        Method(2, 3, 0, 0.7, 0.9),
    ),
}


@pytest.mark.wide_except(
    "post-local sgd", "fedavg after a warm-up", "easgd", "diloco", "delayed", "tensor parallel", "sharded sites"
)
@pytest.mark.parametrize("case", CASES)
def test_replicas_are_networks_that_exchange_weights(case: str, rank_pools: RankPools) -> None:
    flags, ranks, method = CASES[case]
    outcomes = on_ranks(rank_pools, ranks, run, flags)
    losses, replicas = method.train()
    for rank, outcome in enumerate(outcomes):
        for number, (ours, theirs) in enumerate(zip(outcome.losses, losses, strict=True)):
            assert_number_close(ours, theirs, f"loss {number}", 1e-10)
        replica = rank % 2 if "--pp" in flags else rank * method.replicas // ranks
        for name, (box, values) in outcome.held.items():
            theirs = replicas[replica][name].detach()[box.slices()]
            assert_parameter_close(values, theirs, RATE, f"{name} on rank {rank}", 1e-10)


@pytest.mark.parametrize("flags", ["", "--local-update-warmup-iters 2"])
def test_one_step_of_sgd_a_period_is_plain_data_parallelism(flags: str, rank_pools: RankPools) -> None:
    sgd = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --adam-eps 1e-8 --lr 0.5 --no-eod-mask-loss"
    plain = rank_pools(2).run(run, sgd)
    local = rank_pools(2).run(run, f"{sgd} --local-update local-sgd --local-update-period 1 {flags}")
    for ours, theirs in zip(local, plain, strict=True):
        for loss, of_plain in zip(ours.losses, theirs.losses, strict=True):
            assert_number_close(loss, of_plain, "loss")
        for name, (_, values) in ours.held.items():
            assert_parameter_close(values, theirs.held[name][1], 0.5, name)


def test_replicas_of_experts_train_alike_on_every_layout(rank_pools: RankPools) -> None:
    flags = (
        "--local-update diloco --local-update-period 3 --sites 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
    )
    plain = rank_pools(4).run(run, flags)
    for layout in ("--ep 2", "--ep 2 --use-distributed-optimizer", "--tp 2 --sequence-parallel --etp 1 --ep 2"):
        for ours, theirs in zip(rank_pools(4).run(run, f"{flags} {layout}"), plain, strict=True):
            for loss, other in zip(ours.losses, theirs.losses, strict=True):
                assert_number_close(loss, other, layout, 1e-10)


def test_copies_of_a_tied_weight_are_exchanged_together(rank_pools: RankPools) -> None:
    outcomes = rank_pools(4).run(run, "--local-update diloco --local-update-period 4 --local-update-fragments 4 --pp 2")
    for first, last in (outcomes[0::2], outcomes[1::2]):
        assert_bits_equal(first.held["embedding.word"][1], last.held["embedding.word"][1], "embedding.word")
        places = [[slots[0][0] for slots in each.slots].index("embedding.word") for each in (first, last)]
        assert places == [3, 0]  # dealt in order, the copies would be parts of different fragments


def evaluated(flags: str) -> tuple[float, dict[str, tuple[Box, Tensor]]]:
    """Return the validation loss in the middle of a period, and the weights, with evaluations and without."""
    outcome = run(flags, 5, evaluates=True)
    assert outcome.evaluations[-1] is not None
    return outcome.evaluations[-1], outcome.held


@pytest.mark.parametrize("flags", ["", "--sites 2", "--sites 2 --use-distributed-optimizer", "--sites 2 --pp 2"])
def test_evaluations_are_of_the_weights_after_the_last_exchange(flags: str, rank_pools: RankPools) -> None:
    local = f"--local-update diloco --local-update-period 3 {flags}"
    ranks = 4 if flags else 2
    without = rank_pools(ranks).run(run, local, 5)
    found = rank_pools(ranks).run(evaluated, local)
    _, replicas = Method(2, 3, 0, 0.7, 0.9).train(steps=3)
    data = open_data(resolve(parse_arguments(FLAGS.split()).config, 1)).valid
    total, count = loss_of(replicas[0], data, [*range(2 * BATCH)])
    for (loss, held), outcome in zip(found, without, strict=True):
        assert_number_close(loss, total.item() / count, "validation loss", 1e-10)
        for name, (_, values) in held.items():
            assert_bits_equal(values, outcome.held[name][1], name)


def test_evaluations_of_the_warm_up_are_of_the_weights_of_the_step(rank_pools: RankPools) -> None:
    """The weights after the last exchange are still those of the start then."""
    plain = rank_pools(2).run(evaluated, "")
    warming = "--local-update diloco --local-update-period 3 --local-update-warmup-iters 6"
    for (loss, _), (expected, _) in zip(rank_pools(2).run(evaluated, warming), plain, strict=True):
        assert_number_close(loss, expected, "validation loss", 1e-10)
