"""The check that runs on machines with GPUs: what it has found is kept, whatever comes after."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_as_rank,
    gpu_check,
    gpu_context,
    gpu_experts,
    gpu_lowbits,
    gpu_numbers,
    gpu_own_model,
    gpu_rounded_training,
    gpu_scaled_products,
    gpu_speed,
    gpu_state,
    gpu_training,
)
from benchmarks.gpu_as_rank import Published
from benchmarks.gpu_check import Report
from benchmarks.gpu_shapes import SMALL, Shape
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite_kernels.cases import cases

RUN = ["--device", "cpu", "--results"]


def right(report: Report) -> None:
    report.tell("benchmark", {"error": 0.5}, "right")


def broken(report: Report) -> None:
    report.tell("training", {"variant": "kernels"}, "first")
    raise RuntimeError("the GPU fell off the bus")


def wrong(report: Report) -> None:
    report.fail("resume: bits differ")


def run(monkeypatch: pytest.MonkeyPatch, directory: Path, parts: dict[str, Any], *more: str) -> tuple[int, dict]:
    """The exit code, and what was written, all files together."""
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    code = gpu_check.main([*RUN, str(directory), "--only", *parts, *more])
    return code, written(directory, parts)


def written(directory: Path, parts: dict[str, Any]) -> dict:
    """Rows by part, and what is wrong and slow in any of them."""
    together: dict[str, Any] = {"wrong": [], "slow": []}
    for part in parts:
        found = json.loads((directory / f"gpu_check_{part}_cpu.json").read_text())
        assert found["device"] == "CPU"
        wrong, slow = together["wrong"] + found.pop("wrong"), together["slow"] + found.pop("slow")
        together |= {**found, "wrong": wrong, "slow": slow}
    return together


def test_a_part_that_fails_costs_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = run(monkeypatch, tmp_path, {"training": broken, "benchmark": right})
    assert (code, found["wrong"]) == (1, ["training: failed"])
    assert found["training"][0] == {"variant": "kernels"}
    assert "the GPU fell off the bus" in found["training"][1]["failed"]
    assert found["benchmark"] == [{"error": 0.5}]
    code, found = run(monkeypatch, tmp_path, {"resume": broken, "benchmark": right})
    assert code == 1
    assert found["wrong"] == ["resume: failed"]
    assert found["benchmark"] == [{"error": 0.5}]


def test_wrong_numbers_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = run(monkeypatch, tmp_path, {"benchmark": right, "resume": wrong})
    assert code == 1
    assert found["wrong"] == ["resume: bits differ"]


def test_no_part_begins_when_no_time_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = run(monkeypatch, tmp_path, {"benchmark": wrong}, "--minutes", "0")
    assert code == 2
    assert found["benchmark"] == [{"left out": "no time was left"}]


def test_what_was_not_checked_is_named_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(report: Report) -> None:
        report.tell("resume", {"losses": {"left out": "one GPU"}}, "one GPU")
        report.tell("resume", {"error": 0.5}, "right")
        report.deadline = 0.0

    def late(report: Report) -> None:
        raise TimeoutError

    code, _ = run(monkeypatch, tmp_path, {"resume": begun, "layouts_": late, "benchmark": right})
    said = capsys.readouterr().out
    assert code == 0
    assert "IN PART CHECKED: resume: one GPU\nNOT CHECKED: layouts_: no time was left\n" in said
    assert "nothing is wrong in what was checked of resume, benchmark;" in said


def test_without_a_gpu_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--results", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())


def test_what_needs_a_gpu_is_not_said_to_be_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([*RUN, str(tmp_path), "--only", "kernels", "layouts"]) == gpu_check.NOTHING_CHECKED
    assert capsys.readouterr() == ("", "needs a GPU and was not checked: kernels, layouts\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.wide  # two processes that import torch
def test_processes_side_by_side_check_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu_numbers, "PROCESSES", 2)
    chosen = [case for case in cases() if case.name in ("rms_norm 128 float32", "rms_norm 128 float16")]
    found = list(gpu_numbers.check_side_by_side(chosen, "cpu"))
    assert [numbers.case.name for numbers in found] == [case.name for case in chosen]
    assert all(numbers.right and not numbers.failure for numbers in found)
    with pytest.raises(TimeoutError):
        list(gpu_numbers.check_side_by_side(chosen, "cpu", deadline=0.0))


def test_what_is_slow_is_not_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "compare_with_copy", lambda device: {"int8 pack": 9.0, "fp8 pack": 99.0})
    monkeypatch.setattr(Report, "gpu", True)
    report = Report(tmp_path, "cpu", part="compression")
    gpu_check.check_compression(report)
    assert (report.wrong, report.slow) == ([], ["compression: int8 pack takes 9.00 copies, and 3.0 would do"])


@pytest.mark.wide
def test_codes_of_few_bits_and_their_products_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "check_rounded_training", lambda report: None)
    code, found = run(monkeypatch, tmp_path, {"lowbits": gpu_check.check_lowbits})
    assert (code, found["wrong"]) == (0, [])
    assert [list(row) for row in found["lowbits"][:2]] == [["bytes that differ"], ["error of products"]]
    monkeypatch.setattr(gpu_check.gpu_lowbits, "different_codes", lambda device: {"blockwise plain": 1})
    monkeypatch.setattr(gpu_check.gpu_lowbits, "product_errors", lambda device: {"blockwise": 0.5, "mxfp8": "no GPU"})
    code, found = run(monkeypatch, tmp_path, {"lowbits": gpu_check.check_lowbits})
    assert (code, found["wrong"]) == (1, ["lowbits: codes or scales", "lowbits: blockwise product"])


def test_codes_of_parts_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_lowbits.different_codes_of_parts("cpu", "blockwise") == 0
    monkeypatch.setattr(gpu_lowbits.Matrices, "largest", lambda self, values, start: torch.ones(self.grid))
    assert gpu_lowbits.different_codes_of_parts("cpu", "blockwise") > 0


def test_products_of_blocks_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The emulation stands for Triton's kernel here: it is right, and wrong when a row is not in its group."""
    monkeypatch.setattr(gpu_scaled_products, "COUNTS", (0, 1, 5))
    monkeypatch.setattr(gpu_scaled_products, "WIDTHS", ((130, 20),))
    report = Report(tmp_path, "cpu", part="lowbits")
    gpu_check.check_scaled_products(report)
    assert report.wrong == []
    errors, different, times = (row.popitem()[1] for row in report.found["lowbits"])
    assert len(errors) == 6
    assert all(0.0 < error < 2.0**-8 for error in errors.values())
    assert set(different.values()) == {0}
    assert set(times) == {"experts of bf16", "whole of cuBLAS"}

    right = gpu_scaled_products.grouped_product

    def next_row(a: Any, b: Any, offsets: Any, ends: Any, by: Any, dtype: torch.dtype) -> Any:
        return right(a, b, offsets, ends, by, dtype).roll(int(dtype != torch.float64), 0)

    monkeypatch.setattr(gpu_scaled_products, "grouped_product", next_row)
    monkeypatch.setattr(gpu_scaled_products, "times", lambda device: {"experts of bf16": 1.5})
    monkeypatch.setattr(Report, "gpu", True)
    gpu_check.check_scaled_products(report)
    groups = [f"lowbits: Triton's product of groups, {format}, 130 to 20" for format in ("e4m3", "hybrid")]
    assert report.wrong == [*groups, "lowbits: Triton's products of groups"]
    assert report.slow == ["lowbits: products of experts take 1.50 of the time of bf16's"]
    monkeypatch.setattr(gpu_check, "refusal", lambda recipe, device: "no GPU has it")
    gpu_check.check_scaled_products(report)
    assert report.found["lowbits"][-1] == {"Triton's products": "no GPU has it"}


