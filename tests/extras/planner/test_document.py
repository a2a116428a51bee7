"""The page of the planner: its commands print what it shows but for numbers, and its arithmetic comes out."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.optimizer import OptimizerConfig
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.commands import plan
from megalite.extras.planner.device_classes import classes_of, with_device_classes
from megalite.extras.planner.memory import Element

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "planner.md").read_text()
COMMAND = re.compile(r"^```bash\n(.*?)^```.*?^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BILLIONS = 7
SMALL = "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64 --vocab-size 64"


def without_numbers(line: str) -> str:
    """Return a line with one mark for each number and for each bar."""
    return re.sub(r"[#=+*.-]{4,} *", "BAR ", re.sub(r"[+-]?\d[\d,.]*\d|\d", "N", " ".join(line.split())))


@pytest.mark.wide_except("0")
@pytest.mark.costly
@pytest.mark.parametrize("number", range(2))
def test_commands_print_what_the_page_shows(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = COMMAND.findall(PAGE)
    assert len(commands) == PAGE.count("```bash") - 1 == 2  # the third is a run
    command, shown = commands[number]
    python, program, *flags = shlex.split(command.replace("\\\n", ""))
    assert (python, program) == ("python", "tools/plan.py")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program, *flags])
    plan.main()
    printed = {without_numbers(line) for line in capsys.readouterr().out.splitlines()}
    missing = [line for line in shown.splitlines() if line != "..." and without_numbers(line) not in printed]
    assert not missing, "\n".join(missing)


def test_the_cluster_of_the_page_is_one(tmp_path: Path) -> None:
    text, _ = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "ours.toml").write_text(text)
    cluster = find_cluster(str(tmp_path / "ours.toml"))
    assert (cluster.gpu.name, cluster.nodes, cluster.network.beta) == ("H100-SXM", 16, 43e-12)


def test_the_classes_of_the_page_are_those_of_a_run(tmp_path: Path) -> None:
    _, text = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "classes.toml").write_text(text)
    run = plan.completed([*shlex.split(SMALL), "--device-classes", str(tmp_path / "classes.toml")])
    found = classes_of(with_device_classes(run, 48).parallel).classes
    assert [(each.name, each.ranks) for each in found] == [("h100", 16), ("a100", 32)]
    assert found[1].room == 40 * 2**30  # in place of the 80 of that GPU
    assert found[1].on(run).training.recompute_granularity == "full"


def element(*flags: str) -> Element:
    return Element.of(plan.completed([*shlex.split(SMALL), *flags]))


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table below a header, without the line under it."""
    (table,) = re.findall(rf"^{re.escape(header)}\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_bytes_of_zero_come_out() -> None:
    each = element()
    for line in rows("| ranks | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |"):
        ranks, *told = map(float, line)
        for stage, number in enumerate(told):
            parts = [ranks if stage >= first else 1 for first in (3, 2, 1)]
            sizes = (each.parameter, each.gradient, each.state)
            assert number == BILLIONS * sum(size / part for size, part in zip(sizes, parts, strict=True))


def test_the_bytes_of_precisions_come_out() -> None:
    for words, told in rows("| 7 billion parameters | GB |"):
        given = shlex.split(" ".join(re.findall(r"`(.*?)`", words)))
        each = element(*(["--bf16"] if "bf16" in words else []), *given)
        assert float(told) == BILLIONS * (each.parameter + each.gradient + each.state)


def test_adam_keeps_two_averages() -> None:
    sgd = replace(
        plan.completed(shlex.split("--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64"))
    )
    sgd = replace(sgd, optimizer=OptimizerConfig(lr=1.0, optimizer="sgd", sgd_momentum=0.0))
    assert Element.of(sgd).state == 0
