"""Files beside a tokenizer.json, applied as transformers' AutoTokenizer does, or refused with the key.

transformers reads tokenizer_config.json and, if that has no `added_tokens_decoder`, special_tokens_map.json (which has
precedence) and added_tokens.json. Each key of them has a fate:

- Tokens are added to those of tokenizer.json, in the order of transformers: `added_tokens_decoder` or added_tokens.json
  by their ids, named tokens (`bos_token` and every other name that ends in `_token`), `extra_special_tokens`. A token
  that gets another id than the one declared is refused.
- `NO_EFFECT` has keys that change no token here, each with the reason.
- `NEUTRAL` has keys that would change tokens in a way that is not supported, with the values that change nothing.
- `add_prefix_space`, `add_bos_token` and `add_eos_token` must say what tokenizer.json says. If they contradict it, the
  tokens depend on the class and the version of transformers.
- `tokenizer_class`, with the `model_type` of config.json, must make what tokenizer.json says (`folder_class`).
- Every other key is refused: it may change tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.data.tokenizers.files import fingerprint, read_fields_beside
from megalite.data.tokenizers.folder_class import check_class
from megalite.errors import DataError
from megalite.small_files import is_count, shown

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MODEL = "config.json"
USUAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("extra_special_tokens", "additional_special_tokens")
_OF_TOKENS: Mapping[str, type | tuple[type, ...]] = {
    "extra_special_tokens": (list, dict),
    "additional_special_tokens": list,
    "model_specific_special_tokens": dict,
    "added_tokens_decoder": dict,
}
APPLIED = {*USUAL_NAMES, *_OF_TOKENS, "split_special_tokens"}
AGREEING = {"add_prefix_space", "add_bos_token", "add_eos_token"}

_CLASS = "it changes nothing of a tokenizer.json that agrees with its class"
_LENGTH = "texts are neither cut nor padded here"
_DECODING = "decoded text is that of its tokens, without changes"
_CHAT = "it changes no text of a conversation"
_ORIGIN = "it says where files were, or how they were read"
NO_EFFECT: Mapping[str, str] = {
    "chat_template": "chats are converted by megalite.data.chat, which reads it itself",
    "vocab_size": "the vocabulary has the tokens of tokenizer.json",
    "model_input_names": "it names arrays for a model of transformers",
    "trim_offsets": "places of tokens do not come from tokenizer.json",
    **dict.fromkeys(
        ("tokenizer_class", "processor_class", "tokenizer_type", "use_fast", "legacy", "from_slow", "sp_model_kwargs"),
        _CLASS,
    ),
    **dict.fromkeys(
        ("model_max_length", "max_len", "max_length", "stride", "truncation_side", "truncation_strategy"), _LENGTH
    ),
    **dict.fromkeys(("padding_side", "pad_to_multiple_of", "pad_token_type_id", "padding", "truncation"), _LENGTH),
    **dict.fromkeys(
        (
            "clean_up_tokenization_spaces",
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
            "spaces_between_special_tokens",
            "errors",
        ),
        _DECODING,
    ),
    **dict.fromkeys(
        ("response_template", "response_schema", "chat_control_tokens", "use_default_system_prompt"), _CHAT
    ),
    **dict.fromkeys(
        (
            *("name_or_path", "vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "files_loaded"),
            *("is_local", "local_files_only", "_commit_hash", "transformers_version", "verbose", "device_map"),
            *("cache_dir", "revision", "subfolder", "trust_remote_code"),
        ),
        _ORIGIN,
    ),
}
"""Keys of the two configuration files that change no token, with the reason."""
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "auto_map": ((), "the tokenizer is a program, which is not run"),
    "backend": (("tokenizers",), "the tokens are not those of tokenizer.json"),
    "do_lower_case": ((False,), "tokenizer.json does not say it"),
    "fast_tokenizer_files": (([], ["tokenizer.json"]), "the tokens may not be those of tokenizer.json"),
    "fix_mistral_regex": ((False,), "it changes how tokenizer.json splits words"),
    "gguf_file": ((), "the tokens are not those of tokenizer.json"),
    "remove_space": ((False,), "tokenizer.json does not say it"),
    "init_inputs": (([],), "it has arguments for a class of transformers"),
}
"""Keys that are refused, with the values (beside null) that change nothing, and the reason."""


@dataclass(frozen=True)
class DeclaredToken:
    """A token's text, and the options with which it is looked for, as far as they are given."""

    content: str
    options: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Folder:
    """Tokens and options that the files beside a tokenizer.json declare.

    Attributes:
        path: the folder.
        named: tokens with a name, such as `eos_token`.
        extra: further special tokens.
        by_id: tokens by their ids.
        end: the token that ends a document, if one is named.
        split_special_tokens: true if special tokens in a text are ordinary text.
        agreeing: fields that must say what tokenizer.json says.
        config: all fields of tokenizer_config.json.
        model: all fields of the model's config.json.
    """

    path: Path
    named: Mapping[str, DeclaredToken]
    extra: tuple[DeclaredToken, ...]
    by_id: Mapping[int, DeclaredToken]
    end: str | None
    split_special_tokens: bool
    agreeing: Mapping[str, bool]
    config: Mapping[str, Any]
    model: Mapping[str, Any]

    @property
    def names(self) -> dict[str, str]:
        """Texts of the named tokens, which a chat template may use."""
        return {name: token.content for name, token in self.named.items()}

    @property
    def size(self) -> int:
        """Length of all declared tokens in bytes."""
        return sum(len(each.content.encode()) for each in (*self.named.values(), *self.extra, *self.by_id.values()))

    def apply(self, tokenizer: Any, added_token: Any) -> dict[str, str]:
        """Add the declared tokens to a `tokenizers.Tokenizer`.

        Args:
            tokenizer: the tokenizer of the folder's tokenizer.json.
            added_token: `tokenizers.AddedToken`.

        Returns:
            An identity of what the files add to tokenizer.json; empty if that has it all.

        Raises:
            DataError: the files contradict tokenizer.json.
        """
        before = tokenizer.get_added_tokens_decoder()
        was = _described(before)
        known, found = set(map(repr, before.values())), {token.content for token in before.values()}
        special, chosen = set(self.names.values()), list[Any]()
        for number, token in sorted(self.by_id.items()):
            made = added_token(token.content, **dict(token.options))
            if number not in before and repr(made) not in known:
                chosen.append(made)
        found |= {token.content for token in chosen}
        usual = [self.named[name] for name in USUAL_NAMES if name in self.named]
        for token in (*usual, *self.named.values(), *self.extra):
            if token.content not in found:
                found.add(token.content)
                chosen.append(added_token(token.content, **(dict(token.options) or {"special": True})))
        for made in chosen:
            made.special = made.special or made.content in special
        tokenizer.add_tokens(chosen)
        tokenizer.encode_special_tokens = self.split_special_tokens
        for number, token in self.by_id.items():
            if (got := tokenizer.token_to_id(token.content)) != number:
                raise DataError(
                    f"{self.path} declares {shown(token.content)} as token {number} beside its tokenizer.json, in "
                    f"which it is {got}: correct the file that is wrong, or save the tokenizer again with transformers"
                )
        self._check_agreement(tokenizer)
        check_class(self.path, {**self.names, **self.config}, self.model, tokenizer)
        now = _described(tokenizer.get_added_tokens_decoder())
        if now == was and not self.split_special_tokens:
            return {}
        return {"added_sha256": fingerprint(json.dumps([now, self.split_special_tokens]).encode())}

    def _check_agreement(self, tokenizer: Any) -> None:
        """Raise DataError if tokenizer_config.json says other spaces or ends than tokenizer.json does."""
        whole = tokenizer.encode("0", add_special_tokens=True).ids or [None]
        states = (json.loads(part.__getstate__()) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part)
        for name, said in self.agreeing.items():
            if name == "add_prefix_space":
                does = any(_puts_a_space_first(step) for state in states for step in _steps(state))
            else:
                end = name.removeprefix("add_")
                token = self.named[end].content if end in self.named else None
                number = None if token is None else tokenizer.token_to_id(token)
                does = number is not None and whole[0 if end == "bos_token" else -1] == number
                if token is None and said:
                    continue  # nothing can be added
            if does != said:
                raise DataError(
                    f'{self.path / CONFIG}: "{name}" is {json.dumps(said)}, but the tokenizer.json beside it says '
                    f"{json.dumps(does)}: which of them counts depends on the version of transformers. Set it to "
                    f"{json.dumps(does)} if tokenizer.json is right, or save the tokenizer again with transformers"
                )


