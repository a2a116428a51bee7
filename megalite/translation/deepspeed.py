"""Translation of a DeepSpeed configuration (JSON) into flags."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from megalite.errors import ConfigurationError
from megalite.small_files import shown
from megalite.translation.report import Report

ZERO_STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_OFF = "parameters and optimizer stay on the GPU: more ranks, or --exp-avg-dtype and --exp-avg-sq-dtype int8, take less"
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd", "muon": "muon"}
_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def translate(settings: Mapping[str, Any], ranks: int | None) -> Report:
    """Return the flags that a configuration stands for.

    Args:
        ranks: number of data-parallel ranks, if it is known.

    Raises:
        ConfigurationError: values contradict each other, or are of the wrong type.
    """
    names = tables()
    values, report = _leaves(settings, {key for table in ("idle", "refused") for key in by_key(table)}), Report()
    for key, value in values.items():
        if value == "auto":
            flag = names["flags"].get(key) or {"train_batch_size": "--global-batch-size"}.get(key)
            report.missing.append(
                f'{key} is "auto", which another program fills in' + (f": give {flag}" if flag else "")
            )
    values = {key: value for key, value in values.items() if value != "auto"}
    for key, flag in names["flags"].items():
        if key in values and not (key.startswith("fp16.") and not values.get("fp16.enabled", False)):
            report.add(key, flag, _text(key, values[key]))
    _batch(values, report, ranks)
    _precision(values, report)
    _sharding(values, report)
    _optimizer(values, report)
    _schedule(values, report)
    _monitoring(values, report)
    _others(values, report)
    return report


@cache
def tables() -> dict[str, dict[str, str]]:
    """Read the tables of keys, whose comments explain them."""
    with Path(__file__).with_name("settings.toml").open("rb") as file:
        return tomllib.load(file)


def by_key(table: str) -> dict[str, str]:
    """Return the reason for each key of a table."""
    return {key: reason for reason, keys in tables()[table].items() for key in keys.split()}


def _leaves(settings: Mapping[str, Any], whole: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return values by their path, such as `zero_optimization.stage`, except for sections that are treated as one."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        inner = isinstance(value, Mapping) and path not in whole
        found |= _leaves(value, whole, f"{path}.") if inner else {path: value}
    return found


def _text(key: str, value: Any, kind: Callable[[Any], bool] = lambda value: True) -> str:
    """Return a number as a flag takes it. Raises ConfigurationError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not kind(value):
        raise ConfigurationError(f"{key} is {shown(value)}: expected a number")
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _whole(values: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number above 0, or None if it is not given."""
    if key not in values:
        return None
    return int(_text(key, values[key], lambda value: value >= 1 and value == int(value)))


def _batch(values: Mapping[str, Any], report: Report, ranks: int | None) -> None:
    total = _whole(values, "train_batch_size")
    micro, steps = _whole(values, "train_micro_batch_size_per_gpu"), _whole(values, "gradient_accumulation_steps")
    if total and micro and not steps and ranks and total % (micro * ranks) == 0:
        steps = total // (micro * ranks)
    if total and steps and not micro and ranks and total % (steps * ranks) == 0:
        micro = total // (steps * ranks)
        report.add("train_batch_size / gradient_accumulation_steps / ranks", "--micro-batch-size", str(micro))
    product = (micro or 1) * (steps or 1)
    if total and micro and (total % product or (ranks and steps and total != product * ranks)):
        raise ConfigurationError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps or 1} x {ranks or 'any number of'} data-parallel ranks: change one of the three"
        )
    if not total and micro and (ranks or steps):
        if ranks:
            total = product * ranks
        else:
            report.missing.append(f"--global-batch-size: {micro} x {steps} x data-parallel ranks; give --ranks")
    if total:
        factors = f"{micro or '?'} x {steps or '?'} x {ranks or (total // product if micro and steps else '?')} ranks"
        report.add(f"train_batch_size = {factors}", "--global-batch-size", str(total))
    if total and micro and steps and not ranks:
        report.notes.append(f"the batch is for {total // product} data-parallel ranks")


def _precision(values: Mapping[str, Any], report: Report) -> None:
    bf16 = values.get("bf16.enabled") or values.get("bfloat16.enabled")
    if bf16 and values.get("fp16.enabled"):
        raise ConfigurationError("bf16.enabled and fp16.enabled contradict each other: turn one of them off")
    if bf16:
        report.add("bf16.enabled", "--bf16")
    if values.get("fp16.enabled"):
        report.add("fp16.enabled", "--fp16")
        if values.get("fp16.loss_scale"):
            report.add("fp16.loss_scale", "--loss-scale", _text("fp16.loss_scale", values["fp16.loss_scale"]))
        else:
            power = _text("fp16.initial_scale_power", values.get("fp16.initial_scale_power", 16), lambda n: 0 <= n < 64)
            report.add(f"fp16.initial_scale_power {power}", "--initial-loss-scale", str(2 ** int(power)))
    dtype = str(values.get("communication_data_type") or "fp32").lower()
    if dtype in ("bf16", "bfp16", "bfloat16"):
        report.add("communication_data_type", "--grad-reduce-in-bf16")
    elif dtype not in ("fp32", "float32"):
        report.refused.append(f"communication_data_type {shown(dtype)}: gradients are reduced in fp32 or bf16")
    if str(values.get("data_types.grad_accum_dtype") or "fp32") not in ("fp32", "float32"):
        report.refused.append("data_types.grad_accum_dtype: gradients are accumulated in fp32; leave it out")


def _sharding(values: Mapping[str, Any], report: Report) -> None:
    stage = values.get("zero_optimization.stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ConfigurationError(f"zero_optimization.stage is {shown(stage)}: expected 0, 1, 2 or 3")
    if stage:
        report.add(f"zero_optimization.stage {stage}", "--data-parallel-sharding-strategy", ZERO_STAGES[stage])
    if values.get("zero_optimization.overlap_comm"):
        report.add("zero_optimization.overlap_comm", "--overlap-grad-reduce")
    if (size := values.get("zero_optimization.mics_shard_size", -1)) not in (-1, 0):
        report.refused.append(
            f"mics_shard_size {shown(size)}: use --num-distributed-optimizer-instances ranks / {size}"
        )
    for part in ("optimizer", "param"):
        if (device := values.get(f"zero_optimization.offload_{part}.device", "none")) not in ("none", None):
            report.refused.append(f"zero_optimization.offload_{part} to {shown(device)}: {_OFF}")


def _optimizer(values: Mapping[str, Any], report: Report) -> None:
    if "optimizer.type" in values:
        name = str(values["optimizer.type"])
        if name.lower() not in _OPTIMIZERS:
            report.refused.append(f"optimizer.type {shown(name)}: --optimizer has adam (AdamW), sgd and muon")
            return
        rule = _OPTIMIZERS[name.lower()]
        report.add(f"optimizer.type {name}", "--optimizer", rule)
        if values.get("optimizer.params.bias_correction") is False:
            report.refused.append("optimizer.params.bias_correction false: moments are always corrected here")
        if values.get("optimizer.params.adam_w_mode") is False:
            report.refused.append("optimizer.params.adam_w_mode false: weight decay does not enter the gradient here")
        if "optimizer.params.momentum" in values and rule != "adam":
            momentum = _text("optimizer.params.momentum", values["optimizer.params.momentum"])
            report.add("optimizer.params.momentum", f"--{rule}-momentum", momentum)
    betas = values.get("optimizer.params.betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise ConfigurationError(f"optimizer.params.betas is {shown(betas)}: expected two numbers")
        first, second = (_text("optimizer.params.betas", beta) for beta in betas)
        report.add("optimizer.params.betas", "--adam-beta1", first, "--adam-beta2", second)


def _schedule(values: Mapping[str, Any], report: Report) -> None:
    name = values.get("scheduler.type")
    if name is None:
        return
    if not isinstance(name, str) or name not in _STYLES:
        report.refused.append(
            f"scheduler.type {shown(name)}: use --lr-decay-style (linear, cosine, constant, WSD, ...)"
        )
        return
    report.add(f"scheduler.type {name}", "--lr-decay-style", _STYLES[name])
    params = {key.rpartition(".")[2]: value for key, value in values.items() if key.startswith("scheduler.params.")}
    rate = values.get("optimizer.params.lr")
    if rate is None and "warmup_max_lr" in params:
        rate = params["warmup_max_lr"]
        report.add("scheduler.params.warmup_max_lr", "--lr", _text("warmup_max_lr", rate))
    warmup = _whole(params, "warmup_num_steps") or 1000
    report.add("scheduler.params.warmup_num_steps", "--lr-warmup-iters", str(warmup))
    if params.get("warmup_type", "log") != "linear":
        report.changed.append("scheduler.params.warmup_type log -> the warm-up is linear here")
    if name != "WarmupLR":
        if (total := _whole(params, "total_num_steps")) is None:
            report.missing.append("scheduler.params.total_num_steps: give --lr-decay-iters")
        else:
            report.add("scheduler.params.total_num_steps", "--lr-decay-iters", str(total))
    ratio = params.get("cos_min_ratio", 0.0001) if name == "WarmupCosineLR" else 0.0
    if rate is not None and name != "WarmupLR":
        low = float(_text("cos_min_ratio", ratio)) * float(_text("lr", rate))
        report.add("the schedule's lowest rate", "--min-lr", _text("cos_min_ratio", low))
    start = params.get("warmup_min_lr", 0)
    if name == "WarmupCosineLR" and rate is not None:
        start = float(_text("warmup_min_ratio", params.get("warmup_min_ratio", 0))) * float(_text("lr", rate))
    if start:
        report.add("the warm-up's first rate", "--lr-warmup-init", _text("warmup_min_lr", start))


def _monitoring(values: Mapping[str, Any], report: Report) -> None:
    if values.get("wall_clock_breakdown"):
        report.add("wall_clock_breakdown", "--timing-interval", str(_whole(values, "steps_per_print") or 10))
    if values.get("tensorboard.enabled"):
        parts = [str(values[key]) for key in ("tensorboard.output_path", "tensorboard.job_name") if values.get(key)]
        report.add("tensorboard", "--tensorboard-dir", "/".join(part.rstrip("/") for part in parts) or "tensorboard")


def _others(values: Mapping[str, Any], report: Report) -> None:
    """Name the keys that have no flag: without effect, refused, or unknown."""
    idle, refused = by_key("idle"), by_key("refused")
    known = {*tables()["flags"], *tables()["read"]["keys"].split(), *idle, *refused}
    for key, value in values.items():
        off = value is False or value is None or (type(value) is int and value <= 1)  # True is not of this type
        off = off or (isinstance(value, Mapping) and value.get("enabled") is False)
        if key in idle or (key in refused and off):
            report.idle.append(f"{key}: {idle.get(key, 'off')}")
        elif key in refused:
            report.refused.append(f"{key}: {refused[key]}")
        elif key not in known:
            near = get_close_matches(key, known, n=1)
            report.refused.append(f"{key}: unknown key" + (f", did you mean {near[0]}?" if near else ""))
