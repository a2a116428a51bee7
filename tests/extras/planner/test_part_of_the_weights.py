"""Plans of runs that multiply in few bits, or train a part of their weights, against dry runs and figures by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.commands.plan import completed
from megalite.extras.planner.cost import Cost, Prices
from megalite.extras.planner.data_parallel import DataParallel
from megalite.extras.planner.dry_run import dry_run, planned_kernels
from megalite.extras.planner.parts import Parts, part_records
from megalite.extras.planner.plan import Planner, with_vocabulary
from megalite.extras.planner.search import search
from megalite.tasks.adapters import adapter_products

FLAGS = """--num-layers 4 --hidden-size 512 --num-attention-heads 4 --ffn-hidden-size 1024 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --vocab-size 1000 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1
--global-batch-size 8 --bf16 --lr 1 --train-iters 1 --hidden-dropout 0 --attention-dropout 0"""
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params"
BLOCKWISE, TENSORWISE = "--fp8-format e4m3", "--fp8-format hybrid --fp8-recipe tensorwise"
RANKS = 8


def run(flags: str) -> RunConfig:
    return resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, RANKS)


def recorded(config: RunConfig) -> Parts:
    with planned_kernels(config.kernels):
        return part_records(with_vocabulary(config))


@pytest.fixture(autouse=True)
def gpu_kernels() -> None:
    pytest.importorskip("triton")  # without it, records are those of a CPU


@pytest.mark.parametrize(
    ("flags", "share"), [(BLOCKWISE, 2 / 3), (TENSORWISE, 2 / 3), (TENSORWISE + " --fp8-wgrad", 0.5)]
)
def test_a_rounded_product_takes_half_the_time(flags: str, share: float) -> None:
    """Forward and input gradients are rounded, weight gradients if it is asked for; the head and attention are not."""
    cluster = find_cluster("H100-SXM")
    prices = Prices(replace(cluster, gpu=replace(cluster.gpu, half=0.0, kernel=0.0, bandwidth=1e30)))
    seconds = []
    for config in map(run, ("", flags)):
        parts = recorded(config)
        of_layer, of_head = (
            sum(prices.passes(each, config, of_layer=True), Cost()) for each in (parts.layers[1], parts.head)
        )
        seconds.append((of_layer.products, of_layer.attention, of_head.products))
        weights = prices.weight_gradients(parts.layers[1], config, of_layer=True)
    (plain, attention, head), found = seconds
    assert found == pytest.approx((plain * share, attention, head), rel=1e-4)
    assert weights == pytest.approx(plain / 3 * (0.5 if share == 0.5 else 1.0), rel=1e-4)


def test_layers_that_are_left_are_those_of_bf16() -> None:
    flags = f"{BLOCKWISE} --first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    plain, rounded, some = (recorded(run(each)).layers for each in ("", BLOCKWISE, flags))
    assert [each.codes > 0 for each in some] == [False, True, False, False]
    assert some[1].forward == rounded[1].forward
    assert some[0].forward == some[2].forward == plain[0].forward


def test_a_gather_of_codes_is_that_of_a_dry_run() -> None:
    """A byte for each element that is rounded, and two for the others; scales follow from one message of maxima."""
    config = run(f"{ZERO_3} {BLOCKWISE} --fp8-param-gather")
    layer = recorded(config).layers[0]
    assert layer.rounded == (512 * (4 * 512 + 2 * 1024), 0)
    messages = dry_run(config, RANKS, 0).total.messages
    sizes = [each.bytes for each in messages if each.kind == "all-gather" and len(each.ranks) == RANKS]
    dense, experts = layer.gathered(2, as_codes=True)
    assert {layer.rounded[0], dense - layer.rounded[0]} <= set(sizes)
    assert experts == 0
    assert 2 * (layer.parameters - layer.rounded[0]) == dense - layer.rounded[0]


def test_weights_are_rounded_once_in_a_step_but_where_zero_3_frees_them() -> None:
    prices = Prices(find_cluster("H100-SXM"))
    found = []
    for flags in (BLOCKWISE, f"{ZERO_3} {BLOCKWISE}", f"{ZERO_3} {BLOCKWISE} --fp8-param-gather"):
        config = run(flags)
        found.append(DataParallel(config, RANKS, prices).rounding(recorded(config).layers[0]))
    (of_pass, once), whole, slices = found
    assert (of_pass, once) == whole[::-1]
    assert of_pass == 0.0 < once
    assert slices[1] == pytest.approx(once / RANKS)
    assert 0.0 < slices[0] < once


def test_adapters_are_counted_as_a_dry_run_counts_them() -> None:
    """The adapter of the embedding is A x alone; with it, both runs need the first layer's input gradient."""
    lora = "--lora-rank 4 --load base --lora-target-modules word_embeddings"
    fewer, more = (run(f"{lora} {names}") for names in ("", "query down output_layer"))
    flops = [dry_run(each, RANKS, 0).total.flops for each in (fewer, more)]
    counts = [adapter_products(with_vocabulary(each).model, each.adapters) or 0.0 for each in (fewer, more)]
    assert counts[0] == 4 * 512
    assert flops[1] - flops[0] == 256 * 3 * 2 * (counts[1] - counts[0])


