"""Reader of pickles from other programs that never runs their code.

A pickle names functions and classes, and the arguments for calling them. This reader looks up each name in `_ALLOWED`,
which has dtypes and the functions that make containers and `StoredTensor`s. Any other name gives a `Record`, which
accepts all calls and does nothing. Files that name classes which are not installed can therefore be read as well.

Time and memory are bounded by the length of the pickle. A pickle stores values under numbers, and Python's unpickler
in C allocates memory for the largest of these numbers. This reader therefore uses the unpickler in Python. It refuses
operations that copy, hash or compare much data for a few bytes of the pickle, such as those for sets. The result may
contain one value in many places, so code that walks through it must limit its number of steps.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megalite.errors import CheckpointError
from megalite.small_files import LARGEST, MOST_AXES, WHOLE_NUMBERS, read_small_file

_MOST_NAMES = 10_000
"""Maximum number of classes and functions that a pickle may name. Each one that is not allowed takes a kilobyte."""
_MOST_NUMBERED_KEYS = 10_000
"""Maximum number of keys that are numbers or tuples.

An attacker can give all of them the same hash. Each is then compared with every other one.
"""


class Record:
    """Placeholder for an object of any class. It keeps the arguments of the object, and never calls anything."""

    __slots__ = ("args", "state")

    def __init__(self, args: Sequence[object]) -> None:
        self.args = args
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore the item. It would belong to an instance of a subclass of dict."""

    def append(self, value: object) -> None:
        """Ignore the value. It would belong to an instance of a subclass of list."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Attributes of the object; empty if its state is not a dictionary."""
        return self.state if isinstance(self.state, dict) else {}


class _Dictionary(dict[object, object]):
    """OrderedDict, which may have attributes in a pickle."""

    def __setstate__(self, state: object) -> None:
        """Ignore the attributes."""


@dataclass
class Storage:
    """Values in a file, which several tensors may share."""

    dtype: torch.dtype
    length: int
    """Number of elements."""
    values: memoryview = field(default_factory=lambda: memoryview(b""))
    """Bytes of the values, set when their position is known. They are writable because torch requires it."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file. Its values are not read yet."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    def read(self) -> Tensor:
        """Return the tensor as a view of the file's memory, without a copy."""
        if not self.storage.length:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.storage.values, dtype=self.dtype).as_strided(self.shape, self.strides, self.offset)


