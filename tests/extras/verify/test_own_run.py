"""megalite traces its own steps, on any layout: the same bits come out, and megalite-verify finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import CheckpointError, ConfigurationError
from megalite.extras.verify.own_run import StepTraces
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.trace import OF_MODULES
from megalite.extras.verify.verdict import RIGHT, WRONG, Verdict
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from tests.end_to_end.runs import COURSE, MOCK, SIZES, Run
from tests.extras.verify.traced_run import FLAGS, train, verdict_on
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.harness.tool import run_tool

ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ZERO_3 = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
SP = "--tp 2 --sequence-parallel"
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"""
NORM = "layers.1.input_norm.weight"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear --ep 2"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "one rank, fp64": ("--fp64", 1),
    "recomputed": (RECOMPUTED, 1),
    "tensor and sequence parallel": (SP, 2),
    "tensor and sequence parallel, bf16": (f"--bf16 {SP}", 2),
    "stages in turn": ("--pp 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", 2),
    "no bubbles": (f"--pp 2 --pipeline-schedule zb-h1 {LLAMA}", 2),
    "ZeRO 1": (ZERO_1, 2),
    "ZeRO 3, bf16": (f"{ZERO_3} --bf16", 2),
    "context parallel": ("--cp 2", 2),
    "experts": (EXPERTS, 2),
    "fp16": ("--fp16 --initial-loss-scale 1024", 2),
    "documents": ("--cp 2 --reset-position-ids --reset-attention-mask --eod-mask-loss", 2),
    "shared heads": (f"--tp 4 --sequence-parallel {LLAMA}", 4),
    "context, tensor and sequence parallel": (f"--cp 2 {SP}", 4),
    "experts and ZeRO 1": (f"{EXPERTS} {SP} {ZERO_1} --moe-shared-expert-intermediate-size 8", 4),
    "further tokens": (f"--pp 2 {SP} --mtp-num-layers 2 --position-embedding-type rope", 4),
    "one further token, all tokens on each rank": (f"--tp 2 --mtp-num-layers 1 --vocab-size 31 {LLAMA}", 2),
    "one further token": (f"{SP} --mtp-num-layers 1 --position-embedding-type rope", 2),
    "recurrent layers": (f"{SP} --hybrid-layer-pattern M-M- --num-layers 4 --mamba-state-dim 8 --mamba-head-dim 4", 2),
    "instances of ZeRO 2": (
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads "
        "--num-distributed-optimizer-instances 2",
        4,
    ),
}
WIDE = [*LAYOUTS][10:]


