"""Inputs as edits of valid files: what a seed draws, what the corpus keeps, and what shrinking leaves out.

An edit is a list of JSON values: the file, an operation and its arguments. Operations on a file's tree (the JSON of a
manifest, the arrays of an .idx, the arguments in a .pt) go through the file's `Codec`, so that what lies around it
(checksums, lengths) is right again, and the reader gets past them; the others change its bytes, or what it is.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import random
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Edit = list[Any]
Tree = Any


class Raw(str):
    """A value as it stands in a file, which may be none of JSON."""


@dataclass(frozen=True)
class Codec:
    """Conversion of a file to a tree, and back.

    Attributes:
        decode: returns the tree of a valid file.
        encode: returns the file of a tree with `Raw` values; the second argument is the valid file.
        values: raw values that are hostile to this kind of file, in addition to those for all kinds.
    """

    decode: Callable[[bytes], Tree]
    encode: Callable[[Tree, bytes], bytes]
    values: Sequence[str] = ()


# ---------------------------------------------------------------------------------------------------- formats


def _json_text(tree: Tree) -> str:
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value)
            return f"@raw {len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        return [marked(inner) for inner in value] if isinstance(value, list) else value

    # In one pass: an edit may repeat a list with such values a hundred thousand times.
    return re.sub(r'"@raw (\d+)@"', lambda mark: raw[int(mark[1])], json.dumps(marked(tree)))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _manifest(tree: Tree, _: bytes) -> bytes:
    text = _json_text(
        {key: value for key, value in tree.items() if key != "checksum"} if isinstance(tree, dict) else tree
    )
    try:
        checksum = zlib.crc32(json.dumps(json.loads(text), sort_keys=True).encode())
    except (ValueError, RecursionError):
        checksum = 0
    return _bytes(text[: text.rindex("}")] + f', "checksum": {checksum}}}' if text.endswith("}") else text)


def _header(tree: Tree, valid: bytes) -> bytes:
    text = _bytes(_json_text(tree))
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + valid[8 + struct.unpack_from("<Q", valid)[0] :]


def _lines(tree: Tree, _: bytes) -> bytes:
    return b"".join(_bytes(_json_text(record)) + b"\n" for record in tree) if isinstance(tree, list) else b""


_IDX = struct.Struct("<9sQBQQ")


def _index_tree(data: bytes) -> Tree:
    _, version, code, sequences, boundaries = _IDX.unpack_from(data)
    at, found = _IDX.size, []
    for letter, size, count in (("i", 4, sequences), ("q", 8, sequences), ("q", 8, boundaries)):
        found.append(list(struct.unpack_from(f"<{count}{letter}", data, at)))
        at += size * count
    names = ("lengths", "pointers", "documents")
    return {"version": version, "code": code, "sequences": sequences, "boundaries": boundaries} | dict(
        zip(names, found, strict=True)
    )


def _index(tree: Tree, valid: bytes) -> bytes:
    def whole(value: Any) -> int:
        try:
            return int(json.loads(value) if isinstance(value, str) else value)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return 0

    counts = (whole(tree.get(name, 0)) for name in ("version", "code", "sequences", "boundaries"))
    version, code, sequences, boundaries = counts
    parts = [valid[:9], *(number % 2**64 for number in (version, code % 256, sequences, boundaries))]
    data = _IDX.pack(*parts)
    for name, letter, bits in (("lengths", "I", 32), ("pointers", "Q", 64), ("documents", "Q", 64)):
        values = tree.get(name, [])
        values = [whole(value) % 2**bits for value in (values if isinstance(values, list) else [values])]
        data += struct.pack(f"<{len(values)}{letter}", *values)
    return data


def _torch_tree(data: bytes) -> Tree:
    import torch

    tree = dict(torch.load(io.BytesIO(data), weights_only=False))
    return tree | {"args": vars(tree["args"])} if "args" in tree else tree


def _torch_file(tree: Tree, valid: bytes) -> bytes:
    from argparse import Namespace

    import torch

    def plain(value: Any) -> Any:
        if isinstance(value, Raw):
            try:
                return json.loads(value)
            except (ValueError, RecursionError):
                return str(value)[:100]
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    value = plain(tree)
    if isinstance(value, dict) and isinstance(value.get("args"), dict):
        value["args"] = Namespace(**value["args"])
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=valid.startswith(b"PK"))
    return file.getvalue()


_LAUGHS = "[" + ", ".join(f"&{name} [{', '.join(['*' + before if before else '1'] * 9)}]" for before, name in
                          zip(["", *"abcdefgh"], "abcdefghi", strict=True)) + ", *i]"  # fmt: skip
JSON = Codec(json.loads, lambda tree, _: _bytes(_json_text(tree)))
YAML = Codec(
    json.loads,  # which is YAML, too, and so are the values below in the place of values of JSON
    JSON.encode,
    (
        "2001-99-99", "2001-01-01", "2001-01-01T25:61:61", "!!int abc", '!!int ""', "!!float abc", "!!bool abc",
        "!!timestamp abc", "!!python/name:os.system", "!!binary abc", "&a [*a]", "*a", "1e400", "0x" + "f" * 5000,
        "1:1:1", "0o9", "~", "? a", "{a: {", "!<a>", "yes", _LAUGHS,
    ),
)  # fmt: skip
LINES = Codec(lambda data: [json.loads(line) for line in data.splitlines()], _lines)
MANIFEST = Codec(json.loads, _manifest)
SAFETENSORS = Codec(lambda data: json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]]), _header)
INDEX = Codec(_index_tree, _index)
TORCH = Codec(_torch_tree, _torch_file)
BYTES = Codec(lambda data: None, lambda tree, valid: valid)

# ---------------------------------------------------------------------------------------------------- values

_NUMBERS = (
    "-1", "0", "1", "2", "3", "64.5", "-0.0", "1e999", "NaN", "-Infinity", "1000000000", "-1000000000", "2147483647",
    "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1" + "0" * 30,
    "-1" + "0" * 30, "1" + "0" * 300, "9" * 6000, "1e-300", "4611686018427387904",
)  # fmt: skip
_TEXTS = (
    '""', '" "', '"x"', '"2"', '"NaN"', '"/etc/passwd"', '"../outside/x"', '"../../outside/x"', '"/dev/zero"',
    '"\\ud800"',
    '"\\u0000"', '"a\\nb"', json.dumps("a" * 2000), '"../"', '"~"',
)  # fmt: skip
_OTHERS = ("null", "true", "false", "[]", "{}", "[null]", '{"a": 1}', "[[]]")
MOST_PATHS = 400


def _paths(tree: Tree, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = (
            enumerate(tree)
            if len(tree) <= 12
            else [(i, tree[i]) for i in (*range(6), *range(len(tree) - 6, len(tree)))]
        )
    else:
        return
    for key, value in items:
        if isinstance(key, str | int):
            yield from _paths(value, (*path, key))


def _at(tree: Tree, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _replaced(tree: Tree, path: Sequence[Any], change: Callable[[Any, Any], None] | None, value: Any = None) -> Tree:
    """The tree with a change to what holds the path's last key, or with another value there."""
    if not path:
        return value if change is None else tree
    holder = _at(tree, path[:-1])
    if change is None:
        holder[path[-1]] = value
    else:
        change(holder, path[-1])
    return tree


