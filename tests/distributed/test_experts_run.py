"""A run with experts: records of its steps, notes, and loads that are the same on every layout."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from megalite.checkpoint.manifest import read_manifest
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.data.routing_records import RoutingRecords
from megalite.errors import ConfigurationError, DataError
from megalite.optim import statistics
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.state import states_of
from megalite.run.evaluation import evaluate
from megalite.tasks import experts as training_experts
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite.training.resume import find_resume_point
from tests.distributed.layout_expected import on_ranks
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

STEPS, SKIPPED, EXPERTS, TOPK, LENGTH, BATCH = 3, 1, 4, 2, 8, 4
FLAGS = f"""--fp64 --mock-data --tokenizer-type NullTokenizer --vocab-size 28 --make-vocab-size-divisible-by 4
--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
--init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size {BATCH}
--train-iters {STEPS} --eval-iters 1 --lr 0.02 --lr-decay-style constant --weight-decay 0
--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-layer-freq [0,1,1,0] --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-z-loss-coeff 0.01
--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1
--moe-expert-capacity-factor 1"""


def infinite(*arguments: Any) -> dict[str, float]:
    """Return the norms of a gradient that is not finite."""
    return {"weights": math.inf, "vectors": 0.0, "token_tables": 0.0}


def trained(flags: str) -> tuple[list[dict[str, float]], dict[str, list[float]], str, list[str]]:
    """Train steps, one of which is skipped, each followed by an evaluation.

    Returns the records' figures, the states, the summary's line on the model, and notes for ranks on two nodes.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    line = str(trainer.task.summary(trainer)["model"])
    with mock.patch.object(training_experts, "host_name", return_value=f"node{rank % 2}"):
        notes = [note for note in trainer.notes() if "experts" in note]
    records = []
    with trainer.loader:
        for number in range(STEPS):
            with mock.patch.object(statistics, "norms", infinite if number == SKIPPED else statistics.norms):
                records.append(dict(trainer.step().extra))
            evaluate(trainer)
    states = {state.sharding.name: state.values.tolist() for state in states_of(trainer.network)}
    return records, states, line, notes


LAYOUTS = {
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
    "experts apart": (2, "--ep 2 --use-distributed-optimizer"),
    "experts recomputed": (2, "--ep 2 --recompute-granularity selective --recompute-modules moe"),
    "parts": (2, "--tp 2 --sequence-parallel --moe-token-dispatcher-type alltoall"),
    "stages": (4, "--pp 2 --pipeline-schedule zb-v --ep 2"),
}


@cache
def alone() -> Any:
    (found,) = on_ranks(RankPools(), 1, trained, FLAGS)
    return found


def test_a_record_has_losses_loads_and_drops() -> None:
    records, states, line, notes = alone()
    assert line.endswith("2 layers have 4 experts, of which a token uses 2")
    assert not notes
    losses = {"seq_load_balancing_loss", "global_load_balancing_loss", "moe_z_loss", "router_entropy"}
    loads = {f"{kind}_expert_load/layer_{layer}" for kind in ("max", "min") for layer in (1, 2)}
    for number, record in enumerate(records):
        assert set(record) == (losses if number == SKIPPED else losses | loads | {"dropped_assignments"})
    first = records[0]
    assert 0 < first["router_entropy"] <= math.log(EXPERTS)
    assert 0 < first["dropped_assignments"] < 0.5
    for layer in (1, 2):
        assert 0 <= first[f"min_expert_load/layer_{layer}"] < 1 < first[f"max_expert_load/layer_{layer}"]
    # Before the first step, all loads are even, so the loss of two layers is the sum of all shares: 1 for each.
    assert first["global_load_balancing_loss"] == pytest.approx(2, rel=1e-7)
    assert set(states) == {
        f"layers.{layer}.moe.{name}" for layer in (1, 2) for name in ("expert_bias", "previous_load")
    }
    for name, values in states.items():
        if name.endswith("expert_bias"):  # after two updates
            assert {round(abs(value) / 0.01) for value in values} <= {0, 1, 2}
            assert any(values)
        else:
            counts = [value * BATCH * LENGTH * TOPK for value in values]
            assert counts == pytest.approx([round(count) for count in counts], abs=1e-4)  # fp32 of whole counts
            assert sum(values) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["stages"]))
