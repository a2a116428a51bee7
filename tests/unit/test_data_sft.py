"""Conversations: which tokens the loss counts on, how they are packed, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from megalite.config import DataConfig
from megalite.data.chat import ChatTemplate, Span, conversation_reader, find_template, given_template
from megalite.data.datasets import Datasets, Samples
from megalite.data.fields import SampleFields
from megalite.data.index_cache import IndexCache
from megalite.data.sft_dataset import ConversationFile, build_sft_datasets, pack
from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import ConfigurationError, DataError
from tests.harness.tokenizers import named_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]
CHATML = (
    "{% for message in messages %}\n<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spans(record: Mapping[str, Any], template: str | None = None, **special: str) -> list[Span]:
    with conversation_reader(None if template is None else ChatTemplate(template, special)) as reader:
        return reader(record)


def test_without_a_template_answers_end_with_the_end_of_document() -> None:
    assert spans({"messages": TALK[1:3]}) == [
        Span("<|user|>\n1+1?\n"),
        Span("<|assistant|>\n"),
        Span("2", "assistant", ends=True),
    ]
    assert spans({"prompt": "1+1=", "completion": "2"}) == [Span("1+1="), Span("2", "assistant", ends=True)]


def test_a_template_says_everything_and_the_answers_end_as_it_ends_them() -> None:
    found = spans({"messages": TALK}, CHATML)
    assert "".join(span.text for span in found) == "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in TALK
    )
    assert [span.text for span in found if span.learned] == ["2<|im_end|>\n", "4<|im_end|>\n"]
    assert not any(span.ends for span in found)
    assert spans({"messages": TALK[1:2]}, CHATML)[-1] == Span("<|im_start|>user\n1+1?<|im_end|>\n")


def test_templates_see_special_tokens_and_the_prompt() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    found = spans({"messages": TALK[1:3]}, template, bos_token="<s>", eos_token="</s>")
    assert [span.text for span in found] == ["<s>1+1?", "2</s>", ""]


def test_templates_that_hide_answers_are_refused() -> None:
    last_only = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="renders the beginning of this conversation alone differently"):
        spans({"messages": TALK}, last_only)
    with pytest.raises(ValueError, match="refuses it: no system"):
        spans({"messages": TALK}, "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    with pytest.raises(DataError, match="is not valid Jinja"):
        spans({"messages": TALK}, "{% for %}")


CHATML_WITHOUT_A_PROMPT = CHATML[: CHATML.index("{% if add_generation_prompt")]


@pytest.mark.wide
def test_a_header_that_a_model_would_not_be_given_is_refused() -> None:
    why = r"does not write '<\|im_start\|>assistant' before an answer if add_generation_prompt asks for it"
    with pytest.raises(ValueError, match=why):
        spans({"messages": TALK}, CHATML_WITHOUT_A_PROMPT)
    # Nothing to write before an answer but a space, as Llama 2 has it; and what a model itself says first is no header.
    found = spans(
        {"messages": TALK[1:3]}, "{% for m in messages %}{{ ' ' if loop.index0 }}{{ m.content }}|{% endfor %}"
    )
    assert [span.text for span in found if span.learned] == [" 2|"]
    thinks = CHATML.replace("{{ message['content'] }}", "{{ '<think>' if loop.index0 % 2 }}{{ message['content'] }}")
    found = spans({"messages": TALK[1:3]}, thinks)
    assert [span.text for span in found if span.learned] == ["<think>2<|im_end|>\n"]


def test_answers_that_follow_each_other_are_told_apart() -> None:
    answers = [{"role": "user", "content": "q"}, *({"role": "assistant", "content": text} for text in "ab")]
    found = spans({"messages": answers}, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert [span.text for span in found if span.learned] == ["a", "b"]
    ends_but_before_an_answer = (
        "{% for m in messages %}{{ m.content }}{{ '' if loop.last and add_generation_prompt else '|' }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="renders the beginning"):
        spans({"messages": answers}, ends_but_before_an_answer)


def test_templates_may_say_what_they_may_say_to_transformers() -> None:
    template = (
        "{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}{% if m.role == 'system' %}{% continue %}"
        "{% endif %}{{ m.content }}{{ 'tools' if tools is not none }}{% endfor %}"
    )
    assert "".join(span.text for span in spans({"messages": TALK[:2]}, template)) == "1+1?"
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}.{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    found = spans({"messages": TALK[1:3]}, template)
    assert [(span.text, span.learned) for span in found[:2]] == [("1+1?<a>", False), ("2.", True)]


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__ }}"]
)
def test_templates_reach_nothing_but_their_arguments(template: str) -> None:
    try:
        rendered = "".join(span.text for span in spans({"messages": TALK}, template))
    except ValueError:
        return
    assert "object" not in rendered


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1/0 }}", "refuses it: ZeroDivisionError: division by zero"),
        ("{{ 10.0**400 }}", "refuses it: OverflowError: .*out of range"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses it: OverflowError: Range too big"),
        ("{{ raise_exception('a\n' * 10**6) }}", f"refuses it: {'a ' * 99}a"),
        ("{{ '%1000000000d' | format(1) }}", "takes more than 512 MiB of memory"),
        ("{{ messages | tojson(indent=10**9) }}", "takes more than 512 MiB of memory"),
        ("{{ messages[0].content[:9] * 10**6 }}", "makes 9000000 characters of it; the limit is 8388608"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deep"),
    ],
)
def test_what_a_template_does_wrong_is_one_line_about_the_record(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        spans({"messages": TALK[:1]}, template)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def _children() -> set[str]:
    """The processes that this thread has started and not waited for."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


