"""Choice of the implementation; Triton is not imported before it is needed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import get_args

import pytest
import torch
import triton
from torch import Tensor

from megalite.config.kernels import KernelsConfig
from megalite.config.parse import parse_arguments
from megalite.errors import ConfigurationError
from megalite.training.kernels import choose_kernels
from megalite_kernels import implementation
from megalite_kernels.implementation import Choice, Kernels, Operation, current, use
from megalite_kernels.norm import norm

SIZES = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 --lr 1"


def parsed(flags: str) -> KernelsConfig:
    return parse_arguments(f"{SIZES} {flags}".split()).config.kernels


def graph_node(dtype: torch.dtype = torch.float32) -> str:
    parts: list[Tensor] = [torch.ones(2, 16, dtype=dtype).requires_grad_(), torch.ones(16, dtype=dtype)]
    return type(norm(parts[0], parts[1], None, 1e-5).grad_fn).__name__


def test_the_choice_decides_which_implementation_runs() -> None:
    assert graph_node() == "NormBackward"
    for choice in ("auto", "reference"):
        use(Kernels(choice))
        assert graph_node() == "_RMSNormReferenceBackward"


def test_an_operation_can_be_left_to_the_reference() -> None:
    use(Kernels("triton", to_reference=("norm",)))
    assert graph_node() == "_RMSNormReferenceBackward"
    use(Kernels("triton", to_reference=("rotary",)))
    assert graph_node() == "NormBackward"


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="no operation is named rope; choose from norm, residual_norm, "):
        Kernels("triton", to_reference=("norm", "rope"))


@pytest.mark.parametrize(
    ("flag", "left"),
    [
        ("", ()),
        ("--no-persist-layer-norm", ("norm", "residual_norm")),
        ("--no-bias-dropout-fusion", ("residual_norm",)),
        ("--no-bias-gelu-fusion", ("gelu",)),
        ("--no-bias-swiglu-fusion", ("swiglu",)),
        ("--no-rope-fusion", ("rotary",)),
        ("--no-cross-entropy-loss-fusion", ("cross_entropy",)),
    ],
)
def test_flags_leave_operations_to_the_reference(
    flag: str, left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choose_kernels(parsed(f"--kernels triton {flag}"))
    assert left == tuple(
        operation for operation in get_args(Operation) if not current().runs_triton(operation, torch.empty(0))
    )


def test_float64_has_the_reference() -> None:
    assert graph_node(torch.float64) == "_RMSNormReferenceBackward"


def test_a_tensor_on_a_gpu_has_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    on_gpu = torch.empty(0, device="meta")
    monkeypatch.setattr(torch.Tensor, "device", property(lambda tensor: torch.device("cuda")))
    assert kernels.runs_triton("norm", on_gpu)
    monkeypatch.setattr(implementation, "_INSTALLED", False)
    assert not kernels.runs_triton("norm", on_gpu)


def test_the_choice_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(choice: Choice, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **left: tuple[str, ...]) -> str:
        return Kernels(choice, **left).description(torch.device(device), dtype)

    assert told("triton").startswith("Triton 3.")
    assert told("triton", to_reference=("rotary", "norm")).endswith(", except norm, rotary")
    assert told("triton", torch.float64) == "plain PyTorch: Triton's compute in fp32"
    assert told("reference") == "plain PyTorch, as chosen"
    assert told("auto") == "plain PyTorch"
    monkeypatch.setattr(implementation, "_INSTALLED", False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    assert told("auto", device="cuda") == "plain PyTorch: Triton is not installed"


def test_triton_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_INSTALLED", False)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        Kernels("triton")
    with pytest.raises(ConfigurationError, match=r"^--kernels triton: Triton is not installed.*pip install triton"):
        choose_kernels(parsed("--kernels triton"))


@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_triton_that_is_broken_is_found_when_the_kernels_are_chosen(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("megalite_kernels.") and name.endswith("_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    choose_kernels(parsed("--kernels reference"))
    choose_kernels(parsed("--kernels auto"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigurationError, match=rf"^--kernels {choice}: Triton is .* cannot .*--kernels reference"):
        choose_kernels(parsed(f"--kernels {choice}"))


def test_triton_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^--kernels triton needs a GPU, and torch finds none here"):
        choose_kernels(parsed("--kernels triton"))


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda'; choose one of auto, triton, reference"):
        Kernels("cuda")


@pytest.mark.wide
def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, torch, pretrain_gpt, megalite_kernels.cases as cases; cases.norm(torch.ones(2, 8), "
        "torch.ones(8), None, 1e-5); sys.exit('triton' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_triton_may_come_in_a_package_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate ROCm, where this is so."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert Kernels("triton").description(torch.device("cpu"), torch.float32) == f"Triton {triton.__version__}"
