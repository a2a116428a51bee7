"""Another layout of a run whose ranks have become fewer than one replica of its own layout needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from megalite.commands.pretrain import saved_fields
from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import is_automatic
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.planner.cluster import Cluster, find_cluster
from megalite.extras.planner.flags import layout_flags, without_layout
from megalite.extras.planner.layouts import Layout
from megalite.extras.planner.plan import Plan, Planner
from megalite.extras.planner.search import search
from megalite.parallel.device import local_device
from megalite.process.host import memory_limit
from megalite_kernels.implementation import on_gpu

_KEPT = ("micro_batch", "zero")
"""Axes that stay: the micro-batches of a step are those of the run."""
_KEPT_IF_IT_FITS = "recompute"
_KEPT_FOR_BITS = ("tensor", "sequence", "context", "expert", "expert_tensor")
"""Axes that stay with --bitwise-elastic, which promises no bits for others."""
_GPU = "H100-SXM"
"""GPU whose constants are taken, with the memory of the one that is there: the order of layouts changes little."""
_MOST_FOUND, _MOST_NUMBERS = 5, 8


@dataclass(frozen=True)
class Replanned:
    """Layout for the ranks that are left.

    Attributes:
        ranks: number of ranks that it uses.
        argv: flags of the run with this layout, without the program's name.
        text: the layout, its flags, and the layout that it replaces.
    """

    ranks: int
    argv: list[str]
    text: str


def replan(argv: Sequence[str], nodes: int, node_ranks: int) -> Replanned:
    """Return the layout in which a step takes the least time, of those that fit on the nodes that are left.

    All nodes need not be used, but half of them are. The micro-batches of a step and ZeRO stay, and so does
    recomputation if it fits.

    Args:
        argv: flags of the run with its own layout, without the program's name. `resolve` has accepted them.
        nodes: number of nodes that are left, with fewer ranks than one replica needs.
        node_ranks: number of ranks of each.

    Raises ConfigurationError if there is no layout; it says why there is none for all nodes.
    """
    own = _own(argv)
    planner = Planner(own, _cluster(node_ranks), nodes * node_ranks)
    refusals: list[str] = []
    plans: list[Plan] = []
    for count in range(nodes, max(nodes // 2, nodes - _MOST_NUMBERS, 0), -1):
        try:
            plans.append(_fastest(planner.with_gpus(count * node_ranks)))
        except MegaliteError as error:
            refusals.append(str(error))
    if not plans:
        parallel = own.parallel
        sizes = f"--tp {parallel.tensor_model_parallel_size} and --cp {parallel.context_parallel_size}"
        kept = f"--bitwise-elastic keeps {sizes}: " if parallel.bitwise_elastic else ""
        raise ConfigurationError(kept + refusals[0].replace("\n", "; "))
    best = min(plans, key=lambda plan: plan.step.seconds)
    return _written(argv, own, best)


def _own(argv: Sequence[str]) -> RunConfig:
    """Return the run as its flags have it. Stages that are divided by their costs are left to the planner."""
    config = parse_arguments(argv, saved_fields).config
    if is_automatic(config.parallel):
        config = replace(config, parallel=replace(config.parallel, pipeline_model_parallel_layout=None))
    return resolve(config, config.parallel.ranks_needed)


def _cluster(node_ranks: int) -> Cluster:
    """Return the nodes of this run, taken to be all like this one."""
    device = local_device(0)
    on_host = memory_limit() / node_ranks
    if on_gpu(device):
        found, memory = find_cluster(_GPU), float(torch.cuda.get_device_properties(device).total_memory)
    else:
        found, memory = find_cluster("cpu"), on_host
    host = None if found.host is None else replace(found.host, memory=on_host)
    return replace(found, gpu=replace(found.gpu, memory=memory), node_ranks=node_ranks, hosts=1, host=host)


def _fastest(planner: Planner) -> Plan:
    """Return the fastest layout that fits on all ranks of the planner.

    Raises MegaliteError if there is none.
    """
    config = planner.config
    kept = (*_KEPT, *(_KEPT_FOR_BITS if config.parallel.bitwise_elastic else ()))
    for keep in ((*kept, _KEPT_IF_IT_FITS), kept):
        found = search(planner, _MOST_FOUND, keep)
        for plan in found.plans:
            with suppress(MegaliteError):  # of the run's own flags, some do not go with what this layout changes
                again = planner.plan(planner.on(plan.layout))
                if not again.missing:
                    return again
    nearest = found.nearest(planner)
    why = "with none of the fastest ones do the other flags go" if nearest is None else nearest.too_large
    raise ConfigurationError(f"no layout of {planner.gpus} ranks fits: {why}")


def _written(argv: Sequence[str], own: RunConfig, plan: Plan) -> Replanned:
    """Return a layout as flags. Raises ConfigurationError if they do not describe it."""
    rest = without_layout(argv)
    size = str(plan.layout.micro_batch)
    base = parse_arguments([*rest, "--micro-batch-size", size], saved_fields).config
    flags = [word for flag in layout_flags(plan.config, base) for word in flag]
    described = resolve(parse_arguments([*rest, *flags], saved_fields).config, plan.gpus)
    if Layout.of(described) != plan.layout:
        raise ConfigurationError(f"the flags of the run do not go with {plan.layout}")
    changed = " ".join(word for flag in layout_flags(plan.config, own) for word in flag if "micro-batch" not in flag[0])
    before, after = own.parallel.layout(own.parallel.ranks_needed), plan.config.parallel.layout(plan.gpus)
    return Replanned(plan.gpus, [*rest, *flags], f"{after} instead of {before} ({changed})")
