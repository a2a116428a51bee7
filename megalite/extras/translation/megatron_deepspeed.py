"""Translation of the flags that Megatron-DeepSpeed has beside Megatron-LM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite.errors import ConfigurationError
from megalite.extras.translation.dialects import MEGATRON_DEEPSPEED, own_words, translated
from megalite.extras.translation.report import Report

_TOKENS = {"train-tokens": "train", "lr-decay-tokens": "lr-decay", "lr-warmup-tokens": "lr-warmup"}
_TOGETHER = (
    "expert-interval",
    "topk",
    "moe-loss-coeff",
    "moe-train-capacity-factor",
    "disable-moe-token-dropping",
    "disable-moe-top2-2nd-expert-sampling",
)
"""Flags of layers with experts that `_add_experts` translates together."""


def add_megatron_deepspeed(argv: Sequence[str], report: Report) -> list[str]:
    """Report on Megatron-DeepSpeed's own flags, and return the others, which are Megatron-LM's.

    A command without any of them is returned as it is.
    """
    groups, own = report.last_of_each(argv), own_words(MEGATRON_DEEPSPEED)
    if own.isdisjoint(groups):
        return list(argv)
    rest: list[str] = []
    experts = groups.get("num-experts", ["1"]) != ["1"]
    counted = {f"{_TOKENS[flag]}-{unit}" for flag in groups.keys() & _TOKENS for unit in ("iters", "samples")}
    for flag, values in groups.items():
        given = " ".join([f"--{flag}", *values])
        if any(f"--{flag} needs " in line.replace("_", "-") for line in report.missing):  # its value is not known yet
            rest += [f"--{flag}", *values] if flag not in own else []
        elif flag in ("deepspeed-config", "deepscale-config"):
            report.notes.append(
                f"{given}: a file of its own, which is not read here; DeepSpeed trains with its ZeRO stage, precision, "
                "clipping and batch sizes: megalite-translate translates it"
            )
        elif flag in _TOKENS:
            also = [f"--{each} {' '.join(groups[each])}" for each in sorted(counted) if each in groups]
            also = [each for each in also if each.startswith(f"--{_TOKENS[flag]}-")]
            try:
                report.add(", ".join([given, *also]), *_from_tokens(flag, values, groups))
            except ConfigurationError as error:
                report.refused.append(str(error))
        elif flag in (*_TOGETHER, "num-experts", "moe-expert-parallel-size") and not experts:
            report.idle.append(f"--{flag}: no layer has experts")
        elif flag not in (*_TOGETHER, *counted) and not translated(MEGATRON_DEEPSPEED, flag, values, given, report):
            rest += [f"--{flag}", *values] if flag else values
    if experts:
        _add_experts(groups, report)
    return rest


def _from_tokens(flag: str, values: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the flag that counts samples, or steps in a run of steps, for one that counts tokens.

    Raises ConfigurationError if a number is missing or is none.
    """
    by_steps = "train-iters" in groups
    length = _count("seq-length", groups) * (_count("global-batch-size", groups) if by_steps else 1)
    counted, unit = -(-_count(flag, {flag: values}) // length), "iters" if by_steps else "samples"
    if flag == "train-tokens" and f"train-{unit}" in groups:  # the first limit that is reached ends the run
        counted = min(counted, _count(f"train-{unit}", groups))
    return [f"--{_TOKENS[flag]}-{unit}", str(counted)]


def _count(flag: str, groups: Mapping[str, Sequence[str]]) -> int:
    """Return the whole number above 0 of a flag. Raises ConfigurationError if there is none."""
    text = " ".join(groups.get(flag, ()))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text)):
        raise ConfigurationError(
            f"--{flag} {text[:100] or 'is missing'}: a whole number above 0 is needed to count tokens"
        )
    return int(text)


def _add_experts(groups: Mapping[str, Sequence[str]], report: Report) -> None:
    """Add the flags of layers with experts, with DeepSpeed's defaults written out."""
    choices = " ".join(groups.get("topk", ["1"]))
    report.add(f"--topk {choices}", "--moe-router-topk", choices)
    if choices == "1":
        report.add("an expert's output times its share of all experts", "--moe-router-pre-softmax")
    elif "disable-moe-top2-2nd-expert-sampling" not in groups:
        report.notes.append("DeepSpeed draws the second expert at random, here it is the one with the second score")
    coefficient = " ".join(groups.get("moe-loss-coeff", ["0.1"]))
    report.add(
        f"--moe-loss-coeff {coefficient}",
        "--moe-router-load-balancing-type",
        "aux_loss",
        "--moe-aux-loss-coeff",
        coefficient,
    )
    if "disable-moe-token-dropping" not in groups:
        factor = " ".join(groups.get("moe-train-capacity-factor", ["1.0"]))
        report.add(f"--moe-train-capacity-factor {factor}", "--moe-expert-capacity-factor", factor)
    try:
        layers = _count("num-layers", groups)
        interval = _count("expert-interval", {"expert-interval": groups.get("expert-interval", ["2"])})
    except ConfigurationError as error:
        report.refused.append(str(error).partition(":")[0] + ": needed to say which layers have experts")
        return
    dense, left = interval - 1, layers % interval
    pattern = f"([0]*{dense}+[1])*{layers // interval}" if dense else f"[1]*{layers}"
    report.add(
        f"--expert-interval {interval}", "--moe-layer-freq", f"({pattern}+[0]*{left})" if left else f"({pattern})"
    )
