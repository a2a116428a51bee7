"""Translation of FSDP's strategies, and of Accelerate's configuration, into flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config.yaml_file import nearest
from megalite.errors import ConfigurationError
from megalite.extras.translation.keys import by_key, tables
from megalite.extras.translation.report import Report
from megalite.small_files import shown

STRATEGIES = {
    "NO_SHARD": "no_shard",
    "SHARD_GRAD_OP": "optim_grads",
    "FULL_SHARD": "optim_grads_params",
    "HYBRID_SHARD": "optim_grads_params",
    "HYBRID_SHARD_ZERO2": "optim_grads",
    "_HYBRID_SHARD_ZERO2": "optim_grads",
}
_NUMBERS = dict(enumerate(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), 1))
"""Strategies by the numbers of torch's enumeration."""
_MEGATRON = {
    "megatron_lm_tp_degree": "--tensor-model-parallel-size",
    "megatron_lm_pp_degree": "--pipeline-model-parallel-size",
    "megatron_lm_gradient_clipping": "--clip-grad",
}


def add_strategy(name: str, report: Report) -> None:
    """Add the flags of a strategy."""
    report.add(name, "--data-parallel-sharding-strategy", STRATEGIES[name.upper()])
    if "HYBRID" in name.upper():
        report.missing.append("--num-distributed-optimizer-instances: as many as there are groups, usually nodes")


def translate(settings: Mapping[str, Any]) -> Report:
    """Return the flags that a configuration of Accelerate stands for.

    Raises:
        ConfigurationError: a value is of the wrong type.
    """
    report = Report()
    processes, machines = settings.get("num_processes"), settings.get("num_machines", 1)
    if type(processes) is int and type(machines) is int and 0 < machines <= processes:
        report.nodes, report.per_node = machines, processes // machines
    precision = str(settings.get("mixed_precision", "no")).lower()
    if precision in ("bf16", "fp16"):
        report.add(f"mixed_precision {precision}", f"--{precision}")
    elif precision not in ("no", "false"):
        report.refused.append(f"mixed_precision {shown(precision)}: --bf16, --fp16, or neither for fp32")
    if (steps := settings.get("gradient_accumulation_steps", 1)) != 1:
        report.missing.append(f"--global-batch-size: micro-batch size x {shown(steps)} x data-parallel ranks")
    if "gradient_clipping" in settings:
        report.add("gradient_clipping", "--clip-grad", str(settings["gradient_clipping"]))
    report.refused += [
        f"{key}: unknown key{_near(key)}" for key in settings if key not in tables()["accelerate"]["keys"].split()
    ]
    if "deepspeed_config" in settings:
        report.refused.append("deepspeed_config: give DeepSpeed's own JSON file to megalite-translate")
    for section, read in (("fsdp_config", _fsdp), ("megatron_lm_config", _megatron)):
        values = settings.get(section, {})
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"{section} is {shown(values)}: expected keys with values")
        read(values, report)
    return report


def _fsdp(values: Mapping[str, Any], report: Report) -> None:
    strategy = values.get("fsdp_sharding_strategy")
    if strategy is None and "fsdp_reshard_after_forward" in values:
        strategy = values["fsdp_reshard_after_forward"]
        if isinstance(strategy, bool) or str(strategy).lower() in ("true", "false"):
            strategy = "FULL_SHARD" if str(strategy).lower() == "true" else "SHARD_GRAD_OP"
    if strategy is None and values:
        strategy = "FULL_SHARD"  # Accelerate's default
    if strategy is not None:
        name = _NUMBERS.get(strategy) if type(strategy) is int else str(strategy)
        if name is None or name.upper() not in STRATEGIES:
            raise ConfigurationError(f"fsdp_sharding_strategy is {shown(strategy)}: expected {', '.join(STRATEGIES)}")
        add_strategy(name, report)
    idle = by_key("accelerate_idle")
    for key, value in values.items():
        on = value not in (False, None, "false", "no")
        if key == "fsdp_activation_checkpointing":
            if on:
                whole = ("--recompute-granularity", "full", "--recompute-method", "uniform")
                report.add(key, *whole, "--recompute-num-layers", "1")
        elif key in ("fsdp_offload_params", "fsdp_activation_checkpointing_offload"):
            if on:
                report.refused.append(f"{key}: parameters and activations stay on the GPU; more ranks take less memory")
        elif key in idle:
            report.idle.append(f"{key}: {idle[key]}")
        elif key not in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            report.refused.append(f"{key}: unknown key{_near(key)}")


def _megatron(values: Mapping[str, Any], report: Report) -> None:
    for key, value in values.items():
        if key in _MEGATRON:
            report.add(key, _MEGATRON[key], str(value))
        elif key in ("megatron_lm_sequence_parallelism", "megatron_lm_recompute_activations"):
            if value is True:
                flag = "--sequence-parallel" if key.endswith("parallelism") else "--recompute-activations"
                report.add(key, flag)
        elif key == "megatron_lm_use_distributed_optimizer":
            if value is True:
                report.add(key, "--use-distributed-optimizer")
        elif key == "megatron_lm_num_micro_batches":
            report.missing.append(f"--global-batch-size: micro-batch size x {shown(value)} x data-parallel ranks")
        else:
            report.refused.append(f"{key}: give the flag of Megatron-LM that it stands for")


def _near(key: str) -> str:
    known = [*tables()["accelerate"]["keys"].split(), *by_key("accelerate_idle"), "fsdp_sharding_strategy"]
    return nearest(key, known)
