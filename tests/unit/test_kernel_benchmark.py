"""The benchmark of the kernels on a CPU: what it writes, and that no missing rival stops it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_rivals, kernels
from benchmarks.bar_chart import bar_chart
from benchmarks.kernels import judge
from megalite_kernels.cases import cases
from megalite_kernels.measure import step_of

TINY = ["--device", "cpu", "--tokens", "3", "--repeats", "2", "--only", "rms_norm 2048"]


def run(directory: Path, *more: str, code: int = 0) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The table, and all figures."""
    assert kernels.main([*TINY, "--results", str(directory), *more]) == code
    with open(directory / "kernels_cpu.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file)), json.loads((directory / "kernels_cpu.json").read_text())


def test_each_variant_has_a_row_for_each_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rivals, "liger", lambda: {"rms_norm": kernel_rivals.PLAIN["rms_norm"]})
    table, figures = run(tmp_path, "--rivals", "torch", "liger")
    rows = [row for row in table if row["operation"] == "rms_norm 2048 bfloat16"]
    variants = [(row["direction"], row["implementation"]) for row in rows]
    names = ("megalite", "PyTorch", "Liger-Kernel")
    assert variants == [(direction, name) for direction in ("forward", "backward") for name in names]
    for row in table:
        share = float(row["gigabytes_per_second"]) / figures["copy_gigabytes_per_second"]
        assert float(row["of_a_copy"]) == pytest.approx(share)
        assert 0 < float(row["lower_quartile"]) <= float(row["milliseconds"]) <= float(row["upper_quartile"])
    assert len(figures["rows"]) == len(table)
    assert not figures["notes"]
    words = [element.text for element in ElementTree.fromstring((tmp_path / "kernels_cpu.svg").read_text()).iter()]
    assert "rms_norm 2048 bfloat16, backward" in words


def test_a_rival_that_is_missing_or_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_notes(tmp_path, monkeypatch, "--rivals", "torch", "liger")


@pytest.mark.wide  # compiles what the others are
def test_all_rivals_run_beside_those_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_notes(tmp_path, monkeypatch)


def check_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'liger_kernel'")

    def failing(input: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("out of order")

    monkeypatch.setattr(kernel_rivals, "liger", missing)
    monkeypatch.setitem(kernel_rivals.PLAIN, "rms_norm", failing)
    table, figures = run(tmp_path, *flags)
    assert {row["implementation"] for row in table if row["operation"].startswith("rms_norm")} == {"megalite"}
    first, *others = figures["notes"]
    assert "pip install liger-kernel" in first
    assert "PyTorch rms_norm 2048 bfloat16: RuntimeError: out of order" in others


def test_a_rival_that_computes_something_else_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kernel_rivals.PLAIN["rms_norm"]
    monkeypatch.setitem(kernel_rivals.PLAIN, "rms_norm", lambda input, weight: 1.1 * plain(input, weight))
    table, figures = run(tmp_path, "--rivals", "torch")
    assert {row["implementation"] for row in table if row["operation"].startswith("rms_norm")} == {"megalite"}
    assert "PyTorch rms_norm 2048 bfloat16: ValueError: another result than ours, by 0.1" in figures["notes"]


def test_the_loss_is_compared_on_fresh_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that overwrites its logits, as Liger-Kernel does, gives the same loss each time, and so do the others."""
    losses: list[float] = []

    def overwriting(logits: Tensor, labels: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        losses.append(loss.item())
        return loss + 0.0 * logits.detach().zero_().sum()

    notes: list[str] = []
    compared = kernels.of_loss({"liger": {"cross_entropy": overwriting}}, 32, 50, "cpu")
    rows = kernels.measured(compared, 1e9, torch.device("cpu"), 3, notes)
    assert not notes
    assert len(set(losses[1:])) == 1  # the first one is of the few tokens whose results are compared
    assert [row.direction for row in rows[::2]] == ["forward", "backward", "both"]
    wrong = kernels.of_loss({"torch": {}}, 32, 50, "cpu")
    monkeypatch.setattr(kernels, "losses", lambda *_: torch.ones(32))
    kernels.measured(wrong, 1e9, torch.device("cpu"), 3, notes)
    assert "another result" in notes[0]


def test_the_gradient_of_a_scalar_is_one() -> None:
    value = torch.tensor([2.0, 3.0], requires_grad=True)
    seen: list[Tensor] = []
    value.register_hook(seen.append)
    step_of(lambda inputs: [inputs[0].sum()], [value])(lambda: None)
    assert seen[0].tolist() == [1.0, 1.0]


def test_the_verdict_names_both_targets() -> None:
    assert judge(0.9, 0.85, 1.2) == "85% of a copy reached, as fast as torch.compile (1.20 x)"
    assert judge(0.8, 0.85, 0.5) == "85% of a copy MISSED, SLOWER than torch.compile (0.50 x)"
    assert judge(0.8, None, float("inf")) == ""


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main([]) == 2
    assert "there is no GPU here" in capsys.readouterr().err


def test_bars_are_as_long_as_their_shares() -> None:
    svg = ElementTree.fromstring(bar_chart("title", {"a": {"x": 0.5, "y": 1.0}}, 0.85, "85%"))
    bars = [element.attrib["width"] for element in svg.iter() if element.tag.endswith("rect")]
    half, whole = map(float, bars[-2:])
    assert whole == pytest.approx(2 * half)


def test_torchs_own_update_is_a_rival_of_what_it_can_keep(tmp_path: Path) -> None:
    tiny = [*TINY[:-1], "adamw", "--rivals", "torch", "--results", str(tmp_path)]
    assert kernels.main(tiny) == 0
    rows = json.loads((tmp_path / "kernels_cpu.json").read_text())["rows"]
    assert {row["operation"] for row in rows if row["implementation"] == "PyTorch"} == {
        "adamw float32",
        "adamw bfloat16/float32",
    }
    assert len({row["operation"] for row in rows if row["implementation"] == "megalite"}) == 5


def test_rivals_update_as_the_kernels_do() -> None:
    case = next(case for case in cases() if case.name == "adamw float32")
    inputs = case.make_inputs(1, "cpu")
    fused, written = [tensor.clone() for tensor in inputs], [tensor.clone() for tensor in inputs]
    kernel_rivals.PLAIN["adamw float32"](*fused)
    kernel_rivals.COMPILED["adamw float32"](*written)
    for ours, theirs in zip(written[2:], fused[2:], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_operation_that_fails_is_an_error_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(kernels, "of_case", failing)
    assert "an illegal memory access" in run(tmp_path, "--rivals", "torch", code=1)[1]["notes"][0]
    assert "no time was left" in run(tmp_path, "--minutes", "0", "--rivals", "torch")[1]["notes"][0]
