"""Weights of tokens in the loss: by source of a blend, and by role of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.data import DataConfig, data_problems
from megalite.config.loss_weights import loss_weights
from megalite.data.chat import ChatTemplate, Span, conversation_reader
from megalite.data.datasets import Datasets, Samples
from megalite.data.fields import SampleFields
from megalite.data.loader import MicroBatchLoader
from megalite.data.loss_weights import WeightedDataset, weighted_roles, weights_of_roles, weights_of_sources
from megalite.data.sampler import equal_deal
from megalite.data.sft_dataset import build_sft_datasets
from megalite.data.sources import SourceTokens
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.errors import ConfigurationError

TALK = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
CHATML = (
    "{% for message in messages %}\n<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLEND = SourceTokens(np.array([0, 1, 2, 0], np.int16), ["x/web", "y/code", "x/web"], 8)


# ---------------------------------------------------------------------------------------------------- flags


def test_weights_are_read_by_their_names() -> None:
    assert loss_weights(["web=0.5", "a=b=2", "x/y=0"]) == {"web": 0.5, "a=b": 2.0, "x/y": 0.0}


@pytest.mark.parametrize(
    ("given", "flags", "problem"),
    [
        (("web",), {}, "--loss-weights 'web': give NAME=WEIGHT with a finite weight of at least 0, as in web=0.5"),
        (("web=-1",), {}, "--loss-weights 'web=-1': give NAME=WEIGHT"),
        (("web=nan",), {}, "--loss-weights 'web=nan': give NAME=WEIGHT"),
        (("web=inf",), {}, "--loss-weights 'web=inf': give NAME=WEIGHT"),
        (("=1",), {}, "--loss-weights '=1': give NAME=WEIGHT"),
        (("a=1", "a=2"), {}, "--loss-weights gives 'a' twice: keep one of the two"),
        (("assistant=0", "user=0"), {"sft": True}, "--loss-weights assistant=0 user=0: no role counts"),
        (("web=2",), {"mock_data": True, "data_path": ()}, "--mock-data has neither"),
    ],
)
def test_weights_that_cannot_be_meant_are_one_line(given: tuple[str, ...], flags: Any, problem: str) -> None:
    data = DataConfig(**({"seq_length": 8, "data_path": ("x",), "loss_weights": given} | flags))
    (line,) = data_problems(data)
    assert problem in line


def test_sources_are_named_as_in_records_or_by_their_prefix() -> None:
    assert weights_of_sources({"web": 0.5}, BLEND).tolist() == [0.5, 1.0]
    assert weights_of_sources({"y/code": 0.0}, BLEND).tolist() == [1.0, 0.0]
    with pytest.raises(ConfigurationError, match=r"math=2: no source .* called 'math': they are web, code$"):
        weights_of_sources({"math": 2.0}, BLEND)
    with pytest.raises(ConfigurationError, match="web=0 code=0: no source counts, so nothing would be learned"):
        weights_of_sources({"web": 0.0, "code": 0.0}, BLEND)
    with pytest.raises(ConfigurationError, match="web=2: the training data have one source"):
        weights_of_sources({"web": 2.0}, None)


# ---------------------------------------------------------------------------------------------------- conversations


def spans(record: Mapping[str, Any], roles: Sequence[str], template: str | None) -> list[Span]:
    with conversation_reader(None if template is None else ChatTemplate(template, {}), roles) as reader:
        return reader(record)


def test_messages_of_each_role_are_told_apart_with_what_a_template_writes_around_them() -> None:
    found = spans({"messages": TALK}, ("assistant", "user"), CHATML)
    assert "".join(span.text for span in found) == spans({"messages": TALK}, (), CHATML)[0].text
    assert [(span.text, span.role) for span in found if span.role] == [
        ("<|im_start|>user\n1+1?<|im_end|>\n", "user"),
        ("2<|im_end|>\n", "assistant"),
        ("<|im_start|>user\n2+2?<|im_end|>\n", "user"),
        ("4<|im_end|>\n", "assistant"),
    ]
    first, *_ = spans({"messages": TALK}, ("assistant", "system"), "<s>" + CHATML)
    assert first == Span("")
    counting = "{{ messages | length }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="so what is said as 'system' cannot be found"):
        spans({"messages": TALK[:2]}, ("assistant", "system"), counting)


def test_without_a_template_a_message_has_its_header() -> None:
    silent = [TALK[1], TALK[2] | {"weight": 0}]
    assert spans({"messages": [*TALK[:3], *silent]}, ("assistant", "user"), None) == [
        Span("<|system|>\nCount.\n"),
        Span("<|user|>\n1+1?\n", "user"),
        Span("<|assistant|>\n"),
        Span("2", "assistant", ends=True),
        Span("<|user|>\n1+1?\n", "user"),
        Span("<|assistant|>\n"),
        Span("2", "", ends=True),
    ]
    assert spans({"prompt": "1+1=", "completion": "2"}, ("assistant", "user"), None)[0] == Span("1+1=", "user")


def build(folder: Path, records: Sequence[Any], given: Mapping[str, float]) -> Datasets[SampleFields]:
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(seq_length=96, data_path=(str(path),), split="1")
    return build_sft_datasets(data, Samples(2, 0, 0), 1, ByteTokenizer(), None, weighted_roles(given))


def test_labels_have_the_weight_of_their_role(tmp_path: Path) -> None:
    """Labels of a message of weight 0, and of no message, have none; the mask of an evaluation has answers."""
    given = {"user": 0.25, "system": 3.0}
    train, *_ = build(tmp_path, [{"messages": [*TALK[:3], TALK[1], TALK[2] | {"weight": 0}]}], given)
    assert train is not None
    weighted = WeightedDataset(train, weights_of_roles(given))
    assert len(weighted) == len(train)
    parts = ("<|system|>\nCount.\n", 3.0), ("<|user|>\n1+1?\n", 0.25), ("<|assistant|>\n", 0.0), ("2", 1.0), ("\0", 1.0)
    parts = *parts, ("<|user|>\n1+1?\n", 0.25), ("<|assistant|>\n", 0.0), ("2", 0.0), ("\0", 0.0)
    wanted = [weight for text, weight in parts for _ in text][1:]  # the first token is no label
    for row in range(2):
        mask = weighted[row]["loss_mask"]
        assert mask.dtype == np.float64
        assert mask.tolist() == wanted + [0.0] * (96 - len(wanted))
        assert train[row]["loss_mask"].tolist() == [float(weight == 1.0) for weight in mask]


def test_neighbouring_messages_keep_their_weights(tmp_path: Path) -> None:
    given = {"user": 0.5, "assistant": 2.0}
    train, *_ = build(tmp_path, [{"prompt": "ab", "completion": "cd"}], given)
    assert train is not None
    mask = WeightedDataset(train, weights_of_roles(given))[0]["loss_mask"]
    assert mask[:5].tolist() == [0.5, 2.0, 2.0, 2.0, 0.0]


def test_a_role_that_nobody_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has a weight for 'tool', and no message is of this role"):
        build(tmp_path, [{"messages": TALK}], {"user": 1.0, "tool": 0.5})


def test_weights_need_no_other_cache_than_their_roles(tmp_path: Path) -> None:
    build(tmp_path, [{"messages": TALK}], {"user": 0.5})
    before = set((tmp_path / "cache").iterdir())
    build(tmp_path, [{"messages": TALK}], {"user": 0.25})
    assert set((tmp_path / "cache").iterdir()) == before


# ---------------------------------------------------------------------------------------------------- a blend


class Ones:
    """Samples whose labels count but for the first one."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, sample: int) -> SampleFields:
        row = np.full(3, sample)
        mask = np.array([0.0, 1.0, 1.0], np.float32)
        return SampleFields(tokens=row, labels=row, loss_mask=mask, positions=row, document_ids=None, padding=None)


def test_weights_of_sources_are_factors_of_the_mask() -> None:
    weighted = WeightedDataset(Ones(), np.array([0.1, 3.0]), BLEND)
    loader = MicroBatchLoader(
        weighted, micro_batch_size=4, vocab_size=5, sources=BLEND, byte_lengths=np.array([0, 1, 2, 3, 4])
    )
    (batch,) = loader.micro_batches(0, equal_deal(0, 1, 1))
    assert batch["loss_mask"].tolist() == [[0.0, weight, weight] for weight in (0.1, 3.0, 0.1, 0.1)]
    assert batch["sources"] is not None
    assert batch["sources"].tolist() == [0, 1, 0, 0]
    assert batch["text_bytes"] is not None
    assert batch["text_bytes"].tolist() == [[sample] * 3 for sample in range(4)]
