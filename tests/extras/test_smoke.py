"""A test or two of each room of extras, for `make test`; `make check ROOM=` runs those of a room, CI all."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from tests.distributed.layout_expected import on_ranks
from tests.distributed.post_training_run import exported, policy_steps
from tests.end_to_end.campaign import FAULTY
from tests.end_to_end.runs import GPT2, MOCK, ROOT, iterations, words
from tests.extras.alarms import test_alarms
from tests.extras.chaos import test_chaos
from tests.extras.corruption import gradient_run
from tests.extras.corruption.corruption_run import HASHES, RERUNS, Flip, train
from tests.extras.mixes.mixed_run import WHERE, MixedRun, write_files
from tests.extras.post_training import test_distillation, test_preferences
from tests.extras.post_training.distillation_run import distilled_steps
from tests.extras.post_training.test_layouts import BASE, expected
from tests.extras.report.runs import step, validation, write_run
from tests.extras.synchronization import test_checkpoints, test_late_ranks
from tests.extras.synchronization.test_compression import EXACT, assert_same
from tests.extras.synchronization.test_local_update import run
from tests.harness.fault import Fault
from tests.harness.job import Job
from tests.harness.rank_pool import RankPools
from tests.harness.tool import run_tool

NETWORK = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"


def test_the_planner_finds_layouts(tmp_path: Path) -> None:
    run_flags = words(f"{NETWORK} --vocab-size 32000 --bf16 --global-batch-size 8")
    kept = words("--keep context recompute micro_batch expert")
    found = run_tool("plan", *run_flags, *kept, "--gpus", 4, "--output", tmp_path / "plan.json")
    assert found.code == 0, found.stderr
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    seconds = [each["seconds"] for each in plans]
    assert len(seconds) > 1
    assert seconds == sorted(seconds)
    assert all(4 % (each["row"]["TP"] * each["row"]["PP"]) == 0 for each in plans)


def test_a_mix_goes_on_as_it_was(tmp_path: Path) -> None:
    prefixes = write_files(tmp_path, {"web": 200, "code": 90})
    sources = {name: {"path": prefix} for name, prefix in prefixes.items()}
    run = MixedRun(tmp_path, sources, [{"weights": {"web": 1, "code": 1}}, {"from": 160, "weights": {"code": 1}}])
    mix, again = run.open(), run.open()
    again.resume(WHERE, run.checkpoint(mix), 30, ())
    assert [again[n].tolist() for n in range(100)] == [mix[n].tolist() for n in range(100)]


def test_a_translated_script_gives_flags_of_a_run(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"""
        TP=2; SIZES=({NETWORK})
        torchrun --nproc_per_node $GPUS pretrain_gpt.py ${{SIZES[@]}} --micro-batch-size 2 --global-batch-size 16 \\
            --lr 0.1 --train-iters 5 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 \\
            --tensor-model-parallel-size $TP --use-mcore-models --disable-bias-linear
        """
    )
    done = run_tool("translate", script, "--set", "GPUS=4")
    assert done.code == 0, done.stderr
    command = shlex.split(done.stdout.partition("# the command, complete:\n")[2].replace("\\\n", ""))
    config = resolve(parse_arguments(command[command.index("megalite-pretrain") + 1 :]).config, 4)
    assert config.parallel.tensor_model_parallel_size == 2
    assert not config.model.add_bias_linear


def test_the_doctor_finds_two_ranks_well(spawn: Callable[..., Job], tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    job = spawn([ROOT / "tools" / "doctor.py", "--max-bytes", 4096, "--seconds", 100, "--json", report], 2)
    assert job.wait(120) == [0, 0], job.stderr(0)
    assert job.stdout(0).endswith("verdict: well\n")
    assert json.loads(report.read_text())["drop"] == []


def test_compression_that_leaves_out_nothing_is_plain(rank_pools: RankPools) -> None:
    plain = rank_pools(2).run(run, "", 3)
    assert_same(rank_pools(2).run(run, f"--gradient-compression {EXACT['topk']}", 3), plain)


def test_replicas_with_weights_of_their_own_are_resumed(rank_pools: RankPools, tmp_path: Path) -> None:
    """The trainer of local updates stands in place of the plain one."""
    test_checkpoints.test_a_resumed_run_has_the_same_bits("diloco", rank_pools, tmp_path)


def test_late_ranks_leave_out_micro_batches(rank_pools: RankPools) -> None:
    """The engine, the buckets and the record of the step know of it."""
    test_late_ranks.test_the_rest_is_trained_as_by_one_process(2, 2, test_late_ranks.OVERLAP, rank_pools)


def test_a_killed_program_is_compared_with_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = test_chaos.run(tmp_path / "undisturbed")
    test_chaos.test_a_fault_hits_the_recovery_from_another(undisturbed, tmp_path)


def test_a_loss_function_is_trained_on(rank_pools: RankPools) -> None:
    cell = replace(BASE, tp=2)
    _, figures, *_ = expected(cell.alone())
    for (rank,) in on_ranks(rank_pools, 2, policy_steps, [cell]):
        assert rank.figures == pytest.approx(figures, rel=1e-10)


def test_a_teacher_is_split_as_the_network(rank_pools: RankPools, tmp_path: Path) -> None:
    student = replace(test_distillation.STUDENTS[0], tp=2, sequence_parallel=True)
    exported(test_distillation.teacher_of(student), tmp_path / "teacher")
    _, means = test_distillation.expected(student.alone(), test_distillation.FEW)
    for (rank,) in on_ranks(rank_pools, 2, distilled_steps, [student], tmp_path / "teacher", test_distillation.FEW):
        assert rank.means == pytest.approx(means, rel=1e-10)


def test_pairs_of_responses_are_trained_on(spawn: Callable[..., Job], tmp_path: Path) -> None:
    test_preferences.write_base(tmp_path)
    test_preferences.test_steps_equal_an_independent_loop_in_float64("dpo", tmp_path, spawn, tmp_path)


def test_ranks_start_again_after_a_death(spawn: Callable[..., Job], tmp_path: Path) -> None:
    flags = [*MOCK, *GPT2, "--train-iters", 4, "--save", tmp_path / "run", "--save-interval", 1]
    fault = {"FAULT": str(Fault("forward", 1, 3, "kill")), "FAULT_RECORD": str(tmp_path)}
    job = spawn([FAULTY, *flags, "--resume", "auto", "--warm-restart"], 2, **fault)
    assert job.wait(120) == [0, 0], job.stderr(0) + job.stderr(1)
    assert "\ngeneration 2: rank 1 on " in job.stdout(0)
    assert "was killed by SIGKILL; went on after step 2, " in job.stdout(0)
    assert iterations(tmp_path / "run") == [1, 2, 3, 4]


def test_a_flipped_bit_is_found(rank_pools: RankPools) -> None:
    """Gradients that follow from one weight differ, too; the step before it is checked, and goes on."""
    for course in rank_pools(2).run(train, f"{HASHES} 1 {RERUNS} 2", 4, Flip(1, 3, in_forward=True)):
        assert course.error.startswith("before the update of step 3, rank 1 (")
        assert len(course.bits) == 2


def test_a_wrong_sum_of_gradients_is_found(rank_pools: RankPools) -> None:
    for course in rank_pools(2).run(
        gradient_run.train, f"{gradient_run.SYNC} 1", 3, gradient_run.Wrong("gather", 1, 2)
    ):
        assert "have different gradients along dp" in course.error
        assert (len(course.bits), course.code) == (1, 93)


def test_a_run_goes_back_from_a_spike(rank_pools: RankPools, tmp_path: Path) -> None:
    test_alarms.test_a_run_that_goes_back_is_one_without_the_samples("dp2", rank_pools, tmp_path)


def test_a_run_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path, [step(1), step(2, skipped=True, grad_norm="NaN"), validation(2, 3.5)])
    found = json.loads(run_tool("report", tmp_path, "--json").stdout)
    assert found["runs"][0]["facts"]["best_valid_loss"] == 3.5
    assert run_tool("report", tmp_path).code == 0
    assert "1 step skipped" in (tmp_path / "report.html").read_text()
