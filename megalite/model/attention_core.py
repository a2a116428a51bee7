"""The core of attention: scores, softmax and weighted values. Callers do not depend on which ranks hold the keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.model.sample_mask import SampleMask
from megalite.parallel.largest_logits import Measure
from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels.attention import Mask, attention, draws_its_own, keeps_scores
from megalite_kernels.attention_sink import attention_with_sink


@dataclass(frozen=True)
class LocalCore:
    """Attention on one rank, over the keys and values that are passed in.

    Attributes:
        heads: this rank's range of the model's heads.
        groups: the local key-value group of each of these heads.
        scale: factor of the scores; None for 1 / sqrt(head_dim).
        cap: soft cap of the scores; None for no cap.
        dropout: dropout probability of attention probabilities.
        site: the random site of this dropout.
        recompute: True to recompute the core in backward instead of saving its activations.
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
        mask: Mask | SampleMask,
        layout: SequenceLayout,
        random: RandomKey | None,
        sink: Tensor | None = None,
        measure: Measure | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: [tokens, batch, heads, head_dim].
            key: keys of this rank's tokens and, with a cache, of earlier tokens, [tokens, batch, groups, head_dim].
            value: values of the same tokens, with the shape of `key`.
            mask: as in megalite_kernels.attention.
            layout: indices of the queries in their samples.
            random: key of the dropout; None for no dropout.
            sink: one more logit of the softmax for each head, without a value, [heads]; None for none.
            measure: takes in the logits; None: nobody asks for them.

        Returns:
            Weighted values, [tokens, batch, heads * head_dim].
        """
        assert not isinstance(mask, SampleMask), "only context parallelism cuts samples"
        if measure is not None:
            of_keys = self._of_heads(key).permute(1, 2, 0, 3)
            measure(self.heads, layout, query.permute(1, 2, 0, 3), of_keys, mask, self.scale)
        core = functools.partial(self._attend, mask=mask, layout=layout, random=random, sink=sink)
        keeps = sink is None and keeps_scores(mask, self.cap)
        if (self.recompute or keeps) and torch.is_grad_enabled():
            return checkpoint(core, query, key, value, use_reentrant=False, preserve_rng_state=False)
        return core(query, key, value)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        layout: SequenceLayout,
        random: RandomKey | None,
        sink: Tensor | None,
    ) -> Tensor:
        """Compute attention from all three as [batch, heads or groups, tokens, head_dim].

        Keys and values are repeated per head unless each group serves an equal number of consecutive heads.
        """
        drop = None
        if random is not None and self.dropout > 0.0:
            rows = layout.rows_of(self.heads)
            drop = random.dropout_mask(self.dropout, self.site, rows)
            if sink is None and draws_its_own(query.device, query.dtype, self.cap):
                random.seed_site(self.site, rows[0].start, query.device)
        key, value = self._of_heads(key), self._of_heads(value)
        query, key, value = query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        if sink is None:
            mixed = attention(query, key, value, mask, scale=self.scale, cap=self.cap, dropout=drop)
        else:
            mixed = attention_with_sink(query, key, value, mask, sink, scale=self.scale, cap=self.cap, dropout=drop)
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _of_heads(self, shared: Tensor) -> Tensor:
        """Return keys or values [tokens, batch, groups, head_dim], repeated per head if groups are uneven."""
        return shared if self.groups_are_even else shared[:, :, self.groups]

    @functools.cached_property
    def groups_are_even(self) -> bool:
        """True if each group serves an equal number of consecutive heads."""
        heads, groups = len(self.groups), max(self.groups) + 1
        return heads % groups == 0 and list(self.groups) == [head * groups // heads for head in range(heads)]
