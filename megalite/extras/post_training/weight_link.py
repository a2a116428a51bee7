"""Export of weights to another process: over a connection, or with the values in memory that both processes share.

The process that generates listens and reads; rank 0 of the training connects and sends:

    for name, tensor in receive_weights(connection, secret): ...                          # there, once per export
    export_weights(chunks, optimizer, LinkReceiver(connect(host, port), secret))          # here

Both ends know a secret. Each end begins with 32 random bytes. A frame is two lengths, a JSON header, raw bytes, and the
HMAC-SHA256 of all of it and of the frame's number, with a key made of the secret, the sender's role, and both ends'
random bytes. The first frame of each end proves that it knows the secret. Nothing is parsed or used before its code has
been checked, lengths are bounded, and nothing is ever unpickled. Nothing is encrypted either.
"""

from __future__ import annotations

import hmac
import json
import math
import mmap
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import dtype_name
from megalite.checkpoint.shard_file import bytes_of
from megalite.checkpoint.tensors import Kind
from megalite.errors import CommunicationError
from megalite.extras.post_training.receivers import SECONDS, row_ranges
from megalite.small_files import MOST_AXES, parse_json

PROOF_SECONDS = 30.0
"""Time limit, from the other end's first byte on, for its whole proof: a stranger may send one byte now and then."""
_LENGTHS = struct.Struct(">IQ")
_RANDOM, _CODE = 32, 32
_LARGEST_HEADER = 1 << 26
_LARGEST_BOX = 1 << 34
_LARGEST_TENSOR = 1 << 40
_SENDER, _READER = b"sender", b"reader"
_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
_PREFIX = "megalite_weights_"
_SHARED = re.compile(_PREFIX + r"\w+")
_WRONG = "the other end of the weights' connection does not have the same secret, or is another program"


def connect(host: str, port: int, seconds: float = SECONDS) -> socket.socket:
    """Return a connection to the process that generates. Raises CommunicationError if nothing listens there."""
    try:
        return socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise CommunicationError(
            f"nothing takes the weights at {host}:{port} ({error}): start the process that generates first"
        ) from error


class LinkReceiver:
    """Process at the other end of a connection, which calls `receive_weights` for each export.

    With `shared`, only headers cross the connection, and each box is passed in memory that both processes map: a file
    in /dev/shm, which is removed as soon as both have opened it. Both must be of the same user on the same machine.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, shared: bool = False) -> None:
        self._connection, self._secret, self._shared = connection, secret, shared
        self._memory: mmap.mmap | None = None

    def begin(self, tensors: Mapping[str, Kind], config: Mapping[str, Any]) -> None:
        """Announce the tensors. Raises CommunicationError, as the other methods do, if the other end is lost."""
        self._channel = _Channel(self._connection, self._secret, _SENDER, _READER)
        listed = [(name, dtype_name(kind.dtype), kind.shape) for name, kind in tensors.items()]
        header = {"tensors": listed, "config": config}
        if not self._shared:
            self._channel.send(header)
            self._channel.receive(_RANDOM, 0)
            return
        size = max(kind.size // kind.shape[0] * next(row_ranges(kind))[1] for kind in tensors.values())
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=_shared_folder())
        try:
            os.posix_fallocate(descriptor, 0, size)  # otherwise a full memory would kill the process at a write
            self._memory = mmap.mmap(descriptor, size)
            self._channel.send({**header, "shared": Path(path).name})
            self._channel.receive(_RANDOM, 0)
        finally:
            os.close(descriptor)
            os.unlink(path)

    def box(self, name: str, row: int, values: Tensor) -> None:
        """Send rows of a tensor."""
        data, header = bytes_of(values.cpu().contiguous()), {"name": name, "row": row, "rows": len(values)}
        if self._memory is None:
            self._channel.send(header, data)
            return
        self._memory[: len(data)] = data
        self._channel.send(header)
        self._channel.receive(_RANDOM, 0)  # the memory is free again

    def finish(self) -> None:
        """Wait until the other end has all tensors."""
        self._channel.send({"finished": True})
        self._channel.receive(_RANDOM, 0)
        self._release()

    def abandon(self) -> None:
        """Close the connection, so that the other end learns of the failure."""
        self._release()
        self._connection.close()

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def receive_weights(connection: socket.socket, secret: bytes) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one export, whole, in the order of their names, on the CPU.

    `connection` is from `socket.accept`, with a timeout of your choice. Close it if you stop early. Raises
    CommunicationError if the other end is lost or does not have the secret: the tensors so far are then only a part of
    the model.
    """
    channel = _Channel(connection, secret, _READER, _SENDER)
    memory: mmap.mmap | None = None
    try:
        header, _ = channel.receive(largest=0)
        with _meant():
            kinds = {name: _kind(dtype, shape) for name, dtype, shape in header["tensors"]}
            if "shared" in header:
                memory = _attach(header["shared"])
        channel.send({})
        for name, kind in kinds.items():
            whole = torch.empty(kind.shape, dtype=kind.dtype)
            row = 0
            while row < kind.shape[0]:
                header, data = channel.receive()
                with _meant():
                    rows = header["rows"]
                    if (header["name"], header["row"]) != (name, row) or not 0 < rows <= kind.shape[0] - row:
                        raise ValueError("the rows do not come in order")
                    part = whole[row : row + rows]
                    source = data if memory is None else memory
                    flat = torch.frombuffer(source, dtype=kind.dtype, count=part.numel())
                    if memory is None and len(data) != part.numel() * kind.dtype.itemsize:
                        raise ValueError("a box has another size than its rows")
                    part.copy_(flat.view(part.shape))
                    del flat  # which keeps the memory mapped
                if memory is not None:
                    channel.send({})
                row += rows
            yield name, whole
        header, _ = channel.receive(largest=0)
        if header != {"finished": True}:
            raise CommunicationError(_WRONG)
        channel.send({})
    finally:
        if memory is not None:
            memory.close()


