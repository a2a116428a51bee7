"""Distribution of a network's layers over stages of equal cost."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.modules.calling import arguments, goes_by_position, results
from megalite.modules.forward_state import ForwardState
from megalite.modules.messages import runs_on_meta
from megalite.parallel.device import synchronize
from megalite.parallel.nested import map_tensors

OPERATIONS_PER_PARAMETER = 8
"""Cost of a parameter's update, in operations."""
REPEATS = 5
"""Number of times that a layer is measured, after the first one, which warms up."""


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Return the layers of each stage, consecutive and at least one, such that the largest sum of costs is smallest.

    Raises:
        MegaliteError: there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise MegaliteError(f"{len(costs)} layers cannot be divided into {stages} stages: each needs one layer or more")
    count, sums = len(costs), list(accumulate(costs, initial=0.0))
    best = [[0.0] * (count + 1) for _ in range(stages + 1)]  # largest sum of the first layers in some stages
    cuts = [[0] * (count + 1) for _ in range(stages + 1)]
    best[1] = sums
    for stage in range(2, stages + 1):
        for end in range(stage, count + 1):
            # With the cut, the stages before it grow and the last one shrinks: the best cut is where they meet.
            meet = bisect_left(
                range(count), True, stage - 1, end - 1, key=lambda cut: best[stage - 1][cut] >= sums[end] - sums[cut]
            )
            tried = (
                (max(best[stage - 1][cut], sums[end] - sums[cut]), cut) for cut in {meet, max(meet - 1, stage - 1)}
            )
            best[stage][end], cuts[stage][end] = min(tried)
    ends = [count]
    for stage in range(stages, 1, -1):
        ends.append(cuts[stage][ends[-1]])
    return [range(first, end) for first, end in zip([0, *reversed(ends[1:])], reversed(ends), strict=True)]


def counted_costs(layers: Sequence[nn.Module], values: Any) -> list[float]:
    """Count the operations of each layer for a micro-batch, on the meta device, and a little for its parameters."""
    from torch.utils.flop_counter import FlopCounterMode  # imported here: it takes a second

    costs, runs = [], runs_on_meta(layers, values)
    for layer in layers:
        with FlopCounterMode(display=False) as counter:
            next(runs)
        size = sum(parameter.numel() for parameter in layer.parameters())
        costs.append(float(counter.get_total_flops() + OPERATIONS_PER_PARAMETER * size))
    return costs


def measured_costs(layers: Sequence[nn.Module], values: Any) -> list[float]:
    """Measure the time of forward and backward of each layer for a micro-batch, in seconds, and leave no trace."""
    costs, inputs = [], dict[str, Tensor]()
    for number, layer in enumerate(layers):
        given = arguments(number, layer, inputs, values)[:2]
        times = []
        with ForwardState([layer]).unchanged():
            for _ in range(REPEATS + 1):
                by_position, by_name = map_tensors(Tensor.clone, given)  # it may change them in place
                began = time.perf_counter()
                found = results(number, layer, layer(*by_position, **by_name))
                ends = [tensor for tensor in found.values() if tensor.requires_grad]
                if ends:
                    torch.autograd.grad(
                        ends, _leaves(layer, inputs), [torch.ones_like(tensor) for tensor in ends], allow_unused=True
                    )
                synchronize(next(iter(found.values())).device)
                times.append(time.perf_counter() - began)
        costs.append(statistics.median(times[1:]))
        inputs = {name: tensor for name, tensor in inputs.items() if not goes_by_position(name)} | found
        inputs = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in inputs.items()}
    return costs


def _leaves(layer: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for tensor in (*layer.parameters(), *inputs.values()) if tensor.requires_grad]