def test_training_in_8_bits_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Losses further from the CPU's than bf16's by more than rounding are wrong; time and memory are slow at most."""
    away = {"bf16": 1e-4, "tensorwise": 7e-4, "blockwise": math.nan}

    def train(flags: str, processes: int, *, gpu: bool, deadline: float) -> list[dict[str, Any]]:
        way = flags.split("--fp8-recipe ")[1].split()[0] if "--fp8" in flags else "bf16"
        assert way in away
        assert processes == (2 if "--tp 2" in flags else 1)
        factor = 1.0 + away[way] if "--tp 2" in flags else 1.0
        return [{"lm_loss": 7.0 * factor, "iteration_time_s": 0.9 if way == "blockwise" else 1.0}] * 2

    monkeypatch.setattr(gpu_rounded_training, "train", train)
    monkeypatch.setattr(Report, "gpu", True)
    monkeypatch.setattr(Report, "gpus", 2)
    report = Report(tmp_path, "cpu", part="lowbits")
    gpu_check.check_rounded_training(report)
    assert report.wrong == ["lowbits: losses in blockwise", f"lowbits: losses in {gpu_rounded_training.LEAST}"]
    assert report.slow == [
        "lowbits: layers with blockwise, activations in fp8 keep 0.68 of the bytes that they keep in bf16",
        "lowbits: a blockwise step takes 0.90 of a bf16 step's time",
    ]
    _, distances, *steps = report.found["lowbits"]
    assert distances["distance of losses from the CPU's"]["tensorwise"] == pytest.approx(7e-4)
    assert [row["step in"] for row in steps] == list(gpu_rounded_training.WAYS)


def test_a_llama_keeps_fewer_bytes_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in bf16 of 17 widths of a token are the inputs of norms, queries, keys, values and attention's output."""
    sizes = {"layers": 1, "hidden": 512, "heads": 8, "groups": 2, "ffn": 1792, "sequence": 32}
    monkeypatch.setattr(gpu_rounded_training, "SMALL", replace(SMALL, **sizes))
    found = gpu_rounded_training.kept_bytes("cpu")
    assert found["blockwise"] < 0.89 * found["bf16"]
    assert found[gpu_rounded_training.LEAST] < gpu_rounded_training.KEPT * found["bf16"]


