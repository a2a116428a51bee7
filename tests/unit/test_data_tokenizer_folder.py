"""Folders of Hugging Face: what stands beside tokenizer.json gives transformers' tokens, or is refused."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalite.conversion.huggingface import copy_companions, tokenizer_fields
from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.folder import AGREEING, APPLIED, NEUTRAL, NO_EFFECT, read_folder
from megalite.errors import CheckpointError, DataError
from megalite.preprocessing.tokenizer_training import train_tokenizer
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


def opened_or_why(folder: Path) -> tuple[Tokenizer | None, str]:
    try:
        return opened(folder), ""
    except DataError as error:
        return None, str(error)


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
    "special_tokens_map.json, objects": {
        "special_tokens_map": {"cls_token": token(START, rstrip=True), "sep_token": STOP}
    },
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


def test_declared_tokens_are_added_by_their_numbers_and_change_the_identity(tmp_path: Path) -> None:
    plain = opened(write_folder(tmp_path / "plain"))
    assert "added_sha256" not in plain.identity()
    seen = {str(plain.identity())}
    for number, (name, files) in enumerate(PLACES.items()):
        folder = write_folder(tmp_path / str(number), **files)
        tokenizer = opened(folder)
        text = f"{START}</s>a"
        ids = tokenizer.encode(text)
        assert (ids[0] in (258, 259)) == (name != "split_special_tokens"), name
        assert tokenizer.encode_with_offsets(text)[0] == ids
        seen.add(str(tokenizer.identity()))
    assert len(seen) > 5


def test_what_is_declared_in_tokenizer_json_too_changes_nothing(tmp_path: Path) -> None:
    # As in most folders. transformers writes 10^30 for a length without a limit.
    fields = {"added_tokens_decoder": {"1": token("</s>")}, "pad_token": "</s>", "add_bos_token": False}
    fields |= {"model_max_length": 10**30, "add_prefix_space": False, "extra_special_tokens": {}, "auto_map": {}}
    fields |= {"clean_up_tokenization_spaces": True, "legacy": False, "sp_model_kwargs": {}, "mask_token": None}
    folder = write_folder(tmp_path, tokenizer_config=BASE | fields, special_tokens_map={"unk_token": "<unk>"})
    assert opened(folder).identity() == opened(write_folder(tmp_path / "plain")).identity()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer_config": BASE | {"a_key_of_tomorrow": 1}}, "tokenizer_config.json: 'a_key_of_tomorrow' is unknown"),
    ({"special_tokens_map": {"eos": "</s>"}}, "special_tokens_map.json: 'eos' is unknown"),
    ({"tokenizer_config": BASE | {"add_prefix_space": True}}, '"add_prefix_space" is true, but the tokenizer.json'),
    ({"tokenizer_config": BASE | {"add_bos_token": True}}, '"add_bos_token" is true, but the tokenizer.json'),
    ({"tokenizer_config": BASE | {"add_eos_token": "yes"}}, "'add_eos_token' is 'yes', not true or false"),
    ({"tokenizer_config": BASE | {"auto_map": {"AutoTokenizer": ["a.B", None]}}}, "'auto_map' is"),
    ({"tokenizer_config": BASE | {"fix_mistral_regex": True}}, "'fix_mistral_regex' is True"),
    ({"tokenizer_config": BASE | {"pad_token": 3}}, "'pad_token' is 3, which is no token"),
    ({"tokenizer_config": BASE | {"extra_special_tokens": "<a>"}}, "'extra_special_tokens' is '<a>'"),
    (
        {"tokenizer_config": BASE | {"extra_special_tokens": ["a"], "additional_special_tokens": ["b"]}},
        "has 'b', which",
    ),
    ({"tokenizer_config": BASE | {"added_tokens_decoder": {"x": token("<a>")}}}, "has the id 'x', which is none"),
    ({"tokenizer_config": BASE | {"added_tokens_decoder": {"300": token("<a>")}}}, "'<a>' as token 300 beside its"),
    ({"added_tokens": {"<a>": 1}}, "declares '<a>' as token 1 beside its tokenizer.json, in which it is None"),
    ({"added_tokens": {"<a>": 10**30}}, "'<a>' has the id 1e+30, which is none"),
]


def test_what_is_not_applied_is_refused_by_file_and_key(tmp_path: Path) -> None:
    for number, (files, why) in enumerate(REFUSED):
        with pytest.raises(DataError) as raised:
            opened(write_folder(tmp_path / str(number), **files))
        assert why in str(raised.value)


def test_what_must_agree_with_tokenizer_json_is_accepted_where_it_does(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config=BASE | {"add_bos_token": True, "add_prefix_space": True})
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.ByteLevel()])
    template = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = template
    tokenizer.save(str(folder / "tokenizer.json"))
    assert opened(folder).vocab_size == 258
    (folder / "tokenizer_config.json").write_text(json.dumps(BASE | {"add_bos_token": False}))
    with pytest.raises(DataError, match='"add_bos_token" is false, but'):
        opened(folder)


def test_a_model_without_tokenizer_json_is_refused_for_what_it_does_not_give(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "some words and other words " * 20}) + "\n")
    train_tokenizer([str(tmp_path / "corpus.jsonl")], ["text"], str(tmp_path / "tokenizer"), 290)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(BASE | {"add_bos_token": False}))
    assert tokenizer_fields(tmp_path)["tokenizer_type"] == "Llama2Tokenizer"
    for files, why in (
        ({"added_tokens": {START: 290}}, f"'{START}'"),
        ({"added_tokens": {"</s>": 290}}, "'</s>'"),
        ({"tokenizer_config": BASE | {"add_bos_token": True}}, "add_bos_token"),
    ):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=re.escape(f"{why}, which the tokenizer.model alone")):
            tokenizer_fields(tmp_path)
        for name in files:
            (tmp_path / f"{name}.json").unlink()


def test_templates_for_tools_are_copied_with_the_tokenizer(tmp_path: Path) -> None:
    templates = write_folder(tmp_path / "from") / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("T")
    (tmp_path / "to").mkdir()
    copy_companions(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"


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
    """Return the keys that the source of transformers takes from the arguments of a tokenizer."""
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
        named = isinstance(place, ast.Name) and place.id in (
            "kwargs",
            "init_kwargs",
            "local_kwargs",
            "tokenizer_config",
        )
        if named and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


KNOWN = NO_EFFECT.keys() | NEUTRAL.keys() | AGREEING | APPLIED
VALUES: tuple[Any, ...] = (True, False, 1, "right", "<|x|>", ["<|x|>"], {"x": "<|x|>"})


@pytest.mark.wide
@pytest.mark.parametrize("of_class", ["PreTrainedTokenizerFast", "GPT2TokenizerFast", "LlamaTokenizer"])
def test_every_key_is_applied_or_changes_nothing_or_is_refused(tmp_path: Path, of_class: str) -> None:
    """Walks the keys that transformers' source reads, so that a key of tomorrow is tried, too."""
    from transformers import AutoTokenizer

    compared = 0
    for key in sorted(keys_that_transformers_reads() | KNOWN):
        for value in VALUES:
            # Names that a class would otherwise add by itself, since they are missing from this small vocabulary.
            fields = BASE | {"unk_token": "</s>", "pad_token": "</s>", "tokenizer_class": of_class, key: value}
            ours, why = opened_or_why(write_folder(tmp_path / "folder", tokenizer_config=fields))
            if ours is None:
                assert f"{key!r}" in why or f'"{key}"' in why, (key, value, why)
                continue
            try:
                theirs = AutoTokenizer.from_pretrained(tmp_path / "folder")(TEXT)["input_ids"]
            except Exception:  # a value that transformers refuses in its own way
                continue
            assert ours.encode(TEXT) == theirs, (key, value)
            compared += 1
    assert compared > len(NO_EFFECT)
