"""Adapters on one process: what they train, their dropout, and names that a network does not have."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.adapters import AdaptersConfig
from megalite.conversion.adapters import Adapters, InMemory
from megalite.errors import CheckpointError, ConfigurationError
from megalite.library.layers import ColumnParallelLinear, RowParallelLinear
from megalite.model.gpt import GPT
from megalite.parallel.adapter import Adaptable, adaptable_layers, add_adapters, named
from megalite.parallel.adapter_matrices import MAGNITUDE, A, B
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.sharding import Box
from megalite.tasks.adapters import check_names, check_same_adapters
from tests.distributed.layout_cell import Cell, model_config
from tests.distributed.layout_run import initialized_chunks, local_micro_batches
from tests.dropout_rule import Dropout
from tests.harness.close import assert_parameter_close
from tests.harness.poison import poisoned_memory
from tests.harness.stages import LOSS

RATE, STEPS = 0.05, 3
CELL = Cell(family="llama", key_values="gqa", sequence=8)
NARROW = ("query", "key", "value", "gate", "up")
"""Matrices with 16 columns, and as many rows or more."""


def trained(network: GPT) -> None:
    """Take steps of SGD on the parameters that require gradients."""
    for step in range(STEPS):
        for micro_batch in local_micro_batches(CELL, step, 0):
            network({}, micro_batch).terms[LOSS].backward()
        for parameter in network.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                with torch.no_grad():
                    parameter -= RATE * parameter.grad
                parameter.grad = None


def adapted_of(network: GPT) -> dict[str, Adaptable]:
    return {name: each for name, each in network.named_modules() if isinstance(each, Adaptable)}


def test_b_alone_beside_an_identity_is_the_training_of_the_layer() -> None:
    """Compare with the weights themselves: B A is B."""
    (whole,), (network,) = (initialized_chunks(ParallelMesh(), CELL) for _ in range(2))
    add_adapters(network, AdaptersConfig(lora_rank=16, lora_alpha=16.0, lora_target_modules=NARROW))
    initialize_adapters(network)
    whole.requires_grad_(False)
    layers = {name: each for name, each in adapted_of(network).items() if each.update is not None}
    for name, layer in layers.items():
        adapted_of(whole)[name].requires_grad_(True)
        layer.a.requires_grad_(False)
    before = {name: [w.detach().clone() for w in layer.weights_to_adapt()] for name, layer in layers.items()}
    trained(network)
    trained(whole)
    for name, layer in layers.items():
        (weight,), (start,) = adapted_of(whole)[name].weights_to_adapt(), before[name]
        assert layer.update is not None
        moved = start.clone()
        for term in layer.update.terms:
            view = term.piece.view(moved) if term.part is None else term.piece.view(moved).select(*term.part)
            view += layer.b[term.weight].detach()[term.rows].view(view.shape)
        assert not torch.equal(moved, start)
        assert_parameter_close(weight.detach(), moved, RATE, name)


def initialize_adapters(network: GPT) -> None:
    """Set A of each adapted matrix to the identity, and B to zero."""
    with torch.no_grad():
        for layer in adapted_of(network).values():
            if layer.update is None:
                continue
            for parameter in (layer.a, *layer.b):
                parameter.allocate()
                parameter.zero_()
            for rows in layer.a.split(16):
                rows.copy_(torch.eye(16, dtype=rows.dtype))


@pytest.mark.parametrize("make", [ColumnParallelLinear, RowParallelLinear])
def test_dropout_is_of_the_input_of_adapters_alone(make: type[ColumnParallelLinear]) -> None:
    context = ParallelContext(ParallelMesh(), dtype=torch.float64)
    layer = make(context, "up", 6, 5, bias=False)
    add_adapters(layer, AdaptersConfig(lora_rank=2, lora_alpha=3.0, lora_dropout=0.25))
    initialize(layer, 1)
    (weight,) = layer.weights_to_adapt()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.b[0].copy_(torch.randn(5, 2, generator=generator))
    x = torch.randn(4, 2, 6, generator=generator, dtype=torch.float64)
    places = Places(RandomKey(7, (3, 4)), SequenceLayout.whole(4))
    layer.eval()
    assert torch.allclose(layer(x), x @ (weight + 1.5 * layer.b[0] @ layer.a).T, atol=1e-12)
    layer.train()
    number = int.from_bytes(hashlib.blake2b(b"up", digest_size=4).digest(), "little") // 2
    dropped = Dropout(7, (3, 4), 0.0, 0.0).drop(x.transpose(0, 1), 0.25, number, 9).transpose(0, 1)
    assert 0 < (dropped == 0).sum() < x.numel()
    expected = x @ weight.T + 1.5 * dropped @ (layer.b[0] @ layer.a).T
    assert torch.allclose(layer(x, places), expected, atol=1e-12)
    with pytest.raises(ConfigurationError, match="--lora-dropout: up is not told the places"):
        layer(x)


def adapted_layer(weight: Tensor, config: AdaptersConfig, dtype: torch.dtype) -> ColumnParallelLinear:
    """Return a layer of this weight, with a B of zeros."""
    context = ParallelContext(ParallelMesh(), dtype=dtype)
    layer = ColumnParallelLinear(context, "up", weight.shape[1], weight.shape[0], bias=False)
    add_adapters(layer, config)
    initialize(layer, 1)
    with torch.no_grad():
        layer.weights_to_adapt()[0].copy_(weight)
    return layer


def test_padding_of_a_table_has_a_gradient_of_zeros() -> None:
    """Write a gradient where memory had other values, as ZeRO 2 and 3 do."""
    cell = replace(CELL, tied=False, vocabulary="odd")
    (network,) = initialized_chunks(ParallelMesh(), cell)
    add_adapters(network, AdaptersConfig(lora_rank=2, lora_target_modules=("output_layer",)))
    initialize(network, 1)
    with poisoned_memory():
        network({}, next(local_micro_batches(cell, 0, 0))).terms[LOSS].backward()
    assert network.head is not None
    (b,) = network.head.output.b
    assert b.grad is not None
    assert b.grad[:29].all()
    assert not b.grad[29:].any()


def test_a_row_of_zeros_is_finite_under_dora() -> None:
    """It stays, with gradients of plain LoRA. So it does when adapters are merged."""
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight[2] = 0.0
    dora = AdaptersConfig(lora_rank=2, use_dora=True)
    layer, plain = (adapted_layer(weight, each, torch.float64) for each in (dora, replace(dora, use_dora=False)))
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    output = layer(x)
    assert torch.allclose(output, x @ weight.T, atol=1e-12)
    output.square().sum().backward()
    assert all(each.grad.isfinite().all() for each in (layer.a, layer.b[0], layer.magnitudes[0]))
    layer.b[0].grad = None
    for each in (layer, plain):
        each(x)[..., 2].sum().backward()
    assert torch.equal(layer.b[0].grad, plain.b[0].grad)
    with torch.no_grad():
        layer.b[0][2] = 0.5
    assert torch.equal(layer(x)[..., 2], torch.zeros(4, 2, dtype=torch.float64))  # its length is still none
    tensor = layer.weights_to_adapt()[0].sharding.pieces[0].tensor
    own = {f"up.{A}": layer.a, f"up.{B}": torch.zeros(5, 2).double(), f"up.{MAGNITUDE}": layer.magnitudes[0]}
    merged = Adapters(dora, InMemory({"up.weight": weight}), InMemory(own), {"up.weight": tensor}).merged()
    found = torch.empty(5, 6, dtype=torch.float64)
    merged.fill("up.weight", Box.whole((5, 6)), found)
    assert torch.allclose(found, weight, atol=1e-12)


def test_lengths_are_not_rounded_to_bf16_before_they_are_applied() -> None:
    """In bf16 the number next to 1 is 1.0078: rows of that length differ from those of 1.006 in every token."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(64, 32, generator=generator), torch.randn(256, 4, 32, generator=generator)
    layer = adapted_layer(weight, AdaptersConfig(lora_rank=2, use_dora=True), torch.bfloat16)
    before = layer(x.bfloat16()).double()
    with torch.no_grad():
        layer.magnitudes[0].copy_(0.006 * weight.norm(dim=1))
        after = layer(x.bfloat16())
    assert (after == (before * 1.006).bfloat16()).float().mean() > 0.98
    assert all(each.dtype == torch.bfloat16 for each in (layer.a, layer.b[0], layer.magnitudes[0]))


