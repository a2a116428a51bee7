"""Latent attention as the oracle computes it: keys and values of each head written out. Like the oracle this imports
nothing of megalite.

    layers.{i}.latent_attention_norm.weight|bias [hidden]       ...latent_attention_output_norm
    layers.{i}.latent_attention.query [heads, query width, hidden], or query_down [query rank, hidden] and
    query_up [heads, query width, query rank]; key_value_down [rank + rotated, hidden], the latent first;
    key_value_up [heads, key width + value width, rank], keys first; gate [heads, value width, hidden] (gated only);
    indexer.*: sparse_oracle.py;
    output [hidden, heads, value width]; output_bias [hidden]; query_norm|key_value_norm.weight|bias
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.qk_clip import Array, note
from tests.rotary_oracle import Rotary
from tests.sparse_oracle import Choices, Indexing

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Latents(Rotary):
    """Options of latent attention, and what it needs of the oracle."""

    norm_epsilon: float = 1e-5
    latent_epsilon: float | None = None  # of norms of latents, if it is another
    score_cap: float = math.inf
    norm_around_one: bool = False  # a norm's weight is its distance from 1
    indexing: Indexing | None = None  # of sparse attention
    sparse: frozenset[int] = frozenset()  # numbers of the layers that are sparse
    largest: dict[str, Array] | None = None  # where layers note their largest logits, before the cap
    unnoted: Tensor | None = None  # [batch, sequence], true for tokens whose logits do not count

    def norm(self, weights: Weights, name: str, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.score_cap == math.inf else self.score_cap * torch.tanh(scores / self.score_cap)

    def noted(self, name: str, scores: Tensor, visible: Tensor) -> Tensor:
        if self.largest is not None:
            note(self.largest, name, scores, visible, self.unnoted)
        return scores

    def latent_layer(
        self,
        weights: Weights,
        name: str,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        dropped: Callable[[Tensor], Tensor],
        choices: Choices,
        counted: Tensor | None,
    ) -> Tensor:
        """The output of a layer before dropout; visible `[batch, 1, sequence, sequence]`, counted `[batch, sequence]`:
        the queries that count in the loss of an indexer."""
        before, behind = name + "_norm", name + "_output_norm"
        normed = self.norm(weights, before, hidden) if before + ".weight" in weights else hidden
        attended = self.latent_attention(weights, name + ".", normed, positions, visible, dropped, choices, counted)
        return self.norm(weights, behind, attended) if behind + ".weight" in weights else attended

    def latent_attention(
        self,
        weights: Weights,
        name: str,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        dropped: Callable[[Tensor], Tensor],
        choices: Choices,
        counted: Tensor | None,
    ) -> Tensor:
        """One head after another."""
        norm = self.norm if self.latent_epsilon is None else replace(self, norm_epsilon=self.latent_epsilon).norm
        up = weights[name + "key_value_up"]
        heads, both, rank = up.shape
        value_width = weights[name + "output"].shape[2]
        key_width = both - value_width
        compressed = F.linear(hidden, weights[name + "key_value_down"])
        latent, shared = compressed[..., :rank], compressed[..., rank:]
        if name + "key_value_norm.weight" in weights:
            latent = norm(weights, name + "key_value_norm", latent)
        source, of_queries = hidden, name + "query"
        if name + "query_down" in weights:
            source, of_queries = F.linear(hidden, weights[name + "query_down"]), name + "query_up"
            if name + "query_norm.weight" in weights:
                source = norm(weights, name + "query_norm", source)
        scale = 1 / math.sqrt(key_width + shared.shape[-1])
        turns = self.position_embedding_type != "none"  # also beside a table of positions
        if self.position_embedding_type == "yarn":
            scale *= (0.1 * self.yarn_mscales[1] * math.log(self.yarn_factor) + 1) ** 2
        rotary = replace(self, rotary_interleaved=True, rotary_percent=1.0)
        if turns:
            shared = rotary.rotate(shared[:, :, None], positions)[:, :, 0]
        contexts = []
        scores = []
        for head in range(heads):
            query = F.linear(source, weights[of_queries][head])
            key = F.linear(latent, up[head, :key_width])
            plain, rotated = query[..., :key_width], query[..., key_width:]
            if turns:
                rotated = rotary.rotate(rotated[:, :, None], positions)[:, :, 0]
            of_plain = plain @ key.transpose(1, 2)
            scores.append((of_plain + rotated @ shared.transpose(1, 2)) * scale)
        logits = torch.stack(scores, dim=1)
        raw = self.capped(logits)
        if self.indexing is not None and int(name.split(".")[-3]) in self.sparse:
            if name + "indexer.key" in weights:

                def of_indexer(states: Tensor) -> Tensor:
                    width, how = states.shape[-1], {"rotary_interleaved": self.indexing.interleaved}
                    part = replace(self, rotary_percent=shared.shape[-1] / width, **how)
                    return part.rotate(states, positions) if turns else states

                around = {"around_one": self.norm_around_one}
                found = self.indexing.scores(weights, name + "indexer.", hidden, source, of_indexer, **around)
                choices.last = self.indexing.choose(found, visible[:, 0])
                if self.indexing.coefficient:
                    loss = self.indexing.divergence(found, raw, visible[:, 0], choices.last, counted)
                    choices.divergences.append(loss)
            if self.indexing.stage != "warmup":
                visible = choices.last[:, None]
        self.noted(name, logits, visible)
        masked = raw.masked_fill(~visible, -math.inf)
        probabilities = dropped(torch.softmax(masked, dim=-1))
        for head in range(heads):
            context = probabilities[:, head] @ F.linear(latent, up[head, key_width:])
            if name + "gate" in weights:
                context = context * torch.sigmoid(F.linear(hidden, weights[name + "gate"][head]))
            contexts.append(context)
        output = sum(F.linear(each, weights[name + "output"][:, head]) for head, each in enumerate(contexts))
        return output + weights.get(name + "output_bias", 0)
