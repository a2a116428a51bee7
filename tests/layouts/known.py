"""Differences of other programs that are known: accusations of them are counted apart, and never hidden."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megalite.extras.verify.verdict import Verdict
from tests.layouts.draws import Draw


@dataclass(frozen=True)
class Known:
    """A difference that all of a program's runs of some kind have.

    Attributes:
        when: which draws have it.
        accused: pattern for what is accused then, "ROLE NAME" of each tensor and "figure NAME" of each figure; a draw
            of which more is accused is not explained.
        what: what is wrong, in a line.
        where: where it is told.
    """

    program: str
    when: Callable[[Draw], bool]
    accused: str
    what: str
    where: str
    first: str = ""
    """Pattern in the name of the first tensor that is accused."""


def _tp(draw: Draw) -> int:
    return int(draw.flags.get("tensor-model-parallel-size", 1))


_GRADIENTS = r"\w*gradient .*|figure grad_norm"
KNOWN: tuple[Known, ...] = (
    Known(
        "megatron",
        lambda draw: "multi-latent-attention" in draw.flags and _tp(draw) > 1,
        _GRADIENTS,
        "gradients of the rotated key, which all heads share, are of each rank's heads alone, and without sequence "
        "parallelism that of q_layernorm is summed once too often",
        "docs/upstream.md",
        r"self_attention|input_layernorm",
    ),
    Known(
        "megatron",
        lambda draw: draw.flags.get("softmax-type") == "learnable" and _tp(draw) > 1,
        r"figure grad_norm",
        "sinks of other ranks are not in the norm of the gradient",
        "NVIDIA/Megatron-LM#7452, finding 8",
    ),
    Known(
        "megatron",
        lambda draw: {"moe-z-loss-coeff", "bf16"} <= draw.flags.keys() and "moe-router-dtype" not in draw.flags,
        _GRADIENTS,
        "the z-loss of routers is computed in bf16, where the roundings of the factors that all tokens share add up",
        "docs/upstream.md",
    ),
)


def known(draw: Draw, verdict: Verdict) -> Known | None:
    """Return the known difference that explains all that a verdict accuses; None if none does."""
    accused = [f"{each.entry.role} {each.entry.name}" for each in verdict.judgements if each.differs]
    accused += [f"figure {each.name}" for each in verdict.figures if each.differs]
    for each in KNOWN:
        of_draw = bool(accused) and each.program == draw.program and each.when(draw)
        first = verdict.first
        is_there = first is None or re.search(each.first, first.entry.name) is not None
        if of_draw and is_there and all(re.fullmatch(each.accused, name) for name in accused):
            return each
    return None
