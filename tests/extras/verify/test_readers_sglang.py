"""Dumps of SGLang's dumper are read by their names and annotations, and what is wrong with them is said."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.errors import CheckpointError, ConfigurationError, DataError
from megalite.extras.verify.evidence import Whole
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.trace import Entry, Place, Split, Trace

ALONE = {"world_rank": 0, "world_size": 1, "megatron_parallel_info": {"megatron_error": True}}


class Dumper:
    """Writes tensors as SGLang's dumper does.

    Args:
        folder: the folder of the dump.
        meta: what it says of the rank.
    """

    def __init__(self, folder: Path, rank: int = 0, meta: dict[str, Any] | None = None) -> None:
        self.folder, self.rank = folder, rank
        self.meta = ALONE if meta is None else meta
        self.index = 0
        folder.mkdir(parents=True, exist_ok=True)

    def dump(self, name: str, value: object, step: int = 0, dims: str | None = None, **tags: object) -> Path:
        self.index += 1
        known: dict[str, object] = {"step": step, "rank": self.rank, "dump_index": self.index, "name": name}
        if not name.startswith("grad__"):
            known["recompute_status"] = "disabled"
        known |= tags
        path = self.folder / ("___".join(f"{key}={each}" for key, each in known.items()) + ".pt")
        extra = {} if dims is None else {"dims": dims}
        torch.save({"value": value, "meta": {**known, **self.meta, **extra}}, path)
        return path


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of(trace: Trace, name: str, role: str, micro_batch: int = 0, rank: int = 0) -> Entry:
    """Return the only such entry with position 0."""
    wanted = (rank, name, role, micro_batch, 0)
    found = [
        each for each in trace.entries if (each.rank, each.name, each.role, each.micro_batch, each.number) == wanted
    ]
    assert len(found) == 1
    return found[0]


def values(entry: Entry) -> Tensor:
    evidence = entry.read()
    assert isinstance(evidence, Whole)
    return evidence.values


@pytest.mark.parametrize("where", ["", "dump_20261130"])
def test_hooks_on_modules_and_parameters_are_read(where: str, tmp_path: Path) -> None:
    dumper = Dumper(tmp_path / "dump_20261130")
    name = "non_intrusive__model.layers.0.mlp"
    for number in range(2):
        dumper.dump("input_ids", torch.tensor([[1, 2, number]]))
        dumper.dump("non_intrusive__inputs.labels", torch.tensor([[2, number, 3]]))
        dumper.dump(f"{name}.inputs.0", tensor(number, 1, 3, 4), layer_id=0)
        dumper.dump(f"{name}.inputs.mask", tensor(number, 3), layer_id=0)
        dumper.dump(f"{name}.output", tensor(number + 10, 1, 3, 4), layer_id=0)
        dumper.dump(f"grad__{name}.output", tensor(number + 20, 1, 3, 4))
        dumper.dump(f"grad__{name}.inputs.0", tensor(number + 30, 1, 3, 4))
    dumper.dump("param__model.layers.0.mlp.weight", nn.Parameter(tensor(40, 4, 4)))
    dumper.dump("grad__param__model.layers.0.mlp.weight", tensor(41, 4, 4))
    dumper.dump("rids", ["a", "b"])
    trace = read_trace(tmp_path / where, None)
    assert (trace.program, trace.step, trace.missing, trace.gradients_of) == ("huggingface", 1, (), "tensors")
    module = "model.layers.0.mlp"
    for number in range(2):
        assert torch.equal(values(of(trace, module, "input", number)), tensor(number, 1, 3, 4))
        assert torch.equal(values(of(trace, module, "output", number)), tensor(number + 10, 1, 3, 4))
        assert torch.equal(values(of(trace, module, "output_gradient", number)), tensor(number + 20, 1, 3, 4))
        assert torch.equal(values(of(trace, module, "input_gradient", number)), tensor(number + 30, 1, 3, 4))
        batch = trace.batches[number]
        assert batch.labels is not None
        assert (batch.micro_batch, batch.tokens.tolist(), batch.labels.tolist()) == (
            number,
            [[1, 2, number]],
            [[2, number, 3]],
        )
    assert torch.equal(values(of(trace, f"{module}.weight", "parameter")), tensor(40, 4, 4))
    assert torch.equal(values(of(trace, f"{module}.weight", "gradient")), tensor(41, 4, 4))
    assert len(trace.entries) == 10
    notes = "\n".join(trace.notes)
    assert "2 recorded values are neither input nor output by position" in notes
    assert "1 recorded values are no tensors" in notes


def test_tokens_that_a_network_hands_to_its_embedding_are_one_batch(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path)
    for number in range(2):
        for _ in range(2):
            dumper.dump("input_ids", torch.tensor([5, 6]))  # the same tokens in both micro-batches
        dumper.dump("non_intrusive__lm_head.output", tensor(number, 2, 3))
    trace = read_trace(tmp_path, None)
    assert [(batch.micro_batch, batch.tokens.tolist()) for batch in trace.batches] == [(0, [[5, 6]]), (1, [[5, 6]])]


def test_layers_of_a_stage_have_their_numbers_in_the_network(tmp_path: Path) -> None:
    """The dump of a whole layer, and gradients, have no tag with its number: others of the same layer have."""
    for rank in range(2):
        info = {"tp_rank": 0, "tp_size": 1, "pp_rank": rank, "pp_size": 2, "vpp_rank": None, "vpp_size": None}
        dumper = Dumper(tmp_path, rank, {"world_size": 3, "megatron_parallel_info": info})
        name = "non_intrusive__module.decoder.layers.1"
        dumper.dump(f"{name}.mlp.output", tensor(rank, 2), layer_id=4 * rank + 1)
        dumper.dump(f"{name}.output.0", tensor(rank + 10, 2))
        dumper.dump(f"grad__{name}.output.0", tensor(rank + 20, 2))
    trace = read_trace(tmp_path, None)
    assert (trace.program, trace.coordinates[1], trace.missing) == ("megatron", {"tp": (0, 1), "pp": (1, 2)}, (2,))
    for rank in range(2):
        layer = f"decoder.layers.{4 * rank + 1}"
        assert torch.equal(values(of(trace, f"{layer}.mlp", "output", rank=rank)), tensor(rank, 2))
        assert torch.equal(values(of(trace, layer, "output", rank=rank)), tensor(rank + 10, 2))
        assert torch.equal(values(of(trace, layer, "output_gradient", rank=rank)), tensor(rank + 20, 2))


def test_recomputed_tensors_are_left_out(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path)
    for number, status in enumerate(("original", "recompute", "original", "recompute")):
        dumper.dump("non_intrusive__layers.0.output", tensor(number, 2), recompute_status=status)
    trace = read_trace(tmp_path, None)
    assert [(entry.micro_batch, values(entry)[0].item()) for entry in trace.entries] == [
        (0, tensor(0, 2)[0].item()),
        (1, tensor(2, 2)[0].item()),
    ]
    assert "2 recorded values were recomputed" in trace.notes


def test_names_that_a_program_gives_stay_with_their_layer(tmp_path: Path) -> None:
    Dumper(tmp_path).dump("attention_scores", tensor(0, 2), layer_id=3)
    assert of(read_trace(tmp_path, None), "layers.3.attention_scores", "output").shape == (2,)


INFO = {f"{axis}_{what}": size for axis in ("tp", "cp", "sp") for what, size in (("rank", 1), ("size", 2))}


@pytest.mark.parametrize(
    ("dims", "place"),
    [
        ("s b h", Place("sbh")),
        ("b s[cp:zigzag] h[tp]", Place("bsh", (Split(1, "cp", 1, 2, "zigzag"), Split(2, "tp", 1, 2)))),
        ("b s(cp,zigzag) h(tp)", Place("bsh", (Split(1, "cp", 1, 2, "zigzag"), Split(2, "tp", 1, 2)))),
        ("s[cp:natural,sp] b h # dp:=moe_dp", Place("sbh", (Split(0, "cp", 1, 2), Split(0, "tp", 1, 2)))),
        ("t[cp] 1 (num_heads*head_dim)[tp:partial]", Place("tbh", (Split(0, "cp", 1, 2),), ("tp",))),
        ("b s h[ep]", Place("bsh")),  # of one rank
        ("t[cp:zigzag] 1 h", None),
        ("b s", None),
        ("b s h[xp]", None),
        ("b s h[tp", None),
    ],
)  # fmt: skip
def test_annotations_of_dimensions_are_places(dims: str, place: Place | None, tmp_path: Path) -> None:
    Dumper(tmp_path, 0, {"world_size": 1, "megatron_parallel_info": INFO}).dump("x", tensor(0, 2, 3, 4), dims=dims)
    trace = read_trace(tmp_path, None)
    assert trace.entries[0].place == place
    assert any("are not used" in note for note in trace.notes) == (place is None)


def test_steps_are_told_apart(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path)
    for step in (0, 2):
        dumper.dump("non_intrusive__norm.output", tensor(step, 2), step)
    trace = read_trace(tmp_path, 3)
    assert (trace.step, trace.dropped) == (3, (1,))
    assert torch.equal(values(of(trace, "norm", "output")), tensor(2, 2))
    with pytest.raises(ConfigurationError, match=r"step 2 is not in .*, which has 1, 3"):
        read_trace(tmp_path, 2)


def test_one_of_several_dumps_has_to_be_named(tmp_path: Path) -> None:
    for name in ("dump_1", "dump_2"):
        Dumper(tmp_path / name).dump("x", tensor(0, 2))
    with pytest.raises(ConfigurationError, match=r"several dumps of SGLang's dumper \(dump_1, dump_2\)"):
        read_trace(tmp_path, None)


def test_files_of_older_versions_are_bare_tensors(tmp_path: Path) -> None:
    torch.save(tensor(1, 2), tmp_path / "forward_pass_id=4___rank=1___name=x___dump_index=7.pt")
    trace = read_trace(tmp_path, None)
    assert (trace.step, trace.missing) == (5, (0,))
    assert torch.equal(values(of(trace, "x", "output", rank=1)), tensor(1, 2))


def test_dumps_of_a_name_are_those_of_the_micro_batches_in_their_order(tmp_path: Path) -> None:
    """Forward of both layers, then gradients as backward meets them, twice."""
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    dumper = Dumper(tmp_path)
    truth: dict[tuple[str, str, int], Tensor] = defaultdict(lambda: torch.zeros(()))
    for number in range(2):
        hidden = tensor(number, 5, 2)
        for name, module in network.named_children():
            dumper.dump(f"non_intrusive__{name}.inputs.0", hidden.detach())
            result = module(hidden)
            dumper.dump(f"non_intrusive__{name}.output", result.detach().clone())
            truth[name, "output", number] = result.detach().clone()

            def hook(gradient: Tensor, name: str = name, number: int = number) -> None:
                dumper.dump(f"grad__non_intrusive__{name}.output", gradient.clone())
                truth[name, "output_gradient", number] = gradient.clone()

            result.register_hook(hook)
            hidden = result
        hidden.square().sum().backward()
    trace = read_trace(tmp_path, None)
    for (name, role, number), expected in truth.items():
        assert torch.equal(values(of(trace, name, role, number)), expected)
    assert len(truth) == 8


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path)
    dumper.dump("non_intrusive__norm.output", tensor(0, 2))
    path = dumper.dump("non_intrusive__lm_head.output", tensor(0, 2))
    path.write_bytes(path.read_bytes()[:100])
    trace = read_trace(tmp_path, None)
    assert [entry.name for entry in trace.entries] == ["norm"]
    assert any(str(path) in note for note in trace.notes)


def write_text(path: Path) -> None:
    path.write_text("text")


def write_pickle(path: Path) -> None:
    path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def write_meta(path: Path) -> None:
    torch.save({"value": torch.ones(1), "meta": [1]}, path)


def write_name(path: Path) -> None:
    torch.save({"value": torch.ones(1), "meta": {"name": 5}}, path)


def write_link(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere.pt")
    path.symlink_to(path.parents[1] / "elsewhere.pt")


def write_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("write", [write_text, write_pickle, write_meta, write_name, write_link, write_pipe])
def test_a_hostile_file_is_refused_with_its_name(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Dumper(tmp_path / "dump").dump("x", tensor(0, 2))
    write(path)
    with pytest.raises(CheckpointError, match=r"name=x___recompute_status=disabled\.pt"):
        read_trace(tmp_path / "dump", None)
    assert not (tmp_path / "ran").exists()


def test_meta_that_says_nonsense_is_not_believed(tmp_path: Path) -> None:
    info = {
        "tp_rank": 5,
        "tp_size": 2,
        "pp_rank": -1,
        "pp_size": 4,
        "cp_rank": "0",
        "cp_size": 2,
        "dp_rank": 0,
        "dp_size": 10**12,
    }
    meta = {"world_size": 10**15, "megatron_parallel_info": info}
    Dumper(tmp_path, 0, meta).dump("non_intrusive__decoder.layers.0.mlp.output", tensor(0, 2), layer_id=10**30)
    trace = read_trace(tmp_path, None)
    assert (trace.coordinates, trace.missing) == ({0: {}}, ())
    assert trace.entries[0].name == "decoder.layers.0.mlp"


def test_a_dump_without_tensors_says_so(tmp_path: Path) -> None:
    Dumper(tmp_path).dump("rids", ["a"])
    with pytest.raises(DataError, match="no tensor that can be compared; 1 are no tensors"):
        read_trace(tmp_path, None)
