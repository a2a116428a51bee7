"""Pairs of what a tokenizer, a chat template and packing do to conversations, against the same by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megalite.config import DataConfig
from megalite.data.chat import ChatTemplate
from megalite.data.datasets import Samples
from megalite.data.sft_dataset import build_sft_datasets
from megalite.data.tokenizers import Tokenizer
from megalite.data.tokenizers.bytes import ByteTokenizer
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.tokenizers import named_tokenizer
from tests.harness.wide import wide_except

MARKS = ("</s>", "<|im_start|>", "<|im_end|>")
CHARACTERS = [*map(chr, range(32, 127)), "\n", "é"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_EOS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)
FACTORS: Factors = {
    "tokenizer": ("bytes", "special", "special, ends as a turn"),
    "template": ("none", "chatml", "with eos"),
    "talk": ("one", "system", "several", "ends with a question", "says marks"),
    "length": (24, 61, 200),
    "epochs": (1, 3),
    "cached": (False, True),
    "seed": (1, 2),
    "conversations": (1, 7),
}


def possible(row: Row) -> bool:
    """Tell whether an answer begins within the length."""
    return row["length"] > 24 or row["template"] == "with eos"


def conversation(kind: str, number: int) -> list[dict[str, str]]:
    """Return one of a file's conversations, which are of different lengths."""
    question, answer = f"q{number}" + "?" * (number % 3), f"a{number}" + "é" * (number % 4)
    marks = MARKS[1] + " ok " + MARKS[2]
    turns = {
        "one": [("user", question), ("assistant", answer)],
        "system": [("system", "brief"), ("user", question), ("assistant", answer)],
        "several": [("user", question), ("assistant", answer)] * (1 + number % 3),
        "ends with a question": [("user", question), ("assistant", answer), ("user", "more")],
        "says marks": [("user", question), ("assistant", answer + marks)],
    }[kind]
    return [{"role": role, "content": content} for role, content in turns]


def text_of(messages: Sequence[dict[str, str]], template: str, eos: str) -> list[tuple[str, bool]]:
    """Return the parts of a conversation's text, and whether they are learned. `eos` ends a text."""
    found = []
    for message in messages:
        role, content = message["role"], message["content"]
        if template == "chatml":
            header, end = f"<|im_start|>{role}\n", "<|im_end|>\n"
        elif template == "with eos":
            header, end = ("", eos) if role == "assistant" else ("[", "]")
        else:
            header, end = f"<|{role}|>\n", "" if role == "assistant" else "\n"
        found += [(header, False), (content + end, role == "assistant")]
        if template == "none" and role == "assistant":
            found.append(("", True))  # an end of document
    return found


def tokens_of(parts: Sequence[tuple[str, bool]], eod: int, row: Row) -> tuple[list[int], list[bool]]:
    """Return the tokens of the text: marks, and bytes or characters; and which are learned."""
    tokens, learned = list[int](), list[bool]()
    for text, is_learned in parts:
        if row["tokenizer"] == "bytes":
            ids = [*text.encode()]
        else:
            pieces = [each for each in re.split(f"({'|'.join(map(re.escape, MARKS))})", text) if each]
            ids = []
            for piece in pieces:
                ids += [len(CHARACTERS) + MARKS.index(piece)] if piece in MARKS else map(CHARACTERS.index, piece)
        ids = [eod] if row["template"] == "none" and is_learned and not text else ids
        tokens += ids
        learned += [is_learned] * len(ids)
    return tokens, learned


def tokenizer_of(row: Row, folder: Path) -> tuple[Tokenizer, str]:
    """Return a tokenizer, and the text that it takes for the end of one."""
    if row["tokenizer"] == "bytes":
        return ByteTokenizer(), "</s>"
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens(list(MARKS))
    made.save(str(folder / "tokenizer.json"))
    eos = MARKS[2] if "turn" in row["tokenizer"] else MARKS[0]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return named_tokenizer("HuggingFaceTokenizer", str(folder)), eos


def shown(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


ROWS = covering_array(FACTORS, possible, candidates=4)


@pytest.mark.parametrize("row", wide_except(ROWS, every_value_once(ROWS)), ids=shown)
def test_packed_conversations_are_those_by_hand(row: Row, tmp_path: Path) -> None:
    tokenizer, eos = tokenizer_of(row, tmp_path)
    talks = [conversation(row["talk"], number) for number in range(row["conversations"])]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in talks))
    template = {"none": None, "chatml": CHATML, "with eos": WITH_EOS}[row["template"]]
    expected = []
    for messages in talks:
        tokens, learned = tokens_of(text_of(messages, row["template"], eos), tokenizer.eod, row)
        tokens, learned = tokens[: row["length"] + 1], learned[: row["length"] + 1]
        expected.append((tuple(tokens[:-1]), tuple(tokens[1:]), tuple(map(float, learned[1:]))))
    wanted = Counter({each: row["epochs"] * count for each, count in Counter(expected).items()})
    places = sum(len(inputs) for inputs, _, _ in expected) * row["epochs"]
    options: dict[str, Any] = {"data_cache_path": str(tmp_path / "cache")} if row["cached"] else {}
    data = DataConfig(seq_length=row["length"], data_path=(str(path),), split="1", **options)
    for _ in range(1 + row["cached"]):  # the second time from the cache
        given = None if template is None else ChatTemplate(template, {"eos_token": eos})
        number = -(-places // row["length"])
        train, *_ = build_sft_datasets(data, Samples(number, 0, 0), row["seed"], tokenizer, given)
        assert train is not None
        seen = Counter[Any]()
        for sample in range(len(train)):
            if seen.total() >= wanted.total():
                break
            fields = train[sample]
            documents, padding = fields["document_ids"], fields["padding"]
            assert documents is not None
            assert len(documents) == row["length"]
            assert (np.diff(documents) >= 0).all()
            is_padding = np.zeros(len(documents), bool) if padding is None else padding
            for document in range(documents.max() + 1):
                here = documents == document
                assert fields["positions"][here].tolist() == list(range(here.sum()))
                if is_padding[here].all():
                    assert not fields["loss_mask"][here].any()
                    continue
                assert not is_padding[here].any()
                seen[tuple(tuple(fields[name][here].tolist()) for name in ("tokens", "labels", "loss_mask"))] += 1
        assert set(seen) == set(wanted)
        assert all(count >= wanted[each] // row["epochs"] for each, count in seen.items())
