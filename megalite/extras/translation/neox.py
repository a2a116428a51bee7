"""Translation of GPT-NeoX's settings: Megatron-LM's flags, DeepSpeed's keys, and words of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalite.errors import ConfigurationError
from megalite.extras.translation import deepspeed
from megalite.extras.translation.dialects import NEOX, own_words, words_of
from megalite.extras.translation.keys import as_count, as_number, is_deepspeeds, is_on, keys
from megalite.extras.translation.report import Report
from megalite.extras.translation.yaml_settings import as_flag
from megalite.small_files import shown

_DEFAULTS = {
    "warmup": ("--lr-warmup-fraction", "0.01"),
    "lr_decay_style": ("--lr-decay-style", "linear"),
    "hidden_dropout": ("--hidden-dropout", "0"),
    "attention_dropout": ("--attention-dropout", "0"),
}
"""Flags and values of keys whose default is not Megatron-LM's."""
_GATED = ("swiglu", "geglu")


def has_keys_of_neox(settings: Mapping[str, Any]) -> bool:
    """Tell whether a mapping has a key that only GPT-NeoX has."""
    return any(not is_deepspeeds(key) and key.replace("_", "-") in own_words(NEOX) for key in settings)


def translate(settings: Mapping[str, Any], ranks: int | None) -> Report:
    """Return the flags that settings stand for.

    Args:
        ranks: number of all ranks, if it is known.

    Raises:
        ConfigurationError: the ranks cannot be divided as the settings say.
    """
    values = {name.replace("-", "_"): value for name, value in settings.items()}
    parts = [as_count(name, values.get(name) or 1) for name in ("pipe_parallel_size", "model_parallel_size")]
    if ranks is not None and ranks % math.prod(parts):
        raise ConfigurationError(f"--ranks {ranks}: not a multiple of {math.prod(parts)}, the ranks of one model")
    copies = None if ranks is None else ranks // math.prod(parts)
    idle: list[str] = []
    report = deepspeed.translate(_of_deepspeed(values, idle), copies, alone=False)
    report.idle += idle
    for step in (_add_layers, _add_initial_weights, _add_data):
        try:
            step(values, report)
        except ConfigurationError as error:
            report.refused += str(error).splitlines()
    for name, value in values.items():
        if name == "scheduler":
            report.refused.append("scheduler: lr_decay_style, warmup, lr_decay_iters and min_lr are what is translated")
        elif not is_deepspeeds(name) and words_of(NEOX).get(name.replace("_", "-"), ("", ""))[0] != "read":
            report.add_megatron(as_flag(name, value, {}, report, NEOX))
    for name, (flag, value) in _DEFAULTS.items():
        if name not in values and "num_layers" in values:
            report.add(f"{name}, GPT-NeoX's default", flag, value)
    if values.get("lr_decay_style", "linear") == "linear" and values.get("min_lr"):
        report.notes.append("min_lr: GPT-NeoX decays to 0 and stops at it; here the line ends at it")
    return report


def _of_deepspeed(values: Mapping[str, Any], idle: list[str]) -> dict[str, Any]:
    """Return the keys of DeepSpeed, with what GPT-NeoX passes to it, and add to `idle` those that do not reach it."""
    found = {name: value for name, value in values.items() if is_deepspeeds(name) and name != "scheduler"}
    for name in ("fp16", "bf16"):
        if isinstance(section := found.get(name), Mapping):
            own = "bf16" if section.get("type") == "bfloat16" else name
            unused = [key for key in section if own == "bf16" and key != "enabled" and f"fp16.{key}" in keys()]
            idle += [f"{name}.{key}: bf16 has no loss scale" for key in unused]
            del found[name]
            kinds = [key for key in ("type", "fp16", "bf16") if key in section]
            idle += [f"{name}.{key}: the kind of number, beside enabled" for key in kinds]
            dropped = {*kinds, *unused}
            found[own] = {key: value for key, value in section.items() if key not in dropped}
    if "train_micro_batch_size_per_gpu" in found and "train_batch_size" not in found:
        found.setdefault("gradient_accumulation_steps", 1)
    optimizer = found.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(parameters := optimizer.get("params", {}), Mapping):
        decay = {"weight_decay": values.get("weight_decay", 0.1)}
        found["optimizer"] = {**optimizer, "params": {**parameters, **decay}}
    return found


