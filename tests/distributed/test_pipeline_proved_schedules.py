"""Proofs on real ranks: distributed over a pipeline, reported to all its ranks, and compared with its replicas."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm, TensorSpec
from megalite.parallel.stage_module import Inside
from megalite.pipeline import proved_schedules as module
from megalite.pipeline.checker import Collective
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages
from tests.harness.rank_pool import RankPools

TRAINING, EVALUATION = [2, 4, 6, 8], [8]


def mesh_of(pipeline: int) -> ParallelMesh:
    return ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), pipeline_parallel_size=pipeline)


class Counted(ProvedSchedules):
    """Recorder of the proofs on this rank."""

    def _digests(self, step: module._Step) -> list[str]:
        self.__dict__.setdefault("own", []).append(str(step))
        return super()._digests(step)


def proved_here() -> list[str]:
    mesh = mesh_of(2)
    steps = Counted(Stages(2), mesh.coordinate("pp"), schedule="zb-h1").prove(TRAINING, EVALUATION, mesh)
    for number in TRAINING:
        assert steps.training(number)
    assert steps.evaluation(8)
    own: list[str] = steps.__dict__["own"]
    return own


def test_the_ranks_of_a_pipeline_share_the_proofs(rank_pools: RankPools) -> None:
    """The last rank proves the largest schedule, because the first one also writes to the screen."""
    first, second = rank_pools(2).run(proved_here)
    assert second == ["step of 8 micro-batches", "step of 4 micro-batches", "step of 2 micro-batches"]
    assert first == ["step of 6 micro-batches", "evaluation of 8 micro-batches"]


def refusal(fault: str, faulty: int) -> str:
    """Return the message on a rank if another rank has a fault."""
    mesh = mesh_of(2)
    both = [Collective("norm", (0, 1)), Collective("gather", (0, 1))]
    odd = mesh.rank == faulty
    wrong_behind = fault == "what comes behind the lists"
    inside = Inside("gather of parameters", "dp x cp")
    steps = ProvedSchedules(
        Stages(2),
        mesh.coordinate("pp"),
        after_list=[both, both[::-1] if wrong_behind else both],
        inside_actions={"F": () if odd and fault == "inside" else (inside,)},
        reductions=Reductions(per_micro_batch=odd and fault == "lists"),
    )
    try:
        steps.prove([4], mesh=mesh).training(4)
    except ScheduleError as error:
        return str(error)
    return ""


def test_a_rank_that_does_something_else_inside_is_named_everywhere(rank_pools: RankPools) -> None:
    """Ranks 1 and 3 of two replicas differ. Nobody can tell which is right: the later one is named."""
    told = rank_pools(4).run(refusal, "inside", 3)
    assert len(set(told)) == 1
    assert told[0].startswith("rank 3: the steps, or the collectives inside them, are not those of the other")


def test_copies_that_prove_other_lists_are_named(rank_pools: RankPools) -> None:
    """The last rank of a pipeline proves the lists of all its ranks."""
    told = rank_pools(4).run(refusal, "lists", 3)
    assert len(set(told)) == 1
    assert told[0].startswith("ranks 1, 3: the steps, or the")


def test_a_proof_that_fails_is_told_to_all(rank_pools: RankPools) -> None:
    """Only one rank proves it."""
    told = rank_pools(2).run(refusal, "what comes behind the lists", 0)
    assert told[0] == told[1] == "rank 0 at norm meets rank 1 at gather"


class Failing(ProvedSchedules):
    """Prover that always fails."""

    def _digests(self, step: module._Step) -> list[str]:
        raise MemoryError("no room for the lists")


def failed_proof() -> str:
    """Message to a rank if the last rank of one of two pipelines cannot prove its steps."""
    mesh = mesh_of(2)
    kind = Failing if mesh.rank == 3 else ProvedSchedules
    try:
        kind(Stages(2), mesh.coordinate("pp")).prove([4], mesh=mesh)
    except ScheduleError as error:
        return str(error)
    return ""


def test_a_proof_that_fails_in_one_pipeline_is_told_in_all(rank_pools: RankPools) -> None:
    """This holds for any kind of failure; otherwise the other ranks would wait for ever."""
    told = rank_pools(4).run_within(60.0, failed_proof)
    assert told == ["rank 3 could not prove its steps: MemoryError: no room for the lists"] * 4


HIDDEN, IDS = TensorSpec("hidden", (3, 4), torch.float32), TensorSpec("ids", (3,), torch.int64, gradient=False)
TERMS = LossTerm("lm_loss", lambda _: torch.ones(())), LossTerm("balance", lambda _: torch.ones(()), 0.01)
TENSORS = {
    "name": (replace(HIDDEN, name="states"), IDS),
    "shape": (replace(HIDDEN, shape=(4, 4)), IDS),
    "dtype": (replace(HIDDEN, dtype=torch.bfloat16), IDS),
    "gradient": (HIDDEN, replace(IDS, gradient=True)),
    "order": (IDS, HIDDEN),
    "number": (HIDDEN,),
}
LOSSES = {
    "term's name": (TERMS[0], replace(TERMS[1], name="balanced")),
    "term's weight": (TERMS[0], replace(TERMS[1], weight=0.1)),
    "term's axes": (TERMS[0], replace(TERMS[1], axes=("dp",))),
    "term's count axes": (TERMS[0], replace(TERMS[1], count_axes=("dp",))),
    "terms' order": TERMS[::-1],
    "terms' number": TERMS[:1],
}
UNLIKE = [*TENSORS, *LOSSES]


def declaring() -> list[str]:
    """Messages to a rank if the first of four stages declares something else than the others, case by case."""
    mesh, told = mesh_of(4), []
    for case in UNLIKE:
        odd = mesh.rank == 0
        passed = TENSORS.get(case, (HIDDEN, IDS)) if odd else (HIDDEN, IDS)
        stages = Stages(4, messages=((HIDDEN, IDS), passed, (HIDDEN,)))
        terms = LOSSES.get(case, TERMS) if odd else TERMS
        try:
            ProvedSchedules(stages, mesh.coordinate("pp"), terms=terms).prove([4], mesh=mesh)
            told.append("")
        except ScheduleError as error:
            told.append(str(error))
    return told


def test_ranks_that_declare_other_messages_or_terms_are_told_so(rank_pools: RankPools) -> None:
    by_rank = rank_pools(4).run(declaring)
    for case, told in zip(UNLIKE, zip(*by_rank, strict=True), strict=True):
        assert len(set(told)) == 1, case
        assert told[0].startswith("rank 0: declares "), (case, told[0])
    first = dict(zip(UNLIKE, by_rank[0], strict=True))
    assert first["dtype"].startswith(
        "rank 0: declares that stage 1 sends hidden (3, 4) of torch.bfloat16, but rank 1 declares that stage 1 "
        "sends hidden (3, 4) of torch.float32. "
    )
    assert "declares nothing more, but rank 1 declares the term of the loss balance" in first["terms' number"]


def other_list() -> str:
    """Return each rank's message if the first rank lowers its list in another way than the last rank has proved."""
    mesh = mesh_of(2)
    steps = ProvedSchedules(Stages(2), mesh.coordinate("pp")).prove([4], mesh=mesh)

    def swapped(*arguments: object, **options: object) -> list[list[Action]]:
        (own,) = lower(*arguments, **options)  # type: ignore[arg-type]
        return [[own[1], own[0], *own[2:]]]

    if mesh.rank == 0:
        module.lower = swapped  # type: ignore[assignment]
    try:
        steps.training(4)
    except ScheduleError as error:
        return str(error)
    finally:
        module.lower = lower
    return ""


def test_a_rank_compares_its_own_list_with_the_one_that_was_proved(rank_pools: RankPools) -> None:
    first, last = rank_pools(2).run(other_list)
    assert first.startswith("rank 0 of the pipeline: its list of the step of 4 micro-batches is not the one that was")
    assert last == ""
