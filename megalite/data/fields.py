"""Model inputs of a sample in addition to its tokens: labels, loss mask, positions, and document numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from megalite.data.blend import Dataset


class SampleFields(TypedDict):
    """Model inputs of a sample, or of a stack of samples with a leading dimension.

    Attributes:
        tokens: int64 [sequence_length], the input.
        labels: int64 [sequence_length], the token after each input token.
        loss_mask: float32 [sequence_length], 0 if the label does not count in the loss; or float64, the label's weight.
        positions: int64 [sequence_length].
        document_ids: int64 [sequence_length], number of the document that a token belongs to; tokens attend only
            within their document. None: tokens attend to all tokens before them.
        padding: bool [sequence_length], true for the tokens that fill up a sample at its end. None: there are none.
        roles: int8 [sequence_length], the role of whose message the label is, among those with a weight and from 1 on;
            0: of none. Only conversations have them, and only if weights are given.
        responses: int64 [sequence_length], the number of the response that the label is of; -1: of none. Only pairs of
            responses have them.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray | None
    padding: np.ndarray | None
    roles: NotRequired[np.ndarray]
    responses: NotRequired[np.ndarray]


@dataclass(frozen=True)
class FieldsDataset:
    """Dataset of the fields of a dataset's samples, as Megatron-LM's `_get_ltor_masks_and_position_ids` defines them.

    Attributes:
        tokens: samples int64 [sequence_length + 1].
        eod: the token that ends a document; it belongs to the document it ends.
        reset_position_ids: positions start at 0 in every document.
        reset_attention_mask: fill `document_ids`.
        eod_mask_loss: no loss if the input is `eod`, since the start of the next document cannot be predicted.
        pad: the token that fills up a sample; no loss if it is the label. None: samples are not filled up.
    """

    tokens: Dataset[np.ndarray]
    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    pad: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, sample: int) -> SampleFields:
        """Return the fields of a sample. Raises IndexError if there is no such sample."""
        tokens_plus_one = self.tokens[sample]
        tokens, labels = tokens_plus_one[:-1], tokens_plus_one[1:]
        loss_mask = np.ones(len(tokens), np.float32)
        if self.eod_mask_loss:
            loss_mask[tokens == self.eod] = 0.0
        padding = None
        if self.pad is not None:
            loss_mask[labels == self.pad] = 0.0
            others = np.flatnonzero(tokens != self.pad)
            length = others[-1] + 1 if len(others) else 0
            padding = np.arange(len(tokens)) >= length if length < len(tokens) else None
        positions, documents = np.arange(len(tokens), dtype=np.int64), None
        if self.reset_position_ids or self.reset_attention_mask:
            ends = tokens == self.eod
            documents = np.cumsum(ends, dtype=np.int64) - ends
            if self.reset_position_ids:
                starts = np.concatenate(([0], np.flatnonzero(ends) + 1))
                positions = positions - starts[documents]
        return SampleFields(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            positions=positions,
            document_ids=documents if self.reset_attention_mask else None,
            padding=padding,
        )
