"""A loop of anybody's own is recorded by megalite_trace.py without a change of its numbers, and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard
from torch.utils.checkpoint import checkpoint

import megalite_trace
from megalite.errors import CheckpointError, ConfigurationError
from megalite.extras.verify.evidence import Evidence, Sketched, Whole
from megalite.extras.verify.readers import own
from megalite.extras.verify.trace import Place, Role, Split, Trace
from megalite_trace import Recorder, TraceError
from tests.harness.rank_pool import RankPools

WORDS, HIDDEN = 11, 8
Key = tuple[str, Role, int, int]
BOTH: tuple[Role, ...] = ("input", "output")


class Results(NamedTuple):
    hidden: Tensor
    square: Tensor


class Block(nn.Module):
    """Has an operation in place, dropout, keyword arguments and a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, hidden: Tensor, scale: float, *, shift: Tensor) -> Results:
        found = hidden + self.dropout(self.activation(self.linear(self.norm(hidden)))) * scale + shift
        return Results(found, found.square())


class Model(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        """Build; `recompute` is `use_reentrant` of checkpoints around the blocks, None for none."""
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, shift = self.embedding(tokens), torch.ones(())
        for block in self.blocks:
            if self.recompute is None:
                hidden, _ = block(hidden, 0.5, shift=shift)
            else:
                hidden = checkpoint(self.run, block, hidden, shift, use_reentrant=self.recompute)
        return self.head(hidden)

    def run(self, block: nn.Module, hidden: Tensor, shift: Tensor) -> Tensor:
        return block(hidden, 0.5, shift=shift)[0]


def micro_batches(step: int, count: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(count):
        tokens = torch.randint(WORDS, (3, 6), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def train(
    recorder: Recorder, model: nn.Module, steps: int = 1, *, at_once: bool = False, seed: int = 5
) -> list[float | Tensor]:
    """Run steps of two micro-batches; return all losses, gradients and weights. `at_once`: one backward for both."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    numbers: list[float | Tensor] = []
    for step in range(1, steps + 1):
        with recorder.step(step):
            losses = []
            for tokens, labels in micro_batches(step):
                recorder.batch(tokens=tokens, labels=labels)
                losses.append(F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / 2)
                if not at_once:
                    losses[-1].backward()
            loss = sum(losses)
            if at_once:
                loss.backward()
            recorder.gradients()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            recorder.figures(loss=loss, grad_norm=norm, learning_rate=0.01)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        numbers += [loss.detach(), *gradients, *(parameter.detach().clone() for parameter in model.parameters())]
        optimizer.zero_grad()
    return numbers


def new_model(recompute: bool | None = None, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    return Model(recompute).to(dtype)


def recorded(folder: Path, model: nn.Module, **options: Any) -> Trace:
    """Train a step, and read its trace."""
    at_once = options.pop("at_once", False)
    train(Recorder(folder, model, {1}, **options), model, at_once=at_once)
    assert own.owns(folder)
    return own.read(folder, 1)


def values_of(trace: Trace, rank: int = 0) -> dict[Key, Evidence]:
    found = {
        (each.name, each.role, each.number, each.micro_batch): each.read()
        for each in trace.entries
        if each.rank == rank
    }
    assert len(found) == sum(entry.rank == rank for entry in trace.entries)
    return found


def whole_of(trace: Trace, rank: int = 0) -> dict[Key, Tensor]:
    found = {}
    for key, evidence in values_of(trace, rank).items():
        assert isinstance(evidence, Whole)
        found[key] = evidence.values
    return found


# ------------------------------------------------------------------------------------------------- what is recorded


def test_values_are_those_of_the_step(tmp_path: Path) -> None:
    """The truth is computed here, with autograd alone."""
    model = new_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trace = recorded(tmp_path, model, whole=True)
    after = dict(model.named_parameters())
    found = whole_of(trace)
    for name in before:
        assert torch.equal(found[name, "parameter", 0, 0], before[name])
        assert torch.equal(found[name, "parameter_after", 0, 0], after[name])
    truth = new_model()
    torch.manual_seed(5)
    for number, (tokens, labels) in enumerate(micro_batches(1)):
        hidden = truth.embedding(tokens)
        logits = truth.head(truth.blocks[1](truth.blocks[0](hidden, 0.5, shift=torch.ones(()))[0], 0.5, shift=1.0)[0])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2
        of_logits, of_hidden = torch.autograd.grad(loss, (logits, hidden), retain_graph=True)
        loss.backward()
        assert torch.equal(found["embedding", "output", 0, number], hidden)
        assert torch.equal(found["blocks.0", "input", 0, number], hidden)
        assert torch.equal(found["blocks.0", "input", 2, number], torch.ones(()))  # after hidden and scale
        assert torch.equal(found["blocks.0.norm", "input_gradient", 0, number], of_hidden)
        for name in ("head", ""):
            assert torch.equal(found[name, "output", 0, number], logits)
            assert torch.equal(found[name, "output_gradient", 0, number], of_logits)
        squares = found["blocks.1", "output", 1, number]
        assert torch.equal(squares, found["blocks.1", "output", 0, number].square())
        assert ("blocks.1", "output_gradient", 1, number) not in found  # nothing uses them
        first = found["blocks.0.activation", "input", 0, number]
        assert torch.equal(found["blocks.0.activation", "output", 0, number], first.relu())
        assert float(first.min()) < 0
    for name, parameter in truth.named_parameters():
        assert torch.equal(found[name, "main_gradient", 0, 0], parameter.grad)  # before clipping
    assert trace.notes == []
    assert (trace.step, trace.program, trace.gradients_of, trace.missing) == (1, "", "tensors", ())
    for batch, (tokens, labels) in zip(trace.batches, micro_batches(1), strict=True):
        assert torch.equal(batch.tokens, tokens)
        assert torch.equal(batch.labels, labels)
    assert trace.figures.keys() == {"loss", "grad_norm", "learning_rate"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sketches_are_those_of_the_values(dtype: torch.dtype, tmp_path: Path) -> None:
    sketches = values_of(recorded(tmp_path / "a", new_model(dtype=dtype), seed=3))
    whole = whole_of(recorded(tmp_path / "b", new_model(dtype=dtype), whole=True))
    assert sketches.keys() == whole.keys()
    for key, evidence in sketches.items():
        assert isinstance(evidence, Sketched)
        assert evidence.finite
        assert (evidence.shape, evidence.dtype) == (tuple(whole[key].shape), whole[key].dtype)
        assert evidence.distance(whole[key].double()) <= 1e-12 * evidence.norm
        if evidence.norm:
            assert evidence.factor(whole[key].double() / 2) == pytest.approx(2.0)
    size = sum(path.stat().st_size for path in (tmp_path / "a").rglob("*.safetensors"))
    assert size < 2700 * len(sketches)


def test_one_tensor_is_kept_once(tmp_path: Path) -> None:
    recorded(tmp_path, new_model(), whole=True)
    index = json.loads((tmp_path / "step_0000001/rank_00000.json").read_text())
    first = (each for each in index["entries"] if each["micro_batch"] == each["number"] == 0)
    where = {(each["name"], each["role"]): each["tensor"] for each in first}
    assert where["embedding", "output"] == where["blocks.0", "input"] == where["blocks.0.norm", "input"]
    assert where["head", "output_gradient"] == where["", "output_gradient"]
    assert where["blocks.0.activation", "input"] != where["blocks.0.activation", "output"]  # the same tensor, changed


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_recorded_again(reentrant: bool, at_once: bool, tmp_path: Path) -> None:
    """One backward for both micro-batches recomputes the second one first."""
    plain = whole_of(recorded(tmp_path / "plain", new_model(), whole=True, at_once=at_once))
    trace = recorded(tmp_path / "again", new_model(reentrant), whole=True, at_once=at_once)
    again = whole_of(trace)
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[key], value) for key, value in plain.items())
    assert trace.notes == []


def test_a_second_call_has_a_name_of_its_own(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden: Tensor) -> dict[str, Tensor]:
            return {"once": self.linear(hidden), "twice": self.linear(self.linear(hidden))}

    model = Twice()
    recorder = Recorder(tmp_path, model, {1}, whole=True)
    with recorder.step(1):
        found = model(torch.ones(2, 4))
    values = whole_of(own.read(tmp_path, 1))
    assert torch.equal(values["linear", "output", 0, 0], found["once"])
    assert torch.equal(values["linear#3", "output", 0, 0], found["twice"])
    assert torch.equal(values["", "output", 1, 0], found["twice"])


def test_wrappers_are_not_in_names(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

        def forward(self, *inputs: Any) -> Any:
            return self.module(*inputs)

    plain = values_of(recorded(tmp_path / "plain", new_model()))
    wrapped = values_of(recorded(tmp_path / "wrapped", Wrapper(Wrapper(new_model()))))
    assert wrapped.keys() == plain.keys()


def test_modules_are_chosen_by_patterns(tmp_path: Path) -> None:
    trace = recorded(tmp_path, new_model(), modules=["blocks.?.linear"])
    names = {entry.name for entry in trace.entries if entry.role in BOTH}
    assert names == {"blocks.0.linear", "blocks.1.linear"}
    assert {entry.micro_batch for entry in trace.entries} == {0, 1}
    assert trace.notes == []


def test_what_is_compiled_is_seen_from_outside(tmp_path: Path) -> None:
    model = new_model()
    model.head = torch.compile(nn.Sequential(model.head, nn.Tanh()), backend="eager")  # type: ignore[assignment]
    trace = recorded(tmp_path, model)
    assert {entry.name for entry in trace.entries if entry.name.startswith("head") and entry.role in BOTH} == {"head"}
    assert ("head.0.weight", "main_gradient", 0, 0) in values_of(trace)
    assert trace.notes == ["rank 0: 1 modules are compiled, and what is in them is not recorded: head"]


def test_main_gradients_come_first(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    recorder = Recorder(tmp_path, model, {1}, whole=True)
    with recorder.step(1):
        model(torch.ones(1, 3)).sum().backward()
        recorder.gradients(reduced=False)
        model.weight.main_grad = torch.full((2, 3), 7.0)  # type: ignore[union-attr,assignment]
        recorder.gradients()
    found = whole_of(own.read(tmp_path, None))
    assert torch.equal(found["weight", "gradient", 0, 0], torch.ones(2, 3))
    assert torch.equal(found["weight", "main_gradient", 0, 0], torch.full((2, 3), 7.0))
    assert torch.equal(found["bias", "main_gradient", 0, 0], torch.ones(2))


def test_what_was_not_told_is_noted(tmp_path: Path) -> None:
    model = new_model()
    with Recorder(tmp_path, model, {1}).step(1):
        model.head(torch.ones(1, HIDDEN))
    notes = " ".join(own.read(tmp_path, 1).notes)
    for text in ("modules did not run", "outside of a forward", "gradients() was not called", "batch() was not called"):
        assert text in notes


def test_more_can_be_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [], {1}, whole=True, coordinates={"tp": (1, 2)})
    with recorder.step(1):
        place = megalite_trace.Place("sbh", [(2, "tp")])
        recorder.tensor("mine", "output", torch.ones(2, 3, 4), micro_batch=1, place=place)
    (entry,) = own.read(tmp_path, 1).entries
    assert (entry.name, entry.role, entry.micro_batch) == ("mine", "output", 1)
    assert entry.place == Place("sbh", (Split(2, "tp", 1, 2),))


def test_numbers_that_are_none_are_figures(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    recorder = Recorder(tmp_path, model, {1})
    with recorder.step(1):
        recorder.figures(loss=torch.tensor(float("nan")), grad_norm=float("inf"), loss_scale=2)
    figures = own.read(tmp_path, 1).figures
    assert math.isnan(figures["loss"])
    assert (figures["grad_norm"], figures["loss_scale"]) == (math.inf, 2.0)


def test_large_tensors_go_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megalite_trace, "_LARGEST_PART", 1000)
    folder = tmp_path / "parts"
    found = whole_of(recorded(folder, new_model(), whole=True))
    assert len(list(folder.rglob("*.safetensors"))) > 5
    monkeypatch.undo()
    whole = whole_of(recorded(tmp_path / "one", new_model(), whole=True))
    assert all(torch.equal(found[key], value) for key, value in whole.items())


# ------------------------------------------------------------------------------------------------- training goes on


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_no_bit_of_the_training_changes(whole: bool, recompute: bool | None, tmp_path: Path) -> None:
    plain, traced = new_model(recompute), new_model(recompute)
    expected = train(Recorder(tmp_path, plain, ()), plain, 3)
    found = train(Recorder(tmp_path, traced, range(1, 4), whole=whole), traced, 3)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert len(list(tmp_path.iterdir())) == 3


def hooks_of(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def test_nothing_is_there_but_in_chosen_steps(tmp_path: Path) -> None:
    model = new_model()
    recorder = Recorder(tmp_path / "trace", model, {2})
    assert not hooks_of(model)
    with recorder.step(1):
        assert not hooks_of(model)
        recorder.batch(tokens=torch.ones(1, 1))
        recorder.gradients()
        recorder.figures(loss=1.0)
    assert not (tmp_path / "trace").exists()
    with recorder.step(2):
        assert hooks_of(model)
    assert not hooks_of(model)


def test_backward_after_the_step_is_not_recorded(tmp_path: Path) -> None:
    model = new_model()
    recorder = Recorder(tmp_path, model, {1})
    with recorder.step(1):
        loss = model(torch.ones(1, 2, dtype=torch.long)).sum()
    loss.backward()
    assert not [entry for entry in own.read(tmp_path, 1).entries if entry.role.endswith("gradient")]


def test_a_step_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    model = new_model()
    recorder = Recorder(tmp_path, model, {1, 2}, whole=True)
    train(recorder, model)
    with pytest.raises(ZeroDivisionError), recorder.step(1):
        raise ZeroDivisionError
    assert not hooks_of(model)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # not even of the run before
    with recorder.step(2):
        recorder.figures(loss=1.0)
    assert own.read(tmp_path, None).step == 2


def out_of_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_is_told(on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megalite_trace.os, "replace", out_of_space)
    model, plain = new_model(), new_model()
    recorder = Recorder(tmp_path, model, {1}, on_error=on_error)
    text = r"not recorded: .*rank_00000.safetensors cannot be written: No space left on device"
    if on_error == "raise":
        with pytest.raises(TraceError, match=text + r".*on_error=\"warn\" lets training go on"):
            train(recorder, model)
    else:
        with pytest.warns(RuntimeWarning, match=text):
            found = train(recorder, model, 2)
        expected = train(Recorder(tmp_path, plain, ()), plain, 2)
        assert all(
            torch.equal(torch.as_tensor(one), torch.as_tensor(other))
            for one, other in zip(expected, found, strict=True)
        )
    assert not hooks_of(model)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_error_within_backward_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    monkeypatch.setattr(megalite_trace._Step, "_add_gradient", out_of_space)
    with pytest.raises(TraceError, match="No space left"):
        train(Recorder(tmp_path, model, {1}), model)
    with pytest.warns(RuntimeWarning, match="No space left"):
        train(Recorder(tmp_path, model, {1}, on_error="warn"), model)
    assert not hooks_of(model)


def test_wrong_use_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TraceError, match="split over cp, which is not in coordinates: tp"):
        Recorder(
            tmp_path, model, {1}, coordinates={"tp": (0, 2)}, places={"*": megalite_trace.Place("sbh", [(0, "cp")])}
        )
    with pytest.raises(TraceError, match="on_error"):
        Recorder(tmp_path, model, {1}, on_error="ignore")
    recorder = Recorder(tmp_path, model, {1, 2})
    with pytest.raises(TraceError, match="gradients\\(\\) is called twice"), recorder.step(1):
        model(torch.ones(1, 2)).sum().backward()
        recorder.gradients()
        recorder.gradients()
    with pytest.raises(TraceError, match="step 2 begins within step 1"), recorder.step(1), recorder.step(2):
        pass
    with pytest.raises(TraceError, match="labels of batch"), recorder.step(1):
        recorder.batch(torch.ones(1, 1), labels="none")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- places


def test_rules_and_attributes_tell_places(tmp_path: Path) -> None:
    model = new_model()
    for parameter, split in ((model.head.weight, True), (model.head.bias, False)):
        parameter.tensor_model_parallel, parameter.partition_dim = split, 0 if split else -1  # type: ignore[attr-defined]
    rules = {"head:output": megalite_trace.Place("bsh", [(2, "tp"), (1, "cp", "zigzag")], ["dp"])}
    axes = {"tp": (1, 2), "cp": (0, 2), "dp": (0, 1)}
    trace = recorded(tmp_path, model, places=rules, coordinates=axes)
    places = {(entry.name, entry.role): entry.place for entry in trace.entries}
    assert places["head.weight", "main_gradient"] == Place("", (Split(0, "tp", 1, 2),))
    assert places["head.bias", "parameter"] == Place()
    assert places["head", "output"] == Place("bsh", (Split(2, "tp", 1, 2), Split(1, "cp", 0, 2, "zigzag")), ("dp",))
    assert places["head", "input"] is None
    assert trace.coordinates == {0: axes}


class Megatron(nn.Module):
    """Chunk of a model with Megatron-LM's names."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
            hidden = layer(hidden)
        return hidden


def test_layers_of_megatrons_chunks_are_numbered_through(tmp_path: Path) -> None:
    chunks = [Megatron(2), Megatron(1)]
    for layer in (*chunks[0].decoder.layers, *chunks[1].decoder.layers):  # type: ignore[union-attr]
        layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
    recorder = Recorder(tmp_path, chunks, {1}, whole=True, coordinates={"pp": (1, 2), "tp": (0, 1)})
    with recorder.step(1):
        for _ in range(2):
            recorder.batch(torch.zeros(1, 1, dtype=torch.long))
            chunks[1](chunks[0](torch.ones(1, 2))).sum().backward()
    trace = own.read(tmp_path, 1)
    assert trace.program == "megatron"
    outputs = sorted(
        (entry.name, entry.micro_batch) for entry in trace.entries if entry.role == "output" and entry.name
    )
    # Of two stages with as many layers: 0 1 | 2 3 in the first chunks, 4 | 5 in the second ones.
    assert outputs == [(f"decoder.layers.{layer}", number) for layer in (2, 3, 5) for number in (0, 1)]
    assert all(entry.place is None for entry in trace.entries)  # the rules of Megatron-LM's names know more


def split_model(rank: int) -> nn.Module:
    """Return a model over two ranks: one linear layer split over tp, another sharded by FSDP2."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})
    fully_shard(model[2], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return model


def record_split(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    model = split_model(rank)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    recorder = Recorder(folder, model, {1}, whole=True, coordinates=mesh)
    with recorder.step(1):
        recorder.batch(torch.zeros(1, 1, dtype=torch.long))
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        recorder.gradients()
        recorder.tensor("mine", "output", distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]))


def test_dtensors_tell_their_places(tmp_path: Path, rank_pools: RankPools) -> None:
    rank_pools(2).run(record_split, tmp_path)
    trace = own.read(tmp_path, 1)
    assert trace.coordinates == {0: {"tp": (0, 2)}, 1: {"tp": (1, 2)}}
    assert trace.missing == ()
    whole = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3))
    torch.manual_seed(1)
    for layer in whole:
        layer.reset_parameters()
    places = {(entry.rank, entry.name, entry.role): entry.place for entry in trace.entries}
    ranks = [whole_of(trace, rank) for rank in (0, 1)]
    hidden = whole[0](torch.arange(8.0).view(2, 4))
    whole[2](whole[1](hidden)).square().sum().backward()
    expected = {
        ("0.weight", "parameter"): (whole[0].weight, "tp", 0),
        ("1.weight", "main_gradient"): (whole[1].weight.grad, "tp", 1),
        ("2.weight", "parameter"): (whole[2].weight, "dp", 0),
        ("2.weight", "main_gradient"): (whole[2].weight.grad, "dp", 0),
        ("0", "output"): (hidden, "tp", 1),
        ("mine", "output"): (torch.arange(6.0), "tp", 0),
    }
    for (name, role), (values, axis, dimension) in expected.items():
        together = torch.cat([rank[name, role, 0, 0] for rank in ranks], dimension)
        torch.testing.assert_close(together, values)
        for rank in (0, 1):
            assert places[rank, name, role] == Place("", (Split(dimension, axis, rank, 2),)), (name, role)


def test_shards_of_a_part_lie_within_it() -> None:
    """FSDP2 over TP shards what TP has cut, though its dimension of the mesh comes first."""
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"), get_local_rank=lambda index: index, size=lambda index: 4)
    tensor = SimpleNamespace(device_mesh=mesh, placements=(_StridedShard(0, split_factor=4), Shard(0)))
    place = megalite_trace._place_of_dtensor(tensor)
    assert place["splits"] == [[0, "tp", 1, 4, "block"], [0, "dp", 0, 4, "block"]]
    tensor.placements = (Partial(), Replicate())
    assert megalite_trace._place_of_dtensor(tensor) == {
        "dimensions": "",
        "splits": [],
        "partial": ["dp"],
        "of": "dtensor",
    }


# ------------------------------------------------------------------------------------------------- reading


def test_steps_and_ranks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    model = new_model()
    for rank in ("0", "2"):
        monkeypatch.setenv("RANK", rank)
        train(Recorder(tmp_path, model, {2, 5}), model, 5)
    trace = own.read(tmp_path, None)
    assert (trace.step, trace.dropped, trace.missing) == (2, (5,), (1,))
    assert set(trace.coordinates) == {0, 2}
    assert own.read(tmp_path / "step_0000005", None).step == 5
    with pytest.raises(ConfigurationError, match=r"step 3 is not in .* which has 2, 5"):
        own.read(tmp_path, 3)


def test_ranks_of_another_run_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    for size, ranks in ((3, (0, 1, 2)), (2, (0, 1))):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        for rank in ranks:
            monkeypatch.setenv("RANK", str(rank))
            train(Recorder(tmp_path, model, {1}), model)
    trace = own.read(tmp_path, 1)
    assert set(trace.coordinates) == {0, 1}
    assert "rank 2 is left out: it is of a run of 3 ranks, not 2" in trace.notes


def test_other_folders_are_not_ours(tmp_path: Path) -> None:
    assert not own.owns(tmp_path / "none")
    (tmp_path / "step_0000001").mkdir()
    assert not own.owns(tmp_path)
    (tmp_path / "step_0000001/rank_00000.json").write_text('{"format": "another", ')
    assert not own.owns(tmp_path)


Change = Callable[[dict[str, Any]], object]


def entry(name: str, value: Any) -> Change:
    return lambda index: index["entries"][0].__setitem__(name, value)


def field(name: str, value: Any) -> Change:
    return lambda index: index.__setitem__(name, value)


PLACE = {"dimensions": "", "splits": [], "partial": [], "of": "rule"}
HOSTILE: dict[str, tuple[Change, str]] = {
    "version": (field("version", 2), "version 2 of the format, and 1 is read"),
    "step": (field("step", 2), "is of step 2, rank 0"),
    "rank": (field("rank", 1), "is of step 1, rank 1"),
    "world": (field("world_size", 0), "has 0 where its world_size"),
    "huge world": (field("world_size", 2**40), "where its world_size"),
    "coordinates": (field("coordinates", {"tp": [2, 2]}), r"\[2, 2\] as the place on the axis 'tp'"),
    "figure": (field("figures", {"loss": "high"}), "'high' as the figure 'loss'"),
    "entries": (field("entries", {}), "where its entries should stand"),
    "path": (field("files", ["../rank_00000.safetensors"]), "names '../rank_00000.safetensors' as one of its files"),
    "other rank's file": (field("files", ["rank_00001.safetensors"]), "as one of its files"),
    "no such file": (field("files", ["rank_00000_0007.safetensors"]), "rank_00000_0007.safetensors cannot be read"),
    "role": (entry("role", "weight"), "of role 'weight'"),
    "name": (entry("name", "a\x00b"), "has an entry"),
    "long name": (entry("name", "a" * 5000), "has an entry"),
    "shape": (entry("shape", [-1]), r"of shape \[-1\]"),
    "shape of floats": (entry("shape", [1.0]), r"of shape \[1.0\]"),
    "many dimensions": (entry("shape", [1] * 1000), "of shape"),
    "dtype": (entry("dtype", "int64"), "type 'int64'"),
    "dtype of a module": (entry("dtype", "nn"), "type 'nn'"),
    "micro-batch": (entry("micro_batch", 3), "though it is of the whole step"),
    "number": (entry("number", -1), "where its number should stand"),
    "sketch": (entry("sketch", 10**6), "1000000 as the number of a sketch"),
    "sketch of text": (entry("sketch", "0"), "'0' as the number of a sketch"),
    "place": (entry("place", []), "has the place"),
    "letters": (entry("place", PLACE | {"dimensions": "xyz"}), "has the place"),
    "splits": (entry("place", PLACE | {"splits": [[9, "tp", 0, 2, "block"]]}), "has the split"),
    "split": (entry("place", PLACE | {"splits": [[0, "tp", 2, 2, "block"]]}), "as the place on the axis 'tp'"),
    "kind": (entry("place", PLACE | {"splits": [[0, "tp", 0, 2, "spiral"]]}), "has the split"),
    "twice": (lambda index: index["entries"].append(index["entries"][0]), "twice"),
    "tokens": (lambda index: index["batches"][0].pop("tokens"), "a micro-batch without tokens"),
    "no tokens": (lambda index: index["batches"][0].update(tokens={"file": 0, "tensor": "t99"}), "no tensor 't99'"),
    "file": (lambda index: index["batches"][0].update(tokens={"file": 9, "tensor": "t0"}), "a tensor without its file"),
    "table": (lambda index: index.update(sketches=index["batches"][0]["tokens"]), "has sketches of shape"),
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small trace with sketches."""
    folder = tmp_path_factory.mktemp("trace")
    model = new_model()
    train(Recorder(folder, model, {1}), model)
    return folder


def copied(ours: Path, folder: Path) -> Path:
    """Return the index of a copy."""
    target = folder / "step_0000001"
    target.mkdir()
    for path in (ours / "step_0000001").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target / "rank_00000.json"


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_index_is_refused(case: str, ours: Path, tmp_path: Path) -> None:
    change, text = HOSTILE[case]
    path = copied(ours, tmp_path)
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=text):
        own.read(tmp_path, 1)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "megalite_trace", ' + '"a": [' * 1000])
def test_an_index_that_is_none_is_refused(text: str, ours: Path, tmp_path: Path) -> None:
    copied(ours, tmp_path).write_text(text)
    with pytest.raises(CheckpointError, match=r"rank_00000\.json"):
        own.read(tmp_path, 1)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_damaged_files_are_refused(cut: int, ours: Path, tmp_path: Path) -> None:
    data = copied(ours, tmp_path).with_suffix(".safetensors")
    data.write_bytes(data.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        own.read(tmp_path, 1)


def test_links_out_of_the_folder_are_refused(ours: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    data = copied(ours, tmp_path).with_suffix(".safetensors")
    data.unlink()
    data.symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside its folder"):
        own.read(tmp_path, 1)


def test_a_damaged_rank_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = new_model()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        train(Recorder(tmp_path, model, {1}), model)
    (tmp_path / "step_0000001/rank_00000.json").write_text("{}")
    trace = own.read(tmp_path, 1)
    assert trace.missing == (0,)
    assert any("rank_00000.json is no index" in note for note in trace.notes)


def test_whole_tensors_fit_their_index(tmp_path: Path) -> None:
    recorded(tmp_path, new_model(), whole=True)
    path = tmp_path / "step_0000001/rank_00000.json"
    index = json.loads(path.read_text())
    index["entries"][0]["shape"] = [8, 11]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="of another shape or type than its file"):
        own.read(tmp_path, 1)