class Places:
    def __init__(self, key: RandomKey, layout: SequenceLayout) -> None:
        self.key, self.layout, self.rows = key, layout, layout.part(0, 1)


def test_names_that_a_network_does_not_have_are_refused() -> None:
    model = model_config(CELL)

    def refused(adapters: AdaptersConfig, words: str) -> None:
        with pytest.raises(ConfigurationError, match=words):
            check_names(model, adapters)

    lora = AdaptersConfig(lora_rank=2)
    check_names(model, lora)
    refused(
        replace(lora, lora_target_modules=("query", "w1")),
        "--lora-target-modules w1: no matrix of this network has this name; it has query, key, value, output, gate, "
        "up, down, such as layers.0.attention.query",
    )
    refused(replace(lora, lora_rank=17), r"--lora-rank 17 is more than layers.0.attention.query \[32, 16\] can have")
    check_names(model, AdaptersConfig(freeze=("embedding.*", "layers.[01].*")))
    refused(AdaptersConfig(freeze=("emb",)), "--freeze emb: no weight of this network has such a name")
    refused(AdaptersConfig(freeze=("*",)), "--freeze names all weights")
    refused(AdaptersConfig(freeze=("*.query",)), "layers.0.attention.query, and not layers.0.attention.key_value, with")


def test_adapters_are_the_same_by_their_scale_and_their_matrices() -> None:
    model, saved = model_config(CELL), AdaptersConfig(lora_rank=4)

    def different(**changes: Any) -> str:
        try:
            check_same_adapters("run", saved, replace(saved, **changes), model)
        except CheckpointError as error:
            return str(error).partition("\n  ")[2]
        return ""

    every = ("q_proj", "k_proj", "value", "*.output", "gate", "up", "down")
    for same in ({"lora_alpha": 4.0}, {"lora_alpha": 2.0, "use_rslora": True}, {"lora_target_modules": every}):
        assert not different(**same)
    assert not different(lora_dropout=0.5, lora_target_modules=("*",))
    assert different(lora_alpha=8.0) == "--lora-alpha: None in the checkpoint, 8.0 in this run"
    assert different(use_rslora=True) == "--use-rslora: False in the checkpoint, True in this run"
    assert different(use_dora=True).startswith("--use-dora: False")
    assert different(lora_rank=2).startswith("--lora-rank: 4")
    assert different(lora_target_modules=every[1:]).startswith("--lora-target-modules: ('all-linear',)")


