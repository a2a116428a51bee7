"""Demands of a step on the host: launches and waits do not grow, and no wait is in a place that is not listed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.host_budget import FAMILIES, configuration, count, own_layers, own_update
from benchmarks.quick_meta import SHORT
from megalite.config import RunConfig
from megalite.config.low_precision import LowPrecisionConfig
from megalite.config.parse import parse_arguments
from megalite.extras.planner.dry_run import dry_run, planned_kernels
from megalite.model.mlp import MLP
from megalite_kernels.implementation import is_installed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux alone")

LAYER = {
    # Forward 10: two norms, four products, rotation, a copy of the values, attention, activation. Backward 21: those,
    # where a product has two and a norm has its kernel, a sum over programs, a rounding and an addition; a stack and a
    # cat put the gradients of queries, keys and values together.
    "llama": (31, 0),
    # Instead of the rotation, four biases: added in three launches (the activation adds one), summed and stored.
    "gpt2": (44, 0),
    # Two products forward and four backward for all experts together. The rest chooses, counts and sorts by expert. The
    # host waits for the numbers of their tokens.
    "experts": (73, 1),
}
"""Launches and waits of a layer and micro-batch, whose gradients are added to those of another."""
ROUNDED = {
    # Four inputs and gradients, and four weights in forward and again in backward, whose codes nothing keeps here: each
    # has two launches for its maximum and one for codes and scale, weights one to turn codes. Inputs are dequantized
    # for weight gradients.
    ("tensorwise", False): 91,
    # Not here: gradients are turned and rounded anew, codes of inputs turned, and products added in another launch.
    ("tensorwise", True): 103,
    # No maxima, and codes are written turned, too; scales are copied to where torch's products take them.
    ("blockwise", False): 63,
    ("blockwise", True): 87,
}
"""Launches of the same with products in 8 bits, by recipe and --fp8-wgrad."""
OF_EXPERTS: list[tuple[dict[str, Any], int]] = [
    ({}, 90),
    ({"qk_layernorm": True}, 90),
    ({"moe_aux_loss_coeff": (0.001,)}, 90),
    ({"moe_aux_loss_coeff": (0.001,), "qk_layernorm": True}, 102),
    ({"add_bias_linear": True}, 105),
]
"""Options of a layer with experts, and the most launches of it and a micro-batch, whatever the number of experts."""
OF_A_RUN, OF_A_STEP = 5, 7
"""Launches of the optimizer: for each run of parameters of a group the sums of squares, two to undo their scale, one to
square it, and the update; for each step the exact sums of the norm over all of them, as digits that ranks add up."""
OF_A_BUCKET = 1
"""Beyond the first: its sums of squares are put together with those of others."""

ALWAYS = {"training/loss_terms.py _totals": 2, "optim/statistics.py sums_over_ranks": 1}
"""Waits of each step: for the number of tokens before it, and for the loss and the norm after it."""
COMMON = """--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --hidden-size 256 --bf16
--num-attention-heads 4 --ffn-hidden-size 512 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1
--attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 --train-iters 1 --lr 1e-4"""
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm"
LOADS = {"tasks/experts.py expert_loads": 1}
"""Once a step, for the metrics."""
ALLOWED: dict[tuple[int, str], dict[str, int]] = {
    (1, ""): ALWAYS,
    (8, "--tp 2 --sequence-parallel --pp 2 --use-distributed-optimizer"): ALWAYS,
    (4, "--data-parallel-sharding-strategy optim_grads_params"): ALWAYS,
    (2, "--cp 2"): ALWAYS | {"tasks/gpt_task.py _busiest": 1},
    (2, "--optimizer muon"): ALWAYS,
    (2, "--log-num-zeros-in-grad"): ALWAYS | {"optim/statistics.py zeros_in_gradients": 1},
    # Two micro-batches of four layers, or of two on one of two stages.
    (4, f"{EXPERTS} --ep 4"): ALWAYS | LOADS | {"parallel/dispatch.py _sort": 8},
    (8, f"{EXPERTS} --ep 4 --pp 2 --moe-token-dispatcher-type alltoall"): ALWAYS
    | LOADS
    | {"parallel/dispatch.py _exchange": 4},
    (4, f"{EXPERTS} --ep 4 --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"): ALWAYS | LOADS,
}
"""Ranks and flags, and the times that the host waits for the device in a step, by place. None for padded experts."""


def config_of(flags: str) -> RunConfig:
    return parse_arguments(f"{COMMON} {flags}".split(), lambda *_: {}).config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_launches_and_waits_no_more_than_it_did(family: str) -> None:
    assert is_installed()  # the references launch more
    config = configuration(family)
    with planned_kernels(config.kernels):
        few, more = (count(own_layers(config, layers)[0]) for layers in (1, 2))
    assert (more[0] - few[0], more[1] - few[1]) == LAYER[family]


@pytest.mark.parametrize(("recipe", "wgrad"), ROUNDED, ids=str)
def test_a_layer_that_rounds_launches_no_more_than_it_did(recipe: Any, wgrad: bool) -> None:
    config = configuration("llama")
    config = replace(config, low_precision=LowPrecisionConfig("e4m3", recipe, fp8_wgrad=wgrad))
    with planned_kernels(config.kernels):
        (few, _), (more, _) = (count(own_layers(config, layers)[0]) for layers in (1, 2))
    assert more - few == ROUNDED[recipe, wgrad]


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (128, 8)])
@pytest.mark.parametrize(("options", "most"), OF_EXPERTS, ids=str)
def test_a_layer_launches_no_more_for_more_experts(experts: int, topk: int, options: dict[str, Any], most: int) -> None:
    config = configuration("experts")
    config = replace(config, model=replace(config.model, num_experts=experts, moe_router_topk=topk, **options))
    with planned_kernels(config.kernels):
        (few, _), (more, _) = (count(own_layers(config, layers)[0]) for layers in (1, 2))
    assert more - few <= most


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_the_optimizer_launches_and_waits_no_more_than_it_did(family: str) -> None:
    config = configuration(family)
    with planned_kernels(config.kernels):
        layers, optimizer = own_layers(config, 2)
        found = count(own_update(layers, optimizer))
    runs = sum(len(shard.segments) for shard in optimizer.shards)
    others = len(optimizer.buckets) - 1
    assert found == (OF_A_STEP + OF_A_RUN * runs + OF_A_BUCKET * others, 1)


@pytest.mark.parametrize(("ranks", "flags"), ALLOWED, ids=str)
def test_the_host_waits_in_the_listed_places_alone(ranks: int, flags: str) -> None:
    found = dry_run(config_of(flags), ranks, 0)
    assert found.waits == ALLOWED[ranks, flags]
    assert not found.misplaced


@pytest.mark.parametrize("shapes", [((64, 32), (4, 32, 16)), ((32, 64), (64, 16))], ids=["rows", "weight gradients"])
def test_grouped_products_are_described_quickly_as_by_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    left, right = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    theirs = torch.nn.functional.grouped_mm(left, right, offs=ends)
    ours = SHORT["_grouped_mm"](left, right, ends)
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what the feed-forwards of all layers are given."""
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda module, hidden, *others: forward(module, change(hidden), *others))


def test_a_wait_that_a_layer_adds_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda hidden: hidden / hidden.abs().max().item())
    here = Counter(dry_run(config_of(""), 8, 0).waits) - Counter(ALWAYS)
    assert list(here.values()) == [4]  # one a layer, in one micro-batch


def test_a_tensor_of_the_host_in_a_layer_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        plant(patch, lambda hidden: hidden @ torch.eye(hidden.shape[-1], dtype=hidden.dtype))
        assert dry_run(config_of(""), 8, 0).misplaced
    plant(monkeypatch, lambda hidden: hidden * torch.ones(hidden.shape[-1], dtype=hidden.dtype))
    with pytest.raises(RuntimeError, match="device cpu"):  # from torch itself
        dry_run(config_of(""), 8, 0)
