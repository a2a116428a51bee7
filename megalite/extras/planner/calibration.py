"""Constants of this machine's device for the planner, measured in about a minute.

A sweep of products gives their speed by size, element-wise kernels the memory's bandwidth, and attention its share of
the peak. On a CPU, where caches and the host's own time count as well, whole steps of small networks then correct all
of them: their seconds are the sum of what products, attention, bytes and launches take, of which least squares find
the factors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.planner.as_rank import clock, run_as_rank
from megalite.extras.planner.cluster import Cluster, Gpu
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.parts import part_records
from megalite.extras.planner.step import Step
from megalite.parallel import device as devices
from megalite_kernels.torch_internals import operator_of_attention

PRODUCT_SECONDS = 20.0
"""Time of the sweep of products."""
_ROUNDS, _STEPS = 5, 8
_HALVES = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 120.0, 160.0, 240.0, 320.0)
_SIZES = {"cuda": (512, 1024, 2048, 4096, 8192, 16384), "cpu": (64, 128, 256, 512, 1024)}
_BYTES = {"cuda": (1 << 20, 1 << 24, 1 << 28, 1 << 30), "cpu": (1 << 12, 1 << 18, 1 << 22, 1 << 25)}
_NETWORKS = (
    (8, 64, 32, 2),
    (6, 64, 64, 4),
    (2, 64, 128, 4),
    (2, 128, 256, 2),
    (4, 128, 128, 4),
    (2, 256, 256, 2),
    (4, 256, 128, 4),
    (2, 512, 128, 4),
)
"""Layers, hidden size, tokens and samples of the networks whose steps are timed on a CPU."""


def calibrate(cluster: Cluster) -> Cluster:
    """Return the cluster with the constants of this process's device.

    Takes a minute. `cluster` gives the device's peaks on a GPU, and its links.
    """
    device = devices.local_device(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    gpu = replace(cluster.gpu, **_products(cluster.gpu, device, dtype))  # type: ignore[arg-type]
    kernel, share = _elementwise(gpu, device)
    gpu = replace(gpu, kernel=kernel, share=share)
    measured, operator = _attention(gpu, device, dtype)
    ratio = measured / gpu.attention.get(operator, gpu.attention["flash-2"])
    gpu = replace(gpu, attention={name: min(value * ratio, 1.0) for name, value in gpu.attention.items()})
    if device.type == "cpu":
        gpu = _by_steps(replace(cluster, gpu=gpu))
    return replace(cluster, gpu=gpu)


def as_toml(cluster: Cluster, comment: str) -> str:
    """Return a cluster as a file for --cluster."""
    gpu = cluster.gpu
    numbers = ["memory", "reserved", "bandwidth", "efficiency", "half", "share", "kernel", "launch"]

    def table(values: Iterator[tuple[str, float]]) -> str:
        return "{ " + ", ".join(f"{name} = {value:.6g}" for name, value in values) + " }"

    links = {"node": cluster.node, "network": cluster.network}
    lines = [f"# {comment}", *([f"nodes = {cluster.nodes}"] if cluster.nodes is not None else [])]
    for name, link in links.items():
        ranks = f"ranks = {cluster.node_ranks}, hosts = {cluster.hosts}, " if name == "node" else ""
        multicast = ", multicast = true" if link.multicast else ""
        lines.append(f"{name} = {{ {ranks}alpha = {link.alpha:.6g}, beta = {link.beta:.6g}{multicast} }}")
    if cluster.host is not None:
        lines.append(f"host = {table(iter(vars(cluster.host).items()))}")
    lines += ["", "[gpu]", f'name = "{gpu.name}"']
    lines += [f'generation = "{gpu.generation}"'] if gpu.generation else []
    lines += [f"{name} = {getattr(gpu, name):.6g}" for name in numbers]
    lines += [f"peak = {table(iter(gpu.peak.items()))}", f"attention = {table(iter(gpu.attention.items()))}"]
    return "\n".join(lines) + "\n"


def _seconds(run: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    run()
    found, now = [], clock(device)
    for _ in range(rounds):
        devices.synchronize(device)
        began = now()
        run()
        devices.synchronize(device)
        found.append(now() - began)
    return min(found)  # the least disturbed one


def _products(gpu: Gpu, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """Return the peak, and the efficiency of products by size, that fit best."""
    sizes = _SIZES[device.type]
    shapes: list[tuple[int, int, int]] = []
    flops: list[float] = []
    began, draw = time.perf_counter(), np.random.default_rng(0)
    while time.perf_counter() - began < PRODUCT_SECONDS or len(shapes) < len(sizes):
        rows, columns, inner = (int(draw.choice(sizes)) for _ in range(3))
        left = torch.randn(rows, inner, device=device, dtype=dtype)
        right = torch.randn(columns, inner, device=device, dtype=dtype).t()
        output = torch.empty(rows, columns, device=device, dtype=dtype)
        shapes.append((rows, columns, inner))
        flops.append(2 * rows * columns * inner / _seconds(partial(torch.mm, left, right, out=output), device))
    name = str(dtype).removeprefix("torch.")
    peak = dict(gpu.peak)
    if device.type == "cpu":  # whose datasheet nobody knows
        factor = max(flops) / peak[name]
        peak = {each: value * factor for each, value in peak.items()}
    inverse = np.array([sum(1 / size for size in shape) for shape in shapes])
    logs = np.log(np.array(flops) / peak[name])
    fits = [(logs + np.log1p(half * inverse)) for half in _HALVES]
    best = int(np.argmin([np.abs(fit - np.median(fit)).mean() for fit in fits]))
    return {"peak": peak, "half": _HALVES[best], "efficiency": float(np.exp(np.median(fits[best])))}


def _elementwise(gpu: Gpu, device: torch.device) -> tuple[float, float]:
    """Return the least seconds of a kernel, and the share of the bandwidth that large ones reach."""
    times = []
    for size in _BYTES[device.type]:
        values = torch.zeros(size // 4, device=device)
        target = torch.zeros_like(values)
        times.append((2 * size, _seconds(partial(torch.neg, values, out=target), device)))
    (least, shortest), (most, longest) = times[0], times[-1]
    per_byte = (longest - shortest) / (most - least)
    return max(shortest - least * per_byte, 1e-7), min(1 / (per_byte * gpu.bandwidth), 10.0)


def _attention(gpu: Gpu, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the share of the peak that torch's attention reaches, forward and backward, in long sequences.

    And the name of the kernel that it takes, as in clusters.toml.
    """
    length = 4096 if device.type == "cuda" else 512
    query, key, value = (
        torch.randn(1, 8, length, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    def run() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    flops = 7 * 8 * length * length * 128  # seven products of half of the scores
    takes_cudnn = operator_of_attention(query, key, value, True) == SDPBackend.CUDNN_ATTENTION
    share = flops / _seconds(run, device) / gpu.peak_of(str(dtype).removeprefix("torch."))
    return share, "cudnn" if takes_cudnn else "flash-2"


# ------------------------------------------------------------------------------------------------ whole steps


def _by_steps(cluster: Cluster) -> Gpu:
    """Return a CPU's constants after the correction by whole steps."""
    gpu = cluster.gpu
    rows, seconds = [], []
    for config in _configurations():
        rows.append(_features(config, cluster))
        seconds.append(min(run_as_rank(config, 1, 0, _STEPS).all_seconds))  # the least disturbed step
    table, wanted = np.array(rows), np.array(seconds)
    products, attention, elementwise, kernel = nonnegative_least_squares(table / wanted[:, None], np.ones(len(wanted)))
    return replace(
        gpu,
        efficiency=gpu.efficiency / max(products, 0.1),
        attention={name: value / max(attention, 0.1) for name, value in gpu.attention.items()},
        share=gpu.share / max(elementwise, 0.01),
        kernel=max(kernel, 1e-7),
        launch=0.0,  # the host's time is in that of the kernels, which it runs itself
    )


def _configurations() -> Iterator[RunConfig]:
    for layers, hidden, tokens, samples in _NETWORKS:
        flags = (
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 32} --seq-length {tokens} "
            f"--max-position-embeddings {tokens} --micro-batch-size {samples} --global-batch-size {2 * samples} "
            "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 511 "
            "--tokenizer-type NullTokenizer --mock-data --hidden-dropout 0 --attention-dropout 0 --lr 1 --train-iters 9"
        )
        yield resolve(parse_arguments(flags.split()).config, 1)


def _features(config: RunConfig, cluster: Cluster) -> list[float]:
    """Return the seconds of a step in products, attention and element-wise kernels, and its number of launches."""
    config = replace(config, model=replace(config.model, vocab_size=512))
    parts = part_records(config)

    def cost(kernel: float) -> Sequence[float]:
        priced = replace(cluster, gpu=replace(cluster.gpu, kernel=kernel, launch=0.0))
        found = Step(config, 1, parts, Prices(priced)).simulated.cost
        return found.products, found.attention, found.elementwise + found.optimizer, found.total

    without, with_unit = cost(0.0), cost(1.0)
    return [*without[:3], with_unit[3] - without[3]]


def nonnegative_least_squares(table: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Return the coefficients, none below 0, whose products with the columns come closest to `wanted`.

    Columns whose coefficient would be negative are left out, the most negative one first.
    """
    columns = list(range(table.shape[1]))
    while columns:
        found = np.linalg.lstsq(table[:, columns], wanted, rcond=None)[0]
        if found.min() >= 0:
            break
        columns.pop(int(found.argmin()))
    result = [0.0] * table.shape[1]
    for column, value in zip(columns, found if columns else (), strict=True):
        result[column] = float(value)
    return result
