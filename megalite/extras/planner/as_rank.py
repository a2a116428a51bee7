"""Steps of one rank of any layout on this device, with real kernels and memory; the other ranks do not exist.

What the others would send is taken to be what this rank has. So the times have no communication in them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.config import RunConfig
from megalite.config.validate import resolve
from megalite.data.sampler import Deal
from megalite.extras.planner.dry_run import DryTask
from megalite.model.batch import MicroBatch
from megalite.optim.elementwise import require_backend
from megalite.parallel import device as devices
from megalite.parallel.mesh import UnconnectedMesh
from megalite.parallel.parameter import Parameter
from megalite.run.run import make_trainer
from megalite.training.kernels import choose_kernels, require_equal_dropout, require_recipe

STEPS = 11
"""Number of steps; the first one, in which kernels are compiled, is not counted."""


@dataclass(frozen=True)
class AsRank:
    """Time and memory of a rank that ran alone."""

    device: str
    layout: str
    seconds: float
    """Median of the steps after the first one."""
    all_seconds: Sequence[float]
    peak_bytes: int
    tflops: float
    """Model TFLOP/s of a rank, as the average over all ranks."""
    mfu: float | None
    """Their share of the device's peak; None if the peak is unknown."""

    def lines(self) -> Iterator[str]:
        times = ", ".join(f"{each:.3f}" for each in self.all_seconds)
        yield f"layout   {self.layout}"
        yield f"device   {self.device}"
        yield f"step     {self.seconds:.4f} s without communication (median; all steps: {times})"
        share = "" if self.mfu is None else f", {self.mfu:.1%} of the device's peak"
        yield f"speed    {self.tflops:.3g} model TFLOP/s{share}, half of the causal scores counted"
        yield f"memory   {self.peak_bytes / 2**30:.2f} GiB at the peak"


class RandomTask(DryTask):
    """Pre-training of a GPT on random tokens, from random weights that need not be those of a run."""

    @property
    def set_values(self) -> Callable[[Parameter], None]:
        return _draw

    def micro_batches(self, consumed_samples: int, deal: Deal) -> Sequence[MicroBatch]:
        found = super().micro_batches(consumed_samples, deal)
        for batch in found:
            batch.tokens.random_(self.model.vocab_size or 1)
            assert batch.labels is not None
            batch.labels.random_(self.model.vocab_size or 1)
            batch.positions.copy_(batch.layout.places(self.mesh.device).expand_as(batch.positions))
        return found


def _draw(parameter: Parameter) -> None:
    if parameter.dim() > 1:
        parameter.data.normal_(0.0, 0.02)
    else:
        parameter.data.fill_(1.0)


def clock(device: torch.device) -> Callable[[], float]:
    """Return the clock of measurements: that of the process on one thread of a CPU, which others may use as well."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def run_as_rank(config: RunConfig, world_size: int, rank: int, steps: int = STEPS) -> AsRank:
    """Run steps of a rank on this device.

    Raises ConfigurationError if the configuration does not fit the ranks or the device.
    """
    config = resolve(config, world_size)
    require_backend(config.optimizer)
    choose_kernels(config.kernels)
    device = devices.local_device(0)
    require_equal_dropout(config, device)
    require_recipe(config, device)
    devices.activate(device)
    torch.manual_seed(config.training.seed)
    mesh = UnconnectedMesh(rank=rank, world_size=world_size, device=device, **config.parallel.mesh_sizes)
    trainer = make_trainer(config, RandomTask(config, mesh), mesh)
    times, now = [], clock(device)
    for _ in range(steps):
        devices.synchronize(device)
        began = now()
        trainer.step()
        devices.synchronize(device)
        times.append(now() - began)
    seconds = statistics.median(times[1:])
    speed = trainer.task.throughput(trainer.consumed_samples // steps, seconds)
    return AsRank(
        devices.device_name(device),
        config.parallel.layout(world_size),
        seconds,
        times,
        devices.peak_memory_bytes(device),
        speed["model_tflops_per_device"] or 0.0,
        speed["mfu"],
    )
