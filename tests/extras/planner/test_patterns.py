"""Plans of layers as letters: memory beside dry runs, bounds, balanced stages, and commands that run them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import RunConfig
from megalite.config.layer_specs import pattern_of
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import layers_of_letters, stage_layers
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.dry_run import dry_run
from megalite.extras.planner.flags import layout_flags, without_layout
from megalite.extras.planner.layouts import is_even, layouts
from megalite.extras.planner.lower_bounds import LowerBounds
from megalite.extras.planner.part_costs import priced
from megalite.extras.planner.parts import Parts
from megalite.extras.planner.plan import Planner
from megalite.extras.planner.split import stage_costs
from megalite.extras.planner.stage_layout import with_stages
from megalite.pipeline.stages import Stages
from tests.end_to_end.runs import Run

GPU = find_cluster("H100-SXM")
RANKS = 8
SIZE = ["--micro-batch-size", "1"]
FLAGS = """--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --seq-length 1024 --micro-batch-size 1
--global-batch-size 16 --position-embedding-type none --normalization RMSNorm --swiglu --disable-bias-linear --bf16
--vocab-size 32000 --tokenizer-type NullTokenizer --mock-data --lr 1 --train-iters 1 --hidden-dropout 0
--attention-dropout 0"""
MAMBA = "--mamba-state-dim 64 --mamba-num-groups 4"
DELTA = "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64"
KIMI = "--kda-num-heads 8 --kda-head-dim 64"
LATENTS = "--q-lora-rank 192 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
LATENTS += " --qk-layernorm --position-embedding-type rope"
INDEXER = "--dsa-indexer-n-heads 8 --dsa-indexer-head-dim 64 --dsa-indexer-topk 128 --dsa-indexer-loss-coeff 0.1"
SPARSE = f"{LATENTS} {INDEXER}"
EXPERTS = "--num-experts 8 --moe-router-topk 2"


def own(argv: list[str]) -> RunConfig:
    return parse_arguments(argv).config


def config_of(flags: str) -> RunConfig:
    return own(f"{FLAGS} {flags}".split())


def _parts(config: RunConfig) -> Parts:
    planner = Planner(config, GPU, 1)
    parts = planner.parts(resolve(planner.config, 1))
    assert parts is not None
    return parts


CELLS = {
    "tp": f"--hybrid-layer-pattern M*-G- {MAMBA} {DELTA} --tp 2 --use-distributed-optimizer",
    "pp": f"--hybrid-layer-pattern M-|*-|MM|- {MAMBA} --pp 4 --overlap-grad-reduce",
    "ep": f"--hybrid-layer-pattern GEG*E {DELTA} {EXPERTS} --ep 4 --tp 2 --sequence-parallel",
    "cp": f"--hybrid-layer-pattern M-G-|*- {MAMBA} {DELTA} --pp 2 --cp 2 --recompute-activations",
    "further": f"--hybrid-layer-pattern KL*-K- {KIMI} --tp 2 --cp 2 --sequence-parallel --use-distributed-optimizer",
    "latents": f"--hybrid-layer-pattern +-G+ {LATENTS} {DELTA} --tp 2 --sequence-parallel",
    "latents, cp": f"--multi-latent-attention --num-layers 4 {LATENTS} --pp 2 --cp 2 --recompute-activations",
    "sparse": f"--hybrid-layer-pattern D-+-D- {SPARSE} --tp 2 --sequence-parallel",
    "sparse, cp": f"--multi-latent-attention --experimental-attention-variant dsa --num-layers 4 {SPARSE} --pp 2 "
    "--cp 2",
    "windows": "--hybrid-layer-pattern *-*|*-- --pp 2 --window-size 99,0 --window-attn-skip-freq [1,0,0,0,0,0]",
    "zero": f"--hybrid-layer-pattern M*-M {MAMBA} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --data-parallel-sharding-strategy optim_grads --untie-embeddings-and-output-weights",
}


@pytest.mark.wide_except("tp", "pp")
@pytest.mark.parametrize("cell", CELLS)
def test_memory_is_that_of_a_dry_run(cell: str) -> None:
    """See test_memory.py. Parts of a layer are recorded beside another of its kind, whatever stands before it."""
    config = config_of(CELLS[cell])
    found = Planner(config, GPU, RANKS)
    plan = found.plan(found.config)
    size = RANKS // config.parallel.pipeline_model_parallel_size
    for stage in {0, len(plan.memory) - 1}:
        wanted = dry_run(config, RANKS, stage * size)
        assert not wanted.misplaced
        memory = plan.memory[stage]
        for kind in ("parameters", "gradients", "optimizer"):
            assert getattr(memory, kind) == pytest.approx(getattr(wanted.memory, kind), rel=2e-3), kind
        assert memory.activations == pytest.approx(wanted.memory.activations, rel=1e-2)
        assert memory.total - GPU.gpu.reserved == pytest.approx(wanted.peak, rel=0.08)


@pytest.mark.wide
def test_a_network_of_which_a_part_is_trained_is_not_planned() -> None:
    config = config_of(f"--hybrid-layer-pattern D-D- {SPARSE} --dsa-stage warmup")
    whole = dry_run(config_of(f"--hybrid-layer-pattern D-D- {SPARSE}"), 1, 0).memory
    assert dry_run(config, 1, 0).memory.gradients < 0.1 * whole.gradients
    with pytest.raises(ConfigurationError, match=r"--dsa-stage warmup trains the indexers alone.*plan --dsa-stage sp"):
        Planner(config, GPU, 1)


@pytest.mark.wide_except("pp")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(f"--hybrid-layer-pattern M-G-*- {MAMBA} {DELTA} --tp 2", id="tp"),
        pytest.param(f"--hybrid-layer-pattern M*-|G-M- {MAMBA} {DELTA} --pp 2 --recompute-activations", id="pp"),
        pytest.param(f"--multi-latent-attention --num-layers 4 {LATENTS} --tp 2 --sequence-parallel", id="latents"),
        pytest.param(f"--hybrid-layer-pattern D-D- {SPARSE} --tp 2 --sequence-parallel", id="sparse"),
    ],
)
def test_activations_are_those_that_ranks_count(flags: str, run: Run) -> None:
    """Two ranks of CPUs count what their first chunk saves, at the start of a run."""
    small = (
        "--hidden-size 128 --seq-length 256 --micro-batch-size 2 --global-batch-size 4 --vocab-size 500 --eval-iters 0"
    )
    out = run(*f"{FLAGS} {flags} {small} --no-bf16 --no-report --eval-iters 0".split(), world_size=2, data=()).stdout
    (counted,) = re.findall(r"^ *activations +([\d.]+) MiB", out, re.MULTILINE)
    planner = Planner(config_of(f"{flags} {small} --no-bf16"), find_cluster("cpu"), 2)
    assert planner.plan(planner.config).memory[0].activations / 2**20 == pytest.approx(float(counted), rel=5e-3)


@pytest.mark.parametrize(
    ("letter", "projected", "inner", "state", "chunk"),
    [
        ("M", 2 * 1024 + 2 * 4 * 64 + 16, 1024, 16 * 64 * 64, 64),
        ("G", 2 * 256 + 2 * 512 + 2 * 8, 512, 8 * 64 * 64, 64),
    ],
)
def test_a_recomputed_recurrent_layer_keeps_its_projection_and_states(
    letter: str, projected: int, inner: int, state: int, chunk: int
) -> None:
    """Also the inputs of its norm and its two products, the output of the recurrence, and of each sum in fp32 one
    number for a token of the norm, one state for a chunk and the last state."""
    flags = f"--hybrid-layer-pattern {letter} {MAMBA if letter == 'M' else DELTA}"
    kept = []
    for more in ("--recompute-activations", ""):
        kept.append(_parts(config_of(f"{flags} {more}")).layers[0].kept)
    wanted = 1024 * (2 * (projected + 2 * inner + 2 * 512) + 4) + 4 * state * (1024 // chunk + 1)
    assert kept[0] == wanted < kept[1] / 2


@pytest.mark.parametrize("frequency", ["2", "4", "[1,1,0,1]", "[1]*4"])
def test_a_gpt_with_linear_attention_has_the_parts_of_its_halves(frequency: str) -> None:
    blocks = f"--num-layers 4 --experimental-attention-variant gdn --linear-attention-freq {frequency}"
    config = config_of(f"{blocks} {DELTA}")
    halves = config_of(f"--hybrid-layer-pattern {pattern_of(config.model.layers)} {DELTA}")
    of_blocks, of_halves = ([part.parameters for part in _parts(each).layers] for each in (config, halves))
    assert of_blocks == [sum(of_halves[at : at + 2]) for at in range(0, 8, 2)]
    assert is_even(config.model, 2) == (frequency == "[1]*4")
    assert not is_even(halves.model, 2)


@pytest.mark.wide_except("dense")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(f"--hybrid-layer-pattern MG*- {MAMBA} {DELTA}", id="dense"),
        pytest.param(f"--hybrid-layer-pattern KL*- {KIMI}", id="further"),
        pytest.param(f"--hybrid-layer-pattern ME*- {MAMBA} {EXPERTS}", id="experts"),
        pytest.param(f"--hybrid-layer-pattern=+-+- {LATENTS}", id="latents"),
        pytest.param(f"--hybrid-layer-pattern=D-D- {SPARSE}", id="sparse"),
    ],
)
def test_bounds_are_below_what_they_bound(flags: str) -> None:
    small = "--vocab-size 512 --seq-length 256"  # so that layers have most of the memory
    planner = Planner(config_of(f"{flags} {small}"), GPU, 2)
    keep = ("recompute", "micro_batch", "context")
    planner = planner.to_search(keep)
    least = LowerBounds(planner.config, 2, planner.prices)
    for layout in layouts(planner.config, 2, keep):
        plan = planner.plan(planner.on(replace(layout, zero=0 if layout.tensor * layout.pipeline == 2 else 1)))
        assert least.seconds(plan.layout) <= plan.step.seconds, plan.layout
        (size,) = least.memory(plan.layout, [plan.layout.zero])
        assert size <= plan.memory[plan.fullest].total, plan.layout


def test_automatic_stages_take_about_as_long_whatever_their_letters() -> None:
    """Four cheap letters and four dear ones on two stages: equal numbers would not be balanced."""
    flags = f"--hybrid-layer-pattern=----GGGG {DELTA} --pp 2 --pipeline-model-parallel-layout auto"
    config, notes = with_stages(config_of(flags), 2)
    layout = config.parallel.pipeline_model_parallel_layout
    assert layout is not None
    first, last = layers_of_letters(layout, config.model)
    assert first > 4 > last
    assert not notes
    assert [stage.layers for stage in stage_layers(config.model, config.parallel)] == [first, last]
    planner = Planner(config, GPU, 2)
    parts = planner.parts(resolve(planner.config, 2))
    assert parts is not None
    costs = [priced(parts, planner.config, planner.prices)] * 2

    def slowest(layers: list[int]) -> float:
        return max(stage_costs(costs, Stages(2), layers))

    assert slowest([first, last]) == min(slowest([count, 8 - count]) for count in range(9))


def test_the_flags_of_a_plan_have_its_stages(tmp_path: Path) -> None:
    """Stages of a pattern become letters of another flag, which a search may set, also in place of those of a file."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {hybrid_layer_pattern: '--|M-M-'}\n")
    for given in (["--hybrid-layer-pattern=--|M-M-"], ["--config", str(file)]):
        argv = [*FLAGS.split(), *MAMBA.split(), *given]
        planner = Planner(own([*argv, *SIZE, "--pp", "2"]), GPU, 2)
        plan = planner.plan(planner.config)
        base = own([*without_layout(argv), *SIZE])
        words = [word for flag in layout_flags(plan.config, base) for word in flag]
        found = resolve(own([*without_layout(argv), *words]), 2)
        assert [stage.layers for stage in stage_layers(found.model, found.parallel)] == [2, 4]
        one = planner.on(replace(plan.layout, pipeline=1, chunks=1))
        words = [word for flag in layout_flags(one, base) for word in flag]
        found = resolve(own([*without_layout(argv), *words]), 2)
        assert [stage.layers for stage in stage_layers(found.model, found.parallel)] == [6]
