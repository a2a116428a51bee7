"""Micro-batches of a step: put together from the parts of ranks, or read from the data that the flags name."""

from __future__ import annotations

import pytest
import torch

from megalite.errors import DataError
from megalite.extras.verify.batches import from_data, from_trace
from megalite.extras.verify.command import read_command
from megalite.extras.verify.trace import LAST, RecordedBatch, Trace

pytestmark = pytest.mark.extra

TOKENS = torch.arange(32).view(2, 16)
PARTS = {  # as Megatron-LM cuts a sample: rank r of C has the chunks r and 2C - 1 - r
    0: torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]),
    1: torch.tensor([4, 5, 6, 7, 8, 9, 10, 11]),
}


def of_context_parallel_ranks() -> Trace:
    trace = Trace("", "a test", 1, {rank: {"cp": (rank, 2), "dp": (0, 1)} for rank in PARTS})
    for rank, places in PARTS.items():
        tokens = TOKENS[:, places]
        trace.batches.append(RecordedBatch(rank, 0, tokens, labels=tokens + 1, positions=places.expand(2, -1)))
    return trace


def test_the_parts_of_context_parallel_ranks_are_put_in_their_places() -> None:
    found = from_trace(of_context_parallel_ranks())
    assert found is not None
    (arrays,) = found.arrays
    assert arrays["tokens"].tolist() == TOKENS.tolist()
    assert arrays["labels"].tolist() == (TOKENS + 1).tolist()
    assert arrays["positions"].tolist() == [list(range(16))] * 2
    assert found.numbers == {(0, 0): 0, (0, LAST): 0}


def test_a_missing_part_of_a_sample_is_said() -> None:
    trace = of_context_parallel_ranks()
    del trace.batches[1]
    with pytest.raises(DataError, match="no rank with place 1 of 2 on axis cp"):
        from_trace(trace)


def test_ranks_that_should_have_the_same_tokens_and_have_others_are_said() -> None:
    trace = Trace("", "a test", 1, {rank: {"tp": (rank, 2), "dp": (0, 1)} for rank in range(2)})
    trace.batches += [RecordedBatch(rank, 0, TOKENS + rank) for rank in range(2)]
    with pytest.raises(DataError, match="ranks 0 and 1"):
        from_trace(trace)


def test_without_labels_they_are_the_next_tokens_and_the_last_one_counts_nowhere() -> None:
    trace = Trace("", "a test", 1)
    trace.batches.append(RecordedBatch(0, 0, TOKENS))
    found = from_trace(trace)
    assert found is not None
    (arrays,) = found.arrays
    assert arrays["labels"][:, :-1].tolist() == TOKENS[:, 1:].tolist()
    assert arrays["loss_mask"].tolist() == [[1.0] * 15 + [0.0]] * 2


def test_labels_below_zero_count_nowhere() -> None:
    trace = Trace("", "a test", 1)
    trace.batches.append(RecordedBatch(0, 0, TOKENS, labels=torch.where(TOKENS % 3 == 0, -100, TOKENS)))
    found = from_trace(trace)
    assert found is not None
    assert (found.arrays[0]["loss_mask"] == (TOKENS % 3 != 0).numpy()).all()


def test_ranks_without_a_place_are_taken_as_data_parallel_and_this_is_said() -> None:
    trace = Trace("", "a test", 1)
    trace.batches += [RecordedBatch(rank, number, TOKENS + rank) for rank in range(2) for number in range(3)]
    found = from_trace(trace)
    assert found is not None
    assert (found.replicas, found.per_rank, found.whole) == (2, 3, True)
    assert "data-parallel" in found.notes[0]


COMMAND = """pretrain_gpt.py --num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 100 --mock-data
    --tokenizer-type NullTokenizer --seq-length 8 --max-position-embeddings 8 --micro-batch-size 2
    --global-batch-size 12 --lr 1e-3 --train-iters 4 --eval-iters 0"""


def test_the_data_give_each_data_parallel_rank_its_micro_batches_of_the_step() -> None:
    command = read_command(" ".join(COMMAND.split()), ranks=2)
    found = from_data(command, 3)
    assert (found.replicas, found.per_rank, found.whole) == (2, 3, True)
    # Samples 24 to 35, two at a time, dealt to the two ranks in turn.
    assert [list(each["sample_ids"]) for each in found.arrays] == [
        [24, 25], [28, 29], [32, 33], [26, 27], [30, 31], [34, 35],
    ]  # fmt: skip
    assert found.numbers[1, 0] == 3
    assert found.numbers[1, LAST] == 5
    last = from_data(command, 3, most=1)
    assert [list(each["sample_ids"]) for each in last.arrays] == [[32, 33], [34, 35]]
    assert (last.numbers, last.whole) == ({(0, 2): 0, (0, LAST): 0, (1, 2): 1, (1, LAST): 1}, False)
