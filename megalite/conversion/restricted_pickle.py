"""Reading pickles of others, of which none can run anything: a closed list of what is made, and records for the rest.

A pickle names functions and classes, and says what to call them with. Here a name gives one of `_ALLOWED` (containers,
dtypes, and what puts a tensor around its bytes), or a `Record` that is called whatever it is called and does nothing.
So files that name classes which are not installed are read as well.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import is_zipfile

import torch
from torch import Tensor

from megalite.errors import CheckpointError


class Record:
    """Stands for an object of any class: what it was made from, none of which can be called."""

    args: tuple[object, ...]
    state: object

    def __new__(cls, *args: object, **_: object) -> Record:
        record = object.__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """What a subclass of dict held is dropped."""

    def append(self, value: object) -> None:
        """What a subclass of list held is dropped."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The object's attributes; none where it kept its state in another way."""
        return self.state if isinstance(self.state, dict) else {}


class _Dictionary(dict[object, object]):
    """An OrderedDict, which may have attributes."""

    def __setstate__(self, state: object) -> None:
        """They are dropped."""


class _Function:
    """A function that a pickle may call, and not change."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        return self._call(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a function has no state")


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise pickle.UnpicklingError("a tensor needs a storage")
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _parameter(tensor: object, *_: object) -> object:
    return tensor


_TENSOR = _Function(_tensor)
_ALLOWED: Mapping[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Dictionary,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _TENSOR,
    ("torch._utils", "_rebuild_tensor_v2"): _TENSOR,
    ("torch._utils", "_rebuild_parameter"): _Function(_parameter),
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in (set, frozenset, complex)},
    **{("torch", str(kind).removeprefix("torch.")): kind for kind in vars(torch).values() if type(kind) is torch.dtype},
}


class Unpickler(pickle.Unpickler):
    """Makes what is allowed, and records of the rest."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        allowed = _ALLOWED.get((module_name, global_name))
        return type(f"{module_name}.{global_name}", (Record,), {}) if allowed is None else allowed


def load(stream: BinaryIO, **options: Any) -> Any:
    """What `pickle.load` would, as far as it is allowed. Raises whatever a damaged file makes it raise."""
    return Unpickler(stream, **options).load()


_MODULE = sys.modules[__name__]
"""What `torch.load` takes for the module pickle: it asks for `Unpickler` and `load`."""


def read_pickle(path: Path) -> Any:
    """The content of a file that `pickle.dump` has written. Raises CheckpointError."""
    try:
        return load(io.BytesIO(path.read_bytes()))
    except Exception as error:
        raise _unreadable(path, error) from error


def read_torch_file(path: Path) -> Any:
    """The content of a file that `torch.save` has written; its tensors are mapped, not read. Raises CheckpointError."""
    try:
        return torch.load(
            path, map_location="cpu", pickle_module=_MODULE, weights_only=False, mmap=is_zipfile(path) or None
        )
    except Exception as error:
        raise _unreadable(path, error) from error


def read_torch_stream(stream: BinaryIO, path: Path) -> Any:
    """As above, of a stream that is a part of the file at `path`."""
    try:
        return torch.load(stream, map_location="cpu", pickle_module=_MODULE, weights_only=False)
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged, or no such file")
