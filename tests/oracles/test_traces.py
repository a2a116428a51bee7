"""Steps of Megatron-LM's own program, which are right, and steps with a bug planted in it."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.saved import open_saved
from megalite.extras.verify.trace import Trace
from megalite.extras.verify.verdict import RIGHT, WRONG, Verdict
from megalite.extras.verify.verification import verify
from museum.megatron import How, Run, Within
from museum.networks import CP, EXPERTS, LATENTS, LLAMA, PP, ROTARY, SIZES, SP, TP
from tests.harness.rank_pool import RankPools

pytestmark = pytest.mark.oracle

CASES: dict[str, tuple[int, bool, str]] = {
    "gpt2, tp and sp": (2, False, f"{SP} --global-batch-size 4"),
    "qwen3, tp, masked": (2, True, f"{LLAMA} --qk-layernorm {TP} --bf16 --global-batch-size 4"),
    "biases, tied, pp": (2, False, f"{ROTARY} --add-qkv-bias {PP} --global-batch-size 6 --calculate-per-token-loss"),
    "llama, zero, masked": (2, True, f"{LLAMA} --use-distributed-optimizer --bf16 --global-batch-size 8"),
    "llama, cp, masked": (2, True, f"{LLAMA} {CP} --global-batch-size 4"),
    "latents": (2, False, f"{LATENTS} {PP} --global-batch-size 4"),
    "experts, ep": (2, False, f"{EXPERTS} --expert-model-parallel-size 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-1 --moe-shared-expert-intermediate-size 24 --global-batch-size 8"),
    "experts, tp, pp": (4, True, f"{EXPERTS} {SP} {PP} --moe-router-load-balancing-type none --global-batch-size 4"),
}  # fmt: skip
"""Ranks, whether labels are masked, and flags."""
WITHOUT_COUNTERPART = re.compile(
    r"(the whole model|decoder|rotary_pos_emb|[\w.]*\.rotary_pos_emb|embedding\.embedding_dropout"
    r"|(output|output_gradient) of embedding\.position_embeddings"
    r"|(a further )?input(_gradient)? of [\w.]*\.core_attention"
    r"|[\w.]*\.core_attention\.(scale_mask_softmax|attention_dropout)"
    r"|[\w.]*\.(pre_cross_attn_layernorm|cross_attention)"
    r"|a further (input|output|output_gradient) of [\w.]*"  # rotation and masks, and biases that are returned
    r"|(input|output)(_gradient)? of [\w.]*\.linear_kv_up_proj"
    r"|(output|output_gradient) of [\w.]*\.router|[\w.]*\.mlp\.experts[\w.]*)"
    r" has no counterpart in this network"
    r"|the input of [\w.]* has other readers, and its gradient only one part"
)
"""Reasons for which entries are not compared: they do nothing, stand within ours, or hang on the order of tokens."""


def judged(run: Run, weights: Path, folder: Path, how: How) -> tuple[Verdict, Trace]:
    trace = read_trace(folder, None)
    return verify(
        run.command(), open_saved(weights).weights, trace, run.batches(trace) if how == "logs" else None
    ), trace


@pytest.mark.parametrize("name", CASES)
def test_right_steps_are_not_accused(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    ranks, masked, flags = CASES[name]
    run = Run(SIZES + flags, ranks, tmp_path, masked)
    weights = run.prepare()
    hows: tuple[How, ...] = ("logs", "sketches")
    for how in hows:
        verdict, trace = judged(run, weights, run.record(rank_pools, weights, how), how)
        assert verdict.exit_code == RIGHT, verdict.line
        assert [line for line in verdict.skipped if not WITHOUT_COUNTERPART.fullmatch(line)] == []
        compared = sum(entry.role != "parameter_after" for entry in trace.entries) - sum(verdict.skipped.values())
        assert len(verdict.judgements) == compared


@contextlib.contextmanager
def without_sum_over_sequence_parallel_ranks() -> Iterator[None]:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with mock.patch.object(module, "_allreduce_non_tensor_model_parallel_grads"):
        yield


@contextlib.contextmanager
def not_divided_by_micro_batches() -> Iterator[None]:
    from megatron.core.pipeline_parallel import schedules

    right = schedules.forward_step_calc_loss

    def wrong(*arguments: Any) -> Any:
        return right(*arguments[:6], 1, *arguments[7:])

    with mock.patch.object(schedules, "forward_step_calc_loss", wrong):
        yield


@pytest.mark.parametrize(
    ("within", "flags", "first", "hypothesis"),
    [
        (
            without_sum_over_sequence_parallel_ranks,
            f"{SP} --global-batch-size 4",
            ("decoder.layers.1.input_layernorm.weight", "main_gradient"),
            "the sum over sequence-parallel ranks (axis tp) is missing: each has that of its tokens",
        ),
        (
            not_divided_by_micro_batches,
            f"{LLAMA} --global-batch-size 12",
            ("output_layer", "output_gradient"),
            "3 times what it should be (the number of micro-batches)",
        ),
    ],
    ids=["no sum over sequence-parallel ranks", "not divided by micro-batches"],
)
@pytest.mark.parametrize("how", ["logs", "sketches"])
def test_planted_bugs_are_found(
    within: Within, flags: str, first: tuple[str, str], hypothesis: str, how: How, rank_pools: RankPools, tmp_path: Path
) -> None:
    run = Run(SIZES + flags, 2, tmp_path)
    weights = run.prepare()
    verdict, _ = judged(run, weights, run.record(rank_pools, weights, how, within), how)
    assert verdict.exit_code == WRONG
    assert verdict.first is not None
    assert (verdict.first.entry.name, verdict.first.entry.role) == first
    assert hypothesis in verdict.hypotheses[0].text
    assert verdict.hypotheses[0].explains
