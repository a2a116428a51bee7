"""Reading and writing of Hugging Face folders: config.json, weights, and related files."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.atomic_files import new_folder, write_atomically
from megalite.checkpoint.file_writer import Cut, write_files
from megalite.checkpoint.formats import Format, Placed, safetensors_byte_ranges
from megalite.checkpoint.tensors import Kind, natural_order, packed
from megalite.config import ModelConfig
from megalite.config.prediction import without_depths
from megalite.config.tokenizer import TokenizerFlags
from megalite.conversion.delta_families import IMAGES
from megalite.conversion.export import config_before, export_of
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import CARRIED, Family
from megalite.conversion.folder_keys import check_keys
from megalite.conversion.huggingface_files import LARGEST_CONFIG, HuggingFaceFiles, read_config, read_json
from megalite.conversion.mapping import FileTensor, FromFiles, file_tensors
from megalite.conversion.opened import OpenedModel, check_sizes, logical_tensors
from megalite.conversion.prediction_layers import check_copies, copies_of_depths
from megalite.data.tokenizers import build_tokenizer
from megalite.data.tokenizers.folder import read_folder
from megalite.errors import CheckpointError, ConfigurationError, DataError
from megalite.process.progress import Advance
from megalite.small_files import read_small_file, shown

COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
"""Patterns for the files of a folder that belong to its tokenizer."""


def open_huggingface(folder: Path, *, depths: bool = True, compare: bool = True) -> OpenedModel:
    """Open the model in a folder. Raises CheckpointError if megalite cannot compute exactly this model.

    Args:
        depths: read its depths of multi-token prediction, too, if its family's are megalite's.
        compare: compare copies of the embedding and the output layer with these, which reads them whole.
    """
    config = read_config(folder)
    family = family_of(folder, config)
    try:
        model = family.model(config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / 'config.json'} has a network unknown to megalite:\n{error}") from error
    model = model if depths else without_depths(model)
    check_sizes(folder, model)
    _check_other_files(folder)
    ends = tuple(sorted(end_tokens(folder)))
    forms, further = forms_of(family, model), family.of_prediction_layers(config)
    copies = copies_of_depths(next(iter(forms.values())))
    expected, left_out = frozenset(copies).union(*forms), None if model.depths else further
    files = HuggingFaceFiles(folder, config, family, expected, left_out)
    notes = tuple(_left_out(folder, files.left_out))
    if model.depths and further is not None and not any(re.fullmatch(further, name) for name in files.tensors):
        notes = (f"note: {folder} has no tensors of layers that predict further tokens (MTP): it is read without",)
        model = without_depths(model)
        forms, copies = forms_of(family, model), {}
    names = max(forms, key=lambda names: len(names & files.tensors.keys()))
    if others := sorted(files.tensors.keys() - names - copies.keys() - {family.head}):
        raise CheckpointError(f"{folder} has tensors of two forms of its family, such as {others[0]} beside the others")
    mapping, logical = forms[names], logical_tensors(model)
    try:
        source = FromFiles(files, mapping, logical)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if compare:
        check_copies(folder, files, copies)
    if compare and "output" not in logical:
        word = next(tensor.name for tensor in mapping if tensor.boxes[0][0] == "embedding.word")
        if family.head in files.tensors and not torch.equal(files.tensor(word), files.tensor(family.head)):
            raise CheckpointError(
                f"{folder} has {family.head} and {word} with different values, but config.json says that they "
                "are tied: set tie_word_embeddings to false there if they are not"
            )
    data, length = tokenizer_fields(folder), model.max_position_embeddings
    what = f"{family.name}, {folder}"
    return OpenedModel(what, model, source, data, length, folder, ends, is_huggingface=True, notes=notes)


def forms_of(family: Family, model: ModelConfig) -> dict[frozenset[str], list[FileTensor]]:
    """Return the tensors of each form of a family's files, by their names.

    Such as files with experts one by one, or with the experts of a layer together.
    """
    logical = logical_tensors(model)
    tables = [rules for rules in (family.rules, family.rewritten) if rules]
    mappings = (file_tensors(rules, model, logical, family.halves) for rules in tables)
    return {frozenset(tensor.name for tensor in mapping): mapping for mapping in mappings}


def _left_out(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield a note for each kind of layers whose tensors, with these names, are left out."""
    images = [name for name in names if name.startswith(IMAGES)]
    for kind, what in (({*names} - {*images}, "predict further tokens (MTP)"), (images, "see images")):
        if kind:
            found = f"{len(kind):,} tensors of layers that {what}, such as {min(kind, key=natural_order)}"
            yield f"note: {folder} has {found}: they are left out"