def hostile_value(draw: random.Random, value: Any, extra: Sequence[str]) -> str:
    """The raw text of something that may be wrong where a value is now."""
    if isinstance(value, bool) or not isinstance(value, int | float) or draw.random() < 0.4:
        pools = [_NUMBERS, _TEXTS, _OTHERS, *([extra] * 3 if extra else [])]
        return draw.choice(draw.choice(pools))
    near = [value + 1, value - 1, value * 2, value // 2, -value, value + 8, value * 1000003, value + 2**31]
    return draw.choice([*map(repr, near), *_NUMBERS])


# ---------------------------------------------------------------------------------------------------- operations


def draw_edit(draw: random.Random, file: str, valid: bytes, codec: Codec, *, regular: bool = False) -> Edit:
    """One edit of a file, which stays one where it has to be `regular`."""
    tree = codec.decode(valid)
    if tree is not None and draw.random() < 0.75:
        paths, path = list(_paths(tree)), draw_path(draw, tree)
        value = _at(tree, path)
        operation = draw.choice(["set"] * 6 + ["remove", "copy", "double", "nest", "fill"])
        if operation == "set":
            return [file, "set", path, hostile_value(draw, value, codec.values)]
        if operation == "copy":
            return [file, "copy", path, list(draw.choice(paths))]
        if operation == "double":
            return [file, "double", path, hostile_value(draw, value, codec.values)]
        if operation == "nest":
            return [file, "nest", path, draw.choice(["list", "object"]), draw.choice([70, 3000, 100_000])]
        if operation == "fill":
            lists = [path for path in paths if isinstance(_at(tree, path), list)] or [tuple(path)]
            return [file, "fill", list(draw.choice(lists)), draw.choice(["0", "-1", "1", "16", "1152921504606846976"])]
        return [file, operation, path]
    while (edit := _draw_bytes(draw, len(valid)))[0] in NATURE and regular:
        pass
    return [file, *edit]


def draw_path(draw: random.Random, tree: Tree) -> list[Any]:
    """The way to a value in a tree."""
    paths = list(_paths(tree))
    draw.shuffle(paths)
    path = draw.choice(sorted(paths[:MOST_PATHS], key=len)[1:] or paths)
    if draw.random() < 0.5:  # what stands high in the tree is what most depends on
        path = draw.choice([path for path in paths if 0 < len(path) <= 2] or [path])
    return list(path)


def _draw_bytes(draw: random.Random, size: int) -> list[Any]:
    at = draw.randrange(size) if size else 0
    some = base64.b64encode(draw.choice([
        draw.randbytes(draw.choice([1, 4, 8])), b"\xff" * 8, b"\0" * 8, b"\0" * 64, b"\x80", b"\xed\xa0\x80",
        b"[" * 5000, b"\r", b"\n\n", (10**9).to_bytes(8, "little"), b'"', b"9" * 5000,
        b"%s%n", b"{{", b"\x7f\xff\xff\xff",
    ])).decode()  # fmt: skip
    return draw.choice([
        *[["flip", draw.randrange(8 * size) if size else 0]] * 6,
        *[["put", at, some]] * 3,
        *[["insert", at, some]] * 2,
        ["drop", at, draw.choice([1, 7, 8, 64, 10**6])],
        ["cut", at],
        ["cut", draw.choice([0, 1, 8, max(size - 1, 0)])],
        ["splice", at, draw.randrange(size) if size else 0, draw.choice([1, 8, 64, 4096])],
        ["repeat", draw.choice([2, 100])],
        ["fifo"], ["link", "/dev/zero"], ["link", "/dev/stdin"], ["link", "../../outside/secret"],
        ["sparse", draw.choice([2**31, 2**33, 2**40])], ["missing"], ["folder"], ["unreadable"],
    ])  # fmt: skip


def apply(edits: Sequence[Edit], folder: Path, codecs: Mapping[str, Codec], samples: Path) -> None:
    """Make the changes in a folder of valid files; one that does not fit any more changes nothing."""
    for file in dict.fromkeys(edit[0] for edit in edits):
        path = folder / file
        valid = path.read_bytes() if path.exists() else b""
        codec = codecs.get(file, BYTES)
        of_file = [edit[1:] for edit in edits if edit[0] == file]
        trees = [edit for edit in of_file if edit[0] in _TREE]
        data = valid
        if trees:
            tree = copy.deepcopy(codec.decode(valid))
            for operation, *arguments in trees:
                try:
                    tree = _TREE[operation](tree, *arguments)
                except (KeyError, IndexError, TypeError, AttributeError):
                    continue
            data = codec.encode(tree, valid)
        for operation, *arguments in of_file:
            if operation in _CONTENT:
                data = _CONTENT[operation](data, *arguments)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        for operation, *arguments in of_file:
            if operation in NATURE:
                if path.is_dir():
                    continue
                path.unlink(missing_ok=True)
                NATURE[operation](path, samples, *arguments)


def _nested(value: Any, kind: str, depth: int) -> Raw:
    begin, end = ("[", "]") if kind == "list" else ('{"a": ', "}")
    return Raw(begin * depth + "1" + end * depth)


def _double(tree: Tree, path: list[Any], raw: str) -> Tree:
    def change(holder: Any, key: Any) -> None:
        holder[key] = Raw(f"{_json_text(holder[key])}, {json.dumps(str(key))}: {raw}")

    return _replaced(tree, path, change)


def _remove(tree: Tree, path: list[Any]) -> Tree:
    return _replaced(tree, path, lambda holder, key: holder.pop(key))


_TREE: Mapping[str, Callable[..., Tree]] = {
    "set": lambda tree, path, raw: _replaced(tree, path, None, Raw(raw)),
    "remove": _remove,
    "copy": lambda tree, path, other: _replaced(tree, path, None, copy.deepcopy(_at(tree, other))),
    "double": _double,
    "nest": lambda tree, path, kind, depth: _replaced(tree, path, None, _nested(_at(tree, path), kind, depth)),
    "fill": lambda tree, path, raw: _replaced(tree, path, None, [Raw(raw)] * len(_at(tree, path))),
    "long text": lambda tree, path, begin, text, size: _replaced(
        tree, path, None, Raw(json.dumps(begin + text * (size // len(text)) + "x"))
    ),
    "long list": lambda tree, path, raw, times: _replaced(tree, path, None, Raw(f"[{raw}{f', {raw}' * (times - 1)}]")),
    "append": lambda tree, values: [*tree, *values],
}
_CONTENT: Mapping[str, Callable[..., bytes]] = {
    "flip": lambda data, bit: (
        data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        if bit < 8 * len(data)
        else data
    ),
    "put": lambda data, at, text: data[:at] + base64.b64decode(text) + data[at + len(base64.b64decode(text)) :],
    "insert": lambda data, at, text: data[:at] + base64.b64decode(text) + data[at:],
    "drop": lambda data, at, count: data[:at] + data[at + count :],
    "cut": lambda data, size: data[:size],
    "splice": lambda data, to, at, count: data[:to] + data[at : at + count] + data[to + count :],
    "repeat": lambda data, times: data * times if len(data) * times < 2**22 else data,
    "text": lambda data, text: _bytes(text),
}


def _sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


NATURE: Mapping[str, Callable[..., object]] = {
    "fifo": lambda path, _: os.mkfifo(path),
    "link": lambda path, _, target: path.symlink_to(target),
    "sparse": lambda path, _, size: _sparse(path, size),
    "missing": lambda path, _: None,
    "folder": lambda path, _: path.mkdir(),
    "unreadable": lambda path, _: path.touch(mode=0o000),
    # Made when the fuzzer starts, and not kept in the corpus: it holds code.
    "archive": lambda path, samples, name: shutil.copy(samples / name, path),
}
