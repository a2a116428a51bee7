"""Replicas without the rank that has failed finish their step, and the ranks that start again add what they kept."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megalite.errors import CommunicationError
from megalite.extras.recovery import survivors
from megalite.extras.recovery.generation import Generation, generation
from megalite.extras.recovery.marks import PAGE, Marks
from megalite.extras.recovery.slot import Slot
from megalite.extras.recovery.unfinished import Kept, deal_of_rest, usable
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.engine import RunningStep, StepObserver
from megalite.pipeline.schedules import Action
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.end_to_end.campaign import STEPS, Campaign
from tests.end_to_end.runs import PRETRAIN, metrics
from tests.extras.recovery.memory import Memory, born
from tests.extras.recovery.nodes import RANKS, Node, nodes
from tests.extras.recovery.processes import until
from tests.extras.recovery.test_copies import hosts, memory
from tests.extras.recovery.test_copies_faults import EVERY
from tests.extras.recovery.test_copies_layouts import with_ranks
from tests.extras.recovery.test_elastic import FLAGS, WARM, steps
from tests.extras.recovery.test_warm_restart import disturb
from tests.harness.close import assert_number_close
from tests.harness.fault import Fault
from tests.harness.job import Job
from tests.harness.rank_pool import RankPools
from tests.harness.token_files import add_document
from tests.harness.wide import wide_except
from tests.unit.test_config_validate import problems

__all__ = ["memory"]
FINISH = f"{EVERY} --survivors-finish-step"
BITWISE = "--bf16 --no-fp64 --deterministic-mode --bitwise-elastic"


class Died(Exception):
    """End of a rank."""


class Dies(StepObserver):
    """End of a rank in a step, before it has sent anything."""

    def execute(self, action: Action, step: RunningStep) -> None:
        raise Died


@contextmanager
def in_generation() -> Iterator[int]:
    """Give this process what its agent would give a rank. Yields the end of the pipe at which the agent reads."""
    reading, writing = os.pipe()
    variables = Generation(1, 0.0, None, writing, os.getpid()).variables()
    os.environ.update(variables)
    generation.cache_clear()
    try:
        yield reading
    finally:
        for name in variables:
            del os.environ[name]
        generation.cache_clear()
        os.close(reading)
        os.close(writing)


def live(memory: Memory, hosts: Sequence[str], folder: Path, flags: str, steps: int, dead: int | None) -> Any:
    """Train for some steps, and in the one that follows, lose a rank. Returns how it began, its notes, and records.

    The other ranks are asked, as their agents would, when they come to the gate; those that wait for the dead one end.
    """
    survivors.END_SECONDS = survivors.ASKING_SECONDS = 0.0
    with in_generation() as pipe:
        marks = Marks(memory.opened(dist.get_rank())[4])
        marks.clear()
        life = born(memory, hosts, folder, flags)
        found = []
        with life.trainer.loader:
            for _ in range(steps):
                metrics = life.trainer.step()
                of_sources = {name: loss for name, loss in metrics.extra.items() if name.startswith("lm_loss/")}
                found.append((metrics.loss, metrics.grad_norm, metrics.extra.get("kept_micro_batches"), of_sources))
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
                assert not marks.is_computing  # its agent waits no longer
        return life.how, life.copies.notes, found, os.read(pipe, 4096).decode()


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
    "offload": (2, 2, 1, "--optimizer-cpu-offload --use-distributed-optimizer"),
    "blend": (2, 2, 1, "--no-mock-data --data-path 2 {0}/web 1 {0}/code --loss-weights code=0.5"),
}  # fmt: skip
CORE = ("heads", "fewer")


@pytest.mark.parametrize("bits", [True, pytest.param(False, marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", wide_except(LAYOUTS, CORE))
def test_survivors_finish_their_micro_batches_and_others_divide_the_rest(
    name: str, bits: bool, memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    """Losses and norms are those of a run that was not disturbed: up to rounding, or bit for bit in fixed point."""
    ranks, later, dead, flags = LAYOUTS[name]
    if bits and "offload" in flags:
        pytest.skip("fixed point is refused with an optimizer on the host")
    flags = f"{FINISH} --global-batch-size 12 {flags.format(tmp_path)} {BITWISE if bits else ''}"
    for source in ("web", "code"):
        with IndexedDatasetWriter(tmp_path / source, np.uint16) as writer:
            for start in range(50):
                add_document(writer, (start + np.arange(40) ** 2) % (28 if source == "web" else 9))
            writer.finish()
    through = rank_pools(ranks).run(live, memory(ranks), hosts(ranks), tmp_path, flags, 5, None)[0]
    files = memory(ranks)
    rank_pools(ranks).run(live, files, hosts(ranks), tmp_path, flags, 3, dead)
    fewer, new = with_ranks(files, later)
    how, notes, found, _ = rank_pools(later).run(live, fewer, hosts(later), tmp_path, flags, 2, None)[0]
    new.close()
    assert how is not None
    assert how.startswith("continues from the copies in memory of step 3")
    kept = found[0][2]
    assert kept
    assert any(note.startswith(f"step 4: {kept} of ") for note in notes), (kept, notes)
    assert found[1][2] is None
    for (loss, norm, _, of_sources), (wanted, wanted_norm, _, wanted_of_sources) in zip(
        found, through[2][3:], strict=True
    ):
        if bits:
            assert (loss, norm, of_sources) == (wanted, wanted_norm, wanted_of_sources)
        assert of_sources.keys() == wanted_of_sources.keys()
        assert bool(of_sources) == (name == "blend")
        for source, of_source in of_sources.items():
            assert_number_close(of_source, wanted_of_sources[source], source)
        assert_number_close(loss, wanted, "loss")
        assert_number_close(norm, wanted_norm, "norm")


@pytest.mark.wide_except("backward/2/4/kill")
@pytest.mark.parametrize("fault", [Fault("backward", 2, 4, "kill"), Fault("forward", 2, 4, "defect")], ids=str)
def test_a_run_goes_on_within_the_step(fault: Fault, tmp_path: Path) -> None:
    """Its records are, bit for bit, those of the undisturbed run; ranks 0 and 1 have computed what was kept."""
    campaign = Campaign(tmp_path / "campaign", "bitwise")
    flags = ("--memory-checkpoint-interval", "1", "--survivors-finish-step")
    (said,) = disturb(campaign, fault, save_interval=STEPS, more=flags)
    assert "; went on after step 3, " in said, said
    lines = (campaign.directory / "metrics.jsonl").read_text().splitlines()
    kept = [record.get("kept_micro_batches") for record in map(json.loads, lines) if "lm_loss" in record]
    assert kept[3] == 2, kept
    assert kept.count(None) == len(kept) - 1
    campaign.assert_unbroken(but="bytes_sent")


def uses(memory: Memory, hosts: Sequence[str], folder: Path, drops: bool) -> tuple[list[bool], bool]:
    """Return whether gradients would be of use after each of three steps, the second without a copy, and whether kept
    ones are there, if copies `drop_after` a step or not."""
    with in_generation():
        files = memory.opened(dist.get_rank())
        Marks(files[4]).clear()
        life = born(memory, hosts, folder, FINISH)
        survivor, found = cast(survivors.SurvivorsTrainer, life.trainer), []
        with life.trainer.loader:
            for copied in (True, False, True):
                life.trainer.step()
                if copied:
                    life.copies.after_step(busy=False)
                    life.wait()
                found.append(survivor._can_keep)
        if drops:
            life.copies.drop_after(1)
        return found, Slot(files[4]).header() is not None


def test_gradients_are_of_use_only_with_a_copy_and_go_with_copies_that_may_be_wrong(
    memory: Any, rank_pools: RankPools, tmp_path: Path
) -> None:
    files = memory(2)
    rank_pools(2).run(live, files, hosts(2), tmp_path, FINISH, 3, 1)
    assert rank_pools(2).run(uses, files, hosts(2), tmp_path, False)[0] == ([True, False, True], True)
    assert rank_pools(2).run(uses, files, hosts(2), tmp_path, True)[0] == ([True, False, True], False)


SAVED = "--warm-restart --save run --resume auto --memory-checkpoint-interval 1 --survivors-finish-step"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SAVED.replace("--warm-restart ", ""), "--survivors-finish-step needs --warm-restart"),
        (SAVED.replace("interval 1", "interval 2"), "--survivors-finish-step needs --memory-checkpoint-interval 1"),
        (f"{SAVED} --data-parallel-sharding-strategy optim_grads", "--survivors-finish-step: ZeRO 2 reduces gradients"),
        (f"{SAVED} --overlap-grad-reduce", "--survivors-finish-step: with --overlap-grad-reduce, reductions begin"),
        (f"{SAVED} --num-experts 2", "--survivors-finish-step: data-parallel ranks meet in each layer of experts"),
        (f"{SAVED} --data-parallel-shares 3:1", "--survivors-finish-step divides the rest of a step itself"),
        (f"{SAVED} --gradient-compression bf16", "--survivors-finish-step needs data parallelism that sums all"),
        (f"{SAVED} --rerun-on-replica-interval 1", "--survivors-finish-step: --rerun-on-replica-interval computes"),
    ],
)
def test_steps_whose_gradients_cannot_be_kept_are_refused(flags: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(flags)), problems(flags)


def kept(mark: int, replica: int, place: int, *done: int) -> Kept:
    return Kept(mark, (3, 1), replica, (place,), done, {}, {})


def test_a_replica_is_used_if_all_its_places_are_held() -> None:
    places = [(0,), (1,), (0,), (1,)]
    first = [kept(5, 0, 0, 0, 2), kept(5, 0, 1, 0, 2)]
    assert usable([*first, None, None], places) == {0: first[0], 1: first[1]}
    assert usable([first[0], None, None, None], places) == {}
    assert usable([*reversed(first), None, None], places) == {}  # their ranks have changed places
    assert usable([None, None, *first], places).keys() == {2, 3}  # the number of the replica does not matter
    assert usable([first[0], kept(5, 0, 1, 0), None, None], places) == {}  # one has been kept a second time
    assert usable([first[0], kept(6, 0, 1, 0, 2), None, None], places) == {}  # of another start


def test_a_place_in_other_context_parallelism_is_another_one() -> None:
    """The same rank, with gradients of the same shapes, had another part of the samples."""
    two, one = ParallelMesh(rank=0, world_size=4, context_parallel_size=2), ParallelMesh(rank=0, world_size=4)
    assert survivors._place(two, 0) != survivors._place(one, 0)
    assert survivors._place(one, 0) == survivors._place(one, 3)


def test_no_micro_batch_is_used_twice() -> None:
    places = [(0,), (0,), (0,)]
    told = [kept(5, 0, 0, 0, 3), kept(6, 1, 0, 1, 3, 4), kept(6, 2, 0, 2, 5)]
    assert usable(told, places).keys() == {1, 2}
    assert usable([told[1], told[1], None], places).keys() == {0}


@given(st.integers(1, 6), st.integers(1, 20), st.data())
def test_the_rest_of_a_step_is_dealt_once(replicas: int, micro_batches: int, data: st.DataObject) -> None:
    done = data.draw(st.sets(st.integers(0, micro_batches - 1)))
    deals = [deal_of_rest(sorted(done), micro_batches, replica, replicas) for replica in range(replicas)]
    dealt = [number for deal in deals for number in deal.numbers]
    assert sorted([*dealt, *done]) == list(range(micro_batches))
    assert {deal.slots for deal in deals} <= {max(deal.slots for deal in deals), max(deal.slots for deal in deals) - 1}
    assert all(deal.slots >= 1 and len(deal.turns) == len(deal.numbers) + 1 for deal in deals)


def test_a_second_failure_keeps_what_the_first_one_has_left(memory: Any, rank_pools: RankPools, tmp_path: Path) -> None:
    """Ranks 0 and 2 add to what they have kept; what rank 1 has kept the first time is there, though it has died."""
    flags, ranks = f"{FINISH} --global-batch-size 12 {BITWISE}", 3
    through = rank_pools(ranks).run(live, memory(ranks), hosts(ranks), tmp_path, flags, 5, None)[0]
    files = memory(ranks)
    rank_pools(ranks).run(live, files, hosts(ranks), tmp_path, flags, 3, 2)
    rank_pools(ranks).run(live, files, hosts(ranks), tmp_path, flags, 0, 1)
    how, notes, found, _ = rank_pools(ranks).run(live, files, hosts(ranks), tmp_path, flags, 2, None)[0]
    assert how == "continues from the copies in memory of step 3"
    assert [each[:2] for each in found] == [each[:2] for each in through[2][3:]]
    assert found[0][2] == 11, (
        notes
    )  # 4 of each rank from the first time, and from the second one 2 of rank 0, 1 of rank 2


def computes(node: Node) -> bool:
    """Tell whether all ranks of a node compute gradients that they can keep."""
    (agent,) = node.tree
    files = [path for path in Path(f"/proc/{agent}/fd").iterdir() if re.search(r"rank \d+ 4 ", os.readlink(path))]
    found = [path.read_bytes()[PAGE - 1] for path in files]
    return len(found) == RANKS and all(found)


@pytest.mark.wide
def test_nodes_that_are_left_finish_the_step_of_a_lost_one(tmp_path: Path) -> None:
    """Steps are long, so that the node is lost in the midst of one. Records have the bits of a run on two ranks."""
    long = [*FLAGS, "--global-batch-size", 240, "--train-iters", 4]
    flags = [*long, *WARM, "--survivors-finish-step", "--save", tmp_path / "run"]
    with nodes(3, tmp_path, flags) as (first, second, third):
        until(lambda: steps(tmp_path) >= 2, "no step", 200.0)
        until(lambda: all(map(computes, (first, second, third))), "no gradients", 60.0)
        time.sleep(0.2)  # for the copy of the step before
        second.lose()
        assert first.launcher.wait(200) == 0, first.said()
        assert third.launcher.wait(60) == 0, third.said()
    said = first.said()
    # A fast machine may be in the step after the one that was seen to begin.
    after = re.search(r"; 4 ranks instead of 6, on n0, n2; went on after step ([23]),", said)
    assert after is not None, said
    kept = f"step {int(after[1]) + 1}: 80 of 120 micro-batches have been kept by the ranks"
    assert any(line.startswith(kept) for line in said.splitlines()), said
    with Job([PRETRAIN, *long, "--save", tmp_path / "whole"], 2, tmp_path / "job") as job:
        assert job.wait(200) == [0] * 2, job.stderr(0)
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine["lm_loss"], mine["grad_norm"]) == (other["lm_loss"], other["grad_norm"])
