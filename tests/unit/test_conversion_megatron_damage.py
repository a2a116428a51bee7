"""What is damaged or no checkpoint in a folder of Megatron-LM's is named."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalite.conversion.megatron import open_megatron
from megalite.errors import CheckpointError
from tests.unit.test_conversion_megatron import GPT2, random_model, read, write

TRACKER = "latest_checkpointed_iteration.txt"


def cut_off(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 3000)


def other_values_described(folder: Path) -> None:
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes().replace(b"decoder", b"decoded"))


def outside(folder: Path) -> None:
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes().replace(b"__0_0.d", b"../_0.d"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"__0_0.distcp cannot be read"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0.distcp cannot be read: No such file"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), r".metadata cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})), "does not describe a checkpoint"),
        (outside, r"names .*_0.distcp, which is not in its folder"),
        (other_values_described, "which the network that its arguments describe has not"),
        (lambda folder: (folder / "metadata.json").unlink(), "torch_dcp or fsdp_dtensor"),
        (lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "has the format zarr"),
        (lambda folder: (folder / "common.pt").unlink(), r"common.pt cannot be read"),
        (lambda folder: torch.save({}, folder / "common.pt"), "does not hold the arguments"),
        (lambda folder: (folder / ".metadata").unlink(), "has no file of the first rank"),
        (lambda folder: (folder.parent / TRACKER).write_text("12"), "names '12', which is no checkpoint there"),
        (lambda folder: (folder.parent / TRACKER).unlink(), "has no latest_checkpointed_iteration.txt"),
    ],
)
def test_what_is_damaged_is_named(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    damage(write(random_model(GPT2), tmp_path))
    with pytest.raises(CheckpointError, match=message):
        read(open_megatron(tmp_path))
