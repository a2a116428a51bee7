"""The file of vectors: the same numbers everywhere, so that what others have compared stays compared."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalite_kernels import fp8_vectors
from megalite_kernels.fp8_vectors import VARIANTS, cases
from tests.harness.file_faults import FileFaults, fail_with

DIGEST = "071dfe09740d56605ff7e3e11d7e23f87ae3cff231c75c8b2acb6c16abd68106"
"""Digest of all tensors. It changes with a rule, on purpose, in a commit that says why."""


@pytest.mark.bits
def test_the_vectors_are_the_same_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "vectors.safetensors"
    assert fp8_vectors.main(["--write", str(path)]) == 0
    found, digest = load_file(path), hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == DIGEST
    assert {name.split("/")[1] for name in found if name.startswith("mxfp8/")} == {
        *("tie", "subnormal", "zero", "infinite", "random", "weight", "product")
    }
    assert path.stat().st_size < 2**20


def test_each_case_has_what_its_name_says() -> None:
    for by in VARIANTS.values():
        found = cases(by)
        assert (found["zero"] == 0).all()
        assert found["subnormal"].abs()[0].max() < torch.finfo(torch.float32).tiny
        assert (~found["infinite"].isfinite()).sum(1).tolist() == [1, 1, 1]
        assert all(values.shape[1] == 256 for values in found.values())


def test_a_file_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is there stays as it was."""
    monkeypatch.setattr(fp8_vectors, "vectors", lambda: {"one": torch.zeros(1000)})
    old, pipe = tmp_path / "old", tmp_path / "pipe"
    old.write_text("old")
    os.mkfifo(pipe)

    def refuses(path: Path, problem: str) -> None:
        assert fp8_vectors.main(["--write", str(path)]) == fp8_vectors.EXIT_NOT_WRITTEN
        assert capsys.readouterr() == ("", f"fp8_vectors: --write {path}: cannot be written: {problem}\n")

    refuses(tmp_path / "none" / "vectors", "No such file or directory")
    refuses(old / "vectors", "Not a directory")
    refuses(pipe, "it is no regular file")
    for operation in range(4):  # open, write, sync, rename
        with FileFaults(tmp_path, operation, fail_with(errno.ENOSPC)):
            refuses(old, "No space left on device")
    assert old.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [old, pipe]


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fp8_vectors.main(["--check", "torchao"]) == fp8_vectors.EXIT_NOT_INSTALLED
    assert capsys.readouterr().err == "fp8_vectors: torchao is not installed here: pip install torchao\n"