def _check_other_files(folder: Path) -> None:
    """Raise CheckpointError if other files than config.json and the weights say what megalite does not apply."""
    path = folder / "generation_config.json"
    if path.is_file():
        check_keys(path, read_json(path, largest=LARGEST_CONFIG), "generation_config")
    if (adapter := folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{adapter}: an adapter is not applied; merge it into the weights (peft: merge_and_unload) and save them, "
            "or move the file away to use the weights without it"
        )


def end_tokens(folder: Path) -> frozenset[int]:
    """Return the tokens before which transformers' `generate` ends a text; empty if a folder does not name any.

    They are the `eos_token_id`, one or several, of generation_config.json or, without this file, of config.json.
    Raises CheckpointError if it is something else.
    """
    ends = frozenset[int]()
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.is_file():
            found = read_config(folder) if path.name == "config.json" else read_json(path, largest=LARGEST_CONFIG)
            named = found.get("eos_token_id")
            tokens = named if isinstance(named, list) else [] if named is None else [named]
            if named == [] or not all(type(token) is int for token in tokens):
                raise CheckpointError(
                    f"{path}: eos_token_id is {shown(named)}: it must be a token's number, or a list of such"
                )
            ends = frozenset(tokens)
    return ends


def family_of(folder: Path, config: Mapping[str, Any]) -> Family:
    """Return the family with this model_type and architecture. A config.json without architectures is accepted."""
    architectures = config.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    for family in FAMILIES:
        if config.get("model_type") in (family.name, *family.other_names) and architectures in (
            [],
            [family.architecture],
        ):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    named = ", ".join(map(str, architectures[:8]))[:200] or "without an architecture"
    what = f"{shown(config.get('model_type'))}, {named}"
    raise CheckpointError(f"{folder / 'config.json'} has {what}. Supported are {known}")


def tokenizer_fields(folder: Path) -> dict[str, Any]:
    """Return the configuration fields that name the tokenizer in a folder; empty if it has none.

    Raises CheckpointError if a folder without tokenizer.json declares what a tokenizer.model alone does not give.
    """
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    if (folder / "tokenizer.model").is_file():
        fields = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(folder / "tokenizer.model")}
        _check_model_alone(folder, TokenizerFlags(**fields))  # type: ignore[arg-type]
        return fields
    return {}


def tokenizer_folder(tokenizer_model: str | None) -> Path | None:
    """Return the folder of a tokenizer's files, if other programs can use these files."""
    if tokenizer_model is None:
        return None
    path = Path(tokenizer_model)
    folder = path if path.is_dir() else path.parent
    return folder if (folder / "tokenizer.json").is_file() or path.name == "tokenizer.model" else None


