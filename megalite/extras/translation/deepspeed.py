"""Translation of a DeepSpeed configuration (JSON) into flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from megalite.errors import ConfigurationError
from megalite.extras.translation.keys import (
    add_number,
    add_others,
    as_count,
    as_number,
    by_key,
    is_on,
    keys,
    leaves,
    tables,
    whole_number,
)
from megalite.extras.translation.report import Report
from megalite.small_files import shown

_ASKED = {
    "train_batch_size": "--global-batch-size",
    "gradient_accumulation_steps": "--global-batch-size",
    "bf16.enabled": "--bf16 or --no-bf16",
    "bfloat16.enabled": "--bf16 or --no-bf16",
    "fp16.enabled": "--fp16 or --no-fp16",
    "zero_optimization.stage": "--data-parallel-sharding-strategy",
    "optimizer.type": "--optimizer",
    "optimizer.params.betas": "--adam-beta1 and --adam-beta2",
    "optimizer.params.momentum": "--sgd-momentum or --muon-momentum",
    "optimizer.params.max_grad_norm": "--clip-grad",
    "scheduler.type": "--lr-decay-style",
    "scheduler.params.warmup_num_steps": "--lr-warmup-iters",
    "scheduler.params.total_num_steps": "--lr-decay-iters",
    "scheduler.params.warmup_max_lr": "--lr",
    "scheduler.params.warmup_min_lr": "--lr-warmup-init",
}
"""Flags to give for keys that are translated by code."""
_VERSION = "DeepSpeed 0.19's default"
ZERO_STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd", "muon": "muon"}
_RATES = {"WarmupDecayLR": 0.001}
"""Rates of schedulers without warmup_max_lr; others, and those with null, take the optimizer's rate."""
_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def translate(settings: Mapping[str, Any], ranks: int | None, *, alone: bool = True) -> Report:
    """Return the flags that a configuration stands for.

    Args:
        ranks: number of data-parallel ranks, if it is known.
        alone: whether DeepSpeed makes the schedule and groups the parameters, and not the program around it.

    Raises:
        ConfigurationError: values contradict each other, or are of the wrong type.
    """
    names = tables()
    values, report = leaves(settings, {key for table in ("idle", "refused") for key in by_key(table)}), Report()
    for key, value in values.items():
        if value == "auto" and key not in by_key("idle"):
            flag = names["flags"].get(key) or _ASKED.get(key)
            report.missing.append(
                f'{key} is "auto", which another program fills in' + (f": give {flag}" if flag else "")
            )
    auto = {key for key, value in values.items() if value == "auto"}
    values = {key: value for key, value in values.items() if value != "auto" or key in by_key("idle")}
    scheduler, highest = values.get("scheduler.type"), "scheduler.params.warmup_max_lr"
    if isinstance(scheduler, str) and scheduler in _RATES and highest not in {*values, *auto}:
        values[highest] = _RATES[scheduler]
        trains = f"{highest} is missing: DeepSpeed's {scheduler} then trains at {_RATES[scheduler]}"
        report.notes.append(f"{trains}, whatever optimizer.params.lr is; give warmup_max_lr if that is not meant")
    scheduled = values.get("scheduler.params.warmup_max_lr") is not None and "WarmupCosine" not in str(
        values.get("scheduler.type", "WarmupCosine")
    )
    if scheduled and "optimizer.params.lr" in values:
        report.idle.append(
            f"optimizer.params.lr {shown(values.pop('optimizer.params.lr'))}: warmup_max_lr is what trains"
        )
    steps: list[Callable[[], None]] = [
        partial(add_number, values, report, key, flag)
        for key, flag in names["flags"].items()
        if key in values and not (key.startswith("fp16.") and not values.get("fp16.enabled", False))
    ]
    steps += [partial(_batch, values, report, ranks)]
    steps += [partial(step, values, report) for step in (_precision, _sharding, _offloading)]
    steps += [partial(step, values, report, auto) for step in (_optimizer, _clipping, *([_schedule] if alone else []))]
    steps += [partial(step, values, report) for step in (_monitoring, _others)]
    for step in steps:  # a bad value does not hide what the others say
        try:
            step()
        except ConfigurationError as error:
            report.refused += str(error).splitlines()
    if alone:
        report.note_decay("DeepSpeed (unless the program groups parameters)")
    return report


