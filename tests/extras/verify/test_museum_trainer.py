"""The plain trainer of the museum trains the same on each layout, is accused of nothing, and its bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.extras.verify.checkpoints import open_weights
from megalite.extras.verify.command import read_command
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.verdict import RIGHT, WRONG, Verdict
from megalite.extras.verify.verification import verify
from museum.plain.network import Stage
from museum.plain.ranks import Ranks
from museum.plain.settings import Settings
from museum.plain.weights import load_weights
from museum.trainer import Figures, Patches, run

pytestmark = pytest.mark.extra

IN_FP64: dict[str, Any] = {"dtype": "fp64", "layers": 4, "masked": 0.3, "documents": True, "record": ()}
EXPERTS: dict[str, Any] = {"experts": 4, "auxiliary": 0.05}


@lru_cache
def on_one_process(model: tuple[tuple[str, Any], ...]) -> tuple[list[Figures], dict[str, Tensor]]:
    """Return the figures of each step, and the weights after the first one."""
    with TemporaryDirectory() as folder:
        figures = run(Settings(**IN_FP64, **dict(model)), folder)
        return figures, load_weights(f"{folder}/checkpoint_next")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({}, {"tp": 2, "sp": True, "dp": 2, "zero": True}),
        ({}, {"tp": 4}),  # more ranks than key-value heads
        ({}, {"cp": 2, "dp": 2, "average": True}),
        ({"tied": True}, {"tp": 2, "pp": 2, "sp": True}),
        ({"qk_norm": True}, {"tp": 2, "pp": 2, "schedule": "gpipe"}),
        (EXPERTS, {"ep": 2, "dp": 2, "cp": 2, "average": True, "zero": True}),
        (EXPERTS, {"tp": 2, "sp": True, "pp": 2}),
    ],
    ids=str,
)
def test_each_layout_trains_the_same(model: dict[str, Any], layout: dict[str, Any], tmp_path: Path) -> None:
    figures, weights = on_one_process(tuple(model.items()))
    for found, wanted in zip(run(Settings(**IN_FP64, **model, **layout), tmp_path), figures, strict=True):
        assert found == pytest.approx(wanted, rel=1e-10)  # another order of sums, in fp64
    after = load_weights(str(tmp_path / "checkpoint_next"))
    assert after.keys() == weights.keys()
    for name, wanted in weights.items():
        torch.testing.assert_close(after[name], wanted, rtol=0.0, atol=1e-10 * float(wanted.norm()))


def verified(settings: Settings, folder: Path, patches: Patches | None = None) -> Verdict:
    """Return the verdict on the first step of a run, from what it leaves."""
    run(settings, folder, patches)
    command = read_command((folder / "command.txt").read_text())
    weights = open_weights(str(folder / "checkpoint"), command.config.model)
    return verify(command, weights, read_trace(folder / "trace", None))


@pytest.mark.parametrize(
    "settings",
    [
        Settings(steps=1, tp=2, sp=True, dp=2, average=True),
        Settings(steps=1, cp=2, pp=2, qk_norm=True, documents=True, masked=0.3, dtype="bf16"),
        Settings(steps=1, tp=2, sp=True, pp=2, tied=True),
        Settings(steps=1, dp=2, ep=2, **EXPERTS),
    ],
    ids=lambda settings: f"tp{settings.tp} dp{settings.dp} pp{settings.pp} cp{settings.cp} ep{settings.ep}",
)
def test_a_right_run_is_accused_of_nothing(settings: Settings, tmp_path: Path) -> None:
    verdict = verified(settings, tmp_path)
    assert verdict.exit_code == RIGHT, verdict.line
    known = ("model has no", "the whole model has no", ".experts.", "block_sparse_moe.gate has no")
    assert not [reason for reason in verdict.skipped if not any(each in reason for each in known)]


def nothing(stage: Stage, ranks: Ranks) -> None:
    """Leave gradients as they are."""


def mean_of_micro_batch(losses: Tensor, mask: Tensor, tokens: Tensor, ranks: Ranks) -> Tensor:
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("settings", "name", "wrong", "tensor", "hypothesis"),
    [
        (
            Settings(steps=1, tp=2, sp=True),
            "sum_norm_gradients",
            nothing,
            "gradient of model.layers.1.input_layernorm.weight",
            "the sum over sequence-parallel ranks (axis tp) is missing: each has that of its tokens",
        ),
        (
            Settings(steps=1, pp=2),
            "scale_loss",
            mean_of_micro_batch,
            "output gradient of lm_head",
            "the output gradient of lm_head is 4 times what it should be (the number of micro-batches)",
        ),
        (
            Settings(steps=1, cp=2),
            "reduce_gradients",
            nothing,
            "gradient of model.layers.1.input_layernorm.weight",
            "the sum over axis cp is missing: each has that of its tokens",
        ),
    ],
    ids=["norms with sequence parallelism", "loss of micro-batches", "context parallelism without data parallelism"],
)
def test_planted_bugs_are_found_and_explained(
    settings: Settings, name: str, wrong: Callable[..., Any], tensor: str, hypothesis: str, tmp_path: Path
) -> None:
    verdict = verified(settings, tmp_path, {name: wrong})
    assert verdict.exit_code == WRONG
    assert verdict.line.startswith(tensor)
    assert verdict.hypotheses[0].explains
    assert verdict.hypotheses[0].text == hypothesis


def test_a_name_that_is_not_there_is_no_patch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sum_norms to replace"):
        run(Settings(), tmp_path, {"sum_norms": nothing})
