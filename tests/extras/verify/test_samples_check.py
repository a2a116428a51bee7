"""Recorded batches are the samples of their step, or it is said which samples they are instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.errors import DataError
from megalite.extras.verify.batches import consumed_before
from megalite.extras.verify.command import Command
from megalite.extras.verify.samples_check import SamplesCheck, check_samples
from megalite.extras.verify.trace import LAST, RecordedBatch
from megalite.extras.verify.truth import open_data_of
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.extras.verify.recorded_run import NETWORK, TRAINING, command_of
from tests.harness.token_files import add_document

pytestmark = pytest.mark.extra

LENGTH, EOD, SIZE, BATCH, STEP = 16, 63, 2, 8, 3
"""Tokens of a sample; samples of a micro-batch, and of a step; number of the step."""
CONSUMED = (STEP - 1) * BATCH
MASKS = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
Number = Callable[[int, int, int], int]
"""Function from a data-parallel rank, a micro-batch and a row in it to the number of a sample."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write documents of random tokens, and return their prefix."""
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in random.randint(3, 30, size=200):
            add_document(writer, [*random.randint(0, EOD, size=length).tolist(), EOD])
        writer.finish()
    return prefix


def command(tokens: Path, flags: str = MASKS, ranks: int = 2) -> Command:
    data = f"--data-path {tokens} --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 63 --seq-length {LENGTH}"
    return command_of(f"{NETWORK} {TRAINING} {data} --max-position-embeddings {LENGTH} {flags}", ranks, "megatron")


def dealt(rank: int, micro_batch: int, row: int, ranks: int = 2) -> int:
    """Return the sample that Megatron-LM gives: micro-batches of consecutive samples, which ranks take in turns."""
    return CONSUMED + (micro_batch * ranks + rank) * SIZE + row


