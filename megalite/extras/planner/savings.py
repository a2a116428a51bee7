"""Changes that would save the memory that a layout has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.config import RunConfig
from megalite.errors import MegaliteError
from megalite.extras.planner.plan import GIB, Plan, Planner

_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def savings(planner: Planner, plan: Plan) -> Iterator[str]:
    """Yield what would save memory of a plan that does not fit, with the memory that it would need then."""
    config, layout = plan.config, plan.layout
    ways = [(words, changed, plan.gpus) for words, changed in _changes(config)]
    if layout.recompute != "full":
        ways.insert(0, (_FULL, replace(layout, recompute="full").on(config), plan.gpus))
    offload = replace(config.offload, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    if offload != config.offload and planner.cluster.host is not None:
        ways.append(("--optimizer-cpu-offload", replace(config, offload=offload), plan.gpus))
    ways.append(("ZeRO 3 on twice the GPUs", replace(layout, zero=3).on(config), 2 * plan.gpus))
    for words, changed, gpus in ways:
        try:
            other = planner.for_other_run(gpus).plan(changed)
        except MegaliteError:  # the batch cannot be divided among so many, or the flags contradict others
            continue
        if other.missing < plan.missing:
            yield f"{words}: {_needs(other)}"


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield flags that need less memory and are not set, each with the configuration that has them."""
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
