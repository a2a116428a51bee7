"""Run a baseline: `torchrun ... -m benchmarks.recovery_baselines NAME --directory DIR`.

The baseline is a module of its own, so that faults can be planted in its functions.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("name", choices=("dcp", "replicas"))
parser.add_argument("--directory", type=Path, required=True)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--save-interval", type=int, default=3)
parser.add_argument("--step-seconds", type=float, default=0.0, help="added to each step")
arguments = parser.parse_args()
importlib.import_module(f"benchmarks.recovery_baselines.{arguments.name}").main(arguments)
