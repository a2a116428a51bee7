"""State of runs that communicate less, loaded by another number of ranks: each kind by its rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import Candidates, read_manifest
from megalite.training.display import Display
from megalite.training.resume import ResumePoint
from tests.extras.synchronization.test_checkpoints import LOCAL, train, trainer_of
from tests.extras.synchronization.test_compression import SGD
from tests.harness.checkpoints import read
from tests.harness.rank_pool import RankPools

STEPS = 4
SUMMED = ("residual", "velocity", "residual_of_sites", "residual_of_replicas")
"""State that messages have left out of gradients or of changes of weights: nothing of it may be lost."""
ANCHORED = "anchor outer_momentum"
CASES = {
    "replicas": (4, f"{LOCAL} --gradient-compression topk", 2, "", f"residual_of_replicas {ANCHORED}"),
    "more replicas": (
        2,
        f"{LOCAL} --gradient-compression int8",
        3,
        "--global-batch-size 6",
        f"residual_of_replicas {ANCHORED}",
    ),
    "within and between": (
        6,
        f"{LOCAL} --sites 3 --gradient-compression int8 topk --global-batch-size 12",
        4,
        "--sites 2",
        f"residual residual_of_sum residual_of_replicas {ANCHORED}",
    ),
    "under way": (4, f"{LOCAL} --local-update-delay 2", 2, "", f"exchanged {ANCHORED}"),
    "sites": (4, "--gradient-compression none topk --sites 4", 4, "--sites 2", "residual_of_sites"),
    "ranks of sites": (
        6,
        "--gradient-compression int8 topk --sites 3 --global-batch-size 12",
        4,
        "--sites 2",
        "residual residual_of_sum residual_of_sites",
    ),
    "velocity": (
        4,
        f"{SGD} --gradient-compression dgc --compression-ratio 0.1",
        2,
        "",
        "residual velocity residual_of_sum",
    ),
    "low rank": (3, "--gradient-compression powersgd --compression-rank 1 --global-batch-size 6", 2, "", "residual"),
    "stages": (
        4,
        "--gradient-compression topk --compression-ratio 0.1 --pp 2",
        2,
        "--pp 1",
        "residual residual_of_sum",
    ),
}
"""Ranks and flags of the run that saves, ranks of the one that loads and its flags beside the same, and the state."""


def saved_again(flags: str, folder: Path, source: Path) -> None:
    """Load, and save what has been loaded."""
    trainer = trainer_of(flags, folder)
    path = source / f"iter_{STEPS:07}"
    trainer.load(path, read_manifest(path), ResumePoint(Candidates()))
    trainer.save(Display(9, 1, start_iteration=STEPS, enabled=False), last=True)
    assert trainer.checkpoints is not None
    trainer.checkpoints.close()


def of_replicas(saved: Tensor, count: int, *, summed: bool) -> Tensor:
    """Return what `count` replicas have: the sums of every count-th of the saved ones, or the mean of all."""
    if not summed and len(saved) != count:
        return saved.mean(0, keepdim=True).expand(count, *saved.shape[1:])
    return torch.stack([saved[each::count].sum(0) for each in range(count)])


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_state_follows_other_ranks_by_its_rule(case: str, rank_pools: RankPools, tmp_path: Path) -> None:
    ranks, flags, others, more, expected = CASES[case]
    rank_pools(ranks).run(train, flags, tmp_path / "a", STEPS, after=0)
    rank_pools(others).run(saved_again, f"{flags} {more}", tmp_path / "b", tmp_path / "a")
    before, after = (read(tmp_path / name / f"iter_{STEPS:07}") for name in "ab")
    kinds = set[str]()
    for name, values in after.items():
        kind = name.removeprefix("replica/").removeprefix("optimizer/").split("/")[0]
        saved = before.get(name)
        if saved is None:
            continue
        kinds.add(kind)
        if name.startswith("replica/"):
            saved = of_replicas(saved, len(values), summed=kind in SUMMED)
        torch.testing.assert_close(values, saved, rtol=1e-12, atol=1e-15, msg=name)
    assert kinds >= {"model", *expected.split()}
