"""Options of training a part of a network: adapters of its linear layers, and weights that are frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megalite.config.fields import PositiveFloat, PositiveInt, ShareBelowOne

SHORT_NAMES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "attention.output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "lm_head": "output_layer",
    "embed_tokens": "word_embeddings",
    "all-linear": "*",
}
"""Names that PEFT's users give, with those of megalite."""


def is_target(name: str, targets: Sequence[str], *, is_table: bool = False) -> bool:
    """Tell whether `--lora-target-modules` has a matrix of this name. `is_table`: its rows stand for tokens."""
    given = [SHORT_NAMES.get(target, target) for target in targets if not (is_table and target == "all-linear")]
    return any(fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}") for target in given)


@dataclass(frozen=True)
class AdaptersConfig:
    """Options of training a part of a network: low-rank adapters (LoRA), or all weights but frozen ones."""

    lora_rank: PositiveInt | None = None
    """Rank of low-rank adapters (LoRA), which alone are trained and saved; unset: the network's weights are trained."""
    lora_alpha: PositiveFloat | None = None
    """Adapters' outputs are multiplied with this / lora-rank; unset: it is lora-rank."""
    lora_dropout: ShareBelowOne = 0.0
    """Dropout probability of the inputs of adapters."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Matrices with adapters, by the ends of their names or by patterns such as "layers.1?.attention.*": query, key,
    value, output, gate, up, down, or as PEFT names them (q_proj, ...); all-linear: all of the layers; besides,
    output_layer and word_embeddings (lm_head, embed_tokens)."""
    use_rslora: bool = False
    """Multiply adapters' outputs with lora-alpha / the root of lora-rank (rsLoRA)."""
    use_dora: bool = False
    """Train the length of each row of adapted matrices apart from its direction (DoRA)."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained, by patterns of their names in checkpoints: "embedding.*" "layers.[0-7].*"."""

    @property
    def lora_scale(self) -> float:
        """Factor of what an adapter adds."""
        assert self.lora_rank is not None
        alpha = self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)
