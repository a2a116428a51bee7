"""Memory of feed-forward layers on parts of the sequence, in dry runs, to the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.planner.dry_run import DryRun, dry_run

LAYERS, TOKENS, HIDDEN, FFN, ITEM = 2, 512, 32, 2048, 2
FLAGS = f"""--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --ffn-hidden-size {FFN}
--seq-length {TOKENS} --max-position-embeddings {TOKENS} --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --vocab-size 128 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1
--global-batch-size 2 --bf16 --lr 1 --train-iters 1 --hidden-dropout 0 --attention-dropout 0"""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STATISTIC = 4  # of a token's norm


@cache
def found(flags: str, parts: int, ranks: int = 1) -> DryRun:
    config = resolve(parse_arguments(f"{FLAGS} {flags} --mlp-chunks-for-training {parts}".split()).config, ranks)
    return dry_run(replace(config, model=replace(config.model, vocab_size=128)), ranks, 0)


@pytest.mark.wide_except("--tp 2 --sequence-parallel-2")
@pytest.mark.parametrize(("flags", "ranks"), [("", 1), ("--tp 2 --sequence-parallel", 2)])
def test_a_layer_keeps_nothing_wide_for_backward(flags: str, ranks: int) -> None:
    """It leaves out the norm's output and statistics, gate and up, and what the activation makes of them. Its input is
    the hidden states that the next layer keeps, too."""
    saved = found(flags, 1, ranks).memory.activations - found(flags, 3, ranks).memory.activations
    assert saved * ranks == LAYERS * TOKENS * ((HIDDEN + 3 * FFN) * ITEM + STATISTIC)
    assert found(flags, 3, ranks).memory.activations == found(flags, 4, ranks).memory.activations


@pytest.mark.wide_except("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
@pytest.mark.parametrize("flags", ["", FULL])
def test_the_peak_has_the_wide_tensors_of_one_part(flags: str) -> None:
    """In backward: gate and up with their gradients, and one more of the inner width; beside the norm's output and its
    gradient. Recomputed layers, too, have no more at once."""
    of_two, of_four = found(flags, 2).peak, found(flags, 4).peak
    assert of_two - of_four == TOKENS // 4 * ((5 * FFN + 2 * HIDDEN) * ITEM + STATISTIC)
    assert found(flags, 1).peak - of_two > of_two - of_four


@pytest.mark.wide
def test_weight_gradients_that_wait_keep_the_wide_tensors() -> None:
    """They do so under zero-bubble schedules, from the backward of the inputs on; forward keeps none."""
    flags = "--pp 2 --pipeline-schedule zb-h1 --global-batch-size 4"
    assert found(flags, 4, 2).peak < found(flags, 1, 2).peak - TOKENS * 3 * FFN * ITEM


def test_backward_computes_again_only_what_is_read() -> None:
    """Beside the norm and the activation, these are the first products. The second ones, with their sums over the
    ranks, are not."""
    flags = "--tp 2 --global-batch-size 1"
    plain, in_parts = (found(flags, parts, 2).work["B"] for parts in (1, 3))
    assert in_parts.flops - plain.flops == LAYERS * 2 * TOKENS * HIDDEN * 2 * FFN // 2
    sent = [sum(each.bytes * count for each, count in work.messages.items()) for work in (plain, in_parts)]
    assert sent[0] == sent[1] > 0
