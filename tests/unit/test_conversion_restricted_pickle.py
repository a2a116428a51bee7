"""Pickles of others are data: whatever they name, nothing of it is imported, called or changed."""

from __future__ import annotations

import argparse
import collections
import copyreg
import enum
import io
import os
import pickle
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.families import LLAMA
from megalite.conversion.huggingface_files import HuggingFaceFiles
from megalite.conversion.torch_archive import read_torch_file
from megalite.errors import CheckpointError
from megalite.restricted_pickle import Record, StoredTensor, Unpickler, load, read_pickle


class Reduced:
    """Object that is pickled as a call."""

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
        with pytest.raises(pickle.UnpicklingError, match="none of these files"):
            unpickled(data)
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
        "list": [1, 2.5, None, True, "text", {"nested": (1, 2)}, {(1, "key"): 1}],
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
        "empty": torch.empty(0, 3),
        "other": argparse.Namespace(a=1),
    }
    torch.save(values, tmp_path / "file.pt", _use_new_zipfile_serialization=new)

    found = read_torch_file(tmp_path / "file.pt")

    for name in ("plain", "view", "whole", "parameter", "empty"):
        assert isinstance(found[name], StoredTensor)
        assert found[name].read().dtype == values[name].dtype
        assert torch.equal(found[name].read(), values[name])
    assert found["other"].fields == {"a": 1}
    assert found["view"].storage is found["whole"].storage
    assert found["view"].read().untyped_storage().data_ptr() == found["whole"].read().data_ptr()


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


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "common.pt", "__0_0.distcp", "pytorch_model.bin"])
def test_a_program_in_the_place_of_weights_is_not_run(name: str, tmp_path: Path) -> None:
    path, made = tmp_path / name, tmp_path / "made"
    save_program(path, made)
    with pytest.raises(CheckpointError, match="which no file of tensors has"):
        if name == "pytorch_model.bin":
            HuggingFaceFiles(tmp_path, {}, LLAMA, frozenset())
        else:
            read_torch_file(path, 0, path.stat().st_size if name == "__0_0.distcp" else None)
    assert not made.exists()

    with warnings.catch_warnings(action="ignore"):
        torch.load(path, weights_only=False)  # the file does what it is feared for
    assert made.exists()


