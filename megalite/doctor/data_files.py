"""Check that every node has the data, and that all have the same."""

from __future__ import annotations

import hashlib
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from megalite.config import DataConfig
from megalite.data.dataset_spec import read_dataset_specs
from megalite.data.indexed_dataset import bin_path, idx_path
from megalite.doctor.findings import Finding
from megalite.small_files import open_regular, reason

_END = 2**20
MISSING = "missing"


def fingerprints(data: DataConfig) -> dict[str, str]:
    """Return a fingerprint of each file that the run reads, or why the file cannot be read.

    The fingerprint is the size and a hash of the first and last MiB, which include the headers. Raises DataError if a
    file that names the files cannot be read.
    """
    return {str(path): _fingerprint(path) for path in dict.fromkeys(_files(data))}


def _files(data: DataConfig) -> Iterator[Path]:
    for name in (data.tokenizer_model, data.vocab_file, data.merge_file):
        if name is not None:
            yield Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if data.mock_data:
        return
    for part in read_dataset_specs(data):
        for prefix in part.prefixes if part is not None else ():
            yield from (Path(prefix),) if data.sft else (idx_path(prefix), bin_path(prefix))


def _fingerprint(path: Path) -> str:
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
                yield Finding("sick", f"{path} is {found}, and on other nodes {right}", node)
