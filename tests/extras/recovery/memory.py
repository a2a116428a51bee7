"""Runs with copies in memory, on the pools' ranks, whose slots the test process holds as the agent of a node does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.recovery.copies import Copies, memory_copies
from megalite.parallel.collectives import on_any_rank
from megalite.parallel.mesh import ParallelMesh
from megalite.process.launchers import MEMORY_FILES
from megalite.training.data import open_data
from megalite.training.trainer import Trainer
from tests.extras.synchronization.test_checkpoints import state_of
from tests.extras.synchronization.test_local_update import FLAGS
from tests.harness.gpt_trainer import gpt_trainer


@dataclass(frozen=True)
class Memory:
    """Slots of all ranks, held open by this process."""

    files: tuple[tuple[int, ...], ...]
    holder: int

    @staticmethod
    def of(ranks: int) -> Memory:
        return Memory(tuple(tuple(os.memfd_create(f"slot {n}") for n in range(5)) for _ in range(ranks)), os.getpid())

    def close(self) -> None:
        for number in (number for numbers in self.files for number in numbers):
            os.close(number)

    def lose(self, *ranks: int) -> None:
        """Empty the slots of ranks, as those of a new node are."""
        for number in (number for rank in ranks for number in self.files[rank]):
            os.ftruncate(number, 0)

    def opened(self, rank: int) -> list[int]:
        """Open the slots of a rank in its process."""
        return [os.open(f"/proc/{self.holder}/fd/{number}", os.O_RDWR) for number in self.files[rank]]


@dataclass
class Life:
    """One life of a rank: its trainer, and its copies."""

    trainer: Trainer
    copies: Copies
    how: str | None = None

    def step(self) -> float:
        """Run a step as the loop does, but wait for the copies at its end. Returns the loss."""
        loss = self.trainer.step().loss
        self.copies.after_step(busy=on_any_rank([self.copies.busy], self.trainer.mesh)[0])
        self.wait()
        return loss

    def wait(self) -> None:
        while on_any_rank([self.copies.busy], self.trainer.mesh)[0]:
            time.sleep(0.001)

    def steps(self, count: int) -> list[float]:
        with self.trainer.loader:
            return [self.step() for _ in range(count)]


def born(
    memory: Memory,
    hosts: Sequence[str],
    folder: Path,
    flags: str,
    base: str = FLAGS,
    on_disk: Sequence[Path] = (),
    restarts: str = "1",
    begin: Callable[[Trainer], None] = lambda trainer: None,
) -> Life:
    """Begin a life of this rank: from the copies in memory if there are any, otherwise from the first step.

    `restarts`: those that torchrun has been allowed. `begin`: what is done before the first step.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["SLURMD_NODENAME"] = hosts[rank]
    files = memory.opened(rank)
    os.environ[MEMORY_FILES] = f"{os.getpid()} {','.join(map(str, files))}"
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = restarts
    try:
        flags = f"{base} --save {folder} --resume auto --warm-restart {flags}"
        config = resolve(parse_arguments(flags.split()).config, size)
        mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
        copies = memory_copies(config, mesh)
        assert copies is not None
        made: list[Trainer] = []

        class Build:
            def __call__(self) -> Trainer:
                if not made:
                    made.append(gpt_trainer(config, open_data(config), mesh, folder))
                return made[0]

            cache_clear = made.clear

        build = Build()
        found = copies.load(build, on_disk)
        trainer = build() if found is None else found[0]
        if found is None:
            begin(trainer)
        copies.begin(trainer)
        return Life(trainer, copies, None if found is None else found[1])
    finally:
        del os.environ["SLURMD_NODENAME"], os.environ[MEMORY_FILES], os.environ["TORCHELASTIC_MAX_RESTARTS"]


def train(memory: Memory, hosts: Sequence[str], folder: Path, flags: str, steps: int, after: int) -> tuple[Any, ...]:
    """Train for a life. Returns how it began, its notes, the losses after `steps`, and all that this rank keeps."""
    life = born(memory, hosts, folder, flags)
    losses = life.steps(steps + after)[steps:]
    kept = state_of(life.trainer)
    assert life.trainer.checkpoints is not None
    life.trainer.checkpoints.close()
    return life.how, life.copies.notes, losses, kept


Kept = dict[str, Tensor]
Damage = Callable[[Memory], None]
