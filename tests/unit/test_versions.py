"""Promises of docs/versions.md on files of other versions, and the numbers that it names."""

from __future__ import annotations

import json
import re
import tomllib
import zlib
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.checkpoint import Manifest, manifest
from megalite.data import indexed_dataset
from megalite.errors import CheckpointError

ROOT = Path(__file__).parents[2]
WRITTEN: dict[str, Any] = {
    "format": "megalite",
    "version": 2,
    "training": {
        "iteration": 3,
        "consumed_samples": 12,
        "optimizer_steps": 2,
        "loss_scale": None,
        "seen_samples": None,
        "evaluation_left": True,
    },
    "config": {},
    "files": {},
    "tensors": {},
}
"""Keys of a manifest in checkpoints: they never change, whatever the fields are called in the code."""


def read(**changed: Any) -> Manifest:
    fields = WRITTEN | changed
    checksum = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    return Manifest.from_json(json.dumps(fields | {"checksum": checksum}))


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in WRITTEN["training"].items() if name not in names}


def test_a_manifest_is_written_as_it_always_was() -> None:
    written = json.loads(read().to_json())
    written.pop("checksum")
    assert written == WRITTEN


def test_training_states_from_before_a_field_was_there_are_read() -> None:
    training = read(training=without("loss_scale", "seen_samples", "evaluation_left")).training
    assert (training.iteration, training.consumed_samples, training.optimizer_steps) == (3, 12, 2)
    assert json.loads(read(training=without("evaluation_left")).to_json())["training"]["evaluation_left"] is False


def test_what_later_versions_may_write_is_refused() -> None:
    with pytest.raises(TypeError, match="of_later"):  # read_manifest calls it damaged
        read(training=without() | {"of_later": 1})
    for version in (1, 3):
        with pytest.raises(CheckpointError, match="its format version is not 2, the one this program reads"):
            read(version=version)


def test_the_page_has_the_versions_of_the_code() -> None:
    page = (ROOT / "docs/versions.md").read_text()
    assert f"has a version of its own: **{manifest.VERSION}** " in page
    assert f"| of manifest version {manifest.VERSION} | read |" in page
    assert f'"its format version is not {manifest.VERSION}, the one this program reads"' in page
    assert f"index version **{indexed_dataset.VERSION}**" in page
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"is the one in `pyproject.toml` and `megalite.__version__`, {version[1]}, which" in page


def test_the_package_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert megalite.__version__ == project["version"]
