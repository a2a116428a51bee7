"""Comparison of the ranks' configuration, software and environment, to name those that differ."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

import megalite
import megalite_kernels
from megalite.config import RunConfig
from megalite.doctor.findings import Finding, Severity
from megalite.process.place import ranks_text

Traits = dict[str, dict[str, str]]
"""Traits of a rank, by kind (a key of `_KINDS`) and name; without flags if there is no run, or the flags are wrong."""

_KINDS: Mapping[str, Severity] = {"flag": "wrong", "software": "sick", "environment": "warning"}
_MATTERS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "UCX_", "PYTHON", "MEGALITE_")
_DIFFERS_ANYWAY = ("CUDA_VISIBLE_DEVICES", "MEGALITE_EXIT_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NOTHING = "nothing"


def traits(config: RunConfig | None, device: torch.device) -> Traits:
    """Return the traits of this rank."""
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(_MATTERS) and name not in _DIFFERS_ANYWAY
    }
    return _flags(config) | {"software": _software(device), "environment": environment}


def _flags(config: RunConfig | None) -> Traits:
    if config is None:
        return {}
    named = (item for section in asdict(config).values() for item in section.items())
    return {"flag": {f"--{name.replace('_', '-')}": str(value) for name, value in named}}


def _software(device: torch.device) -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else NOTHING
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "NCCL": nccl,
        "megalite's files": f"{_digest(megalite, megalite_kernels):08x}",
        "GPUs seen by torch": str(torch.cuda.device_count()),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOTHING


def _digest(*packages: ModuleType) -> int:
    """Return a checksum of all source files, since two checkouts have one version."""
    digest = 0
    for folder in (Path(package.__path__[0]) for package in packages):
        for path in sorted(folder.rglob("*.py")):
            digest = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(folder)).encode(), digest))
    return digest


def disagreements(traits: Mapping[int, Traits], nodes: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Yield the differences between ranks of the `nodes`. The majority is taken to be right or, without one, the first
    rank.

    `traits`: by rank, of the ranks that have answered, in rising order.
    """
    for kind, severity in _KINDS.items():
        having = {rank: each[kind] for rank, each in traits.items() if kind in each}
        for name in sorted({name for each in having.values() for name in each}):
            values = {rank: each.get(name, NOTHING) for rank, each in having.items()}
            common = statistics.mode(values.values())
            others = "rank 0" if common == values.get(0) else "most others"
            for node, ranks in nodes.items():
                for value in dict.fromkeys(values[rank] for rank in ranks if rank in values):
                    if value != common:
                        odd = ranks_text(rank for rank in ranks if values.get(rank) == value)
                        yield Finding(severity, f"{name} is {value!r} on {odd}, {common!r} on {others}", node)