def _batch(values: Mapping[str, Any], report: Report, ranks: int | None) -> None:
    """Translate three batch sizes, of which DeepSpeed computes one. Raises ConfigurationError if they contradict."""
    total = whole_number(values, "train_batch_size")
    micro, steps = (
        whole_number(values, "train_micro_batch_size_per_gpu"),
        whole_number(values, "gradient_accumulation_steps"),
    )
    if total and micro and not steps and ranks and total % (micro * ranks) == 0:
        steps = total // (micro * ranks)
    if total and not micro and not steps and "train_micro_batch_size_per_gpu" not in " ".join(report.missing):
        steps = 1  # as DeepSpeed does
    if total and steps and not micro and ranks and total % (steps * ranks) == 0:
        micro = total // (steps * ranks)
        report.add("train_batch_size / gradient_accumulation_steps / ranks", "--micro-batch-size", str(micro))
    if total and steps and not micro and "train_micro_batch_size_per_gpu" not in " ".join(report.missing):
        report.missing.append(f"--micro-batch-size: {total} / {steps} / data-parallel ranks; give --ranks")
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
    """Translate the precision and its loss scale."""
    bf16, fp16 = is_on(values, "bf16.enabled") or is_on(values, "bfloat16.enabled"), is_on(values, "fp16.enabled")
    if bf16 and fp16:
        raise ConfigurationError("bf16.enabled and fp16.enabled contradict each other: turn one of them off")
    if bf16:
        report.add("bf16.enabled", "--bf16")
    if fp16:
        report.add("fp16.enabled", "--fp16")
        if values.get("fp16.loss_scale"):
            report.add("fp16.loss_scale", "--loss-scale", as_number("fp16.loss_scale", values["fp16.loss_scale"]))
            unused = ["fp16.initial_scale_power"] if "fp16.initial_scale_power" in values else []
            report.idle += [f"{key}: the loss scale is fixed" for key in unused]
        else:
            power = as_number(
                "fp16.initial_scale_power", values.get("fp16.initial_scale_power", 16), lambda n: 0 <= n < 64
            )
            dynamic = "fp16.loss_scale 0, " * ("fp16.loss_scale" in values)
            report.add(f"{dynamic}fp16.initial_scale_power {power}", "--initial-loss-scale", str(2 ** int(power)))
    dtype = str(values.get("communication_data_type") or "fp32").lower()
    if dtype in ("bf16", "bfp16", "bfloat16"):
        report.add("communication_data_type", "--grad-reduce-in-bf16")
    elif dtype not in ("fp32", "float32"):
        report.refused.append(f"communication_data_type {shown(dtype)}: gradients are reduced in fp32 or bf16")
    if str(values.get("data_types.grad_accum_dtype") or "fp32") not in ("fp32", "float32"):
        report.refused.append("data_types.grad_accum_dtype: gradients are accumulated in fp32; leave it out")


