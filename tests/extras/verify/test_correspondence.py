"""Names and layouts of other programs: against a product with the program's own matrix, for every family."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megalite.config import ModelConfig
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import choose
from megalite.conversion.huggingface import forms_of
from megalite.conversion.mapping import FileTensor
from megalite.conversion.megatron import tensors_of_megatron
from megalite.conversion.megatron_names import canonical
from megalite.conversion.opened import logical_tensors
from megalite.errors import CheckpointError
from megalite.extras.verify.correspondence import Correspondence, WeightCounterpart
from megalite.extras.verify.trace import Entry
from megalite.model.gpt import GPT
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces

pytestmark = pytest.mark.extra

_LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
NETWORKS = {
    "gpt2": {},
    "llama": _LLAMA | {"group_query_attention": True, "num_query_groups": 2},
    "qwen3": _LLAMA | {"qk_layernorm": True, "group_query_attention": True, "num_query_groups": 2},
    "gated attention": _LLAMA | {"attention_output_gate": True},
}


def network_of(fields: dict[str, object]) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    return ModelConfig(**sizes, max_position_embeddings=32, hidden_dropout=0.0, attention_dropout=0.0, **fields)  # type: ignore[arg-type]


def programs_of(model: ModelConfig) -> list[Correspondence]:
    found: list[Correspondence] = []
    for family in FAMILIES:
        try:
            choose([family], model)
        except CheckpointError:
            continue
        tables: Sequence[Sequence[FileTensor]] = list(forms_of(family, model).values())
        found += [Correspondence(model, family.name, table, order="bsh") for table in tables]
    found.append(Correspondence(model, "megatron", tensors_of_megatron(model, logical_tensors(model)), canonical))
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_inputs_and_outputs_of_linear_layers_are_in_the_order_of_the_programs_matrices(name: str) -> None:
    model = network_of(NETWORKS[name])
    network = GPT(model, ParallelMesh(), dtype=torch.float64)
    for parameter in network.parameters():
        parameter.allocate()  # type: ignore[attr-defined]
        set_initial_values(parameter, 7)  # type: ignore[arg-type]
    values = {piece.tensor.name: piece.view(parameter.detach()) for parameter, piece in named_pieces(network)}
    modules = dict(network.named_modules())
    compared = 0
    for program in programs_of(model):
        for tensor in program.tensors:
            if len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
                continue
            owner = program.module_of(tensor.boxes[0][0])
            if not hasattr(modules[owner], "weights") and not hasattr(modules[owner], "weight"):
                continue
            if owner.startswith("embedding") or "norm" in owner:
                continue
            compared += 1
            module = tensor.name.removesuffix(".weight")
            ours = torch.randn(
                8, 2, program.features(owner)[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1)
            )
            matrices = getattr(modules[owner], "weights", None) or [modules[owner].weight]
            given_by_us = torch.cat([ours @ matrix.detach().t() for matrix in matrices], -1)  # type: ignore[union-attr]
            matrix = WeightCounterpart(tensor, lambda whole: whole, tuple(name for name, _, _ in tensor.boxes)).whole(
                values
            )
            shape = (8, 2) if program.order == "sbh" else (2, 8)
            inputs, outputs = matrix.shape if program.is_transposed(tensor) else matrix.shape[::-1]

            def entry(role: str, width: int, module: str = module, shape: tuple[int, ...] = shape) -> Entry:
                return Entry(0, module, role, (*shape, width), "here", None)  # type: ignore[arg-type]

            entered = program.of_module(entry("input", inputs), {}, 2, 8).cut(ours)
            left = program.of_module(entry("output", outputs), {}, 2, 8).cut(given_by_us)
            theirs = entered @ (matrix if program.is_transposed(tensor) else matrix.t())
            torch.testing.assert_close(left, theirs, rtol=1e-12, atol=1e-12)
    assert compared >= 8
