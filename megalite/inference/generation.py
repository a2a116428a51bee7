"""Tokens from a trained model, several sequences at a time, on any split over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.errors import ConfigurationError
from megalite.inference.network import Network
from megalite.inference.sampling import Sampling, sample
from megalite.model.cache import KeyValueCache
from megalite.parallel.regions import gather_from_region

Finish = Literal["stop", "length"]
"""Why a sequence has ended: at the end of a document (or where `stop` says so), or at the limit of its length."""

_CHUNK = 512
"""Tokens of each prompt that are read at once: bounds memory, and lets the stages work on one prompt together."""


@dataclass(eq=False)
class _Sequence:
    """One text in the making."""

    index: int
    tokens: list[int]
    limit: int
    """Of all tokens, the prompt's among them."""
    read: int
    """Tokens whose keys and values are in the cache."""
    generator: torch.Generator


def generate(
    network: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eod: int,
    sampling: Sampling,
    batch_size: int | None = None,
    stop: Callable[[int, Sequence[int]], bool] | None = None,
) -> Iterator[tuple[int, int | Finish]]:
    """Yield (index of the prompt, new token) as they come, and once of each prompt (index, why it has ended).

    Each sequence ends by itself: before the token `eod`, behind one where `stop(index, all its tokens)` is true, after
    `max_new_tokens`, or with the last position that the model has learnt. What comes out for a prompt depends on its
    index, on the seed and on nothing else that is in the batch, but for rounding. `batch_size` prompts are worked on
    together (None: all). Every rank iterates, to the same tokens.

    Raises ConfigurationError as `check_prompts` does.
    """
    check_prompts(network.config, prompts)
    step = batch_size or max(len(prompts), 1)
    for start in range(0, len(prompts), step):
        batch = [
            _begin(network.config, start + number, prompt, max_new_tokens, sampling.seed)
            for number, prompt in enumerate(prompts[start : start + step])
        ]
        yield from _generate_batch(network, batch, eod, sampling, stop or (lambda index, tokens: False))


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ConfigurationError where a prompt is empty or outgrows a learned position table."""
    limit = _positions(config)
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise ConfigurationError(f"{which} has no tokens: give it some text")
        if limit is not None and len(prompt) > limit:
            raise ConfigurationError(
                f"{which} has {len(prompt)} tokens, and the model has learnt {limit} positions: shorten it"
            )


def _positions(config: ModelConfig) -> int | None:
    """How many a model with a table of them has learnt."""
    return config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else None


def _begin(config: ModelConfig, index: int, prompt: Sequence[int], max_new_tokens: int, seed: int) -> _Sequence:
    limit, learnt = len(prompt) + max_new_tokens, _positions(config)
    if learnt is not None:
        limit = min(limit, learnt + 1)  # the last token is not read again
    key = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return _Sequence(index, list(prompt), limit, 0, generator)


def _generate_batch(
    network: Network,
    batch: list[_Sequence],
    eod: int,
    sampling: Sampling,
    stop: Callable[[int, Sequence[int]], bool],
) -> Iterator[tuple[int, int | Finish]]:
    yield from ((sequence.index, "length") for sequence in batch if len(sequence.tokens) >= sequence.limit)
    batch = [sequence for sequence in batch if len(sequence.tokens) < sequence.limit]
    cache = KeyValueCache(max((sequence.limit - 1 for sequence in batch), default=0))
    while batch:
        ended: list[_Sequence] = []
        for sequence, token in zip(batch, _next_tokens(network, batch, cache, sampling), strict=True):
            if token != eod:
                sequence.tokens.append(token)
                yield sequence.index, token
            finish: Finish | None = "length" if len(sequence.tokens) == sequence.limit else None
            if token == eod or stop(sequence.index, sequence.tokens):
                finish = "stop"
            if finish is not None:
                yield sequence.index, finish
                ended.append(sequence)
        if ended:
            rows = [row for row, sequence in enumerate(batch) if sequence not in ended]
            batch = [batch[row] for row in rows]
            cache.keep(rows)


def _next_tokens(network: Network, batch: Sequence[_Sequence], cache: KeyValueCache, sampling: Sampling) -> list[int]:
    """The token after each sequence, the same on every rank."""
    chosen = torch.zeros(len(batch), dtype=torch.int64, device=network.mesh.device)
    logits = next_token_logits(
        network, [sequence.tokens[sequence.read :] for sequence in batch], [sequence.read for sequence in batch], cache
    )
    for sequence in batch:
        sequence.read = len(sequence.tokens)
    if logits is not None:
        tokens = [sample(row, sampling, sequence.generator) for row, sequence in zip(logits, batch, strict=True)]
        chosen = torch.tensor(tokens, device=network.mesh.device)
    found: list[int] = network.share(chosen).tolist()
    return found


@torch.no_grad()
def next_token_logits(
    network: Network, tokens: Sequence[Sequence[int]], read: Sequence[int], cache: KeyValueCache
) -> Tensor | None:
    """Read more tokens of each sequence, of which so many have been `read`.

    Returns the logits [batch, vocabulary] of the next ones, on the ranks of the last stage alone.
    """
    stage, device = network.stage, network.mesh.device
    longest = max(map(len, tokens))
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=device)
    positions = torch.tensor(read, device=device).unsqueeze(1) + torch.arange(longest, device=device)
    last = torch.tensor([len(row) - 1 for row in tokens], device=device)
    hidden = torch.empty(len(tokens), network.config.hidden_size, dtype=stage.dtype, device=device)
    for start in range(0, longest, _CHUNK):
        columns = slice(start, start + _CHUNK)
        states = network.run(padded[:, columns], positions[:, columns], cache)
        (here,) = ((last >= start) & (last < start + _CHUNK)).nonzero(as_tuple=True)
        hidden[here] = states[last[here] - start, here]
    if stage.head is None:
        return None
    return gather_from_region(stage.head(hidden.unsqueeze(0))[0], network.mesh.group("tp"))[:, : network.vocab_size]
