"""Contents of Hugging Face folders: config.json and the tensors of the files, as they are or in blocks of fp8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import dtype_name
from megalite.checkpoint.tensors import Source
from megalite.config import ModelConfig
from megalite.conversion.block_fp8 import unpacked
from megalite.conversion.block_fp8_writing import InBlocks, matrices, quantization_config
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import Family, choose
from megalite.conversion.huggingface_files import read_config
from megalite.conversion.mapping import FileTensor, FromFiles, Stored, ToFiles, file_tensors
from megalite.conversion.opened import OpenedModel, kept_in_fp32, logical_tensors
from megalite.conversion.prediction_layers import copies_of_depths
from megalite.errors import CheckpointError


def without_unknown_depths(opened: OpenedModel) -> OpenedModel:
    """Return the model without its depths of multi-token prediction, with a note, if no family has them."""
    try:
        choose(FAMILIES, _with_positions(opened))
    except CheckpointError:
        return opened.without_depths()
    return opened


def _with_positions(opened: OpenedModel) -> ModelConfig:
    """Return the network with a maximum sequence length, which config.json has for every kind of positions."""
    return replace(
        opened.config, max_position_embeddings=opened.config.max_position_embeddings or opened.sequence_length
    )


@dataclass(frozen=True)
class Export:
    """Contents of a folder of Hugging Face.

    Attributes:
        config: config.json without the numbers of special tokens.
        mapping: tensors of the files, in no blocks.
        source: what the files have.
    """

    family: Family
    config: dict[str, Any]
    mapping: list[FileTensor]
    source: Source


def export_of(opened: OpenedModel, dtype: torch.dtype | None, *, in_blocks: bool = False) -> Export:
    """Return what a model's folder has. `in_blocks`: the matrices of linear layers and experts in blocks of fp8.

    `dtype`: dtype to cast to; None: no cast. Raises CheckpointError if no family has this network, or its matrices are
    written in blocks and are fp16, or of a family that has other tensors in their place.
    """
    model, before = _with_positions(opened), config_before(opened)
    family, config = choose(sorted(FAMILIES, key=lambda each: each.name != before.get("model_type")), model)
    mapping = file_tensors(family.rules, model, logical_tensors(model), family.halves)
    mapping += [replace(tensor, name=name) for name, tensor in copies_of_depths(mapping).items()]
    source: Source = ToFiles(opened.source, mapping, dtype, precise=kept_in_fp32(model))
    config["torch_dtype"] = dtype_name(dtype or opened.dtype)
    if in_blocks:
        if config["torch_dtype"] == "float16":  # the largest values of a tile may be rounded to more than fp16 has
            raise CheckpointError("weights in blocks of fp8 stand for bf16 or fp32: give --target-params-dtype bf16")
        chosen = matrices(mapping)
        source = InBlocks(source, chosen)
        config["quantization_config"] = quantization_config(mapping, chosen, family.head)
    return Export(family, config, mapping, source)


class _Unpacked:
    """Tensors that a reader of an export finds (`Files`)."""

    def __init__(self, export: Export) -> None:
        source = export.source
        stored = {name: (kind, partial(_whole, source, name)) for name, kind in source.tensors.items()}
        self._stored: Stored = unpacked(stored, export.config)
        self.tensors = {name: kind for name, (kind, _) in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        return self._stored[name][1]()


def _whole(source: Source, name: str) -> Tensor:
    kind = source.tensors[name]
    values = torch.empty(kind.shape, dtype=kind.dtype)
    source.fill(name, kind.whole, values)
    return values


def rounded_to_blocks(opened: OpenedModel, dtype: torch.dtype | None) -> OpenedModel:
    """Return a model with the weights that its export in blocks of fp8 stands for."""
    export = export_of(opened, dtype, in_blocks=True)
    return replace(opened, source=FromFiles(_Unpacked(export), export.mapping, logical_tensors(opened.config)))


def config_before(opened: OpenedModel) -> dict[str, Any]:
    """Return the config.json in the folder of a model's tokenizer; empty if there is none."""
    folder = opened.folder
    return {} if folder is None or not (folder / "config.json").is_file() else read_config(folder)
