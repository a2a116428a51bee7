"""Operations for which each fusion flag selects the reference; the tools select kernels, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megalite.config import KernelsConfig
from megalite_kernels import implementation
from tests.harness.tool import run_tool

LEFT = {
    "persist_layer_norm": ("norm", "residual_norm"),
    "bias_dropout_fusion": ("residual_norm",),
    "bias_gelu_fusion": ("gelu",),
    "bias_swiglu_fusion": ("swiglu",),
    "rope_fusion": ("rotary",),
    "cross_entropy_loss_fusion": ("cross_entropy",),
}


@pytest.mark.parametrize("flag", LEFT)
def test_a_fusion_that_is_off_leaves_its_operations_to_the_reference(flag: str) -> None:
    assert KernelsConfig().to_reference == ()
    assert KernelsConfig(**{flag: False}).to_reference == LEFT[flag]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux alone")
@pytest.mark.parametrize("tool", ["generate", "evaluate"])
def test_tools_refuse_tritons_kernels_where_there_is_no_gpu(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        implementation, "_current", implementation.current()
    )  # what the tool chooses ends with the test
    (tmp_path / "config.json").touch()
    more = ("--prompt", "a") if tool == "generate" else ("--data-path", tmp_path / "data")
    ended = run_tool(tool, "--load", tmp_path, "--kernels", "triton", *more)
    assert ended.code == 64
    assert "--kernels triton needs a GPU" in ended.stderr
