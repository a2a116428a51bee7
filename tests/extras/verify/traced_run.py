"""Runs of megalite on ranks that trace their first step, some with a fault, and the verdict on what they recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.verify.command import read_command
from megalite.extras.verify.initial_weights import initial_weights
from megalite.extras.verify.own_run import StepTraces
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.verdict import Verdict
from megalite.extras.verify.verification import verify
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.stage import LossTerm
from megalite.training import loss_terms
from megalite.training.data import open_data
from megalite.training.loss_terms import Totals
from tests.extras.corruption.corruption_run import digest_of
from tests.harness.gpt_trainer import gpt_trainer

FLAGS = """--mock-data --tokenizer-type NullTokenizer --vocab-size 28 --make-vocab-size-divisible-by 4 --num-layers 2
--hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 1 --global-batch-size 4 --train-iters 9 --eval-iters 0 --lr 0.02 --clip-grad 0.5 --seed 77
--hidden-dropout 0.1 --attention-dropout 0.1 --lr-decay-style constant"""


@dataclass(frozen=True)
class Course:
    """Result of a training on a rank."""

    bits: list[str]
    """Loss and gradient norm of each step."""
    weights: str
    """Digest of the weights at the end."""


def train(flags: str, folder: Path | None, fault: str = "", steps: int = 1) -> Course:
    """Train on a rank. `folder`: that of the trace of the first step; None: nothing is traced."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    traces = [] if folder is None else ["--trace-steps", "1", "--trace-dir", str(folder)]
    config = resolve(parse_arguments([*FLAGS.split(), *flags.split(), *traces]).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    around: Callable[..., Any] = (lambda step: step()) if folder is None else StepTraces(trainer)
    with trainer.loader, FAULTS[fault]():
        found = [around(trainer.step) for _ in range(steps)]
    return Course([f"{metrics.losses} {metrics.grad_norm}" for metrics in found], digest_of(trainer))


def verdict_on(folder: Path, flags: str, ranks: int) -> Verdict:
    """Verify the trace of the first step, from the weights that the run began with."""
    command = read_command(f"megalite-pretrain {' '.join(FLAGS.split())} {flags}", ranks=ranks)
    return verify(command, initial_weights(command), read_trace(folder, 1))


@contextmanager
def norms_not_summed() -> Iterator[None]:
    """Leave out the sum, over tensor-parallel ranks, of gradients that each has for its tokens alone."""
    right = collectives.all_reduce_in_rank_order_

    def wrong(tensor: Tensor, group: Group) -> Tensor:
        return tensor if group.axis == "tp" else right(tensor, group)

    with mock.patch.object(collectives, "all_reduce_in_rank_order_", wrong):
        yield


@contextmanager
def output_not_summed() -> Iterator[None]:
    """Leave out the sum, over tensor-parallel ranks, of the output of the second layer's attention."""
    right, calls = collectives.all_reduce_, 0

    def wrong(tensor: Tensor, group: Group) -> Tensor:
        nonlocal calls
        is_output = tensor.dim() == 3
        calls += is_output
        fourth = is_output and calls == 4  # after those of the embedding and the first layer
        return tensor if fourth else right(tensor, group)

    with mock.patch.object(collectives, "all_reduce_", wrong):
        yield


@contextmanager
def gradients_of_one_rank() -> Iterator[None]:
    """Take this rank's own gradients for the sum over data-parallel ranks."""

    def wrong(tensor: Tensor, group: Group, out: Tensor | None = None) -> Any:
        own = tensor.chunk(group.size)[group.rank]
        return collectives.completed(own.clone() if out is None else out.copy_(own))

    with mock.patch.object(collectives, "reduce_scatter_async", wrong):
        yield


@contextmanager
def gradients_twice() -> Iterator[None]:
    """Divide by half of the tokens."""
    right = loss_terms.loss_multipliers

    def wrong(terms: Sequence[LossTerm], counts: Totals, scale: float) -> Totals:
        return right(terms, counts, 2.0 * scale)

    with mock.patch.object(loss_terms, "loss_multipliers", wrong):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "norms not summed": norms_not_summed,
    "output not summed": output_not_summed,
    "gradients of one rank": gradients_of_one_rank,
    "gradients twice": gradients_twice,
}