def test_kept_bytes_follow_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no weight is among them."""
    found = gpu_rounded_training.kept_bytes("cpu")
    monkeypatch.setattr(gpu_rounded_training, "SMALL", replace(SMALL, micro_batch=2))
    scales = {name: (name == "tensorwise") * 2 * 4 * 4 for name in found}  # one of each product of two layers
    twice = {name: 2 * size - scales[name] for name, size in found.items()}
    assert gpu_rounded_training.kept_bytes("cpu") == twice


def test_ways_that_a_gpu_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"blockwise": "no GPU has it"}
    monkeypatch.setattr(gpu_rounded_training, "refusal", lambda recipe, device: refused.get(recipe.name))
    step = {"lm_loss": 7.0, "iteration_time_s": 1.0}
    monkeypatch.setattr(gpu_rounded_training, "train", lambda *given, **options: [step])
    found = gpu_rounded_training.distances("cpu", 1, math.inf)
    refused |= {gpu_rounded_training.LEAST: "no GPU has it"}
    assert found == {"bf16": 0.0, "tensorwise": 0.0, **refused}
    assert gpu_rounded_training.too_far(found) == []
    assert gpu_rounded_training.too_far({**found, "bf16": 0.1, "tensorwise": 0.2}) == ["bf16"]
    assert list(gpu_rounded_training.step_times("cpu", math.inf)) == ["bf16", "tensorwise"]
    assert list(gpu_rounded_training.kept_bytes("cpu")) == ["bf16", "tensorwise"]


@pytest.mark.wide  # trainings in processes of their own
def test_training_in_8_bits_is_the_cpus_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network = gpu_rounded_training.NETWORK.replace("--train-iters 20", "--train-iters 2")
    monkeypatch.setattr(gpu_rounded_training, "NETWORK", network)
    monkeypatch.setattr(gpu_rounded_training, "ROUNDS", 1)
    report = Report(tmp_path, "cpu", part="lowbits")
    gpu_check.check_rounded_training(report)
    assert (report.wrong, report.slow) == ([], [])
    _, distances, *steps = report.found["lowbits"]
    assert set(distances["distance of losses from the CPU's"].values()) == {0.0}
    assert all(row["time of bf16"] > 0 for row in steps)


SHALLOW = replace(SMALL, layers=1)


def train_by_hand(seconds: dict[str, float], **worse: float) -> Any:
    """A training of as many seconds a step as the variant and the number of layers say, in FLOPs of its layers."""

    def run_once(name: str, shape: Shape, gpus: int, *, gpu: bool, deadline: float) -> gpu_speed.Run:
        if name not in seconds:
            raise subprocess.CalledProcessError(70, "pretrain_gpt.py")
        steps = [
            {
                "iteration_time_s": time,
                "lm_loss": 7.0 + worse.get(name, 0.0),
                "grad_norm": 1.0,
                "wall_time": each * time,
            }
            for each, time in enumerate([seconds[name] * shape.layers] * shape.steps)
        ]
        if name not in gpu_speed.RIVALS:
            for step in steps:
                step["model_tflops_per_device"] = 1e-12 * 60 * shape.layers / step["iteration_time_s"]
        return gpu_speed.Run(name, shape, steps, [gpu_state.Sample(0.0, ("1", "1", "90.5", "1"), "0x0")])

    return run_once


def test_variants_and_rivals_train_in_turn_and_one_that_fails_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "run_once", train_by_hand({"kernels": 2.0, "PyTorch": 4.0}))
    cells = [("kernels", SMALL), ("--compile", SMALL), ("PyTorch", SMALL)]
    rows = list(gpu_speed.run_in_turn(cells, 1, gpu=False, deadline=math.inf))
    assert [row["variant"] for row in rows] == ["kernels", "--compile", "PyTorch", "kernels", "PyTorch"]
    assert rows[1] == {"variant": "--compile", "layers": 2, "failed": "exit code 70"}
    ours, rival = rows[0], rows[2]
    assert ours["milliseconds"] == [4000.0] * 5
    assert ours["mean milliseconds of the wall clock"] == ours["mean milliseconds"] == 4000.0
    assert "power.draw" not in ours  # it was sampled before the timed steps alone
    assert ours["largest relative difference"] == {"lm_loss": 0.0, "grad_norm": 0.0}
    assert ours["TFLOP/s per GPU"] == pytest.approx(2 * rival["TFLOP/s per GPU"])  # the rival's FLOPs are ours
    assert "largest relative difference" not in rival
    assert not [row for row in gpu_speed.run_in_turn(cells, 2, gpu=False, deadline=math.inf) if "PyTorch" in str(row)]
    late = list(gpu_speed.run_in_turn(cells, 1, gpu=False, deadline=0.0))
    assert {row["left out"] for row in late} == {"no time was left"}


def test_what_has_no_time_is_left_out_and_the_rest_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run_once = train_by_hand({"kernels": 2.0})

    def hanging(name: str, *given: Any, **options: Any) -> gpu_speed.Run:
        if name == "PyTorch":
            raise subprocess.TimeoutExpired("gpu_rival", 1.0)
        return run_once(name, *given, **options)

    monkeypatch.setattr(gpu_speed, "run_once", hanging)
    cells = [("kernels", SMALL), ("kernels", SHALLOW), ("PyTorch", SMALL)]
    rows = list(gpu_speed.run_in_turn(cells, 1, gpu=False, deadline=math.inf))
    assert rows[2] == {"variant": "PyTorch", "layers": 2, "left out": "no time was left"}
    assert rows[-1]["a layer of"] == "kernels"


def test_a_layer_takes_what_more_layers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "run_once", train_by_hand({"kernels": 2.0, "PyTorch": 3.0}))
    cells = [(name, shape) for name in ("kernels", "PyTorch") for shape in (SMALL, SHALLOW)]
    *_, ours, rival = gpu_speed.run_in_turn(cells, 1, gpu=False, deadline=math.inf)
    assert (ours["a layer of"], ours["milliseconds"]) == ("kernels", 2000.0)
    assert ours["TFLOP/s per GPU"] == pytest.approx(30e-12)
    assert (rival["a layer of"], rival["TFLOP/s per GPU"]) == ("PyTorch", pytest.approx(20e-12))


@pytest.mark.parametrize("worse", [0.5, math.nan])
def test_a_variant_that_computes_something_else_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worse: float
) -> None:
    run_once = train_by_hand(dict.fromkeys(("kernels", "layers compiled"), 1.0), **{"layers compiled": worse})
    monkeypatch.setattr(gpu_speed, "run_once", run_once)
    monkeypatch.setattr(gpu_speed, "ORDER", (gpu_speed.OURS, "layers compiled"))
    code, found = run(monkeypatch, tmp_path, {"training": gpu_check.check_training})
    assert code == 1
    assert set(found["wrong"]) == {"training: lm_loss of layers compiled with 2 layers is another"}


def test_a_variant_that_fails_is_wrong_and_a_rival_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_speed, "run_once", train_by_hand(dict.fromkeys(gpu_speed.VARIANTS, 1.0)))
    code, found = run(monkeypatch, tmp_path, {"training": gpu_check.check_training})
    assert (code, found["wrong"]) == (0, [])
    assert [row["variant"] for row in found["training"] if "failed" in row] == list(gpu_speed.RIVALS)
    monkeypatch.setattr(gpu_speed, "run_once", train_by_hand({}))
    code, found = run(monkeypatch, tmp_path, {"training": gpu_check.check_training})
    assert code == 1
    assert sorted(found["wrong"]) == sorted(f"training: {name} with 2 layers failed" for name in gpu_speed.VARIANTS)


def test_an_operation_that_cannot_be_timed_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check.kernels, "main", lambda arguments: 1)
    code, found = run(monkeypatch, tmp_path, {"benchmark": gpu_check.check_benchmark})
    assert (code, found["wrong"]) == (1, ["benchmark: an operation failed"])


@pytest.mark.wide  # trainings in processes of their own
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_small_networks_train_at_two_depths_beside_the_rival(
    compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_speed, "ROUNDS", 1)
    if not compiled:
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    code, found = run(monkeypatch, tmp_path, {"layers": gpu_check.check_layers})
    assert code == 0
    product, *rows = found["layers"]
    assert product["TFLOP/s per GPU"] > 0
    assert product["attention"] == "FLASH_ATTENTION"
    assert not [row for row in rows if "failed" in row]
    assert [row["a layer of"] for row in rows[-2:]] == ["kernels", "PyTorch"]


def test_figures_of_nvidia_smi_are_summed_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures of the time in question alone, without those that it does not know and lines that it has cut."""
    lines = [
        "2026/11/27 23:09:01.000, 345, 2619, 90.1, 40, 0x1", "2026/11/27 23:09:02.000, 1980, 2619, 650.5, 60, 0x4",
        "2026/11/27 23:09:03.500, 1700, 2619, [N/A], 61, 0x0", "2026/11/27 23:09:04.000, 1980, 26",
    ]  # fmt: skip
    script = tmp_path / "nvidia-smi"
    script.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), "exec sleep 60"]))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with gpu_state.sampled() as samples:
        time.sleep(0.3)
    begin = datetime(2026, 11, 27, 23, 9, 2).timestamp()
    found = gpu_state.summary(samples, begin, begin + 2)
    assert found["clocks.sm"] == [1700.0, 1840.0, 1980.0]
    assert found["power.draw"] == [650.5] * 3
    assert found[gpu_state.REASONS] == ["0x0", "0x4"]
    assert gpu_state.summary(samples, 0.0, 1.0) == {}


