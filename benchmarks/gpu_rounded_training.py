"""Training with products in 8 bits on GPUs: losses beside the CPU's, the time of a step, and what forward keeps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.errors import relative
from benchmarks.gpu_shapes import SMALL, STACK
from benchmarks.gpu_speed import Run
from benchmarks.gpu_training import train
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.torch_internals import storage_identity
from megalite.training.builder import roundings
from megalite_kernels.recipes import recipe
from megalite_kernels.scaled_products import refusal

PLAIN, LEAST = "bf16", "blockwise, activations in fp8"
WAYS: Mapping[str, str] = {
    PLAIN: "",
    "tensorwise": "--fp8-format e4m3 --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    LEAST: "--fp8-format e4m3 --fp8-recipe blockwise --activation-func-fp8-input-store",
}
"""Flags of each way to train."""
NETWORK = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 64 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --train-iters 20 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 --hidden-dropout 0 "
    "--attention-dropout 0 --bf16"
)
"""Network of twenty steps, whose widths two tensor-parallel ranks can split at blocks."""
LOSS_TOLERANCE = 2e-3
"""Distance of a bf16 run's losses from the CPU's that rounding in other places explains."""
DISTANCE = 8.0
"""Times the distance of the bf16 run that a run in 8 bits may have.

A last bit of e4m3 is 16 of bf16. Where few values differ by a last bit of bf16, one of 16 of them has another code: the
root of the mean square is 4 times as large; where all do, 16 times. Two CPU ranks are 4 to 6 times as far from one.
"""
STEP = 0.8
"""Time of a blockwise step, of a bf16 step's."""
KEPT = 0.6
"""Bytes that layers keep from forward to backward in `LEAST`, of those in bf16."""
ROUNDS = 2


def ways(device: str) -> dict[str, str | None]:
    """Return why the device does not train each way, or None if it does."""
    by = {name: recipe(name.partition(",")[0]) for name in WAYS if name != PLAIN}
    return {PLAIN: None} | {name: refusal(each, torch.device(device)) for name, each in by.items()}


def distances(device: str, gpus: int, deadline: float) -> dict[str, float | str]:
    """Return how far the losses of twenty steps are from the CPU's, in norm, by way; or why the device has none.

    Two GPUs split each layer. Raises as `train`.
    """
    layout, ranks = ("--tp 2 --sequence-parallel", 2) if gpus > 1 else ("", 1)
    found: dict[str, float | str] = {}
    for name, problem in ways(device).items():
        if problem is not None:
            found[name] = problem
            continue
        flags = f"{NETWORK} {WAYS[name]}"
        expected = _losses(train(flags, 1, gpu=False, deadline=deadline))
        ours = _losses(train(f"{flags} {layout}", ranks, gpu=device == "cuda", deadline=deadline))
        found[name] = relative(ours, expected)
    return found


def too_far(found: Mapping[str, float | str]) -> list[str]:
    """Return the ways whose losses are further from the CPU's than they may be."""
    plain = found[PLAIN]
    assert isinstance(plain, float)
    most = {name: LOSS_TOLERANCE if name == PLAIN else DISTANCE * plain for name in found}
    return [name for name, distance in found.items() if isinstance(distance, float) and not distance <= most[name]]


def _losses(steps: list[dict[str, float]]) -> Tensor:
    return torch.tensor([float(step["lm_loss"]) for step in steps], dtype=torch.float64)  # NaN is a word in the metrics


def step_times(device: str, deadline: float) -> dict[str, dict[str, float | None]]:
    """Return figures of a whole training step of a stack of layers by way: milliseconds, also of bf16's, and memory.

    Ways train in turn, each in a process of its own. Raises as `train`.
    """
    shape = STACK if device == "cuda" else SMALL
    names = [name for name, problem in ways(device).items() if problem is None]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for name in names * ROUNDS:
        steps = train(f"{shape.flags(1)} {WAYS[name]}", 1, gpu=device == "cuda", deadline=deadline)
        runs[name].append(Run(name, shape, steps, []))
    seconds = {name: statistics.median(second for run in runs[name] for second in run.seconds) for name in names}
    return {
        name: {
            "milliseconds": 1e3 * seconds[name],
            "time of bf16": seconds[name] / seconds[PLAIN],
            "peak memory bytes": runs[name][0].steps[-1].get("peak_memory_bytes"),
        }
        for name in names
    }


def kept_bytes(device: str) -> dict[str, int]:
    """Return the bytes that a forward of the same layers keeps for backward by way, as a start of a run counts them."""
    return {name: _kept(WAYS[name], torch.device(device)) for name, problem in ways(device).items() if problem is None}


def _kept(flags: str, device: torch.device) -> int:
    shape = STACK if device.type == "cuda" else SMALL
    config = resolve(parse_arguments(f"{shape.flags(1)} {flags}".split()).config, 1)
    network = GPT(config.model, ParallelMesh(device=device), dtype=torch.bfloat16, roundings=roundings(config))
    initialize(network, 1)
    tokens = torch.arange(shape.sequence, device=device).expand(shape.micro_batch, -1)
    key = RandomKey(1, tuple(range(shape.micro_batch)))
    batch = MicroBatch(tokens % shape.vocabulary, tokens, None, None, None, key)
    parameters = {storage_identity(each) for each in network.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := storage_identity(tensor)) not in parameters:
            storages[storage] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that its own node keeps would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden, _ = network.hidden_states(None, batch)  # kept alive, so that no storage is used twice
    assert hidden.requires_grad
    return sum(storages.values())
