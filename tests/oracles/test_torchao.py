"""Codes, scales and products of few bits against torchao, whose references and emulated product run on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite_kernels import fp8_vectors
from megalite_kernels.recipes import Recipe
from megalite_kernels.tile_scales import Tiles

pytestmark = pytest.mark.oracle
COMPARED = 12


def test_torchao_has_the_same_codes_scales_and_products(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_vectors.main(["--check", "torchao"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == COMPARED
    assert all(row.endswith(": equal") for row in rows)


def test_one_code_of_another_value_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = fp8_vectors._quantized

    def wrong(values: Tensor, by: Recipe) -> Tiles:
        found = right(values, by)
        bits = found.codes.view(torch.uint8)
        bits[0, 7] ^= 1
        return found

    monkeypatch.setattr(fp8_vectors, "_quantized", wrong)
    assert fp8_vectors.main(["--check", "torchao"]) == fp8_vectors.EXIT_DIFFERENT
    assert "nvfp4, random: DIFFERENT" in capsys.readouterr().out