def test_a_training_is_ended_when_no_time_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one that hangs; that is nothing wrong, and what was found before stays."""

    def hanging(report: Report) -> None:
        report.tell("resume", {"variant": "kernels"}, "first")
        gpu_training.train("--no-flag-is-read", 1, gpu=False, deadline=time.monotonic())

    code, found = run(monkeypatch, tmp_path, {"resume": hanging})
    assert code == 0
    assert found["resume"] == [{"variant": "kernels"}, {"left out": "no time was left"}]
    assert found["wrong"] == []


def test_what_was_found_is_there_whatever_ends_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def dying(report: Report) -> None:
        report.tell("resume", {"steps that differ": 3}, "3")
        report.fail("resume: bits differ")
        raise SystemExit(137)

    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, {"resume": dying})
    found = written(tmp_path, {"resume": dying})
    assert (found["resume"], found["wrong"]) == ([{"steps that differ": 3}], ["resume: bits differ"])


def test_a_layout_that_fails_is_wrong_and_the_others_are_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(flags: str, processes: int, *, gpu: bool, deadline: float) -> list[dict[str, float]]:
        if "gpipe" in flags:
            raise subprocess.CalledProcessError(70, "pretrain_gpt.py")
        return [{"lm_loss": 7.0, "grad_norm": 1.0}]

    monkeypatch.setattr(gpu_training, "train", train)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, found = run(monkeypatch, tmp_path, {"layouts_of_1": gpu_check.check_layouts})
    assert code == 1
    assert found["wrong"] == [f"layouts: {f} {o} gpipe" for o in ("adam", "muon") for f in gpu_training.FAMILIES]
    assert found["layouts"][-1]["largest relative difference"] == 0.0


def test_layers_with_experts_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Products are right here, too; a wait too many is slow, and other losses with DeepEP are wrong."""
    code, found = run(monkeypatch, tmp_path, {"experts_of_1": gpu_check.check_experts})
    assert code == 0
    assert found["experts"][0]["error of grouped products"] < 4e-3
    assert found["experts"][1] == {"DeepEP": {"left out": "one GPU"}}

    def train(flags: str, processes: int, *, gpu: bool, deadline: float) -> list[dict[str, float]]:
        assert processes == 4
        return [{"lm_loss": 7.0 if "flex" in flags else 7.1, "iteration_time_s": 1.0}]

    monkeypatch.setattr(gpu_experts, "train", train)
    monkeypatch.setattr(gpu_experts, "why_unavailable", lambda *arguments: None)
    monkeypatch.setattr(gpu_check, "host_waits", lambda *, padded: (1, 0))
    monkeypatch.setattr(gpu_check, "check_grouped_products", lambda device: 0.0)
    monkeypatch.setattr(Report, "gpu", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    report = Report(tmp_path, "cuda")
    gpu_check.check_experts(report)
    assert report.wrong == ["experts: losses with DeepEP"]
    assert report.slow == ["experts: padded: the host waits 1 times in forward and 0 in backward"]


@pytest.mark.wide
def test_context_parallelism_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Attention by parts is right here, too; other losses by one of the ways are wrong."""
    code, found = run(monkeypatch, tmp_path, {"context": gpu_check.check_context})
    assert code == 0
    *parts, times, losses, ring = found["context"]
    assert times["parts beside whole"]["parts over whole"] > 0
    assert [row["attention by parts"] for row in parts] == list(gpu_context.CASES)
    assert all(0 < row["error over tolerance"] < 1 for row in parts)
    assert losses == {"losses": {"left out": "one GPU"}}
    assert ring == {"ring": {"left out": "one GPU"}}

    def train(flags: str, processes: int, *, gpu: bool, deadline: float) -> list[dict[str, float]]:
        assert processes == (2 if "--cp 2" in flags else 1)
        return [{"lm_loss": 7.1 if flags.endswith("a2a") else 7.0}]

    times = {"ring": 1.5, "ring without overlap": 2.0, "attention alone": 2.0}
    monkeypatch.setattr(gpu_context, "train", train)
    monkeypatch.setattr(gpu_check, "check_parts", lambda device: {"flash": 0.5, "unfused": math.nan})
    monkeypatch.setattr(gpu_check, "time_parts", lambda device: {})
    monkeypatch.setattr(gpu_check, "compare_overlap", lambda gpus: gpu_context.with_ratios(times, gpus))
    monkeypatch.setattr(Report, "gpus", 2)
    report = Report(tmp_path, "cuda")
    gpu_check.check_context(report)
    assert report.wrong == ["context: attention by parts, unfused", "context: losses by a2a"]
    ring = report.found["context"][-1]["ring"]
    assert (ring["ring over attention alone"], ring["ring without overlap over attention alone"]) == (1.5, 2.0)


@pytest.mark.wide  # four trainings in processes of their own
def test_a_model_of_ones_own_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = run(monkeypatch, tmp_path, {"own model": gpu_check.check_own_model})
    assert code == 0
    (row,) = found["own model"]
    assert row["largest relative difference"] == 0.0
    assert row["log-probability difference"] < gpu_own_model.LOG_PROBABILITIES


def test_other_losses_of_a_model_of_ones_own_are_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = {"largest relative difference": 1e-3, "log-probability difference": 1e-3}
    monkeypatch.setattr(gpu_own_model, "compare", lambda deadline: wrong)
    report = Report(tmp_path, "cuda")
    gpu_check.check_own_model(report)
    assert report.wrong == ["own model: losses", "own model: log-probabilities"]


def test_layouts_of_several_gpus_include_context_parallelism() -> None:
    for family in gpu_training.FAMILIES:
        assert {"CP 2 p2p", "CP 2 a2a"} <= dict(gpu_training.layouts(4, family)).keys()
        assert not any("--cp" in flags for _, flags in gpu_training.layouts(1, family))


@pytest.mark.wide  # builds a rank of a published layout
def test_ranks_of_layouts_run_alone_on_a_cpu_and_a_failure_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = gpu_as_rank.SMALL["small"]
    broken = Published(3, small.flags)
    monkeypatch.setattr(gpu_as_rank, "SMALL", {"small": small, "broken": broken})
    code, found = run(monkeypatch, tmp_path, {"as-rank": gpu_check.check_as_rank})
    assert code == 1
    right, failed = found["as rank"]
    assert right["rank"] == "0 of 8"
    assert right["step"].endswith(")")
    assert "GiB at the peak" in right["memory"]
    assert failed["failed"]
    assert found["wrong"] == ["as rank: broken"]


@pytest.mark.parametrize("name", gpu_as_rank.LAYOUTS)
def test_published_layouts_are_valid(name: str) -> None:
    layout = gpu_as_rank.LAYOUTS[name]
    flags = f"{gpu_as_rank.COMMON} {layout.flags}".split()
    resolve(parse_arguments(flags, lambda *_: {}).config, layout.ranks)