def read_folder(path: Path) -> Folder:
    """Read the files beside a tokenizer.json.

    Raises:
        DataError: a file cannot be read, or has a key that is not applied and may change tokens.
    """
    config, mapped, added = (read_fields_beside(path / name) for name in (CONFIG, MAP, ADDED))
    for name, fields in ((CONFIG, config), (MAP, mapped)):
        for key, value in fields.items():
            if why := refusal(key, value):
                raise DataError(f"{path / name}: {shown(key)} {why}")
    decoder = config.get("added_tokens_decoder")
    sources = {MAP: mapped, CONFIG: config} if decoder is None else {CONFIG: config}
    named = dict[str, DeclaredToken]()
    for file, source in reversed(sources.items()):
        more = (source.get(key) for key in ("model_specific_special_tokens", LISTS[0]))
        groups = [{name: source[name] for name in source if is_name(name)}, *more]
        pairs = [pair for group in groups if isinstance(group, dict) for pair in group.items()]
        named |= {name: _token(path / file, name, value) for name, value in pairs if value is not None}
    extra, additional = (
        dict.fromkeys(
            _token(path / file, key, each)
            for file, source in reversed(sources.items())
            for value in [source.get(key)]
            for each in (value if isinstance(value, list) else ())
        )
        for key in LISTS
    )
    special = {token.content for token in (*named.values(), *extra)}
    lost = {token.content for token in additional} - special
    if extra and lost:
        raise DataError(
            f'{path / CONFIG}: "{LISTS[1]}" has {shown(min(lost))}, which "{LISTS[0]}" lacks: versions of transformers '
            f'read one or the other: put all tokens into "{LISTS[0]}"'
        )
    extra = extra or additional
    special |= {token.content for token in extra}
    by_id = dict[int, DeclaredToken]()
    for key, value in (decoder or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise DataError(f'{path / CONFIG}: "added_tokens_decoder" has the id {shown(key)}, which is none')
        by_id[int(key)] = _token(path / CONFIG, key, value)
    for content, number in added.items() if decoder is None else ():
        if not is_count(number):
            raise DataError(f"{path / ADDED}: {shown(content)} has the id {shown(number)}, which is none")
        by_id[number] = DeclaredToken(
            content, (("normalized", content not in special), ("special", content in special))
        )
    end = named.get("eos_token")
    if end is None and mapped.get("eos_token") is not None:
        end = _token(path / MAP, "eos_token", mapped["eos_token"])
    return Folder(
        path,
        named,
        tuple(extra),
        by_id,
        None if end is None else end.content,
        bool(config.get("split_special_tokens")),
        {key: config[key] for key in sorted(AGREEING) if config.get(key) is not None},
        config,
        read_fields_beside(path / MODEL),
    )


def refusal(key: str, value: Any) -> str | None:
    """Return why a key with this value must be refused; None if it is applied or changes nothing."""
    if key in NO_EFFECT or value is None:
        return None
    if key in NEUTRAL:
        neutral, why = NEUTRAL[key]
        other = value != {} and not (key == "auto_map" and isinstance(value, dict) and "AutoTokenizer" not in value)
        if value in neutral or not other:
            return None
        return (
            f"is {shown(value)}: {why}. Save the tokenizer again with transformers' save_pretrained, or remove the key"
        )
    if key in AGREEING or key == "split_special_tokens":
        return None if isinstance(value, bool) else f"is {shown(value)}, not true or false"
    if key in _OF_TOKENS:
        return None if isinstance(value, _OF_TOKENS[key]) else f"is {shown(value)}, which are no tokens"
    if is_name(key):
        return None  # read as a token
    return "is unknown to megalite, so it may change tokens: remove it there if it does not"


def is_name(key: str) -> bool:
    """Tell whether a key of a configuration file names a token, as `eos_token` does."""
    return key.endswith("_token") and key not in AGREEING


def _described(tokens: Mapping[int, Any]) -> list[tuple[int, str]]:
    return [(number, repr(token)) for number, token in sorted(tokens.items())]


def _token(file: Path, name: str, value: Any) -> DeclaredToken:
    options = {"lstrip", "rstrip", "single_word", "normalized", "special"}
    if isinstance(value, str):
        return DeclaredToken(value, ())
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        rest = {key: each for key, each in value.items() if key not in ("content", "__type", "id")}
        if rest.keys() <= options and all(isinstance(each, bool) for each in rest.values()):
            return DeclaredToken(value["content"], tuple(sorted(rest.items())))
    raise DataError(f"{file}: {shown(name)} is {shown(value)}, which is no token: correct it")


def _steps(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or a pre-tokenizer."""
    yield state
    for inner in (*state.get("pretokenizers", ()), *state.get("normalizers", ())):
        yield from _steps(inner)


def _puts_a_space_first(step: Mapping[str, Any]) -> bool:
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
    return step.get("type") == "Prepend" or (step.get("type") in ("ByteLevel", "Metaspace") and scheme != "never")
