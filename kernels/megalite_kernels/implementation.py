"""Which implementation of an operation runs: its Triton kernels, or its reference in plain PyTorch.

`auto`: Triton where the tensors are on a CUDA or ROCm device and Triton is installed, the reference elsewhere;
`triton`: Triton on every device, which fits a GPU, Triton's interpreter, and compilation on the meta device;
`reference`: never Triton. The kernels compute in fp32: float64 has the reference under each of them.

Triton is imported where the choice asks for it, or when the first operation needs it; until then a kernel is a plain
function. torch.compile cannot trace that import: choose before it compiles what calls an operation.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Choice = Literal["auto", "triton", "reference"]
RUNTIME_SIZES = ("rows",)  # arguments that differ from batch to batch: no kernel is compiled anew for their value

_INSTALLED = importlib.util.find_spec("triton") is not None
_choice: Choice = "auto"
_waiting: list[FunctionType] = []


def choose(choice: Choice) -> None:
    """Decide for all operations of this process.

    Raises:
        ValueError: there is no such choice.
        ModuleNotFoundError: `triton` was chosen and is not installed.
    """
    global _choice
    if choice not in get_args(Choice):
        raise ValueError(f"there are no kernels named {choice!r}; choose one of {', '.join(get_args(Choice))}")
    if choice == "triton" and not _INSTALLED:
        raise ModuleNotFoundError("Triton is not installed, and the chosen kernels need it: pip install triton")
    _choice = choice
    if choice == "triton" or (choice == "auto" and _INSTALLED and torch.cuda.is_available()):
        _import_triton()


def chosen() -> Choice:
    return _choice


def runs_triton(*tensors: Tensor) -> bool:
    """Whether the operation on these tensors runs as Triton kernels, which are then ready."""
    if _choice == "reference" or any(tensor.dtype == torch.float64 for tensor in tensors):
        return False
    if _choice == "auto" and not (all(tensor.device.type == "cuda" for tensor in tensors) and _INSTALLED):
        return False
    if _waiting:
        _import_triton()
    return True


def kernel(function: Callable[..., None]) -> Any:
    """Mark a module's function as a Triton kernel, `function[grid](...)` once `runs_triton` has said yes.

    In it, `tl` is triton.language. Arguments named as RUNTIME_SIZES are not specialised.
    """
    assert isinstance(function, FunctionType)
    _waiting.append(function)
    return function


def _import_triton() -> None:
    """Put the compiled kernels in the place of the functions that wait, each in its module."""
    import triton
    import triton.language

    while _waiting:
        function = _waiting.pop()
        sizes = [name for name in RUNTIME_SIZES if name in inspect.signature(function).parameters]
        function.__globals__["tl"] = triton.language
        function.__globals__[function.__name__] = triton.jit(function, do_not_specialize=sizes)
