"""Which implementation runs, and that Triton is not imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megalite_kernels import implementation
from megalite_kernels.implementation import Choice, choose, description, runs_triton
from megalite_kernels.norm import rms_norm


def graph_node(dtype: torch.dtype = torch.float32) -> str:
    parts: list[Tensor] = [torch.ones(2, 16, dtype=dtype).requires_grad_(), torch.ones(16, dtype=dtype)]
    return type(rms_norm(parts[0], parts[1], 1e-5).grad_fn).__name__


def test_the_choice_decides_which_implementation_runs() -> None:
    assert graph_node() == "_NormBackward"
    for choice in ("auto", "reference"):
        choose(choice)
        assert graph_node() == "_RMSNormReferenceBackward"


def test_an_operation_can_be_left_to_the_reference() -> None:
    choose("triton", to_reference=["norm"])
    assert graph_node() == "_RMSNormReferenceBackward"
    choose("triton", to_reference=["rotary"])
    assert graph_node() == "_NormBackward"


def test_float64_has_the_reference() -> None:
    assert graph_node(torch.float64) == "_RMSNormReferenceBackward"


def test_a_tensor_on_a_gpu_has_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("auto")
    on_gpu = torch.empty(0, device="meta")
    monkeypatch.setattr(torch.Tensor, "device", property(lambda tensor: torch.device("cuda")))
    assert runs_triton("norm", on_gpu)
    monkeypatch.setattr(implementation, "_INSTALLED", False)
    assert not runs_triton("norm", on_gpu)


def test_the_choice_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(choice: Choice, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **left: list[str]) -> str:
        choose(choice, **left)
        return description(torch.device(device), dtype)

    assert told("triton").startswith("Triton 3.")
    assert told("triton", to_reference=["rotary", "norm"]).endswith(", but for norm, rotary")
    assert told("triton", torch.float64) == "plain PyTorch: Triton's compute in fp32"
    assert told("reference") == "plain PyTorch, as chosen"
    assert told("auto") == "plain PyTorch"
    monkeypatch.setattr(implementation, "_INSTALLED", False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    assert told("auto", device="cuda") == "plain PyTorch: Triton is not installed"


def test_triton_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_INSTALLED", False)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        choose("triton")


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda'; choose one of auto, triton, reference"):
        choose("cuda")


def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, pretrain_gpt, megalite_kernels.norm; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
