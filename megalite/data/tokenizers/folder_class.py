"""The class that a Hugging Face folder names: transformers takes its tokenizer.json as it is, or builds a new one.

For most classes, transformers 5 takes only vocabulary, merges, added tokens and template from tokenizer.json, and gives
the rest (how texts are normalized and split, options of the model) by the class. Versions differ in this. So a folder
is accepted if its tokenizer.json agrees with the class, and refused if it does not, or the class is unknown here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.data.tokenizers.model_types import AS_IS_MODELS, CLASS_OF_MODEL, OTHER_CLASSES, OVERRULED
from megalite.errors import DataError
from megalite.small_files import shown

AS_IS = frozenset({"PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "BloomTokenizer"})
"""Classes, without "Fast" at the end, for which tokenizer.json is taken as it is."""


_Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class _Build:
    """Parts of a tokenizer that a class of transformers builds.

    Attributes:
        normalizer: the steps of its normalizer.
        splits: returns the steps of pre-tokenizers with the same tokens, by `add_prefix_space` and `legacy`.
        tokens: tokens that it adds if the folder does not name others.
        byte_fallback: true if characters that are no tokens become bytes.
        adds_nothing: true if the template of tokenizer.json is replaced by one that adds no token.
        prefix_space: the default of `add_prefix_space`.
    """

    normalizer: _Steps
    splits: Callable[[bool, bool], tuple[_Steps, ...]]
    tokens: Mapping[str, str]
    byte_fallback: bool = False
    adds_nothing: bool = False
    prefix_space: bool = False


def _bytes(prefix_space: bool, use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "use_regex": use_regex}


def _split_bytes(letters: str, prefix_space: bool) -> _Steps:
    """Return the pre-tokenizer of Qwen, by the class of characters that are letters."""
    others = letters.strip("[]")
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?" + letters + r"+|\p{N}| ?[^\s" + others + r"\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _bytes(prefix_space, use_regex=False)]


def _metaspace(prefix_space: bool, legacy: bool) -> tuple[_Steps, ...]:
    scheme = ("always" if legacy else "first") if prefix_space else "never"
    return ([{"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}],)


def _by_spaces(prefix_space: bool, legacy: bool) -> tuple[_Steps, ...]:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return [split], []  # the normalizer leaves no spaces


def _digits(prefix_space: bool, legacy: bool) -> tuple[_Steps, ...]:
    return ([{"type": "Digits", "individual_digits": True}, _bytes(prefix_space)],)


_NFC: _Steps = [{"type": "NFC"}]
_SPACES: _Steps = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
_END = dict.fromkeys(("unk_token", "eos_token"), "<|endoftext|>")
_USUAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GEMMA = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_COHERE = {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"}
_GPT2 = _Build([], lambda space, _: ([_bytes(space)],), _END | {"bos_token": "<|endoftext|>"})
BUILDS: Mapping[str, _Build] = {
    "CodeGenTokenizer": _GPT2,
    "CohereTokenizer": _Build(
        _NFC, _digits, _COHERE | {"cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"}
    ),
    "GemmaTokenizer": _Build(_SPACES, _by_spaces, _GEMMA | {"mask_token": "<mask>"}, byte_fallback=True),
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": _Build(
        _NFC,
        lambda space, _: ([_bytes(space)],),
        _END | {"bos_token": "<|endoftext|>", "pad_token": "<|padding|>"},
        adds_nothing=True,
    ),
    "LlamaTokenizer": _Build([], _metaspace, _USUAL, byte_fallback=True, prefix_space=True),
    "Qwen2Tokenizer": _Build(
        _NFC, lambda space, _: (_split_bytes(r"\p{L}", space),), _END | {"pad_token": "<|endoftext|>"}
    ),
    "Qwen3_5Tokenizer": _Build(
        _NFC, lambda space, _: (_split_bytes(r"[\p{L}\p{M}]", space),), _END | {"pad_token": "<|endoftext|>"}
    ),
}
"""Classes, without "Fast" at the end, that build a tokenizer of which enough is known to compare it."""


def check_class(path: Path, config: Mapping[str, Any], model: Mapping[str, Any], tokenizer: Any) -> None:
    """Check that the class which transformers takes for a folder makes the tokens of its tokenizer.json.

    Args:
        path: the folder.
        config: fields of its tokenizer_config.json, with all named tokens.
        model: fields of its config.json.
        tokenizer: the `tokenizers.Tokenizer` of its tokenizer.json.

    Raises:
        DataError: it makes others, or it is unknown whether it does.
    """
    said = config.get("tokenizer_class") or model.get("tokenizer_class")
    name, of_model = class_taken(said, model)
    trusted = not (of_model or _is_overruled(model))
    if name in AS_IS or (name == "LlamaTokenizer" and trusted and _is_byte_level(tokenizer)):
        return
    build = BUILDS.get(name)
    why = "is unknown to megalite" if build is None else _difference(build, config, tokenizer)
    if why:
        kind = shown(model.get("model_type"))
        key = f'config.json: "model_type" {kind} stands for {name or "a class"}, which' if of_model else ""
        key = key or f'tokenizer_config.json: "tokenizer_class" is {shown(said)}, which'
        apart = "name a folder without this config.json, which has the tokenizer's files, as --tokenizer-model"
        other = apart if _is_overruled(model) else 'set "tokenizer_class" to "PreTrainedTokenizerFast"'
        raise DataError(
            f"{path}, {key} {why}, so transformers may give other tokens than the tokenizer.json beside it: save the "
            f"tokenizer again with transformers' save_pretrained or, if tokenizer.json is right, {other}"
        )


def class_taken(said: object, model: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the class that transformers takes, and whether the type of model decides it.

    Args:
        said: the class that the folder names.
        model: fields of its config.json.

    Returns:
        The class without "Fast" at its end, empty if it is one for which no build is known here.
    """
    kind = model.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    has_class = kind in CLASS_OF_MODEL or kind in OTHER_CLASSES
    if kind in AS_IS_MODELS or not (said or has_class):
        return "TokenizersBackend", True
    if has_class and (not said or _is_overruled(model)):
        return CLASS_OF_MODEL.get(kind, ""), True
    return str(said).removesuffix("Fast"), False