def save_program(path: Path, made: Path) -> None:
    """A TorchScript program that makes a file when it is loaded."""

    class Program(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.made = 1, str(made)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y

        @torch.jit.export
        def __getstate__(self) -> str:
            return self.made

        @torch.jit.export
        def __setstate__(self, state: str) -> None:
            self.made, self.x, self.training = state, int(torch.from_file(state, True, 9, dtype=torch.uint8)[0]), False

    with warnings.catch_warnings(action="ignore"):
        torch.jit.script(Program()).save(path)


def archive(path: Path, pickled: bytes, *, data: bytes = bytes(16), compressed: bool = False, **more: bytes) -> None:
    """A file like one of `torch.save`, whatever stands in it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as file:
        for name, content in {"data.pkl": pickled, "data/0": data, **more}.items():
            file.writestr(f"file/{name}", content)


def tensor(*rest: object) -> bytes:
    """The pickle of a tensor in a storage of four elements."""
    storage = object()

    class Pickler(pickle.Pickler):
        def persistent_id(self, each: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if each is storage else None

    file = io.BytesIO()
    Pickler(file, 2).dump(Reduced(torch._utils._rebuild_tensor_v2, storage, *rest, False, collections.OrderedDict()))
    return file.getvalue()


def test_a_tensor_lies_within_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    archive(path, tensor(1, (3,), (1,)))
    assert read_torch_file(path).read().tolist() == [0.0] * 3
    for offset, shape, strides in [
        (2, (3,), (1,)), (-1, (3,), (1,)), (0, (10**18,), (0,)), (0, (2, 2), (3, 1)), (0, (2,), (-1,)),
        (0, (2,), (1, 1)), (0, (10**30, 0), (1, 1)), (0, (2.0,), (1,)), (0, (-1,), (1,)),
        (0, "ab", (1, 1)), (0, (1,) * 100, (1,) * 100),
    ]:  # fmt: skip
        archive(path, tensor(offset, shape, strides))
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_torch_file(path)
    archive(path, tensor(1, (3,), (1,))[:-1] + b"}Voffset\nK\x63sb.")  # it is given another offset later
    with pytest.raises(CheckpointError, match="__setstate__"):
        read_torch_file(path)


def test_an_archive_is_refused_that_torch_would_not_write(tmp_path: Path) -> None:
    path, pickled = tmp_path / "file.pt", tensor(0, (4,), (1,))
    for message, options in [
        ("compressed", {"compressed": True, "data": bytes(10**6)}),
        ("another size", {"data": bytes(12)}),
        ("big-endian", {"byteorder": b"big"}),
        ("constants.pkl', which no file", {"constants.pkl": b""}),
        ("code/main.py', which no file", {"code/main.py": b""}),
    ]:
        archive(path, pickled, **options)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=message):
            read_torch_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_torch_file(path)


def test_a_pickle_takes_no_more_than_its_length_allows() -> None:
    long = b"(" + b"K\1" * 1000 + b"t"
    sets = b"(" * 32 + b"(K\0\x91" + b"2\x86\x91" * 32
    nested = b"K\1" + b"\x86".join(b"2" for _ in range(60)) + b"\x86"
    for data, message in [
        (b"K\1r\xff\xff\xff\x7f.", None),  # kept under number 2**31
        (b"\x96" + (2**40).to_bytes(8, "little") + b".", "none of these files"),  # an array of 2**40 bytes
        (b"}" + nested + b"K\1s.", "a key that none"),  # whose hash takes 2**60 steps
        (b"(" + nested + b"K\1d.", "a key that none"),
        (b"}(" + nested + b"K\1u.", "a key that none"),
        (b"(K\0\x91.", "none of these files"),
        (b"\x8f.", "none of these files"),
        (b"](K\0\x90.", "none of these files"),
        (b"}" + sets + b"K\1s" + sets + b"K\1s.", "none of these files"),  # compared in 2**32 steps
        (b"ctorch\nSize\n(" + long + b"tR.", "a size is not valid"),  # a copy of what is long
        (b"ctorch._utils\n_rebuild_parameter\n" + long + b"R.", "not a function"),
        (b"ccollections\nOrderedDict\n(]tR.", "not a function"),
        (b"".join(b"ca\n%d\n0" % number for number in range(10_001)), "too many classes"),
    ]:
        if message is None:
            unpickled(data)
        else:
            with pytest.raises(pickle.UnpicklingError, match=message):
                unpickled(data)


def of_one_hash(count: int) -> list[tuple[int, int]]:
    """Tuples that Python's hash of tuples (xxHash, without a secret) does not tell apart."""
    ones, of_axis, end = 11400714785074694791, 14029467366897019727, 2**64
    inverse = pow(of_axis, -1, end)
    found: list[tuple[int, int]] = []
    for first in range(12 * count):
        mixed = (2870177450012600261 + first * of_axis) % end
        mixed = (mixed << 31 | mixed >> 33) % end * ones
        second = (7 - mixed) * inverse % end
        if second < 2**61 - 1 and len(found) < count:
            found.append((first, second))
    assert len(found) == count
    assert len(set(map(hash, found[:100]))) == 1
    return found


@pytest.mark.wide
def test_keys_that_are_compared_in_pairs_are_few() -> None:
    for keys in (range(10_001), [(number,) for number in range(10_001)], of_one_hash(60_000)):
        entries = b"".join(pickle.dumps(key, 2)[2:-1] + b"N" for key in keys)  # a dict of the last would take minutes
        with pytest.raises(pickle.UnpicklingError, match="more than 10,000 keys that are numbers or tuples"):
            unpickled(b"}(" + entries + b"u.")
    assert len(unpickled(pickle.dumps(dict.fromkeys(range(10_000)), 2))) == 10_000


@pytest.mark.parametrize("key", [2**64, -(2**63) - 1, 2**5000, 1.0, (2**64,), ((),), frozenset((1,))])
def test_a_key_is_a_text_or_a_number_of_64_bits(key: object) -> None:
    data = pickle.dumps({"a": 1, -(2**63): 1, 2**64 - 1: 1, None: 1, b"b": 1, ("a", torch.float16): 1}, 2)
    assert len(unpickled(data)) == 6
    with pytest.raises(pickle.UnpicklingError, match=r"a key that none|an instruction that none"):
        unpickled(pickle.dumps({key: 1}, 4))


def test_a_long_name_is_not_copied_for_each_class_of_it() -> None:
    unpickler, module = Unpickler(io.BytesIO()), "a" * 10**6
    tracemalloc.start()
    unpickler.find_class(module, "b")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10**5


def old_file(path: Path, names: bytes) -> None:
    """A file as torch wrote them before 1.6, with another pickle for the list of its storages."""
    torch.save({"a": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    at = content.rindex(b"\x80\x02]")
    path.write_bytes(content[:at] + names + content[content.index(b".", at) + 1 :])


def test_each_storage_of_an_old_file_has_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    long = b"\x8b" + (3000).to_bytes(4, "little") + b"\1" * 3000
    for names, message in [
        (b"\x80\x02].", "leaves some out"),
        (b"\x80\x02N.", "its list of storages is not valid"),
        (b"\x80\x02]" + long + b"a.", "its list of storages is not valid"),  # a number that Python does not write
        (b"\x80\x02]K\1" + b"2\x86" * 60 + b"a.", "its list of storages is not valid"),  # hashed in 2**60 steps
    ]:
        old_file(path, names)
        with pytest.raises(CheckpointError, match=message):
            read_torch_file(path)


def test_what_describes_a_storage_is_short(tmp_path: Path) -> None:
    described = ("storage", torch.FloatStorage, "0", "cpu", 4, *[None] * 10)
    archive(tmp_path / "file.pt", pickle.dumps(described, 2)[:-1] + b"Q.")
    with pytest.raises(CheckpointError, match="described in another way"):
        read_torch_file(tmp_path / "file.pt")


def test_a_tensor_of_no_storage_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="needs a storage"):
        unpickled(b"ctorch._utils\n_rebuild_tensor_v2\n(Va\nI0\n(I1\nt(I1\nttR.")
