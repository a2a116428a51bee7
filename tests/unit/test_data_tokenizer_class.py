"""The class that a Hugging Face folder names: the tokens of tokenizer.json are transformers', or it is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.folder_class import AS_IS, BUILDS, class_taken
from megalite.data.tokenizers.model_types import AS_IS_MODELS, CLASS_OF_MODEL, OTHER_CLASSES, OVERRULED
from megalite.errors import DataError
from tests.harness.tokenizers import named_tokenizer

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
OPTIONS = ({}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}, {"legacy": True})
SPECIAL = list(NAMES.values())
OTHERS = dict.fromkeys(("mask_token", "cls_token", "sep_token"))
TEXTS = ("hi12 hi  hi\n\n hi", " hi</s>hi</s> hi", "e\u0301 'S hi12é", "</s>hi", "12345 <mask>hi12")
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_3_5 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
KINDS = (
    *("bytes", "bytes NFC", "digits NFC", "qwen", "qwen NFC", "qwen 3.5 NFC", "ignore merges"),
    *("prepend", "gemma", "gemma bare", "first", "always", "never", "first without bytes"),
)
AGREEING = {
    "PreTrainedTokenizerFast": set(KINDS),
    "TokenizersBackend": set(KINDS),
    "BloomTokenizerFast": set(KINDS),
    "LlamaTokenizerFast": {*KINDS[:7], "first"},
    "LlamaTokenizer": {*KINDS[:7], "first"},
    "Qwen2Tokenizer": {"qwen NFC"},
    "Qwen2TokenizerFast": {"qwen NFC"},
    "Qwen3_5Tokenizer": {"qwen 3.5 NFC"},
    "GPT2Tokenizer": {"bytes"},
    "GPT2TokenizerFast": {"bytes"},
    "CodeGenTokenizer": {"bytes"},
    "GPTNeoXTokenizerFast": {"bytes NFC"},
    "CohereTokenizerFast": {"digits NFC"},
    "GemmaTokenizer": {"gemma", "gemma bare"},
    "GemmaTokenizerFast": {"gemma", "gemma bare"},
    **{name: set() for name in ("CodeLlamaTokenizer", "WhisperTokenizer", "T5TokenizerFast", "RobertaTokenizer")},
}


def of_bytes(kind: str) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*SPECIAL, *alphabet, "hi", "12", "Ġh", "Ġhi", "Ġhi1"])}
    merges = [("h", "i"), ("1", "2"), ("Ġ", "h"), ("Ġ", "hi")]
    model = tokenizers.models.BPE(ids, merges, ignore_merges=kind == "ignore merges")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.startswith("qwen"))
    steps = []
    if kind.startswith("qwen"):
        steps = [pre_tokenizers.Split(tokenizers.Regex(QWEN_3_5 if "3.5" in kind else QWEN), "isolated")]
    elif kind.startswith("digits"):
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_alone]) if steps else bytes_alone
    if "NFC" in kind:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def of_pieces(kind: str) -> tokenizers.Tokenizer:
    all_bytes = [f"<0x{byte:02X}>" for byte in range(0 if "without" not in kind else 99, 256)]
    ids = {token: number for number, token in enumerate([*SPECIAL, *all_bytes, *"▁hi12ae'S", "hi", "▁hi", "12"])}
    merges = [("h", "i"), ("▁", "hi"), ("1", "2")]
    model = tokenizers.models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind.startswith("gemma"):
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        if kind == "gemma":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", kind.split()[0], split=False)
    return tokenizer


def write(folder: Path, kind: str, fields: dict[str, Any], model_type: str = "", template: bool = False) -> Path:
    tokenizer = (of_bytes if KINDS.index(kind) < 7 else of_pieces)(kind)
    tokenizer.add_special_tokens(SPECIAL)
    if template:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES | OTHERS | fields))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    return folder


def opened(folder: Path) -> Tokenizer:
    return named_tokenizer("HuggingFaceTokenizer", str(folder))


def is_the_same(folder: Path) -> bool | None:
    """Tell whether megalite's tokens are transformers'; None if megalite refuses the folder."""
    from transformers import AutoTokenizer

    try:
        ours = opened(folder)
    except DataError:
        return None
    theirs = AutoTokenizer.from_pretrained(folder)
    return all(
        list(ours.encode_documents([text])[0]) == theirs(text)["input_ids"]
        and ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        for text in TEXTS
    )


@pytest.mark.wide
@pytest.mark.parametrize("of_class", AGREEING)
def test_tokens_are_those_of_the_class_or_refused(tmp_path: Path, of_class: str) -> None:
    accepted = set[str]()
    for kind in KINDS:
        for template in (False, True):
            # Options act after what the kinds differ in: each kind has one of them.
            for more in (OPTIONS[0], OPTIONS[1 + KINDS.index(kind) % (len(OPTIONS) - 1)]):
                folder = write(tmp_path / "folder", kind, {"tokenizer_class": of_class} | more, template=template)
                same = is_the_same(folder)
                assert same is not False, (kind, template, more)
                if same and not more:
                    accepted.add(kind)
    assert accepted == AGREEING[of_class]


@pytest.mark.wide
@pytest.mark.parametrize("left_out", sorted(NAMES.keys() | OTHERS.keys()))
def test_tokens_that_a_class_adds_by_itself_are_named_or_refused(tmp_path: Path, left_out: str) -> None:
    for of_class in BUILDS:
        for kind in AGREEING.get(of_class, {"bytes NFC", "digits NFC"}):
            folder = write(tmp_path / "folder", kind, {"tokenizer_class": of_class})
            fields = json.loads((folder / "tokenizer_config.json").read_text())
            del fields[left_out]
            (folder / "tokenizer_config.json").write_text(json.dumps(fields))
            assert is_the_same(folder) is not False, (of_class, kind)


@pytest.mark.wide
def test_a_type_of_model_decides_with_the_class(tmp_path: Path) -> None:
    kinds = itertools.cycle(("bytes", "bytes NFC", "qwen NFC", "prepend", "gemma"))
    for model_type in (
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "gpt_neox",
        "gemma3_text",
        "llama",
        "new",
        "internlm2",
        "jais2",
        "code_llama",
    ):
        for of_class in (None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"):
            kind = next(kinds)
            folder = write(tmp_path / "folder", kind, {"tokenizer_class": of_class}, model_type)
            assert is_the_same(folder) is not False, (model_type, of_class, kind)
        next(kinds)  # five classes and five kinds: otherwise a class would always have the same one
    assert is_the_same(write(tmp_path / "folder", "prepend", {"tokenizer_class": "LlamaTokenizer"}, "mistral"))
    assert is_the_same(write(tmp_path / "folder", "qwen NFC", {"tokenizer_class": "LlamaTokenizerFast"}, "qwen2"))


@pytest.mark.wide
def test_every_type_of_model_that_transformers_knows_has_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from transformers.models.auto import tokenization_auto as auto

    taken = list[type]()
    monkeypatch.setattr(
        transformers.PreTrainedTokenizerBase, "from_pretrained", classmethod(lambda cls, *_, **__: taken.append(cls))
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    known = auto.CONFIG_MAPPING_NAMES.keys() | auto.TOKENIZER_MAPPING_NAMES.keys()
    models = [
        {"model_type": kind}
        for kind in (*sorted(known), "new")
        # Their defaults are no valid configuration, or need more than is installed.
        if kind not in ("gemma3n_vision", "gemma4_assistant", "timm_wrapper", "fastspeech2_conformer")
    ]
    models += [{"model_type": kind, "model_name": "nemotron"} for kind in ("llama", "qwen3", "mistral", "bert")]
    assert len(models) > 800
    for said in (None, "LlamaTokenizer", "PreTrainedTokenizerFast", "New"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": said} if said else {}))
        for model in models if said is None else models[:: len(models) // 50]:
            (tmp_path / "config.json").write_text(json.dumps(model))
            taken.clear()
            transformers.AutoTokenizer.from_pretrained(tmp_path)
            theirs = taken[0].__name__
            ours, _ = class_taken(said, model)
            refused = ours not in BUILDS and ours not in AS_IS
            assert (ours in AS_IS and theirs == "TokenizersBackend") or ours == theirs or refused, (said, model)
            assert not refused or said == "New" or model["model_type"] in OTHER_CLASSES, (said, model)


@pytest.mark.wide
def test_tables_of_types_of_models_are_those_of_transformers() -> None:
    from transformers.models.auto import tokenization_auto as auto

    assert auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == OVERRULED
    assert set(auto.TOKENIZER_MAPPING_NAMES) & auto.CONFIG_MAPPING_NAMES.keys() <= (
        AS_IS_MODELS | CLASS_OF_MODEL.keys() | OTHER_CLASSES | {"nougat"}  # it has the configuration of other models
    )
    tables = (AS_IS_MODELS, CLASS_OF_MODEL.keys(), OTHER_CLASSES)
    assert len(frozenset[str]().union(*tables)) == sum(map(len, tables))


def test_a_folder_like_deepseeks_is_accepted_if_its_template_agrees(tmp_path: Path) -> None:
    fields = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False, "legacy": True}
    tokenizer = opened(write(tmp_path, "qwen", fields, "deepseek_v3", template=True))
    assert list(tokenizer.encode_documents(["hi"])[0]) == [0, *tokenizer.encode("hi")]
    with pytest.raises(DataError, match='"add_bos_token" is true, but the tokenizer'):
        opened(write(tmp_path, "qwen", fields, "deepseek_v3"))


@pytest.mark.parametrize(
    ("kind", "fields", "model_type", "why"),
    [
        (
            "prepend",
            {"tokenizer_class": "LlamaTokenizer"},
            "llama",
            "is 'LlamaTokenizer', which normalizes texts",
        ),
        (
            "always",
            {"tokenizer_class": "LlamaTokenizerFast"},
            "",
            "'LlamaTokenizerFast', which splits texts",
        ),
        ("first without bytes", {"tokenizer_class": "LlamaTokenizer"}, "", "has other tokens for unknown characters"),
        ("qwen", {"tokenizer_class": "Qwen2Tokenizer"}, "qwen3", "which normalizes texts in another way"),
        ("ignore merges", {"tokenizer_class": "GPT2Tokenizer"}, "", "which has another model of tokens"),
        ("bytes", {"tokenizer_class": "WhisperTokenizer"}, "", "'WhisperTokenizer', which is unknown to megalite"),
        ("bytes", {}, "qwen2", "\"model_type\" 'qwen2' stands for Qwen2Tokenizer, which normalizes"),
        ("bytes", {}, "falcon_mamba", "'falcon_mamba' stands for GPTNeoXTokenizer, which normalizes"),
        ("qwen", {}, "qwen2_vl", "'qwen2_vl' stands for Qwen2Tokenizer, which normalizes"),
        ("prepend", {}, "recurrent_gemma", "'recurrent_gemma' stands for GemmaTokenizer, which normalizes"),
        ("bytes NFC", {}, "jais2", "'jais2' stands for GPT2Tokenizer, which normalizes"),
        ("qwen NFC", {}, "qwen4_exp", "'qwen4_exp' stands for Qwen3_5Tokenizer, which splits texts"),
        ("qwen", {}, "idefics", "'idefics' stands for LlamaTokenizer, which"),
        ("bytes", {}, "whisper", "'whisper' stands for a class, which is unknown to megalite"),
    ],
)
def test_a_class_that_makes_other_tokens_is_refused_with_what_to_do(
    tmp_path: Path, kind: str, fields: dict[str, Any], model_type: str, why: str
) -> None:
    with pytest.raises(DataError) as raised:
        opened(write(tmp_path, kind, fields, model_type))
    assert why in str(raised.value)
    assert "save the tokenizer again with transformers' save_pretrained or, if tokenizer.json is" in str(raised.value)
    if not model_type:
        opened(write(tmp_path, kind, fields | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def test_a_token_that_the_class_would_add_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "gemma", {"tokenizer_class": "GemmaTokenizer"})
    assert opened(folder).vocab_size == 272
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES | {"tokenizer_class": "GemmaTokenizer"}))
    with pytest.raises(DataError, match="adds the token '<mask>' unless tokenizer_config"):
        opened(folder)
