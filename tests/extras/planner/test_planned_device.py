"""Dry runs and plans are of the device that is planned: attention that a GPU fuses keeps no scores."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch

from megalite.config.parse import parse_arguments
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.dry_run import DryRun, dry_run
from megalite.extras.planner.plan import Planner
from megalite.extras.planner.search import search
from megalite.model import sinkhorn
from megalite.model.sinkhorn import PLANNED_ROUNDS

LENGTH, HEADS = 2048, 4
FLAGS = f"""--num-layers 2 --hidden-size 256 --num-attention-heads {HEADS} --ffn-hidden-size 512 --seq-length {LENGTH}
--max-position-embeddings {LENGTH} --position-embedding-type rope --swiglu --disable-bias-linear --hidden-dropout 0
--vocab-size 999 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --global-batch-size 2 --bf16 --lr 1
--train-iters 1"""
SCORES = 2 * HEADS * LENGTH**2  # bytes in bf16
MASK = 2 * LENGTH**2  # of all layers: numbers in bf16 to add to the scores
KEPT = 2**21  # what two of them hold at the peak beyond that, as the dry run counts it
IN_BLOCKS = 2**20
"""More than lists of blocks, and what a first key per token, take."""
ON_A_GPU = {
    "--attention-dropout 0.1": 0,
    "--attention-dropout 0.1 --kernels reference": 0,
    "--attention-dropout 0.1 --group-query-attention --num-query-groups 2": 0,
    "--attention-dropout 0 --window-size 512,0": IN_BLOCKS,
    "--attention-dropout 0 --attn-logit-softcapping 50": IN_BLOCKS,
    "--attention-dropout 0 --reset-attention-mask": IN_BLOCKS,
    "--attention-dropout 0.1 --window-size 512,0": MASK,
    "--attention-dropout 0.1 --window-size 512,0 --group-query-attention --num-query-groups 2": MASK + KEPT,
    "--attention-dropout 0.1 --reset-attention-mask": MASK + KEPT,
}
"""Flags of attention that a GPU runs by a fused operator, and the bytes that its masks may take beside."""
WIDE = {each for each in ON_A_GPU if "query-groups" in each or each.startswith("--attention-dropout 0.1 --reset")}


@cache
def found(flags: str, *, of_gpu: bool = True, ranks: int = 1) -> DryRun:
    return dry_run(parse_arguments(f"{FLAGS} {flags}".split()).config, ranks, 0, of_gpu=of_gpu)


def attention(run: DryRun) -> tuple[int, int]:
    """Return the launches and the floating-point operations of fused attention."""
    own = {each: count for each, count in run.total.operations.items() if each.kind == "attention"}
    return sum(own.values()), sum(each.flops * count for each, count in own.items())


@pytest.mark.parametrize("flags", [pytest.param(each, marks=[pytest.mark.wide] * (each in WIDE)) for each in ON_A_GPU])
def test_attention_that_a_gpu_fuses_keeps_no_scores(flags: str) -> None:
    kept = [each for each in ("--group-query-attention --num-query-groups 2", "--kernels reference") if each in flags]
    plain = found(" ".join(["--attention-dropout 0", *kept]))
    run, masks = found(flags), ON_A_GPU[flags]
    assert run.peak <= plain.peak + masks < plain.peak + SCORES
    assert run.memory.activations <= plain.memory.activations + masks
    launches, flops = attention(run)
    assert launches == attention(plain)[0]
    assert flops == attention(plain)[1] * (2 if masks > IN_BLOCKS else 1)  # with a dense mask, all scores are computed
    assert not run.misplaced
    assert run.waits == plain.waits


def test_attention_of_parts_in_blocks_keeps_no_scores() -> None:
    plain = found("--attention-dropout 0 --cp 2", ranks=2)
    run = found("--attention-dropout 0 --cp 2 --window-size 512,0", ranks=2)
    assert run.peak <= plain.peak + IN_BLOCKS
    assert 0 < attention(run)[1] < attention(plain)[1]


def test_a_cpu_drops_probabilities_that_it_has_written() -> None:
    assert attention(found("--attention-dropout 0", of_gpu=False))[0] > 0
    run = found("--attention-dropout 0.1", of_gpu=False)
    assert attention(run)[0] == 0
    assert run.peak > found("--attention-dropout 0.1").peak + SCORES


@pytest.mark.parametrize(
    "flags", ["--attention-dropout 0 --reset-attention-mask", "--attention-dropout 0.1 --window-size 512,0"]
)
def test_the_activations_are_part_of_the_peak(flags: str) -> None:
    run = found(flags)
    assert run.memory.activations <= run.peak - run.before


def test_masks_of_documents_are_part_of_a_dry_run() -> None:
    run, plain = (found(f"--attention-dropout 0.1 {each}") for each in ("--reset-attention-mask", ""))
    assert run.peak - plain.peak >= MASK // 2  # without the mask, its operator's output is copied in each layer


def test_sinkhorns_rounds_are_as_many_as_choices_take() -> None:
    """One of them waits for the device: whether it is the last is known there."""
    flags = "--attention-dropout 0 --num-experts 8 --moe-router-load-balancing-type"
    even, none = (found(f"{flags} {each}").waits for each in ("sinkhorn", "none"))
    layers, micro_batches = 2, 2
    assert sum(even.values()) - sum(none.values()) == layers * micro_batches * PLANNED_ROUNDS
    logits = 1.3 * torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(0))
    with mock.patch.object(sinkhorn, "_MOST_ROUNDS", PLANNED_ROUNDS):
        settled = sinkhorn.expert_factors(logits.softmax(dim=1))
    torch.testing.assert_close(sinkhorn.expert_factors(logits.softmax(dim=1)), settled)


def test_a_dry_run_refuses_what_the_run_refuses_on_a_gpu() -> None:
    refused = {
        "--attention-dropout 0.1 --cp 2": r"^--attention-dropout 0.1 with --context-parallel-size 2",
        "--attention-dropout 0 --pp 2 --distributed-backend gloo": r"^--distributed-backend gloo cannot send",
    }
    for flags, words in refused.items():
        with pytest.raises(ConfigurationError, match=words):
            found(flags, ranks=2)
        assert found(flags, of_gpu=False, ranks=2).world_size == 2  # a CPU can do both


def test_layouts_that_a_gpu_refuses_are_not_planned() -> None:
    flags = f"{FLAGS} --attention-dropout 0.1"
    cut = parse_arguments(f"{flags} --cp 2".split()).config
    with pytest.raises(ConfigurationError, match=r"^--attention-dropout 0.1 with --context-parallel-size 2"):
        Planner(cut, find_cluster("H100-SXM"), 2).plan(cut)
    with pytest.raises(ConfigurationError, match=r"^--attention-dropout 0.1 with --context-parallel-size 2"):
        search(Planner(cut, find_cluster("H100-SXM"), 2), keep=["context"])
    Planner(cut, find_cluster("cpu"), 2).plan(cut)
    kept = ("tensor", "pipeline", "expert", "expert_tensor", "recompute", "micro_batch", "zero")
    whole = parse_arguments(flags.split()).config
    layouts = search(Planner(whole, find_cluster("H100-SXM"), 2), keep=kept).plans
    assert {plan.layout.context for plan in layouts} == {1}