@pytest.mark.wide
def test_a_template_without_end_costs_one_record_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _children()
    monkeypatch.setattr("megalite.data.chat.RENDERING_SECONDS", 0.3)
    loop = "{% for a in range(5000) %}{% for b in range(5000) %}{% endfor %}{% endfor %}"  # seconds
    endless = {"messages": [{"role": "user", "content": "endless"}]}
    with conversation_reader(
        ChatTemplate(f"{{% if messages[0].content == 'endless' %}}{loop}{{% endif %}}b", {})
    ) as read:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"the chat template takes more than 0\.3 s of CPU time"):
                read(endless)
            assert read({"messages": TALK[:1]}) == [Span("b")]
    with pytest.raises(DataError, match="nested too deep: give another as --chat-template"):
        spans(endless, "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}")
    assert _children() == before


def test_the_process_of_a_template_has_no_files_and_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = _children()
    monkeypatch.setenv("MEGALITE_TEST_SECRET", "s")
    with (tmp_path / "open").open("w"), conversation_reader(ChatTemplate("a", {})) as read:
        read({"messages": TALK[:1]})
        [child] = _children() - before
        assert {os.readlink(file).partition(":")[0] for file in Path(f"/proc/{child}/fd").iterdir()} == {
            "socket",
            os.devnull,
        }
        assert "MEGALITE_TEST_SECRET" not in Path(f"/proc/{child}/environ").read_text()
        limits = Path(f"/proc/{child}/limits").read_text()
        assert re.search(r"Max open files +0 +0", limits)
        assert re.search(r"Max address space +536870912 +536870912", limits)


def test_a_jinja_with_holes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.1.5")
    with pytest.raises(ConfigurationError, match=r"3\.1\.5 is installed: pip install 'jinja2>=3\.1\.6'"):
        spans({"messages": TALK}, "a")