def _is_overruled(model: Mapping[str, Any]) -> bool:
    return any(isinstance(name := model.get(key), str) and name in OVERRULED for key in ("model_type", "model_name"))


def _is_byte_level(tokenizer: Any) -> bool:
    parts = (tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.post_processor)
    return any(b'"ByteLevel"' in part.__getstate__() for part in parts if part)


def _difference(build: _Build, config: Mapping[str, Any], tokenizer: Any) -> str | None:
    """Return what a class does that tokenizer.json does not; None if both give the same tokens."""
    space = config.get("add_prefix_space")
    splits = build.splits(build.prefix_space if space is None else bool(space), bool(config.get("legacy")))
    if _steps_of(tokenizer.normalizer) != build.normalizer:
        return "normalizes texts in another way"
    if _steps_of(tokenizer.pre_tokenizer) not in splits:
        return "splits texts in another way"
    model = tokenizer.model
    plain = type(model).__name__ == "BPE" and not (model.dropout or model.ignore_merges)
    if not plain or model.continuing_subword_prefix or model.end_of_word_suffix:
        return "has another model of tokens"
    if model.byte_fallback != build.byte_fallback or not _has_all_bytes(build, tokenizer):
        return "has other tokens for unknown characters"
    if build.adds_nothing and tokenizer.num_special_tokens_to_add(False):
        return "adds no token to a text"
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    for name, token in build.tokens.items():
        if name not in config and token not in added:
            return f'adds the token {shown(token)} unless tokenizer_config.json says "{name}"'
    return None


def _has_all_bytes(build: _Build, tokenizer: Any) -> bool:
    """Tell whether no character is unknown, for which the options of models differ."""
    if build.byte_fallback:
        return all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    alphabet = (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))
    return all(tokenizer.token_to_id(chr(character)) is not None for character in alphabet)


def _steps_of(part: Any) -> _Steps:
    """Return the steps of a normalizer or pre-tokenizer, without what changes no token."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for step in state.get("pretokenizers", state.get("normalizers", ())):
            yield from _flat(step)
    else:
        yield {key: value for key, value in state.items() if key != "trim_offsets"}
