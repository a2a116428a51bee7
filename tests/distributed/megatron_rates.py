"""Megatron-LM's own scheduler of learning rates and weight decay, from the wheel that `megatron_data` describes."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

Trajectory = list[tuple[float, float, float]]
"""Learning rate, learning rate of word embedding and output layer, and weight decay of each step."""


def trajectory(
    decoupled: tuple[float | None, float | None], samples: list[int], resume_at: int, options: dict[str, Any]
) -> Trajectory:
    """Return the values of its scheduler in each step, with a new scheduler from step `resume_at` on.

    `decoupled`: maximum and minimum from the flags; `options`: arguments of its constructor.
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
