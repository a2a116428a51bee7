"""Programs of the published runs: which row is of which, and what is known of it that rows leave out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.config.kernels import KernelsConfig

_EAGER = KernelsConfig(  # norms are single kernels of torch
    bias_dropout_fusion=False,
    bias_gelu_fusion=False,
    bias_swiglu_fusion=False,
    rope_fusion=False,
    cross_entropy_loss_fusion=False,
)


@dataclass(frozen=True)
class Program:
    """Facts about the program of a source.

    Attributes:
        lineage: true for Megatron-LM and what was made from it.
        parallel, training: fields of these sections that rows leave out.
    """

    lineage: bool = True
    parallel: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    kernels: KernelsConfig = KernelsConfig()  # noqa: RUF009


_HALF = {"grad_reduce_in_bf16": True}
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_NO_OVERLAP = {"overlap_p2p_communication": False}
_MODERN = Program(parallel=_OVERLAP | _HALF)
PROGRAMS: Mapping[str, Program] = {
    "megatron-2020": Program(parallel=_HALF),
    "megatron-2021": Program(parallel=_NO_OVERLAP),
    "megatron-2022": Program(parallel=_NO_OVERLAP),
    "megatron-core": Program(parallel=_OVERLAP),
    "megatron-deepspeed-2022": Program(parallel=_NO_OVERLAP),
    "megatron-deepspeed-2023": Program(parallel=_NO_OVERLAP),
    "zero-bubble": Program(parallel=_NO_OVERLAP),
    "nemo-2023": Program(parallel=_OVERLAP, training={"recompute_granularity": "selective"}),
    "nemo-2024": _MODERN,
    "mlperf": _MODERN,
    "bridge": _MODERN,
    "bridge-experts": _MODERN,
    "bridge-experts-2026": _MODERN,
    "bridge-experts-padded": _MODERN,
    "core-experts": _MODERN,
    "core-deepep": _MODERN,
    "titan-eager": Program(False, kernels=_EAGER),
    "titan-compile": Program(False),
    "titan-async": Program(False),
    "llm-foundry": Program(False, parallel=_HALF, kernels=_EAGER),
    "internevo": Program(False, parallel=_HALF),
    "nanotron": Program(False, parallel=_NO_OVERLAP, kernels=_EAGER),
    "pax": Program(False, parallel=_OVERLAP | _HALF),
    "pax-te": Program(False, parallel=_OVERLAP | _HALF),
}
_OF_SOURCE = (
    ("Megatron-LM 2020", "megatron-2020"),
    ("Jan-2021", "megatron-2021"),
    ("SC21", "megatron-2021"),
    ("README GPT-3 example", "megatron-2021"),
    ("Reducing Activation", "megatron-2022"),
    ("README H100 model table", "megatron-core"),
    ("bigscience", "megatron-deepspeed-2022"),
    ("vTrain", "megatron-deepspeed-2023"),
    ("Zero Bubble", "zero-bubble"),
    ("NeMo-Megatron-Launcher", "nemo-2023"),
    ("NeMo ", "nemo-2024"),
    ("MLPerf", "mlperf"),
    ("llm-foundry", "llm-foundry"),
    ("InternEvo", "internevo"),
    ("nanotron", "nanotron"),
)


_OF_2026 = (26, 2, 1)
"""First release of Megatron-Bridge that trains experts as that of 2026."""


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def program_of(row: Mapping[str, str]) -> str:
    """Return the name of the program of a row."""
    source, note = row["source"], row["note"]
    for part, program in _OF_SOURCE:
        if part in source:
            return program
    if "torchtitan" in source:
        if "Async" in note or row["tp"] not in ("1.0", ""):
            return "titan-async"
        return "titan-compile" if "compile" in note or row["precision"] == "fp8" else "titan-eager"
    if "JAX" in source:
        return "pax-te" if "TE" in row["precision"] else "pax"
    if "ModelZoo" in source:
        return "core-deepep" if "DeepEP" in note else "core-experts"
    if "Bridge" in source:
        if not row["experts"]:
            return "bridge"
        if "tokendrop" in row["model"]:
            return "bridge-experts-padded"
        release = re.search(r"release (\d+(?:\.\d+)+)", source)
        if release is None:
            raise ValueError("the release of its program is unknown")
        return "bridge-experts-2026" if _numbers(release[1]) >= _OF_2026 else "bridge-experts"
    raise ValueError("its program is unknown")