def largest(verdict: Verdict) -> float:
    """Return the largest distance, as a multiple of what rounding explains."""
    return max(each.ratio for each in (*verdict.judgements, *verdict.figures))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.wide if name in WIDE else ()) for name in LAYOUTS]
)
def test_a_right_step_is_right_under_any_layout(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    flags, ranks = LAYOUTS[name]
    rank_pools(ranks).run(train, flags, tmp_path)
    verdict = verdict_on(tmp_path, flags, ranks)
    print(f"{name}: {len(verdict.judgements)} tensors, at most {largest(verdict):.2f} times what rounding explains")
    assert verdict.exit_code == RIGHT, verdict.line
    assert {figure.name for figure in verdict.figures} == {"loss", "grad_norm"}
    assert {each.entry.rank for each in verdict.judgements} == set(range(ranks))
    roles = {each.entry.role for each in verdict.judgements}
    assert roles == {*OF_MODULES, "parameter", "main_gradient"}
    left_out = sum(verdict.skipped.values())
    assert left_out <= 0.15 * len(verdict.judgements), verdict.skipped
    if name in ("tensor and sequence parallel", "stages in turn", "ZeRO 1", "context parallel"):
        assert left_out == 0, verdict.skipped
    assert not verdict.notes or all("is given more than once" in note for note in verdict.notes), verdict.notes


@pytest.mark.bits
@pytest.mark.parametrize(
    ("flags", "ranks"), [("--pp 2 --fp16", 2), (f"{SP} --bf16", 2), (f"{ZERO_1}", 2), (ZERO_3, 2)], ids=str
)
def test_a_traced_step_has_the_bits_of_another(flags: str, ranks: int, rank_pools: RankPools, tmp_path: Path) -> None:
    plain = rank_pools(ranks).run(train, flags, None, steps=2)
    assert rank_pools(ranks).run(train, flags, tmp_path, steps=2) == plain


@pytest.mark.parametrize(
    ("fault", "flags", "name", "role", "kind", "text"),
    [
        ("norms not summed", SP, NORM, "main_gradient", "sum", "sum over sequence-parallel ranks (axis tp) is missing"),
        (
            "output not summed",
            "--tp 2",
            "layers.1.attention.output",
            "output",
            "sum",
            "the sum over axis tp is missing",
        ),
        ("gradients of one rank", ZERO_1, NORM, "main_gradient", "sum", "the sum over axis dp is missing"),
        ("gradients twice", "--pp 2", "head.norm", "output_gradient", "factor", "is 2 times what it should be"),
    ],
)
def test_a_fault_is_found_at_its_tensor_with_its_cause(
    fault: str, flags: str, name: str, role: str, kind: str, text: str, rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(2).run(train, flags, tmp_path, fault)
    verdict = verdict_on(tmp_path, flags, 2)
    assert verdict.exit_code == WRONG
    assert verdict.first is not None
    assert (verdict.first.entry.name, verdict.first.entry.role) == (name, role), verdict.line
    best = verdict.hypotheses[0]
    assert (best.kind, best.explains) == (kind, True), verdict.hypotheses
    assert text in best.text


def test_a_run_saves_what_a_verification_needs(run: Run, tmp_path: Path) -> None:
    """The first step does not even need a checkpoint: flags tell the initial weights."""
    flags = [*MOCK, *SIZES, *COURSE, "--train-iters", 3, "--tp", 2, "--sequence-parallel", "--bf16", "--pp", 1]
    run(*flags, "--save", tmp_path / "run", "--trace-steps", 1, 3, "--trace-whole", world_size=2)
    trace = tmp_path / "run" / "trace"
    assert sorted(each.name for each in trace.iterdir()) == ["step_0000001", "step_0000003"]
    assert not (tmp_path / "run" / "iter_0000001").exists()
    command = "--command", f"torchrun --nproc-per-node 2 pretrain_gpt.py {' '.join(map(str, flags))}", "--trace", trace
    first = run_tool("verify", *command)
    assert (first.code, first.stderr) == (RIGHT, "")
    third = run_tool("verify", *command, "--step", 3, "--checkpoint", tmp_path / "run" / "iter_0000002")
    assert (third.code, third.stderr) == (RIGHT, "")
    assert "no bug: all " in first.stdout
    assert "no bug: all " in third.stdout
    of_others = run_tool("verify", *command, "--step", 3)
    assert of_others.code == 64
    assert "give --checkpoint" in of_others.stderr
    other = run_tool("verify", *command, "--step", 3, "--checkpoint", tmp_path / "run" / "iter_0000003")
    assert other.code == WRONG
    assert other.stdout.startswith(f"trace {trace}: parameter "), other.stdout


def test_nothing_is_recorded_of_other_steps(tmp_path: Path) -> None:
    train("", tmp_path, steps=2)
    assert [each.name for each in tmp_path.iterdir()] == ["step_0000001"]
    trace = read_trace(tmp_path, None)
    assert trace.program == "megalite"
    assert trace.figures["loss_scale"] == 1.0
    assert trace.coordinates == {0: dict.fromkeys(("tp", "pp", "cp", "dp", "ep", "etp", "edp"), (0, 1))}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--trace-whole", "--trace-whole needs --trace-steps"),
        ("--trace-steps 0", "--trace-steps 0: must be at least 1"),
        ("--trace-steps 1 100 --trace-dir d", "--trace-steps 100 is beyond --train-iters 9"),
        ("--trace-steps 1", "--trace-steps needs a folder: give --save or --trace-dir"),
        ("--trace-steps 1 --save s3://bucket/run", "--trace-steps needs a folder: give --save or --trace-dir"),
        (
            "--trace-steps 1 --save d --rerun-on-replica-interval 1",
            "--rerun-on-replica-interval, whose steps run twice",
        ),
        ("--trace-steps 1 --save d --optimizer-cpu-offload", "does not go with an optimizer or weights on the host"),
    ],
)
def test_what_cannot_be_traced_is_refused(flags: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        config = resolve(parse_arguments([*FLAGS.split(), *flags.split()]).config, 2)
        trainer = gpt_trainer(config, open_data(config), ParallelMesh(world_size=2))
        StepTraces(trainer)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("offset", "told"), [([10**9], "is not within"), ([-1], None), ("first", None), ([0, 0], None)]
)
def test_a_part_that_is_nowhere_is_left_out_or_refused(offset: object, told: str | None, tmp_path: Path) -> None:
    train("", tmp_path)
    (index,) = tmp_path.glob("step_*/rank_00000.json")
    fields = json.loads(index.read_text())
    (entry,) = [each for each in fields["entries"] if (each["name"], each["role"]) == (NORM, "main_gradient")]
    entry["shape"], entry["place"]["offset"] = [8], offset
    index.write_text(json.dumps(fields))
    if told is None:
        with pytest.raises(CheckpointError, match="has the place"):
            read_trace(tmp_path, 1)
    else:
        assert any(told in reason for reason in verdict_on(tmp_path, "", 1).skipped)
