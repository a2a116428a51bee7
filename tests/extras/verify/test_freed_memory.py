"""Memory of large tensors is used again in a replay, instead of new pages for each."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extra

PROGRAM = """
import resource, sys, torch
from megalite.extras.verify.replay import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
torch.zeros(16 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.zeros(16 << 20)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_used_again() -> None:
    assert faults("kept") < faults("returned") / 10
