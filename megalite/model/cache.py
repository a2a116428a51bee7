"""Keys and values of tokens that have been read, so that the tokens after them can see them without computing them."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of a batch of sequences in the attention layers of a stage: a token's slot is its position.

    Sequences of different lengths are padded at their end. Padding fills slots, too, that no token of its sequence sees
    before the one which stands there has taken its place.

    Holds 2 x layers x batch x key-value groups of this rank x slots x head_dim numbers, of the first forward pass on.
    """

    def __init__(self, slots: int) -> None:
        """`slots`: of each sequence, as many as its longest has tokens to be read."""
        self.slots = slots
        self._layers: dict[int, Tensor] = {}
        self._positions = torch.empty(0, 0, dtype=torch.int64)
        self._end = 0

    def move_to(self, positions: Tensor) -> None:
        """The forward pass that follows reads the tokens at `positions` [batch, sequence], consecutive in a sequence.

        Raises ValueError if one lies beyond the slots.
        """
        self._positions, self._end = positions, int(positions.max()) + 1
        if self._end > self.slots:
            raise ValueError(f"a token at position {self._end - 1} has no place among {self.slots} slots")

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values [sequence, batch, groups, head_dim] of a layer into their slots.

        Returns those of all slots so far, [slots so far, batch, groups, head_dim].
        """
        if layer not in self._layers:
            _, batch, groups, width = key.shape
            # Zeros: what is masked has the weight 0, which times what memory may hold is not always 0.
            self._layers[layer] = key.new_zeros(2, batch, groups, self.slots, width)
        kept = self._layers[layer]
        rows = torch.arange(kept.shape[1], device=kept.device).unsqueeze(1)
        for part, new in zip(kept, (key, value), strict=True):
            part[rows, :, self._positions] = new.transpose(0, 1)
        key, value = kept[..., : self._end, :].permute(0, 3, 1, 2, 4)
        return key, value

    def mask(self, before: int | None = None) -> Tensor | None:
        """Return what this pass's tokens see, [batch, 1, sequence, slots so far] bool: the slots up to their own, and
        with `before` none that is farther back. None: causal, from the first slot on.
        """
        sequence = self._positions.shape[1]
        if self._end == sequence and (before is None or before >= sequence - 1):
            return None
        back = self._positions.unsqueeze(2) - torch.arange(self._end, device=self._positions.device)
        visible = back >= 0 if before is None else (back >= 0) & (back <= before)
        return visible.unsqueeze(1)

    def keep(self, rows: list[int]) -> None:
        """Go on with these sequences of the batch alone."""
        for layer, kept in self._layers.items():
            self._layers[layer] = kept[:, rows]
