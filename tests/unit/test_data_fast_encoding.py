"""Fast paths give the slow path's tokens for every text, and are refused where they might not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megalite.data.tokenizers.byte_level_bpe import PATTERNS, FastByteLevelBPE, NotIdentical
from megalite.data.tokenizers.word_cache import WordCache, refusal
from megalite.preprocessing.tokenizer_training import train_byte_level_bpe, train_tokenizer
from tests.harness.wide import wide_except

pytestmark = pytest.mark.costly

WORDS = ["the", "there", "theta", "heat", "'ll", "I'LL", "it's", "größer", "漢字", "漢", "\u0301e", "ſt", "12345", "½"]
WORDS += [
    "  ",
    "\n",
    "\r\n\n",
    "\t",
    "\u3000",
    "...",
    "<|endoftext|>",
    "<|end",
    "🤗",
    "👩‍👩‍👧",
    "\x00",
    "_",
    "\u2581",
    "aaaa",
]
# Words that the vocabularies were trained on, and any character at all: neighbours of both kinds.
TEXT = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=25).map("".join)
TRAINING = [" ".join(WORDS[i:] + WORDS[:i]) * 3 for i in range(len(WORDS))] + ["aaaaaaa bbb ababab " * 9]


def trained(pre_tokenizer: Any, vocab_size: int = 420) -> Any:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def split_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def with_begin() -> Any:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="$A $B", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


def normalized() -> Any:
    tokenizer = trained(split_by(max(PATTERNS, key=len)))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def all_splits() -> Any:
    """Return a vocabulary as converted from tiktoken: a merge for each split of a token in two, full words first."""
    description = json.loads(trained(split_by(min(PATTERNS, key=len))).to_str())
    vocabulary = description["model"]["vocab"]
    cuts = [(token[:i], token[i:], rank) for token, rank in vocabulary.items() for i in range(1, len(token))]
    known = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary and "<|" not in cut[0]]
    known.sort(key=lambda cut: (cut[2], vocabulary[cut[0]], vocabulary[cut[1]]))
    description["model"] |= {"merges": [[left, right] for left, right, _ in known], "ignore_merges": True}
    return tokenizers.Tokenizer.from_str(json.dumps(description))


VOCABULARIES: dict[str, Callable[[], Any]] = {
    "GPT-2's words": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "a token before each text": with_begin,
    "normalized": normalized,
    "all splits": all_splits,
    **{
        f"pattern {i}": lambda pattern=pattern: trained(split_by(pattern)) for i, pattern in enumerate(sorted(PATTERNS))
    },
}


FEW = ("normalized", "all splits", "pattern 6")


@pytest.fixture(scope="module", params=wide_except(VOCABULARIES, FEW))
def vocabulary(request: pytest.FixtureRequest) -> tuple[Any, FastByteLevelBPE]:
    tokenizer = VOCABULARIES[request.param]()
    return tokenizer, FastByteLevelBPE(tokenizer, add_special_tokens=True)


TEXTS = st.lists(TEXT, max_size=4)
EXAMPLE = ["e\u0301", "\u212b \u2126", "\U00040000", "\u0378", "a" * 300, " " * 70 + "x"]


@pytest.mark.wide_except("normalized")
@settings(deadline=None, max_examples=12)
@given(texts=TEXTS)
@example(texts=EXAMPLE)
def test_tiktoken_gives_the_same_tokens(vocabulary: tuple[Any, FastByteLevelBPE], texts: list[str]) -> None:
    check_texts(vocabulary, texts)


@pytest.mark.wide
@settings(deadline=None, max_examples=50)
@given(texts=TEXTS)
def test_tiktoken_gives_the_same_tokens_of_many_texts(
    vocabulary: tuple[Any, FastByteLevelBPE], texts: list[str]
) -> None:
    check_texts(vocabulary, texts)


def check_texts(vocabulary: tuple[Any, FastByteLevelBPE], texts: list[str]) -> None:
    tokenizer, fast = vocabulary
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=True)]
    assert [list(ids) for ids in fast.encode_documents(texts)] == expected


@pytest.mark.wide
@pytest.mark.parametrize("name", ["GPT-2's words", "normalized"])
def test_every_character_goes_the_same_way(name: str) -> None:
    """Each between a letter and a digit, where its class decides what it is cut from."""
    tokenizer = VOCABULARIES[name]()
    fast = FastByteLevelBPE(tokenizer, add_special_tokens=True)
    firsts = [
        *range(0, 0x3400, 500),
        *range(0xA000, 0xAC00, 500),
        *range(0xF900, 0x12000, 500),
        0x1F000,
        0xE0000,
        0xF0000,
    ]
    texts = ["".join(f"a{chr(c)}1 {chr(c)}" for c in range(first, first + 500)) for first in firsts]
    expected = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=True)]
    assert [list(ids) for ids in fast.encode_documents(texts)] == expected


def test_it_is_the_fast_road_that_is_tested(vocabulary: tuple[Any, FastByteLevelBPE]) -> None:
    _, fast = vocabulary
    assert all(fast._encode(text) is not None for text in TRAINING if "<|" not in text)
    assert fast._encode("ends with <|endoftext|> spelled out") is None


def check_many_spaces(fast: FastByteLevelBPE) -> None:
    """Encode what is too much for the stack of the regular expression's engine."""
    assert len(*fast.encode_documents([" " * 1_000_000])) > 0


