"""Rules for experts: a file's tensor for each, or one of all, is one logical tensor with experts along its first axis.

No family has experts yet: the rules here are of a toy, whose network's logical tensors are given by shapes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.file_writer import write_files
from megalite.checkpoint.formats import Format, safetensors_byte_ranges
from megalite.checkpoint.tensors import Kind
from megalite.config import ModelConfig
from megalite.conversion.family import Family
from megalite.conversion.huggingface_files import HuggingFaceFiles
from megalite.conversion.mapping import FileTensor, FromFiles, MappedBox, Rule, ToFiles, file_tensors
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box

HIDDEN, FFN, EXPERTS = 4, 6, 3
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=2,
    ffn_hidden_size=FFN,
    num_experts=EXPERTS,
    moe_layer_freq="[0,1]",
)
LOGICAL = {  # the first layer has no experts
    "layers.0.mlp.down": (HIDDEN, FFN),
    "layers.1.moe.gate_up": (EXPERTS, 2, FFN, HIDDEN),
    "layers.1.moe.down": (EXPERTS, HIDDEN, FFN),
}
DENSE = Rule("layers.{layer}.dense.w2", "hidden ffn -> hidden ffn", (MappedBox("mlp.down"),))
OF_EACH = (
    DENSE,
    Rule("layers.{layer}.experts.{expert}.w1", "ffn hidden -> 1 ffn hidden", (MappedBox("moe.gate_up"),)),
    Rule("layers.{layer}.experts.{expert}.w3", "ffn hidden -> 1 ffn hidden", (MappedBox("moe.gate_up", (), (1,)),)),
    Rule("layers.{layer}.experts.{expert}.w2", "ffn hidden -> hidden ffn", (MappedBox("moe.down"),)),
)
OF_ALL = (
    DENSE,
    Rule(
        "layers.{layer}.experts.w13",
        "three hidden (two ffn) -> three two ffn hidden",  # an axis as long as there are experts
        (MappedBox("moe.gate_up"),),
    ),
    Rule("layers.{layer}.experts.w2", "three hidden ffn -> three hidden ffn", (MappedBox("moe.down"),)),
)


def files_of_each() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w1": (FFN, HIDDEN), "w3": (FFN, HIDDEN), "w2": (FFN, HIDDEN)}
    files = {
        f"layers.1.experts.{expert}.{name}": torch.randn(shape, generator=generator)
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }
    return files | {"layers.0.dense.w2": torch.randn(HIDDEN, FFN, generator=generator)}


def logical_of_each(files: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logical tensors of the files, assembled by hand."""
    each = [[files[f"layers.1.experts.{expert}.{name}"] for name in ("w1", "w3", "w2")] for expert in range(EXPERTS)]
    return {
        "layers.0.mlp.down": files["layers.0.dense.w2"],
        "layers.1.moe.gate_up": torch.stack([torch.stack([gate, up]) for gate, up, _ in each]),
        "layers.1.moe.down": torch.stack([down.T for _, _, down in each]),
    }


def files_of_all(logical: dict[str, Tensor]) -> dict[str, Tensor]:
    gate_up = logical["layers.1.moe.gate_up"]
    return {
        "layers.0.dense.w2": logical["layers.0.mlp.down"],
        "layers.1.experts.w13": gate_up.reshape(EXPERTS, 2 * FFN, HIDDEN).transpose(1, 2).contiguous(),
        "layers.1.experts.w2": logical["layers.1.moe.down"],
    }


