"""Headers of safetensors files: what the format's own library refuses is refused here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from megalite.conversion.huggingface_files import _pickled, open_safetensors
from megalite.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "none": torch.zeros(0, 5)}
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "none": {"dtype": "F32", "shape": [0, 5], "data_offsets": [32, 32]},
}
DATA = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in TENSORS.values())


def content(header: Any, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(folder: Path, whole: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(whole)
    return folder / "model.safetensors"


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return HEADER | {name: HEADER[name] | fields}


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    files = open_safetensors(write(tmp_path, content(HEADER)))
    assert {name: kind.shape for name, (kind, _) in files.items()} == {"a": (2, 3), "b": (4,), "none": (0, 5)}
    for name in ("a", "b"):
        assert torch.equal(files[name][1](), TENSORS[name])


REFUSED: dict[str, tuple[bytes, str]] = {
    "overlap": (content(changed("b", data_offsets=[16, 24])), "b begins at byte .*, but the tensor before it ends"),
    "gap": (content(changed("b", data_offsets=[25, 33]), DATA + b"x"), "b begins at byte"),
    "one byte late": (content(changed("a", data_offsets=[1, 25])), "a begins at byte"),
    "two weights of one": (content(changed("none", shape=[2], data_offsets=[24, 32])), "begins at byte"),
    "more data": (content(HEADER, DATA + b"x"), "its tensors end at byte"),
    "less data": (content(HEADER, DATA[:-1]), "its tensors end at byte"),
    "a float": (content(changed("a", shape=[2.0, 3])), "not whole numbers"),
    "a text": (content(changed("a", shape=["2", 3])), "not whole numbers"),
    "a truth": (content(changed("b", shape=[True, 4])), "not whole numbers"),
    "negative": (content(changed("a", shape=[-2, -3])), "not whole numbers"),
    "minus nothing": (content(json.dumps(HEADER).replace("[0, 24]", "[-0, 24]").encode()), "not whole numbers"),
    "other size": (content(changed("a", shape=[2, 4])), r"a of shape \[2, 4\] does not take bytes 0 to 24"),
    "many axes": (content(changed("a", shape=[2, 3] + [1] * 63)), "not whole numbers of 0 or more, or are too many"),
    "huge times nothing": (content(changed("none", shape=[2**62, 4, 0])), "does not take bytes 32 to 32"),
    "unknown numbers": (content(changed("a", dtype="F33")), "the dtype F33"),
    "no numbers": (content(changed("a", dtype=["F32"])), "the dtype"),
    "twice": (content(json.dumps(HEADER)[:-1].encode() + b', "a": {}}'), "'a' is twice"),
    "a number": (content(HEADER | {"c": 1}), "c must have just a dtype"),
    "notes": (content(HEADER | {"__metadata__": {"format": 1}}), "its metadata are not texts"),
    "half a character": (content(HEADER | {"__metadata__": {"format": "\ud800"}}), "surrogates not allowed"),
    "half a name": (content(HEADER | {"\ud800": HEADER["none"]}), "a tensor is called"),
    "space in front": (content(b" " + json.dumps(HEADER).encode()), "is not a JSON object"),
    "a mark in front": (content(b"\xef\xbb\xbf" + json.dumps(HEADER).encode()), "is not a JSON object"),
    "utf-16": (content(json.dumps(HEADER).encode("utf-16-le")), "not a complete safetensors file"),
    "no header": ((2**63).to_bytes(8, "little") + b"{}", "a header of 9,223,372,036,854,775,808 bytes in a file of 10"),
    "nothing": (b"", "not a complete safetensors file"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_format_forbids_is_refused(tmp_path: Path, what: str) -> None:
    whole, message = REFUSED[what]
    with pytest.raises(CheckpointError, match=message) as error:
        open_safetensors(write(tmp_path, whole))
    assert "model.safetensors is not a complete safetensors file: " in str(error.value)


@pytest.mark.parametrize("opener", [open_safetensors, _pickled])
def test_what_is_no_file_of_the_folder_is_refused_at_once(tmp_path: Path, opener: Callable[[Path], Any]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "device").symlink_to("/dev/zero")
    write(tmp_path, content(HEADER))
    (folder / "outside").symlink_to(tmp_path / "model.safetensors")
    for name, message in (
        ("fifo", "not a regular file"),
        ("device", "outside its folder"),
        ("outside", "outside its folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            opener(folder / name)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("name", [5, None, "a\nb", "a" * 201, b"a"])
def test_tensors_of_a_pickle_have_names(tmp_path: Path, name: object, archive: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2), name: torch.ones(2)}, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin has no tensors by name: a tensor is called") as error:
        _pickled(path)
    assert len(str(error.value)) < 300 + len(str(path))


VALUES = st.sampled_from([0, 1, 2, 3, 4, 24, 25, 32, 2**63, 2**64 - 1, -1, 1.0, "2", True, None, [], {}])
PIECES = st.sampled_from(
    [
        *("", " ", "{", "}", "[", "]", ",", ":", '"', "-0", "1.0", "1e0", "NaN", "1e400", "9" * 25, "24", "32", "33"),
        *("true", "null", '"a"', '"a":{},', '"dtype":"F32",', '"__metadata__":null,', "\\ud800", "\u00e9", "\x01"),
    ]
)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A good header with a few faults, in its values or in its text."""
    header = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(0, 2))):
        fields = header[draw(st.sampled_from(["a", "b", "none", "__metadata__"]))]
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "format", "more"]))
        dtypes = st.sampled_from(["F32", "F16", "U8", "BOOL", "U64", "f32"])
        fields[key] = draw(st.one_of(VALUES, st.lists(VALUES, max_size=3), dtypes))
    text = json.dumps(header)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(PIECES) + text[at + draw(st.integers(0, 3)) :]
    return text.encode()


@settings(deadline=None, max_examples=120)
@given(header=headers(), data=st.sampled_from([DATA, DATA, DATA, DATA[:-1], DATA + b"x"]))
def test_what_the_library_refuses_is_refused(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, data: bytes
) -> None:
    whole = content(header, data)
    try:
        deserialize(whole)
    except SafetensorError:
        with pytest.raises(CheckpointError):
            open_safetensors(write(tmp_path_factory.getbasetemp(), whole))