@pytest.mark.parametrize(
    "record", [{}, {"messages": []}, {"messages": [1]}, {"messages": [{"role": "user"}]}, {"prompt": "a"}]
)
def test_what_is_no_conversation_is_refused(record: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|messages|content|role"):
        spans(record)


def test_the_template_of_a_tokenizer_is_found(tmp_path: Path) -> None:
    assert find_template(str(tmp_path)) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A", "eos_token": {"content": "</s>"}, "bos_token": None}))
    assert find_template(str(tmp_path / "tokenizer.json")) == ChatTemplate("A", {"eos_token": "</s>"})
    config.write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    assert find_template(str(tmp_path)) == ChatTemplate("D", {})
    (tmp_path / "chat_template.jinja").write_text("B")
    assert find_template(str(tmp_path)) == ChatTemplate("B", {})
    assert given_template("{{ messages }}", str(tmp_path)).source == "{{ messages }}"
    assert given_template(str(tmp_path / "chat_template.jinja"), None).source == "B"
    with pytest.raises(DataError, match="--chat-template missing cannot be read"):
        given_template("missing", None)
    (tmp_path / "chat_template.jinja").unlink()
    for text, why in (("[", "cannot be read"), ("[]", "not an object"), ('{"chat_template": [1]}', "of .* is not one")):
        config.write_text(text)
        with pytest.raises(DataError, match=why):
            find_template(str(tmp_path))


# ---------------------------------------------------------------------------------------------------- packing


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=40), st.none() | st.integers(1, 60), st.integers(0, 99))
def test_packing_takes_whole_epochs_in_turn(lengths: list[int], num_samples: int | None, seed: int) -> None:
    order, starts = pack(np.array(lengths), 10, num_samples, seed)
    assert (starts[0], starts[-1]) == (0, len(order))
    epochs = order.reshape(-1, len(lengths))
    assert all(sorted(epoch) == list(range(len(lengths))) for epoch in epochs)
    if num_samples is None:
        assert len(epochs) == 1
    else:
        assert len(starts) - 1 >= num_samples
    filled = [sum(lengths[i] for i in order[a:b]) for a, b in itertools.pairwise(starts)]
    assert all(0 < total <= 10 for total in filled)
    for sample, start in enumerate(starts[1:-1]):  # nothing that would have fitted was left out, but by an epoch's end
        assert start % len(lengths) == 0 or filled[sample] + lengths[order[start]] > 10


def build(
    path: Path,
    samples: Samples = Samples(3, 0, 0),  # noqa: B008
    length: int = 40,
    tokenizer: Tokenizer = ByteTokenizer(),  # noqa: B008
    template: str | None = None,
    **flags: Any,
) -> Datasets[SampleFields]:
    return build_sft_datasets(
        DataConfig(seq_length=length, data_path=(str(path),), **({"split": "1"} | flags)),
        samples,
        1,
        tokenizer,
        None if template is None else ChatTemplate(template, {}),
    )


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


def test_sequences_hold_conversations_apart_with_loss_on_their_answers(tmp_path: Path) -> None:
    talks = [{"prompt": f"q{n}", "completion": f"answer {n}"} for n in range(4)]
    train, *_ = build(write(tmp_path / "a.jsonl", *talks))
    assert train is not None
    seen = []
    for sample in range(len(train)):
        fields = train[sample]
        documents = fields["document_ids"]
        assert documents is not None
        padding = fields["padding"]
        empty = np.zeros(len(documents), bool)
        for document in range(documents.max() + 1):
            here = documents == document
            assert fields["positions"][here].tolist() == list(range(here.sum()))
            if not fields["loss_mask"][here].any():
                empty |= here
                continue  # what was left empty
            inputs, labels = fields["tokens"][here], fields["labels"][here]
            assert inputs[1:].tolist() == labels[:-1].tolist()
            text, answer = ByteTokenizer().decode(inputs), labels[fields["loss_mask"][here] == 1]
            assert answer[-1] == 256
            seen.append((text[:2], ByteTokenizer().decode(answer)))
            assert text == text[:2] + seen[-1][1]
        assert (np.zeros(len(documents), bool) if padding is None else padding).tolist() == empty.tolist()
    assert set(seen) == {(f"q{n}", f"answer {n}") for n in range(4)}
    with pytest.raises(IndexError):
        train[len(train)]


def test_long_conversations_are_cut_with_a_note(tmp_path: Path) -> None:
    long = {"prompt": "q", "completion": "x" * 100}
    train, _, _, notes, _ = build(write(tmp_path / "a.jsonl", long, {"prompt": "q", "completion": "a"}))
    assert len(notes) == 1
    assert notes[0].endswith("a.jsonl: 1 of 2 conversations are longer than --seq-length and are cut")
    assert train is not None
    assert max(train[sample]["loss_mask"].sum() for sample in range(len(train))) == 40


