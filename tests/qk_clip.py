"""QK-Clip written out in numpy, independent of megalite: which logits were largest, and what becomes of the weights.

Names and shapes of the weights are those of `oracle.py` and `latent_oracle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def note(largest: dict[str, Array], layer: str, scores: Tensor, visible: Tensor, padding: Tensor | None) -> None:
    """Take in the scores [batch, heads, queries, keys] of a layer, of pairs that are visible [batch, 1, ...].

    Queries of `padding` [batch, queries] do not count.
    """
    visible = visible if padding is None else visible & ~padding[:, None, :, None]
    note_all(largest, {layer: np.where(visible.numpy(), scores.detach().double().numpy(), -np.inf).max(axis=(0, 2, 3))})


def note_all(largest: dict[str, Array], others: Mapping[str, Array]) -> None:
    """Take in the largest logits of others, by the begin of the names of a layer's weights."""
    for layer, logits in others.items():
        largest[layer] = np.maximum(largest.get(layer, -np.inf), logits)


def clip(weights: Mapping[str, Tensor], largest: Mapping[str, Array], threshold: float, alpha: float) -> None:
    """Scale the weights of the layers in place; `largest`: by the begin of the names of a layer's weights."""
    for layer, logits in largest.items():
        if "latent" in layer:
            _clip_latents(weights, layer, np.minimum(threshold / np.maximum(logits, 1e-30), 1.0), alpha)
        else:
            _clip_heads(weights, layer, logits, threshold, alpha)


def _clip_heads(weights: Mapping[str, Tensor], layer: str, logits: Array, threshold: float, alpha: float) -> None:
    groups = len(weights[layer + "key_value"])
    of_group = len(logits) // groups
    for head in range(len(logits)):
        mates = logits[head // of_group * of_group :][:of_group]
        gamma = threshold / mates.max() if mates.max() > threshold else 1.0
        for name in (layer + "query", layer + "query_bias"):
            if name in weights:
                weights[name].numpy(force=True)[head] *= gamma**alpha
        for name in (layer + "key_value", layer + "key_value_bias"):
            if name in weights and head % of_group == 0:
                weights[name].numpy(force=True)[head // of_group, 0] *= gamma ** (1 - alpha)


def _clip_latents(weights: Mapping[str, Tensor], layer: str, gammas: Array, alpha: float) -> None:
    up = weights[layer + "key_value_up"].numpy(force=True)
    query = weights[layer + ("query_up" if layer + "query_up" in weights else "query")].numpy(force=True)
    plain = up.shape[1] - weights[layer + "output"].shape[2]
    for head, gamma in enumerate(gammas):
        up[head, :plain] *= gamma ** (1 - alpha)
        query[head, :plain] *= gamma**alpha
        query[head, plain:] *= gamma