def _add_layers(values: Mapping[str, Any], report: Report) -> None:
    """Translate what several keys say together of a layer. Raises ConfigurationError if it cannot be."""
    if "weight_decay" in values and not isinstance(values.get("optimizer"), Mapping):
        report.add("weight_decay", "--weight-decay", as_number("weight_decay", values["weight_decay"]))
    kinds = set(_names(values.get("attention_config")))
    if kinds - {"flash", "global"}:
        report.refused.append(f"attention_config {shown(values['attention_config'])}: flash or global alone")
    elif kinds:
        report.idle.append("attention_config: attention runs through torch's fused kernels")
    biases = [is_on(values, f"use_bias_in_{part}", default=True) for part in ("attn_linear", "mlp")]
    if not any(biases):
        report.add("use_bias_in_attn_linear, use_bias_in_mlp", "--disable-bias-linear")
    elif not all(biases):
        report.refused.append(
            "use_bias_in_attn_linear, use_bias_in_mlp: attention and MLP both have biases, or none has"
        )
    if "hidden_size" not in values:
        unused = (
            "intermediate_size expansion_factor mlp_multiple_of bias_gelu_fusion layernorm_epsilon rms_norm_epsilon"
        )
        report.refused += [f"{name}: needs hidden_size beside it" for name in unused.split() if name in values]
        return
    activation = values.get("activation", "gelu")
    if activation == "gelu" and not is_on(values, "bias_gelu_fusion"):
        given = "bias_gelu_fusion false" if "bias_gelu_fusion" in values else "gelu, which is exact unless it is fused"
        report.add(given, "--exact-gelu")
    elif "bias_gelu_fusion" in values:
        report.idle.append("bias_gelu_fusion: GELU is in its tanh form if it is on, and no other activation changes")
    name, usual = ("rms_norm_epsilon", 1e-8) if values.get("norm") == "rmsnorm" else ("layernorm_epsilon", 1e-5)
    report.add(name, "--norm-epsilon", as_number(name, values.get(name, usual)))
    report.idle += [
        f"{other}: of another norm"
        for other in ("rms_norm_epsilon", "layernorm_epsilon")
        if other in values and other != name
    ]
    hidden, multiple = (as_count(key, values.get(key, 1), least=1) for key in ("hidden_size", "mlp_multiple_of"))
    size = values.get("intermediate_size")
    if size is None:
        factor = values.get("expansion_factor")
        size = 4 * hidden if factor is None else int(float(as_number("expansion_factor", factor)) * hidden)
    size = as_count("intermediate_size", size, least=1)
    if activation in _GATED:
        size = int(size * 2 / 3) // 2
    report.add("intermediate_size, as GPT-NeoX rounds it", "--ffn-hidden-size", str(-(-size // multiple) * multiple))


def _names(value: Any) -> list[str]:
    """Return the texts in nested lists, and any other value but numbers as one."""
    if isinstance(value, list):
        return [name for each in value for name in _names(each)]
    return [] if value is None or isinstance(value, int) else [str(value)]


def _add_initial_weights(values: Mapping[str, Any], report: Report) -> None:
    """Translate the spread of the initial weights. Raises ConfigurationError for forms that are not available."""
    form, last = values.get("init_method", "normal"), values.get("output_layer_init_method", "scaled_normal")
    spread = values.get("init_method_std")
    if form == "small_init" and "hidden_size" in values:
        spread = math.sqrt(2 / (5 * as_count("hidden_size", values["hidden_size"], least=1)))
    elif form != "normal":
        raise ConfigurationError(f"init_method {shown(form)}: not available; --init-method-std is that of all weights")
    if spread is not None:
        report.add(f"init_method {form}", "--init-method-std", as_number("init_method_std", spread))
    if last != "scaled_normal" or form != "normal":
        report.notes.append(
            f"output_layer_init_method {shown(last)}: the weights of the last layers of attention and MLP begin with "
            "--init-method-std / sqrt(2 x --num-layers) here"
        )


def _add_data(values: Mapping[str, Any], report: Report) -> None:
    """Translate paths and their weights. Raises ConfigurationError if they do not match."""
    if isinstance(vocabulary := values.get("vocab_file"), str):
        in_one_file = values.get("tokenizer_type") in ("HFTokenizer", "SPMTokenizer")
        report.add("vocab_file", "--tokenizer-model" if in_one_file else "--vocab-file", vocabulary)
    elif vocabulary is not None:
        raise ConfigurationError(f"vocab_file is {shown(vocabulary)}: expected a path")
    for part in ("train", "valid", "test"):
        paths, weights = values.get(f"{part}_data_paths"), values.get(f"{part}_data_weights")
        if paths is None and weights is None:
            continue
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise ConfigurationError(f"{part}_data_paths is {shown(paths)}: expected a list of paths")
        if weights is not None and (not isinstance(weights, list) or len(weights) != len(paths)):
            raise ConfigurationError(f"{part}_data_weights is {shown(weights)}: expected one weight for each path")
        numbers = [as_number(f"{part}_data_weights", weight) for weight in weights or ()]
        words = [word for pair in zip(numbers, paths, strict=True) for word in pair] if numbers else paths
        report.add(f"{part}_data_paths", f"--{part}-data-path", *words)
