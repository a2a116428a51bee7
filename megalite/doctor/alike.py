"""Whether all ranks have the same configuration, software and environment, and which one differs.

Rank 0 tells what it has, and the others only where they have something else.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import megalite
from megalite.config import RunConfig
from megalite.doctor.findings import Finding, Severity

Traits = dict[str, dict[str, str]]
"""What a rank has, by kind (a key of `_KINDS`) and name."""

_KINDS: Mapping[str, Severity] = {"flag": "wrong", "software": "sick", "environment": "warning"}
_MATTERS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "UCX_", "PYTHON", "MEGALITE_")
_DIFFERS_ANYWAY = ("CUDA_VISIBLE_DEVICES", "MEGALITE_EXIT_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NOTHING = "nothing"


def traits(config: RunConfig | None, device: torch.device) -> Traits:
    """What this rank has."""
    sections = {} if config is None else asdict(config)
    flags = {f"--{name.replace('_', '-')}": value for fields in sections.values() for name, value in fields.items()}
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(_MATTERS) and name not in _DIFFERS_ANYWAY
    }
    return {
        "flag": {name: str(value) for name, value in flags.items()},
        "software": _software(device),
        "environment": environment,
    }


def _software(device: torch.device) -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else NOTHING
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "NCCL": nccl,
        "megalite's files": f"{_digest(Path(megalite.__path__[0])):08x}",
        "GPUs seen by torch": str(torch.cuda.device_count()),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOTHING


def _digest(folder: Path) -> int:
    """Of all source files, since two checkouts have one version."""
    digest = 0
    for path in sorted(folder.rglob("*.py")):
        digest = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(folder)).encode(), digest))
    return digest


def differences(own: Traits, reference: Traits) -> Traits:
    """What this rank has otherwise than rank 0."""

    def between(own: Mapping[str, str], reference: Mapping[str, str]) -> dict[str, str]:
        names = own.keys() | reference.keys()
        return {name: own.get(name, NOTHING) for name in names if own.get(name) != reference.get(name)}

    return {kind: between(own[kind], reference[kind]) for kind in _KINDS}


def disagreements(
    reference: Traits, differing: Mapping[int, Traits], nodes: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    """What is not the same on all ranks of the `nodes`; most of them are right, and where there is no most, rank 0.

    `differing`: of each rank that has answered, what differs from rank 0.
    """
    for kind, severity in _KINDS.items():
        for name in sorted({name for traits in differing.values() for name in traits[kind]}):
            first = reference[kind].get(name, NOTHING)
            values = {rank: traits[kind].get(name, first) for rank, traits in differing.items()}
            common = _most_common(values)
            for node, ranks in nodes.items():
                for value in dict.fromkeys(values[rank] for rank in ranks if rank in values):
                    if value == common:
                        continue
                    odd = [rank for rank in ranks if values.get(rank) == value]
                    others = "rank 0" if common == first else "most others"
                    text = f"{name} is {value!r} on {in_words(odd)}, {common!r} on {others}"
                    yield Finding(severity, text, node)


def _most_common(values: Mapping[int, str]) -> str:
    """Counter keeps the order of ranks among equals."""
    return Counter(values[rank] for rank in sorted(values)).most_common(1)[0][0]


def in_words(ranks: Sequence[int]) -> str:
    """Ranks in rising order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
