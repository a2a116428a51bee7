"""Dumps of msprobe are read with whole tensors or statistics, and what is wrong with them is said."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.errors import CheckpointError, ConfigurationError, DataError
from megalite.extras.verify.evidence import Statistics, Whole
from megalite.extras.verify.readers import msprobe
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.trace import Entry, Trace


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Dump:
    """Writes the dump of a rank as msprobe does.

    Args:
        folder: the folder of the rank.
        whole: save the tensors, too.
    """

    def __init__(self, folder: Path, *, whole: bool = False) -> None:
        self.folder, self.whole = folder, whole
        self.data: dict[str, Any] = {}
        (folder / "dump_tensor_data").mkdir(parents=True)

    def tensor(self, values: Tensor, name: str) -> dict[str, Any]:
        """Return the description of a tensor."""
        info: dict[str, Any] = {"type": "torch.Tensor", "dtype": str(values.dtype), "shape": list(values.shape)}
        info |= {"Max": values.max().item(), "Min": values.min().item()}
        is_float = values.is_floating_point()
        info |= {"Mean": values.mean().item() if is_float else None, "Norm": values.norm().item() if is_float else None}
        info["requires_grad"] = is_float
        if self.whole:
            info["data_name"] = f"{name}.pt"
            torch.save(values, self.folder / "dump_tensor_data" / info["data_name"])
        return info

    def forward(
        self,
        module: str,
        number: int,
        inputs: Iterable[Tensor],
        outputs: Iterable[Tensor],
        parameters: dict[str, Tensor] | None = None,
        keywords: dict[str, Tensor] | None = None,
    ) -> None:
        key = f"Module.{module}.forward.{number}"
        self.data[key] = {
            "input_args": [self.tensor(each, f"{key}.input.{place}") for place, each in enumerate(inputs)],
            "input_kwargs": {
                name: self.tensor(each, f"{key}.kwargs.{name}") for name, each in (keywords or {}).items()
            },
            "output": [*(self.tensor(each, f"{key}.output.{place}") for place, each in enumerate(outputs)), None],
            "parameters": {
                name: self.tensor(each, f"{key}.parameters.{name}") for name, each in (parameters or {}).items()
            },
        }

    def backward(self, module: str, number: int, of_outputs: Iterable[Tensor], of_inputs: Iterable[Tensor]) -> None:
        key = f"Module.{module}.backward.{number}"
        self.data[key] = {
            "input": [self.tensor(each, f"{key}.input.{place}") for place, each in enumerate(of_outputs)],
            "output": [self.tensor(each, f"{key}.output.{place}") for place, each in enumerate(of_inputs)],
        }

    def gradient(self, module: str, number: int, parameter: str, values: Tensor) -> None:
        key = f"Module.{module}.parameters_grad.{number}"
        self.data.setdefault(key, {})[parameter] = [self.tensor(values, f"{key}.{parameter}")]

    def write(self) -> Path:
        path = self.folder / "dump.json"
        path.write_text(json.dumps({"task": "tensor", "level": "L0", "framework": "pytorch", "data": self.data}))
        return path


def linear(dump: Dump, name: str = "layers.0.fc1.Linear", micro_batches: int = 2) -> None:
    """Write calls of a linear layer, whose values have the number of the micro-batch as seeds."""
    for number in range(micro_batches):
        parameters = {"weight": tensor(90, 3, 2)}
        dump.forward(name, number, [tensor(number, 5, 2)], [tensor(number + 10, 5, 3)], parameters)
        dump.backward(name, number, [tensor(number + 20, 5, 3)], [tensor(number + 30, 5, 2)])
        dump.gradient(name, number, "weight", tensor(number + 40, 3, 2))


def of(trace: Trace, name: str, role: str, micro_batch: int = 0, number: int = 0) -> Entry:
    """Return the only such entry."""
    wanted = (name, role, micro_batch, number)
    (entry,) = [each for each in trace.entries if (each.name, each.role, each.micro_batch, each.number) == wanted]
    return entry


def values(entry: Entry) -> Tensor:
    evidence = entry.read()
    assert isinstance(evidence, Whole)
    return evidence.values


@pytest.mark.parametrize("where", ["", "step0", "step0/rank0"])
def test_calls_of_modules_are_read(where: str, tmp_path: Path) -> None:
    dump = Dump(tmp_path / "step0" / "rank0", whole=True)
    linear(dump)
    dump.data["Functional.linear.0.forward"] = {"input_args": [], "output": []}
    dump.write()
    trace = read_trace(tmp_path / where, None)
    assert (trace.step, trace.coordinates, trace.missing, trace.gradients_of) == (1, {0: {}}, (), "modules")
    name = "layers.0.fc1"
    for number in range(2):
        assert torch.equal(values(of(trace, name, "input", number)), tensor(number, 5, 2))
        assert torch.equal(values(of(trace, name, "output", number)), tensor(number + 10, 5, 3))
        assert torch.equal(values(of(trace, name, "output_gradient", number)), tensor(number + 20, 5, 3))
        assert torch.equal(values(of(trace, name, "input_gradient", number)), tensor(number + 30, 5, 2))
    assert torch.equal(values(of(trace, f"{name}.weight", "parameter")), tensor(90, 3, 2))
    assert torch.equal(values(of(trace, f"{name}.weight", "gradient")), tensor(41, 3, 2))  # accumulated
    assert len(trace.entries) == 10
    assert any("1 recorded values are of single operations" in note for note in trace.notes)


def test_statistics_explain_the_tensor_and_nothing_else(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        dump = Dump(tmp_path / str(dtype) / "step0" / "rank0")
        given = tensor(1, 64, 64, dtype=dtype)
        dump.forward("layers.0.Block", 0, [], [given])
        dump.write()
        evidence = of(read_trace(tmp_path / str(dtype), None), "layers.0", "output").read()
        assert isinstance(evidence, Statistics)
        assert (evidence.shape, evidence.dtype) == ((64, 64), dtype)
        assert evidence.distance(given.double()) == 0.0
        assert evidence.distance(1.01 * given.double()) > 0.0


def test_recomputed_calls_are_left_out(tmp_path: Path) -> None:
    """Backward goes through the recomputed call, or, without reentrance, through the first one."""
    for first in (0, 1):
        dump = Dump(tmp_path / str(first) / "step0" / "rank0", whole=True)
        linear(dump, "output_layer.Linear")
        for number in range(4):
            dump.forward("layers.0.Block", number, [tensor(number, 3)], [tensor(number, 3)])
        for micro_batch in range(2):
            number = 2 * micro_batch + first
            dump.backward("layers.0.Block", number, [tensor(number, 3)], [tensor(number, 3)])
        dump.write()
        trace = read_trace(tmp_path / str(first), None)
        for micro_batch in range(2):
            assert torch.equal(values(of(trace, "layers.0", "output", micro_batch)), tensor(2 * micro_batch, 3))
            gradient = values(of(trace, "layers.0", "output_gradient", micro_batch))
            assert torch.equal(gradient, tensor(2 * micro_batch + first, 3))
        assert any("2 recorded values are of calls that were recomputed" in note for note in trace.notes)


def test_a_module_that_is_called_several_times_in_a_micro_batch_is_left_out(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "step0" / "rank0")
    linear(dump)
    for number in range(6):
        dump.forward("dropout.Dropout", number, [tensor(number, 3)], [tensor(number, 3)])
    dump.write()
    trace = read_trace(tmp_path, None)
    assert not any(entry.name == "dropout" for entry in trace.entries)
    assert any("6 recorded values are of calls" in note for note in trace.notes)


def test_the_tokens_of_an_embedding_are_the_batch(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "step1" / "rank0", whole=True)
    tokens = [torch.tensor([[1, 2, 3], [4, 5, number]]) for number in range(2)]
    for number, each in enumerate(tokens):
        dump.forward("model.embed_tokens.Embedding", number, [each], [tensor(number, 2, 3, 4)])
        hidden = {"hidden_states": tensor(number, 2, 3, 4), "attention_mask": torch.ones(2, 3)}
        dump.forward("model.layers.0.LlamaDecoderLayer", number, [], [tensor(number, 2, 3, 4)], keywords=hidden)
    dump.write()
    trace = read_trace(tmp_path, 2)
    assert (trace.program, trace.step) == ("huggingface", 2)
    assert [batch.micro_batch for batch in trace.batches] == [0, 1]
    assert all(torch.equal(batch.tokens, each) for batch, each in zip(trace.batches, tokens, strict=True))
    assert torch.equal(values(of(trace, "model.layers.0", "input", 1)), tensor(1, 2, 3, 4))


def test_a_batch_without_tokens_is_none(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "step0" / "rank0", whole=True)
    linear(dump, micro_batches=1)
    dump.data["Module.embedding.Embedding.forward.0"] = {
        "input_args": [{"dtype": "torch.int64", "shape": [2, 0], "data_name": "empty.pt"}]
    }
    torch.save(torch.zeros(2, 0, dtype=torch.int64), dump.folder / "dump_tensor_data" / "empty.pt")
    dump.write()
    assert read_trace(tmp_path, None).batches == []


def test_stages_of_megatron_number_their_layers_through_the_network(tmp_path: Path) -> None:
    """Two stages of two chunks, and two ranks each."""
    for rank in range(4):
        dump = Dump(tmp_path / "step0" / f"rank{rank}")
        if rank < 2:
            dump.forward("0.module.module.embedding.word_embeddings.VocabParallelEmbedding", 0, [], [tensor(0, 3)])
        for chunk in range(2):
            for layer in range(3):
                dump.forward(f"{chunk}.module.module.decoder.layers.{layer}.TransformerLayer", 0, [], [tensor(0, 3)])
        dump.write()
    trace = read_trace(tmp_path, None)
    names = {
        rank: [int(each.name[15:]) for each in trace.entries if each.rank == rank and "layers" in each.name]
        for rank in range(4)
    }
    assert names == {0: [0, 1, 2, 6, 7, 8], 1: [0, 1, 2, 6, 7, 8], 2: [3, 4, 5, 9, 10, 11], 3: [3, 4, 5, 9, 10, 11]}
    assert (trace.program, trace.coordinates[3]) == ("megatron", {"pp": (1, 2)})
    (tmp_path / "step0" / "rank0" / "dump.json").unlink()
    trace = read_trace(tmp_path, None)
    assert (trace.missing, {each.rank for each in trace.entries}) == ((0,), {1})
    assert any("12 recorded values are of pipeline stages whose place is not known" in note for note in trace.notes)


def test_ranks_and_steps_are_told_apart(tmp_path: Path) -> None:
    for step in (0, 3):
        for rank in (0, 2):
            dump = Dump(tmp_path / f"step{step}" / f"rank{rank}")
            dump.forward("norm.LayerNorm", 0, [], [tensor(step, 3)])
            dump.write()
    trace = read_trace(tmp_path, 4)
    assert (trace.step, trace.dropped, trace.missing, sorted(trace.coordinates)) == (4, (1,), (1,), [0, 2])
    with pytest.raises(ConfigurationError, match=r"step 2 is not in .*, which has 1, 4"):
        read_trace(tmp_path, 2)


def test_processes_without_a_rank_are_numbered(tmp_path: Path) -> None:
    for process in (900, 1000):
        dump = Dump(tmp_path / "step0" / f"proc{process}")
        dump.forward("norm.LayerNorm", 0, [], [tensor(process, 3)])
        dump.write()
    trace = read_trace(tmp_path, None)
    assert [(entry.rank, f"proc{900 if entry.rank == 0 else 1000}" in entry.source) for entry in trace.entries] == [
        (0, True),
        (1, True),
    ]


def test_arrays_of_numpy_are_read(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "step0" / "rank0")
    dump.forward("norm.LayerNorm", 0, [], [tensor(1, 3, 4)])
    info = dump.data["Module.norm.LayerNorm.forward.0"]["output"][0]
    info |= {"data_name": "a.npy", "dtype": "Float32"}
    dump.write()
    path = dump.folder / "dump_tensor_data" / "a.npy"
    np.save(path, np.asfortranarray(tensor(1, 3, 4).numpy()))
    assert torch.equal(values(of(read_trace(tmp_path, None), "norm", "output")), tensor(1, 3, 4))
    content = path.read_bytes()
    for damaged in (content[:-1], content[:40], content.replace(b"(3, 4)", b"(99999999, 4)"), b"x", b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"a\.npy cannot be read"):
            of(read_trace(tmp_path, None), "norm", "output").read()
    np.save(path, np.array([[{}] * 4] * 3))
    with pytest.raises(CheckpointError, match="other than numbers"):
        of(read_trace(tmp_path, None), "norm", "output").read()


def one(folder: Path, **changed: Any) -> Path:
    """Write a dump of one whole tensor, with a changed description; return the file of the tensor."""
    dump = Dump(folder / "step0" / "rank0", whole=True)
    dump.forward("norm.LayerNorm", 0, [], [tensor(1, 3, 4)])
    dump.data["Module.norm.LayerNorm.forward.0"]["output"][0] |= changed
    dump.write()
    return dump.folder / "dump_tensor_data" / "Module.norm.LayerNorm.forward.0.output.0.pt"


@pytest.mark.parametrize("name", ["../../../secret.pt", "/etc/passwd", "nowhere.pt", "", "."])
def test_a_name_of_another_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    torch.save(tensor(1, 3, 4), tmp_path / "secret.pt")
    one(tmp_path / "trace", data_name=name)
    trace = read_trace(tmp_path / "trace", None)
    assert isinstance(of(trace, "norm", "output").read(), Statistics)
    assert any("names files that are not in dump_tensor_data" in note for note in trace.notes)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = one(tmp_path / "trace")
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match="outside its folder"):
        of(read_trace(tmp_path / "trace", None), "norm", "output").read()


@pytest.mark.parametrize(
    "content",
    [tensor(1, 4, 3), tensor(1, 3, 4, dtype=torch.bfloat16), {"a": tensor(1, 3, 4)}, "text"],
    ids=["shape", "type", "dictionary", "text"],
)
def test_a_file_with_something_else_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, one(tmp_path))
    with pytest.raises(CheckpointError, match=r"output\.0\.pt (has shape|is no tensor)"):
        of(read_trace(tmp_path, None), "norm", "output").read()


def test_a_truncated_file_or_a_pipe_is_refused(tmp_path: Path) -> None:
    path = one(tmp_path)
    path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(CheckpointError, match="cannot be read"):
        of(read_trace(tmp_path, None), "norm", "output").read()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        of(read_trace(tmp_path, None), "norm", "output").read()


@pytest.mark.parametrize("value", ["nan", "NaN", "-inf", math.nan, math.inf])
def test_a_statistic_may_be_no_number(value: object, tmp_path: Path) -> None:
    path = one(tmp_path, Norm=value)
    path.unlink()
    evidence = of(read_trace(tmp_path, None), "norm", "output").read()
    assert not evidence.finite
    assert evidence.distance(torch.zeros(3, 4, dtype=torch.float64)) == math.inf


@pytest.mark.parametrize(
    "changed",
    [{"shape": [3, -4]}, {"shape": [3.0, 4]}, {"shape": [1] * 70}, {"shape": "3"}, {"dtype": "torch.nn"}, {"dtype": 5}],
)
def test_what_no_tensor_has_is_no_tensor(changed: dict[str, Any], tmp_path: Path) -> None:
    one(tmp_path, **changed)
    with pytest.raises(DataError, match="has no tensor that can be compared"):
        read_trace(tmp_path, None)


def test_a_dump_without_values_says_so(tmp_path: Path) -> None:
    path = one(tmp_path, Max=None, Min=None, Mean=None, Norm=None, md5="0badc0de")
    path.unlink()
    with pytest.raises(DataError, match="1 have neither statistics nor a file"):
        read_trace(tmp_path, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "no object `data`"),
        ('{"data": []}', "no object `data`"),
        ('{"data": {"a": 1, "a": 2}}', "the key 'a' is twice"),
        ('{"data": ' + '{"a": ' * 100 + "1" + "}" * 101, "nested deeper"),
        ('{"data": {"a": ' + "9" * 10**5 + "}}", "a whole number of 100000 digits"),
    ],
)
def test_a_damaged_dump_is_refused(text: str, why: str, tmp_path: Path) -> None:
    one(tmp_path)
    (tmp_path / "step0" / "rank0" / "dump.json").write_text(text)
    with pytest.raises(DataError, match=why):
        read_trace(tmp_path, None)


def test_a_dump_of_a_gigabyte_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one(tmp_path)
    with (tmp_path / "step0" / "rank0" / "dump.json").open("r+b") as file:
        file.truncate(2**30)  # without blocks on the disk
    with pytest.raises(DataError, match=r"dump\.json cannot be read: larger than its limit of 256 MiB"):
        read_trace(tmp_path, None)
    (tmp_path / "step0" / "rank0" / "dump.json").write_text('{"data": {}' + "," * 50 + "}")
    monkeypatch.setattr(msprobe, "MOST_MARKS", 40)
    with pytest.raises(DataError, match="braces, brackets, commas and colons, but 40 are allowed"):
        read_trace(tmp_path, None)
