"""Texts during training: those that generation from a checkpoint gives, on any layout, and training does not change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.training.display import Display
from megalite.training.metrics import is_figure
from tests.end_to_end.runs import BYTES, COURSE, LLAMA, MOCK, PRETRAIN, SIZES, ended, metrics, words
from tests.harness.job import Job
from tests.harness.tool import run_tool

PROMPTS = ("Once", "two\nlines")
STEPS = "--train-iters 4 --eval-iters 1 --eval-interval 2 --eval-global-batch-size 4"
DENSE = (*LLAMA, *words("--num-layers 4"))
EXPERTS = (
    *DENSE,
    *words("--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"),
)
NETWORKS = {"dense": DENSE, "experts": EXPERTS}
LAYOUTS = [
    ("dense", "--tp 2 --sequence-parallel", 2),
    ("dense", "--data-parallel-sharding-strategy optim_grads_params", 2),
    *(
        pytest.param(network, layout, ranks, marks=pytest.mark.wide)
        for network, layout, ranks in (
            ("dense", "--pp 2", 2),
            ("dense", "--pp 2 --num-layers-per-virtual-pipeline-stage 1", 2),
            ("dense", "--pp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 4),
            ("experts", "--tp 2 --sequence-parallel --ep 2 --etp 1", 2),
        )
    ),
]


def trained(folder: Path, network: str, layout: str, ranks: int, *others: object) -> tuple[list[dict[str, Any]], str]:
    """Train for four steps in fp64 with dropout. Returns the records, without what depends on the machine."""
    flags = [*BYTES, *NETWORKS[network], *words(STEPS), *words(layout), "--fp64", *others, "--save", folder / "run"]
    with Job([PRETRAIN, *flags], ranks, folder / f"job{len(others)}") as job:
        shown = ended(job).stdout
    return metrics(folder / "run"), shown


def texts(lines: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(line["iteration"], line["sample"]) for line in lines if "sample" in line]


def without_texts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "sample" not in line]


FLAGS = ("--sample-interval", "2", "--sample-tokens", "20", "--sample-prompts", *PROMPTS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Return a function that returns the folder of a run with texts on one rank, by its network, and its screen."""

    @functools.cache
    def made(network: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(network)
        return folder / "run", trained(folder, network, "", 1, *FLAGS)[1]

    return made


def test_texts_are_those_of_generation_and_change_nothing(
    alone: Callable[[str], tuple[Path, str]], tmp_path: Path
) -> None:
    folder, shown = alone("dense")
    lines = metrics(folder)
    assert without_texts(lines) == trained(tmp_path, "dense", "", 1)[0]
    found = texts(lines)
    assert [step for step, _ in found] == [2, 2, 4, 4]
    assert [text[: len(prompt)] for (_, text), prompt in zip(found, 2 * PROMPTS, strict=True)] == [*2 * PROMPTS]
    assert found[:2] != found[2:]
    assert "\nsample after step 2:\n  Once" in shown
    generated = run_tool("generate", "--load", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 20)
    assert generated.stdout == f"{found[2][1]}\n"


@pytest.mark.parametrize(("network", "layout", "ranks"), LAYOUTS)
def test_texts_are_the_same_on_any_layout(
    network: str, layout: str, ranks: int, alone: Callable[[str], tuple[Path, str]], tmp_path: Path
) -> None:
    lines, _ = trained(tmp_path, network, layout, ranks, *FLAGS)
    assert texts(lines) == texts(metrics(alone(network)[0]))
    (tmp_path / "without").mkdir()
    assert without_texts(lines) == trained(tmp_path / "without", network, layout, ranks)[0]


def test_a_run_that_continues_writes_each_text_once(tmp_path: Path) -> None:
    flags = [*BYTES, *SIZES, *COURSE, *words("--sample-interval 1 --train-iters 3 --sample-tokens 5"), "--save"]
    with Job([PRETRAIN, *flags, tmp_path / "whole"], 1, tmp_path / "job1") as job:
        ended(job)
    for number, code in enumerate((85, 0)):
        stop = words("--exit-interval 2") if code else ()
        with Job([PRETRAIN, *flags, tmp_path / "run", "--resume", "auto", *stop], 1, tmp_path / f"job{number}") as job:
            ended(job, code)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert [step for step, _ in texts(metrics(tmp_path / "run"))] == [1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ((*MOCK, "--sample-interval", "2"), 1, "needs a tokenizer of text, and the NullTokenizer has none"),
        ((*BYTES, "--sample-interval", "2", "--cp", "2"), 2, "needs whole samples, so --context-parallel-size 1"),
        ((*BYTES, *words("--sample-interval 2 --asynchronous parameter-server")), 2, "take no steps together"),
        ((*BYTES, "--sample-tokens", "2"), 1, "--sample-tokens needs --sample-interval"),
        ((*BYTES, "--sample-prompts", "x"), 1, "--sample-prompts needs --sample-interval"),
    ],
)
def test_what_can_write_no_text_is_refused(flags: tuple[str, ...], world_size: int, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        resolve(parse_arguments([*flags, *SIZES, *COURSE, "--train-iters", "4"]).config, world_size)


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        (
            ("--sample-prompts", "x" * 33),
            1,
            "--sample-interval: the prompt has 33 tokens, but the model has learned 32 positions",
        ),
        (words("--num-experts 2 --ep 2 --disable-bias-linear"), 2, "--sample-interval: generation needs each"),
    ],
)
def test_what_cannot_generate_ends_before_the_first_step(
    flags: tuple[str, ...], ranks: int, expected: str, tmp_path: Path
) -> None:
    with Job(
        [PRETRAIN, *BYTES, *SIZES, *COURSE, *words("--train-iters 2 --sample-interval 1"), *flags], ranks, tmp_path
    ) as job:
        done = ended(job, 64)
    assert expected in done.stderr
    assert "step 1" not in done.stdout


def test_a_text_looks_like_no_line_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(None, 1) as display:
        display.sample(3, "a\r\x1b[2Jb\nfinished after step 9\n")
    assert capsys.readouterr().out == "sample after step 3:\n  a\n  \\x1b[2Jb\n  finished after step 9\n"
    assert is_figure("sample")
