"""Which implementation of an operation runs: its Triton kernels, or its reference in plain PyTorch.

`auto`: Triton where the tensors are on a CUDA or ROCm device and Triton is installed, the reference elsewhere;
`triton`: Triton on every device, which fits a GPU, Triton's interpreter, and compilation on the meta device;
`reference`: never Triton. The kernels compute in fp32: float64 has the reference under each of them. Single operations
can be left to the reference, by their names (`Operation`).

Triton is imported where the choice asks for it, or when the first operation needs it; until then a kernel is a plain
function. torch.compile cannot trace that import: choose before it compiles what calls an operation.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Operation = Literal[
    "norm", "residual_norm", "gelu", "swiglu", "rotary", "cross_entropy", "optimizer", "quantization", "dropout"
]
Choice = Literal["auto", "triton", "reference"]
# Arguments that differ from launch to launch: no kernel is compiled anew for their value.
RUNTIME_SIZES = ("rows", "positions", "elements", "units", "seed", "offset", "layer", "site")

_INSTALLED = importlib.util.find_spec("triton") is not None
_choice: Choice = "auto"
_to_reference: frozenset[str] = frozenset()  # operations that never run as Triton kernels
_waiting: list[FunctionType] = []


def choose(choice: Choice, *, to_reference: Collection[str] = ()) -> None:
    """Decide for all operations of this process; those of `to_reference` run as their reference under each choice.

    Raises:
        ValueError: there is no such choice, or no such operation.
        ModuleNotFoundError: `triton` was chosen and is not installed.
    """
    global _choice, _to_reference
    if choice not in get_args(Choice):
        raise ValueError(f"there are no kernels named {choice!r}; choose one of {', '.join(get_args(Choice))}")
    unknown = sorted(set(to_reference) - set(get_args(Operation)))
    if unknown:
        known = ", ".join(get_args(Operation))
        raise ValueError(f"no operation is named {', '.join(unknown)}; choose of {known}")
    if choice == "triton" and not _INSTALLED:
        raise ModuleNotFoundError("Triton is not installed, and the chosen kernels need it: pip install triton")
    _choice, _to_reference = choice, frozenset(to_reference)
    if choice == "triton" or (choice == "auto" and _INSTALLED and torch.cuda.is_available()):
        _import_triton()


def chosen() -> Choice:
    return _choice


def runs_triton(operation: Operation, *tensors: Tensor) -> bool:
    """Whether the operation on these tensors runs as Triton kernels, which are then ready."""
    return operation not in _to_reference and _suit_triton(*tensors)


def _suit_triton(*tensors: Tensor) -> bool:
    if _choice == "reference" or any(tensor.dtype == torch.float64 for tensor in tensors):
        return False
    if _choice == "auto" and not (all(tensor.device.type == "cuda" for tensor in tensors) and _INSTALLED):
        return False
    if _waiting:
        _import_triton()
    return True


def description(device: torch.device, dtype: torch.dtype) -> str:
    """For a person: what runs on tensors of this device and dtype, and why where one might have expected Triton."""
    if _suit_triton(torch.empty(0, device=device, dtype=dtype)):
        import triton

        left = f", but for {', '.join(sorted(_to_reference))}" if _to_reference else ""
        return f"Triton {triton.__version__}{left}"  # its own: its package has another name on ROCm
    if _choice == "reference":
        return "plain PyTorch, as chosen"
    if dtype == torch.float64:
        return "plain PyTorch: Triton's compute in fp32"
    return "plain PyTorch" + (": Triton is not installed" if device.type == "cuda" else "")


def kernel(function: Callable[..., Any]) -> Any:
    """Mark a module's function as a Triton kernel, `function[grid](...)` once `runs_triton` has said yes.

    In it, `tl` is triton.language, and other kernels may be called, also those of modules it imports them from.
    Arguments named as RUNTIME_SIZES are not specialised.
    """
    assert isinstance(function, FunctionType)
    _waiting.append(function)
    return function


def _import_triton() -> None:
    """Put the compiled kernels in the place of the functions that wait, in each of their modules."""
    import triton
    import triton.language

    compiled = {}
    for function in _waiting:
        sizes = [name for name in RUNTIME_SIZES if name in inspect.signature(function).parameters]
        compiled[function] = triton.jit(function, do_not_specialize=sizes)
    for function in _waiting:
        names = function.__globals__
        found = {name: value for name, value in names.items() if isinstance(value, FunctionType) and value in compiled}
        names |= {"tl": triton.language} | {name: compiled[function] for name, function in found.items()}
    _waiting.clear()
