"""Choice of an operation's implementation: its Triton kernels, or its reference in plain PyTorch.

- `auto`: Triton if the tensors are on a CUDA or ROCm device and Triton is installed, otherwise the reference.
- `triton`: Triton on every device: a GPU, Triton's interpreter, or the meta device for compilation.
- `reference`: never Triton.

The kernels compute in fp32, so float64 tensors always use the reference. Single operations can also be set to use the
reference, by name (`Operation`).

A dry run executes on the meta device what another device would. `Kernels.meta_is_gpu` says whether that is a GPU, and
`on_gpu` answers for it: code asks `on_gpu`, not for a device's type, wherever the answer is about a planned run, too.

The choice is one global object per process, set by `use` before the first operation. It is not an argument of the
operations, because they are called in forward, in backward (on autograd's threads) and in the optimizer's step. torch
also chooses its attention kernels by global state.

Only the files `..._kernels.py` import Triton. An operation imports its file only if it runs Triton, so a process that
runs the references never imports it. `import_triton` imports all of them in advance, so that a broken Triton is found
when a run starts.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

Operation = Literal[
    "norm",
    "residual_norm",
    "gelu",
    "swiglu",
    "rotary",
    "cross_entropy",
    "optimizer",
    "quantization",
    "dropout",
    "routing",
    "permutation",
    "grouped",
    "compression",
    "tiles",
    "scaled_products",
    "short_convolution",
    "recurrence",
]
Choice = Literal["auto", "triton", "reference"]

_INSTALLED = importlib.util.find_spec("triton") is not None
_GPU_TYPES = {False: ("cuda",), True: ("cuda", "meta")}
"""Types of devices whose operations are those of a GPU, by whether the meta device stands for one."""


@dataclass(frozen=True)
class Kernels:
    """A choice for all operations.

    Attributes:
        to_reference: operations that use their reference under every choice.
        meta_is_gpu: True if the meta device stands for a GPU, and False if for a CPU.

    Raises:
        ValueError: there is no such choice, or no such operation.
        ModuleNotFoundError: `triton` was chosen and is not installed.
    """

    choice: Choice = "auto"
    to_reference: tuple[str, ...] = ()
    meta_is_gpu: bool = False

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise ValueError(f"there are no kernels named {self.choice!r}; choose one of {', '.join(get_args(Choice))}")
        unknown = sorted(set(self.to_reference) - set(get_args(Operation)))
        if unknown:
            known = ", ".join(get_args(Operation))
            raise ValueError(f"no operation is named {', '.join(unknown)}; choose from {known}")
        if self.choice == "triton" and not _INSTALLED:
            raise ModuleNotFoundError("Triton is not installed, and the chosen kernels need it: pip install triton")

    def runs_triton(self, operation: Operation, *tensors: Tensor | None) -> bool:
        """Tell if the operation on these tensors runs as Triton kernels. None stands for an absent tensor."""
        if self.choice == "reference" or operation in self.to_reference:
            return False
        chosen, gpus = self.choice == "triton", _GPU_TYPES[self.meta_is_gpu]
        for tensor in tensors:  # every operation of a step comes through here: so no calls
            if tensor is None:
                continue
            if tensor.dtype == torch.float64 or not (chosen or tensor.device.type in gpus):
                return False
        return chosen or _INSTALLED

    def import_triton(self, *, on_gpu: bool) -> None:
        """Import all files of Triton kernels if operations use them here. A broken Triton raises its own exception."""
        if self.choice == "triton" or (self.choice == "auto" and on_gpu and _INSTALLED):
            for name in sorted(path.stem for path in Path(__file__).parent.glob("*_kernels.py")):
                importlib.import_module(f"megalite_kernels.{name}")

    def description(self, device: torch.device, dtype: torch.dtype) -> str:
        """Describe which implementation runs for tensors of this device and dtype, with the reason if not obvious."""
        if replace(self, to_reference=()).runs_triton("norm", torch.empty(0, device=device, dtype=dtype)):
            import triton

            left = f", except {', '.join(sorted(self.to_reference))}" if self.to_reference else ""
            return f"Triton {triton.__version__}{left}"  # its own version: on ROCm, the package has another name
        if self.choice == "reference":
            return "plain PyTorch, as chosen"
        if dtype == torch.float64:
            return "plain PyTorch: Triton's compute in fp32"
        return "plain PyTorch" + (": Triton is not installed" if device.type in _GPU_TYPES[self.meta_is_gpu] else "")


def on_gpu(of: Tensor | torch.device) -> bool:
    """Tell whether operations on a tensor or a device are those of a GPU, by the choice of this process."""
    return (of.device if isinstance(of, Tensor) else of).type in _GPU_TYPES[_current.meta_is_gpu]


def is_installed() -> bool:
    """Tell whether Triton is installed."""
    return _INSTALLED


_current = Kernels()


def current() -> Kernels:
    """Return the choice of this process."""
    return _current


def use(kernels: Kernels) -> None:
    """Set the choice of this process. Layers that torch.compile has already compiled keep the earlier choice."""
    global _current
    _current = kernels
