"""Caches for inference: what mixers keep of earlier tokens, so that it is stored instead of computed again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerCache(Protocol):
    """Store of what one mixer keeps of a batch of sequences. Each kind of mixer has a class of its own."""

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences of the batch."""
        ...


Cache = TypeVar("Cache", bound=LayerCache)


class StageCache:
    """Caches of the mixers of a stage, and where the tokens of the next forward pass stand.

    Sequences of different lengths are padded at their end. A later pass begins at the positions of the padding again.
    """

    def __init__(self, slots: int) -> None:
        """`slots`: slots per sequence, enough for the tokens of the longest sequence."""
        self.slots = slots
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        """Positions [batch, sequence] of the tokens of this pass."""
        self.ends: Tensor | None = None
        """[batch] index after the last token that each sequence has; None: all tokens of a pass are such."""
        self.real: Tensor | None = None
        """[batch, sequence] bool, false for the tokens of this pass that only fill up a sequence. None: there are none.
        A state of fixed size must leave them out; keys and values have slots for them."""
        self.again = torch.empty(0, 0, dtype=torch.bool)
        """[batch, sequence], true for repetitions of a sequence's last token."""
        self._layers: dict[Hashable, LayerCache] = {}
        self._first, self.end = 0, 0

    def move_to(self, positions: Tensor) -> None:
        """Set the positions [batch, sequence] of the next forward pass's tokens, consecutive in each sequence.

        The last token of all sequences may be repeated, with its position.

        Raises:
            ValueError: a position is beyond the slots.
        """
        first, last = torch.stack(positions.aminmax()).tolist()
        self.positions, self._first, self.end = positions, first, last + 1
        self.again = F.pad(positions[:, 1:] == positions[:, :-1], (1, 0))
        filling = self.again if self.ends is None else self.again | (positions >= self.ends.unsqueeze(1))
        self.real = ~filling if filling.any() else None
        if self.end > self.slots:
            raise ValueError(f"a token at position {self.end - 1} has no place among {self.slots} slots")

    def of(self, mixer: Hashable, make: Callable[[], Cache]) -> Cache:
        """Return the cache of a mixer, which `make` makes when it is first asked for."""
        if mixer not in self._layers:
            self._layers[mixer] = make()
        found: Cache = self._layers[mixer]  # type: ignore[assignment]  # a mixer always asks with the same `make`
        return found

    def mask(self, before: int | None = None) -> Tensor | None:
        """Return the mask of this pass, [batch, 1, sequence, slots so far] bool, or None if plain causal is the same.

        A token sees the slots up to its own. With `before`, it sees at most so many slots before its own.
        """
        sequence = self.positions.shape[1]
        if self._first == 0 and self.end == sequence and (before is None or before >= sequence - 1):
            return None
        back = self.positions.unsqueeze(2) - torch.arange(self.end, device=self.positions.device)
        visible = back >= 0 if before is None else (back >= 0) & (back <= before)
        return visible.unsqueeze(1)

    def first_copies(self, values: Tensor) -> Tensor:
        """Give repetitions of a token the values [sequence, batch, ...] of the token.

        Their own may differ: a layer before may have seen a repetition as one more token.
        """
        if self.real is None or not self.again.any():
            return values
        numbers = torch.arange(len(values), device=values.device).expand_as(self.again)
        of_first = numbers.masked_fill(self.again, 0).cummax(dim=1).values.t()
        return values.gather(0, of_first.reshape(*of_first.shape, *[1] * (values.dim() - 2)).expand_as(values))

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences of the batch."""
        if self.ends is not None:
            self.ends = self.ends[rows]
        for layer in self._layers.values():
            layer.keep(rows)


class KeyValueCache:
    """Keys and values of a batch of sequences in one attention layer. A token's slot is its position.

    Padding also writes slots, but no token sees such a slot before the true token of this position has overwritten it.
    It stores 2 x batch x key-value groups of this rank x slots x head_dim numbers, which the first pass allocates.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor, stage: StageCache) -> tuple[Tensor, Tensor]:
        """Write keys and values [sequence, batch, groups, head_dim] into the slots of this pass's tokens.

        Returns:
            The keys and values of all slots so far, [slots so far, batch, groups, head_dim].
        """
        if self._kept is None:
            _, batch, groups, width = key.shape
            # Zeros, not uninitialized memory: masked slots have the weight 0, but 0 * NaN is NaN.
            self._kept = key.new_zeros(2, batch, groups, stage.slots, width)
        kept = self._kept
        rows = torch.arange(kept.shape[1], device=kept.device).unsqueeze(1)
        for part, new in zip(kept, (key, value), strict=True):
            part[rows, :, stage.positions] = stage.first_copies(new).transpose(0, 1)
        key, value = kept[..., : stage.end, :].permute(0, 3, 1, 2, 4)
        return key, value

    def keep(self, rows: list[int]) -> None:
        if self._kept is not None:
            self._kept = self._kept[:, rows]
