"""Files and folders that torch itself reads: each box as `torch.save` writes it, all as DCP describes them."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megalite.checkpoint import torch_file
from megalite.checkpoint.tensors import ByteRange, TensorBox
from megalite.parallel.sharding import Box
from tests.harness.checkpoints import Placed, cuts

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (33, 5), (1, 3, 1), (2, 3, 4, 5)]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it says so even where that is asked


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of random bits, including those of NaNs."""
    values = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def raw(values: Tensor) -> bytes:
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def part_of(name: str, values: Tensor, box: Box | None = None) -> TensorBox:
    shape = tuple(values.shape)
    return TensorBox(name, shape, values.dtype, box or Box.whole(shape))


def archive(values: Tensor) -> tuple[ByteRange, bytes]:
    """Return a file of one unsplit tensor."""
    (place,) = torch_file.byte_ranges([part_of("weight", values)])
    return place, place.before + raw(values) + place.after(zlib.crc32(raw(values)))


def write_folder(folder: Path, tensors: dict[str, Tensor], cut: Sequence[Sequence[Placed]]) -> None:
    """Write files as streams of boxes, and the files that describe them."""
    files = {}
    for rank, placed in enumerate(cut):
        parts = [part_of(name, tensors[name], box) for name, box in placed]
        files[f"__{rank}_0.distcp"] = list(zip(parts, torch_file.byte_ranges(parts), strict=True))
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            for part, place in files[f"__{rank}_0.distcp"]:
                data = raw(tensors[part.name][part.box.slices()])
                file.write(place.before + data + place.after(zlib.crc32(data)))
    (folder / ".metadata").write_bytes(torch_file.metadata(files))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_box_is_an_archive_as_torch_saves_it(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    values = any_bits(shape, dtype)
    place, data = archive(values)
    (tmp_path / "weight.pt").write_bytes(data)
    theirs = io.BytesIO()
    torch.save(values, theirs)

    loaded = torch.load(io.BytesIO(data), weights_only=True)
    mapped = torch.load(tmp_path / "weight.pt", weights_only=True, mmap=True)

    assert same(loaded, values)
    assert same(mapped, values)
    assert mapped.data_ptr() % 64 == 0
    assert data[place.start : place.stop] == raw(values)
    assert len(data) % 64 == 0, "the next one would not be aligned"
    with zipfile.ZipFile(io.BytesIO(data)) as ours, zipfile.ZipFile(theirs) as torchs:
        for name in ours.namelist():
            assert ours.read(name) == torchs.read(name), name


def test_an_archive_has_no_gaps_and_its_checksums_stand_behind_the_bytes() -> None:
    _, data = archive(any_bits((33, 5), torch.float32))
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        end = 0
        for info in zipped.infolist():
            assert info.header_offset == end
            start = end + 30 + sum(struct.unpack_from("<2H", data, end + 26))
            end = start + info.file_size + 24
            descriptor = (b"PK\x07\x08", zlib.crc32(zipped.read(info)), info.file_size, info.file_size)
            assert struct.unpack_from("<4sI2Q", data, end - 24) == descriptor
        assert zipped.start_dir == end


def test_an_archive_tells_a_flipped_bit() -> None:
    place, data = archive(any_bits((33, 5), torch.float32))
    damaged = bytearray(data)
    damaged[place.start + 100] ^= 1

    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert zipfile.ZipFile(io.BytesIO(damaged)).testzip() == "archive/data/0"


@pytest.mark.wide
@settings(max_examples=15)
@given(st.data())
def test_any_cut_loads_bit_for_bit(data: st.DataObject) -> None:
    vectors = {
        "model/word": any_bits((6, 5), torch.bfloat16),
        "model/experts": any_bits((3, 2, 4), torch.float16),
        "optimizer/exp_avg/word": any_bits((6, 5), torch.float32),
        "optimizer/exp_avg/norm": any_bits((7,), torch.float64),
    }
    scale = any_bits((), torch.float32)
    tensors = vectors | {"model/scale": scale}
    cut = data.draw(cuts(vectors))
    cut[-1].append(("model/scale", Box.whole(())))
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        write_folder(folder, tensors, cut)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        dcp_to_torch_save(folder, folder / "whole.pt")
        converted = torch.load(folder / "whole.pt", weights_only=True)

    assert converted.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
        assert same(converted[name], tensor), name


def test_a_folder_is_described_as_dcp_does(tmp_path: Path) -> None:
    tensors = {f"model/{dtype}.{shape}": any_bits(shape, dtype) for dtype in DTYPES for shape in SHAPES}
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", tensors, [[(name, part_of(name, t).box) for name, t in tensors.items()]])
    dcp.save(tensors, checkpoint_id=tmp_path / "theirs", no_dist=True)

    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))

    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    end = 0
    for stored in sorted(ours.storage_data.values(), key=lambda stored: stored.offset):
        assert (stored.relative_path, stored.offset) == ("__0_0.distcp", end)
        end += stored.length
    assert end == (tmp_path / "ours" / "__0_0.distcp").stat().st_size


def test_the_same_files_are_described_in_the_same_bytes() -> None:
    def described(equal: Mapping[str, str]) -> bytes:
        values = torch.zeros(4, 3)
        parts = [part_of(equal[name], values, Box((row, 0), (2, 3))) for row in (0, 2) for name in ("a", "b")]
        return torch_file.metadata({"__0_0.distcp": list(zip(parts, torch_file.byte_ranges(parts), strict=True))})

    class Fresh(dict[str, str]):
        def __missing__(self, name: str) -> str:
            return f"model/{name}"  # another string each time

    assert described({"a": "model/a", "b": "model/b"}) == described(Fresh())


def test_a_box_beyond_4_gib_and_one_behind_it(tmp_path: Path) -> None:
    large = TensorBox("large", (2**30 + 16,), torch.float32, Box.whole((2**30 + 16,)))
    behind = any_bits((3,), torch.float32)
    parts = [large, part_of("behind", behind)]
    first, second = torch_file.byte_ranges(parts)
    path = tmp_path / "__0_0.distcp"
    with path.open("wb") as file:  # sparse: zeros but for the last element
        file.write(first.before)
        file.seek(first.stop - 4)
        file.write(struct.pack("<f", 1.5) + first.after(0x12345678))

    with zipfile.ZipFile(path) as zipped:
        info = zipped.getinfo("archive/data/0")
        assert (info.file_size, info.compress_size, info.CRC) == (large.size, large.size, 0x12345678)
        with zipped.open(info) as stored:
            assert stored.read(8) == bytes(8)
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert mapped.shape == large.shape
    assert mapped[0] == 0
    assert mapped[-1] == 1.5

    with path.open("ab") as file:
        file.write(second.before + raw(behind) + second.after(zlib.crc32(raw(behind))))
    (tmp_path / ".metadata").write_bytes(
        torch_file.metadata({path.name: list(zip(parts, (first, second), strict=True))})
    )
    loaded = {"behind": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert same(loaded["behind"], behind)
    assert os.stat(path).st_blocks * 512 < 2**20, "the test should not write 4 GiB"
