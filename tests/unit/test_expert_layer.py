"""The benchmark of a layer with experts on a CPU: what it writes, and that gradients that differ are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import expert_layer
from megalite_kernels.implementation import current, use

TINY = ["--device", "cpu", "--repeats", "1", "--tokens", "8"]


@pytest.fixture(autouse=True)
def _few_experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(expert_layer, "EXPERTS", ((2, 1), (4, 2)))
    before = current()
    yield
    use(before)


def test_both_layers_have_figures_of_each_variant(tmp_path: Path) -> None:
    assert expert_layer.main([*TINY, "--results", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "expert_layer_cpu.json").read_text())
    assert "mean nothing" in found["device"]
    assert [row["experts"] for row in found["layers"]] == [2, 4]
    for row in found["layers"]:
        assert row["difference"] == 0.0  # on a CPU both are loops
        permutation = sum(row["seconds of permutation"])
        for name in ("grouped", "loop"):
            seconds = sum(row[name]["seconds of forward and backward"])
            assert row[name]["tokens per second"] == pytest.approx(8 / seconds)
            assert row[name]["share of permutation"] == pytest.approx(permutation / seconds)


def test_gradients_that_differ_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = expert_layer.Layer.gradients

    def changed(layer: expert_layer.Layer, kernels: expert_layer.Kernels) -> list[torch.Tensor]:
        found = gradients(layer, kernels)
        return [*found[:-1], 1.1 * found[-1]] if kernels.to_reference else found

    monkeypatch.setattr(expert_layer.Layer, "gradients", changed)
    assert expert_layer.main([*TINY, "--results", str(tmp_path)]) == 1


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert expert_layer.main([]) == 2
    assert "nothing was measured" in capsys.readouterr().err
