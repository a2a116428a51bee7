"""Input and output of text: prompts from flags, a file or standard input, and texts in the order of the prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.interface import beginning_of_documents, begun
from megalite.errors import ConfigurationError
from megalite.inference.generation import Finish
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.small_files import MIB, parse_json, read_small_file

_LARGEST_PROMPTS = 1024 * MIB


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """Return the given prompts, then those of the file. A given prompt "-" stands for standard input.

    The file has one prompt per line; if its name ends in .jsonl, a line is JSON: {"prompt": "..."}. Empty lines are
    skipped. Raises ConfigurationError if there are no prompts or they cannot be read.
    """
    if given.count("-") > 1:
        raise ConfigurationError("--prompt - can be given only once: it reads all of standard input")
    prompts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in given]
    if file is not None:
        prompts += _lines(Path(file))
    if not prompts:
        raise ConfigurationError("there is no prompt: give --prompt TEXT, --prompt - or --prompts FILE with some lines")
    return prompts


def _lines(path: Path) -> Iterator[str]:
    """Yield the prompts of a file: its lines that are not blank, or the "prompt" of each line of JSON.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not of this form.
    """
    try:
        lines = read_small_file(path, largest=_LARGEST_PROMPTS).decode().split("\n")
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
            raise ConfigurationError(f'{path}, line {number}: its "prompt" is not a text')
        yield prompt


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of prompts, which begin as documents do. Raises ConfigurationError if one cannot be encoded."""
    beginning = beginning_of_documents(tokenizer)
    return [encode_prompt(tokenizer, prompt, beginning) for prompt in prompts]


def encode_prompt(tokenizer: Tokenizer, prompt: str, beginning: Sequence[int] = ()) -> list[int]:
    """Return the tokens of a prompt, after `beginning` if they do not begin with it.

    Raises ConfigurationError if it cannot be encoded.
    """
    try:
        return begun(tokenizer.encode(prompt), list(beginning))
    except ValueError as error:
        shown = prompt if len(prompt) <= 60 else f"{prompt[:60]}..."
        raise ConfigurationError(f"the prompt {shown!r} cannot be encoded: {error}") from error


def of_rank_0(mesh: ParallelMesh, read: Callable[[], list[list[int]]]) -> list[list[int]]:
    """Call `read` on rank 0, and return its result, the tokens of the prompts, on every rank.

    Only rank 0 reads, because other ranks may not have the file, and standard input goes to rank 0 only. If `read`
    raises ConfigurationError, every rank raises it.
    """
    found: dict[str, Any] = {}
    if mesh.rank == 0:
        try:
            found["prompts"] = read()
        except ConfigurationError as error:
            found["error"] = str(error)
    found = collectives.all_gather_json(found, mesh)[0]
    if "error" in found:
        raise ConfigurationError(found["error"])
    prompts: list[list[int]] = found["prompts"]
    return prompts


class TextStream:
    """Decoder of tokens that arrive one by one; it returns the text in parts.

    The bytes of an incomplete character are held back until the character is complete or the text has ended.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._tokenizer, self._shown = tokenizer, 0

    def part(self, count: int | None = None, *, ended: bool = False) -> str:
        """Return the text since the last part, up to the first `count` tokens (None: all tokens)."""
        text = self._tokenizer.decode(self.tokens[:count])
        whole = len(text) if ended else len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        part, self._shown = text[self._shown : whole], max(self._shown, whole)
        return part


@dataclass(frozen=True)
class TextPiece:
    """Part of one text, for display."""

    index: int
    text: str
    finish: Finish | None
    """Reason why the text has ended, in its last piece; otherwise None."""


def in_order(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], events: Iterable[tuple[int, int | Finish]]
) -> Iterator[TextPiece]:
    """Yield the pieces of the texts in the order of the prompts. The first piece of a text is its prompt.

    `events` is the output of `generate`.
    """
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    finishes: dict[int, Finish] = {}
    coming = iter(events)
    for shown, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        yield TextPiece(shown, stream.part(len(prompt)), None)
        while shown not in finishes:
            yield TextPiece(shown, stream.part(), None)
            index, event = next(coming)
            if isinstance(event, int):
                streams[index].tokens.append(event)
            else:
                finishes[index] = event
        yield TextPiece(shown, stream.part(ended=True), finishes[shown])
