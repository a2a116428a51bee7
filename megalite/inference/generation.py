"""Generation of tokens with a trained model, for several sequences at once, under any layout."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.errors import ConfigurationError
from megalite.inference.network import Network
from megalite.inference.sampling import Sampling, probabilities, sample
from megalite.model.cache import StageCache
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
    ends: Collection[int],
    sampling: Sampling,
    batch_size: int | None = None,
    stop: Callable[[int, Sequence[int]], bool] | None = None,
    vocab_size: int | None = None,
    numbers: Sequence[int] | None = None,
    scored: Callable[[int, float, float], None] | None = None,
) -> Iterator[tuple[int, int | Finish]]:
    """Yield (prompt index, new token) for each new token, and (prompt index, reason) once per prompt, at its end.

    A sequence ends before a token in `ends`, after a token for which `stop(index, all its tokens)` is true, after
    `max_new_tokens`, or at the last position that the model has learned. The tokens of a prompt depend only on its
    index and on the seed, not on the other prompts in its batch, except for rounding. Every rank iterates, and gets the
    same tokens.

    Args:
        batch_size: maximum number of prompts per batch. There are as many batches in progress as stages. None: divide
            all prompts among these batches.
        vocab_size: only tokens below this one are chosen; None: all tokens of the model.
        numbers: the number of each prompt that takes the place of its index in the seed of its sampling.
        scored: called before each new token is yielded, with the prompt's index, the token's log-probability under the
            network, in fp32 or wider, and under the distribution that it was sampled from.

    Raises ConfigurationError as `check_prompts` does.
    """
    check_prompts(network.config, prompts)
    if max_new_tokens == 0:
        yield from ((index, "length") for index in range(len(prompts)))
        return
    stages = network.batches
    size = min(batch_size or len(prompts), -(-len(prompts) // stages))
    sequences = (
        _begin(network.config, index, number, prompt, max_new_tokens, sampling.seed)
        for index, (number, prompt) in enumerate(zip(numbers or range(len(prompts)), prompts, strict=True))
    )
    batches = iter(lambda: list(islice(sequences, size)), [])
    waiting = (_Batch(network, batch, sampling, vocab_size, scored is not None) for batch in batches)
    # Stages work on different batches. This stage starts one batch per stage from itself to the last, before it
    # receives the tokens chosen for the first of these batches.
    ahead = max(stages - network.mesh.coordinate("pp"), 1)
    ready, under_way = deque(islice(waiting, stages)), deque[_Batch]()
    while ready or under_way:
        if ready and len(under_way) < ahead:
            under_way.append(ready.popleft())
            under_way[-1].read()
            continue
        batch = under_way.popleft()
        # On every rank the tokens that the last stage has chosen, and their scores.
        chosen, *scores = network.share(batch.chosen).tolist()
        for row, (sequence, token) in enumerate(zip(batch.sequences, map(int, chosen), strict=True)):
            if token not in ends:
                sequence.tokens.append(token)
                if scored is not None:
                    scored(sequence.index, *(score[row] for score in scores))
                yield sequence.index, token
            if token in ends or (stop is not None and stop(sequence.index, sequence.tokens)):
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


def _begin(
    config: ModelConfig, index: int, number: int, prompt: Sequence[int], max_new_tokens: int, seed: int
) -> _Sequence:
    limit, learnt = len(prompt) + max_new_tokens, config.learned_positions
    if learnt is not None:
        limit = min(limit, learnt + 1)  # the last token is never an input, so it needs no position
    key = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return _Sequence(index, list(prompt), limit, torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1))


class _Batch:
    """Batch of sequences that go through the stages together."""

    def __init__(
        self,
        network: Network,
        sequences: list[_Sequence],
        sampling: Sampling,
        vocab_size: int | None,
        scores: bool,
    ) -> None:
        self.network, self.sequences, self.sampling, self.vocab_size = network, sequences, sampling, vocab_size
        self.scores = scores
        self.cache = StageCache(max(sequence.limit - 1 for sequence in sequences))
        self.chosen = torch.empty(0, 0)
        """Chosen tokens [1, batch]; with scores [3, batch] in fp64, which has room for any token."""

    def read(self) -> None:
        """Run this rank's stage on all tokens that are not in the cache. The last stage chooses the next tokens."""
        tokens = [sequence.tokens[sequence.read :] for sequence in self.sequences]
        logits = next_token_logits(self.network, tokens, [sequence.read for sequence in self.sequences], self.cache)
        chosen: list[list[float]] = [[0] * len(tokens)] * (3 if self.scores else 1)
        if logits is not None:
            rows = list(zip(logits[:, : self.vocab_size], self.sequences, strict=True))
            found = [sample(row, self.sampling, sequence.generator) for row, sequence in rows]
            chosen = [[*found]]
            if self.scores:
                chosen += _scores(logits, [row for row, _ in rows], found, self.sampling)
        dtype = torch.float64 if self.scores else torch.int64
        self.chosen = torch.tensor(chosen, dtype=dtype, device=self.network.mesh.device)
        for sequence in self.sequences:
            sequence.read = len(sequence.tokens)

    def goes_on(self) -> bool:
        """Remove the sequences that have ended, and return whether any remain."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(rows) < len(self.sequences):
            self.sequences = [self.sequences[row] for row in rows]
            self.cache.keep(rows)
        return bool(rows)


def _scores(logits: Tensor, allowed: Sequence[Tensor], tokens: list[int], sampling: Sampling) -> list[list[float]]:
    """Return the log-probabilities of tokens under the network, and under the distributions they were sampled from.

    `allowed`: the logits of the tokens that could be chosen.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own: list[float] = wide.gather(1, torch.tensor(tokens, device=wide.device).unsqueeze(1)).squeeze(1).tolist()
    if sampling.temperature == 0.0:
        return [own, [0.0] * len(tokens)]
    if (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0) and len(allowed[0]) == logits.shape[1]:
        return [own, own]
    chances = [probabilities(row, sampling)[token].log().item() for row, token in zip(allowed, tokens, strict=True)]
    return [own, chances]


@torch.no_grad()
def next_token_logits(
    network: Network, tokens: Sequence[Sequence[int]], read: Sequence[int], cache: StageCache
) -> Tensor | None:
    """Run this rank's stage on further tokens of each sequence. `read` has the numbers of tokens already in the cache.

    Returns the logits [batch, vocabulary] of the next tokens on the ranks of the last stage, and None on the others.
    """
    stage, device = network.stage, network.mesh.device
    longest = max(map(len, tokens))
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=device)
    positions = torch.tensor(read, device=device).unsqueeze(1) + torch.arange(longest, device=device)
    last = torch.tensor([len(row) - 1 for row in tokens], device=device)
    cache.ends = positions[:, 0] + last + 1
    hidden = torch.empty(len(tokens), network.config.hidden_size, dtype=stage.dtype, device=device)
    for start in range(0, longest, _CHUNK):
        columns = slice(start, start + _CHUNK)
        states = network.run(padded[:, columns], positions[:, columns], cache)
        if stage.head is None:
            continue
        (here,) = ((last >= start) & (last < start + _CHUNK)).nonzero(as_tuple=True)
        hidden[here] = states[last[here] - start, here]
    if stage.head is None:
        return None
    over = stage.context.group("vocabulary")
    return collectives.all_gather_last(stage.head(hidden.unsqueeze(0))[0], over)[:, : network.vocab_size]