def test_a_search_with_gathers_of_codes_is_among_layouts_of_zero_3() -> None:
    config = run(f"{ZERO_3} {BLOCKWISE} --fp8-param-gather")
    found = search(Planner(config, find_cluster("H100-SXM"), 2), 3, ("tensor", "pipeline", "context", "recompute"))
    assert {plan.layout.zero for plan in found.plans} == {3}


@pytest.mark.parametrize(
    ("cluster", "flags", "message"),
    [
        (
            "A100-SXM-80GB",
            BLOCKWISE,
            r"^--fp8-recipe blockwise with --cluster A100-SXM-80GB: .* Ada, Hopper, Blackwell alone, ",
        ),
        ("MI300X", TENSORWISE, r"^--fp8-recipe tensorwise with --cluster MI300X: .* Ada, Hopper, Blackwell alone, "),
        ("H100-SXM", "--fp8-format e4m3 --fp8-recipe mxfp8", "^--fp8-recipe mxfp8: mxfp8 runs on CPUs alone"),
        (
            "H100-SXM",
            "--load x --lora-rank 4 --lora-target-modules layers.1.*",
            "^--lora-target-modules layers.1.*: plans",
        ),
        ("H100-SXM", "--freeze layers.[0-2].*", r"^--freeze layers.\[0-2\].*: plans take all layers"),
    ],
)
def test_what_a_plan_cannot_say_is_refused(cluster: str, flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Planner(completed(f"{FLAGS} {flags}".split()), find_cluster(cluster), RANKS)


@pytest.mark.parametrize("flags", [BLOCKWISE, "--fp8-format e4m3 --fp8-recipe mxfp8 --kernels reference"])
def test_gpus_that_run_a_recipe_are_planned(flags: str) -> None:
    """Every GPU with FP8 runs blocks, and every one emulates."""
    planner = Planner(completed(f"{FLAGS} {flags}".split()), find_cluster("B200"), RANKS)
    assert planner.plan(planner.config).step.seconds > 0


def test_frozen_weights_have_no_messages_of_gradients() -> None:
    prices = Prices(find_cluster("H100-SXM"))
    seconds = []
    for flags in ("", "--lora-rank 4 --load base"):
        config = run(f"--use-distributed-optimizer {flags}")
        found = DataParallel(config, RANKS, prices).exchange([(recorded(config).layers[0], 1, 0.0, 0.0)])
        seconds.append((found.reduce, found.gather, found.update))
    assert all(few < whole for few, whole in zip(seconds[1], seconds[0], strict=True))
