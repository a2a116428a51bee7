"""Conversion from and to Megatron-LM's checkpoints. Only weights are converted."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.atomic_files import new_folder, write_atomically, writing
from megalite.checkpoint.directory import TRACKER
from megalite.checkpoint.file_writer import write_files
from megalite.checkpoint.formats import FORMATS
from megalite.checkpoint.manifest import STATE
from megalite.checkpoint.tensors import Kind, natural_order
from megalite.config import ModelConfig
from megalite.conversion.chunked_files import Chunk, ChunkedFiles
from megalite.conversion.mapping import FileTensor, FromFiles, ToFiles, file_tensors
from megalite.conversion.megatron_arguments import (
    arguments_of,
    count_of,
    model_of,
    tokenizer_of,
    unknown_arguments,
    vocabulary_of,
)
from megalite.conversion.megatron_legacy import NEWER_FORMAT, Legacy
from megalite.conversion.megatron_names import OUTPUT, RULES, TOKEN_TABLES, WORD, written
from megalite.conversion.megatron_prediction import file_tensors_of_depths, is_of_depth
from megalite.conversion.megatron_torch_dist import TorchDist
from megalite.conversion.opened import OpenedModel, check_sizes, kept_in_fp32, logical_tensors
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite.process.progress import Advance
from megalite.small_files import read_small_file, shown

RELEASE = "release"
"""Megatron-LM's name for a checkpoint that does not come from one of its runs. A run starts from it at step 0."""
FILE = 5 * 10**9
"""Approximate size of a file in bytes. The tensors of a layer are not divided."""


def open_megatron(path: Path, true_vocab_size: int | None = None, state: str = "") -> OpenedModel:
    """Open a checkpoint's folder, or the latest checkpoint of a run directory, without the optimizer's state.

    `true_vocab_size` is the number of tokens in the vocabulary. If it is None, the saved arguments give it, otherwise
    the number of rows of the embedding. `state`: one of `TorchDist.states`, which is opened in place of the weights.
    Raises CheckpointError if megalite cannot compute exactly this network.
    """
    folder, opened, arguments = read_arguments(path)
    try:
        model = model_of(arguments)
    except CheckpointError as error:
        what = f"the arguments in {folder} describe a network that megalite does not support"
        raise CheckpointError(f"{what}:\n{error}") from error
    check_sizes(folder, model)
    newer = {
        "a pattern of layers": model.hybrid_layer_pattern is not None,
        "attention over latents": model.has_latents,
        "experts": model.num_experts is not None,
    }
    if isinstance(opened, Legacy) and any(newer.values()):
        words = next(words for words, has in newer.items() if has)
        raise CheckpointError(f"{folder} has {words}: {NEWER_FORMAT}")
    if isinstance(opened, Legacy):
        chunks = opened.chunks(model.activation.gated)
    else:
        chunks = opened.chunks(model.num_layers, state)
    if not model.untie_embeddings_and_output_weights:
        _drop_copy(folder, chunks)
    rows = max((chunk.box.offset[0] + chunk.box.size[0] for chunk in chunks.get(WORD, ())), default=0)
    tokens = true_vocab_size or vocabulary_of(arguments) or rows
    if tokens > rows:
        raise CheckpointError(f"{folder} has {rows} rows for {tokens} tokens: give their number by --true-vocab-size")
    model = replace(model, vocab_size=tokens)
    logical = logical_tensors(model)
    if state:
        logical = {name: shape for name, shape in logical.items() if not name.startswith(STATE)}
    mapping = tensors_of_megatron(model, logical)
    others = sorted(chunks.keys() - {tensor.name for tensor in mapping}, key=natural_order)
    if others:
        some = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        raise CheckpointError(f"{folder} has {some}, which the network in its arguments does not have")
    try:
        files = ChunkedFiles(chunks, dict.fromkeys(TOKEN_TABLES, (tokens, model.hidden_size)))
        source = FromFiles(files, mapping, logical)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    length = count_of(arguments, "seq_length")
    what, notes = f"Megatron-LM, {folder}", unknown_arguments(arguments)
    return OpenedModel(what, model, source, tokenizer_of(arguments), length, notes=notes)


def read_arguments(path: Path) -> tuple[Path, TorchDist | Legacy, Mapping[str, Any]]:
    """Return a checkpoint's folder, its files and the arguments of its run. Raises CheckpointError."""
    folder = _resolve(path)
    opened = TorchDist(folder) if (folder / ".metadata").is_file() else Legacy(folder)
    arguments: Mapping[str, Any] | None = getattr(opened.common().get("args"), "fields", None)
    if not arguments:
        raise CheckpointError(f"{folder} does not have the arguments of its run, which describe the network")
    return folder, opened, arguments


def tensors_of_megatron(model: ModelConfig, logical: Mapping[str, tuple[int, ...]]) -> list[FileTensor]:
    """Return the tensors of a network's files, of which each letter of a pattern is a layer.

    `logical`: shapes of its logical tensors, by name. Raises CheckpointError if Megatron-LM has no such network.
    """
    halves = 2 if model.hybrid_layer_pattern is None else 1
    main = {name: shape for name, shape in logical.items() if not is_of_depth(name)}
    return [*file_tensors(RULES, model, main, halves), *file_tensors_of_depths(RULES, model, logical, halves)]


