"""Fates of the keys of another program's folder, from the tables by which it is read: used, noted or refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.conversion.folder_keys import NULL, Fates, KeyFate
from megalite.conversion.huggingface import COMPANIONS, family_of
from megalite.conversion.huggingface_files import LARGEST_CONFIG, chosen_files, read_config, read_json, sees_images
from megalite.conversion.megatron import read_arguments
from megalite.conversion.megatron_arguments import argument_fates
from megalite.data.tokenizers.files import read_fields_beside
from megalite.data.tokenizers.folder import ADDED, AGREEING, CONFIG, MAP, NEUTRAL, NO_EFFECT, refusal
from megalite.errors import CheckpointError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_INDICES = "model.safetensors.index.json", "pytorch_model.bin.index.json"
_TEMPLATE = "chat_template.jinja"
_NOT_READ = "not a file of which the model or its tokenizer is read"
_MAP_NOT_READ = f"{CONFIG} has added_tokens_decoder, so that transformers does not read it"


def fates_of_folder(folder: Path) -> dict[str, list[KeyFate]]:
    """Return the fates of all keys, by file, of a Hugging Face folder or of a checkpoint of Megatron-LM.

    Files that are not read have a fate, too. Raises CheckpointError or DataError if a file cannot be read, or if no
    family has the kind of model.
    """
    if not (folder / _CONFIG).is_file():
        place, _, arguments = read_arguments(folder)
        return {f"arguments in {place.name}": list(argument_fates(arguments))}
    config, written = read_config(folder), read_json(folder / _CONFIG, largest=LARGEST_CONFIG)
    found = {_CONFIG: list(family_of(folder, config).key_fates(config))}
    if sees_images(written):
        found = {_CONFIG: list(Fates.of("with_images").of_keys(written)), f"{_CONFIG}, text_config": found[_CONFIG]}
    for name in (_GENERATION, *_INDICES):
        if (folder / name).is_file():
            table = Fates.of("generation_config" if name == _GENERATION else "index")
            found[name] = list(table.of_keys(read_json(folder / name)))
    said, mapped, added = (read_fields_beside(folder / name) for name in (CONFIG, MAP, ADDED))
    found[CONFIG] = [_of_tokenizer(name, value) for name, value in said.items()]
    found[MAP] = [_of_tokenizer(name, value) for name, value in mapped.items()]
    found[ADDED] = [KeyFate(name, "used", "a token by its number") for name in added]
    if said.get("added_tokens_decoder") is not None:
        kept = {"eos_token"} if said.get("eos_token") is None else set()
        for name in (MAP, ADDED):
            found[name] = [
                fate if fate.key in kept or fate.kind == "refused" else KeyFate(fate.key, "noted", _MAP_NOT_READ)
                for fate in found[name]
            ]
    weights = list[Path]()
    with suppress(CheckpointError):  # which opening the folder reports
        weights = chosen_files(folder)[1]
    files = [path for path in sorted(folder.iterdir()) if path.name not in found and path not in weights]
    found["files"] = [_of_file(path) for path in files]
    if weights:
        names = weights[0].name if len(weights) == 1 else f"{len(weights)} files from {weights[0].name} on"
        found["files"].append(KeyFate(names, "used", "weights"))
    return {name: fates for name, fates in found.items() if fates}


def _of_tokenizer(name: str, value: Any) -> KeyFate:
    """Return the fate of a key of a tokenizer's configuration file."""
    if (why := refusal(name, value)) is not None:
        return KeyFate(name, "refused", why)
    if name in NO_EFFECT:
        return KeyFate(name, "noted", NO_EFFECT[name])
    if value is None:
        return KeyFate(name, "noted", NULL)
    if name in NEUTRAL:
        return KeyFate(name, "noted", "it has the only value that changes no token")
    return KeyFate(name, "used", "checked: tokenizer.json must say the same" if name in AGREEING else "tokens")


def _of_file(path: Path) -> KeyFate:
    """Return the fate of a file without a table of keys."""
    folder, name = path.parent, path.name
    if name == "adapter_config.json":
        return KeyFate(name, "refused", "an adapter is not applied: merge it into the weights, or move the file away")
    vocabulary = "tokenizer.json" if (folder / "tokenizer.json").is_file() else "tokenizer.model"
    if name == vocabulary:
        why = "as transformers reads it, except that texts are neither cut nor padded"
        return KeyFate(name, "used", why if name.endswith(".json") else "by the library SentencePiece")
    if name == _TEMPLATE or (name == "additional_chat_templates" and (path / "tool_use.jinja").is_file()):
        return KeyFate(name, "used", "conversations are written with it")
    copied = any(path.match(pattern) for pattern in COMPANIONS)
    return KeyFate(name, "noted", f"{_NOT_READ}; exports get a copy" if copied else _NOT_READ)
