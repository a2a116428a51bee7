"""Flags of offloaded activations: what does not fit together is one line with the flag to change."""

from __future__ import annotations

import pytest

from megalite.config import resolve
from megalite.config.pipeline_layout import layers_of_ranks
from megalite.errors import ConfigurationError
from tests.unit.test_config_validate import config_of, problems

PATTERN = "--mamba-head-dim 4 --mamba-num-groups 1 --num-layers 2 --hybrid-layer-pattern="
FINE = "--fine-grained-activation-offloading --offload-modules"
EXPERTS = "--num-experts 4 --moe-router-topk 2"


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--cpu-offloading-num-layers 3 --cpu-offloading-retain-pinned-cpu-buffers", 1),
        ("--cpu-offloading-num-layers 2 --pp 2 --recompute-activations", 2),
        ("--cpu-offloading-num-layers 2 --pp 2 --pipeline-schedule zb-v", 2),
        (
            "--cpu-offloading-num-layers 1 --compile --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            1,
        ),
        (f"{FINE} attn_norm qkv_linear core_attn attn_proj mlp_norm --activation-offload-fraction 0.5", 1),
        (f"{FINE} attn_norm core_attn --activation-offload-fraction 0.5 {PATTERN}MM", 1),
        (f"{FINE} expert_fc1 moe_act --min-offloaded-tensor-size 0 {EXPERTS}", 1),
        (f"{FINE} mlp_norm --recompute-granularity full --recompute-method block --recompute-num-layers 2", 1),
        (f"{FINE} core_attn {EXPERTS} --recompute-granularity selective --recompute-modules moe", 1),
    ],
)
def test_what_fits_is_accepted(flags: str, ranks: int) -> None:
    assert resolve(config_of(flags), ranks).offload.offloads_activations


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--cpu-offloading-num-layers 4",
            "--cpu-offloading-num-layers 4 must be below --num-layers 4: at least the last layer, whose backward "
            "follows, stays",
        ),
        (
            "--cpu-offloading-num-layers 3 --pp 2",
            "--cpu-offloading-num-layers 3 is more than the 2 layers of a pipeline rank: give at most 2",
        ),
        ("--cpu-offloading-num-layers -1", "--cpu-offloading-num-layers -1: must be at least 0"),
        (
            "--cpu-offloading-retain-pinned-cpu-buffers",
            "--cpu-offloading-retain-pinned-cpu-buffers needs --cpu-offloading-num-layers",
        ),
        ("--offload-modules mlp_norm", "--offload-modules needs --fine-grained-activation-offloading"),
        (
            "--activation-offload-fraction 0.5",
            "--activation-offload-fraction needs --fine-grained-activation-offloading",
        ),
        ("--min-offloaded-tensor-size 5", "--min-offloaded-tensor-size needs --fine-grained-activation-offloading"),
        (
            "--fine-grained-activation-offloading",
            "--fine-grained-activation-offloading needs --offload-modules, such as core_attn attn_proj",
        ),
        (
            f"{FINE} mlp_norm --cpu-offloading-num-layers 1",
            "--cpu-offloading-num-layers 1 offloads whole layers, and --fine-grained-activation-offloading modules: "
            "give one of the two",
        ),
        (
            f"{FINE} mlp_norm --activation-offload-fraction 1.5",
            "--activation-offload-fraction 1.5: must be from 0 to 1",
        ),
        (
            f"{FINE} attn_proj",
            "--offload-modules attn_proj needs core_attn beside it: what the output layer saves is the core's output, "
            "which the core keeps as well",
        ),
        (
            f"{FINE} mlp_norm core_attn {PATTERN}MM",
            "--offload-modules mlp_norm: --hybrid-layer-pattern 'MM' has no layer with that: leave it out",
        ),
        (
            f"{FINE} mlp_norm core_attn attn_norm --num-layers 2 --hybrid-layer-pattern=--",
            "--offload-modules core_attn attn_norm: --hybrid-layer-pattern '--' has no layer with that: leave it out",
        ),
        (f"{FINE} mlp_norm expert_fc1", "--offload-modules expert_fc1 needs --num-experts"),
        (
            f"{FINE} moe_act {EXPERTS} --recompute-granularity selective --recompute-modules core_attn moe",
            "--offload-modules moe_act with --recompute-modules moe, which saves nothing of experts: leave one of the "
            "two out",
        ),
        (
            f"{FINE} mlp_norm --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "--fine-grained-activation-offloading with --recompute-granularity full of all layers, whose modules save "
            "nothing: offload the inputs of the layers by --cpu-offloading-num-layers",
        ),
        (
            f"{FINE} mlp_norm --mlp-chunks-for-training 2",
            "--offload-modules mlp_norm with --mlp-chunks-for-training 2, which recomputes that norm, so that it saves "
            "nothing: leave one of the two out",
        ),
        (
            f"{FINE} mlp_norm --compile",
            "--fine-grained-activation-offloading with --compile, which makes one piece of a layer's modules: offload "
            "whole layers by --cpu-offloading-num-layers",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(flags: str, problem: str) -> None:
    ranks = 2 if "--pp 2" in flags else 1
    assert problems(flags, ranks) == [problem]


@pytest.mark.parametrize("module", ["fused_group_mlp", "gdp_qkv", "mlp"])
def test_an_unknown_module_is_refused_with_those_that_there_are(module: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        config_of(f"{FINE} {module}")
    text = str(raised.value)
    assert module in text
    for name in ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"):
        assert name in text
    assert "\n" not in text.strip()


def test_layers_of_a_rank_are_those_of_all_its_stages() -> None:
    config = config_of("--pp 2 --num-virtual-stages-per-pipeline-rank 2")
    assert layers_of_ranks(config.model, config.parallel) == [2, 2]
    config = config_of("--pp 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Ett|t|t|L")
    assert layers_of_ranks(config.model, config.parallel) == [2, 2]
