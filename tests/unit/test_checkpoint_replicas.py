"""Tensors with replicas in checkpoints: the rules, what is dropped and said, and untrusted manifests."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import Contents, Manifest, Plan, Saver, TrainingState
from megalite.checkpoint.comparison import compare
from megalite.checkpoint.file_writer import cut_by_weights, cut_evenly, write_checkpoint
from megalite.checkpoint.inspection import describe
from megalite.checkpoint.integrity import covers
from megalite.checkpoint.manifest import is_optimizer_state, owner_name, split_name
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensors import Kind
from megalite.commands.inspect_checkpoint import tensor_lines
from megalite.config.tokenizer import TokenizerFlags
from megalite.conversion.native import open_megalite
from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer
from megalite.optim.replica import RELAYOUTS, BucketState, Relayout, Replica, sources
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box
from tests.harness import checkpoints
from tests.harness.checkpoints import read
from tests.unit.test_checkpoint import ADAM, MESH, MODEL, build

TOKENIZER = {each.name: None for each in fields(TokenizerFlags)} | {"seq_length": 4, "eos_token_ids": ()}
STATE = TrainingState(iteration=7, consumed_samples=28, optimizer_steps=6)


# ------------------------------------------------------------------------------------------------------ the rules


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(RELAYOUTS), st.integers(0, 2**32))
def test_a_rule_keeps_the_total_or_the_mean(saved: int, wanted: int, rule: Relayout, seed: int) -> None:
    old = torch.randint(-1000, 1000, (saved,), generator=torch.Generator().manual_seed(seed)).double()
    if rule == "refuse" and saved != wanted:
        with pytest.raises(ValueError, match=rf"{saved} replicas cannot become those of {wanted}"):
            sources(saved, wanted, 0, rule)
        return
    found = [list(sources(saved, wanted, index, rule)) for index in range(wanted)]
    if saved == wanted:
        assert found == [[index] for index in range(wanted)]
    elif rule == "drop":
        assert found == [[]] * wanted
    elif rule == "average":
        assert found == [list(range(saved))] * wanted
    else:
        assert all(each % wanted == index for index, those in enumerate(found) for each in those)
        assert all(those == sorted(those) for those in found)
        assert sum(old[those].sum() for those in found) == old.sum()


def test_a_state_has_a_name_that_may_be_missing() -> None:
    with pytest.raises(ValueError, match="exp_avg is not one of"):
        BucketState("exp_avg", "sum", whole=True)


# ------------------------------------------------------------------------------------------------------ a run


def run(*states: BucketState, seed: int = 0) -> tuple[GPT, Optimizer]:
    network, optimizer = build(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for state in states:
        flats = [torch.zeros(bucket.length) for bucket in optimizer.buckets]
        for bucket, flat in zip(optimizer.buckets, flats, strict=True):
            for slot in bucket.slots:
                for piece in slot.parameter.sharding.pieces:
                    view = piece.view(flat[slot.start : slot.stop].view(slot.parameter.shape))
                    view.copy_(torch.randint(-9, 9, view.shape, generator=generator))
        optimizer.bucket_states[state] = [[flat] for flat in flats]
    return network, optimizer


def save(folder: Path, optimizer: Optimizer) -> dict[str, Tensor]:
    path = Saver(folder, optimizer, Plan.alone(optimizer)).save(STATE, {"model": asdict(MODEL)})
    assert isinstance(path, Path)
    return read(path)


def rewritten(folder: Path, saved: dict[str, Tensor], **rules: Relayout) -> Path:
    """Save tensors; `rules`: those of the tensors with replicas, by the second part of their names."""
    relayout = {name: rules[name.split("/")[-2]] for name in saved if name.startswith("replica/")}
    return checkpoints.write(folder, saved, config={"model": asdict(MODEL)}, relayout=relayout)


def of_replicas(saved: dict[str, Tensor], kind: str, count: int) -> dict[str, Tensor]:
    """Return the tensors with values of this number of replicas for those of a kind: k times theirs."""
    factors = 1.0 + torch.arange(count)
    return {
        f"replica/{name}" if name.startswith(kind) else name: torch.stack([factor * values for factor in factors])
        if name.startswith(kind)
        else values
        for name, values in saved.items()
    }


RESIDUAL = BucketState("residual", "sum", whole=True, per_use=True)
PLAIN = BucketState("residual", None, whole=True)


@pytest.mark.parametrize(("rule", "factor"), [("sum", 6.0), ("average", 2.0), ("drop", 0.0)])
def test_values_of_three_replicas_become_those_of_one(tmp_path: Path, rule: Relayout, factor: float) -> None:
    state = replace(RESIDUAL, relayout=rule)
    saved = save(tmp_path / "plain", run(PLAIN)[1])
    path = rewritten(tmp_path / "three", of_replicas(saved, "optimizer/residual/", 3), residual=rule)
    for wanted in (state, PLAIN):
        network, optimizer = run(wanted, seed=1)
        checkpoint.load(path, network, optimizer, MESH)
        found = save(tmp_path / str(wanted.relayout), optimizer)
        for name, values in saved.items():
            if name.startswith("optimizer/residual/"):
                own = found[name] if wanted is PLAIN else found[f"replica/{name}"][0]
                assert torch.equal(own, factor * values), name
            else:
                assert torch.equal(found[name], values), name
    notes = checkpoint.relayout_notes(checkpoint.read_manifest(path), network, optimizer)
    done = {"sum": "summed into", "average": "averaged into", "drop": "dropped, and start as zeros for"}[rule]
    assert notes == (f"note: residual of 3 replicas: {done} all replicas together",)


def test_another_number_of_replicas_may_be_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "plain", run(PLAIN)[1])
    path = rewritten(tmp_path / "two", of_replicas(saved, "optimizer/residual/", 2), residual="refuse")
    for wanted in (replace(RESIDUAL, relayout="refuse"), PLAIN):
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load(path, *run(wanted), MESH)
        assert "replica/optimizer/residual/" in str(raised.value)
        assert "has values of 2 replicas, and this run has" in str(raised.value)
        assert "Give the layout of the run that saved it, or --no-load-optim" in str(raised.value)
    checkpoint.load(path, *run(PLAIN), MESH, state=False)


def test_a_run_without_the_state_leaves_it_out_and_says_so(tmp_path: Path) -> None:
    saved = save(tmp_path / "plain", run()[1])
    for number, state in enumerate((RESIDUAL, PLAIN)):
        save(tmp_path / str(number), run(state)[1])
        path = tmp_path / str(number) / "iter_0000007"
        network, optimizer = run(seed=1)
        checkpoint.load(path, network, optimizer, MESH)
        assert all(torch.equal(values, saved[name]) for name, values in save(tmp_path / "again", optimizer).items())
        described = checkpoint.read_manifest(path)
        notes = checkpoint.relayout_notes(described, network, optimizer)
        assert notes == ("note: this run has no residual: the checkpoint's is left out",)
        assert checkpoint.relayout_notes(described, network, optimizer, state=False) == ()


def test_state_that_a_checkpoint_lacks_begins_as_zeros(tmp_path: Path) -> None:
    save(tmp_path, run()[1])
    path = tmp_path / "iter_0000007"
    network, optimizer = run(RESIDUAL)
    checkpoint.load(path, network, optimizer, MESH)
    assert not any(flat.any() for flats in optimizer.bucket_states[RESIDUAL] for flat in flats)
    notes = checkpoint.relayout_notes(checkpoint.read_manifest(path), network, optimizer)
    assert notes == ("note: the checkpoint has no residual for some weights: it begins as zeros",)


@pytest.mark.parametrize(("rule", "factor"), [("sum", 0.0), ("average", 1.0)])
def test_values_without_replicas_are_each_ones_mean_but_not_its_sum(
    tmp_path: Path, rule: Relayout, factor: float
) -> None:
    saved = save(tmp_path / "plain", run(PLAIN)[1])
    network, optimizer = run(replace(RESIDUAL, relayout=rule), seed=1)
    checkpoint.load(tmp_path / "plain" / "iter_0000007", network, optimizer, MESH)
    for name, values in save(tmp_path / rule, optimizer).items():
        assert torch.equal(values, factor * saved[name[8:]][None] if name.startswith("replica/") else saved[name])


def test_without_the_optimizer_the_state_begins_anew(tmp_path: Path) -> None:
    save(tmp_path, run(RESIDUAL)[1])
    network, optimizer = run(RESIDUAL, seed=1)
    optimizer.rank_states["basis"] = torch.ones(3)
    checkpoint.load(tmp_path / "iter_0000007", network, optimizer, MESH, state=False)
    assert not any(flat.any() for flats in optimizer.bucket_states[RESIDUAL] for flat in flats)
    assert optimizer.rank_states["basis"].tolist() == [1.0] * 3


# ------------------------------------------------------------------------------------- weights that differ, and plans


def test_replicas_with_weights_of_their_own(tmp_path: Path) -> None:
    network, optimizer = run(PLAIN)
    saved = save(tmp_path / "plain", optimizer)
    one = {n if "residual" in n else f"replica/{n}": v if "residual" in n else v[None] for n, v in saved.items()}
    stacked = {
        name: torch.cat([values, 3 * values]) if name.startswith("replica") else values for name, values in one.items()
    }
    rules = {name.split("/")[-2]: "average" for name in one}
    path = rewritten(tmp_path / "two", stacked, **rules)  # type: ignore[arg-type]
    for replica in (None, Replica(2, 3, "average"), Replica(1, 2, "average")):
        network, optimizer = run(PLAIN, seed=1)
        optimizer.replica = replica
        checkpoint.load(path, network, optimizer, MESH)
        notes = checkpoint.relayout_notes(checkpoint.read_manifest(path), network, optimizer)
        optimizer.replica = None
        for name, values in save(tmp_path / "again", optimizer).items():
            factor = 1.0 if "residual" in name else 3.0 if replica and replica.count == 2 else 2.0
            assert torch.equal(values, factor * saved[name]), name
        into = "3 replicas" if replica else "all replicas together"
        assert notes == (
            ()
            if replica and replica.count == 2
            else tuple(
                f"note: {kind} of 2 replicas: averaged into {into}" for kind in ("weights", "exp_avg", "exp_avg_sq")
            )
        )
    network, optimizer = run(PLAIN, seed=1)
    optimizer.replica = Replica(1, 2, "average")
    checkpoint.load(tmp_path / "plain" / "iter_0000007", network, optimizer, MESH)
    optimizer.replica = None
    assert all(torch.equal(values, saved[name]) for name, values in save(tmp_path / "again", optimizer).items())
    network = run(seed=1)[0]
    checkpoint.load(path, network, None, MESH)
    weights = save(tmp_path / "again", run()[1])
    assert torch.equal(network.embedding.word.weight.detach()[:10], 2 * weights["model/embedding.word"])


class _Given:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.values = tensors
        self.tensors = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self.values[name][box.slices()])


def test_each_replica_begins_with_the_weights_of_others(tmp_path: Path) -> None:
    saved = save(tmp_path / "plain", run()[1])
    network, optimizer = run(RESIDUAL, seed=1)
    optimizer.replica = Replica(1, 2, "average")
    given = {name.removeprefix("model/"): values for name, values in saved.items() if name.startswith("model/")}
    checkpoint.load_weights(_Given(given), "a source", network, optimizer, MESH)
    assert torch.equal(network.embedding.word.weight.detach()[:10], given["embedding.word"])
    assert not any(flat.any() for flats in optimizer.bucket_states[RESIDUAL] for flat in flats)


@pytest.mark.parametrize(
    "sizes",
    [
        {"world_size": 8, "tensor_parallel_size": 2},
        {"world_size": 8, "context_parallel_size": 2, "expert_parallel_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("sites", [1, 2])
def test_of_all_ranks_one_saves_each_element_of_each_replica(sizes: dict[str, int], sites: int) -> None:
    world = ParallelMesh(**sizes)
    block = world.size("dp") // sites
    options = DataParallel(torch.float32, zero_stage=1, instances=2)
    seen = set()

    def contents_at(mesh: ParallelMesh) -> Contents:
        assert mesh.size("dp") == block
        return Contents.of([GPT(MODEL, mesh)], mesh, options)

    states = [RESIDUAL, BucketState("velocity", "drop", whole=False), BucketState("outer_momentum", None, whole=False)]
    plan = Plan(
        world,
        contents_at,
        ADAM,
        zero_stage=1,
        instances=2,
        bucket_states=states,
        rank_states=lambda layouts: {"basis": ((len(layouts), 3), torch.float64)},
        replicas=sites,
    )
    parts: dict[str, list[Box]] = {}
    for rank in range(world.world_size):
        for part in plan.saved(rank):
            parts.setdefault(part.name, []).append(part.box)
            seen.add((part.name, part.shape))
        assert any(part.name.startswith("rank/") for part in plan.held(rank))
    assert all(covers(parts[name], Box.whole(shape)) for name, shape in seen)
    assert len(seen) == len(parts)
    shapes = dict(seen)
    peers = world.size("dp", "cp")
    assert {shape[0] for name, shape in seen if name.startswith("replica/optimizer/residual/")} == {peers}
    assert {shape[0] for name, shape in seen if name.startswith("replica/optimizer/velocity/")} == {2 * sites}
    assert {name.split("/")[0] for name in shapes if "outer_momentum" in name} == {"optimizer"}
    assert len([name for name in shapes if name.startswith("rank/")]) == 2 * sites


# ------------------------------------------------------------------------------------------- private state of a rank


def test_private_state_comes_back_only_in_its_own_shape(tmp_path: Path) -> None:
    _, optimizer = run()
    optimizer.rank_states |= {"basis": torch.randn(2, 3, dtype=torch.float64), "count": torch.tensor(5)}
    saved = save(tmp_path, optimizer)
    assert torch.equal(saved["rank/0/basis"], optimizer.rank_states["basis"])
    assert saved["rank/0/count"].tolist() == [5]
    network, other = run()
    other.rank_states |= {
        "basis": torch.zeros(2, 3, dtype=torch.float64),
        "count": torch.tensor([7, 7]),
        "new": torch.ones(1),
    }
    checkpoint.load(tmp_path / "iter_0000007", network, other, MESH)
    assert torch.equal(other.rank_states["basis"], optimizer.rank_states["basis"])
    assert other.rank_states["count"].tolist() == [7, 7]
    assert other.rank_states["new"].tolist() == [1.0]
    checkpoint.load(tmp_path / "iter_0000007", *run(), MESH)


# ------------------------------------------------------------------------------------------------- manifests and tools


def test_a_manifest_without_replicas_has_no_word_of_them(tmp_path: Path) -> None:
    save(tmp_path, run(PLAIN)[1])
    assert "relayout" not in (tmp_path / "iter_0000007" / "manifest.json").read_text()


FINE: dict[str, Any] = {"shape": [2, 1], "dtype": "float32", "boxes": [], "relayout": "sum"}


def write_manifest(folder: Path, name: str, tensor: dict[str, Any]) -> None:
    """Write a manifest of one tensor, with the right checksum."""
    fields = json.loads(Manifest(STATE, {}, {}, {}).to_json()) | {"tensors": {name: tensor}}
    fields.pop("checksum")
    checksum = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    (folder / "manifest.json").write_text(json.dumps(fields | {"checksum": checksum}))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(("replica/model/a", FINE | {"relayout": rule}) for rule in ("median", "", None, True, ["sum"], {"sum": 1})),
        ("replica/model/a", {key: value for key, value in FINE.items() if key != "relayout"}),
        ("model/a", FINE),
        ("replicas/model/a", FINE),
        *(("replica/model/a", FINE | {"shape": shape}) for shape in ([], [0, 1], [2**30, 1], ["2", 1])),
        ("replica/model/a", FINE | {"dtype": "int64"}),
    ],
    ids=str,
)
def test_a_manifest_of_other_rules_is_damaged(tmp_path: Path, name: str, tensor: dict[str, Any]) -> None:
    write_manifest(tmp_path, "replica/model/a", FINE)
    assert checkpoint.read_manifest(tmp_path).tensors["replica/model/a"].relayout == "sum"
    write_manifest(tmp_path, name, tensor)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged or not ours"):
        checkpoint.read_manifest(tmp_path)


def test_an_incomplete_replica_is_seen(tmp_path: Path) -> None:
    saved = of_replicas(save(tmp_path / "plain", run(PLAIN)[1]), "optimizer/residual/", 3)
    path = rewritten(tmp_path / "three", saved, residual="sum")
    manifest = checkpoint.read_manifest(path)
    name = next(name for name in manifest.tensors if name.startswith("replica/"))
    tensor = manifest.tensors[name]
    (box,) = tensor.boxes
    less = replace(box, box=Box(box.box.offset, (2, *box.box.size[1:])))
    made = replace(manifest, tensors=manifest.tensors | {name: replace(tensor, boxes=(less,))})
    (path / "manifest.json").write_text(made.to_json())
    with pytest.raises(CheckpointError, match=rf"{name} is incomplete in it"):
        checkpoint.load(path, *run(RESIDUAL), MESH)


def test_tools_keep_the_replicas_and_show_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = run(RESIDUAL)
    optimizer.rank_states["basis"] = torch.ones(2)
    saved = save(tmp_path / "saved", optimizer)
    reader = CheckpointReader(tmp_path / "saved" / "iter_0000007")
    monkeypatch.setattr(
        "megalite.conversion.native.saved_section", lambda *_: SimpleNamespace(**TOKENIZER, lora_rank=None)
    )
    name = next(name for name in saved if name.startswith("replica/"))
    described = describe(reader, saved)
    assert described["tensors"][name]["relayout"] == "sum"
    assert {"model", "replica/optimizer/residual", "rank"} < described["totals"].keys()
    assert "replicas" in tensor_lines(described["tensors"])[1]
    weights = [
        [(each, Box.whole(tuple(values.shape))) for each, values in saved.items() if each.startswith("model/")],
        [],
    ]
    for number, cut in enumerate((cut_evenly(reader.tensors, 3), cut_by_weights(reader.tensors, weights))):
        folder = tmp_path / str(number)
        written = write_checkpoint(reader, reader.manifest.training, {}, folder, cut, 1, lambda size: None)
        again = CheckpointReader(written)
        assert again.tensors[name].relayout == "sum"
        assert not compare(reader, again, saved, 1, lambda size: None).values
        network, other = run(RESIDUAL, seed=1)
        checkpoint.load(written, network, other, MESH)
        assert all(torch.equal(each, saved[key]) for key, each in save(tmp_path / "again", other).items())
    other = checkpoints.write(tmp_path / "other", {name: saved[name]}, relayout={name: "drop"})
    kinds = compare(reader, CheckpointReader(other), [name], 1, lambda size: None).kinds
    assert [text.split("], ")[1] for text in kinds[name]] == ["sum over replicas", "drop over replicas"]
    opened = open_megalite(tmp_path / "saved" / "iter_0000007")
    assert {f"model/{each}" for each in opened.source.tensors} == {each for each in saved if each.startswith("model/")}


def test_names_are_split_without_the_replicas() -> None:
    assert split_name("replica/optimizer/residual/a/b") == ("replica/optimizer/residual", "a/b")
    assert split_name("replica/model/a") == ("replica/model", "a")
    assert split_name("rank/3/basis") == ("rank", "3/basis")
    assert owner_name("replica/optimizer/residual/a") == owner_name("replica/model/a") == "model/a"
    assert owner_name("replica/state/a") == "state/a"
    assert [is_optimizer_state(name) for name in ("replica/optimizer/residual/a", "rank/0/a", "replica/model/a")] == [
        True,
        True,
        False,
    ]
