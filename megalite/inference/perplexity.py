"""Quality of a model's predictions for documents: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError
from megalite.inference.documents import Documents, context_of_documents
from megalite.inference.network import Network
from megalite.inference.scoring import score_windows, sliding_windows
from megalite.process import output


@dataclass(frozen=True)
class Figures:
    """Figures of a model's predictions for a data set."""

    name: str
    documents: int
    """Number of documents with tokens."""
    tokens: int
    """Number of predicted tokens."""
    loss: float
    """Mean of -ln(probability) over the predicted tokens, in nats."""
    text_bytes: int | None = None
    """Size of the text as UTF-8, if known."""
    why_no_bytes: str | None = None
    """Reason why `text_bytes` is unknown."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if it does not fit into a float."""
        return math.exp(self.loss) if self.loss < 709.0 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text, which can be compared between tokenizers."""
        return None if not self.text_bytes else self.loss * self.tokens / math.log(2) / self.text_bytes

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


def together(figures: Sequence[Figures], weights: Sequence[float] | None = None) -> Figures:
    """Combine the figures of several data sets over all tokens.

    With `weights`, which sum to 1, the loss is that of the blend.
    """
    tokens = sum(each.tokens for each in figures)
    shares = [each.tokens / tokens for each in figures] if weights is None else weights
    known = [each.text_bytes for each in figures if each.text_bytes is not None]
    return Figures(
        "all" if weights is None else "blend",
        sum(each.documents for each in figures),
        tokens,
        math.fsum(share * each.loss for share, each in zip(shares, figures, strict=True)),
        sum(known) if len(known) == len(figures) and weights is None else None,
    )


def evaluate_all(
    network: Network,
    tokenizer: Tokenizer,
    documents: Sequence[Documents],
    length: int,
    stride: int,
    micro_batch_size: int,
    advance: Callable[[int], None],
) -> list[Figures]:
    """Return the figures of each data set and, if there are several, their combined figures.

    Each token is predicted once, with context from its own document only. All ranks call it. `length` and `stride` are
    as in `sliding_windows`; `micro_batch_size` and `advance` are as in `score_windows`. Raises ConfigurationError if
    the context before each document is longer than `length`.
    """
    context = context_of_documents(tokenizer)
    if len(context) > length:
        raise ConfigurationError(f"--seq-length {length}: {len(context)} tokens stand before each document")
    figures = []
    for each in documents:
        windows = [window for tokens in each.tokens for window in sliding_windows(tokens, context, length, stride)]
        scores = score_windows(network, windows, micro_batch_size, advance)
        count = sum(window.counted for window in windows)
        loss = -math.fsum(score.log_probability for score in scores) / count
        read = sum(map(bool, map(len, each.tokens)))
        figures.append(Figures(each.name, read, count, loss, each.text_bytes, each.why_no_bytes))
    weights = [each.weight for each in documents if each.weight is not None]
    return [*figures, together(figures, weights or None)] if len(figures) > 1 else figures


def table(figures: Sequence[Figures]) -> str:
    """Return the figures as a table with one line per data set, and the reasons for missing bits per byte."""
    header, rows = ("data", "documents", "tokens", "loss", "perplexity", "bits per byte"), []
    for each in figures:
        bits = "" if each.bits_per_byte is None else f"{each.bits_per_byte:.5f}"
        counts = (f"{each.documents:,}", f"{each.tokens:,}")
        rows.append((each.name, *counts, f"{each.loss:.5f}", f"{each.perplexity:.5g}", bits))
    why = (f"no bits per byte of {each.name}: {each.why_no_bytes}" for each in figures if each.why_no_bytes)
    return "\n".join([*output.table(header, rows), *why])
