"""Pairs of responses: which labels count, how pairs are packed and numbered, and what is left out or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config import DataConfig
from megalite.data.chat import ChatTemplate
from megalite.data.datasets import Samples
from megalite.data.fields import SampleFields
from megalite.data.index_cache import IndexCache
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import DataError
from megalite.extras.post_training.pairs import PairFile, build_pair_datasets, open_pairs

ASKED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Sure?"},
]
YES, NO = [{"role": "assistant", "content": "Yes."}], [{"role": "assistant", "content": "No!"}]
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def opened(path: str, length: int = 64, template: str | None = None) -> PairFile:
    chat = None if template is None else ChatTemplate(template, {})
    return PairFile(path, ByteTokenizer(), chat, length, 1, IndexCache())


def texts(fields: SampleFields) -> dict[int, tuple[str, str]]:
    """Return the text of each response of a sample, and of the inputs of its document, by its number."""
    found, eod = {}, ByteTokenizer().eod
    documents = fields["document_ids"]
    assert documents is not None
    for number in set(fields["responses"].tolist()) - {-1}:
        here = fields["responses"] == number
        assert fields["loss_mask"][here].all()
        (document,) = set(documents[here].tolist())
        labels, inputs = fields["labels"][here], fields["tokens"][documents == document]
        found[number] = tuple(bytes(int(t) for t in part if t != eod).decode() for part in (labels, inputs))
    return found


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": YES, "rejected": NO},
        {"chosen": ASKED + YES, "rejected": ASKED + NO, "score_chosen": 9.0, "messages": ASKED + YES},
        {"prompt": "Sure?", "chosen": ASKED + YES, "rejected": ASKED + NO, "prompt_id": "x"},
    ],
)
def test_messages_of_every_shape_are_the_same_pair(record: dict[str, Any], tmp_path: Path) -> None:
    file = opened(write(tmp_path / "a.jsonl", record), 128, CHATML)
    begun = "<user>1+1?</><assistant>2</><user>Sure?</><assistant>"
    found = texts(file.dataset(range(1), None)[0])
    assert {number: response for number, (response, _) in found.items()} == {0: "Yes.</>", 1: "No!</>"}
    assert [whole.startswith(begun) for _, whole in found.values()] == [True, True]


def test_each_pair_stands_once_in_an_epoch_and_whole_in_one_sample(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}:", "chosen": "a" * (1 + n % 7), "rejected": "b" * (n % 5)} for n in range(60)]
    records[4] = {"prompt": "long", "chosen": "a" * 30, "rejected": "b" * 30}
    files = [write(tmp_path / f"{name}.jsonl", *part) for name, part in (("a", records[:20]), ("b", records[20:]))]
    data = DataConfig(seq_length=64, tokenizer_type="ByteTokenizer", preference_data=("1", files[1], "1", files[0]))
    first, second = open_pairs(data, 1, ByteTokenizer(), None).values()
    assert (first.first, second.first) == (0, 40)
    assert first.notes() == [f"{files[0]}: 1 of 20 pairs are longer than --seq-length 64 and are left out"]
    seen = dict[int, str]()
    for file in (first, second):
        dataset = file.dataset(range(len(file.pairs)), None)
        for sample in range(len(dataset)):
            found = texts(dataset[sample])
            assert {number ^ 1 for number in found} == found.keys()
            assert not seen.keys() & found.keys()
            seen |= {number: response for number, (response, _) in found.items()}
    assert seen == {
        2 * n + side: record[name]
        for n, record in enumerate(records)
        for side, name in enumerate(("chosen", "rejected"))
        if n != 4
    }


def test_a_split_shares_out_the_pairs_that_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": f"{n:3}", "chosen": "a" * 20, "rejected": "b"} for n in range(10)))
    data = DataConfig(seq_length=32, tokenizer_type="ByteTokenizer", preference_data=(path,), split="80,20,0")
    found = build_pair_datasets(data, Samples(8, 2, 0), 1, ByteTokenizer(), None)
    numbers = [
        {int(n) for sample in range(count) for n in dataset[sample]["responses"] if n >= 0}
        for dataset, count in ((found.train, 8), (found.valid, 2))
        if dataset is not None
    ]
    assert numbers == [set(range(16)), set(range(16, 20))]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], 'line 1 is not a conversation: a pair has a "prompt", a "chosen" and'),
        ([{"chosen": "b", "rejected": "c"}], "texts, or lists of messages"),
        ([{"prompt": "a", "chosen": "b", "rejected": NO}], "texts, or lists of messages"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c", "weight": 2}], "it has the field 'weight'"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"}], 'it has "completion" beside "chosen"'),
        ([{"prompt": ["a"], "chosen": YES, "rejected": NO}], "a message has no"),
        (
            [{"prompt": "a", "chosen": "b" * 240, "rejected": "c"}],
            "no pair to train on: of 1, 1 are longer than --seq-length 200 (the shortest has 243 tokens)",
        ),
        ([{"chosen": ASKED + YES, "rejected": ASKED + YES}], "of 1, 1 have two equal responses"),
        ([{"prompt": "a", "chosen": "b", "rejected": "b"}], "of 1, 1 have two equal responses"),
        ([{"chosen": YES, "rejected": YES + NO}], "of 1, 1 have a response without an answer of its own"),
    ],
)
def test_what_is_no_pair_is_one_line(records: Sequence[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r".*") as caught:
        opened(write(tmp_path / "a.jsonl", *records), 200)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_response_that_the_other_begins_with_is_left_out(tmp_path: Path) -> None:
    alike = {"chosen": ASKED + YES, "rejected": ASKED + YES + NO}
    file = opened(write(tmp_path / "a.jsonl", alike, {"prompt": "a", "chosen": "b", "rejected": "c"}), 200)
    assert file.pairs.tolist() == [1]
    assert file.notes() == [f"{file.path}: 1 of 2 pairs have a response without an answer of its own and are left out"]
    assert np.array_equal(np.unique(file.dataset(range(1), None)[0]["responses"]), [-1, 2, 3])


def test_equal_responses_are_left_out_and_texts_of_which_one_begins_with_the_other_are_not(tmp_path: Path) -> None:
    """The ends of these differ: one goes on where the other one's document ends."""
    same = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"chosen": ASKED + YES, "rejected": ASKED + YES}]
    begun = {"prompt": "a", "chosen": "b", "rejected": "bc"}
    file = opened(write(tmp_path / "a.jsonl", *same, begun), 200)
    assert file.notes() == [f"{file.path}: 2 of 3 pairs have two equal responses and are left out"]
    fields = file.dataset(range(1), None)[0]
    eod = ByteTokenizer().eod
    labels = [fields["labels"][fields["responses"] == number].tolist() for number in (4, 5)]
    assert labels == [[ord("b"), eod], [ord("b"), ord("c"), eod]]
