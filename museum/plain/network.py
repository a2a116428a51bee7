"""The network, or the stage of it that a rank has."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from museum.plain.attention import Attention, Norm
from museum.plain.data import Batch
from museum.plain.mlp import Experts, Mlp
from museum.plain.ranks import Ranks
from museum.plain.settings import Settings
from museum.plain.tensor_parallel import ColumnLinear, Embedding, Part, Weight, block


class Layer(nn.Module):
    """Transformer layer."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        settings = ranks.settings
        self.input_layernorm = Norm(settings.hidden, settings)
        self.self_attn = Attention(ranks)
        self.post_attention_layernorm = Norm(settings.hidden, settings)
        name = "block_sparse_moe" if settings.experts else "mlp"
        self.add_module(name, Experts(ranks) if settings.experts else Mlp(ranks))
        self._name = name

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), batch)
        feed_forward: nn.Module = getattr(self, self._name)
        return hidden + feed_forward(self.post_attention_layernorm(hidden))


class Model(nn.Module):
    """Embedding, layers and last norm, as far as this stage has them; layers have their numbers in the whole model."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        settings = ranks.settings
        start, count = block(settings.layers, ranks.pp)
        if ranks.is_first:
            self.embed_tokens = Embedding(ranks)
        self.layers = nn.ModuleDict({str(number): Layer(ranks) for number in range(start, start + count)})
        if ranks.is_last:
            self.norm = Norm(settings.hidden, settings)

    def forward(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            hidden = self.embed_tokens(batch.tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, batch)
        return self.norm(hidden) if hasattr(self, "norm") else hidden


class Stage(nn.Module):
    """Stage of the model: hidden states for the next one, or logits."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        settings = ranks.settings
        self.model = Model(ranks)
        if ranks.is_last:
            rows = block(settings.vocabulary, ranks.tp)
            self.lm_head = ColumnLinear(Part((settings.vocabulary, settings.hidden), (0, *rows)), ranks)
            if settings.tied and ranks.is_first:
                self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        hidden = self.model(batch, hidden)
        return self.lm_head(hidden) if hasattr(self, "lm_head") else hidden

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield the weights with their names in the whole model."""
        for name, parameter in self.named_parameters():
            assert isinstance(parameter, Weight)
            yield name, parameter

    def auxiliary_losses(self) -> list[Tensor]:
        """Return the balancing losses of the last micro-batch."""
        found = (module.auxiliary for module in self.modules() if isinstance(module, Experts))
        return [each for each in found if each is not None]


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def name_in_files(name: str, settings: Settings) -> str:
    """Return the name of a weight in checkpoints, which have a tied one once."""
    return EMBEDDING if settings.tied and name == HEAD else name
