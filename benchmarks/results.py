"""Files in which benchmarks leave what they measured: benchmarks/results/{name}.json, with machine and versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = "torch", "triton", "numpy", "megatron-core", "liger-kernel"
RESULTS = Path(__file__).parent / "results"


def write_results(name: str, figures: Mapping[str, Any], directory: Path = RESULTS, of: str = "") -> Path:
    """Write the figures of a benchmark and say on what they were measured; the path written to.

    `of`: what there is a file of its own for, such as a kind of GPU.
    """
    result = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        **figures,
    }
    path = directory / f"{name}{of and '_' + of}.json"
    directory.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of those that are installed, and None for others."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in found:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
