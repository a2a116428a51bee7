"""The core of attention: scores, softmax, weighted values. What stands around it does not know where the keys are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels.attention import Mask, attention, draws_its_own, keeps_scores


class Core(Protocol):
    """Core of attention, from queries, keys and values to mixed values.

    Ranks that share a sequence have a core of their own, which may use the one of a rank that is alone.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        layout: SequenceLayout,
        random: RandomKey | None,
    ) -> Tensor:
        """Queries [tokens, batch, heads, head_dim] to [tokens, batch, heads * head_dim].

        Args:
            key: of this rank's tokens, with a cache of those before them, too, [tokens, batch, groups, head_dim].
            value: likewise.
            mask: as megalite_kernels.attention has it.
            layout: the places of the queries.
            random: None if nothing is dropped.
        """


@dataclass(frozen=True)
class LocalCore:
    """Attention of one rank over the keys and values that it is given.

    Attributes:
        heads: of the model, those that are here.
        groups: the key-value group of each of them, by its place here.
        scale: of scores; None: 1 / the root of head_dim.
        cap: of scores.
        dropout: of probabilities.
        site: what draws it.
        recompute: do it again in backward instead of keeping it.
    """

    heads: range
    groups: Sequence[int]
    scale: float | None
    cap: float | None
    dropout: float
    site: Site
    recompute: bool

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        layout: SequenceLayout,
        random: RandomKey | None,
    ) -> Tensor:
        core = functools.partial(self._attend, mask=mask, layout=layout, random=random)
        if (self.recompute or keeps_scores(mask, self.cap)) and torch.is_grad_enabled():
            return checkpoint(core, query, key, value, use_reentrant=False, preserve_rng_state=False)
        return core(query, key, value)

    def by_head(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of groups as those of heads, which may then be dealt out."""
        return key[:, :, self.groups], value[:, :, self.groups]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        layout: SequenceLayout,
        random: RandomKey | None,
    ) -> Tensor:
        heads, groups = len(self.heads), key.shape[2]
        if heads % groups or self.groups != [head * groups // heads for head in range(heads)]:
            key, value = self.by_head(key, value)
        drop = None
        if random is not None and self.dropout > 0.0:
            rows = layout.rows_of(self.heads)
            drop = random.dropout_mask(self.dropout, self.site, rows)
            if draws_its_own(query.device, query.dtype, self.cap):
                random.seed_site(self.site, rows[0].start, query.device)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = attention(query, key, value, mask, scale=self.scale, cap=self.cap, dropout=drop)
        return mixed.permute(2, 0, 1, 3).flatten(2)