def _check_model_alone(folder: Path, flags: TokenizerFlags) -> None:
    """Raise CheckpointError if a folder's files declare tokens that its tokenizer.model alone does not give."""
    beside = read_folder(folder)
    declared = dict[str, int | None].fromkeys(token.content for token in (*beside.named.values(), *beside.extra))
    declared |= {token.content: number for number, token in beside.by_id.items()}
    around = [name for name in ("add_bos_token", "add_eos_token") if beside.agreeing.get(name)]
    pieces = build_tokenizer(flags) if declared else None
    found = {content: None if pieces is None else pieces.token_id(content) for content in declared}
    other = [
        f"the token {shown(content)}"
        for content, number in declared.items()
        if found[content] is None or number not in (None, found[content])
    ]
    if around or other:
        raise CheckpointError(
            f"{folder} has a tokenizer.model, but no tokenizer.json, and the files beside it declare "
            f"{(around + other)[0]}, which the tokenizer.model alone does not give: write a tokenizer.json, with "
            "transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )


# ------------------------------------------------------------------------------------------------ writing


def write_huggingface(
    opened: OpenedModel,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    shard: int,
    workers: int,
    advance: Advance,
    in_blocks: bool = False,
) -> Family:
    """Write a model as a Hugging Face folder, which appears complete or not at all, and return its family.

    The tokenizer is copied. If the tokenizer's folder has a config.json, its family is preferred, and the numbers of
    special tokens are taken from it; otherwise the tokens that end texts are the model's. `dtype`: dtype to cast to;
    None: no cast. `shard`: maximum size of a file in bytes. `in_blocks`: see `export_of`. Raises CheckpointError as it
    does, and if the disk fails.
    """
    folder = folder.absolute()  # because `.` has no name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} already exists: choose another folder")
    export, before = export_of(opened, dtype, in_blocks=in_blocks), config_before(opened)
    carried = {name: before[name] for name in CARRIED if name in before} or _ends_of_texts(opened)
    shards, file_format = weight_files(export.source.tensors, shard)
    with new_folder(folder) as temporary:
        write_files(export.source, temporary, shards, file_format, workers, advance)
        write_related(temporary, export.config, carried, opened.folder)
    return export.family


def weight_files(kinds: Mapping[str, Kind], shard: int) -> tuple[Cut, Format]:
    """Return the tensors of each file of a folder, and the files' format. `shard`: maximum size of a file in bytes."""
    names = packed(sorted(kinds, key=natural_order), lambda name: kinds[name].size, shard)
    count = len(names)
    file_name = "model.safetensors" if count == 1 else f"model-{{number:05d}}-of-{count:05d}.safetensors"
    byte_ranges = functools.partial(safetensors_byte_ranges, named=lambda part: part.name)
    file_format = Format(file_name, byte_ranges, _index if count > 1 else lambda _: {}, checksums=False)
    # Wide numbers first, so that the bytes of each are aligned.
    ordered = (sorted(group, key=lambda name: -kinds[name].dtype.itemsize) for group in names)
    return [[(name, kinds[name].whole) for name in group] for group in ordered], file_format


def write_related(folder: Path, config: Mapping[str, Any], carried: Mapping[str, Any], companions: Path | None) -> None:
    """Write config.json and generation_config.json, and copy the tokenizer's files from `companions`."""
    if companions is not None:
        copy_companions(companions, folder)
    if not (folder / "generation_config.json").exists():
        write_atomically(folder / "generation_config.json", _json(carried))
    write_atomically(folder / "config.json", _json({**config, **carried}))


def _ends_of_texts(opened: OpenedModel) -> dict[str, int | list[int]]:
    """Return the tokens that end the model's texts, or else the tokenizer's end of a document, if one is known."""
    if opened.ends:
        return {"eos_token_id": opened.ends[0] if len(opened.ends) == 1 else list(opened.ends)}
    flags = TokenizerFlags(**opened.data)
    if flags.tokenizer_type is None:
        return {}
    try:
        size = None if flags.tokenizer_type != "NullTokenizer" else (opened.config.vocab_size or 0) - 1
        return {"eos_token_id": build_tokenizer(flags, size).eod}
    except (ConfigurationError, DataError):
        return {}


def _index(placed: Placed) -> dict[str, bytes]:
    """Return the index, which names the file of each tensor."""
    by_name = {part.name: file for file, parts in placed.items() for part, _ in parts}
    size = sum(part.size for parts in placed.values() for part, _ in parts)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(by_name.items()))}
    return {"model.safetensors.index.json": _json(index)}


def _json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()


def copy_companions(companions: Path, folder: Path, *more: str) -> None:
    """Copy a tokenizer's files, the generation config, and files that match `more` from one folder into another.

    Raises CheckpointError for a link that leads out of the first folder, and for anything that is not a small file.
    """
    for pattern in (*COMPANIONS, "generation_config.json", *more):
        for path in sorted(companions.glob(pattern)):
            if path.is_file():
                try:
                    content = read_small_file(path, folder=companions)
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"{path} cannot be copied: {error}") from error
                copy = folder / path.relative_to(companions)
                copy.parent.mkdir(exist_ok=True)
                write_atomically(copy, content)
