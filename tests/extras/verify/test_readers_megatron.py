"""Files of Megatron-LM's --save-activations-interval and its like are read, and what is wrong with them is said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.errors import CheckpointError, ConfigurationError, DataError
from megalite.extras.verify.evidence import Whole
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.trace import LAST, Role, Trace

Values = dict[str, dict[str, Any]]


def save(folder: Path, kind: str, rank: str, values: Values, iteration: int = 3) -> Path:
    """Write a file as `save_grads` does."""
    path = folder / kind / f"iter_{iteration:07d}" / f"mp_rank_{rank}.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(values, path)
    return path


def layer(number: int, seed: int = 0) -> dict[str, Tensor]:
    """Return what a layer's linear module gives, as activations."""
    generator = torch.Generator().manual_seed(seed)
    name = f"decoder.layers.{number}.mlp.linear_fc1"
    return {f"{name}/{what}": torch.randn(3, 2, 4, generator=generator) for what in ("input0", "output0")}


def found(trace: Trace, rank: int = 0) -> dict[tuple[str, Role, int, int], Tensor]:
    """Return the values of a rank's entries by name, role, position and micro-batch."""
    values = {}
    for entry in trace.entries:
        if entry.rank == rank:
            evidence = entry.read()
            assert isinstance(evidence, Whole)
            assert evidence.shape == entry.shape
            values[entry.name, entry.role, entry.number, entry.micro_batch] = evidence.values
    return values


@pytest.mark.parametrize("where", ["", "activations", "activations/iter_0000003"])
def test_activations_are_read_from_each_of_their_folders(where: str, tmp_path: Path) -> None:
    given: dict[str, Any] = layer(0) | {
        "decoder.layers.0.mlp.linear_fc1/input1": [3, 4],  # tokens per expert
        "decoder.layers.0.mlp.router/padding_mask": torch.zeros(2),
        "decoder.layers.0.mlp.router/output1": torch.ones(3, dtype=torch.bool),
    }
    save(tmp_path, "activations", "00", {"model_chunk0": given})
    trace = read_trace(tmp_path / where, 3)
    assert (trace.program, trace.step, trace.gradients_of, trace.missing) == ("megatron", 3, "modules", ())
    assert trace.coordinates == {0: {"tp": (0, 1), "pp": (0, 1), "ep": (0, 1), "etp": (0, 1)}}
    name = "decoder.layers.0.mlp.linear_fc1"
    values = found(trace)
    assert set(values) == {(name, "input", 0, LAST), (name, "output", 0, LAST)}
    assert torch.equal(values[name, "output", 0, LAST], given[f"{name}/output0"])
    notes = "\n".join(trace.notes)
    assert "1 recorded values are no tensors" in notes
    assert "1 recorded values are neither input nor output by position" in notes
    assert "1 recorded values have no floating-point elements" in notes


def test_each_kind_has_its_role(tmp_path: Path) -> None:
    gradients = {"output_layer/output0": torch.ones(2, 1, 5), "output_layer/input0": torch.full((2, 1, 4), 2.0)}
    buffer = torch.arange(20.0)  # gradients are views of one buffer
    save(tmp_path, "dgrads", "00", {"model_chunk0": gradients})
    save(tmp_path, "wgrads", "00", {"model_chunk0": {"output_layer.weight": buffer[4:14].view(5, 2)}})
    save(tmp_path, "params", "00", {"model_chunk0": {"output_layer.weight": torch.zeros(5, 2)}})
    values = found(read_trace(tmp_path, None))
    assert torch.equal(values["output_layer", "output_gradient", 0, LAST], gradients["output_layer/output0"])
    assert torch.equal(values["output_layer", "input_gradient", 0, LAST], gradients["output_layer/input0"])
    assert torch.equal(values["output_layer.weight", "main_gradient", 0, 0], torch.arange(4.0, 14.0).view(5, 2))
    assert torch.equal(values["output_layer.weight", "parameter_after", 0, 0], torch.zeros(5, 2))


def test_the_iteration_with_most_kinds_is_read_unless_one_is_asked_for(tmp_path: Path) -> None:
    for iteration in (2, 4, 6):
        save(tmp_path, "activations", "00", {"model_chunk0": layer(0)}, iteration)
    save(tmp_path, "params", "00", {"model_chunk0": {"output_layer.weight": torch.zeros(1)}}, 4)
    trace = read_trace(tmp_path, None)
    assert (trace.step, trace.dropped) == (4, (2, 6))
    trace = read_trace(tmp_path, 6)
    assert (trace.step, trace.dropped) == (6, (2, 4))
    assert "params were not saved in iteration 6" in trace.notes
    with pytest.raises(ConfigurationError, match=r"step 5 is not in .*, which has 2, 4, 6"):
        read_trace(tmp_path, 5)


def test_layers_are_numbered_through_stages_and_chunks(tmp_path: Path) -> None:
    """Two stages of two chunks, with 2, 1, 1 and 2 layers in the order of the network."""
    for stage, chunks in enumerate(({0: 2, 1: 1}, {0: 1, 1: 2})):
        values = {
            f"model_chunk{chunk}": {name: each for number in range(layers) for name, each in layer(number).items()}
            for chunk, layers in chunks.items()
        }
        values["model_chunk1"] |= {"output_layer/input0": torch.ones(1)} if stage else {}
        save(tmp_path, "activations", f"00_{stage:03d}", values)
    trace = read_trace(tmp_path, None)
    names = {
        rank: sorted({name.split(".")[2] for name, *_ in found(trace, rank) if "layers" in name}) for rank in (0, 1)
    }
    assert names == {0: ["0", "1", "3"], 1: ["2", "4", "5"]}
    assert trace.coordinates[1]["pp"] == (1, 2)
    assert any("model_chunk1: decoder.layers.1.mlp.linear_fc1/output0" in entry.source for entry in trace.entries)
    assert any("is taken as the pipeline rank" in note for note in trace.notes)


