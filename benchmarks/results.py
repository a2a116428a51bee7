"""Where benchmarks leave what they measured: benchmarks/results/{name}.json, with the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = "torch", "triton", "numpy", "numba", "megatron-core", "liger-kernel"
RESULTS = Path(__file__).parent / "results"


def write_results(name: str, figures: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write the figures of a benchmark and say on what they were measured; the path written to."""
    result = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        **figures,
    }
    path = directory / f"{name}.json"
    directory.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