def recorded(dataset: Dataset[SampleFields], number: Number = dealt, ranks: int = 2) -> list[RecordedBatch]:
    """Return the batches of a step, with these samples."""

    def batch(rank: int, micro_batch: int) -> RecordedBatch:
        rows = [dataset[number(rank, micro_batch, row)] for row in range(SIZE)]

        def stack(name: str) -> Tensor | None:
            arrays = [row[name] for row in rows]  # type: ignore[literal-required]  # a field of samples
            return None if arrays[0] is None else torch.from_numpy(np.stack(arrays))

        found = stack("tokens")
        assert found is not None
        fields: dict[str, Any] = {name: stack(name) for name in ("labels", "loss_mask", "positions", "document_ids")}
        return RecordedBatch(rank, micro_batch, found, **fields)

    return [batch(rank, each) for rank in range(ranks) for each in range(BATCH // SIZE // ranks)]


def places(ranks: int = 2) -> Mapping[int, Mapping[str, tuple[int, int]]]:
    return {rank: {"dp": (rank, ranks), "cp": (0, 1)} for rank in range(ranks)}


def check(tokens: Path, batches: list[RecordedBatch], flags: str = MASKS) -> SamplesCheck:
    return check_samples(command(tokens, flags), batches, places(), CONSUMED)


def data(tokens: Path, flags: str = MASKS) -> Dataset[SampleFields]:
    return open_data_of(command(tokens, flags)).train


def test_right_batches_are_not_accused(tokens: Path) -> None:
    found = check(tokens, recorded(data(tokens)))
    assert (found.samples, found.findings) == (BATCH, ())
    bare = [
        replace(each, labels=None, loss_mask=None, positions=None, document_ids=None) for each in recorded(data(tokens))
    ]
    assert not check(tokens, bare).findings
    numbered = [
        replace(each, document_ids=None if each.document_ids is None else each.document_ids + 7)
        for each in recorded(data(tokens))
    ]
    assert not check(tokens, numbered).findings  # only which tokens share a document counts


def test_the_samples_of_a_step_follow_from_its_number(tokens: Path) -> None:
    one = command(tokens)
    assert consumed_before(one, STEP) == CONSUMED
    growing = replace(one.config.training, rampup_batch_size=(4, 4, 16))
    ramp = replace(one, config=replace(one.config, training=growing))
    assert [consumed_before(ramp, step) for step in range(1, 7)] == [0, 4, 8, 12, 16, 24]


def test_parts_of_samples_and_the_last_micro_batch_alone(tokens: Path) -> None:
    """Context-parallel rank r of C has the chunks r and 2C - 1 - r of 2C."""
    two = command(tokens, f"{MASKS} --context-parallel-size 2", ranks=2)
    batches = []
    for rank in range(2):
        whole = recorded(data(tokens), lambda dp, each, row: CONSUMED + each * SIZE + row, ranks=1)[-1]
        own = torch.cat([torch.arange(at * 4, at * 4 + 4) for at in (rank, 3 - rank)])
        cut = {
            name: getattr(whole, name)[:, own]
            for name in ("tokens", "labels", "loss_mask", "positions", "document_ids")
        }
        batches.append(RecordedBatch(rank, LAST, **cut))
    axes = {rank: {"dp": (0, 1), "cp": (rank, 2)} for rank in range(2)}
    assert not check_samples(two, batches, axes, CONSUMED).findings
    swapped = check_samples(two, [replace(batches[0], rank=1), replace(batches[1], rank=0)], axes, CONSUMED)
    assert len(swapped.findings) == 2 * SIZE


OTHERS: dict[str, tuple[str, Number]] = {
    "rank 0": ("all data-parallel ranks have the samples of rank 0", lambda rank, each, row: dealt(0, each, row)),
    "blocks": (
        "each data-parallel rank has consecutive samples",
        lambda rank, each, row: CONSUMED + rank * 4 + each * SIZE + row,
    ),
    "single": (
        "take turns with single samples",
        lambda rank, each, row: CONSUMED + (each * SIZE + row) * 2 + rank,
    ),
    "first": ("each micro-batch has the samples of the first one", lambda rank, each, row: dealt(rank, 0, row)),
    "next step": ("they are those of 1 step later", lambda rank, each, row: dealt(rank, each, row) + BATCH),
    "earlier": ("they are those of 1 step before", lambda rank, each, row: dealt(rank, each, row) - BATCH),
    "anew": ("it has begun again", lambda rank, each, row: dealt(rank, each, row) - CONSUMED),
    "late": ("they are 3 samples further on", lambda rank, each, row: dealt(rank, each, row) + 3),
    "reversed": (
        "samples of this step, dealt in another way",
        lambda rank, each, row: 2 * CONSUMED + BATCH - 1 - dealt(rank, each, row),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_samples_are_recognized(tokens: Path, case: str) -> None:
    said, number = OTHERS[case]
    found = check(tokens, recorded(data(tokens), number))
    assert found.findings
    assert said in found.explanation
    for each in found.findings:
        assert each.field == "tokens"
        assert each.found == number(each.rank, each.micro_batch, each.row)
        assert each.expected == dealt(each.rank, each.micro_batch, each.row)


def test_data_without_the_shuffle_are_recognized(tokens: Path) -> None:
    dataset = data(tokens)
    order: Any = dataset.tokens.shuffle_index.tolist()  # type: ignore[attr-defined]  # a GPTDataset
    found = check(tokens, recorded(dataset, lambda *place: order.index(dealt(*place))))
    assert found.explanation == "samples are read without the shuffle"


@pytest.mark.parametrize("seed", [1235, 42])
def test_another_seed_is_recognized(tokens: Path, seed: int) -> None:
    found = check(tokens, recorded(data(tokens, f"{MASKS} --seed {seed}")))
    assert found.explanation == f"they are those of --seed {seed}, not 1234"


def test_foreign_samples_are_said(tokens: Path) -> None:
    batches = [replace(each, tokens=torch.zeros_like(each.tokens)) for each in recorded(data(tokens))]
    found = check(tokens, batches)
    assert len(found.findings) == BATCH
    assert "no samples of these data" in found.explanation
    assert {each.found for each in found.findings} == {None}


def moved(values: Tensor | None, by: int) -> Tensor:
    assert values is not None
    return values.roll(by, 1)


FIELDS: dict[str, tuple[str, str, Callable[[RecordedBatch], RecordedBatch]]] = {
    "not shifted": ("labels", "they are the inputs: not shifted", lambda each: replace(each, labels=each.tokens)),
    "twice": ("labels", "they are shifted by two", lambda each: replace(each, labels=moved(each.labels, -1))),
    "backward": ("labels", "they are shifted the other way", lambda each: replace(each, labels=moved(each.tokens, 1))),
    "all count": (
        "loss_mask",
        "--eod-mask-loss has no effect",
        lambda each: replace(each, loss_mask=torch.ones_like(each.tokens)),
    ),
    "positions": (
        "positions",
        "--reset-position-ids has no effect",
        lambda each: replace(each, positions=torch.arange(LENGTH).expand(SIZE, LENGTH)),
    ),
    "from 1": (
        "positions",
        "they count in whole samples from 1",
        lambda each: replace(each, positions=torch.arange(1, LENGTH + 1).expand(SIZE, LENGTH)),
    ),
    "documents": (
        "document_ids",
        "--reset-attention-mask has no effect",
        lambda each: replace(each, document_ids=torch.zeros_like(each.tokens)),
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_other_fields_are_recognized(tokens: Path, case: str) -> None:
    field, said, change = FIELDS[case]
    found = check(tokens, [change(each) for each in recorded(data(tokens))])
    assert found.findings
    assert {each.field for each in found.findings} == {field}
    assert {each.said for each in found.findings} == {said}


def test_flags_that_were_not_given_are_recognized(tokens: Path) -> None:
    found = check(tokens, recorded(data(tokens)), flags="")
    assert {(each.field, each.said) for each in found.findings} == {
        ("loss_mask", "--eod-mask-loss has an effect, and is not given"),
        ("positions", "--reset-position-ids has an effect, and is not given"),
        ("document_ids", "--reset-attention-mask has an effect, and is not given"),
    }


def test_tokens_moved_within_a_sample_are_recognized(tokens: Path) -> None:
    batches = [replace(each, tokens=each.labels) for each in recorded(data(tokens)) if each.labels is not None]
    assert check(tokens, batches).explanation == "the sample begins one token late"
    first = torch.full((SIZE, 1), 5)
    batches = [replace(each, tokens=torch.cat([first, each.tokens[:, :-1]], 1)) for each in recorded(data(tokens))]
    assert check(tokens, batches).explanation == "the token 5 was put before the sample"


def test_a_step_behind_the_data_is_refused(tokens: Path) -> None:
    with pytest.raises(DataError, match="fewer than the step needs"):
        check_samples(command(tokens), recorded(data(tokens)), places(), 10**6)
    batches = [replace(each, micro_batch=5) for each in recorded(data(tokens))]
    with pytest.raises(DataError, match="a micro-batch 5, but a step has 2"):
        check(tokens, batches)
