"""Generation of tokens with a trained model, for several sequences at once, under any layout."""

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
from megalite.parallel import collectives

Finish = Literal["stop", "length"]
"""Reason why a sequence has ended: "stop" for an end of document or `stop`, "length" for the maximum length."""

_CHUNK = 512
"""Number of tokens of a prompt per forward. It bounds memory, and lets the stages work on one prompt concurrently."""


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
    """Yield (prompt index, new token) for each new token, and (prompt index, reason) once per prompt, at its end.

    A sequence ends before the token `eod`, after a token for which `stop(index, all its tokens)` is true, after
    `max_new_tokens`, or at the last position that the model has learned. The tokens of a prompt depend only on its
    index and on the seed, not on the other prompts in its batch, except for rounding. Every rank iterates, and gets the
    same tokens.

    Args:
        batch_size: maximum number of prompts per batch. There are as many batches in progress as stages. None: divide
            all prompts among these batches.
        vocab_size: only tokens below this one are chosen; None: all tokens of the model.

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
    # Stages work on different batches. This stage starts one batch per stage from itself to the last, before it
    # receives the tokens chosen for the first of these batches.
    ahead = stages - network.mesh.coordinate("pp")
    ready, under_way = deque(islice(waiting, stages)), deque[_Batch]()
    while ready or under_way:
        if ready and len(under_way) < ahead:
            under_way.append(ready.popleft())
            under_way[-1].read()
            continue
        batch = under_way.popleft()
        chosen = network.share(batch.chosen).tolist()  # on every rank the tokens that the last stage has chosen
        for sequence, token in zip(batch.sequences, chosen, strict=True):
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
    """Raise ConfigurationError if a prompt is empty, has an unknown token, or exceeds a learned position table."""
    limit = config.learned_positions
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise ConfigurationError(f"{which} has no tokens: give it some text")
        if config.vocab_size is not None and not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ConfigurationError(
                f"{which} has tokens from {min(prompt)} to {max(prompt)}, but the model's vocabulary is "
                f"{config.vocab_size}: give the tokenizer it was trained with as --tokenizer-model"
            )
        if limit is not None and len(prompt) > limit:
            raise ConfigurationError(
                f"{which} has {len(prompt)} tokens, but the model has learned {limit} positions: shorten it"
            )


@dataclass
class _Sequence:
    """State of one sequence during generation."""

    index: int
    tokens: list[int]
    limit: int
    """Maximum number of tokens, including the prompt."""
    generator: torch.Generator
    read: int = 0
    """Number of tokens whose keys and values are in the cache."""
    finish: Finish | None = None


def _begin(config: ModelConfig, index: int, prompt: Sequence[int], max_new_tokens: int, seed: int) -> _Sequence:
    limit, learnt = len(prompt) + max_new_tokens, config.learned_positions
    if learnt is not None:
        limit = min(limit, learnt + 1)  # the last token is never an input, so it needs no position
    key = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return _Sequence(index, list(prompt), limit, torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1))


class _Batch:
    """Batch of sequences that go through the stages together."""

    def __init__(
        self, network: Network, sequences: list[_Sequence], sampling: Sampling, vocab_size: int | None
    ) -> None:
        self.network, self.sequences, self.sampling, self.vocab_size = network, sequences, sampling, vocab_size
        self.cache = KeyValueCache(max(sequence.limit - 1 for sequence in sequences))
        self.chosen = torch.empty(0, dtype=torch.int64)

    def read(self) -> None:
        """Run this rank's stage on all tokens that are not in the cache. The last stage chooses the next tokens."""
        tokens = [sequence.tokens[sequence.read :] for sequence in self.sequences]
        logits = next_token_logits(self.network, tokens, [sequence.read for sequence in self.sequences], self.cache)
        chosen = [0] * len(tokens)
        if logits is not None:
            rows = zip(logits[:, : self.vocab_size], self.sequences, strict=True)
            chosen = [sample(row, self.sampling, sequence.generator) for row, sequence in rows]
        self.chosen = torch.tensor(chosen, device=self.network.mesh.device)
        for sequence in self.sequences:
            sequence.read = len(sequence.tokens)

    def goes_on(self) -> bool:
        """Remove the sequences that have ended, and return whether any remain."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(rows) < len(self.sequences):
            self.sequences = [self.sequences[row] for row in rows]
            self.cache.keep(rows)
        return bool(rows)


@torch.no_grad()
def next_token_logits(
    network: Network, tokens: Sequence[Sequence[int]], read: Sequence[int], cache: KeyValueCache
) -> Tensor | None:
    """Run this rank's stage on further tokens of each sequence. `read` has the numbers of tokens already in the cache.

    Returns the logits [batch, vocabulary] of the next tokens on the ranks of the last stage, and None on the others.
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
    return collectives.all_gather_last(stage.head(hidden.unsqueeze(0))[0], over)[:, : network.vocab_size]