def _sharding(values: Mapping[str, Any], report: Report) -> None:
    """Translate the ZeRO stage and its options."""
    stage = values.get("zero_optimization.stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ConfigurationError(f"zero_optimization.stage is {shown(stage)}: expected 0, 1, 2 or 3")
    if stage:
        report.add(f"zero_optimization.stage {stage}", "--data-parallel-sharding-strategy", ZERO_STAGES[stage])
    if is_on(values, "zero_optimization.overlap_comm"):
        report.add("zero_optimization.overlap_comm", "--overlap-grad-reduce")
    if (size := values.get("zero_optimization.mics_shard_size", -1)) not in (-1, 0):
        report.refused.append(
            f"mics_shard_size {shown(size)}: use --num-distributed-optimizer-instances ranks / {size}"
        )


def _offloading(values: Mapping[str, Any], report: Report) -> None:
    """Translate what is on the host, and refuse what is on disks."""
    offloaded, stage = [], values.get("zero_optimization.stage", 0)
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        key, device = f"zero_optimization.offload_{part}", values.get(f"zero_optimization.offload_{part}.device")
        if is_on(values, before := f"zero_optimization.{old}"):
            key, device = before, "cpu"
        elif before in values:
            report.idle.append(f"{before} false: nothing is offloaded unless it is asked for")
        least = 3 if part == "param" else 1
        if device in ("none", None):
            continue
        if device != "cpu":
            report.refused.append(f'{key} to {shown(device)}: only the host\'s memory is offloaded to; give "cpu"')
        elif type(stage) is int and stage < least:
            report.idle.append(f"{key}: DeepSpeed offloads it from ZeRO {least} on")
        else:
            offloaded.append(part)
            report.add(f"{key} to cpu", "--parameter-offload" if part == "param" else "--optimizer-cpu-offload")
    ratio = "zero_optimization.offload_optimizer.ratio"
    if offloaded == ["param"]:
        report.add("the optimizer of parameters on the host", "--optimizer-cpu-offload")
        report.notes.append("weights on the host are updated there: the optimizer's state is there as well")
    elif "param" in offloaded and values.get(ratio, 1) != 1:
        report.notes.append(f"{ratio} {shown(values[ratio])}: weights on the host are updated there, all of them")
    elif offloaded and ratio in values:
        share = as_number(ratio, values[ratio], lambda number: 0 <= number <= 1)
        report.add(ratio, "--optimizer-offload-fraction", share)
    pinned = "zero_optimization.offload_optimizer.pin_memory"
    if "optimizer" in offloaded and not is_on(values, pinned, default=True):
        report.add(f"{pinned} false", "--no-pin-cpu-grads", "--no-pin-cpu-params")
    elif pinned in values:
        report.idle.append(f"{pinned}: what is on the host is page-locked unless --no-pin-cpu-grads says otherwise")


def _optimizer(values: Mapping[str, Any], report: Report, auto: Set[str]) -> None:
    """Translate the optimizer with its parameters, and refuse others than Adam, AdamW, SGD and Muon."""
    if "optimizer.type" in values:
        name = str(values["optimizer.type"])
        if name.lower() not in _OPTIMIZERS:
            report.refused.append(f"optimizer.type {shown(name)}: only Adam, AdamW, SGD and Muon are translated")
            return
        rule = _OPTIMIZERS[name.lower()]
        report.add(f"optimizer.type {name}", "--optimizer", rule)
        if not is_on(values, "optimizer.params.bias_correction", default=True):
            report.refused.append("optimizer.params.bias_correction false: moments are always corrected here")
        if not is_on(values, "optimizer.params.adam_w_mode", default=True):
            report.refused.append("optimizer.params.adam_w_mode false: weight decay does not enter the gradient here")
        if "optimizer.params.momentum" in values and rule != "adam":
            momentum = as_number("optimizer.params.momentum", values["optimizer.params.momentum"])
            report.add("optimizer.params.momentum", f"--{rule}-momentum", momentum)
        for key, (flag, value) in _defaults(rule, values).items():
            if f"optimizer.params.{key}" not in {*values, *auto}:
                report.add(f"optimizer.params.{key}, {_VERSION}", flag, value)
        if rule == "muon" and "optimizer.params.betas" not in {*values, *auto}:
            report.add(f"optimizer.params.betas, {_VERSION}", "--adam-beta1", "0.9", "--adam-beta2", "0.95")
    betas = values.get("optimizer.params.betas")
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise ConfigurationError(f"optimizer.params.betas is {shown(betas)}: expected two numbers")
        first, second = (as_number("optimizer.params.betas", beta) for beta in betas)
        report.add("optimizer.params.betas", "--adam-beta1", first, "--adam-beta2", second)


def _defaults(rule: str, values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the flags and values of what DeepSpeed takes for keys that a file does not have."""
    decay = "0.01" if rule == "adam" and is_on(values, "optimizer.params.torch_adam") else "0"
    found = {"weight_decay": ("--weight-decay", decay)}
    if rule != "muon" and values.get("scheduler.params.warmup_max_lr") is None:
        found["lr"] = ("--lr", "0.001")
    if rule == "muon":
        found |= {"eps": ("--adam-eps", "1e-10")}
    if rule != "adam":
        found["momentum"] = (f"--{rule}-momentum", "0" if rule == "sgd" else "0.95")
    return found


def _clipping(values: Mapping[str, Any], report: Report, auto: Set[str]) -> None:
    key = "optimizer.params.max_grad_norm"
    if key in values and "gradient_clipping" in values:
        report.idle.append(f"{key}: gradient_clipping is given")
    elif key in values:
        report.add(key, "--clip-grad", as_number(key, values[key]))
    elif auto.isdisjoint(("gradient_clipping", key)) and "gradient_clipping" not in values:
        report.add(f"gradient_clipping, {_VERSION} (earlier releases: 0)", "--clip-grad", "1")


def _schedule(values: Mapping[str, Any], report: Report, auto: Set[str]) -> None:
    """Translate the schedule of the learning rate, with DeepSpeed's defaults written out."""
    name = values.get("scheduler.type")
    if name is None:
        if "optimizer.type" in values and "scheduler.type" not in auto:
            report.add("no scheduler", "--lr-decay-style", "constant")
        return
    if not isinstance(name, str) or name not in _STYLES:
        report.refused.append(
            f"scheduler.type {shown(name)}: use --lr-decay-style (linear, cosine, constant, WSD, ...)"
        )
        return
    report.add(f"scheduler.type {name}", "--lr-decay-style", _STYLES[name])
    params = {key.rpartition(".")[2]: value for key, value in values.items() if key.startswith("scheduler.params.")}
    own = str(values.get("optimizer.type", "muon")).lower() != "muon" and "optimizer.params.lr" not in auto
    rate = values.get("optimizer.params.lr", 0.001 if own else None)
    if params.get("warmup_max_lr") is not None and name != "WarmupCosineLR":
        rate = params["warmup_max_lr"]
        report.add("scheduler.params.warmup_max_lr", "--lr", as_number("warmup_max_lr", rate))
    steps = 1000 if params.get("warmup_num_steps") is None else params["warmup_num_steps"]
    warmup = max(2, as_count("scheduler.params.warmup_num_steps", steps))
    if "scheduler.params.warmup_num_steps" not in auto:
        report.add("scheduler.params.warmup_num_steps (2 at least)", "--lr-warmup-iters", str(warmup))
    if params.get("warmup_type", "log") != "linear":
        half = math.log(warmup / 2 + 1) / math.log(warmup)
        report.changed.append(
            f"scheduler.params.warmup_type log -> linear: other rates until step {warmup}, such as 50 % of --lr in the "
            f"middle instead of {100 * half:.0f} %"
        )
    if (last := params.get("last_batch_iteration", -1)) != -1:
        report.refused.append(f"scheduler.params.last_batch_iteration {shown(last)}: a run begins at step 0; drop it")
    if name != "WarmupLR":
        if "scheduler.params.total_num_steps" in auto:
            pass
        elif (total := whole_number(params, "total_num_steps")) is None:
            report.missing.append("scheduler.params.total_num_steps: give --lr-decay-iters")
        else:
            report.add("scheduler.params.total_num_steps", "--lr-decay-iters", str(total))
    ratio = params.get("cos_min_ratio", 0.0001)
    if name == "WarmupDecayLR":
        report.add("the schedule's lowest rate", "--min-lr", as_number("warmup_min_lr", params.get("warmup_min_lr", 0)))
    elif rate is not None and name == "WarmupCosineLR":
        low = float(as_number("cos_min_ratio", ratio)) * float(as_number("lr", rate))
        report.add("the schedule's lowest rate", "--min-lr", as_number("cos_min_ratio", low))
    start = params.get("warmup_min_lr", 0)
    if name == "WarmupCosineLR" and rate is not None:
        start = float(as_number("warmup_min_ratio", params.get("warmup_min_ratio", 0))) * float(as_number("lr", rate))
    if start:
        report.add("the warm-up's first rate", "--lr-warmup-init", as_number("warmup_min_lr", start))


def _monitoring(values: Mapping[str, Any], report: Report) -> None:
    if is_on(values, "wall_clock_breakdown"):
        report.add("wall_clock_breakdown", "--timing-interval", str(whole_number(values, "steps_per_print") or 10))
    if is_on(values, "tensorboard.enabled"):
        parts = [str(values[key]) for key in ("tensorboard.output_path", "tensorboard.job_name") if values.get(key)]
        report.add("tensorboard", "--tensorboard-dir", "/".join(part.rstrip("/") for part in parts) or "tensorboard")


def _others(values: Mapping[str, Any], report: Report) -> None:
    idle, refused = by_key("idle"), by_key("refused")
    add_others(values, report, keys(), idle, refused)
