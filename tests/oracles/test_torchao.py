"""Codes, scales and products of few bits against torchao, whose references and emulated products run on a CPU."""

from __future__ import annotations

import pytest
import torch

from megalite_kernels import fp8_vectors
from megalite_kernels.fp8_cases import VARIANTS
from megalite_kernels.fp8_vectors import EXIT_DIFFERENT
from megalite_kernels.tile_scales import Tiles

pytestmark = pytest.mark.oracle
CASES = ("weight", "tie", "subnormal", "zero", "infinite", "random")
NOT_COMPARED = {
    *(f"{name}, subnormal" for name in VARIANTS if name.startswith(("tensorwise", "blockwise"))),
    "nvfp4, zero",
}
"""Rows of which torchao treats all values otherwise: docs/fp8_tables.md."""


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("compared with torchao 0.")
    return dict(row.split(": ") for row in rows)


def test_torchao_has_the_same_codes_scales_and_products(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_vectors.main(["--check", "torchao"]) == 0
    rows = lines(capsys)
    assert [*rows] == [f"{name}, {case}" for name in VARIANTS for case in CASES]
    assert {row for row, words in rows.items() if "equal" not in words} == NOT_COMPARED
    for row, words in rows.items():
        in_bf16 = row.startswith("blockwise") and row.endswith("subnormal")
        assert ("product within 2^-" in words) != (in_bf16 or row.endswith("weight")), row
    assert rows["mxfp8, infinite"] == "codes and scales equal for 960 of 1,024 values; product within 2^-16"


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_one_bit_is_found(part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Products are of the same wrong codes, and stay as near."""
    from megalite_kernels import torchao_comparison

    right = torchao_comparison.quantized

    def wrong(*arguments: object) -> Tiles:
        found = right(*arguments)
        tensor = getattr(found, part)
        tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int32).view(-1)[:1] ^= 1
        return found

    monkeypatch.setattr(torchao_comparison, "quantized", wrong)
    assert fp8_vectors.main(["--check", "torchao"]) == EXIT_DIFFERENT
    rows = lines(capsys)
    assert all("DIFFERENT" in rows[f"{name}, {case}"] for name in VARIANTS for case in ("tie", "random"))
    assert not any("product DIFFERENT" in words for words in rows.values())


def test_another_product_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megalite_kernels import torchao_comparison

    right = torchao_comparison.product
    monkeypatch.setattr(torchao_comparison, "product", lambda *arguments: right(*arguments) * 1.1)
    assert fp8_vectors.main(["--check", "torchao"]) == EXIT_DIFFERENT
    rows = lines(capsys)
    assert all(rows[f"{name}, random"].endswith("; product DIFFERENT") for name in VARIANTS)