@pytest.mark.wide
def test_a_million_spaces_are_no_matter() -> None:
    check_many_spaces(FastByteLevelBPE(VOCABULARIES["GPT-2's words"](), add_special_tokens=True))


@pytest.mark.wide
def test_a_million_spaces_are_no_matter_to_any(vocabulary: tuple[Any, FastByteLevelBPE]) -> None:
    check_many_spaces(vocabulary[1])


def changed(path: str, value: Any) -> Any:
    """A vocabulary whose description has another value under a path."""
    description = json.loads(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())
    *parents, name = path.split(".")
    place = description
    for parent in parents:
        place = place[parent]
    place[name] = value
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def reordered(order: Callable[[list[Any]], list[Any]]) -> Any:
    merges = json.loads(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())["model"]["merges"]
    return changed("model.merges", order(merges))


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "a space before": (
        lambda: changed("pre_tokenizer", BYTE_LEVEL | {"add_prefix_space": True}),
        "without a leading space",
    ),
    "no expression": (lambda: changed("pre_tokenizer", BYTE_LEVEL | {"use_regex": False}), "not a known one"),
    "other words": (lambda: trained(split_by(r"\w+|\W+")), "not a known one"),
    "no pre-tokenizer": (lambda: changed("pre_tokenizer", None), "as a byte-level vocabulary"),
    "lower case": (lambda: changed("normalizer", {"type": "Lowercase"}), "changes texts by Lowercase"),
    "dropout": (lambda: changed("model.dropout", 0.1), "not plain byte-pair encoding"),
    "merges before their parts": (lambda: reordered(lambda merges: merges[::-1]), "before those of its parts"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_could_differ_is_refused(name: str) -> None:
    make, reason = REFUSALS[name]
    with pytest.raises(NotIdentical, match=reason):
        FastByteLevelBPE(make(), add_special_tokens=False)


def crafted(merges: list[tuple[str, str]], ignore_merges: bool = False) -> Any:
    """A vocabulary of the bytes and these merges, as no training makes it."""
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), *dict.fromkeys(left + right for left, right in merges)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=ignore_merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.wide
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_merges_that_no_training_makes_are_the_same_or_refused(data: st.DataObject) -> None:
    check_merges(data)


@pytest.mark.wide
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_many_merges_that_no_training_makes_are_the_same_or_refused(data: st.DataObject) -> None:
    check_merges(data)


