"""The layers of a network, one by one: what mixes tokens in each, and what feeds forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["attention"]
FeedForward = Literal["dense"]


@dataclass(frozen=True)
class LayerSpec:
    """One layer. FLOPs, memory and the network itself (`model/block.py`) are made from the list of all.

    Attributes:
        keys_before: of a sliding window, how many keys before its own a token sees; None: all.
    """

    mixer: Mixer = "attention"
    feed_forward: FeedForward = "dense"
    keys_before: int | None = None
