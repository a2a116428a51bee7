"""Figures of the device that a rank computes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megalite.parallel.device import peak_memory_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_peak_of_memory_is_in_bytes() -> None:
    """The system counts it in pages of a few processors at a time: hence the tolerance."""
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(peak, rel=0.005)