def check_merges(data: st.DataObject) -> None:
    """Draw rules over two letters: tokens that cannot be reached, that come about in two ways, in any order."""
    tokens, merges = ["a", "b"], list[tuple[str, str]]()
    for _ in range(data.draw(st.integers(1, 8))):
        merge = (data.draw(st.sampled_from(tokens)), data.draw(st.sampled_from(tokens)))
        if merge not in merges:
            merges.append(merge)
            tokens.append("".join(merge))
    if data.draw(st.booleans()):
        merges = data.draw(st.permutations(merges))
    tokenizer = crafted(merges, data.draw(st.booleans()))
    texts = data.draw(st.lists(st.text("ab", max_size=14), min_size=20, max_size=20))
    try:
        fast = FastByteLevelBPE.__new__(FastByteLevelBPE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megalite.data.tokenizers.byte_level_bpe.LAST_COMPARED", 0x7F)
            fast.__init__(tokenizer, False)  # type: ignore[misc]
    except NotIdentical:
        return
    assert [list(ids) for ids in fast.encode_documents(texts)] == [tokenizer.encode(text).ids for text in texts]


def sentencepiece(path: Path, texts: list[str] = TRAINING, **settings: Any) -> bytes:
    """A model trained as others train theirs."""
    defaults = {"model_type": "bpe", "vocab_size": 380, "byte_fallback": True, "normalization_rule_name": "identity"}
    defaults |= {"remove_extra_whitespaces": False, "minloglevel": 2, "hard_vocab_limit": False}
    SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(path / "model"), **(defaults | settings))
    return (path / "model.model").read_bytes()


MODELS: dict[str, dict[str, Any]] = {
    "as Llama's": {"add_dummy_prefix": True},
    "no space before": {"add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
    "unknown characters": {"byte_fallback": False, "character_coverage": 0.98},
    "letters beside others": {"split_by_unicode_script": False, "split_by_number": False, "add_dummy_prefix": True},
    "letters apart, space before": {"add_dummy_prefix": True, "vocab_size": 330},
    "letters apart": {"add_dummy_prefix": False, "vocab_size": 330},
    "own symbols": {"user_defined_symbols": ["\u2581\u2581", "<x>", "ab"], "add_dummy_prefix": True},
}


ENGLISH = ["I'll go, I'll stay; it's (not) a_b 3x the there theta heat aaaa ab", "  <x> ... 12345 \u6f22\u5b57"] * 50


@pytest.fixture(scope="module", params=MODELS)
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, WordCache]:
    texts = ENGLISH if "apart" in request.param else TRAINING
    model = sentencepiece(tmp_path_factory.mktemp("model"), texts, **MODELS[request.param])
    assert refusal(model) is None
    processor = SentencePieceProcessor(model_proto=model)
    cache = WordCache(processor, model)
    assert (len(cache._cut("a,b")) == 3) == ("apart" in request.param)
    return processor, cache


@settings(deadline=None, max_examples=60)
@given(text=TEXT)
@example(text=" ")
@example(text="x ")
@example(text="don't 3x x3 _a a_ (a)b \u00e9e\u0301e \u6f22a")
@example(text="x  <x>  ab \u2581 \u2581y")
@example(text="\u0394\u0394 \u0394")
def test_words_give_the_same_pieces(words: tuple[Any, WordCache], text: str) -> None:
    processor, cache = words
    assert cache.encode(text).tolist() == processor.encode(text)


@pytest.mark.parametrize("apart", [True, False])
def test_letters_are_cut_from_others_where_they_stay_apart(tmp_path: Path, apart: bool) -> None:
    texts = ["I'll go, I'll stay; it's (not) a_b 3x"] * 50
    model = sentencepiece(tmp_path, texts, vocab_size=320, split_by_unicode_script=apart)
    words = ["I", "'", "ll", " go"] if apart else ["I'll", " go"]
    assert WordCache(SentencePieceProcessor(model_proto=model), model)._cut("I'll go") == words


def test_our_own_models_go_by_words(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TRAINING))
    train_tokenizer([str(corpus)], ["text"], str(tmp_path / "t"), 330)
    assert refusal((tmp_path / "t.model").read_bytes()) is None
    train_byte_level_bpe([str(corpus)], ["text"], str(tmp_path / "hf"), 330)
    FastByteLevelBPE(tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json")), False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "unigram", "vocab_size": 330}, "not a byte-pair encoding"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes more of the text"),
        ({"remove_extra_whitespaces": True}, "changes more of the text"),
        ({"treat_whitespace_as_suffix": True}, "spaces end its words"),
        ({"split_by_whitespace": False, "vocab_size": 500}, "has a space after another character"),
    ],
)
def test_models_that_see_across_spaces_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    assert reason in str(refusal(sentencepiece(tmp_path, **settings)))