class _Channel:
    """End of a connection, with frames that no third party can forge, change, repeat or drop."""

    def __init__(self, connection: socket.socket, secret: bytes, role: bytes, other: bytes) -> None:
        """Prove to the other end that this end knows the secret, and let it do the same."""
        self._connection, self._proof_ends = connection, math.inf
        with suppress(OSError):  # not over TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # answers must not wait for more data
        own = secrets.token_bytes(_RANDOM)
        with _lost():
            connection.sendall(own)
        theirs = bytes(self._exactly(1))
        patience, self._proof_ends = connection.gettimeout(), time.monotonic() + PROOF_SECONDS
        theirs += bytes(self._exactly(_RANDOM - 1))
        self._sealing = hmac.digest(secret, role + own + theirs, "sha256")
        self._opening = hmac.digest(secret, other + theirs + own, "sha256")
        self._sent = self._received = 0
        self.send({})
        self.receive(_RANDOM, 0)
        self._proof_ends = math.inf
        connection.settimeout(patience)

    def send(self, header: Mapping[str, Any], values: memoryview | bytes = b"") -> None:
        """Send a frame."""
        text = json.dumps(header).encode()
        before = _LENGTHS.pack(len(text), len(values)) + text
        self._sent += 1
        code = _code(self._sealing, self._sent, before, values)
        with _lost():
            for part in (before, values, code) if len(values) else (before + code,):
                self._connection.sendall(part)

    def receive(
        self, largest_header: int = _LARGEST_HEADER, largest: int = _LARGEST_BOX
    ) -> tuple[dict[str, Any], bytearray]:
        """Return the next frame. Raises CommunicationError if it is too long, or not from the other end."""
        lengths = bytes(self._exactly(_LENGTHS.size))
        length, size = _LENGTHS.unpack(lengths)
        if length > largest_header or size > largest:
            raise CommunicationError(_WRONG)
        text, values = bytes(self._exactly(length)), self._exactly(size)
        self._received += 1
        code = _code(self._opening, self._received, lengths + text, values)
        if not hmac.compare_digest(code, bytes(self._exactly(_CODE))):
            raise CommunicationError(_WRONG)
        with _meant():
            found = parse_json(text)
            if not isinstance(found, dict):
                raise ValueError("a header is not an object")
            return found, values

    def _exactly(self, size: int) -> bytearray:
        """Receive this number of bytes. Raises CommunicationError if the other end closes before."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            with _lost():
                if self._proof_ends < math.inf:
                    self._connection.settimeout(max(self._proof_ends - time.monotonic(), 1e-3))
                count = self._connection.recv_into(view[done:])
            if count == 0:
                raise CommunicationError("the other end of the weights' connection has ended: its own message says why")
            done += count
        return data


def _code(key: bytes, number: int, before: bytes, values: memoryview | bytearray | bytes) -> bytes:
    code = hmac.new(key, b"%d " % number + before, "sha256")
    code.update(values)
    return code.digest()


@contextmanager
def _lost() -> Iterator[None]:
    """Turn the error of a lost connection into a CommunicationError."""
    try:
        yield
    except OSError as error:
        raise CommunicationError(
            f"the other end of the weights' connection has ended or does not answer ({error}): its own message says why"
        ) from error


@contextmanager
def _meant() -> Iterator[None]:
    """Turn the errors of a frame without meaning into a CommunicationError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CommunicationError(f"the weights' connection has a message without meaning: {error}") from error


def _kind(dtype: Any, shape: Any) -> Kind:
    """Return the kind of an announced tensor. Raises ValueError or KeyError."""
    if not isinstance(shape, list) or not 0 < len(shape) <= MOST_AXES:
        raise ValueError("a shape is not a list of sizes")
    if not all(type(size) is int and size > 0 for size in shape) or math.prod(shape) > _LARGEST_TENSOR:
        raise ValueError("a tensor is empty or too large")
    return Kind(tuple(shape), _DTYPES[dtype])


def _shared_folder() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _attach(name: Any) -> mmap.mmap:
    """Map the memory of the other end. Raises ValueError, or OSError, if it is not a private file of this user."""
    if not isinstance(name, str) or not _SHARED.fullmatch(name):
        raise ValueError("not the name of shared memory")
    descriptor = os.open(_shared_folder() / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("the shared memory is not a file of this user")
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
