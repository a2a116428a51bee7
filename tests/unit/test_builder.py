"""Parts of a run that depend on the flags and on the pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.config import parse_arguments, resolve
from megalite.data.fields import SampleFields
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient
from megalite.training.builder import data_parallel, gradient_dtype, gradient_notes, make_stages
from megalite.training.data import global_batch_size, last_iteration, order_notes, seen_samples

SIZES = "--pp 2 --num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 --lr 1"


TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"


@pytest.mark.parametrize(
    ("flags", "overlaps"),
    [
        ("", False),
        ("--overlap-grad-reduce", True),
        (TWO_CHUNKS, False),  # the list says when: aligned over the pipeline's ranks
        (f"{TWO_CHUNKS} --no-align-grad-reduce", True),
        ("--overlap-grad-reduce --pipeline-schedule zb-v", True),
        (f"{TWO_CHUNKS} --data-parallel-sharding-strategy optim", False),
        (f"{TWO_CHUNKS} --data-parallel-sharding-strategy optim_grads", True),
        (f"{TWO_CHUNKS} --data-parallel-sharding-strategy optim_grads_params", True),
    ],
)
def test_what_reduces_inside_backward(flags: str, overlaps: bool) -> None:
    """Reductions after every micro-batch, and on a V, need no alignment."""
    config = parse_arguments(f"{SIZES} {flags}".split()).config
    assert data_parallel(config, ParallelMesh(), make_stages(config)).overlap_reduce is overlaps


@pytest.mark.parametrize(
    ("length", "at", "last"),
    [
        ("--train-iters 7", (0, 0), 7),
        ("--train-iters 7", (5, 20), 7),
        ("--train-samples 15", (0, 0), 3),  # the last three samples are less than a step
        ("--train-samples 16", (0, 0), 4),
        ("--train-samples 15", (1, 4), 3),
        ("--train-samples 15", (5, 6), 7),  # whose steps were smaller before
        ("--train-samples 15", (5, 14), 5),
        ("--train-samples 15 --rampup-batch-size 2 2 4", (0, 0), 4),  # of 2, 2, 4, 4 and what is left
        ("--train-samples 15 --step-batch-size-schedule 0:2,16:4", (0, 0), 4),  # of 2, 2 (16 tokens), 4, 4
        ("--train-samples 15 --step-batch-size-schedule 0:4,16:2,32:4", (0, 0), 4),  # of 4, 2, 2, 4 and what is left
    ],
)
def test_the_last_step_is_the_last_whole_one(length: str, at: tuple[int, int], last: int) -> None:
    config = parse_arguments(f"{SIZES} --global-batch-size 4 {length}".split()).config
    assert last_iteration(config, global_batch_size(config), *at) == last


class Rows:
    """Samples of one token each."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, sample: int) -> SampleFields:
        row = np.array([self.tokens[sample]])
        return SampleFields(tokens=row, labels=row, loss_mask=row, positions=row, document_ids=None, padding=None)


def test_other_data_than_those_of_a_checkpoint_are_told() -> None:
    """The check uses samples spread over all consumed ones, including the first."""
    rows = list(range(100))
    seen = seen_samples(Rows(rows), 64)
    assert [number for number, _ in seen] == list(range(0, 64, 4))
    assert [number for number, _ in seen_samples(Rows(rows), 3)] == [0, 1, 2]
    assert seen_samples(Rows(rows), 0) == []
    assert order_notes(Rows(rows), seen) == ()
    assert order_notes(Rows(rows[:64]), seen) == ()
    for place in (0, 32, 60):
        other = order_notes(Rows([*rows[:place], -1, *rows[place + 1 :]]), seen)
        assert f"sample {place}," in str(other)
    assert "sample 60," in str(order_notes(Rows(rows[:60]), seen))


def test_sizes_of_batches_follow_the_schedule() -> None:
    """Thresholds are in tokens, rounded down to samples of 4 tokens; a batch has the size of where it starts."""
    schedule = "0:4 0.04K:12,0.1K:2"
    other = "--train-samples 100 --mock-data --tokenizer-type ByteTokenizer --use-rotary-position-embeddings"
    flags = [*SIZES.replace("--pp 2", "").split(), *other.split()]
    config = parse_arguments([*flags, "--step-batch-size-schedule", schedule]).config
    config = resolve(config, 1)
    assert config.training.global_batch_size == 2
    batch_size = global_batch_size(config)
    assert batch_size.sizes == [2, 4, 12]
    assert [batch_size.at(samples) for samples in (0, 4, 9, 10, 24, 25, 99)] == [4, 4, 4, 12, 12, 2, 2]
    assert last_iteration(config, batch_size) == 3 + 2 + 32  # to 12 samples by fours, to 36 by twelves, to 100 by twos


@pytest.mark.parametrize("flags", ["--grad-reduce-in-bf16", "--use-precision-aware-optimizer --main-grads-dtype bf16"])
def test_sums_that_bf16_has_no_room_for_are_told(flags: str) -> None:
    config = parse_arguments(f"{SIZES} --bf16 {flags}".split()).config
    assert gradient_notes(config, 256) == ()
    (note,) = gradient_notes(config, 1024)
    assert "gradients of 1024 micro-batches in bf16" in note
    total = torch.zeros(1, dtype=gradient_dtype(config))
    for _ in range(1024):
        DenseGradient(torch.ones(1)).add_to(total, overwrite=False)
    assert f"Up to {1 - total.item() / 1024:.0%} of a gradient is lost" in note
    assert gradient_notes(parse_arguments(f"{SIZES} --bf16".split()).config, 1024) == ()