def _resolve(path: Path) -> Path:
    """Return a checkpoint's folder, given this folder or its run directory."""
    if (path / ".metadata").is_file() or any(path.glob("mp_rank_*")):
        return path
    try:
        tracked = read_small_file(path / TRACKER, largest=1000, folder=path).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of Megatron-LM, and no {TRACKER} names one") from error
    step = re.fullmatch(r"\d{1,15}", tracked)
    folder = path / (f"iter_{int(tracked):07d}" if step else RELEASE)
    if not (step or tracked == RELEASE) or not folder.is_dir():
        raise CheckpointError(f"{path / TRACKER} names {shown(tracked)}, which is not a checkpoint there")
    return folder


def _drop_copy(folder: Path, chunks: dict[str, list[Chunk]]) -> None:
    """Remove the second copy of a tied embedding, which the last stage has saved.

    Raises CheckpointError if it differs from the embedding.
    """
    of_both = {name: chunks[name] for name in TOKEN_TABLES if name in chunks}
    if len(of_both) == len(TOKEN_TABLES):
        files = ChunkedFiles(of_both, {})
        word = files.tensor(WORD)
        if not torch.equal(word, files.tensor(OUTPUT)):
            raise CheckpointError(f"{folder} has {OUTPUT} with other values than {WORD}, which its arguments tie it to")
        del chunks[OUTPUT]


# ------------------------------------------------------------------------------------------------ writing


class _Stacked:
    """Tensors of files, in the form of Megatron-LM's distributed checkpoints (a `Source`).

    If all layers of a GPT are of one kind, their tensors are stacked over them along a new first axis. Tables of tokens
    are padded with rows of zeros.
    """

    def __init__(self, files: ToFiles, model: ModelConfig, vocabulary: int) -> None:
        """Name and stack the tensors. `vocabulary`: rows of the tables of tokens, with padding."""
        self._files = files
        self._stacks = (
            len({(layer.kinds, layer.chooses) for layer in model.layers}) == 1 and model.hybrid_layer_pattern is None
        )
        self._names: dict[str, str] = {}
        """Names in `files` by the written name; of stacked tensors the one in the first layer."""
        self.tensors: dict[str, Kind] = {}
        for name, kind in files.tensors.items():
            new = written(name, model)
            if name in TOKEN_TABLES:
                kind = Kind((vocabulary, *kind.shape[1:]), kind.dtype)
            elif self._stacked(name):
                new, kind = (
                    re.sub(r"\.layers\.\d+\.", ".layers.", new),
                    Kind((model.num_layers, *kind.shape), kind.dtype),
                )
            self._names.setdefault(new, name)
            self.tensors[new] = kind

    def _stacked(self, name: str) -> bool:
        return self._stacks and name.startswith("decoder.layers.")

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Fill `values` with a box of a tensor of all layers, whose first dimension is the layer; padding is zero."""
        stacked, name = self._stacked(name), self._names[name]
        if stacked:
            within = Box(box.offset[1:], box.size[1:])
            for layer, of_layer in enumerate(values, start=box.offset[0]):
                self._files.fill(name.replace(".layers.0.", f".layers.{layer}."), within, of_layer)
            return
        there = box.intersection(Box.whole(self._files.tensors[name].shape))
        if there != box:
            values.zero_()
        if there is not None:
            self._files.fill(name, there, values[there.relative_to(box).slices()])

    def cut(self) -> list[list[tuple[str, Box]]]:
        """Return the boxes of each file.

        A stacked tensor has one box per layer, so that a rank of any layout reads only its own layers.
        """
        files: list[list[tuple[str, Box]]] = [[]]
        room = FILE
        for name, kind in self.tensors.items():
            layers = range(kind.shape[0]) if self._stacked(name) else ()
            for box in [kind.whole.at([0], [layer]) for layer in layers] or [kind.whole]:
                if room < 0:
                    files.append([])
                    room = FILE
                files[-1].append((name, box))
                room -= box.numel * kind.dtype.itemsize
        return files


def write_megatron(
    opened: OpenedModel,
    directory: Path,
    *,
    dtype: torch.dtype | None,
    tensor_parallel_size: int,
    workers: int,
    advance: Advance,
) -> Path:
    """Write a model into a run directory as Megatron-LM's `torch_dist`, and return the new folder.

    The folder appears complete or not at all. `dtype`: dtype to cast to; None: the widest dtype in the model.
    `tensor_parallel_size`: tensor-parallel size for which the vocabulary is padded. Raises CheckpointError if
    Megatron-LM has no such network, the directory already has a checkpoint, or the disk fails.
    """
    model, folder = opened.config, directory / RELEASE
    vocabulary = model.padded_vocab_size(tensor_parallel_size)
    arguments = arguments_of(model, opened.data, opened.sequence_length, vocabulary)
    if folder.exists() or (directory / TRACKER).exists():
        raise CheckpointError(f"{directory} has a checkpoint already: choose another folder")
    mapping = tensors_of_megatron(model, logical_tensors(model))
    files = ToFiles(opened.source, mapping, dtype or opened.dtype, precise=kept_in_fp32(model))
    stacked = _Stacked(files, model, vocabulary)
    common = io.BytesIO()
    torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": 0}, common)
    with new_folder(folder) as temporary:
        write_files(stacked, temporary, stacked.cut(), FORMATS["torch_dist"], workers, advance)
        write_atomically(temporary / "common.pt", common.getvalue())
        # Written last, because Megatron-LM recognizes a checkpoint by this file.
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backend |= {"common_backend": "torch", "common_backend_version": 1}
        write_atomically(temporary / "metadata.json", json.dumps(backend).encode())
    with writing(folder):
        write_atomically(directory / TRACKER, RELEASE.encode())
    return folder
