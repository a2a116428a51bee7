"""Settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

EPSILON = 1e-5
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Settings:
    """A run. Sizes of tensors are those of the whole model; axes are numbers of ranks."""

    layers: int = 2
    hidden: int = 32
    ffn: int = 64
    heads: int = 4
    key_value_heads: int = 2
    vocabulary: int = 96
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 2
    auxiliary: float = 0.0
    """Factor of the loss that balances the experts' loads."""

    tp: int = 1
    sp: bool = False
    """Sequence parallelism: between blocks, tensor-parallel ranks have parts of the tokens."""
    cp: int = 1
    dp: int = 1
    ep: int = 1
    """Expert parallelism, which divides dp x cp."""
    pp: int = 1
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    zero: bool = False
    """Optimizer states are divided over the ranks with the same weights."""
    average: bool = False
    """Gradients are averaged over data-parallel ranks, whose losses are multiplied by their number, not summed."""

    sequence: int = 16
    micro_batch: int = 1
    """Samples of a micro-batch."""
    batch: int = 4
    """Samples of a step."""
    masked: float = 0.0
    """Share of tokens that count in no loss."""
    documents: bool = False
    """Samples are of several documents, and attention ends where they end."""
    steps: int = 2
    dtype: Literal["fp64", "fp32", "bf16"] = "fp32"
    rate: float = 1e-2
    least_rate: float = 1e-3
    warm_up: int = 0
    decay_steps: int = 100
    decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_epsilon: float = 1e-8
    clip: float = 1.0
    seed: int = 1
    load: str = ""
    """Folder of the initial weights, as checkpoint/; empty for random ones."""
    record: tuple[int, ...] = (1,)
    """Steps to record."""
    whole: bool = False
    """Record all elements, not sketches."""

    def __post_init__(self) -> None:
        for name, whole, parts in (
            ("heads", self.heads, self.tp),
            ("ffn", self.ffn, self.tp),
            ("vocabulary", self.vocabulary, self.tp),
            ("heads", self.heads, self.key_value_heads),
            ("layers", self.layers, self.pp),
            ("experts", self.experts, self.ep),
            ("dp x cp", self.dp * self.cp, self.ep),
            ("sequence", self.sequence, (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sp else 1)),
            ("batch", self.batch, self.dp * self.micro_batch),
            ("key_value_heads or tp", max(self.key_value_heads, self.tp), min(self.key_value_heads, self.tp)),
        ):
            if whole % parts:
                raise ValueError(f"{name} is {whole}, which {parts} does not divide")
        if self.experts and self.tp > 1 and not self.sp:
            raise ValueError("experts with tensor parallelism need sp, as in Megatron-LM")
        if self.experts and self.qk_norm:
            raise ValueError("no model of Hugging Face has the names of both experts and qk_norm here")

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def head(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data-parallel rank in a step."""
        return self.batch // (self.dp * self.micro_batch)

    @property
    def weight_dtype(self) -> torch.dtype:
        return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    @property
    def wide(self) -> torch.dtype:
        """Type of gradients, of the optimizer, and of what is sensitive to rounding."""
        return torch.promote_types(self.weight_dtype, torch.float32)
