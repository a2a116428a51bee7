"""Layers of Hugging Face's files that predict further tokens (MTP), as those of DeepSeek-V3 have them.

Each is a depth of multi-token prediction. They have the numbers after those of the network's layers and, beside the
tensors of a layer, norms, a projection, and copies of the embedding and of the output layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from megalite.conversion.mapping import Files, FileTensor, MappedBox, Rule, norm
from megalite.errors import CheckpointError

_LAYER = "model.layers.{layer}"
_FIRST = "enorm.weight"


def rules_of_depths(begin: str) -> tuple[Rule, ...]:
    """Return the rules of what a depth has beside its layers and their final norm, as Megatron-LM and DeepSeek name it.

    The columns for the embedding come first. `begin`: what stands before the names.
    """
    projection = MappedBox("projection")
    return (
        *norm(f"{begin}enorm", "embedding_norm"),
        *norm(f"{begin}hnorm", "hidden_norm"),
        Rule(f"{begin}eh_proj.weight", "channels (two hidden) -> channels two hidden", (projection,)),
    )


OF_DEPTHS = (*rules_of_depths(f"{_LAYER}."), *norm(f"{_LAYER}.shared_head.norm", "final_norm"))
"""Rules of what a depth has beside its layer."""


def copies_of_depths(mapping: Iterable[FileTensor]) -> dict[str, FileTensor]:
    """Return what depths have copies of, by the names of the copies. `mapping`: the tensors of a model's files."""
    own = {tensor.boxes[0][0]: tensor for tensor in mapping}
    word = own["embedding.word"]
    copied = {"embed_tokens.weight": word, "shared_head.head.weight": own.get("output", word)}
    layers = [tensor.name.removesuffix(_FIRST) for tensor in own.values() if tensor.name.endswith(f".{_FIRST}")]
    return {layer + name: tensor for layer in layers for name, tensor in copied.items()}


def check_copies(folder: Path, files: Files, copies: Mapping[str, FileTensor]) -> None:
    """Raise CheckpointError if a copy is not what it copies. Files may lack copies."""
    for name, tensor in copies.items():
        kind, other = files.tensors.get(name), files.tensors[tensor.name]
        if kind is not None and (kind != other or not torch.equal(files.tensor(name), files.tensor(tensor.name))):
            raise CheckpointError(
                f"{folder} has {name} and {tensor.name} with different values, but megalite's depths have the "
                "embedding and the output layer of the network: set num_nextn_predict_layers to 0 in config.json, "
                "which leaves the depths out"
            )
