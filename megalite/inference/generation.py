"""Text from a trained model, one token after the other, on any tensor-parallel layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite.errors import ConfigurationError
from megalite.inference.sampling import Sampling, sample
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.randomness import RandomKey
from megalite.parallel.regions import gather_from_region


@torch.no_grad()
def next_token_logits(network: GPT, tokens: Sequence[int]) -> Tensor:
    """The logits [vocabulary] of the token after `tokens`, whole on every tensor-parallel rank."""
    ids = torch.tensor([tokens], device=network.mesh.device)
    positions = torch.arange(len(tokens), device=network.mesh.device).unsqueeze(0)
    prompt = MicroBatch(ids, positions, document_ids=None, labels=None, loss_mask=None, key=RandomKey(0, 0))
    logits = network(None, prompt)[-1, 0]
    return gather_from_region(logits, network.mesh.group("tp"))[: network.vocab_size]


def generate(
    network: GPT, prompt: Sequence[int], *, max_new_tokens: int, eod: int, sampling: Sampling
) -> Iterator[int]:
    """Yield new tokens until the end of a document or `max_new_tokens`; the same on every rank.

    The whole prefix is run again for each token: nothing is cached.
    Raises ConfigurationError where the text would outgrow a learned position table, or the prompt is empty.
    """
    if not prompt:
        raise ConfigurationError("the prompt has no tokens: give --prompt some text")
    limit = network.config.max_position_embeddings
    learned = network.config.position_embedding_type == "learned_absolute"
    if learned and limit is not None and len(prompt) + max_new_tokens > limit:
        raise ConfigurationError(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones exceed the {limit} positions that the model "
            "has learnt: lower --max-new-tokens or shorten the prompt"
        )
    network.eval()
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        token = sample(next_token_logits(network, tokens), sampling, generator)
        if token == eod:
            return
        tokens.append(token)
        yield token
