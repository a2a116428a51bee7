"""Search for the source of NaN or infinity in a step: which rank, which micro-batch, which module.

All ranks skip a step whose gradient is not finite. Parameters, buffers and generators are then as before it, and other
random numbers depend only on their keys. So the step can be run again with bitwise identical results, this time with
checks in every module. Steps that are not skipped have no extra cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from megalite.optim.buckets import ParameterBucket
from megalite.optim.fixed_point import FixedPoint
from megalite.optim.optimizer import Optimizer, StepResult
from megalite.parallel.collectives import all_gather_json, all_reduce_
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage_module import StageModule
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.stages import Stages
from megalite.process.host import host_name
from megalite.training.gradients import Gradients
from megalite.training.nonfinite_search import NotFinite, Search, not_finite

MAX_CONSECUTIVE_SKIPS = 10
"""Number of consecutive skipped steps after which the run is considered diverged and ends."""
LOCATED_SKIPS = (1, MAX_CONSECUTIVE_SKIPS)
"""Counts of consecutive skipped steps at which the search for the cause runs."""
_SHOWN = 8  # the most names or ranks in a message


def is_finite_everywhere(loss: float, mesh: ParallelMesh) -> bool:
    """Tell whether the loss is finite on all ranks. Called by all ranks together.

    The ranks may differ, because each tensor-parallel rank computes the loss itself.
    """
    flag = torch.tensor([not math.isfinite(loss)], dtype=torch.float32, device=mesh.device)
    return all_reduce_(flag, mesh.world(), "max").item() == 0.0


@dataclass(frozen=True)
class _FirstRun:
    """Names of the tensors on one rank that are not finite after the skipped step."""

    host: str
    parameters: Sequence[str]
    """Logical names."""
    loss: str | None
    own: Sequence[str]
    """Logical names of gradients that this rank computed alone."""
    summed: Sequence[str]
    """Logical names of gradients that are sums over ranks."""


@dataclass(frozen=True)
class _SecondRun:
    """Findings of one rank in the repeated step."""

    finding: dict[str, Any] | None
    samples: Sequence[int]
    """First and last sample of the finding's micro-batch on this rank; empty without a finding."""
    micro_batches: Sequence[int]
    """First samples of the micro-batches with at least one finding. An empty slot has those of another one."""
    own: Sequence[str]
    summed: Sequence[str]
    """`own` and `summed` have the same meaning as in `_FirstRun`."""


def locate(
    step: Gradients,
    iteration: int,
    chunks: Sequence[StageModule],
    engine: PipelineEngine[Any],
    stages: Stages,
    optimizer: Optimizer,
    mesh: ParallelMesh,
) -> str:
    """Find the source of the non-finite gradient of a skipped step, and return a report that is the same on all ranks.

    Called by all ranks together, before they begin another step. The next step overwrites the gradients that this
    leaves. Needs as much memory as a step, plus the gradient of the largest parameter.
    """
    first = [_FirstRun(**report) for report in all_gather_json(asdict(_first_run(step, optimizer)), mesh)]
    hosts = [report.host for report in first]
    told = f"step {iteration} was skipped, since its gradient is not finite"
    if any(report.parameters for report in first):
        return f"{told}: {_describe_parameters(first, hosts)}"
    search = Search(stages, mesh.coordinate("pp"))
    optimizer.begin_step(len(step.micro_batches), step.loss_scale)
    with search.through(chunks):
        engine.run(step.actions, step.micro_batches, step.multipliers, optimizer, search)
    result = optimizer.agreed(optimizer.complete(step.loss_scale))
    second = [_SecondRun(**report) for report in all_gather_json(asdict(_second_run(search, step, optimizer)), mesh)]
    grid = next((bucket.fixed_point for bucket in optimizer.updated if bucket.fixed_point is not None), None)
    cause = _describe_cause(first, second, result, hosts, step, grid)
    return f"{told}. It was run once more to find the cause: {cause}"


# ---------------------------------------------------------------------------------------------------- state of a rank


def _first_run(step: Gradients, optimizer: Optimizer) -> _FirstRun:
    parameters = _some(chain.from_iterable(map(_parameters, (*optimizer.buckets, *optimizer.frozen))))
    loss = next((value for total in step.sums.values() if (value := not_finite(total))), None)
    return _FirstRun(host_name(), parameters, loss, *_gradients(optimizer))


def _second_run(search: Search, step: Gradients, optimizer: Optimizer) -> _SecondRun:
    first_samples = {step.micro_batches[number].sample_ids[0] for number in search.micro_batches}
    rest = sorted(first_samples), *_gradients(optimizer)
    if search.first is None:
        return _SecondRun(None, (), *rest)
    micro_batch = step.micro_batches[search.first.micro_batch]
    samples = micro_batch.sample_ids
    return _SecondRun(asdict(search.first), (samples[0], samples[-1]), *rest)


def _parameters(bucket: ParameterBucket) -> Iterator[str]:
    """Yield the logical names of the bucket's parameters that are not finite, of those stored on this rank."""
    if bucket.zero_stage == 3:
        yield from _names(bucket, bucket.parameter_shard, *bucket.owned_range)
    else:
        yield from _names(bucket, bucket.parameters, 0, bucket.length)


