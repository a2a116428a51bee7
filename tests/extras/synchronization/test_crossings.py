"""Pairs of what makes ranks communicate less with all else that a step and a checkpoint have, on small networks.

A run is interrupted, and its loss scale changes; what is compared with it is neither.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint import Candidates, read_manifest
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.run.evaluation import evaluate
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite.training.resume import ResumePoint
from tests.distributed.layout_expected import on_ranks
from tests.distributed.test_trainer import BATCH
from tests.extras.synchronization.test_checkpoints import state_of, trainer_of
from tests.extras.synchronization.test_local_update import FLAGS, RATE, Method, loss_of
from tests.harness.close import assert_bits_equal, assert_number_close
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

STEPS, SAVED = 4, 2
PLAIN_SCALES, SCALES = (1.0,) * STEPS, (2.0, 1024.0, 0.25, 4096.0)
"""Loss scales of the steps. Powers of two change no bit in float64."""


@dataclass
class Course:
    """Course of a run on one rank: its losses, its validation losses, and all that it keeps in the end."""

    losses: list[float]
    evaluations: list[float]
    state: dict[str, Tensor]


def course(
    flags: str, folder: Path, scales: tuple[float, ...] = PLAIN_SCALES, resumed: str | None = None, *, evaluates: bool
) -> Course:
    """Train. `resumed`: the flags with which it goes on from a checkpoint after some steps; None: it is not saved."""
    trainer, losses, evaluations = trainer_of(flags, folder), list[float](), list[float]()

    def train(first: int, end: int) -> None:
        with trainer.loader:
            for step in range(first, end):
                trainer.loss_scale = replace(trainer.loss_scale, value=scales[step])
                losses.append(trainer.step().loss)
                if evaluates:
                    evaluations.append((evaluate(trainer) or {})["lm_loss"])

    train(0, SAVED if resumed is not None else STEPS)
    if resumed is not None:
        trainer.save(Display(9, 1, start_iteration=0, enabled=False), last=True)
        close(trainer)
        trainer, path = trainer_of(resumed, folder), folder / f"iter_{SAVED:07}"
        trainer.load(path, read_manifest(path), ResumePoint(Candidates()))
        train(SAVED, STEPS)
    close(trainer)
    return Course(losses, evaluations, state_of(trainer))


def close(trainer: Any) -> None:
    if trainer.checkpoints is not None:
        trainer.checkpoints.close()


def both(flags: str, folder: Path, *, resumed: bool, evaluates: bool) -> tuple[Course, Course]:
    """Return the course of a run, and that of one with other loss scales that is perhaps interrupted."""
    steady = course(flags, folder / "steady", evaluates=False)
    return steady, course(flags, folder / "other", SCALES, flags if resumed else None, evaluates=evaluates)


# ------------------------------------------------------------------------------------------------ compression

LAYOUTS: dict[str, tuple[int, str]] = {
    "dp3": (3, "--global-batch-size 6"),
    "tp2": (4, "--tp 2 --sequence-parallel"),
    "zb-v": (4, "--pp 2 --pipeline-schedule zb-v --num-layers 4"),
    "cp2": (4, "--cp 2"),
    "sites": (4, "--sites 2"),
}
METHODS = {
    "fp16": "",
    "int8": "",
    "signsgd": "",
    "topk": "--compression-ratio 0.2",
    "powersgd": "--compression-rank 2",
    "dgc": "--compression-ratio 0.2 --optimizer sgd --sgd-momentum 0.8 --adam-eps 1e-8",
    "onebit-adam": "",
}
"""Methods, one of each kind, with flags of their own."""
COMPRESSION: Factors = {
    "method": tuple(METHODS),
    "layout": tuple(LAYOUTS),
    "zero": (0, 1),
    "overlap": (False, True),
    "feedback": (True, False),
    "warmup": (0, 1),
    "micro_batch_size": (1, 2),
    "untied": (False, True),
    "resumed": (False, True),
    "evaluates": (False, True),
    "clip": (0.0, 0.5),
    "dropout": (0.0, 0.1),
}


def compressible(row: Row) -> bool:
    """Tell whether the flags allow a row."""
    method = row["method"]
    if method in ("dgc", "onebit-adam") and not row["feedback"]:
        return False
    if method == "onebit-adam" and (row["zero"] or not row["warmup"] or row["clip"]):
        return False
    return not (method in ("powersgd", "dgc", "onebit-adam") and row["layout"] == "sites")


def flags_of(row: Row) -> str:
    parts = [LAYOUTS[row["layout"]][1], f"--gradient-compression {row['method']}", METHODS[row["method"]]]
    parts += [f"--micro-batch-size {row['micro_batch_size']} --clip-grad {row['clip']}"]
    parts += [f"--hidden-dropout {row['dropout']} --attention-dropout {row['dropout']}"]
    parts += ["--use-distributed-optimizer"] * (row["zero"] == 1) + ["--overlap-grad-reduce"] * row["overlap"]
    parts += ["--untie-embeddings-and-output-weights"] * row["untied"]
    parts += ["--no-error-feedback"] * (not row["feedback"])
    parts += [f"--compression-warmup-iters {row['warmup']}"] * bool(row["warmup"])
    return " ".join(filter(None, parts))


def shown(row: Row) -> str:
    return "-".join(f"{name}{value}" if not isinstance(value, str) else value for name, value in row.items() if value)


ROWS = covering_array(COMPRESSION, compressible, candidates=4)


@pytest.mark.parametrize("row", wide_except(ROWS, every_value_once(ROWS)), ids=shown)
def test_a_compression_leaves_no_trace_of_loss_scales_and_interruptions(
    row: Row, rank_pools: RankPools, tmp_path: Path
) -> None:
    ranks, _ = LAYOUTS[row["layout"]]
    found = on_ranks(
        rank_pools,
        ranks,
        functools.partial(both, resumed=row["resumed"], evaluates=row["evaluates"]),
        flags_of(row),
        tmp_path,
    )
    for steady, other in found:
        assert other.losses == steady.losses == found[0][0].losses
        assert other.evaluations == found[0][1].evaluations
        assert other.state.keys() == steady.state.keys()
        for name, values in steady.state.items():
            assert_bits_equal(other.state[name], values, name)
