"""Trainings on a rank whose weights or computations are disturbed, searched for silent corruption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import MegaliteError
from megalite.extras.corruption.rerun import Reruns
from megalite.extras.corruption.watch import CorruptionWatch
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath
from megalite.training.data import open_data
from megalite.training.trainer import Trainer
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.unsharded import unsharded_parameters

FLAGS = """--mock-data --tokenizer-type NullTokenizer --vocab-size 28 --make-vocab-size-divisible-by 4 --num-layers 2
--hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --seq-length 12 --max-position-embeddings 12
--micro-batch-size 1 --global-batch-size 12 --train-iters 9 --eval-iters 0 --lr 0.02 --clip-grad 0.5 --seed 77
--hidden-dropout 0.1 --lr-decay-style constant"""
HASHES = "--check-weight-hash-across-dp-replicas-interval"
RERUNS = "--rerun-on-replica-interval"


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped in a weight of one rank."""

    rank: int
    step: int
    name: str = "mlp.down"
    in_forward: bool = False
    """During the step, and not before it."""
    master: bool = False
    """In the master weight."""


@dataclass(frozen=True)
class Wrong:
    """A forward whose result is wrong."""

    rank: int | None
    """The rank; None: all of them."""
    calls: tuple[int, ...] | None = None
    """Numbers of the calls of the first layer that are wrong, from 0 on; None: all."""
    value: float | None = None
    """The value of an element; None: one of its bits is flipped."""


@dataclass(frozen=True)
class Course:
    """Result of a training on a rank."""

    bits: list[str]
    """Loss and gradient norm of each step."""
    weights: str
    """Digest of the weights at the end."""
    error: str
    code: int
    reports: list[str]
    """Reports on steps that were skipped."""


def trainer_of(flags: str, directory: AnyPath | None = None) -> Trainer:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments([*FLAGS.split(), *flags.split()]).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    return gpt_trainer(config, open_data(config), mesh, directory)


def train(
    flags: str, steps: int, disturbance: Flip | Wrong | None = None, directory: Path | None = None, first: int = 1
) -> Course:
    """Train for some steps. `first`: the step in which a wrong forward may begin."""
    trainer = trainer_of(flags, directory)
    watch = CorruptionWatch(trainer) if trainer.config.corruption.is_watched else None
    bits: list[str] = []
    reports: list[str] = []
    error, code = "", 0
    with trainer.loader:
        for number in range(1, steps + 1):
            with disturbed(trainer, disturbance, number, first):
                try:
                    metrics = trainer.step() if watch is None else watch.step()
                    if (report := trainer.locate_not_finite()) is not None:
                        reports.append(report if watch is None else watch.after_skip(report))
                except MegaliteError as raised:
                    error, code = str(raised), raised.exit_code
                    break
            bits.append(f"{metrics.losses} {metrics.grad_norm}")
    return Course(bits, digest_of(trainer), error, code, reports)


@contextmanager
def disturbed(trainer: Trainer, disturbance: Flip | Wrong | None, number: int, first: int) -> Iterator[None]:
    if isinstance(disturbance, Flip) and disturbance.step == number and disturbance.rank == trainer.mesh.rank:
        if not disturbance.in_forward:
            flip(trainer, disturbance)
            yield
            return
        whole: Callable[..., Any] = trainer.forward_backward

        def flipped(*arguments: Any) -> Any:
            flip(trainer, disturbance)
            return whole(*arguments)

        with mock.patch.object(trainer, "forward_backward", flipped):
            yield
    elif isinstance(disturbance, Wrong) and number >= first:
        calls = iter(range(10**6))

        def spoil(module: object, arguments: object, output: Any) -> Any:
            call = next(calls)
            hidden = (output[0] if isinstance(output, tuple) else output).clone()  # the same operations on all ranks
            is_wrong = disturbance.calls is None or call in disturbance.calls
            if is_wrong and disturbance.rank in (None, trainer.mesh.rank):
                if disturbance.value is None:
                    flip_bit(hidden.data)
                else:
                    hidden.data.view(-1)[0] = disturbance.value
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        layer = next((chunk.layers[0] for chunk in trainer.chunks if len(chunk.layers)), None)
        handle = layer.register_forward_hook(spoil)
        try:
            yield
        finally:
            handle.remove()
    else:
        yield


def flip(trainer: Trainer, flipped: Flip) -> None:
    """Flip a bit of a weight on this rank."""
    for shard in trainer.optimizer.shards:
        bucket = shard.bucket
        values, start, stop = bucket.parameters, 0, bucket.length
        if bucket.zero_stage == 3:
            values, (start, stop) = bucket.parameter_shard, bucket.owned_range
        for found, low, _ in bucket.layout.pieces(start, stop):
            if not found.endswith(flipped.name):
                continue
            if not flipped.master:
                flip_bit(values[low - start :])
                return
            for segment in shard.segments:
                if segment.start <= low < segment.stop:
                    flip_bit(segment.master[low - segment.start :])
                    return
    raise AssertionError(f"rank {trainer.mesh.rank} has no {flipped.name}")


def flip_bit(values: Tensor) -> None:
    """Flip the highest bit of the first element's mantissa."""
    kind, bit = {torch.bfloat16: (torch.int16, 6), torch.float32: (torch.int32, 22)}[values.dtype]
    values.view(kind).view(-1)[:1] ^= 1 << bit


def bytes_of_comparison(flags: str) -> tuple[int, int]:
    """Return the bytes that a rank sends to compute a step for another one, and those of its gradients."""
    trainer = trainer_of(flags)
    reruns = Reruns(trainer)
    with trainer.loader:
        reruns.again(1, 0)
    return trainer.mesh.traffic.bytes_sent, sum(each.gradients.nbytes for each in trainer.optimizer.buckets)


def digest_of(trainer: Trainer) -> str:
    digest = hashlib.blake2b()
    trainer.optimizer.finish_parameter_gather()
    with unsharded_parameters(trainer.optimizer):
        for parameter in trainer.network.parameters():
            digest.update(parameter.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