def _tensor(storage: object, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> StoredTensor:
    """Return a tensor, after checking that it is inside its storage and has no more elements than the storage."""
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor needs a storage")
    numbers = (offset, *_size(shape), *_size(strides))
    if len(shape) != len(strides) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise pickle.UnpicklingError("a tensor has a shape, strides and an offset that are not valid")
    elements, last = 1, offset
    for length, stride in zip(shape, strides, strict=True):
        elements, last = elements * length, last + (length - 1) * stride
    if elements > storage.length or (elements and last >= storage.length):
        raise pickle.UnpicklingError("a tensor is not within its storage")
    return StoredTensor(storage, offset, tuple(shape), tuple(strides))


def _size(values: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > MOST_AXES:
        raise pickle.UnpicklingError("a size is not valid")
    return tuple(values)


_STORAGES = """Double=float64 Float=float32 Half=float16 BFloat16=bfloat16 Long=int64 Int=int32 Short=int16 Char=int8
    Byte=uint8 Bool=bool ComplexFloat=complex64 ComplexDouble=complex128 Untyped=uint8"""
_ALLOWED: Mapping[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Dictionary,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    **{("torch", str(kind).removeprefix("torch.")): kind for kind in vars(torch).values() if type(kind) is torch.dtype},
    **{
        (module, f"{kind}Storage"): getattr(torch, dtype)
        for module in ("torch", "torch.storage")
        for kind, _, dtype in (pair.partition("=") for pair in _STORAGES.split())
    },
}


class Unpickler(pickle._Unpickler):
    """Unpickler that creates allowed objects, and records for all others."""

    append: Callable[[object], None]
    """Function that puts a value on the stack. The base class sets it in `load`."""

    def __init__(self, stream: BinaryIO, storage: Callable[[Any], Storage] | None = None) -> None:
        """Create the unpickler. `storage` returns the storage for a persistent id in the pickle."""
        super().__init__(stream, encoding="utf-8")
        self._storage = storage
        self._records: dict[tuple[str, str], type[Record]] = {}
        self._numbered_keys = 0

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = (module_name, global_name)
        if name in _ALLOWED:
            return _ALLOWED[name]
        if name not in self._records:
            if len(self._records) == _MOST_NAMES:
                raise pickle.UnpicklingError("too many classes")
            self._records[name] = type(f"{module_name[:100]}.{global_name[:100]}", (Record,), {"__slots__": ()})
        return self._records[name]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise pickle.UnpicklingError("a tensor outside a file of torch.save")
        return self._storage(pid)

    def check_key(self, key: object) -> None:
        """Raise UnpicklingError if hashing a key, or comparing it with others, could take very long."""
        values = key if type(key) is tuple else (key,)
        if len(values) > MOST_AXES or not all(map(_is_plain, values)):
            raise pickle.UnpicklingError("a key that none of these files has")
        self._numbered_keys += type(key) in (int, tuple)
        if self._numbered_keys > _MOST_NUMBERED_KEYS:
            raise pickle.UnpicklingError(f"more than {_MOST_NUMBERED_KEYS:,} keys that are numbers or tuples")

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, Record):
            self.append(kind(arguments))
        elif isinstance(kind, FunctionType) and len(arguments) <= MOST_AXES:  # of `_ALLOWED`: no other can be reached
            self.append(kind(*arguments))
        elif kind is _Dictionary and not arguments:
            self.append(_Dictionary())
        else:
            raise pickle.UnpicklingError("a call of something that is not a function")


def _refused(unpickler: Any) -> None:
    raise pickle.UnpicklingError("an instruction that none of these files has")


def _is_plain(value: object) -> bool:
    """Return whether a value is hashed and compared quickly.

    A record counts as quick, because it is hashed by identity. DCP uses records as keys.
    """
    if type(value) is int:
        return value in WHOLE_NUMBERS
    return value is None or type(value) in (str, bytes, bool, torch.dtype) or isinstance(value, Record)


def _with_plain_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Return a loader that checks the keys, at `keys` of the stack, before it calls `load`."""

    def checked(unpickler: Any) -> None:
        for key in unpickler.stack[keys]:
            unpickler.check_key(key)
        load(unpickler)

    return checked


def _call(unpickler: Any) -> None:
    arguments = unpickler.stack.pop()
    unpickler._instantiate(unpickler.stack.pop(), arguments)


def _call_with_keywords(unpickler: Any) -> None:
    unpickler.stack.pop()
    _call(unpickler)


def _set_state(unpickler: Any) -> None:
    """Set an object's state only through the object's own method for it, so that nothing else can be changed."""
    state = unpickler.stack.pop()
    unpickler.stack[-1].__setstate__(state)


_KEYS = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
}
_BASE = pickle._Unpickler.dispatch
_REFUSED = {
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),  # comparing two equal nested sets can take forever
}
Unpickler.dispatch = (
    dict.fromkeys(range(256), _refused)
    | {code: load for code, load in _BASE.items() if bytes([code]) not in _REFUSED}
    | {code[0]: _with_plain_keys(_BASE[code[0]], keys) for code, keys in _KEYS.items()}
    | {pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.NEWOBJ_EX[0]: _call_with_keywords}
    | {pickle.BUILD[0]: _set_state}
)


def load(stream: BinaryIO, storage: Callable[[Any], Storage] | None = None) -> Any:
    """Return the same as `pickle.load`, restricted to what is allowed. A damaged file may cause any error."""
    return Unpickler(stream, storage).load()


def read_pickle(path: Path, *, largest: int = LARGEST) -> Any:
    """Read a file of at most `largest` bytes that was written by `pickle.dump`. Raises CheckpointError."""
    try:
        return load(io.BytesIO(read_small_file(path, largest=largest)))
    except Exception as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error to raise after any error while reading a file of another program."""
    if isinstance(error, OSError):
        return CheckpointError(f"{path} cannot be read: {error.strerror or error}")
    why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return CheckpointError(f"{path} cannot be read ({why[:200]}): it is damaged, or not such a file")