def test_conversations_without_answers_are_counted(tmp_path: Path) -> None:
    silent = {"messages": TALK[:2]}
    train, _, _, notes, _ = build(
        write(tmp_path / "a.jsonl", silent, {"prompt": "q" * 41, "completion": "a"}, {"messages": TALK[1:3]})
    )
    assert train is not None
    assert notes[1].endswith(
        "a.jsonl: 2 of 3 conversations have no answer within --seq-length: nothing is learned from them"
    )
    with pytest.raises(DataError, match="no answer begins within --seq-length 4, so nothing would be learned"):
        build(tmp_path / "a.jsonl", length=4)


def test_a_file_without_answers_is_refused_by_its_roles(tmp_path: Path) -> None:
    talk = [{"role": "human", "content": "1+1?"}, {"role": "gpt", "content": "2"}]
    with pytest.raises(
        DataError, match=r"a.jsonl has no answers.* role 'assistant' says.* roles there are 'gpt', 'human'"
    ):
        build(write(tmp_path / "a.jsonl", {"messages": talk}))


# ---------------------------------------------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def spaces_first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers that put a space before a text, as Llama 2's: as a SentencePiece model and as a tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizers")
    SentencePieceTrainer.train(
        sentence_iterator=iter(["[INST] hi [/INST] yes. 1 2 3 yes no hi"] * 50),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    vocabulary = ["<unk>", "</s>", "▁", "y", "e", "s", "h", "i", "[", "]", "▁y", "▁ye", "▁yes", "ye", "yes"]
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("y", "e"), ("ye", "s")]
    ids = {token: i for i, token in enumerate(vocabulary)}
    json_tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    normalizers = tokenizers.normalizers
    json_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    json_tokenizer.add_special_tokens(["</s>"])
    json_tokenizer.save(str(folder / "tokenizer.json"))
    return {
        "SentencePiece": named_tokenizer("SentencePieceTokenizer", str(folder / "m.model")),
        "Hugging Face": named_tokenizer("HuggingFaceTokenizer", str(folder)),
    }