def test_a_lost_stage_is_missing_and_counts_as_many_layers_as_another(tmp_path: Path) -> None:
    for stage in (0, 2):
        save(tmp_path, "wgrads", f"00_{stage:03d}_000", {"model_chunk0": {"decoder.layers.1.mlp.bias": torch.ones(1)}})
    trace = read_trace(tmp_path, None)
    assert trace.missing == (1,)
    assert [entry.name for entry in trace.entries] == ["decoder.layers.1.mlp.bias", "decoder.layers.5.mlp.bias"]
    assert any("no file of pipeline stage 1 is there" in note for note in trace.notes)


def experts() -> Values:
    """Return activations that each expert-parallel rank has."""
    given = {"decoder.layers.0.mlp.experts.linear_fc1/output0": torch.ones(2, 3), "output_layer/input0": torch.ones(1)}
    return {"model_chunk0": given}


def test_a_second_number_is_of_experts_where_all_ranks_have_the_same_modules(tmp_path: Path) -> None:
    for tp in range(2):
        for ep in range(3):
            if (tp, ep) != (1, 1):
                save(tmp_path, "activations", f"{tp:02d}_{ep:03d}", experts())
    trace = read_trace(tmp_path, None)
    assert trace.missing == (3,)  # tensor-parallel rank 1 of expert-parallel rank 1
    assert trace.coordinates[5] == {"tp": (1, 2), "pp": (0, 1), "ep": (2, 3), "etp": (1, 2), "dp": (2, 3)}


def test_a_second_number_is_of_experts_where_embeddings_are_tied(tmp_path: Path) -> None:
    """The output layer then has an input, and no weight."""
    for rank in ("00_000", "00_001"):
        save(tmp_path, "activations", rank, experts())
        save(tmp_path, "params", rank, {"model_chunk0": {"decoder.layers.0.mlp.router.weight": torch.ones(4, 4)}})
    assert read_trace(tmp_path, None).coordinates[1]["ep"] == (1, 2)


def test_experts_that_are_not_split_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """TP 2 and EP 4 on four ranks: each has other experts, whole ones, and one of the two halves of all else."""
    for rank in range(4):
        save(tmp_path, "activations", f"{rank % 2:02d}_{rank:03d}", experts())
    trace = read_trace(tmp_path, None)
    assert trace.missing == ()
    assert trace.coordinates[3] == {"tp": (1, 2), "pp": (0, 1), "ep": (3, 4), "etp": (0, 1), "dp": (1, 2)}


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, "activations", "00", {"model_chunk0": layer(0)})
    cut = save(tmp_path, "activations", "01", {"model_chunk0": layer(0, seed=1)})
    cut.write_bytes(cut.read_bytes()[:200])
    trace = read_trace(tmp_path, None)
    assert {entry.rank for entry in trace.entries} == {0}
    assert (trace.missing, trace.coordinates[0]["tp"]) == ((1,), (0, 2))
    assert any(str(cut) in note for note in trace.notes)


def write_text(path: Path) -> None:
    path.write_text("no archive")


def write_other(path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(1)}}, path)


def write_numbers(path: Path) -> None:
    torch.save({"model_chunk0": {1: torch.ones(1)}}, path)


def write_pickle(path: Path) -> None:
    path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def write_link(path: Path) -> None:
    torch.save({"model_chunk0": layer(0)}, path.parents[3] / "elsewhere.pth")
    path.unlink()
    path.symlink_to(path.parents[3] / "elsewhere.pth")


def write_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("write", [write_text, write_other, write_numbers, write_pickle, write_link, write_pipe])
def test_a_hostile_file_is_refused_with_its_name(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "save", "activations", "00", {"model_chunk0": layer(0)})
    write(path)
    with pytest.raises(CheckpointError, match=r"mp_rank_00\.pth"):
        read_trace(tmp_path / "save", None)
    assert not (tmp_path / "ran").exists()


def test_a_shape_that_says_more_than_the_bytes_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, "wgrads", "00", {"model_chunk0": {"output_layer.weight": torch.ones(5, 7)}})
    content = path.read_bytes()
    assert content.count(b"K\x05K\x07\x86") == 1  # the pickled shape
    path.write_bytes(content.replace(b"K\x05K\x07\x86", b"K\x05K\x09\x86"))
    with pytest.raises(CheckpointError, match=r"mp_rank_00\.pth cannot be read"):
        read_trace(tmp_path, None)


def test_names_of_absurd_ranks_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, "wgrads", "00", {"model_chunk0": {"output_layer.weight": torch.ones(2)}})
    shutil.copy(path, path.with_name("mp_rank_999999.pth"))
    with pytest.raises(CheckpointError, match="files of 1,000,000 ranks by their names"):
        read_trace(tmp_path, None)


def test_a_folder_without_a_trace_is_refused_with_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no trace whose files are known .*rank_N_activations\.log"):
        read_trace(tmp_path, None)
    with pytest.raises(ConfigurationError, match="there is no trace"):
        read_trace(tmp_path / "nowhere", None)


def test_a_trace_of_nothing_that_can_be_compared_says_why(tmp_path: Path) -> None:
    save(tmp_path, "activations", "00", {"model_chunk0": {"decoder.layers.0.mlp.linear_fc1/input1": [1, 2]}})
    with pytest.raises(DataError, match="has no tensor that can be compared; 1 are no tensors"):
        read_trace(tmp_path, None)
