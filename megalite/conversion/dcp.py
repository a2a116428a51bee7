"""Weights by name: folders of torch.distributed.checkpoint (DCP), and files with one dictionary of tensors.

They do not say which network they are of. The caller describes it, and its tensors are looked for under the names of
torchtitan, and of each Hugging Face family that has this network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from megalite.checkpoint.tensors import Kind, natural_order
from megalite.config import ModelConfig
from megalite.conversion.chunked_files import Chunk, ChunkedFiles
from megalite.conversion.dcp_files import DCPFiles
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import Family, choose
from megalite.conversion.huggingface import forms_of
from megalite.conversion.huggingface_files import canonical_name, open_safetensors
from megalite.conversion.mapping import FileTensor, FromFiles
from megalite.conversion.megatron_legacy import flat_tensors
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.conversion.torch_archive import read_torch_file
from megalite.conversion.torchtitan_names import BUFFERS, EXPERT_BIAS, HEAD, WORD, canonical, torchtitan_tensors
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box

_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""Modules around others, whose names torch puts into those of tensors."""
_PREFIX = re.compile(r"((app|state|state_dict|model)\.){0,4}")
"""Prefix of a model's names in the state of a whole program."""
_WORDS = (f".{WORD}", ".embed_tokens.weight", ".wte.weight", ".embed_in.weight", ".embeddings.weight")
"""Ends of the names of embeddings, behind a dot."""
_LONGEST_NAME = 200
_SHOWN = 4
"""Maximum number of names of one kind in a message."""


@dataclass(frozen=True)
class _Names:
    """Names that the tensors of a network have in the files of one program."""

    what: str
    mapping: Sequence[FileTensor]
    canonical: Callable[[str], str]
    """Function that returns the name in `mapping` for one in files."""
    head: str
    """Name of the output layer, which files of a tied model may have, too."""
    buffers: str
    """Pattern for the names of tensors that are not weights."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of names in some files, each with that in `mapping`."""

    @property
    def word(self) -> str:
        """Name of the embedding."""
        return next(tensor.name for tensor in self.mapping if tensor.boxes[0][0] == "embedding.word")


@dataclass(frozen=True)
class _Found:
    """Tensors of files by their names in a table."""

    names: _Names
    keys: Mapping[str, str]
    """Keys in the files, by name."""

    @property
    def missing(self) -> list[str]:
        return sorted({tensor.name for tensor in self.names.mapping} - self.keys.keys(), key=natural_order)

    @property
    def further(self) -> list[str]:
        """Names that the table lacks, in the outermost modules that it has, such as `layers`."""
        expected = {tensor.name for tensor in self.names.mapping} | {self.names.head}
        modules = {name.partition(".")[0] for name in expected}
        return [
            name
            for name in sorted(self.keys.keys() - expected, key=natural_order)
            if name.partition(".")[0] in modules and not re.fullmatch(self.names.buffers, name)
        ]


def open_dcp(folder: Path, model: ModelConfig) -> OpenedModel:
    """Open a folder of DCP with the weights of this network, whatever the layout that has saved it.

    If `model` does not have the size of the vocabulary, it is that of the embedding. The optimizer's state is ignored.
    Raises CheckpointError if the folder cannot be read, or does not have the tensors of just this network.
    """
    files = DCPFiles(folder)

    def chunks(key: str) -> list[Chunk]:
        return [Chunk(Box(each.offset, each.size), each.dtype, each.read) for each in files.chunks(key)]

    return _open(folder, {key: files.shape(key) for key in files.keys}, chunks, model)


def open_tensor_file(path: Path, model: ModelConfig) -> OpenedModel:
    """Open a file with the weights of this network by name: of safetensors, by its suffix, or else of torch.save.

    Arguments, result and errors are those of `open_dcp`.
    """
    if path.suffix == ".safetensors":
        stored = open_safetensors(path)
    else:
        loaded = read_torch_file(path)
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{path} has no tensors by name")
        stored = {name: (Kind(each.shape, each.dtype), each.read) for name, each in flat_tensors(path, loaded)}

    def chunks(key: str) -> list[Chunk]:
        kind, read = stored[key]
        return [Chunk(kind.whole, kind.dtype, read)]

    return _open(path, {key: kind.shape for key, (kind, _) in stored.items()}, chunks, model)


