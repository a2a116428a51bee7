"""Logs of torchtitan's --profiler.dump_numerics are read as far as their operations are certain to be of a module."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.errors import DataError
from megalite.extras.verify.evidence import Statistics
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.trace import Entry, Trace

TOKENS, WIDTH, FEATURES = 6, 4, 5
Operation = tuple[str, str, Tensor | None, bool]
"""Module, name, result and whether it is of backward."""


def block(key: str, result: Tensor | None, *, backward: bool = False) -> str:
    """Return the lines of an operation, as the tracer writes them."""
    lines = [f"[{key}]"]
    if result is not None:
        wide = result.double()
        lines += [
            f"  Shape: {result.shape}, Dtype: {result.dtype}",
            f"  L2 norm: {wide.norm():.6e}",
            f"  Min: {wide.min():.6e}",
            f"  Max: {wide.max():.6e}",
            f"  Mean: {wide.mean():.6e}",
            f"  Output hash: {wide.abs().sum():.6e}",
        ]
    lines += [
        "  Input hashes: 1.000000e+00, 2.000000e+00",
        "  Input producers: ;",
        "  Location: common/attention.py:53",
    ]
    return "\n".join([*lines, *(["  Phase: backward"] if backward else [])]) + "\n\n"


def write(folder: Path, operations: Sequence[Operation], rank: int = 0) -> Path:
    """Write a log with these operations, numbered within their modules."""
    counts: dict[str, int] = {}
    text = f"Total captured activations: {len(operations)}\nExcluded ops dispatched: _to_copy, view\n{'=' * 80}\n\n"
    for module, name, result, backward in operations:
        number = counts.setdefault(module, 0)
        counts[module] += 1
        text += block(f"{module}/op_{number}_{name}", result, backward=backward)
    path = folder / "numerics" / f"rank_{rank}_activations.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward(seed: int) -> list[Operation]:
    """Return a forward of an embedding, a layer with a norm and a linear layer, and an output layer."""
    hidden = tensor(seed + 1, 2, 3, WIDTH)
    return [
        ("tok_embeddings", "embedding", tensor(seed, 2, 3, WIDTH), False),
        ("layers.0.attention_norm", "pow", hidden.square(), False),
        ("layers.0.attention_norm", "add_", None, False),
        ("layers.0.attention_norm", "mul", hidden, False),
        ("layers.0.attention.qkv_linear.wqkv", "mm", tensor(seed + 2, TOKENS, 3 * WIDTH), False),
        ("layers.0.attention.qkv_linear", "split_with_sizes", tensor(seed + 3, 2, 3, WIDTH), False),
        ("layers.0.attention.wo", "mm", tensor(seed + 4, TOKENS, WIDTH), False),
        ("layers.0", "add", tensor(seed + 5, 2, 3, WIDTH), False),
        ("lm_head", "mm", tensor(seed + 6, TOKENS, FEATURES), False),
        ("<none>", "_log_softmax", tensor(seed + 7, TOKENS, FEATURES), False),
    ]


def backward(seed: int) -> list[Operation]:
    """Return the products of the output layer's backward, and one of a recomputed operation."""
    return [
        ("<none>", "_log_softmax_backward_data", tensor(seed + 8, TOKENS, FEATURES), True),
        ("lm_head", "mm", tensor(seed + 9, FEATURES, WIDTH), True),
        ("lm_head", "mm", tensor(seed + 10, TOKENS, WIDTH), True),
        ("attention.wo", "mm", tensor(seed + 4, TOKENS, WIDTH), True),
    ]


def of(trace: Trace, name: str, role: str, micro_batch: int = 0) -> Entry:
    """Return the only such entry."""
    (entry,) = [each for each in trace.entries if (each.name, each.role, each.micro_batch) == (name, role, micro_batch)]
    return entry


def explains(entry: Entry, values: Tensor) -> bool:
    """Tell whether the recorded statistics are those of a tensor."""
    return entry.read().distance(values.double()) == 0.0


@pytest.mark.parametrize("where", ["", "numerics", "numerics/rank_0_activations.log"])
def test_outputs_of_modules_are_those_of_their_last_operations(where: str, tmp_path: Path) -> None:
    operations = forward(1) + backward(1)
    write(tmp_path, operations)
    trace = read_trace(tmp_path / where, 7)
    assert (trace.program, trace.step, trace.coordinates, trace.gradients_of) == ("torchtitan", 7, {0: {}}, "modules")
    outputs = {entry.name for entry in trace.entries if entry.role == "output"}
    assert outputs == {
        "tok_embeddings",
        "layers.0.attention_norm",
        "layers.0.attention.qkv_linear.wqkv",
        "layers.0.attention.wo",
        "layers.0",
        "lm_head",
    }
    assert explains(of(trace, "layers.0.attention_norm", "output"), tensor(2, 2, 3, WIDTH))
    assert explains(of(trace, "lm_head", "output"), tensor(7, TOKENS, FEATURES))
    assert not explains(of(trace, "lm_head", "output"), 1.01 * tensor(7, TOKENS, FEATURES))
    assert of(trace, "lm_head", "output").source.endswith("rank_0_activations.log: [lm_head/op_0_mm]")


