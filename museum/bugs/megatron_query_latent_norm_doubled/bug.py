from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from unittest import mock

from museum.networks import LATENTS, SIZES, TP

FLAGS = f"{SIZES} {LATENTS} {TP} --global-batch-size 4"
RANKS = 2
OTHER_BUG = Path(__file__).parents[1] / "megatron_rotated_key_of_own_heads" / "bug.py"


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    """Mend the other bug that the program has here."""
    with run_path(str(OTHER_BUG))["right"]():
        yield


@contextlib.contextmanager
def right() -> Iterator[None]:
    summed = "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"
    with wrong(), mock.patch(summed):
        yield
