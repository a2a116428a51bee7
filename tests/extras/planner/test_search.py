"""The search over layouts: what it finds is what trying every layout finds."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest

from megalite.config import RunConfig
from megalite.config.adapters import AdaptersConfig
from megalite.config.data import DataConfig
from megalite.config.low_precision import LowPrecisionConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ScheduleName
from megalite.config.pipeline_layout import stages_of_letters
from megalite.config.training import TrainingConfig
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.planner import scaling
from megalite.extras.planner.cluster import Cluster, find_cluster
from megalite.extras.planner.commands.plan import completed
from megalite.extras.planner.dry_run import OPTIMIZER, dry_run
from megalite.extras.planner.layouts import AXES, Layout, layouts
from megalite.extras.planner.lower_bounds import LowerBounds
from megalite.extras.planner.neighbours import changes, neighbours
from megalite.extras.planner.plan import Plan, Planner
from megalite.extras.planner.report import (
    as_csv,
    as_json,
    memory_lines,
    neighbour_lines,
    row,
    scaling_lines,
    table,
    time_lines,
)
from megalite.extras.planner.savings import savings
from megalite.extras.planner.search import search
from megalite.extras.planner.split import PartCosts
from megalite.extras.planner.stage_layout import balanced

CLUSTER = find_cluster("H100-SXM")


def run_config(layers: int = 4, experts: int | None = None, batch: int = 4) -> RunConfig:
    model = ModelConfig(
        num_layers=layers,
        hidden_size=4096,
        num_attention_heads=4,
        ffn_hidden_size=8192,
        vocab_size=10_000,
        position_embedding_type="rope",
        swiglu=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_experts=experts,
        moe_ffn_hidden_size=None if experts is None else 1024,
    )
    return RunConfig(
        model=model,
        data=DataConfig(seq_length=2048, mock_data=True, tokenizer_type="NullTokenizer"),
        optimizer=OptimizerConfig(lr=1e-4),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=batch, bf16=True, train_iters=1),
    )


def small(cluster: Cluster, memory: float) -> Cluster:
    """Return a cluster whose GPUs have this memory."""
    return replace(cluster, gpu=replace(cluster.gpu, memory=memory, reserved=0.0))


def every_plan(planner: Planner, keep: tuple[str, ...] = ()) -> list[Plan]:
    """Return the plans of all layouts."""
    planner, found = planner.to_search(keep), []
    for layout in layouts(planner.config, planner.gpus, keep):
        alone = planner.gpus == layout.tensor * layout.pipeline
        for stage in [0] if alone else range(4):
            each = replace(layout, zero=stage)
            if planner.parts(each.on(planner.config)) is not None and not planner.changes_nothing(each):
                found.append(planner.plan(planner.on(each)))
    return found


@pytest.mark.wide_except("config0-85000000000.0-keep0", "config1-7000000000.0-keep1")
@pytest.mark.parametrize(
    ("config", "memory", "keep"),
    [
        (run_config(batch=2), 85e9, ("context", "recompute")),
        (run_config(batch=2), 7e9, ("context", "micro_batch")),  # where most do not fit
        (run_config(layers=3, batch=2), 85e9, ("recompute",)),  # which two stages cannot divide evenly
        (run_config(layers=2, experts=4, batch=2), 85e9, ("context", "recompute")),
        (replace(run_config(batch=2), low_precision=LowPrecisionConfig("e4m3")), 9e9, ("context", "recompute")),
    ],
)
def test_the_first_ones_are_the_fastest_of_all_that_fit(
    config: RunConfig, memory: float, keep: tuple[str, ...]
) -> None:
    planner = Planner(config, small(CLUSTER, memory), 2)
    found = search(planner, top=5, keep=keep)
    plans = every_plan(planner, keep)
    fitting = sorted(plan.step.seconds for plan in plans if not plan.missing)
    assert [plan.step.seconds for plan in found.plans] == pytest.approx(fitting[:5], rel=1e-12)
    assert all(not plan.missing for plan in found.plans)
    if len(fitting) < 5:  # all of them were looked at
        assert sum(each.count for each in found.misfits.values()) >= len(plans) - len(fitting)
    assert found.counts["possible"] >= found.counts["recorded"] >= found.counts["simulated"] >= len(found.plans)


@pytest.mark.parametrize(
    "config",
    [
        run_config(),
        run_config(layers=2, experts=4),
        replace(run_config(), low_precision=LowPrecisionConfig("e4m3", "tensorwise", fp8_wgrad=True)),
        replace(run_config(), low_precision=LowPrecisionConfig("e4m3", first_last_layers_bf16=True)),
        replace(run_config(), adapters=AdaptersConfig(lora_rank=4)),
    ],
)
def test_bounds_are_below_what_they_bound(config: RunConfig) -> None:
    planner = Planner(config, CLUSTER, 2)
    least = LowerBounds(planner.config, 2, planner.prices)
    for plan in every_plan(planner, keep=("recompute", "micro_batch", "context")):
        assert least.seconds(plan.layout) <= plan.step.seconds, plan.layout
        (size,) = least.memory(plan.layout, [plan.layout.zero])
        assert size <= plan.memory[plan.fullest].total, plan.layout


def test_axes_stay_that_are_to_be_kept() -> None:
    planner = Planner(run_config(), CLUSTER, 4)
    for plan in search(planner, top=20, keep=("tensor", "context", "zero", "recompute")).plans:
        assert (plan.layout.tensor, plan.layout.zero, plan.layout.recompute) == (1, 0, "none")
    kept = list(layouts(planner.config, 4, AXES))
    assert [replace(each, zero=0) for each in kept] == [Layout.of(planner.config)]


def test_context_parallel_ranks_alone_may_shard_a_run() -> None:
    found = search(Planner(run_config(batch=1), CLUSTER, 2), 20, ("tensor", "pipeline", "recompute"))
    assert {plan.layout.context for plan in found.plans} == {2}
    assert {plan.layout.zero for plan in found.plans} >= {0, 1, 3}


def test_runs_that_no_layout_splits_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"^no layout of 7 GPUs splits this run: [^\n]*batch-size 4$"):
        search(Planner(run_config(), CLUSTER, 7))
    config = run_config()
    config = replace(config, training=replace(config.training, global_batch_size=None))
    with pytest.raises(ConfigurationError, match="--global-batch-size is missing"):
        search(Planner(config, CLUSTER, 4))


def test_flags_that_no_layout_mends_are_refused_with_their_reason() -> None:
    config = run_config()
    both = replace(config, optimizer=replace(config.optimizer, lr_warmup_iters=1, lr_warmup_fraction=0.1))
    with pytest.raises(ConfigurationError, match="give the warm-up as "):
        search(Planner(both, CLUSTER, 2))


def test_recomputation_that_changes_nothing_may_be_kept() -> None:
    config = run_config(experts=2)
    training = replace(config.training, recompute_granularity="selective", recompute_modules=("moe_act",))
    keep = ("recompute", "tensor", "pipeline", "context", "micro_batch", "schedule")
    (found,) = search(Planner(replace(config, training=training), CLUSTER, 2), 1, keep).plans
    assert found.layout.recompute == "selective"


def test_what_is_missing_and_what_would_save_it() -> None:
    planner = Planner(run_config(), small(CLUSTER, 8e8), 2)
    found = search(planner)
    assert not found.plans
    nearest = found.nearest(planner)
    assert nearest is not None
    assert nearest.missing >= min(each.missing for each in found.misfits.values()) > 0  # some of which are bounds
    lines = list(savings(planner, nearest))
    assert any(line.startswith("ZeRO 3 on twice the GPUs: ") for line in lines)
    assert all("GiB" in line for line in lines)


def test_only_what_saves_memory_is_advised_and_in_flags_that_run() -> None:
    config = run_config()
    config = replace(config, model=replace(config.model, vocab_size=64))  # whose logits take less than layers
    planner = Planner(config, small(CLUSTER, 8e8), 1)
    plan = planner.plan(planner.config)
    texts = dict(line.split(": ", 1) for line in savings(planner, plan))
    (advice,) = (flags for flags in texts if "recompute" in flags)
    run = shlex.split("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 4")
    assert completed([*run, *shlex.split(advice)]).training.recompute_granularity == "full"
    assert "--grad-reduce-in-bf16" in texts
    assert "--fused-linear-cross-entropy" not in texts


def test_another_network_or_kernel_is_judged_by_its_own_records() -> None:
    """Records of the plan have the logits that a fused loss does without."""
    config = run_config(layers=1)
    wide = replace(config.model, vocab_size=200_000, hidden_size=512, ffn_hidden_size=512)
    planner = Planner(replace(config, model=wide), small(CLUSTER, 1e8), 1)
    lines = list(savings(planner, planner.plan(planner.config)))
    assert any(line.startswith("--fused-linear-cross-entropy: ") for line in lines)


def test_neighbours_differ_in_one_thing() -> None:
    planner = Planner(run_config(), CLUSTER, 4)
    plan = planner.plan(planner.on(replace(Layout.of(planner.config), zero=1)))
    found = neighbours(planner, plan)
    seconds = [each.plan.step.seconds for each in found]
    assert seconds == sorted(seconds)
    assert {"TP 1 -> 2", "PP 1 -> 2", "ZeRO 1 -> 0", "recompute none -> full"} <= {each.change for each in found}
    for each in found:
        changed = [axis for axis in AXES if getattr(each.plan.layout, axis) != getattr(plan.layout, axis)]
        assert changed or each.change == "with overlap of DP messages", each.change
    texts = list(neighbour_lines(plan, found))
    assert len(texts) == len(found) + 1


def test_a_change_of_a_layout_leaves_all_other_flags() -> None:
    """Without it, --explain would compare a run with others that overlap messages and have other stages."""
    config = run_config()
    parallel = replace(
        config.parallel,
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et*3|tL",
        ddp_bucket_size=10_000,
    )
    planner = Planner(replace(config, parallel=parallel), CLUSTER, 4)
    plan = planner.plan(planner.config)
    same = planner.plan(planner.on(plan.layout, plan.config))
    assert same.config == plan.config
    found = {each.change: each.plan for each in neighbours(planner, plan)}
    for change in ("TP 1 -> 2", "ZeRO 0 -> 1", "micro-batch 1 -> 2"):
        parallel = found[change].config.parallel
        assert parallel.pipeline_model_parallel_layout == "Et*3|tL"
        assert (parallel.overlap_grad_reduce, parallel.ddp_bucket_size) == (False, 10_000)
    assert found["VP 1 -> 2"].config.parallel.pipeline_model_parallel_layout is None
    overlapped = found["with overlap of DP messages"]
    assert overlapped.layout == plan.layout
    assert overlapped.step.cost.data < plan.step.cost.data
    (size,) = scaling.sizes(planner, plan, 4, 4)
    assert size.grown == plan.step.cost


def test_each_neighbour_is_another_run_and_is_there_once() -> None:
    planner = Planner(run_config(), CLUSTER, 4)
    for pipeline in (
        {"pipeline": 2},
        {"pipeline": 2, "chunks": 2, "schedule": "zb-v"},
    ):
        plan = planner.plan(planner.on(replace(Layout.of(planner.config), **pipeline)))
        configs = [plan.config, *(each.plan.config for each in neighbours(planner, plan))]
        assert all(configs.count(each) == 1 for each in configs)


def test_changes_of_a_pipeline_keep_schedules_that_exist() -> None:
    layout = Layout(2, True, 2, 1, "1f1b", 1, 0, 2, 1, "none", 1)
    found = dict(changes(layout))
    assert found["PP 2 -> 1"].schedule == "1f1b"
    assert found["VP 1 -> 2"].schedule == "interleaved-1f1b"
    assert found["TP 2 -> 1"].sequence is False
    assert found["without SP"] == replace(layout, sequence=False)


def test_the_table_has_the_headers_of_megatron_bridge() -> None:
    planner = Planner(run_config(), CLUSTER, 4)
    plan = planner.plan(planner.config)
    bridge = (
        "#-GPUs|Precision|GBS|MBS|Sequence Length|FSDP|TP|PP|CP|VP|EP|GA|Tokens / sec / GPU|Model TFLOP / sec / GPU"
    )
    assert list(row(plan))[:14] == bridge.split("|")
    header, line = table([plan])
    assert header.split()[0] == "#-GPUs"
    assert line.split()[:3] == ["4", "BF16", "4"]
    assert as_csv([plan]).splitlines()[0].startswith("#-GPUs,Precision,GBS,MBS")
    found = as_json(plan)
    assert sum(found["seconds_by_cause"].values()) == pytest.approx(found["seconds"])
    shares = [float(each.split()[-1].rstrip("%")) for each in time_lines(plan.step.cost)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100.0, abs=0.5)
    assert "stage" in list(memory_lines(plan))[1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_dry_run_confirms_the_memory(schedule: ScheduleName) -> None:
    planner = Planner(run_config(batch=32), small(CLUSTER, 85e9), 4)
    plan = planner.plan(planner.on(replace(Layout.of(planner.config), pipeline=2, zero=1, schedule=schedule)))
    rank, peak = planner.confirm(plan)
    assert rank == plan.fullest * 2
    assert peak == pytest.approx(plan.memory[plan.fullest].total, rel=0.05)


def test_gpipe_holds_the_activations_of_all_micro_batches() -> None:
    found = []
    for batch in (16, 32):
        planner = Planner(run_config(batch=batch), CLUSTER, 4)
        plan = planner.plan(planner.on(replace(Layout.of(planner.config), pipeline=2, zero=1, schedule="gpipe")))
        found.append(plan.memory[0].activations)
    assert found[1] == pytest.approx(2 * found[0], rel=0.01)


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_the_optimizer_takes_as_long_as_what_it_launches(rule: Literal["adam", "muon"]) -> None:
    """Compare with the dry run of a whole rank, whose optimizer the parts only add up to."""
    config = replace(run_config(), optimizer=OptimizerConfig(lr=1e-4, optimizer=rule))
    planner = Planner(config, CLUSTER, 1)
    plan = planner.plan(planner.config)
    work = dry_run(config, 1, 0).work[OPTIMIZER]
    parts = planner.parts(plan.config)
    assert parts is not None
    updates = [each.update for each in (parts.stage, parts.embedding, parts.head, *parts.layers)]
    assert sum(each.launches for each in updates) == pytest.approx(work.launches, rel=0.3)
    products = sum((each.products for each in updates), Counter())
    assert products == Counter({each: n for each, n in work.operations.items() if each.kind == "product"})
    assert bool(products) == (rule == "muon")
    seconds = planner.prices.work(work, plan.config.parallel, of_layer=False).total
    assert plan.step.cost.optimizer == pytest.approx(seconds, rel=0.25)  # the host waits for the norm


def test_an_update_reads_and_writes_what_adam_does() -> None:
    """Count 34 bytes: both averages and the master there and back, the weight, and the gradient twice, for the norm."""
    planner = Planner(run_config(), CLUSTER, 1)
    parts = planner.parts(planner.config)
    assert parts is not None
    layer = parts.layers[0]
    assert layer.update.bytes / layer.parameters == pytest.approx(34, rel=0.15)


def test_matrices_are_divided_among_data_parallel_ranks() -> None:
    config = replace(run_config(batch=16), optimizer=OptimizerConfig(lr=1e-4, optimizer="muon"))
    one, four = (Planner(config, CLUSTER, gpus) for gpus in (1, 4))
    alone, shared = (planner.plan(planner.config).step.cost.optimizer for planner in (one, four))
    assert 0.25 * alone < shared < 0.75 * alone


def test_growing_batches_keep_the_efficiency_and_equal_ones_lose_it() -> None:
    planner = Planner(run_config(batch=16), CLUSTER, 2)
    found = scaling.sizes(planner, planner.plan(planner.config), 1, 32)
    assert [each.gpus for each in found] == [1, 2, 4, 8, 16, 32]
    assert found[-1].same is None
    assert found[3].same is not None
    assert found[0].same is not None
    assert found[3].same.total > found[0].same.total / 8
    assert found[3].grown.total < 1.5 * found[0].grown.total
    text = "\n".join(scaling_lines(found))
    assert "Amdahl's serial fraction" in text
    assert "too small" in text
    with pytest.raises(ConfigurationError, match=r"--scaling 3\.\.3"):
        scaling.sizes(planner, planner.plan(planner.on(replace(Layout.of(planner.config), pipeline=2))), 3, 3)


def test_the_serial_fraction_is_amdahls() -> None:
    times = [(count, 10 * (0.1 + 0.9 * 8 / count)) for count in (8, 16, 64)]
    assert scaling.serial_fraction(times) == pytest.approx(0.1)


def test_stages_are_balanced_by_cost() -> None:
    costs = PartCosts(embedding=0.0, layers=(1.0,) * 6, head=2.0)
    assert balanced(costs, 2) == "Et*4|t*2L"
    assert balanced(costs, 4) == "Et*2|(t*2|)*2L"
    assert stages_of_letters(balanced(costs, 4)) == ["Ett", "tt", "tt", "L"]
    assert balanced(PartCosts(0.0, (1.0,), 0.0), 1) == "EtL"


def test_layouts_that_do_not_divide_a_network_are_no_plans() -> None:
    planner = Planner(run_config(), CLUSTER, 3)
    with pytest.raises(MegaliteError):
        planner.plan(replace(Layout.of(planner.config), tensor=3, expert_tensor=3).on(planner.config))
