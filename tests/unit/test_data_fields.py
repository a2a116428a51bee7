"""Masks and positions, and mock data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.fields import FieldsDataset
from megalite.data.mock_dataset import MockDataset


def test_fields_by_hand() -> None:
    eod = 9
    fields = FieldsDataset([np.array([9, 1, 2, 9, 9, 3, 4, 9])], eod, True, True, True)[0]
    assert fields["tokens"].tolist() == [9, 1, 2, 9, 9, 3, 4]
    assert fields["labels"].tolist() == [1, 2, 9, 9, 3, 4, 9]
    assert fields["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert fields["positions"].tolist() == [0, 0, 1, 2, 0, 0, 1]
    assert fields["document_ids"] is not None
    assert fields["document_ids"].tolist() == [0, 1, 1, 1, 2, 3, 3]


def test_without_flags_documents_do_not_show() -> None:
    fields = FieldsDataset([np.array([1, 9, 2, 3])], 9)[0]
    assert fields["loss_mask"].tolist() == [1, 1, 1]
    assert fields["positions"].tolist() == [0, 1, 2]
    assert fields["document_ids"] is None
    assert fields["loss_mask"].dtype == np.float32
    assert fields["positions"].dtype == np.int64


@pytest.mark.parametrize(
    ("tokens", "padding"),
    [
        ([1, 2, 3, 4], None),
        ([1, 2, 7, 7], [False, False, True]),
        ([1, 7, 3, 7], None),
        ([7, 7, 7, 7], [True, True, True]),
        ([7, 7, 1, 7], None),
    ],
)
def test_padding_is_what_fills_up_the_end(tokens: list[int], padding: list[bool] | None) -> None:
    """The last token is only a label, so it is no padding of the inputs."""
    found = FieldsDataset([np.array(tokens)], 9, pad=7)[0]["padding"]
    assert (None if found is None else found.tolist()) == padding
    assert FieldsDataset([np.array(tokens)], 9)[0]["padding"] is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.booleans(), st.booleans())
def test_positions_count_from_the_start_of_the_document_and_attention_stays_in_it_each_where_asked(
    tokens: list[int], positions: bool, attention: bool
) -> None:
    fields = FieldsDataset([np.array(tokens)], 0, positions, attention)[0]
    position, document = 0, 0
    assert (fields["document_ids"] is not None) == attention
    for i, token in enumerate(tokens[:-1]):
        assert fields["positions"][i] == (position if positions else i)
        assert fields["document_ids"] is None or fields["document_ids"][i] == document
        position, document = (0, document + 1) if token == 0 else (position + 1, document)


@settings(deadline=None)
@given(st.integers(2, 50), st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 2**40 - 1), st.data())
def test_mock_samples_are_a_pure_function_within_the_vocabulary(
    vocab_size: int, sequence_length: int, seed: int, sample: int, data: st.DataObject
) -> None:
    eod = data.draw(st.none() | st.integers(0, vocab_size - 1))
    tokens = MockDataset(vocab_size, sequence_length, seed, 2**40, eod)[sample]
    assert tokens.shape == (sequence_length + 1,)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    assert np.array_equal(tokens, MockDataset(vocab_size, sequence_length, seed, 2**41, eod)[sample])


def test_mock_samples_differ_by_seed_stream_and_sample() -> None:
    one = MockDataset(100, 64, seed=1, num_samples=10)
    others = [one[1], MockDataset(100, 64, 2, 10)[0], MockDataset(100, 64, 1, 10, stream=1)[0]]
    assert not any(np.array_equal(one[0], other) for other in others)


def test_mock_samples_are_fixed_for_ever() -> None:
    assert MockDataset(100, 15, seed=1, num_samples=1)[0].tolist() == [10, 99, 23, 99, *range(28, 40)]


def test_mock_data_can_be_learnt_and_has_documents() -> None:
    few = np.concatenate([MockDataset(5, 64, seed=1, num_samples=20)[sample] for sample in range(20)])
    assert set(few.tolist()) == {0, 1, 2, 3, 4}
    dataset = MockDataset(1000, 256, seed=1234, num_samples=50)
    tokens = np.stack([dataset[i] for i in range(50)])
    follows = tokens[:, 1:] == tokens[:, :-1] + 1
    assert 0.8 < follows.mean() < 0.95
    documents = (tokens == 999).sum(axis=1)
    assert 2 < documents.mean() < 6
    assert len(np.unique(tokens)) > 900
    with pytest.raises(IndexError):
        dataset[50]
