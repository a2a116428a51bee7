"""Changes that would save the memory that a layout has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.config import RunConfig
from megalite.errors import MegaliteError
from megalite.planner.layouts import Layout
from megalite.planner.plan import GIB, Plan, Planner


def savings(planner: Planner, layout: Layout) -> Iterator[str]:
    """Yield what would change the memory of a layout that does not fit, with the memory that it would need."""
    ways = [(words, config, planner.gpus, layout) for words, config in _changes(planner.given)]
    if layout.recompute != "full":
        ways.insert(0, ("--recompute-granularity full", planner.given, planner.gpus, replace(layout, recompute="full")))
    sharded = layout if layout.zero == 3 else replace(layout, zero=3)
    ways.append(("ZeRO 3 on twice the GPUs", planner.given, 2 * planner.gpus, sharded))
    for words, config, gpus, changed in ways:
        other = Planner(config, planner.cluster, gpus, planner.prices.stack)
        try:
            plan = other.plan(other.on(changed))
        except MegaliteError:  # the batch cannot be divided among so many, or the flags contradict others
            continue
        yield f"{words}: {_needs(plan)}"


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    if config.training.bf16 and not config.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16", replace(config, parallel=replace(config.parallel, grad_reduce_in_bf16=True))
    narrow = replace(
        config.optimizer, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
    )
    if narrow != config.optimizer:
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        yield flags, replace(config, optimizer=narrow)
    if not config.kernels.fused_linear_cross_entropy:
        kernels = replace(config.kernels, fused_linear_cross_entropy=True)
        yield "--fused-linear-cross-entropy", replace(config, kernels=kernels)


def _needs(plan: Plan) -> str:
    if plan.missing:
        return f"{plan.missing / GIB:.1f} GiB would still be missing ({plan.too_large})"
    return f"would fit ({plan.too_large})"
