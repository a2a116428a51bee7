"""Speed of saving and loading a checkpoint of 1 GiB, against the disk and torch.distributed.checkpoint.

    python -m benchmarks.checkpoint [--pairs 7] [--directory DIR]

One process, a Llama-style model in fp32 with AdamW's state. Saving, checksums and fsync included, stands against a
plain write and fsync of as many bytes; loading, verified, against a plain read of the same files with a CRC-32 over
them; what an asynchronous save keeps training waiting, in all, against one copy of the state in memory. The rivals take
turns; figures are medians of the pairs' ratios with quartiles (above 1: faster than the rival).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint

from benchmarks.cpu_step import llama
from benchmarks.results import write_results
from megalite import checkpoint
from megalite.checkpoint.plan import held_regions
from megalite.config import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh

CHUNK = 16 << 20


def made_state() -> tuple[GPT, Optimizer]:
    """A network with its optimizer's state, 1 GiB together."""
    mesh = ParallelMesh()
    network = GPT(llama(6, 1024, 16, 2816, 8192), mesh)
    initialize(network, seed=1)
    options = DataParallel(torch.float32)
    optimizer = make_optimizer([network], mesh, OptimizerConfig(lr=1e-3), options, blocks=[network.blocks()])
    optimizer.begin_step(1)
    for bucket in optimizer.buckets:
        for accumulator in bucket.accumulators:
            accumulator.gradients.normal_(std=1e-3)
    optimizer._update(Rates(1e-3, 1e-3, 0.01), 1.0)
    return network, optimizer


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def write_plainly(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        for start in range(0, len(data), CHUNK):
            file.write(data[start : start + CHUNK])
        file.flush()
        os.fsync(file.fileno())


def read_plainly(paths: list[Path], buffer: bytearray) -> None:
    for path in paths:
        with path.open("rb", buffering=0) as file:
            checksum = 0
            while count := file.readinto(buffer):
                checksum = zlib.crc32(memoryview(buffer)[:count], checksum)


def compare(directory: Path, pairs: int) -> dict[str, object]:
    network, optimizer = made_state()
    regions = held_regions(network, optimizer)
    tensors = {region.part.name: region.values for region in regions}
    size = sum(tensor.nbytes for tensor in tensors.values())
    data = torch.randint(0, 255, (size,), dtype=torch.uint8).numpy().data
    state = checkpoint.TrainingState(1, 0, 1)
    ours, raw, theirs = directory / "megalite", directory / "raw", directory / "torch"
    mesh, buffer = ParallelMesh(), bytearray(CHUNK)
    folder = ours / "iter_0000001"

    def save_theirs() -> None:
        torch_checkpoint.save(tensors, checkpoint_id=theirs, no_dist=True)

    def load_theirs() -> None:
        torch_checkpoint.load(tensors, checkpoint_id=theirs, no_dist=True)

    behind, copy = directory / "asynchronous", torch.zeros(size, dtype=torch.uint8).fill_(0)
    flat = torch.ones(size, dtype=torch.uint8)  # zeros that were never written are one page, over and over
    saver = checkpoint.Saver(behind, optimizer, checkpoint.Plan.alone(optimizer), asynchronous=True)

    def stall() -> float:
        """Seconds that a save in the background keeps this thread; it polls while the save goes on."""
        spent = seconds(lambda: saver.begin(state, {}))
        while saver.under_way:
            if saver.busy:
                time.sleep(0.01)
            else:
                spent += seconds(saver.advance)
        return spent

    times: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(action))

    for _ in range(pairs + 1):
        for path in (ours, theirs, raw, behind):
            shutil.rmtree(path, ignore_errors=True)
        raw.mkdir()
        os.sync()
        timed("raw write", lambda: write_plainly(raw / "file", data))
        timed("save", lambda: checkpoint.Saver(ours, optimizer, checkpoint.Plan.alone(optimizer)).save(state, {}))
        timed("torch save", save_theirs)
        timed("raw read", lambda: read_plainly([path for path in folder.iterdir() if path.is_file()], buffer))
        timed("load", lambda: checkpoint.load(folder, network, optimizer, mesh))
        timed("torch load", load_theirs)
        timed("copy", lambda: copy.copy_(flat))
        times.setdefault("stall", []).append(stall())
    times = {name: values[1:] for name, values in times.items()}  # the first warms up
    figures: dict[str, object] = {"bytes": size, "pairs": pairs}
    for what, limit in (("save", "raw write"), ("load", "raw read")):
        for rival, words in ((limit, f"of {limit}"), (f"torch {what}", "of torch.distributed.checkpoint's speed")):
            ratios = [theirs / own for theirs, own in zip(times[rival], times[what], strict=True)]
            quartiles = statistics.quantiles(ratios, n=4)
            rate = size / statistics.median(times[what]) / 2**30
            print(f"{what}: {rate:.2f} GiB/s, {quartiles[1]:.2f} [{quartiles[0]:.2f}, {quartiles[2]:.2f}] {words}")
            figures[f"{what} {words}"] = quartiles
    stalls = [stalled / copied for stalled, copied in zip(times["stall"], times["copy"], strict=True)]
    quartiles = statistics.quantiles(stalls, n=4)
    print(f"asynchronous save: waits {quartiles[1]:.2f} [{quartiles[0]:.2f}, {quartiles[2]:.2f}] of a copy in memory")
    figures["wait for an asynchronous save, of a copy in memory"] = quartiles
    return figures | {"seconds": {name: statistics.median(values) for name, values in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        write_results("checkpoint", compare(Path(directory), arguments.pairs))


if __name__ == "__main__":
    main()
