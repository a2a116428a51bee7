"""Megatron-LM's own scheduler of learning rates and weight decay, from the wheel that `megatron_data` speaks of."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

Trajectory = list[tuple[float, float, float]]
"""Of each step: the learning rate, that of word embedding and output layer, and the weight decay."""


def trajectory(
    decoupled: tuple[float | None, float | None], samples: list[int], resume_at: int, options: dict[str, Any]
) -> Trajectory:
    """What its scheduler sets in steps of so many samples each, with a new one from step `resume_at` on.

    `decoupled`: the maximum and the minimum that the flags give; `options`: its constructor's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = OptimizerConfig(lr=1.0, decoupled_lr=decoupled[0], decoupled_min_lr=decoupled[1])
    overrides = get_standard_config_overrides(config).items()
    tables = [dict(values) for key, values in overrides if key.attr == "is_embedding_or_output_parameter"]

    def new() -> Any:
        groups = [{"default_config": True}, *(tables or [{}])]
        return OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **options)

    scheduler, steps = new(), []
    for step, increment in enumerate(samples):
        if step == resume_at:
            state, scheduler = scheduler.state_dict(), new()
            scheduler.load_state_dict(state)
        plain, table = scheduler.optimizer.param_groups
        steps.append((plain["lr"], table["lr"], plain["weight_decay"]))
        scheduler.step(increment)
    return steps
