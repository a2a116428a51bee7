"""Names of a run in services, kept in the run directory, so that a resumed run continues there."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from megalite.small_files import parse_json
from megalite.storage import AnyPath, read_small, write_atomically

FILE = "sinks.json"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def kept_name(directory: AnyPath | None, service: str) -> str | None:
    """Return the name that a service has for the run, or None if none is kept or the file is damaged."""
    return _names(directory).get(service)


def keep_name(directory: AnyPath | None, service: str, name: str) -> None:
    """Keep a name for the runs that continue this one. Raises FileError."""
    if directory is not None:
        write_atomically(directory / FILE, json.dumps(_names(directory) | {service: name}).encode())


def _names(directory: AnyPath | None) -> dict[str, str]:
    with suppress(OSError, ValueError):
        found = {} if directory is None else parse_json(read_small(directory / FILE, largest=4096))
        if isinstance(found, dict):
            return {key: name for key, name in found.items() if isinstance(name, str) and _NAME.fullmatch(name)}
    return {}
