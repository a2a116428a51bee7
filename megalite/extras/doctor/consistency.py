"""Comparison of the ranks' configuration, software and environment, and of the nodes' data, to name those that differ.

Where they differ, the majority is taken to be right.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import megalite
import megalite_kernels
from megalite.config import DataConfig, RunConfig
from megalite.data.dataset_spec import read_dataset_specs
from megalite.data.indexed_dataset import bin_path, idx_path
from megalite.extras.doctor.findings import Finding, Severity
from megalite.process.place import ranks_text
from megalite.small_files import open_regular, reason

Traits = dict[str, dict[str, str]]
"""Traits of a rank, by kind (a key of `_KINDS`) and name; without flags if there is no run, or the flags are wrong."""

_KINDS: Mapping[str, Severity] = {"flag": "wrong", "software": "sick", "environment": "warning"}
_MATTERS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "UCX_", "PYTHON", "MEGALITE_")
_DIFFERS_ANYWAY = ("CUDA_VISIBLE_DEVICES", "MEGALITE_EXIT_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_END = 2**20
NOTHING, MISSING = "nothing", "missing"


def traits(config: RunConfig | None, device: torch.device) -> Traits:
    """Return the traits of this rank."""
    found = {
        "software": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else NOTHING,
            "megalite's files": f"{_digest():08x}",
            "GPUs seen by torch": str(torch.cuda.device_count()),
        },
        "environment": {
            name: each for name, each in os.environ.items() if name.startswith(_MATTERS) and name not in _DIFFERS_ANYWAY
        },
    }
    if config is not None:
        named = (item for section in asdict(config).values() for item in section.items())
        found["flag"] = {f"--{name.replace('_', '-')}": str(value) for name, value in named}
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOTHING


def _digest() -> int:
    """Return a checksum of all source files, since two checkouts have one version."""
    digest = 0
    for folder in (Path(package.__path__[0]) for package in (megalite, megalite_kernels)):
        for path in sorted(folder.rglob("*.py")):
            digest = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(folder)).encode(), digest))
    return digest


def disagreements(traits: Mapping[int, Traits], nodes: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Yield the differences between ranks of the `nodes`; without a majority the first rank is taken to be right.

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


def fingerprints(data: DataConfig) -> dict[str, str]:
    """Return a fingerprint of each file that the run reads, or why the file cannot be read.

    The fingerprint is the size and a hash of the first and last MiB, which include the headers. Raises DataError if a
    file that names the files cannot be read.
    """
    named = (Path(name) for name in (data.tokenizer_model, data.vocab_file, data.merge_file) if name is not None)
    paths = [path / "tokenizer.json" if path.is_dir() else path for path in named]
    for part in () if data.mock_data else read_dataset_specs(data):
        for prefix in part.prefixes if part is not None else ():
            paths += (Path(prefix),) if data.sft or data.preference_data else (idx_path(prefix), bin_path(prefix))
    return {str(path): _fingerprint(path) for path in dict.fromkeys(paths)}


def _fingerprint(path: Path) -> str:
    """Return the size of a file and a checksum of its two ends, or why there is none."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256()
            for start in (0, max(size - _END, 0)):
                file.seek(start)
                digest.update(file.read(_END))
    except FileNotFoundError:
        return MISSING
    except (OSError, ValueError) as error:
        return f"not readable ({reason(error)})"
    return f"of {size:,} bytes ({digest.hexdigest()[:8]})"


def examine_data(nodes: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield the faults, given the fingerprints that each node has found."""
    for path in sorted({path for prints in nodes.values() for path in prints}):
        prints = {node: found.get(path, MISSING) for node, found in nodes.items()}
        if set(prints.values()) == {MISSING}:
            yield Finding("wrong", f"{path} is missing on all nodes")
            continue
        right = statistics.mode(value for value in prints.values() if value != MISSING)
        for node, found in prints.items():
            if found != right:
                yield Finding("sick", f"{path} is {found}, but on other nodes {right}", node)
