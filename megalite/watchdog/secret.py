"""Secret of a run, shared by its ranks only: a rank and the monitor authenticate each other with it.

It never crosses the network. The launcher may set it in the environment variable MEGALITE_SECRET. Otherwise rank 0
makes one and writes it into a file that only its user can read, in a folder that all ranks see. The file's name need
not be secret.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import ConfigurationError

VARIABLE = "MEGALITE_SECRET"
GIVE_SECRET = f"Give all ranks a common {VARIABLE} (openssl rand -hex 32), or in training a --save folder that all see"
_LEAST = 32  # characters of the variable
_NAME = re.compile(r"\.megalite_secret_[0-9a-f]{32}")
_CONTENT = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class Secret:
    """Secret, and the file that passes it to other ranks, if there is one."""

    value: bytes
    file: Path | None = None

    @property
    def name(self) -> str:
        """Name of the file, for the other ranks; "" if there is none."""
        return self.file.name if self.file else ""

    def remove(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()


def make_secret(folder: Path | None) -> Secret:
    """Return the secret of rank 0. Raises ConfigurationError if the launcher's is too short.

    `folder`: one that all machines of the run see; without it, the file is in a place that processes of this machine
    see.
    """
    given = _given()
    if given is not None:
        return Secret(given)
    value = secrets.token_hex(32).encode()
    for parent in _folders(folder):
        path = parent / f".megalite_secret_{secrets.token_hex(16)}"
        with suppress(OSError, ValueError):
            parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(value)
            find_secret(path.name, parent)  # raises on file systems that do not keep a file private
            return Secret(value, path)
        with suppress(OSError):
            path.unlink()
    return Secret(value)


def find_secret(name: str, folder: Path | None) -> bytes:
    """Return the secret on another rank, from the file of this name that rank 0 has written.

    Raises OSError if there is no such file, ValueError if other users could have written or could read it, and
    ConfigurationError as `make_secret` does.
    """
    given = _given()
    if given is not None:
        return given
    if not _NAME.fullmatch(name):
        raise ValueError("not the name of a secret file")
    *first, last = (parent / name for parent in _folders(folder))
    path = next((path for path in first if path.exists()), last)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        content = file.read(100)
    private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077 and status.st_uid == os.geteuid()
    if not private or not _CONTENT.fullmatch(content):
        raise ValueError(f"{path} is not a file with a secret of only this user")
    return content


def _given() -> bytes | None:
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    if len(given) < _LEAST:
        raise ConfigurationError(
            f"{VARIABLE} has {len(given)} characters, and could be guessed: give all ranks the same {_LEAST} or more "
            "random characters, as from `openssl rand -hex 32`; or unset it"
        )
    return given.encode(errors="surrogateescape")


def _folders(folder: Path | None) -> list[Path]:
    return [*([] if folder is None else [folder]), Path(tempfile.gettempdir())]
