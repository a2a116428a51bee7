"""Pairs of what makes ranks communicate less with all else that a step and a checkpoint have, on small networks.

A run is interrupted, and its loss scale changes; what is compared with it is neither.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
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
from tests.extras.synchronization.test_local_update import FLAGS, Method, loss_of
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


def part(
    flags: str, folder: Path, steps: range, scales: Sequence[float], *, evaluates: bool, base: str = FLAGS
) -> Course:
    """Train with these loss scales, from a checkpoint if it is not the begin, to a checkpoint if it is not the end."""
    trainer, losses, evaluations = trainer_of(flags, folder, base), list[float](), list[float]()
    assert trainer.checkpoints is not None
    if steps.start:
        path = folder / f"iter_{steps.start:07}"
        trainer.load(path, read_manifest(path), ResumePoint(Candidates()))
    with trainer.loader:
        for step in steps:
            trainer.loss_scale = replace(trainer.loss_scale, value=scales[step])
            losses.append(trainer.step().loss)
            if evaluates:
                evaluations.append((evaluate(trainer) or {})["lm_loss"])
    if steps.stop < len(scales):
        trainer.save(Display(9, 1, start_iteration=0, enabled=False), last=True)
    trainer.checkpoints.close()
    return Course(losses, evaluations, state_of(trainer))


def both(flags: str, folder: Path, *, resumed: bool, evaluates: bool, base: str = FLAGS) -> tuple[Course, Course]:
    """Return the course of a run, and that of one with other loss scales that is perhaps interrupted."""
    steady = part(flags, folder / "steady", range(STEPS), PLAIN_SCALES, evaluates=False, base=base)
    if not resumed:
        return steady, part(flags, folder / "other", range(STEPS), SCALES, evaluates=evaluates, base=base)
    first = part(flags, folder / "other", range(SAVED), SCALES, evaluates=evaluates, base=base)
    then = part(flags, folder / "other", range(SAVED, STEPS), SCALES, evaluates=evaluates, base=base)
    return steady, Course(first.losses + then.losses, first.evaluations + then.evaluations, then.state)


# ------------------------------------------------------------------------------------------------ compression

LAYOUTS: dict[str, tuple[int, str]] = {
    "dp3": (3, "--global-batch-size 6"),
    "tp2": (4, "--tp 2 --sequence-parallel"),
    "zb-v": (4, "--pp 2 --pipeline-schedule zb-v --num-layers 4"),
    "cp2": (4, "--cp 2"),
    "sites": (4, "--sites 2 --global-batch-size 8"),
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


@pytest.mark.wide_except(
    "fp16-dp3-zero1-warmup1-micro_batch_size1-untiedTrue-resumedTrue-evaluatesTrue-dropout0.1",
    "topk-sites-zero1-feedbackTrue-warmup1-micro_batch_size1-resumedTrue-evaluatesTrue",
    "powersgd-tp2-feedbackTrue-micro_batch_size2-untiedTrue-dropout0.1",
    "dgc-zb-v-feedbackTrue-warmup1-micro_batch_size1-resumedTrue-clip0.5",
)
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
            scale = SCALES[-1] if name.startswith("powersgd_q") else 1.0  # whose span alone counts
            assert_bits_equal(other.state[name], values * scale, name)


# ------------------------------------------------------------------------------------------------ local updates

REPLICAS: dict[str, tuple[int, str]] = {
    "dp2": (2, ""),
    "tp2": (4, "--tp 2 --sequence-parallel"),
    "pp2": (4, "--pp 2"),
    "cp2": (4, "--cp 2"),
    "sites": (4, "--sites 2"),
    "shards": (4, "--sites 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "gradients": (4, "--sites 2 --data-parallel-sharding-strategy optim_grads"),
    "weights": (4, "--sites 2 --data-parallel-sharding-strategy optim_grads_params"),
}
"""Layouts of two replicas."""
DILOCO = Method(2, 0, outer_lr=0.7, momentum=0.9)
UPDATES: dict[str, tuple[str, Method]] = {
    "local-sgd": ("local-sgd", Method(2, 0)),
    "momentum": ("local-sgd --outer-optimizer nesterov --outer-lr 0.6", replace(DILOCO, outer_lr=0.6)),
    "fedavg": ("fedavg", Method(2, 0, by_tokens=True)),
    "easgd": ("easgd --elastic-rate 0.3", Method(2, 0, elastic=0.3)),
    "diloco": ("diloco", DILOCO),
    "delayed": (
        "diloco --local-update-delay 1 --local-update-mixing 0.5",
        replace(DILOCO, delay=1, mixing=0.5),
    ),
}
LOCAL_SCALES = (2.0, 1024.0, 0.25, 4096.0, 1.0, 64.0, 2.0, 512.0)
LOCAL: Factors = {
    "update": tuple(UPDATES),
    "layout": tuple(REPLICAS),
    "period": (2, 3),
    "warmup": (0, 2),
    "packed": ("", "topk --compression-ratio 1", "fp16 --compression-warmup-iters 8"),
    "goes_on": (None, *REPLICAS),
    "saved": (1, 2, 5),
    "evaluates": (False, True),
}
"""`packed`: compressions that leave out nothing. `goes_on`: the layout after an interruption."""


def local(row: Row) -> bool:
    """Tell whether a row differs from plainer ones. Under another layout, fedavg counts its tokens anew."""
    if row["update"] == "fedavg" and row["goes_on"] not in (None, row["layout"]):
        return False
    return row["goes_on"] is not None or row["saved"] == 1


class Recorded(Method):
    """Method that keeps the validation loss of the weights that the model has after each step."""

    def __init__(self, method: Method, period: int, warmup: int) -> None:
        super().__init__(**{**vars(method), "period": period, "warmup": warmup})
        self.evaluations: list[float] = []
        self._valid = open_data(resolve(parse_arguments(FLAGS.split()).config, 1)).valid

    def _exchange(self, local: int, replicas: Any, anchor: Any, *rest: Any) -> None:
        super()._exchange(local, replicas, anchor, *rest)
        total, count = loss_of(anchor if local > 0 else replicas[0], self._valid, [*range(2 * BATCH)])
        self.evaluations.append(total.item() / count)


@functools.cache
def by_hand(update: str, period: int, warmup: int) -> tuple[list[float], list[float]]:
    """Return the losses and the validation losses."""
    method = Recorded(UPDATES[update][1], period, warmup)
    losses, _ = method.train(len(LOCAL_SCALES))
    return losses, method.evaluations


LOCAL_ROWS = covering_array(LOCAL, local, candidates=4)


@pytest.mark.wide_except(
    "local-sgd-sites-period2-warmup2-cp2-saved5-evaluatesTrue",
    "momentum-pp2-period3-warmup2-pp2-saved2-evaluatesTrue",
    "easgd-gradients-period3-saved1-evaluatesTrue",
    "diloco-shards-period3-warmup2-fp16 --compression-warmup-iters 8-gradients-saved5",
    "fedavg-tp2-period2-fp16 --compression-warmup-iters 8-tp2-saved2",
)
@pytest.mark.parametrize("row", wide_except(LOCAL_ROWS, every_value_once(LOCAL_ROWS)), ids=shown)
def test_replicas_are_networks_by_hand_whatever_else_happens(row: Row, rank_pools: RankPools, tmp_path: Path) -> None:
    method = f"--local-update {UPDATES[row['update']][0]} --local-update-period {row['period']}"
    method += f" --local-update-warmup-iters {row['warmup']}" * bool(row["warmup"])
    method += f" --gradient-compression {row['packed']}" * bool(row["packed"])
    losses, evaluations = by_hand(row["update"], row["period"], row["warmup"])
    parts = [(row["layout"], range(len(LOCAL_SCALES)))]
    if row["goes_on"] is not None:
        parts = [(row["layout"], range(row["saved"])), (row["goes_on"], range(row["saved"], len(LOCAL_SCALES)))]
    for name, steps in parts:
        ranks, layout = REPLICAS[name]
        run = functools.partial(part, evaluates=row["evaluates"])
        for found in rank_pools(ranks).run(run, f"{method} {layout}", tmp_path, steps, LOCAL_SCALES):
            for step, loss in zip(steps, found.losses, strict=True):
                assert_number_close(loss, losses[step], f"loss {step}", 1e-10)
            for step, loss in zip(steps, found.evaluations, strict=row["evaluates"]):
                assert_number_close(loss, evaluations[step], f"validation loss {step}", 1e-10)


@pytest.mark.parametrize("update", ["fedavg", "delayed"])
def test_replicas_go_on_while_their_batch_grows(update: str, rank_pools: RankPools, tmp_path: Path) -> None:
    """The batch is that of `by_hand` in the first two steps, and then twice as large."""
    ramp = f"--rampup-batch-size {BATCH} {BATCH} {2 * BATCH} --global-batch-size {2 * BATCH} --train-samples 40"
    base = re.sub(r"--(train|lr-warmup)-iters \S+", "", FLAGS)
    method = f"--local-update {UPDATES[update][0]} --local-update-period 3 {ramp}"
    losses, _ = by_hand(update, 3, 0)
    run = functools.partial(both, resumed=True, evaluates=True, base=base)
    for steady, other in rank_pools(2).run(run, method, tmp_path):
        assert other.losses == steady.losses
        for step, loss in enumerate(steady.losses):
            assert (abs(loss - losses[step]) < 1e-9) == (step < 2)
        for name, values in steady.state.items():
            assert_bits_equal(other.state[name], values, name)