def _gradients(optimizer: Optimizer) -> tuple[list[str], list[str]]:
    """Return the names of non-finite gradients after the reduction: those of this rank alone, and sums over ranks.

    ZeRO 2 and 3 keep only sums over ranks, unless a bucket has nothing to sum over.
    """
    own: list[Iterator[str]] = []
    summed: list[Iterator[str]] = []
    for bucket in optimizer.updated:
        start, stop = bucket.owned_range
        is_sum = any(len(part.ranks) > 1 for part in bucket.completion())
        (summed if is_sum else own).append(_names(bucket, bucket.gradient_shard, start, stop))
        if is_sum and bucket.zero_stage < 2:
            own.append(_names(bucket, bucket.gradients[:start], 0, start))
            own.append(_names(bucket, bucket.gradients[stop:], stop, bucket.length))
    return _some(chain(*own)), _some(chain(*summed))


def _some(names: Iterable[str]) -> list[str]:
    """Return at most one name more than is shown. This bounds the exchanged lists if no tensor is finite."""
    return list(islice(names, _SHOWN + 1))


def _names(bucket: ParameterBucket, values: Tensor, start: int, stop: int) -> Iterator[str]:
    """Yield the logical names of non-finite tensors in elements [start, stop) of a bucket, which are `values`."""
    for name, low, high in bucket.layout.pieces(start, stop):
        if value := not_finite(values[low - start : high - start]):
            yield f"{name} ({value})"


# ---------------------------------------------------------------------------------------------------- report


def _describe_parameters(first: Sequence[_FirstRun], hosts: Sequence[str]) -> str:
    ranks = [rank for rank, report in enumerate(first) if report.parameters]
    names = _listed(dict.fromkeys(name for report in first for name in report.parameters))
    return (
        f"before it began, parameters were already not finite, on {_ranks(ranks, hosts)}: {names}. No later step "
        "can be finite: resume from an earlier checkpoint"
    )


def _describe_cause(
    first: Sequence[_FirstRun],
    second: Sequence[_SecondRun],
    result: StepResult,
    hosts: Sequence[str],
    step: Gradients,
    grid: FixedPoint | None,
) -> str:
    """Return what a second run of a skipped step has found, by the reports of all ranks on both runs."""
    if not result.skipped:
        return f"it was finite. So suspect a device or its memory, not the model. In the first run {_suspects(first)}"
    if any(report.finding for report in second):
        affected = {sample for report in second for sample in report.micro_batches}
        total = step.batch_size // len(step.micro_batches[0].sample_ids)
        return f"{_describe_origin(second, hosts)}. Of the step's {total} micro-batches {len(affected)} are affected"
    if kept := [rank for rank, report in enumerate(second) if report.own]:
        names = dict.fromkeys(name for rank in kept for name in second[rank].own)
        told = f"every gradient was finite, but what {_ranks(kept, hosts)} accumulated from it is not: {_listed(names)}"
        return told + _describe_grid(grid)
    if names := dict.fromkeys(name for report in second for name in report.summed):
        told = f"each rank's gradients are finite, but their sum over the ranks is not: {_listed(names)}"
        return told + _describe_grid(grid)
    return "all gradients are finite, but their norm overflows"


def _describe_grid(grid: FixedPoint | None) -> str:
    if grid is None:
        return ""
    most = f"{grid.of_gradients.largest:g} in one micro-batch"
    return f". --bitwise-elastic makes an element infinite that is beyond {most}: drop it if such gradients are right"


def _describe_origin(second: Sequence[_SecondRun], hosts: Sequence[str]) -> str:
    findings = {rank: NotFinite(**report.finding) for rank, report in enumerate(second) if report.finding is not None}
    origin, finding = min(findings.items(), key=lambda item: (item[1].order, item[0]))
    ranks = [rank for rank, other in findings.items() if (other.order, other.place) == (finding.order, finding.place)]
    low, high = second[origin].samples
    samples = f"sample {low}" if low == high else f"samples {low} to {high}"
    return (
        f"{finding.value} came first on {_ranks(ranks, hosts)}, in micro-batch {finding.micro_batch} ({samples}"
        f"{f' on rank {origin}' if len(ranks) > 1 else ''}), {'backward' if finding.phase else 'forward'}, in "
        f"{finding.place}{f'; {finding.before} was still finite' if finding.before else ''}"
    )


def _suspects(first: Sequence[_FirstRun]) -> str:
    """Describe which values of the first run were not finite, from those that are still available."""
    hosts = [report.host for report in first]
    losses = [rank for rank, report in enumerate(first) if report.loss]
    own = [rank for rank, report in enumerate(first) if report.own]
    summed = [rank for rank, report in enumerate(first) if report.summed]
    seen = []
    if losses:
        seen.append(f"the loss of {_ranks(losses, hosts)}")
    if own:
        seen.append(f"gradients of {_ranks(own, hosts)}, such as {first[own[0]].own[0]}")
    elif summed:
        example = first[summed[0]].summed[0]
        seen.append(f"sums of the ranks' gradients, kept by {_ranks(summed, hosts)}, such as {example}")
    return f"these were not finite: {'; '.join(seen)}" if seen else "the norm alone was not finite"


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return f"{', '.join(names[:_SHOWN])}{' and more' if len(names) > _SHOWN else ''}"