def test_each_part_of_a_fused_weight_has_a_name() -> None:
    network = GPT(model_config(replace(CELL, family="mixtral")), ParallelMesh(device=torch.device("meta")))
    matrices = [matrix for layer in adaptable_layers(network) for matrix in layer.matrices()]
    names = [matrix.name for matrix in matrices if matrix.name.startswith("layers.0.")]
    attention = ["query", "key", "value", "output"]
    assert names == [*(f"layers.0.attention.{each}" for each in attention), *(f"layers.0.moe.{n}" for n in OF_EXPERTS)]


def test_tables_have_adapters_where_they_are_named_and_are_their_layers_own() -> None:
    def found(cell: Cell, *targets: str) -> list[str]:
        network = GPT(model_config(cell), ParallelMesh(device=torch.device("meta")))
        matrices = named((m for layer in adaptable_layers(network) for m in layer.matrices()), targets)
        return [matrix.name for matrix in matrices if matrix.is_table]

    untied, both = replace(CELL, tied=False), ["embedding.word_embeddings", "output_layer"]
    assert found(untied, "all-linear", "output") == []
    assert found(untied, "lm_head", "embed_tokens") == found(untied, "word_embeddings", "output_layer") == both
    assert found(untied, "*") == both
    assert found(CELL, "*") == []
    assert found(replace(untied, depths=1), "*") == ["output_layer"]


OF_EXPERTS = ("gate", "up", "down")
