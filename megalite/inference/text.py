"""Texts in the order of their prompts, from the tokens of several texts, which come in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megalite.data.tokenizers import Tokenizer
from megalite.inference.generation import Finish


class TextStream:
    """The text of tokens that come one by one, in parts that make up the whole.

    Bytes that do not make a character yet are held back until those that complete them have come, or the end.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._tokenizer, self._shown = tokenizer, 0

    def part(self, count: int | None = None, *, ended: bool = False) -> str:
        """Return what has come since the last part, of the first `count` tokens (None: of all)."""
        text = self._tokenizer.decode(self.tokens[:count])
        whole = len(text) if ended else len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        part, self._shown = text[self._shown : whole], max(self._shown, whole)
        return part


@dataclass(frozen=True)
class TextPiece:
    """Something to show of one text."""

    index: int
    text: str
    finish: Finish | None
    """Reason for the end of the text, in its last piece."""


def in_order(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], events: Iterable[tuple[int, int | Finish]]
) -> Iterator[TextPiece]:
    """Text by text, its prompt the first piece: each as it comes, once those before it are complete.

    `events` are those of `generate`.
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
