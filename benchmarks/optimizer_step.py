"""Bandwidth of an AdamW update over flat buffers, against torch.optim.AdamW(fused=True) on the same parameters.

    python -m benchmarks.optimizer_step [--rounds 15]

A Llama of some 40 million fp32 parameters. An update reads weights, gradients and two moments and writes all but the
gradients: 28 bytes a parameter; padding is not counted. Beside it a copy of half as many bytes, which reads and writes
as much. One thread, CPU time; the rivals update in turn, round by round; a figure is the median, with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from benchmarks.cpu_step import llama, measure, quartiles, ratios
from benchmarks.plain_pytorch import PlainLlama
from benchmarks.results import write_results
from megalite.config import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer, make_rules
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh

LAYERS, HIDDEN, HEADS, FFN, VOCABULARY = 8, 512, 8, 1376, 16384
BYTES = 28  # a parameter


def flat_update(backend: str) -> Callable[[], None]:
    """The update of a back end."""
    mesh = ParallelMesh()
    network = GPT(llama(LAYERS, HIDDEN, HEADS, FFN, VOCABULARY), mesh)
    initialize(network, seed=1)
    config = OptimizerConfig(lr=1e-3, optimizer_backend=backend)  # type: ignore[arg-type]
    optimizer = make_optimizer([network], mesh, config, DataParallel(torch.float32))
    for bucket in optimizer.buckets:
        bucket.gradients.normal_()
    (rule,) = make_rules(optimizer.shards, mesh, config)
    return lambda: rule.update(Rates(1e-3, 1e-3, 0.01), 1, 1.0)


def plain_update() -> tuple[Callable[[], object], int]:
    """torch's, and the number of parameters."""
    network = PlainLlama(VOCABULARY, LAYERS, HIDDEN, HEADS, FFN, sequence=1)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    return optimizer.step, sum(parameter.numel() for parameter in network.parameters())


def copy(elements: int) -> Callable[[], object]:
    source, target = (torch.ones(elements * BYTES // 8) for _ in range(2))
    return lambda: target.copy_(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain, elements = plain_update()
    steps = {"flat, torch": flat_update("torch"), "flat, megalite": flat_update("megalite")}
    times = measure(steps | {"plain": plain, "copy": copy(elements)}, arguments.rounds, ParallelMesh())
    print(f"torch {torch.__version__}, {elements:,} parameters, {arguments.rounds} rounds, CPU time")
    bandwidth = {name: elements * BYTES / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    compared = {name: ratios(times, "plain", name) for name in times}
    for name, value in bandwidth.items():
        print(f"  {name:15} {value:6.2f} GB/s, {quartiles(compared[name])} of the plain optimizer's")
    print("written to", write_results("optimizer_step", {"GB a second": bandwidth, "of plain": compared}))


if __name__ == "__main__":
    main()
