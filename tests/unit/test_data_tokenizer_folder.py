"""What a Hugging Face folder says beside its tokenizer.json: tokens are transformers', or the folder is refused."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.folder import AGREEING, APPLIED, NEUTRAL, NO_EFFECT, is_name, read_folder, refusal
from megalite.errors import DataError
from tests.harness.tokenizers import named_tokenizer

START, STOP = "<|im_start|>", "<|im_end|>"
BASE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
TEXT = f"{START}user\nhi</s>{STOP}\n {START} <|x|> yes{STOP}\n"


def write_folder(folder: Path, **files: Any) -> Path:
    """Write a byte-level vocabulary of 258 tokens, and JSON files beside it."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in ({"tokenizer_config": BASE} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def opened(folder: Path) -> Tokenizer:
    return named_tokenizer("HuggingFaceTokenizer", str(folder))


def token(content: str, **options: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **usual, **options}


PLACES: dict[str, dict[str, Any]] = {
    "added_tokens.json": {"added_tokens": {STOP: 259, START: 258}},
    "added_tokens_decoder": {
        "tokenizer_config": BASE | {"added_tokens_decoder": {"259": token(STOP), "258": token(START, lstrip=True)}}
    },
    "additional_special_tokens": {"tokenizer_config": BASE | {"additional_special_tokens": [START, STOP]}},
    "extra_special_tokens": {"tokenizer_config": BASE | {"extra_special_tokens": [START, STOP]}},
    "names": {"tokenizer_config": BASE | {"extra_special_tokens": {"start_token": START, "other": STOP}}},
    "names of its own": {"tokenizer_config": BASE | {"boi_token": START, "eoi_token": STOP}},
    "model_specific": {"tokenizer_config": BASE | {"model_specific_special_tokens": {"a": START, "b": STOP}}},
    "special_tokens_map.json": {"special_tokens_map": {"pad_token": START, "additional_special_tokens": [STOP]}},
    "special_tokens_map.json, objects": {"special_tokens_map": {"cls_token": token(START, rstrip=True), "sep_token": STOP}},
    "a map that is not read": {
        "tokenizer_config": BASE | {"added_tokens_decoder": {"258": token(START)}, "pad_token": STOP},
        "special_tokens_map": {"mask_token": "<|x|>"},
    },
    "split_special_tokens": {"tokenizer_config": BASE | {"split_special_tokens": True}},
    "all at once": {
        "tokenizer_config": BASE | {"pad_token": "<|x|>", "extra_special_tokens": [STOP]},
        "added_tokens": {START: 258},
    },
}


@pytest.mark.wide
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, files in PLACES.items():
        folder = write_folder(tmp_path / name, **files)
        theirs, ours = AutoTokenizer.from_pretrained(folder), opened(folder)
        assert ours.encode(TEXT) == theirs(TEXT)["input_ids"], name
        assert list(ours.encode_documents([TEXT])[0]) == ours.encode(TEXT), name
        assert list(ours.encode_with_offsets(TEXT)[0]) == ours.encode(TEXT), name
        assert ours.vocab_size == len(theirs), name
        names = {key: value for key, value in theirs.special_tokens_map.items() if isinstance(value, str)}
        assert read_folder(folder).names == names, name


# ---------------------------------------------------------------------------------------------------- keys

_FILES = ("tokenization_utils_base", "tokenization_utils_tokenizers", "models.auto.tokenization_auto")


def keys_that_transformers_reads() -> set[str]:
    """Return the keys that the source of transformers takes from the arguments of a tokenizer, and their names there."""
    found = set[str]()
    for name in _FILES:
        source = Path(str(importlib.import_module(f"transformers.{name}").__file__)).read_text()
        found |= set(_keys(ast.parse(source)))
    return found


def _keys(tree: ast.AST) -> Iterator[str]:
    """Yield the keys of `kwargs.pop(key)`, `kwargs.get(key)`, `kwargs[key]` and `key in kwargs`."""
    for node in ast.walk(tree):
        place: Any = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            place, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            place, key = node.value, node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            place, key = node.comparators[0], node.left
        named = isinstance(place, ast.Name) and place.id in ("kwargs", "init_kwargs", "local_kwargs", "tokenizer_config")
        if named and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


KNOWN = NO_EFFECT.keys() | NEUTRAL.keys() | AGREEING | APPLIED
VALUES: tuple[Any, ...] = (True, False, 1, "right", "<|x|>", ["<|x|>"], {"x": "<|x|>"})


@pytest.mark.wide
@pytest.mark.parametrize("of_class", ["PreTrainedTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer"])
def test_every_key_is_applied_or_changes_nothing_or_is_refused(tmp_path: Path, of_class: str) -> None:
    """Walks the keys that transformers' source reads, so that a key of tomorrow is tried, too."""
    from transformers import AutoTokenizer

    compared = 0
    for key in sorted(keys_that_transformers_reads() | KNOWN):
        for value in VALUES:
            # Names that a class would otherwise add by itself, since they are missing from this small vocabulary.
            fields = BASE | {"unk_token": "</s>", "pad_token": "</s>", "tokenizer_class": of_class, key: value}
            try:
                ours = opened(write_folder(tmp_path / "folder", tokenizer_config=fields))
            except DataError as error:
                assert f"{key!r}" in str(error) or f'"{key}"' in str(error), (key, value, error)
                continue
            try:
                theirs = AutoTokenizer.from_pretrained(tmp_path / "folder")(TEXT)["input_ids"]
            except Exception:  # a value that transformers refuses in its own way
                continue
            assert ours.encode(TEXT) == theirs, (key, value)
            compared += 1
    assert compared > len(NO_EFFECT)