def _open(
    path: Path, shapes: Mapping[str, tuple[int, ...]], chunks: Callable[[str], list[Chunk]], model: ModelConfig
) -> OpenedModel:
    """Open a network whose tensors are among those with these shapes. `chunks` is called once for each that is read."""
    if model.vocab_size is None:
        rows = next((shape[0] for key, shape in shapes.items() if shape and f".{key}".endswith(_WORDS)), None)
        if not rows:
            raise CheckpointError(f"{path} has no embedding, such as {WORD}: its tensors are {_some(list(shapes))}")
        model = replace(model, vocab_size=rows)
    logical = logical_tensors(model)
    found = _find(path, list(shapes), model, logical)
    names = found.names
    read = [*(tensor.name for tensor in names.mapping), *({names.head} & found.keys.keys()), *found.further]
    try:
        files = ChunkedFiles({name: chunks(found.keys[name]) for name in dict.fromkeys(read)}, {})
        for bias in found.further:
            if files.tensor(bias).any():
                raise CheckpointError(f"{bias} is not zero, but the network of the flags has no bias of this choice")
        source = FromFiles(files, names.mapping, logical)
        copied = "output" not in logical and names.head in files.tensors
        if copied and not torch.equal(files.tensor(names.word), files.tensor(names.head)):
            raise CheckpointError(f"{names.head} and {names.word} differ, but the flags tie them")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return OpenedModel(f"{names.what}, {path}", model, source)


def _find(path: Path, keys: Iterable[str], model: ModelConfig, logical: Mapping[str, tuple[int, ...]]) -> _Found:
    """Return the tensors of a network under the names of the program that has saved them.

    Beside them, there may be biases of the choice of experts. Raises CheckpointError if no program's names fit.
    """
    plain: dict[str, str] = {}
    for key in keys:
        if plain.setdefault(_WRAPPERS.sub("", key), key) != key:
            raise CheckpointError(f"{path} has {_WRAPPERS.sub('', key)} twice")
    tables, refusals = _tables(model, logical)
    if not tables:
        raise CheckpointError(f"{path} cannot be read as the network of the flags: {'; '.join(refusals)}")
    found = [each for names in tables for each in _by_prefix(names, plain)]
    nearest = min(found, key=lambda each: (len(each.missing), len(each.further)))
    missing, further = nearest.missing, [name for name in nearest.further if not name.endswith(EXPERT_BIAS)]
    if len(missing) == len(nearest.names.mapping):
        expected = dict.fromkeys(f"{names.word} ({names.what})" for names in tables)
        missing, further = list(expected), list(plain)
    if missing or further:
        others = dict.fromkeys(names.what for names in tables if names.what != nearest.names.what)
        lines = [
            f"{path} does not have just the tensors of the network of the flags; {nearest.names.what} is the nearest:",
            f"  expected, but not there: {_some(missing)}",
            f"  there, but not expected: {_some(further)}",
            *([f"  further away: {', '.join(others)}"] if others else []),
            *(f"  {refusal}" for refusal in refusals),
        ]
        raise CheckpointError("\n".join(lines))
    return nearest


def _tables(model: ModelConfig, logical: Mapping[str, tuple[int, ...]]) -> tuple[list[_Names], list[str]]:
    """Return the names that this network may have, and lines on the programs that do not have it."""
    tables: list[_Names] = []
    refusals: list[str] = []
    try:
        mapping = torchtitan_tensors(model, logical)
        tables.append(_Names("torchtitan", mapping, partial(canonical, model=model), HEAD, BUFFERS))
    except CheckpointError as error:
        refusals.append(f"torchtitan does not have this network: {error}")
    # Every config.json has a maximum sequence length. It changes nothing where positions are rotary.
    model = replace(model, max_position_embeddings=model.max_position_embeddings or 1)
    families = list(_families(model))
    for family in families:
        for expected, mapping in forms_of(family, model).items():
            of_family = partial(canonical_name, family=family, expected=expected)
            what = f"Hugging Face ({family.name})"
            tables.append(_Names(what, mapping, of_family, family.head, family.buffers, family.prefixes))
    if not families:
        try:
            choose(FAMILIES, model)
        except CheckpointError as error:
            refusals.append(str(error))
    return tables, refusals


def _families(model: ModelConfig) -> Iterator[Family]:
    """Yield the families of Hugging Face that have this network."""
    for family in FAMILIES:
        try:
            family.config(model)
        except CheckpointError:
            continue
        yield family


def _by_prefix(names: _Names, keys: Mapping[str, str]) -> Iterator[_Found]:
    """Yield what is found under each prefix that stands before the name of an embedding, and without one."""
    others = (theirs + names.word.removeprefix(ours) for theirs, ours in names.prefixes.items())
    prefixes = {key.removesuffix(word) for word in (names.word, *others) for key in keys if key.endswith(word)}
    for prefix in sorted({"", *filter(_PREFIX.fullmatch, prefixes)}):
        of_model = {key.removeprefix(prefix): theirs for key, theirs in keys.items() if key.startswith(prefix)}
        yield _Found(names, {names.canonical(name): theirs for name, theirs in of_model.items()})


def _some(names: Sequence[str]) -> str:
    """Return the first of the names, cut, and how many there are beside them."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return (", ".join(name[:_LONGEST_NAME] for name in names[:_SHOWN]) or "none") + more