def test_loads_and_states_are_the_same_on_every_layout(layout: str, rank_pools: RankPools) -> None:
    ranks, more = LAYOUTS[layout]
    records, states, _, _ = alone()
    held: dict[str, list[float]] = {}
    for found, own, _, notes in on_ranks(rank_pools, ranks, trained, f"{FLAGS} {more}"):
        held |= own
        for name, values in own.items():
            assert values == states[name], name
        for record, wanted in zip(found, records, strict=True):
            assert {key for key in record if not key.startswith("bytes_sent/")} == wanted.keys()
            for name, value in wanted.items():
                exact = "load/" in name or name == "dropped_assignments"
                assert record[name] == (value if exact else pytest.approx(value, rel=1e-9)), name
        assert len(notes) == (ranks > 1), notes
    assert held == states


def notes_of(ep: int, etp: int, nodes: str) -> tuple[str, ...]:
    """Return the notes on a rank, whose node is a letter of `nodes`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = ParallelMesh(rank=rank, world_size=size, expert_parallel_size=ep, expert_tensor_parallel_size=etp)
    with mock.patch.object(training_experts, "host_name", return_value=nodes[rank]):
        return training_experts.node_notes(mesh)


@pytest.mark.parametrize(
    ("ep", "etp", "nodes", "words"),
    [
        (2, 2, "aabb", "on up to 2 nodes, .*; a smaller --expert-model-parallel-size keeps them on one"),
        (2, 2, "abab", "each expert is on up to 2: a smaller --expert-tensor-parallel-size keeps it on one"),
        (4, 1, "aabc", r"\(EP 4 x ETP 1\) are on up to 3 nodes"),
        (2, 1, "aabc", "on up to 2 nodes"),  # not those of rank 0
        (2, 1, "aabb", None),
        (1, 2, "aaab", "each expert is on up to 2"),
    ],
)
def test_experts_on_several_nodes_are_noted(
    ep: int, etp: int, nodes: str, words: str | None, rank_pools: RankPools
) -> None:
    for notes in rank_pools(4).run(notes_of, ep, etp, nodes):
        assert len(notes) == (words is not None)
        assert words is None or re.search(words, notes[0]), notes


def located(flags: str) -> str | None:
    """Train a step in which the router of layer 2 overflows; return the report."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    for chunk in trainer.chunks:
        for number, layer in enumerate(chunk.layers, chunk.stage_layers.first_layer):
            if number == 2:
                layer.mlp.router.weight.data.fill_(1e308)
    with trainer.loader:
        assert trainer.step().skipped
        return trainer.locate_not_finite()


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "layout"), [(1, ""), (4, "--pp 2 --ep 2")])
def test_a_router_that_overflows_is_located(ranks: int, layout: str, rank_pools: RankPools) -> None:
    (report, *_) = on_ranks(rank_pools, ranks, located, f"{FLAGS} {layout}")
    where = r"ranks 2 \(.*\), 3" if ranks == 4 else "rank 0"
    assert report is not None
    first = "(NaN|infinity) came first"  # the order in which a CPU adds the products of 1e308 decides
    assert re.search(rf"{first} on {where} .*in the output of layer 2, mlp, router;", report), report


def saved(flags: str, folder: str) -> dict[str, list[float]]:
    """Train to the end of a run and save it; return the states and the notes on loading."""
    config = resolve(parse_arguments([*flags.split(), "--save", folder, "--save-interval", "1"]).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh(), Path(folder))
    resume_point = find_resume_point(config.checkpoint, ParallelMesh())
    for path in resume_point.candidates.paths[:1]:
        trainer.load(path, read_manifest(path), resume_point)
    with trainer.loader, Display(1, 1, enabled=False) as display:
        while trainer.iteration < trainer.iterations:
            trainer.step()
        trainer.save(display, last=True)
    return {state.sharding.name: state.values.tolist() for state in states_of(trainer.network)}


