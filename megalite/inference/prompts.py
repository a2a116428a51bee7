"""Prompts from flags, a file or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.small_files import MIB, parse_json, read_small_file

_LARGEST = 1024 * MIB


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """The prompts that are given, of which "-" is standard input, and then those of the file.

    A file has one prompt a line, in JSON ({"prompt": "..."}) where its name ends in .jsonl; empty lines are none.
    Raises ConfigurationError if there are none, or if they cannot be read.
    """
    if given.count("-") > 1:
        raise ConfigurationError("--prompt - can be given once: standard input ends with the first")
    prompts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in given]
    if file is not None:
        prompts += _lines(Path(file))
    if not prompts:
        raise ConfigurationError("there is no prompt: give --prompt TEXT, --prompt - or --prompts FILE with some lines")
    return prompts


def _lines(path: Path) -> Iterator[str]:
    try:
        lines = read_small_file(path, largest=_LARGEST).decode().split("\n")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--prompts {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line.removesuffix("\r")
            continue
        try:
            prompt = parse_json(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f'{path}, line {number}: not of the form {{"prompt": "..."}}') from error
        if not isinstance(prompt, str):
            raise ConfigurationError(f'{path}, line {number}: its "prompt" is no text')
        yield prompt


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt. Raises ConfigurationError if it cannot be encoded."""
    try:
        return tokenizer.encode(prompt)
    except ValueError as error:
        shown = prompt if len(prompt) <= 60 else f"{prompt[:60]}..."
        raise ConfigurationError(f"the prompt {shown!r} cannot be encoded: {error}") from error


def of_rank_0(mesh: ParallelMesh, read: Callable[[], list[list[int]]]) -> list[list[int]]:
    """The prompts' tokens that rank 0 reads, on every rank; it alone may have the file, and has standard input whole.

    Raises on every rank the ConfigurationError that `read` raises there.
    """
    found: dict[str, Any] = {}
    if mesh.rank == 0:
        try:
            found["prompts"] = read()
        except ConfigurationError as error:
            found["error"] = str(error)
    found = json.loads(collectives.all_gather_text(json.dumps(found), mesh.world(), mesh.device)[0])
    if "error" in found:
        raise ConfigurationError(found["error"])
    prompts: list[list[int]] = found["prompts"]
    return prompts
