"""Text from a trained model, one token after the other, on any tensor-parallel layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch

from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError
from megalite.inference.network import Network, logits
from megalite.inference.sampling import Sampling, sample


def generate(
    network: Network, prompt: Sequence[int], *, max_new_tokens: int, eod: int, sampling: Sampling
) -> Iterator[int]:
    """Yield new tokens until the end of a document, `max_new_tokens`, or the last position that the model has learnt;
    the same on every rank.

    The whole prefix is run again for each token: nothing is cached.
    Raises ConfigurationError where the prompt is empty or outgrows a learned position table.
    """
    if not prompt:
        raise ConfigurationError("the prompt has no tokens: give --prompt some text")
    limit = network.config.max_position_embeddings
    if limit is not None and network.config.position_embedding_type == "learned_absolute":
        if len(prompt) > limit:
            raise ConfigurationError(
                f"the prompt has {len(prompt)} tokens, and the model has learnt {limit} positions: shorten it"
            )
        max_new_tokens = min(max_new_tokens, limit - len(prompt) + 1)  # the last one is not read again
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        token = sample(logits(network, torch.tensor([tokens]))[0, -1], sampling, generator)
        if token == eod:
            return
        tokens.append(token)
        yield token


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt. Raises ConfigurationError where it cannot be encoded."""
    try:
        return tokenizer.encode(prompt)
    except ValueError as error:
        raise ConfigurationError(f"--prompt {prompt!r} cannot be encoded: {error}") from error


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], new_tokens: Iterable[int]) -> Iterator[str]:
    """The text of the prompt and then of each new token, as parts that make up the whole.

    Bytes that do not make a character yet are held back until those that complete them have come, or the end.
    """
    tokens = list(prompt)
    shown, text = 0, tokenizer.decode(tokens)
    for token in chain([None], new_tokens):
        if token is not None:
            tokens.append(token)
            text = tokenizer.decode(tokens)
        whole = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        yield text[shown:whole]
        shown = max(shown, whole)
    yield text[shown:]
