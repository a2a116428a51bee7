"""Here kernels run in the interpreter, on CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from megalite_kernels.implementation import Kernels, current, use

if sys.platform == "linux":
    from tests.kernels.interpreter import hardened
else:  # Triton exists for Linux alone
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreted_kernels() -> Iterator[None]:
    before = current()
    use(Kernels("triton"))
    with hardened():
        yield
    use(before)