@pytest.mark.wide
def test_a_run_that_resumes_may_begin_or_stop_to_remember_loads(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    flags = FLAGS.replace(f"--train-iters {STEPS}", "")
    without = flags.replace(" global_aux_loss", "").replace("0.1 0.1", "0.1")
    of_bias = {f"layers.{layer}.moe.expert_bias" for layer in (1, 2)}
    of_loads = {f"layers.{layer}.moe.previous_load" for layer in (1, 2)}
    assert saved(f"{flags} --train-iters 1", folder).keys() == of_bias | of_loads
    resumed = f"--load {folder} --resume auto --override-opt-param-scheduler"
    second = saved(f"{without} --train-iters 2 {resumed}", folder)
    assert second.keys() == of_bias
    assert max(map(abs, second["layers.1.moe.expert_bias"])) > 0.015  # two updates: the first was not lost
    assert saved(f"{flags} --train-iters 2 {resumed}", folder) == second | dict.fromkeys(of_loads, [0.25] * EXPERTS)


def routed(flags: str, steps: int) -> list[float]:
    """Train steps; return the losses and the norms of the gradients."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    found = []
    with trainer.loader:
        for _ in range(steps):
            metrics = trainer.step()
            found += [metrics.loss, metrics.grad_norm]
            evaluate(trainer)  # which neither records nor replays
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Return a folder with the records of a run of one process, and what the run computed."""
    folder = tmp_path_factory.mktemp("routing") / "records"
    ((*found,),) = on_ranks(RankPools(), 1, routed, f"{FLAGS} --moe-record-routing {folder}", STEPS)
    return folder, found


@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["experts apart"]))
def test_records_are_the_same_on_every_layout(
    layout: str, rank_pools: RankPools, tmp_path: Path, recorded: tuple[Path, list[float]]
) -> None:
    ranks, more = LAYOUTS[layout]
    on_ranks(rank_pools, ranks, routed, f"{FLAGS} {more} --moe-record-routing {tmp_path / 'records'}", STEPS)
    assert files(tmp_path / "records") == files(recorded[0])
    assert len(files(recorded[0])) == STEPS * BATCH


@pytest.mark.wide
def test_a_run_that_replays_its_own_records_is_the_same_bit_for_bit(
    recorded: tuple[Path, list[float]], rank_pools: RankPools, tmp_path: Path
) -> None:
    folder, expected = recorded
    flags = f"{FLAGS} --moe-replay-routing {folder} --moe-record-routing {tmp_path / 'again'}"
    (found,) = on_ranks(rank_pools, 1, routed, flags, STEPS)
    assert found == expected
    assert files(tmp_path / "again") == files(folder)


def other_choices(folder: Path) -> None:
    """Write choices at random for all samples, some tokens without."""
    generator = np.random.default_rng(1)
    records = RoutingRecords(folder, (False, True, True, False), EXPERTS, TOPK)
    folder.mkdir()
    for sample in range(STEPS * BATCH):
        chosen = generator.random((LENGTH - 1, 2, EXPERTS)).argsort(-1)[..., :TOPK]
        chosen[generator.random((LENGTH - 1, 2)) < 0.2] = -1
        records.write(sample, chosen)


@pytest.mark.wide
def test_other_choices_train_the_same_on_every_layout(
    rank_pools: RankPools, tmp_path: Path, recorded: tuple[Path, list[float]]
) -> None:
    check_other_choices(("stages",), rank_pools, tmp_path, recorded)


@pytest.mark.wide
def test_other_choices_train_the_same_on_more_layouts(
    rank_pools: RankPools, tmp_path: Path, recorded: tuple[Path, list[float]]
) -> None:
    check_other_choices(("parts", "recomputed", "experts apart", "experts recomputed"), rank_pools, tmp_path, recorded)


