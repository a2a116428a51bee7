"""Pairs of what a DeepSpeed configuration may say, and the run that each stands for, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.parse import parse_arguments
from megalite.extras.translation import deepspeed
from tests.harness.covering_array import Factors, Row, covering_array

RANKS, MICRO, ACCUMULATION = 8, 4, 2
NETWORK = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4", "--seq-length", "8"]
FACTORS: Factors = {
    "batch": ("micro and whole", "micro and steps", "whole and steps", "all"),
    "stage": (0, 1, 2, 3),
    "overlap": (None, False, True),
    "bucket": (None, 5e8, 10**6),
    "precision": ("fp32", "bf16", "fp16", "fixed scale"),
    "optimizer": ("Adam", "AdamW", "SGD"),
    "scheduler": ("none", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    "clip": (None, 0.5, 1),
    "decay": (0.0, 0.1),
}
SECTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 2}},
    "fixed scale": {"fp16": {"enabled": True, "loss_scale": 128}},
}
STRATEGIES = (None, "optim", "optim_grads", "optim_grads_params")


def settings(row: Row) -> dict[str, Any]:
    """Return the configuration of a row."""
    batch = {
        "train_micro_batch_size_per_gpu": MICRO,
        "train_batch_size": MICRO * RANKS * ACCUMULATION,
        "gradient_accumulation_steps": ACCUMULATION,
    }
    left_out = {"micro and whole": 2, "micro and steps": 1, "whole and steps": 0}.get(row["batch"])
    found: dict[str, Any] = {name: value for place, (name, value) in enumerate(batch.items()) if place != left_out}
    found |= SECTIONS[row["precision"]]
    zero = {"stage": row["stage"], "overlap_comm": row["overlap"], "reduce_bucket_size": row["bucket"]}
    found["zero_optimization"] = {name: value for name, value in zero.items() if value is not None}
    params: dict[str, Any] = {"lr": 0.01, "weight_decay": row["decay"]}
    params |= {"momentum": 0.8} if row["optimizer"] == "SGD" else {"betas": [0.8, 0.95], "eps": 1e-7}
    found["optimizer"] = {"type": row["optimizer"], "params": params}
    if row["clip"] is not None:
        found["gradient_clipping"] = row["clip"]
    if row["scheduler"] != "none":
        of_kind: dict[str, Any] = {"warmup_num_steps": 10, "warmup_type": "linear"}
        if row["scheduler"] == "WarmupCosineLR":
            of_kind |= {"total_num_steps": 50, "cos_min_ratio": 0.2}
        else:
            of_kind |= {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02}
            of_kind |= {"total_num_steps": 50} if row["scheduler"] == "WarmupDecayLR" else {}
        found["scheduler"] = {"type": row["scheduler"], "params": of_kind}
    return found


def shown(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


@pytest.mark.parametrize("row", covering_array(FACTORS, lambda row: True, candidates=4), ids=shown)
def test_a_configuration_stands_for_the_run_by_hand(row: Row) -> None:
    report = deepspeed.translate(settings(row), RANKS)
    assert (report.refused, report.missing) == ([], [])
    config = parse_arguments([*NETWORK, *report.flags]).config
    training, optimizer, parallel = config.training, config.optimizer, config.parallel
    assert (training.micro_batch_size, training.global_batch_size) == (MICRO, MICRO * RANKS * ACCUMULATION)
    assert parallel.data_parallel_sharding_strategy == STRATEGIES[row["stage"]]
    if row["bucket"] is not None and row["stage"]:
        assert parallel.ddp_bucket_size == int(row["bucket"])
    half = row["precision"] in ("fp16", "fixed scale")
    assert (training.bf16, training.fp16) == (row["precision"] == "bf16", half)
    if row["precision"] == "fp16":
        scale = (training.initial_loss_scale, training.loss_scale_window, training.min_loss_scale, training.loss_scale)
        assert scale == (4096, 500, 2, None)
    if row["precision"] == "fixed scale":
        assert training.loss_scale == 128
    assert optimizer.optimizer == ("sgd" if row["optimizer"] == "SGD" else "adam")
    if row["optimizer"] == "SGD":
        assert optimizer.sgd_momentum == 0.8
    else:
        assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.8, 0.95, 1e-7)
    assert optimizer.weight_decay == row["decay"]
    assert optimizer.clip_grad == (row["clip"] or 1.0)  # 1 by default since DeepSpeed 0.19
    scheduler = row["scheduler"]
    assert optimizer.lr == (0.02 if scheduler in ("WarmupLR", "WarmupDecayLR") else 0.01)
    style = {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(scheduler, "constant")
    assert optimizer.lr_decay_style == style
    assert optimizer.lr_warmup_iters == (0 if scheduler == "none" else 10)
    if scheduler in ("WarmupDecayLR", "WarmupCosineLR"):
        assert optimizer.lr_decay_iters == 50
        assert optimizer.min_lr == pytest.approx(0.002 if scheduler == "WarmupCosineLR" else 0.001)
    if scheduler in ("WarmupLR", "WarmupDecayLR"):
        assert optimizer.lr_warmup_init == 0.001
