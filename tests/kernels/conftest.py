"""Here kernels run in the interpreter, on CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from megalite_kernels.implementation import choose, chosen

if sys.platform == "linux":
    from tests.kernels.interpreter import hardened
else:  # Triton exists for Linux alone
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreted_kernels() -> Iterator[None]:
    before = chosen()
    choose("triton")
    with hardened():
        yield
    choose(before)
