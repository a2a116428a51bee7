"""Tokens from a trained model, several sequences at a time, on any split over ranks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
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
"""Reason for the end of a sequence: the end of a document (or `stop` says so), or the limit of its length."""

_CHUNK = 512
"""Tokens of each prompt that are read at once: bounds memory, and lets the stages work on one prompt together."""


def generate(
    network: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eod: int,
    sampling: Sampling,
    batch_size: int | None = None,
    stop: Callable[[int, Sequence[int]], bool] | None = None,
    vocab_size: int | None = None,
) -> Iterator[tuple[int, int | Finish]]:
    """Yield (index of the prompt, new token) as they come, and once of each prompt (index, why it has ended).

    Each sequence ends by itself: before the token `eod`, behind one where `stop(index, all its tokens)` is true, after
    `max_new_tokens`, or with the last position that the model has learnt. What comes out for a prompt depends on its
    index, on the seed and on nothing else that is in the batch, but for rounding. A pipeline works on as many batches
    as it has stages, each of at most `batch_size` prompts (None: all of them share them out). Only tokens below
    `vocab_size` are chosen (None: the model's). Every rank iterates, to the same tokens.

    Raises ConfigurationError as `check_prompts` does.
    """
    check_prompts(network.config, prompts)
    if max_new_tokens == 0:
        yield from ((index, "length") for index in range(len(prompts)))
        return
    stages = network.mesh.size("pp")
    size = min(batch_size or len(prompts), -(-len(prompts) // stages))
    sequences = (
        _begin(network.config, index, prompt, max_new_tokens, sampling.seed) for index, prompt in enumerate(prompts)
    )
    batches = iter(lambda: list(islice(sequences, size)), [])
    waiting = (_Batch(network, batch, sampling, vocab_size) for batch in batches)
    # Stages work on different batches: each is as many passes ahead of what is known as stages come behind it.
    ahead = stages - network.mesh.coordinate("pp")
    ready, under_way = deque(islice(waiting, stages)), deque[_Batch]()
    while ready or under_way:
        if ready and len(under_way) < ahead:
            under_way.append(ready.popleft())
            under_way[-1].read()
            continue
        batch = under_way.popleft()
        for sequence, token in batch.next_tokens():
            if token != eod:
                sequence.tokens.append(token)
                yield sequence.index, token
            if token == eod or (stop is not None and stop(sequence.index, sequence.tokens)):
                sequence.finish = "stop"
            elif len(sequence.tokens) == sequence.limit:
                sequence.finish = "length"
            if sequence.finish is not None:
                yield sequence.index, sequence.finish
        ready.extend([batch] if batch.goes_on() else islice(waiting, 1))


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ConfigurationError if a prompt is empty, has a token that the model lacks, or outgrows a learned
    position table.
    """
    limit = _positions(config)
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise ConfigurationError(f"{which} has no tokens: give it some text")
        if config.vocab_size is not None and not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ConfigurationError(
                f"{which} has tokens from {min(prompt)} to {max(prompt)}, and the model's vocabulary is "
                f"{config.vocab_size}: give the tokenizer it was trained with as --tokenizer-model"
            )
        if limit is not None and len(prompt) > limit:
            raise ConfigurationError(
                f"{which} has {len(prompt)} tokens, and the model has learnt {limit} positions: shorten it"
            )


def _positions(config: ModelConfig) -> int | None:
    """Return the number of positions that a model with a table of them has learnt."""
    return config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else None


@dataclass
class _Sequence:
    """One text in the making."""

    index: int
    tokens: list[int]
    limit: int
    """Largest number of tokens in all, the prompt's among them."""
    generator: torch.Generator
    read: int = 0
    """Tokens whose keys and values are in the cache."""
    finish: Finish | None = None


def _begin(config: ModelConfig, index: int, prompt: Sequence[int], max_new_tokens: int, seed: int) -> _Sequence:
    limit, learnt = len(prompt) + max_new_tokens, _positions(config)
    if learnt is not None:
        limit = min(limit, learnt + 1)  # the last token is not read again
    key = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return _Sequence(index, list(prompt), limit, torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1))


class _Batch:
    """Sequences that go through the stages together."""

    def __init__(
        self, network: Network, sequences: list[_Sequence], sampling: Sampling, vocab_size: int | None
    ) -> None:
        self.network, self.sequences, self.sampling, self.vocab_size = network, sequences, sampling, vocab_size
        self.cache = KeyValueCache(max(sequence.limit - 1 for sequence in sequences))
        self.chosen = torch.empty(0, dtype=torch.int64)

    def read(self) -> None:
        """Run this rank's stage on what has not been read; the last one chooses the next tokens."""
        tokens = [sequence.tokens[sequence.read :] for sequence in self.sequences]
        logits = next_token_logits(self.network, tokens, [sequence.read for sequence in self.sequences], self.cache)
        chosen = [0] * len(tokens)
        if logits is not None:
            rows = zip(logits[:, : self.vocab_size], self.sequences, strict=True)
            chosen = [sample(row, self.sampling, sequence.generator) for row, sequence in rows]
        self.chosen = torch.tensor(chosen, device=self.network.mesh.device)
        for sequence in self.sequences:
            sequence.read = len(sequence.tokens)

    def next_tokens(self) -> list[tuple[_Sequence, int]]:
        """Return what the last stage has chosen, on every rank."""
        return list(zip(self.sequences, self.network.share(self.chosen).tolist(), strict=True))

    def goes_on(self) -> bool:
        """Leave out the sequences that have ended; whether any is left."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(rows) < len(self.sequences):
            self.sequences = [self.sequences[row] for row in rows]
            self.cache.keep(rows)
        return bool(rows)


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
    over = stage.context.group("vocabulary")
    return gather_from_region(stage.head(hidden.unsqueeze(0))[0], over)[:, : network.vocab_size]
