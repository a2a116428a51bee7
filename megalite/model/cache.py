"""Key-value cache for inference: keys and values of earlier tokens are stored instead of computed again."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of a batch of sequences in the attention layers of a stage. A token's slot is its position.

    Sequences of different lengths are padded at their end. Padding also writes slots, but no token sees such a slot
    before the true token of this position has overwritten it.

    The cache stores 2 x layers x batch x key-value groups of this rank x slots x head_dim numbers. The first forward
    pass allocates them.
    """

    def __init__(self, slots: int) -> None:
        """`slots`: slots per sequence, enough for the tokens of the longest sequence."""
        self.slots = slots
        self._layers: dict[int, Tensor] = {}
        self._positions = torch.empty(0, 0, dtype=torch.int64)
        self._first, self._end = 0, 0

    def move_to(self, positions: Tensor) -> None:
        """Set the positions [batch, sequence] of the next forward pass's tokens, consecutive in each sequence.

        The last token of all sequences may be repeated, with its position.

        Raises:
            ValueError: a position is beyond the slots.
        """
        first, last = torch.stack(positions.aminmax()).tolist()
        self._positions, self._first, self._end = positions, first, last + 1
        if self._end > self.slots:
            raise ValueError(f"a token at position {self._end - 1} has no place among {self.slots} slots")

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [sequence, batch, groups, head_dim] of a layer into their slots.

        Returns:
            The keys and values of all slots so far, [slots so far, batch, groups, head_dim].
        """
        if layer not in self._layers:
            _, batch, groups, width = key.shape
            # Zeros, not uninitialized memory: masked slots have the weight 0, but 0 * NaN is NaN.
            self._layers[layer] = key.new_zeros(2, batch, groups, self.slots, width)
        kept = self._layers[layer]
        rows = torch.arange(kept.shape[1], device=kept.device).unsqueeze(1)
        for part, new in zip(kept, (key, value), strict=True):
            part[rows, :, self._positions] = new.transpose(0, 1)
        key, value = kept[..., : self._end, :].permute(0, 3, 1, 2, 4)
        return key, value

    def mask(self, before: int | None = None) -> Tensor | None:
        """Return the mask of this pass, [batch, 1, sequence, slots so far] bool, or None if plain causal is the same.

        A token sees the slots up to its own. With `before`, it sees at most so many slots before its own.
        """
        sequence = self._positions.shape[1]
        if self._first == 0 and self._end == sequence and (before is None or before >= sequence - 1):
            return None
        back = self._positions.unsqueeze(2) - torch.arange(self._end, device=self._positions.device)
        visible = back >= 0 if before is None else (back >= 0) & (back <= before)
        return visible.unsqueeze(1)

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences of the batch."""
        for layer, kept in self._layers.items():
            self._layers[layer] = kept[:, rows]
