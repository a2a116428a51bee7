"""Pickles of others are data: whatever they name, nothing of it is imported, called or changed."""

from __future__ import annotations

import argparse
import collections
import copyreg
import enum
import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.conversion.restricted_pickle import Record, load, read_pickle, read_torch_file
from megalite.errors import CheckpointError


class Reduced:
    """Is pickled as a call."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def unpickled(data: bytes) -> Any:
    return load(io.BytesIO(data))


def call(module: str, name: str, argument: str) -> bytes:
    """The pickle of a call, whether there is such a function or not."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [os.system, eval, exec, getattr, __import__, print, open, torch.load, os.mkdir])
def test_no_function_is_called(function: Callable[..., Any], protocol: int, tmp_path: Path) -> None:
    found = unpickled(pickle.dumps({"here": Reduced(function, str(tmp_path / "made"))}, protocol))

    assert isinstance(found["here"], Record)
    assert found["here"].args == (str(tmp_path / "made"),)
    assert not callable(found["here"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("__builtin__", "eval"), ("builtins", "getattr"),
        ("operator", "attrgetter"), ("collections", "OrderedDict.fromkeys"), ("torch", "hub.load"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"), ("no_such_module", "no_such_class"),
        ("functools", "partial"), ("torch._tensor", "_rebuild_from_type_v2"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_allowed_gives_a_record(module: str, name: str) -> None:
    assert isinstance(unpickled(call(module, name, "argument")), Record)


@pytest.mark.parametrize(
    "target",
    [
        "ccollections\nOrderedDict\n", "ctorch\nSize\n", "cos\nsystem\n", "ctorch\nfloat32\n", "cbuiltins\nset\n",
        "ctorch._utils\n_rebuild_tensor_v2\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("state", ["(dVnew\nVvalue\nsb.", "(N(dVnew\nVvalue\nstb."])
def test_nothing_that_others_use_is_changed(target: str, state: str) -> None:
    with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)):
        unpickled((target + state).encode())
    for each in (collections.OrderedDict, torch.Size, os.system, torch._utils._rebuild_tensor_v2, Record):
        assert not hasattr(each, "new")


def test_registered_extensions_are_not_reached() -> None:
    copyreg.add_extension("posix", "system", 240)
    try:
        data = pickle.dumps(Reduced(os.system, "false"), 2)
        assert pickle.EXT1 in data
        assert isinstance(unpickled(data), Record)
    finally:
        copyreg.remove_extension("posix", "system", 240)


def test_a_state_is_kept_and_not_run() -> None:
    class Hostile(dict[str, Any]):
        def __reduce__(self) -> Any:
            return Record, (), {"__setstate__": Reduced(os.system, "false"), "__class__": "Record"}

    found = unpickled(pickle.dumps(Hostile()).replace(Record.__module__.encode(), b"x" * len(Record.__module__)))
    assert isinstance(found, Record)
    assert isinstance(found.fields["__setstate__"], Record)
    assert type(found) is not str


@dataclass
class Settings:
    name: str
    sizes: tuple[int, ...]


class Kind(enum.Enum):
    ONE = 1


class Many(dict[str, int]):
    pass


@pytest.mark.parametrize("protocol", range(6))
def test_what_is_no_code_comes_out_as_it_was(protocol: int) -> None:
    values = {
        "list": [1, 2.5, None, True, "text", {"nested": (1, 2)}, {1, 2}, frozenset({3}), 2j],
        "ordered": collections.OrderedDict(a=1),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
    }
    assert unpickled(pickle.dumps(values, protocol)) == values
    assert unpickled(pickle.dumps(argparse.Namespace(layers=2), protocol)).fields["layers"] == 2
    assert unpickled(pickle.dumps(Settings("a", (1, 2)), protocol)).fields == {"name": "a", "sizes": (1, 2)}
    assert isinstance(unpickled(pickle.dumps(Kind.ONE, protocol)), Record)
    assert isinstance(unpickled(pickle.dumps(Many(a=1), protocol)), Record)


@pytest.mark.parametrize("new", [True, False])
def test_tensors_are_read_and_mapped(new: bool, tmp_path: Path) -> None:
    shared = torch.randn(4, 6).bfloat16()
    values = {
        "plain": torch.randn(3, 2),
        "view": shared[1:, ::2],
        "whole": shared,
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "other": argparse.Namespace(a=1),
    }
    torch.save(values, tmp_path / "file.pt", _use_new_zipfile_serialization=new)

    found = read_torch_file(tmp_path / "file.pt")

    for name in ("plain", "view", "whole", "parameter"):
        assert isinstance(found[name], Tensor)
        assert torch.equal(found[name], values[name])
    assert found["other"].fields == {"a": 1}
    assert found["view"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()


def test_a_hostile_file_of_torch_runs_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    torch.save({"model": torch.zeros(2), "args": Reduced(os.mkdir, str(made))}, tmp_path / "file.pt")
    assert isinstance(read_torch_file(tmp_path / "file.pt")["args"], Record)
    assert not made.exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no zip", b"\x80\x02cos\nsystem\n", b"garbage", pickle.dumps(1)[:-1]])
def test_what_is_no_pickle_is_an_error_with_the_path(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    for read in (read_pickle, read_torch_file):
        with pytest.raises(CheckpointError, match=f"{tmp_path}/file cannot be read"):
            read(tmp_path / "file")


def test_a_tensor_of_no_storage_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="needs a storage"):
        unpickled(b"ctorch._utils\n_rebuild_tensor_v2\n(Va\nI0\n(I1\nt(I1\nttR.")
