"""Unequal shares: what is refused before anything starts, and the pure functions that deal."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.parallel import STRATEGIES, ParallelConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.config.validate_shares import given_shares, ranks_together
from megalite.errors import ConfigurationError, MegaliteError
from megalite.parallel.mesh import UnconnectedMesh
from megalite.training.unequal_shares import SECTION, MeasuredShares, UnequalShares, balanced, deal_of, divided

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 2 --train-iters 4 --lr 0.01"
)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--data-parallel-shares 3:2:1", 2, "has 3 shares, and there are 2 data-parallel ranks"),
        ("--data-parallel-shares 3:0", 2, "a whole number from 1 on"),
        ("--data-parallel-shares 3:x", 2, "a whole number from 1 on"),
        ("--data-parallel-shares ٣:2", 2, "a whole number from 1 on"),
        ("--data-parallel-shares 99999999999:2", 2, "a whole number from 1 on"),
        ("--data-parallel-shares 3", 1, "there is one data-parallel rank"),
        ("--data-parallel-shares 3:2 --global-batch-size 12", 2, "--micro-batch-size 2 x 5, the sum of"),
        ("--data-parallel-shares 3:2 --eval-global-batch-size 8", 2, "--eval-global-batch-size 8 is not a multiple"),
        ("--data-parallel-shares auto", 2, "--global-batch-size 4 has fewer than two micro-batches.*raise it to 8"),
        (
            "--data-parallel-shares auto --save x --global-batch-size 16 --eval-global-batch-size 2",
            2,
            "fewer micro-batches",
        ),
        ("--data-parallel-shares auto --global-batch-size 16 --zero3", 2, "none can take fewer"),
        (
            "--data-parallel-shares auto --global-batch-size 16",
            2,
            "auto: shares change when the run saves.*Give --save",
        ),
        ("--data-parallel-shares auto --tp 2 --zero3", 1, "^1 ranks cannot be divided into groups"),
        ("--data-parallel-shares 3:1 --gradient-compression bf16", 2, "communicates less"),
        (
            "--data-parallel-shares 3:1 --num-experts 2 --ep 2 --save x --moe-record-routing x",
            2,
            "records no empty slots",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: str, ranks: int, message: str) -> None:
    flags = flags.replace("--zero3", "--data-parallel-sharding-strategy optim_grads_params")
    with pytest.raises(ConfigurationError, match=message):
        resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, ranks)


def test_a_step_has_the_least_batch_by_itself() -> None:
    config = resolve(parse_arguments(f"{FLAGS} --data-parallel-shares 6:4".split()).config, 2)
    assert config.training.global_batch_size == 2 * 5
    assert given_shares(config.parallel) == (3, 2)


def test_a_run_that_continues_may_be_past_sizes_with_too_few_micro_batches() -> None:
    flags = [
        *FLAGS.replace("--train-iters 4", "--train-samples 999").split(),
        "--data-parallel-shares",
        "auto",
        "--save",
        "x",
    ]
    flags += ["--global-batch-size", "16", "--step-batch-size-schedule", "0:4 64:16"]
    with pytest.raises(ConfigurationError, match="the size 4 has fewer micro-batches than 4 data-parallel ranks"):
        resolve(parse_arguments(flags).config, 4)
    resolve(parse_arguments([*flags, "--load", "x"]).config, 4)


@pytest.mark.parametrize(
    ("layout", "ranks", "together"),
    [
        ({}, 8, 1),
        ({"zero": 1}, 8, 1),
        ({"zero": 2}, 8, 8),
        ({"zero": 3, "num_distributed_optimizer_instances": 4}, 8, 2),
        ({"zero": 2, "context_parallel_size": 2, "num_distributed_optimizer_instances": 2}, 16, 4),
        ({"expert_model_parallel_size": 4}, 8, 4),
        ({"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 16, 2),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 16, 1),
        ({"expert_model_parallel_size": 2, "zero": 3, "num_distributed_optimizer_instances": 2}, 12, 6),
        # Blocks that end within a data-parallel rank:
        ({"expert_model_parallel_size": 6, "tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, 24, 3),
        ({"zero": 2, "context_parallel_size": 2, "num_distributed_optimizer_instances": 2}, 6, 3),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4}, 8, 2),
    ],
)
def test_ranks_that_meet_in_each_micro_batch(layout: dict[str, int], ranks: int, together: int) -> None:
    options = {name: size for name, size in layout.items() if name != "zero"}
    strategy = STRATEGIES[layout.get("zero", 0)]
    assert ranks_together(ParallelConfig(**options, data_parallel_sharding_strategy=strategy), ranks) == together


COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(deadline=None)
@given(COUNTS, st.integers(0, 10**9), st.integers(1, 3))
def test_every_micro_batch_is_dealt_once_and_turns_follow_each_other(counts: list[int], first: int, size: int) -> None:
    deals = [deal_of(counts, rank, max(counts)) for rank in range(len(counts))]
    dealt = sorted(number for deal in deals for number in deal.numbers)
    assert dealt == list(range(sum(counts)))
    for deal, count in zip(deals, counts, strict=True):
        assert len(deal.numbers) == count
        assert deal.slots == max(counts)
        assert deal.turns[0] == 0
        assert deal.turns[-1] == deal.total == sum(counts)
        bounds = zip(deal.numbers, deal.turns[:-1], deal.turns[1:], strict=True)
        assert all(start <= number < end for number, start, end in bounds)
        assert [each.start for each in deal.samples(first, size)] == [first + number * size for number in deal.numbers]


def test_equal_counts_are_dealt_as_without_shares() -> None:
    for rank in range(3):
        assert list(deal_of([2, 2, 2], rank, 2).numbers) == [rank, rank + 3]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 6))
def test_balanced_counts_end_soonest(seconds: list[int], more: int) -> None:
    total = len(seconds) + more
    counts = balanced(seconds, total)
    assert sum(counts) == total
    every = itertools.product(range(1, total + 1), repeat=len(seconds))
    least = min(max(map(int.__mul__, seconds, each)) for each in every if sum(each) == total)
    assert max(map(int.__mul__, seconds, counts)) == least


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 40))
def test_divided_counts_are_in_proportion_and_none_is_empty(shares: list[int], more: int) -> None:
    total = len(shares) + more
    counts = divided(shares, total)
    assert sum(counts) == total
    for share, count in zip(shares, counts, strict=True):
        assert abs(count - 1 - more * share / sum(shares)) < 1


@pytest.mark.parametrize(
    "saved", [[6, 2, 2, 2], [4, 4, 4, 4], [6, 6], [7, 7, -1, -1], [True] * 4, "6:6", None, {}], ids=str
)
def test_shares_of_a_checkpoint_that_do_not_fit_are_not_taken(saved: object) -> None:
    """Ranks 0 and 1 meet in each micro-batch, and so do 2 and 3: a run with other groups saved other shares."""
    shares = MeasuredShares(UnconnectedMesh(rank=0, world_size=4), 12, together=2)
    for section in ({"micro_batches": saved}, saved):
        (note,) = shares.restore({SECTION: section})
        assert note.startswith("note: --data-parallel-shares auto begins with new shares")
        assert shares.shares == (3, 3, 3, 3)
    assert not shares.restore({SECTION: {"micro_batches": [4, 4, 2, 2]}})
    assert shares.shares == (4, 4, 2, 2)


def test_a_deal_is_of_the_shares_in_force() -> None:
    shares = MeasuredShares(UnconnectedMesh(rank=0, world_size=2), 8, together=1)
    assert shares.deal(8) is shares.deal(8)
    assert shares.deal(8).slots == 4
    assert shares.deal(4).slots == 2
    assert not shares.can_deal(1)
    shares.restore({SECTION: {"micro_batches": [6, 2]}})
    assert shares.deal(8).slots == 6


def test_ranks_that_meet_have_as_many_slots() -> None:
    shares = UnequalShares(1, (3, 1, 1, 1), 6, together=2)
    assert shares.slots_of_ranks(12) == [6, 6, 2, 2]
    assert shares.deal(12).empty == 4
    assert shares.slots(12) == [2, 6]
    assert "with 4 empty slots" in shares.description(12)


def test_reductions_in_another_order_are_refused() -> None:
    """No schedule has such an order today."""
    shares = UnequalShares(0, (1, 2), 3)
    shares.check({2: [1, 0], 4: [1, 0]})
    shares.check({1: [0], 2: [0, 0]})  # in each micro-batch
    with pytest.raises(MegaliteError, match="2 and 4 micro-batches would reduce the gradients of"):
        shares.check({2: [0, 1], 4: [1, 0]})
