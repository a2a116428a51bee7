"""Pairs of what a run of a model of one's own does besides its steps with layouts: evaluations, interruptions, and sums
of gradients in another way."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.own_model import (
    EVALUATED,
    NETWORKS,
    Cell,
    batch_of,
    built,
    micro_batches,
    optimizer_of,
    set_buffers,
    total,
)
from tests.harness.close import assert_number_close
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

STEPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2": {"dp": 2},
    "dp3": {"dp": 3},
    "dp2-zero1": {"dp": 2, "zero": 1, "overlap": True},
    "dp4-zero2": {"dp": 4, "zero": 2, "instances": 2, "micro_batches": 1},
    "dp2-zero3": {"dp": 2, "zero": 3, "overlap": True},
    "pp2": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved-1f1b"},
    "zb-v": {"dp": 2, "pp": 2, "zero": 1, "schedule": "zb-v"},
    "gpipe": {"pp": 3, "schedule": "gpipe"},
}
FACTORS: Factors = {
    "model": ("mlp", "conv", "vit", "translator", "distilled"),
    "layout": tuple(LAYOUTS),
    "then": (None, "alone", "dp3", "dp2-zero3", "zb-v"),
    "saved": (1, 3),
    "evaluates": (False, True),
    "sums": ("", "topk", "ring"),
    "optimizer": ("adamw", "sgd"),
    "clip": (0.0, 0.5),
    "recompute": (False, True),
}
"""`then`: the layout after an interruption. `sums`: how gradients are summed, without loss."""


def possible(row: Row) -> bool:
    """Tell whether the settings allow a row, and what it computes does not depend on its layout.

    BatchNorm sees the micro-batches of a rank.
    """
    layouts = [LAYOUTS[name] for name in (row["layout"], row["then"]) if name is not None]
    if row["then"] is None and row["saved"] > 1:
        return False
    if row["sums"] and any(each.get("dp", 1) == 1 or each.get("zero", 0) > 1 for each in layouts):
        return False
    return row["model"] != "conv" or len({(each.get("dp", 1), each.get("micro_batches")) for each in layouts}) == 1


def cell_of(row: Row, layout: str) -> Cell:
    names = ("model", "optimizer", "clip", "recompute")
    return Cell(**{name: row[name] for name in names}, **LAYOUTS[layout])


@dataclass
class Course:
    """Course of a run: the terms of the loss of its steps, and of its evaluations."""

    losses: list[dict[str, float]]
    evaluations: list[dict[str, float]]


def course(cell: Cell, end: int, folder: Path | None, sums: str, *, evaluates: bool) -> Course:
    """Train from the last checkpoint up to a step."""
    settings: dict[str, Any] = {"topk": {"gradient_compression": ("topk",), "compression_ratio": 1.0}}.get(sums, {})
    settings |= {"all_reduce_algorithm": "ring"} if sums == "ring" else {}
    run = cell.trainer(valid_dataset=EVALUATED, save=folder, **settings)
    found, names = Course([], []), [term.name for term in run._trainer.terms]
    for batch in run.batches(steps=end):
        record = run.step(batch)
        found.losses.append({name: record[name] for name in names})
        if evaluates:
            found.evaluations.append(run.evaluate())
    run.close()
    return found


@functools.cache
def by_hand(cell: Cell) -> Course:
    """Train in one process with torch alone, as `plainly`, and evaluate after each step."""
    model, network = NETWORKS[cell.model], nn.ModuleList(built(cell.model))
    layers, trained = list(network), [p for p in network.parameters() if p.requires_grad]
    optimizer, found = optimizer_of(cell, trained), Course([], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = list(micro_batches(cell, step))
        counts = total([model.counts(values) for _, values in batches])
        means = dict.fromkeys(counts, 0.0)
        for rank, values in batches:
            before = {name: buffer.clone() for name, buffer in network.named_buffers()}
            sums = model.sums(layers, values)
            model.loss(sums, counts).backward()
            means = {name: mean + sums[name].item() / counts[name] for name, mean in means.items()}
            if rank:
                set_buffers(network, before)
        if cell.clip:
            nn.utils.clip_grad_norm_(trained, cell.clip)
        optimizer.step()
        found.losses.append(means)
        network.eval()
        with torch.no_grad():
            values = batch_of(range(len(EVALUATED)), EVALUATED)
            counts = model.counts(values)
            found.evaluations.append({n: each.item() / counts[n] for n, each in model.sums(layers, values).items()})
        network.train()
    return found


def shown(row: Row) -> str:
    return "-".join(value if isinstance(value, str) else f"{name}{value}" for name, value in row.items() if value)


ROWS = covering_array(FACTORS, possible, candidates=4)
FEW = every_value_once(ROWS)[:2]


def parts(row: Row) -> Iterator[tuple[str, range]]:
    """Yield the layouts of a run, and the steps under each."""
    if row["then"] is None:
        yield row["layout"], range(STEPS)
    else:
        yield row["layout"], range(row["saved"])
        yield row["then"], range(row["saved"], STEPS)


@pytest.mark.parametrize("row", wide_except(ROWS, FEW), ids=shown)
def test_a_run_is_torchs_whatever_happens_between_its_steps(row: Row, rank_pools: RankPools, tmp_path: Path) -> None:
    folder = tmp_path if row["then"] is not None else None
    for name, steps in parts(row):
        cell = cell_of(row, name)
        plain = replace(Cell(row["model"]), optimizer=row["optimizer"], clip=row["clip"])
        if row["model"] == "conv":
            plain = replace(plain, dp=cell.dp, micro_batches=cell.micro_batches)
        wanted = by_hand(plain)
        run = functools.partial(course, evaluates=row["evaluates"])
        for found in rank_pools(cell.world_size).run(run, cell, steps.stop, folder, row["sums"]):
            assert len(found.losses) == len(steps)
            for step, losses in zip(steps, found.losses, strict=True):
                for term, loss in wanted.losses[step].items():
                    assert_number_close(losses[term], loss, f"{term} of step {step}", 1e-8)
            for step, means in zip(steps, found.evaluations, strict=row["evaluates"]):
                for term, mean in wanted.evaluations[step].items():
                    assert_number_close(means[term], mean, f"{term} of the evaluation after step {step}", 1e-8)