class Given:
    """Source of logical tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.values = tensors
        self.tensors = {name: Kind(tuple(values.shape), values.dtype) for name, values in tensors.items()}
        self.filled: list[int] = []

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        self.filled.append(values.numel())
        values.copy_(self.values[name][box.slices()])


def mapping(rules: tuple[Rule, ...]) -> list[FileTensor]:
    return file_tensors(rules, MODEL, LOGICAL)


def opened(folder: Path, tensors: dict[str, Tensor], rules: tuple[Rule, ...] = OF_EACH) -> FromFiles:
    save_file(tensors, folder / "model.safetensors")
    family, tensors_of_files = Family("toy", "Toy", (), {}, rules), mapping(rules)
    files = HuggingFaceFiles(folder, {}, family, frozenset(tensor.name for tensor in tensors_of_files))
    return FromFiles(files, tensors_of_files, LOGICAL)


def write(folder: Path, source: ToFiles) -> dict[str, Tensor]:
    """Write one file per tensor, as in a sharded checkpoint."""
    file_format = Format("{number}", lambda parts: safetensors_byte_ranges(parts, lambda part: part.name), lambda _: {})
    cut = [[(name, Box.whole(kind.shape))] for name, kind in source.tensors.items()]
    write_files(source, folder, cut, file_format, 1, lambda size: None)
    return {name: values for path in folder.iterdir() for name, values in load_file(path).items()}


RULES = pytest.mark.parametrize("rules", [OF_EACH, OF_ALL], ids=["a tensor of each", "a tensor of all"])


@RULES
def test_experts_are_read_in_their_order_any_box_of_them(tmp_path: Path, rules: tuple[Rule, ...]) -> None:
    expected = logical_of_each(files_of_each())
    source = opened(tmp_path, files_of_each() if rules is OF_EACH else files_of_all(expected), rules)
    assert {name: kind.shape for name, kind in source.tensors.items()} == LOGICAL
    for name, shape in LOGICAL.items():
        part = Box((1, *(0,) * (len(shape) - 1)), (2, *shape[1:-1], shape[-1] - 1))
        for box in (Box.whole(shape), part):
            values = torch.empty(box.size)
            source.fill(name, box, values)
            assert torch.equal(values, expected[name][box.slices()])


@RULES
def test_experts_are_written_as_they_were_read(tmp_path: Path, rules: tuple[Rule, ...]) -> None:
    logical = logical_of_each(files_of_each())
    expected = files_of_each() if rules is OF_EACH else files_of_all(logical)
    source = Given(logical)
    written = write(tmp_path, ToFiles(source, mapping(rules)))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], values) for name, values in expected.items())


def test_an_expert_is_written_without_the_others(tmp_path: Path) -> None:
    source = Given(logical_of_each(files_of_each()))
    write(tmp_path, ToFiles(source, mapping(OF_EACH)))
    assert set(source.filled) == {FFN * HIDDEN}


def test_a_tensor_of_an_expert_that_is_missing_too_many_or_of_another_shape_is_named(tmp_path: Path) -> None:
    files, name = files_of_each(), "layers.1.experts.2.w2"
    less = {each: values for each, values in files.items() if each != name}
    with pytest.raises(CheckpointError, match=rf"{name} is missing, but the model has \[6, 4\]"):
        opened(tmp_path, less)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[4, 6\], but the model has \[6, 4\]"):
        opened(tmp_path, less | {name: torch.ones(HIDDEN, FFN)})
    with pytest.raises(CheckpointError, match=r"has weights that toy does not have: layers.1.experts.3.w2"):
        opened(tmp_path, files | {"layers.1.experts.3.w2": files[name].clone()})
    with pytest.raises(CheckpointError, match=r"has weights that toy does not have: layers.0.experts.0.w2"):
        opened(tmp_path, files | {"layers.0.experts.0.w2": files[name].clone()})


def test_experts_that_rules_leave_out_or_have_twice_are_refused() -> None:
    for rules in (OF_EACH[:-1], (*OF_EACH, OF_ALL[-1])):
        with pytest.raises(CheckpointError, match=r"layers.1.moe.down \[3, 4, 6\] does not belong"):
            mapping(rules)


def test_a_weight_is_of_no_whole_numbers() -> None:
    class Counts:
        tensors = {tensor.name: Kind(tensor.shape, torch.int64) for tensor in mapping(OF_EACH)}  # noqa: RUF012

        def tensor(self, name: str) -> Tensor:
            raise AssertionError

    with pytest.raises(CheckpointError, match=r"layers.0.dense.w2 is int64, but weights are floating point"):
        FromFiles(Counts(), mapping(OF_EACH), LOGICAL)
