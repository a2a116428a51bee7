"""Reading pickles of others, of which none can run anything: a closed list of what is made, and records for the rest.

A pickle names functions and classes, and says what to call them with. Here a name gives one of `_ALLOWED` (dtypes, and
what makes containers and `StoredTensor`s), or a `Record` that is called whatever it is called and does nothing. So
files that name classes which are not installed are read as well.

Time and memory are bounded by the pickle's length. Python's unpickler in C takes as much memory as the number says
under which a pickle keeps a value; so this is the one in Python, without what copies, hashes or compares a value for
each few bytes, such as sets. What comes out may still hold one value in many places: who walks through it counts.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megalite.errors import CheckpointError
from megalite.small_files import LARGEST, MOST_AXES, WHOLE_NUMBERS, read_small_file

_MOST_NAMES = 10_000
"""Classes and functions that a pickle may name; each that is not allowed takes a kilobyte."""
_MOST_NUMBERED_KEYS = 10_000
"""Keys that are numbers or tuples: whoever chooses those can give all the same hash, and they are compared in pairs."""


class Record:
    """Stands for an object of any class: what it was made from, none of which can be called."""

    __slots__ = ("args", "state")

    def __init__(self, args: Sequence[object]) -> None:
        self.args = args
        self.state: object = None

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


@dataclass
class Storage:
    """Values of a file that tensors share."""

    dtype: torch.dtype
    length: int
    """Elements."""
    values: memoryview = field(default_factory=lambda: memoryview(b""))
    """Their bytes, writable so that torch takes them; set when it is known where they stand."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    def read(self) -> Tensor:
        """Give it as it stands in the file, which is not copied."""
        if not self.storage.length:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.storage.values, dtype=self.dtype).as_strided(self.shape, self.strides, self.offset)


def _tensor(storage: object, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> StoredTensor:
    """A tensor of no more elements than its storage has, and within it."""
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor needs a storage")
    numbers = (offset, *_size(shape), *_size(strides))
    if len(shape) != len(strides) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise pickle.UnpicklingError("a tensor has a shape, strides and an offset that are none")
    elements, last = 1, offset
    for length, stride in zip(shape, strides, strict=True):
        elements, last = elements * length, last + (length - 1) * stride
    if elements > storage.length or (elements and last >= storage.length):
        raise pickle.UnpicklingError("a tensor is not within its storage")
    return StoredTensor(storage, offset, tuple(shape), tuple(strides))


def _size(values: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > MOST_AXES:
        raise pickle.UnpicklingError("a size is none")
    return tuple(values)


def _parameter(tensor: object, *_: object) -> object:
    return tensor


class _Function:
    """A function that a pickle may call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        return self._call(*args)


_STORAGES = """Double=float64 Float=float32 Half=float16 BFloat16=bfloat16 Long=int64 Int=int32 Short=int16 Char=int8
    Byte=uint8 Bool=bool ComplexFloat=complex64 ComplexDouble=complex128 Untyped=uint8"""
_ALLOWED: Mapping[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Dictionary,
    ("torch", "Size"): _Function(_size),
    ("torch._utils", "_rebuild_tensor"): _Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function(_parameter),
    **{("torch", str(kind).removeprefix("torch.")): kind for kind in vars(torch).values() if type(kind) is torch.dtype},
    **{
        (module, f"{kind}Storage"): getattr(torch, dtype)
        for module in ("torch", "torch.storage")
        for kind, _, dtype in (pair.partition("=") for pair in _STORAGES.split())
    },
}


class Unpickler(pickle._Unpickler):
    """Makes what is allowed, and records of the rest."""

    append: Callable[[object], None]
    """Puts a value on the stack; set by `load`."""

    def __init__(self, stream: BinaryIO, storage: Callable[[Any], Storage] | None = None) -> None:
        """`storage`: gives what a tensor's name for its bytes stands for."""
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
            raise pickle.UnpicklingError("a tensor outside of a file of torch.save")
        return self._storage(pid)

    def check_key(self, key: object) -> None:
        """Raise UnpicklingError where hashing a key, or comparing it with others, may take for ever."""
        values = key if type(key) is tuple else (key,)
        if len(values) > MOST_AXES or not all(map(_is_plain, values)):
            raise pickle.UnpicklingError("a key that none of these files has")
        self._numbered_keys += type(key) in (int, tuple)
        if self._numbered_keys > _MOST_NUMBERED_KEYS:
            raise pickle.UnpicklingError(f"more than {_MOST_NUMBERED_KEYS:,} keys that are numbers or tuples")

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, Record):
            self.append(kind(arguments))
        elif isinstance(kind, _Function) and len(arguments) <= MOST_AXES:
            self.append(kind(*arguments))
        elif kind is _Dictionary and not arguments:
            self.append(_Dictionary())
        else:
            raise pickle.UnpicklingError("a call of what is no function")


def _refused(unpickler: Any) -> None:
    raise pickle.UnpicklingError("an instruction that none of these files has")


def _is_plain(value: object) -> bool:
    """Tell whether a value is hashed and compared in no time; a record, as DCP has for keys, by what it is."""
    if type(value) is int:
        return value in WHOLE_NUMBERS
    return value is None or type(value) in (str, bytes, bool, torch.dtype) or isinstance(value, Record)


def _with_plain_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Load entries once their keys, at `keys` of the stack, are checked."""

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
    """Leave it to what has a method for that: nothing else may be changed."""
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
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),  # of which two equal ones may be compared for ever
}
Unpickler.dispatch = (
    dict.fromkeys(range(256), _refused)
    | {code: load for code, load in _BASE.items() if bytes([code]) not in _REFUSED}
    | {code[0]: _with_plain_keys(_BASE[code[0]], keys) for code, keys in _KEYS.items()}
    | {pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.NEWOBJ_EX[0]: _call_with_keywords}
    | {pickle.BUILD[0]: _set_state}
)


def load(stream: BinaryIO, storage: Callable[[Any], Storage] | None = None) -> Any:
    """Give what `pickle.load` would, as far as it is allowed. Raises whatever a damaged file makes it raise."""
    return Unpickler(stream, storage).load()


def read_pickle(path: Path, *, largest: int = LARGEST) -> Any:
    """Read a file that `pickle.dump` has written, of so many bytes at most. Raises CheckpointError."""
    try:
        return load(io.BytesIO(read_small_file(path, largest=largest)))
    except Exception as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error to raise where a file of others has made a reader raise another."""
    if isinstance(error, OSError):
        return CheckpointError(f"{path} cannot be read: {error.strerror or error}")
    why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return CheckpointError(f"{path} cannot be read ({why[:200]}): it is damaged, or no such file")
