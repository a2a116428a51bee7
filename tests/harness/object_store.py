"""Object store with a minimal set of operations: an object appears, complete, when its upload ends.

`objects:///a/folder/run` stands for the files in that folder, so that several processes share it and a test can inspect
it. There is no rename, append, copy or exclusive creation, and an empty folder does not exist.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem


class ObjectStore(AbstractFileSystem):
    """Store as an fsspec file system. `before_change` is called with the next operation and the name, before each
    change."""

    protocol = "objects"
    cachable = False
    before_change: Callable[[str, str], None] = staticmethod(lambda what, name: None)  # type: ignore[assignment]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("objects://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        place = Path(self._strip_protocol(path))
        below = [place] if place.is_file() else sorted(place.glob("[!.]*")) if place.is_dir() else []
        found = [self._entry(each) for each in below if each.is_file() or any(map(Path.is_file, each.rglob("*")))]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        place = Path(self._strip_protocol(path))
        if place.is_file() or self.ls(path):
            return self._entry(place)
        raise FileNotFoundError(path)

    @staticmethod
    def _entry(place: Path) -> dict[str, Any]:
        size, kind = (place.stat().st_size, "file") if place.is_file() else (0, "directory")
        return {"name": str(place), "size": size, "type": kind}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            return open(path, "rb", buffering=0)
        if mode != "wb":
            raise NotImplementedError(f"{mode} of an object")
        return Upload(Path(path))

    def rm_file(self, path: str) -> None:
        self.before_change("remove", path)
        Path(path).unlink()
        with suppress(OSError):
            Path(path).parent.rmdir()

    def cp_file(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("copy of an object")

    mv = mkdir = makedirs = touch = cp_file


class Upload(io.BytesIO):
    """Upload: its bytes become an object at one moment, when it is closed."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self.given_up = False

    def close(self) -> None:
        if not self.closed and not self.given_up:
            self.given_up = True
            ObjectStore.before_change("put", str(self.place))
            aside = self.place.parents[1] / f".{uuid.uuid4()}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(self.getvalue())
            self.place.parent.mkdir(exist_ok=True)
            os.replace(aside, self.place)
        super().close()

    def discard(self) -> None:
        self.given_up = True

    def __exit__(self, *_: object) -> None:
        self.close()  # after an error, too, and when it is garbage-collected, as real clients do

    __del__ = close


fsspec.register_implementation("objects", ObjectStore, clobber=True)
