"""Size of a network, as a number: what needs no torch to be known."""

from __future__ import annotations

from megalite.config.kinds.table import KINDS, kinds_of
from megalite.config.model import ModelConfig
from megalite.errors import ConfigurationError


def least_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of all matrices, without padding. An unknown vocabulary counts as 0.

    If the layers are not known, they count as attention with a dense feed-forward layer.
    """
    rows = (model.vocab_size or 0) * (2 if model.untie_embeddings_and_output_weights else 1)
    if model.position_embedding_type == "learned_absolute":
        rows += model.max_position_embeddings or 0
    try:
        kinds = [kind for layer in model.all_layers for kind in kinds_of(layer)]
    except ConfigurationError:  # reported elsewhere
        kinds = [KINDS["attention"], KINDS["dense"]] * model.num_layers
    rows += 2 * model.hidden_size * model.own_depths  # the projections of depths
    return model.hidden_size * rows + sum(kind.weights(model) for kind in kinds)
