"""A corpus of real text that every machine has: the sources of the running Python's standard library, as JSON lines.

python examples/standard_library_corpus.py --output corpus.jsonl
"""

from __future__ import annotations

import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.tool_arguments import parse_tool_arguments
from megalite.lifecycle.failure import run_tool

# Tests repeat themselves, encodings are tables of characters, what is installed differs from machine to machine.
LEFT_OUT = {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    output: str
    """The file to write, one {"text": ..., "path": ...} a line."""


def modules(library: Path) -> Iterator[tuple[str, str]]:
    """The relative path and the text of every module, in the order of their paths; undecodable ones are left out."""
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if LEFT_OUT.intersection(relative.parts):
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        if text:
            yield relative.as_posix(), text


def main() -> None:
    """Write the corpus."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.atomic_files import write_atomically
    from megalite.errors import DataError

    library = Path(sysconfig.get_paths()["stdlib"])
    records = [json.dumps({"text": text, "path": path}) + "\n" for path, text in modules(library)]
    if not records:
        raise DataError(f"{library} holds no sources: use a Python that comes with those of its standard library")
    corpus = "".join(records).encode()
    write_atomically(Path(arguments.output), corpus)
    print(f"{len(records):,} modules, {len(corpus) / 1e6:.1f} MB: {arguments.output}")


if __name__ == "__main__":
    run_tool(main)