def learned_of(
    path: Path, record: Any, tokenizer: Tokenizer, template: str | None = None
) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and which are learned."""
    train, *_ = build(write(path, record), Samples(1, 0, 0), 200, tokenizer, template)
    assert train is not None
    fields, documents = train[0], train[0]["document_ids"]
    assert documents is not None
    count = int((documents == 0).sum())
    return (
        [*fields["tokens"][:1].tolist(), *fields["labels"][:count].tolist()],
        [False, *map(bool, fields["loss_mask"][:count])],
    )


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["SentencePiece", "Hugging Face"])
def test_the_tokens_are_those_of_the_whole_text(spaces_first: dict[str, Tokenizer], tmp_path: Path, kind: str) -> None:
    tokenizer = spaces_first[kind]
    talk = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, ("hi", "yes") * 2, strict=True)
    ]
    llama2 = "{% for m in messages %}{{ ('[%s]' if m.role == 'user' else ' %s') % m.content }}{% endfor %}"
    ids, learned = learned_of(tmp_path / "a.jsonl", {"messages": talk}, tokenizer, llama2)
    assert ids == tokenizer.encode("[hi] yes[hi] yes")
    answers = [token for token, is_learned in zip(ids, learned, strict=True) if is_learned]
    assert answers == 2 * tokenizer.encode("yes")
    # What the model is given before its first answer is what it has seen there.
    assert ids[: learned.index(True)] == tokenizer.encode("[hi]")
    ids, learned = learned_of(tmp_path / "b.jsonl", {"prompt": "[hi]", "completion": " yes"}, tokenizer)
    assert ids == [*tokenizer.encode("[hi] yes"), tokenizer.eod]
    assert learned == [False] * len(tokenizer.encode("[hi]")) + [True] * (len(tokenizer.encode("yes")) + 1)


def test_a_token_that_holds_any_of_an_answer_is_learned(spaces_first: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = spaces_first["Hugging Face"]
    ids, learned = learned_of(tmp_path / "a.jsonl", {"prompt": "[hi] y", "completion": "es"}, tokenizer)
    assert ids == [*tokenizer.encode("[hi] yes"), tokenizer.eod]
    assert learned == [False] * (len(ids) - 2) + [True, True]
    ends_within = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [
        {"role": "user", "content": "[hi]"},
        {"role": "assistant", "content": " ye"},
        {"role": "user", "content": "s]"},
    ]
    ids, learned = learned_of(tmp_path / "b.jsonl", {"messages": talk}, tokenizer, ends_within)
    assert [token for token, is_learned in zip(ids, learned, strict=True) if is_learned] == tokenizer.encode("yes")


def test_special_tokens_of_a_template_are_recognized(spaces_first: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = spaces_first["Hugging Face"]
    template = "{% for m in messages %}{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
    talk = [{"role": "user", "content": "[hi]"}, {"role": "assistant", "content": " yes"}]
    ids, learned = learned_of(tmp_path / "a.jsonl", {"messages": talk}, tokenizer, template)
    assert ids[-2:] == [*tokenizer.encode("yes"), tokenizer.eod]
    assert learned[-3:] == [False, True, True]


def test_tokens_are_kept_as_narrow_as_on_disk(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a" * 50})
    file = ConversationFile(str(path), ByteTokenizer(), None, 40, 1, IndexCache())
    assert file.tokens.dtype == np.uint16
    assert sum(len(array) for array in (file.answers, file.ends)) == 3


def test_splits_share_no_conversation_and_tokens_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": f"{n:03}", "completion": "."} for n in range(100)))
    seen = []
    for _ in range(2):
        sets = build(path, Samples(30, 10, 5), split="80,15,5")
        words = [
            {int(word) for i in range(len(part)) for word in ByteTokenizer().decode(part[i]["tokens"]).split(".")[:-1]}
            for part in sets[:3]
            if part is not None
        ]
        assert [(min(part), max(part)) for part in words] == [(0, 79), (80, 94), (95, 99)]
        seen.append(sorted(path.name for path in (tmp_path / "cache").iterdir()))
    assert seen[0] == seen[1]
    write(path, {"prompt": "q", "completion": "a"}, *({"prompt": "q", "completion": "b"} for _ in range(99)))
    build(path, Samples(30, 10, 5), split="80,15,5")
    assert len(list((tmp_path / "cache").iterdir())) == 2 * len(seen[0])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no conversations"),
        ('{"prompt": "q", "completion": "a"}\n{', r"line 2 is not a conversation: not a JSON object \(Expecting"),
        ("[]", "line 1 is not a conversation: a JSON list, not an object"),
        (
            '{"prompt": "q", "completion": "a", "x": ' + "[" * 10**5 + "]" * 10**5 + "}",
            "line 1 is not a conversation: .*recursion",
        ),
        ('{"prompt": "q"}', r"line 1 is not a conversation: expected"),
        ('{"prompt": "", "completion": ""}', "line 1 is not a conversation: it has no text"),
        ('\n{"prompt": "\\ud800", "completion": "a"}', "line 2 is not a conversation"),
        ("\udcff", "line 1 is not a conversation"),
    ],
)
def test_files_of_other_things_are_refused_by_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=problem):
        build(tmp_path / "a.jsonl")


@pytest.mark.parametrize("kind", ["SentencePiece", "Hugging Face"])
def test_half_a_character_is_refused_by_line(spaces_first: dict[str, Tokenizer], tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\\ud83d", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"a.jsonl line 1 is not a conversation: .*surrogates not allowed"):
        build(tmp_path / "a.jsonl", tokenizer=spaces_first[kind])


def test_tokens_beyond_the_vocabulary_are_refused_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "eod", 70_000)
    write(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a"})
    with pytest.raises(
        DataError, match=r"line 1 is not a conversation: it has tokens from 97 to 70000, but .* has 257"
    ):
        build(tmp_path / "a.jsonl")


def test_a_file_without_an_end_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"cannot be read \(not a regular file"):
        build(tmp_path / "a.jsonl")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .* JSONL files of conversations"):
        build(tmp_path / "a.jsonl")
