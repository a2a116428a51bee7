"""Replicas without the rank that has failed finish their step, and the ranks that start again add what they kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite.data.sampler import Deal
from megalite.errors import CommunicationError
from megalite.extras.recovery import survivors
from megalite.extras.recovery.asked import Marks
from megalite.extras.recovery.generation import Generation, generation
from megalite.extras.recovery.unfinished import Kept, deal_of_rest, usable
from megalite.pipeline.engine import RunningStep, StepObserver
from megalite.pipeline.schedules import Action
from tests.extras.recovery.memory import Memory, born
from tests.extras.recovery.test_copies import hosts, memory
from tests.extras.recovery.test_copies_faults import EVERY
from tests.extras.recovery.test_copies_layouts import with_ranks
from tests.harness.close import assert_number_close
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

__all__ = ["memory"]
FINISH = f"{EVERY} --survivors-finish-step"
BITWISE = "--bf16 --no-fp64 --deterministic-mode --bitwise-elastic"


class Died(Exception):
    """End of a rank."""


class Dies(StepObserver):
    """End of a rank in a step, before it has sent anything."""

    def execute(self, action: Action, step: RunningStep) -> None:
        raise Died


def live(memory: Memory, hosts: Sequence[str], folder: Path, flags: str, steps: int, dead: int | None) -> Any:
    """Train for some steps, and in the one that follows, lose a rank. Returns how it began, its notes, and records.

    The other ranks are asked, as their agents would, when they come to the gate; those that wait for the dead one end.
    """
    pipe = os.pipe()
    os.environ.update(Generation(1, 0.0, None, pipe[1], os.getpid()).variables())
    generation.cache_clear()
    survivors.END_SECONDS = survivors.ASKING_SECONDS = 0.0
    try:
        marks = Marks(os.open(f"/proc/{memory.holder}/fd/{memory.files[dist.get_rank()][4]}", os.O_RDWR))
        marks.clear()
        life = born(memory, hosts, folder, flags)
        found = []
        with life.trainer.loader:
            for _ in range(steps):
                metrics = life.trainer.step()
                found.append((metrics.loss, metrics.grad_norm, metrics.extra.get("kept_micro_batches")))
                life.copies.after_step(busy=False)
                life.wait()
            if dead is not None:
                marks.ask()
                mesh = life.trainer.mesh
                if mesh.coordinate("dp") == mesh.coordinates_of(dead)["dp"]:
                    with pytest.raises(Died):
                        life.trainer.forward_backward(observer=Dies())
                else:
                    with pytest.raises(CommunicationError, match="another rank has failed in step"):
                        life.trainer.step()
                kept = mesh.coordinate("dp") != mesh.coordinates_of(dead)["dp"]
                assert marks.is_computing is not kept  # its agent ends it at once, or waits
        return life.how, life.copies.notes, found, os.read(pipe[0], 4096).decode()
    finally:
        for name in Generation(1, 0.0, None, 0, 0).variables():
            del os.environ[name]
        generation.cache_clear()
        os.close(pipe[0])
        os.close(pipe[1])


LAYOUTS = {
    "replicas": (4, 4, 3, ""),
    "stages": (4, 4, 0, "--pp 2 --num-layers 4"),
    "interleaved": (4, 4, 2, "--pp 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    "heads": (4, 4, 1, "--tp 2 --sequence-parallel --use-distributed-optimizer"),
    "shards": (3, 3, 2, "--use-distributed-optimizer --elastic"),
    "context": (4, 4, 1, "--cp 2 --use-distributed-optimizer"),
    "tied": (4, 4, 3, "--pp 2 --num-layers 4 --no-untie-embeddings-and-output-weights"),
    "fewer": (4, 2, 3, "--elastic"),
    "fewer heads": (4, 2, 2, "--elastic --tp 2"),
    "dropout": (2, 2, 1, "--hidden-dropout 0.1"),
}  # fmt: skip
CORE = ("stages", "heads", "fewer", "tied")


@pytest.mark.parametrize("bits", [True, False])
@pytest.mark.parametrize("name", wide_except(LAYOUTS, CORE))
def test_survivors_finish_their_micro_batches_and_others_divide_the_rest(
    name: str, bits: bool, memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Losses and norms are those of a run that was not disturbed: up to rounding, or bit for bit in fixed point."""
    ranks, later, dead, flags = LAYOUTS[name]
    flags = f"{FINISH} --global-batch-size 12 {flags} {BITWISE if bits else ''}"
    through = rank_pools(ranks).run(live, memory(ranks), hosts(ranks), tmp_path, flags, 5, None)[0]
    files = memory(ranks)
    rank_pools(ranks).run(live, files, hosts(ranks), tmp_path, flags, 3, dead)
    fewer, new = with_ranks(files, later)
    how, notes, found, _ = rank_pools(later).run(live, fewer, hosts(later), tmp_path, flags, 2, None)[0]
    new.close()
    assert how is not None and how.startswith("continues from the copies in memory of step 3")
    kept = found[0][2]
    assert kept and any(note.startswith(f"step 4: {kept} of ") for note in notes), (kept, notes)
    assert found[1][2] is None
    for (loss, norm, _), (wanted, wanted_norm, _) in zip(found, through[2][3:], strict=True):
        if bits:
            assert (loss, norm) == (wanted, wanted_norm)
        assert_number_close(loss, wanted, "loss")
        assert_number_close(norm, wanted_norm, "norm")
