"""Vocabularies of other libraries: read from local files, right about ends of documents, clear about what is wrong."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError, DataError
from megalite.preprocessing.tokenizer_training import train_byte_level_bpe
from tests.harness.tokenizers import named_tokenizer
from tests.harness.tool import run_tool

ROOT = Path(__file__).resolve().parents[2]
TEXT = "def area(radius):\n    return 3.14159 * radius ** 2\n\n\nclass Circle:\n\tname = 'Zirkel, größer'\n"
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained byte-level vocabulary in every form: bpe/, vocab.json and merges.txt, ranks.json, ranks.tiktoken."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": TEXT * i}) + "\n" for i in range(1, 5)))
    assert train_byte_level_bpe([str(folder / "corpus.jsonl")], ["text"], str(folder / "bpe"), 300) == 300
    model = json.loads((folder / "bpe" / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    ranks = [bytes([byte]) for byte in range(256)] + [b"ra", b"rad", b"iu", b"  ", "größer".encode()]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for i, token in enumerate(ranks)
    ]
    (folder / "ranks.json").write_text(json.dumps(entries))
    (folder / "ranks.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)))
    return folder


BUILDS: dict[str, Callable[[Path], Tokenizer]] = {
    "tokenizer.json": lambda folder: named_tokenizer("HuggingFaceTokenizer", str(folder / "bpe")),
    "GPT-2": lambda folder: named_tokenizer("GPT2BPETokenizer", **gpt2_files(folder)),
    "ranks.json": lambda folder: named_tokenizer("TikTokenizer", str(folder / "ranks.json")),
    "ranks.tiktoken": lambda folder: named_tokenizer("TikTokenizer", str(folder / "ranks.tiktoken")),
}


def gpt2_files(folder: Path) -> dict[str, str]:
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


@pytest.mark.parametrize("form", BUILDS)
def test_nothing_of_a_text_is_lost(folder: Path, form: str) -> None:
    tokenizer = BUILDS[form](folder)

    @settings(deadline=None, max_examples=20)
    @given(text=st.text())
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert list(tokenizer.encode_documents([text])[0]) == ids
        if "<" not in text:
            assert tokenizer.decode([*ids, tokenizer.eod]) == text

    check()


@pytest.mark.parametrize("form", BUILDS)
def test_tokens_know_their_characters(folder: Path, form: str) -> None:
    tokenizer = BUILDS[form](folder)
    for text in ("", TEXT, "é日🙂  x\n\n", "radius<|endoftext|> größer</s>"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert list(ids) == tokenizer.encode(text)
        assert offsets.shape == (len(ids), 2)
        assert {i for begin, end in offsets for i in range(begin, end)} == set(range(len(text)))
        for token, (begin, end) in zip(ids, offsets, strict=True):
            piece = tokenizer.decode([token])
            assert piece in ("", text[begin:end]) or "\ufffd" in piece


def test_places_hold_spaces_even_where_a_file_leaves_them_out(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "bpe" / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, plain = named_tokenizer("HuggingFaceTokenizer", str(tmp_path)), BUILDS["tokenizer.json"](folder)
    assert tokenizer.encode("a  b").offsets[1] != (1, 2)
    assert ours.encode_with_offsets("a  b")[1].tolist() == plain.encode_with_offsets("a  b")[1].tolist()


def test_tokens_have_names(folder: Path) -> None:
    for form, name, token in (("tokenizer.json", END, 0), ("GPT-2", END, 0), ("ranks.json", "<pad>", 4)):
        assert BUILDS[form](folder).token_id(name) == token
        assert BUILDS[form](folder).token_id("<fim_prefix>") is None
    assert BUILDS["ranks.tiktoken"](folder).token_id("rad") == 257


def test_what_ends_a_document_and_how_many_tokens_there_are(folder: Path) -> None:
    facts = {form: (build(folder).vocab_size, build(folder).eod) for form, build in BUILDS.items()}
    assert facts == {
        "tokenizer.json": (300, 0),
        "GPT-2": (300, 0),
        # Megatron-LM's special tokens come first: <unk>, <s>, </s>, <mask>, <pad>, ...; a plain file's last.
        "ranks.json": (1261, 2),
        "ranks.tiktoken": (262, 261),
    }


@pytest.mark.wide
def test_special_tokens_in_a_text_are_recognized_as_megatron_does(folder: Path) -> None:
    for form, end in (("tokenizer.json", END), ("GPT-2", END), ("ranks.json", "</s>"), ("ranks.tiktoken", END)):
        tokenizer = BUILDS[form](folder)
        for ids in (tokenizer.encode(f"a{end}b"), list(tokenizer.encode_documents([f"a{end}b"])[0])):
            assert ids[1] == tokenizer.eod
            assert len(ids) == 3


V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"  # Megatron-LM's


def test_megatrons_json_is_numbered_as_there(folder: Path) -> None:
    """Ids are those of a tiktoken.Encoding made as Megatron-LM makes it."""
    options = {"tiktoken_num_special_tokens": 10, "tiktoken_pattern": "v1"}
    ours = named_tokenizer("TikTokenizer", str(folder / "ranks.json"), 268, **options)
    entries = json.loads((folder / "ranks.json").read_text())[:258]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + 10 for entry in entries}
    names = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", "<SPECIAL_7>", "<SPECIAL_8>", "<SPECIAL_9>"]
    special = {name: i for i, name in enumerate(names)}
    theirs = tiktoken.Encoding("x", pat_str=V1, mergeable_ranks=ranks, special_tokens=special)
    for text in (TEXT, "radius", "  12  345\r\n\r\n x", "größer <SPECIAL_9> </s>"):
        assert ours.encode(text) == theirs.encode(text, allowed_special="all")
    assert ours.vocab_size == 268


def test_patterns_cut_words_differently(folder: Path) -> None:
    ids = {
        pattern: named_tokenizer("TikTokenizer", str(folder / "ranks.json"), tiktoken_pattern=pattern).identity()
        for pattern in ("v1", "v2", "gpt2", "cl100k", r"\S+|\s+")
    }
    assert len({identity["pattern"] for identity in ids.values()}) == 5
    with pytest.raises(
        ConfigurationError, match=r"--tiktoken-pattern \( is not one of v1, v2, gpt2, cl100k, and not a regular"
    ):
        named_tokenizer("TikTokenizer", str(folder / "ranks.json"), tiktoken_pattern="(")


def test_gpt2_files_and_tokenizer_json_agree(folder: Path) -> None:
    """On words that both cut alike."""
    both = [BUILDS[form](folder) for form in ("tokenizer.json", "GPT-2")]
    assert both[0].encode(" radius Circle name") == both[1].encode(" radius Circle name")


@pytest.mark.wide
def test_a_template_goes_around_documents_and_not_around_texts(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "bpe" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="$A $B", special_tokens=[("<s>", begin)]
    )
    # What a file may ask for, and what would cut documents.
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    for included, around in (
        (True, [begin]),
        (False, []),
    ):
        for fast in ("auto", "off"):
            ours = named_tokenizer(
                "HuggingFaceTokenizer",
                str(tmp_path),
                include_special_tokens=included,
                fast_encoding=fast,
            )
            assert list(ours.encode_documents([TEXT])[0]) == [*around, *ours.encode(TEXT)]
            assert len(ours.encode(TEXT)) > 3
            assert ours.eod == begin + 1


def test_an_identity_is_of_the_files_and_the_end_of_a_document(folder: Path, tmp_path: Path) -> None:
    content = (folder / "bpe" / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content)
    copy = named_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"))  # its usual name is enough
    assert copy.identity() == BUILDS["tokenizer.json"](folder).identity()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    assert named_tokenizer("HuggingFaceTokenizer", str(tmp_path)).identity() != copy.identity()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("HuggingFaceTokenizer", "meta/model"), {}, DataError, "meta/model cannot be read .*nothing is downloaded"),
        (("HuggingFaceTokenizer", "{}/merges.txt"), {}, DataError, "merges.txt is not a tokenizer.json"),
        (("HuggingFaceTokenizer",), {}, ConfigurationError, "needs --tokenizer-model"),
        (("GPT2BPETokenizer",), {"vocab_file": "v"}, ConfigurationError, "needs --vocab-file and --merge-file"),
        (("GPT2BPETokenizer",), {"vocab_file": "{}/no.json", "merge_file": "m"}, DataError, "no.json cannot be read"),
        (
            ("GPT2BPETokenizer",),
            {"vocab_file": "{}/merges.txt", "merge_file": "{}/merges.txt"},
            DataError,
            "are not vocab.json and merges.txt of a BPE",
        ),
        (("TikTokenizer", "{}/vocab.json"), {}, DataError, "vocab.json is neither Megatron-LM's JSON of ranks nor"),
        (("TikTokenizer", "{}/ranks.json", 5000), {}, ConfigurationError, "--vocab-size 5000 minus .* is not from 256"),
        (
            ("TikTokenizer", "{}/ranks.json"),
            {"tokenizer_special_tokens": ("<s>",)},
            ConfigurationError,
            "must have each of <unk> <s>",
        ),
        (
            ("TikTokenizer", "{}/ranks.json"),
            {"tiktoken_num_special_tokens": 3},
            ConfigurationError,
            "3 is not from the 7 special tokens to",
        ),
    ],
)
def test_what_cannot_work_is_told(
    folder: Path, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def filled(value: Any) -> Any:
        return value.replace("{}", str(folder)) if isinstance(value, str) else value

    with pytest.raises(error, match=message):
        named_tokenizer(*map(filled, arguments), **{name: filled(v) for name, v in options.items()})


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


SPOILED: dict[str, Callable[[Path], object]] = {
    "a fifo": _fifo,
    "a device": lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero")),
    "nested deep": lambda path: path.write_text("[" * 100_000),
    "no UTF-8": lambda path: path.write_bytes(b'[{"rank": 0, "token_str": "\xff"}]'),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("9" * 5000),
    "nothing": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_files_that_are_none_are_one_line(folder: Path, tmp_path: Path, spoiled: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    builds = {
        "bpe/tokenizer.json": BUILDS["tokenizer.json"],
        "bpe/tokenizer_config.json": BUILDS["tokenizer.json"],
        "bpe/special_tokens_map.json": BUILDS["tokenizer.json"],
        "vocab.json": BUILDS["GPT-2"],
        "merges.txt": BUILDS["GPT-2"],
        "ranks.json": BUILDS["ranks.json"],
        "ranks.tiktoken": BUILDS["ranks.tiktoken"],
        "m.model": lambda folder: named_tokenizer("SentencePieceTokenizer", str(folder / "m.model")),
    }
    for name, build in builds.items():
        path = tmp_path / name
        before = path.read_bytes() if path.exists() else None
        SPOILED[spoiled](path)
        if (name, spoiled) == ("merges.txt", "nothing"):  # a vocabulary without merges is one
            continue
        with pytest.raises(DataError) as caught:
            build(tmp_path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        path.unlink()
        if before is not None:
            path.write_bytes(before)


def test_ids_are_bounded_and_another_for_each_token(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "bpe" / "tokenizer.json").read_text())
    description["model"]["vocab"]["a"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match="has a token 4000000000, but 16777215 is the largest possible"):
        named_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    description["model"]["vocab"]["a"] = description["model"]["vocab"]["b"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match="two tokens of the HuggingFaceTokenizer have the same id"):
        named_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    ranks = (folder / "ranks.tiktoken").read_text()
    for rank in ("-1", "4000000000", "1" + "0" * 30):
        (tmp_path / "ranks.tiktoken").write_text(ranks.replace(" 260\n", f" {rank}\n"))
        with pytest.raises(DataError, match="ranks from"):
            BUILDS["ranks.tiktoken"](tmp_path)
    with pytest.raises(ConfigurationError, match="--tiktoken-num-special-tokens 1000000000 is not from"):
        named_tokenizer(
            "TikTokenizer",
            str(folder / "ranks.json"),
            10**9 + 260,
            tiktoken_num_special_tokens=10**9,
        )


def test_a_vocabulary_without_an_end(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "bpe" / "tokenizer.json").read_text())
    description["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(
        DataError, match=r"does not say which token ends a document .*put a tokenizer_config.json next to"
    ):
        named_tokenizer("HuggingFaceTokenizer", str(tmp_path))


@pytest.mark.parametrize(
    ("form", "library"),
    [
        ("tokenizer.json", "tokenizers"),
        ("GPT-2", "tokenizers"),
        ("ranks.json", "tiktoken"),
        ("ranks.tiktoken", "tiktoken"),
    ],
)
def test_a_missing_library_is_named_with_what_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigurationError, match=f"which needs {library}.*: pip install '?{library}"):
        BUILDS[form](folder)


@pytest.mark.wide
def test_without_tiktoken_documents_go_the_slow_road_unless_the_fast_one_is_required(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(BUILDS["tokenizer.json"](folder).encode_documents([TEXT])[0])
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert list(BUILDS["tokenizer.json"](folder).encode_documents([TEXT])[0]) == expected
    required = named_tokenizer("HuggingFaceTokenizer", str(folder / "bpe"), fast_encoding="require")
    with pytest.raises(ConfigurationError, match=r"pip install 'tiktoken>=0\.9'"):
        required.encode_documents([TEXT])


@pytest.mark.wide_except("tokenizer.json", "ranks.tiktoken")
@pytest.mark.parametrize("form", BUILDS)
def test_the_command_writes_what_the_tokenizer_gives(folder: Path, tmp_path: Path, form: str) -> None:
    flags = {
        "tokenizer.json": ["HuggingFaceTokenizer", "--tokenizer-model", folder / "bpe"],
        "GPT-2": ["GPT2BPETokenizer", "--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"],
        "ranks.json": ["TikTokenizer", "--tokenizer-model", folder / "ranks.json"],
        "ranks.tiktoken": ["TikTokenizer", "--tokenizer-model", folder / "ranks.tiktoken"],
    }[form]
    arguments = ["--input", folder / "corpus.jsonl", "--append-eod", "--output-prefix", tmp_path / "c"]
    assert run_tool("preprocess", *arguments, "--workers", 1, "--tokenizer-type", *flags).code == 0
    tokenizer, data = BUILDS[form](folder), IndexedDataset(tmp_path / "c_text_document")
    assert [data.get(i).tolist() for i in range(4)] == [
        [*tokenizer.encode(TEXT * i), tokenizer.eod] for i in range(1, 5)
    ]
    assert json.loads((tmp_path / "c_text_document.megalite.json").read_text())["tokenizer"] == tokenizer.identity()


def test_half_a_character_among_the_special_tokens_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    for path in (tmp_path / "model").rglob("tokenizer.json"):
        (path.parent / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
        with pytest.raises(DataError, match=r"tokenizer_config.json, of the tokenizer, cannot be read .*surrogates"):
            named_tokenizer("HuggingFaceTokenizer", str(path.parent))
        return
    pytest.fail("there is no tokenizer.json")