def test_a_linear_layers_backward_gives_the_gradients_of_its_weight_and_its_input(tmp_path: Path) -> None:
    write(tmp_path, forward(1) + backward(1))
    trace = read_trace(tmp_path, None)
    assert explains(of(trace, "lm_head.weight", "gradient"), tensor(10, FEATURES, WIDTH))
    assert explains(of(trace, "lm_head", "input_gradient"), tensor(11, TOKENS, WIDTH))
    assert {entry.role for entry in trace.entries if entry.name == "layers.0.attention.wo"} == {"output"}


def test_micro_batches_are_counted(tmp_path: Path) -> None:
    """One after the other, and two forwards before the first backward, as in a pipeline."""
    orders = ([*forward(1), *backward(1), *forward(50), *backward(50)], [*forward(1), *forward(50), *backward(1)])
    for number, operations in enumerate(orders):
        write(tmp_path / str(number), operations)
        trace = read_trace(tmp_path / str(number), None)
        assert explains(of(trace, "layers.0", "output", 0), tensor(6, 2, 3, WIDTH))
        assert explains(of(trace, "layers.0", "output", 1), tensor(55, 2, 3, WIDTH))
        gradients = [entry.micro_batch for entry in trace.entries if entry.role == "input_gradient"]
        assert gradients == ([0, 1] if number == 0 else [])  # of two forwards one backward is missing
        assert not any(entry.role == "gradient" for entry in trace.entries)  # of which the step sums two


def test_what_communicates_after_a_module_is_not_its_output(tmp_path: Path) -> None:
    operations = forward(1)
    operations.insert(7, ("layers.0.attention", "reduce_scatter_tensor", tensor(90, 3, WIDTH), False))
    write(tmp_path, operations)
    trace = read_trace(tmp_path, None)
    assert "layers.0.attention.wo" not in {entry.name for entry in trace.entries}
    assert "layers.0.attention.qkv_linear.wqkv" in {entry.name for entry in trace.entries}


def test_older_logs_name_the_models_class_and_have_another_norm(tmp_path: Path) -> None:
    path = write(tmp_path, [("FSDPLlama3Model.layers.0._checkpoint_wrapped_module.wo", "mm", tensor(1, 3, 4), False)])
    path.write_text(path.read_text().replace("  L2 norm", f"  L1 norm: {tensor(1, 3, 4).abs().sum():.6e}\n  L2 norm"))
    entry = of(read_trace(tmp_path, None), "layers.0.wo", "output")
    evidence = entry.read()
    assert isinstance(evidence, Statistics)
    assert set(evidence.values) == {"l1", "norm", "least", "most", "mean"}
    assert explains(entry, tensor(1, 3, 4))


def test_statistics_that_are_no_numbers_are_not_finite(tmp_path: Path) -> None:
    path = write(tmp_path, [("layers.0.wo", "mm", torch.tensor([[math.nan, 1.0]]), False)])
    assert "nan" in path.read_text()
    evidence = of(read_trace(tmp_path, None), "layers.0.wo", "output").read()
    assert not evidence.finite
    assert evidence.distance(torch.zeros(1, 2, dtype=torch.float64)) == math.inf


def test_ranks_that_are_missing_or_damaged_are_said(tmp_path: Path) -> None:
    write(tmp_path, forward(1), rank=0)
    write(tmp_path, forward(1), rank=3)
    damaged = write(tmp_path, forward(1), rank=1)
    damaged.write_text(damaged.read_text().replace("Min: -", "Min: x", 1))
    trace = read_trace(tmp_path, None)
    assert (trace.missing, sorted(trace.coordinates)) == ((1, 2), [0, 3])
    assert any("rank_1_activations.log, line 8: Min is no number" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no operation: it is empty"),
        ("[a/op_0_mm]\n  Shape: torch.Size([2, ]), Dtype: torch.float32\n", "line 2: a shape or a type"),
        ("[a/op_0_mm]\n  Shape: torch.Size([2]), Dtype: torch.nn\n", "line 2: a shape or a type"),
        ("[a/op_0_mm]\n  Shape: torch.Size([" + "9, " * 5000 + "9]), Dtype: torch.float32\n", "line 2: a shape"),
        ("[a/op_0_mm]\n  L2 norm: 1e999\n  Min: --\n", "line 3: Min is no number"),
        ("\0" * 4000, "has no operation"),
    ],
)
def test_a_damaged_log_is_refused_with_its_line(text: str, why: str, tmp_path: Path) -> None:
    path = write(tmp_path, [])
    path.write_text(text)
    with pytest.raises(DataError, match=rf"rank_0_activations\.log.*{why}"):
        read_trace(tmp_path, None)


def test_a_pipe_or_a_link_out_of_the_folder_is_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", forward(1))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="outside its folder"):
        read_trace(tmp_path / "trace", None)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        read_trace(tmp_path / "trace", None)
