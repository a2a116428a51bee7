"""Conversations: which tokens the loss counts on, how they are packed, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.chat import ChatTemplate, Span, conversation_reader, find_template, given_template
from megalite.data.datasets import Datasets, Samples
from megalite.data.fields import SampleFields
from megalite.data.index_cache import IndexCache
from megalite.data.parts import read_parts
from megalite.data.sft_dataset import build_sft_datasets, pack
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import DataError

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
    return conversation_reader(None if template is None else ChatTemplate(template, special))(record)


def test_without_a_template_answers_end_with_the_end_of_document() -> None:
    assert spans({"messages": TALK[1:3]}) == [
        Span("<|user|>\n1+1?\n", False),
        Span("<|assistant|>\n", False),
        Span("2", True, ends=True),
    ]
    assert spans({"prompt": "1+1=", "completion": "2"}) == [Span("1+1=", False), Span("2", True, ends=True)]


def test_a_template_says_everything_and_the_answers_end_as_it_ends_them() -> None:
    found = spans({"messages": TALK}, CHATML)
    assert "".join(span.text for span in found) == "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in TALK
    )
    assert [span.text for span in found if span.learned] == ["2<|im_end|>\n", "4<|im_end|>\n"]
    assert not any(span.ends for span in found)
    assert spans({"messages": TALK[1:2]}, CHATML)[-1] == Span("<|im_start|>user\n1+1?<|im_end|>\n", False)


def test_templates_see_special_tokens_and_the_prompt() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    found = spans({"messages": TALK[1:3]}, template, bos_token="<s>", eos_token="</s>")
    assert [span.text for span in found] == ["<s>1+1?", "2</s>", ""]


def test_templates_that_hide_answers_are_refused() -> None:
    last_only = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="does not render the beginning of this conversation as it renders the whole"):
        spans({"messages": TALK}, last_only)
    with pytest.raises(ValueError, match="refuses it: no system"):
        spans({"messages": TALK}, "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    with pytest.raises(DataError, match="is not valid Jinja"):
        spans({"messages": TALK}, "{% for %}")


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
    "record", [[], "a", {}, {"messages": []}, {"messages": [1]}, {"messages": [{"role": "user"}]}, {"prompt": "a"}]
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
    config.write_text("[")
    with pytest.raises(DataError, match="cannot be read"):
        find_template(str(tmp_path))


# ---------------------------------------------------------------------------------------------------- packing


@settings(deadline=None)
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


def build(path: Path, samples: Samples = Samples(3, 0, 0), length: int = 40, **flags: Any) -> Datasets[SampleFields]:  # noqa: B008
    return build_sft_datasets(
        read_parts(data_path=[str(path)], **({"split": "1"} | flags)),
        samples,
        sequence_length=length,
        seed=1,
        tokenizer=ByteTokenizer(),
        template=None,
        cache=IndexCache(),
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
        for document in range(documents.max() + 1):
            here = documents == document
            assert fields["positions"][here].tolist() == list(range(here.sum()))
            if not fields["loss_mask"][here].any():
                continue  # what was left empty
            inputs, labels = fields["tokens"][here], fields["labels"][here]
            assert inputs[1:].tolist() == labels[:-1].tolist()
            text, answer = ByteTokenizer().decode(inputs), labels[fields["loss_mask"][here] == 1]
            assert answer[-1] == 256
            seen.append((text[:2], ByteTokenizer().decode(answer)))
            assert text == text[:2] + seen[-1][1]
    assert set(seen) == {(f"q{n}", f"answer {n}") for n in range(4)}
    with pytest.raises(IndexError):
        train[len(train)]


def test_long_conversations_are_cut_with_a_note(tmp_path: Path) -> None:
    long = {"prompt": "q", "completion": "x" * 100}
    train, _, _, notes = build(write(tmp_path / "a.jsonl", long, {"prompt": "q", "completion": "a"}))
    assert len(notes) == 1
    assert notes[0].endswith("a.jsonl: 1 of 2 conversations are longer than --seq-length and are cut")
    assert train is not None
    assert max(train[sample]["loss_mask"].sum() for sample in range(len(train))) == 40


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
        ("", "holds no conversations"),
        ('{"prompt": "q", "completion": "a"}\n{', r"line 2 is no conversation: Expecting"),
        ('{"prompt": "q"}', r"line 1 is no conversation: expected"),
        ('{"prompt": "", "completion": ""}', "line 1 is no conversation: it has no text"),
        ('\n{"prompt": "\\ud800", "completion": "a"}', "line 2 is no conversation"),
        ("\udcff", "line 1 is no conversation"),
    ],
)
def test_files_of_other_things_are_refused_by_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=problem):
        build(tmp_path / "a.jsonl")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .* JSONL files of conversations"):
        build(tmp_path / "a.jsonl")
