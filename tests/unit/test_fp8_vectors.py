"""The file of vectors: the same numbers everywhere, so that what others have compared stays compared."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalite_kernels import fp8_vectors
from megalite_kernels.fp8_cases import COLUMNS, VARIANTS, WEIGHT, cases, numbers, quantized, quantized_weight
from megalite_kernels.tiles import quantize_reference
from tests.harness.file_faults import FileFaults, fail_with

DIGEST = "6e4d7d69a7abffa5e444f48724f78775487752101aa84a7165ed1ba458c3429f"
"""Digest of all tensors. It changes with a rule, on purpose, in a commit that says why."""


CASES = ("tie", "subnormal", "zero", "infinite", "random")


@pytest.mark.bits
def test_the_vectors_are_the_same_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "vectors.safetensors"
    assert fp8_vectors.main(["--write", str(path)]) == 0
    found, digest = load_file(path), hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == DIGEST
    assert {name.partition("/")[2] for name in found if name.startswith("mxfp8/")} == {
        *("weight/codes", "weight/scales"),
        *(f"{case}/{part}" for case in CASES for part in ("values", "codes", "scales", "product")),
    }
    assert all(found[f"{name}/{case}/product"].shape[1] == 144 for name in VARIANTS for case in CASES)
    for name in ("mxfp8", "mxfp8_ceiling"):
        assert found[f"{name}/random/scales"].dtype == torch.uint8
    rows = found["blockwise_hybrid/infinite/product"]
    assert rows.isnan().all(1).tolist() == [True, True, True, False]
    assert not rows[3].isnan().any()
    assert (found["blockwise_hybrid/zero/product"] == 0).all()
    assert path.stat().st_size < 2**20


def test_each_case_has_what_its_name_says() -> None:
    for by in VARIANTS.values():
        found = cases(by)
        assert (found["zero"] == 0).all()
        assert found["subnormal"].abs()[0].max() < torch.finfo(torch.float32).tiny
        assert (~found["infinite"].isfinite()).sum(1).tolist() == [1, 1, 1, 0]
        assert all(values.shape[1] == 256 for values in found.values())


def test_hybrid_has_every_code_of_gradients() -> None:
    """Weights stay in e4m3. Sums of a tile have at most the bits of float64, so they are exact in any order."""
    for name in ("tensorwise_hybrid", "blockwise_hybrid"):
        by = VARIANTS[name]
        weight, size = quantized_weight(numbers(*WEIGHT, 4), by), by.block or COLUMNS
        assert weight.codes.dtype == torch.float8_e4m3fn
        for case, values in cases(by).items():
            codes = quantized(values, by).codes
            assert codes.dtype == torch.float8_e5m2
            if case == "tie":
                assert {*codes.view(torch.uint8).flatten().tolist()} == {*range(0x7C), *range(0x80, 0xFC)}
            parts = (codes.double().abs().split(size, 1), weight.codes.double().abs().split(size, 1))
            largest = max((one @ other.t()).max().item() for one, other in zip(*parts, strict=True))
            assert largest < 2.0 ** (53 - 16 - 9)  # of the smallest codes, 2^-16 and 2^-9


def test_scales_rounded_up_are_exponents_too() -> None:
    """Compare with torch's own conversion, whose powers of two are exact."""
    by = VARIANTS["mxfp8_ceiling"]
    for case, values in cases(by).items():
        scales = quantized(values, by).scales
        assert scales.dtype == torch.float8_e8m0fnu
        wide = quantize_reference(values, by, by.forward, None).scales
        assert torch.equal(scales.double().nan_to_num(nan=0.5), wide.double().nan_to_num(nan=0.5)), case


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


def test_a_version_that_lacks_what_is_compared_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(fp8_vectors, "version", lambda name: "0.1")
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert fp8_vectors.main(["--check", "torchao"]) == fp8_vectors.EXIT_NOT_INSTALLED
    assert "torchao 0.1 has not all that is compared, as 0.18.0 has: " in capsys.readouterr().err