def check_other_choices(
    layouts: Iterable[str], rank_pools: RankPools, tmp_path: Path, recorded: tuple[Path, list[float]]
) -> None:
    other_choices(tmp_path / "given")
    flags = f"{FLAGS} --moe-replay-routing {tmp_path / 'given'}"
    (expected,) = on_ranks(rank_pools, 1, routed, f"{flags} --moe-record-routing {tmp_path / 'alone'}", STEPS)
    assert expected != recorded[1]
    for layout in layouts:
        ranks, more = LAYOUTS[layout]
        folder = tmp_path / layout.replace(" ", "-")
        for found in on_ranks(rank_pools, ranks, routed, f"{flags} {more} --moe-record-routing {folder}", STEPS):
            assert found == pytest.approx(expected, rel=1e-10), layout
        assert files(folder) == files(tmp_path / "alone")
    for sample in range(STEPS * BATCH):
        given, taken = (np.load(tmp_path / name / f"{sample:012d}.npy") for name in ("given", "alone"))
        assert np.array_equal(taken[: LENGTH - 1][given >= 0], given[given >= 0])
        assert (taken >= 0).all()


def test_records_of_an_earlier_run_are_not_mixed_with_others(
    recorded: tuple[Path, list[float]], rank_pools: RankPools, tmp_path: Path
) -> None:
    before = files(recorded[0])
    for save in ("", f"--save {tmp_path / 'run'}"):
        with pytest.raises(ConfigurationError, match=r"has records of another run: give another folder"):
            routed(f"{FLAGS} --moe-record-routing {recorded[0]} {save}", 1)
    assert files(recorded[0]) == before
    with pytest.raises(DataError, match=r"has no records: they are files like 000000000000\.npy"):
        routed(f"{FLAGS} --moe-replay-routing {tmp_path}", 1)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("", 0),
        ("", STEPS * BATCH - 1),
        ("--load nothing", STEPS * BATCH - 1),
        (f"--train-samples {STEPS * BATCH + 1}", (STEPS - 1) * BATCH + 1),
    ],
)
def test_records_that_do_not_cover_the_run_are_refused_at_the_start(
    flags: str, missing: int, recorded: tuple[Path, list[float]], tmp_path: Path
) -> None:
    shutil.copytree(recorded[0], tmp_path / "replayed")
    other = FLAGS.replace(f"--train-iters {STEPS}", "") if "train-samples" in flags else FLAGS
    given = f"{other} {flags} --moe-replay-routing {tmp_path / 'replayed'}"
    config = resolve(parse_arguments(given.split()).config, 1)
    open_data(config)
    (tmp_path / "replayed" / f"{missing:012d}.npy").unlink()
    with pytest.raises(DataError, match=rf"{missing:012d}.npy is missing: --moe-replay-routing needs a file for each"):
        open_data(config)


@pytest.mark.wide
def test_a_run_that_died_before_it_saved_starts_again_in_its_folder(rank_pools: RankPools, tmp_path: Path) -> None:
    """A run with other samples does not, nor one with another --save."""
    folder = tmp_path / "records"
    flags = f"{FLAGS} --moe-record-routing {folder}"
    (dead,) = on_ranks(rank_pools, 1, routed, f"{flags} --save {tmp_path / 'run'}", 1)
    for change in (f"--save {tmp_path / 'other'}", f"--save {tmp_path / 'run'} --seed 5"):
        with pytest.raises(ConfigurationError, match=r"has records of another run: give another folder"):
            routed(f"{flags} {change}", 1)
    first = files(folder)
    assert len(first) == BATCH
    more = "--ep 2 --num-workers 1"  # changes neither samples nor their order
    again = on_ranks(rank_pools, 2, routed, f"{flags} --save {tmp_path / 'run'} {more}", 1)
    assert again[0] == pytest.approx(dead)
    assert files(folder) == first


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--moe-record-routing a --moe-replay-routing a", "is the folder of --moe-replay-routing"),
        ("--moe-record-routing s3://a/b", "s3://a/b: give a folder of a file system"),
    ],
)
def test_folders_that_cannot_be_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve(parse_arguments([*FLAGS.split(), *flags.split()]).config, 1)
    dense = FLAGS.partition("--num-experts")[0]
    with pytest.raises(ConfigurationError, match="--moe-record-routing needs --num-experts"):
        resolve(parse_arguments([*dense.split(), "--moe-record-routing", "a"]).config, 1)
