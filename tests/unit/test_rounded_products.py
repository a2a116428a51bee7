"""Codes of weights: how long they are kept, and who drops them; what is not rounded; what passes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.moe import Experts
from megalite.optim.buckets import DataParallel, make_buckets
from megalite.parallel import rounded_products
from megalite.parallel.context import ParallelContext
from megalite.parallel.grouped import ExpertRows, grouped_linear
from megalite.parallel.initialization import initialize
from megalite.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.rounded_products import Rounding, Roundings, kept_codes
from megalite.parallel.sharding import LogicalTensor, Normal
from megalite_kernels import tiles
from megalite_kernels.recipes import recipe
from tests.harness.close import assert_bits_equal
from tests.harness.stages import loss_of

MODEL = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=2, max_position_embeddings=4, vocab_size=8)
EACH = Rounding(recipe("mxfp8"))
SOME = Roundings((EACH, None, EACH), EACH)
LINEAR = (ColumnParallelLinear, ReplicatedLinear, RowParallelLinear)


def network(model: ModelConfig = MODEL, roundings: Roundings = SOME) -> GPT:
    found = GPT(model, ParallelMesh(), roundings=roundings)
    initialize(found, 1)
    return found


def rounded(network: nn.Module) -> list[str]:
    """Return the names of the linear layers that round."""
    return [name for name, each in network.named_modules() if isinstance(each, LINEAR) and each.products.rounds]


def test_codes_are_made_once_while_they_are_kept() -> None:
    layer = network().layers[0].mlp.up  # type: ignore[union-attr]
    with mock.patch.object(rounded_products, "quantize_weight", wraps=rounded_products.quantize_weight) as made:
        with kept_codes([layer]):
            for _ in range(2):
                layer(torch.ones(2, 1, 32, requires_grad=True)).sum().backward()
        assert made.call_count == 1
        before = layer(torch.ones(2, 1, 32))
        with torch.no_grad():
            layer.weights[0].mul_(2)
        with kept_codes([layer]):
            torch.testing.assert_close(layer(torch.ones(2, 1, 32)), 2 * before)
        assert made.call_count == 3


def test_zero_3_drops_codes_with_the_values() -> None:
    stage, mesh = network(), UnconnectedMesh(world_size=2)
    buckets = make_buckets([stage], mesh, DataParallel(torch.float32, zero_stage=3), blocks=[stage.blocks()])
    weights = [weight for layer in stage.layers for weight in layer.parameters()]
    with kept_codes([stage]):
        for bucket in buckets:
            bucket.begin_parameter_gather()
            bucket.finish_parameter_gather()
        stage.layers[0].mlp.up(torch.ones(2, 1, 32))  # type: ignore[union-attr]
        assert sum(weight.codes is not None for weight in weights) == 1  # type: ignore[attr-defined]
        for bucket in buckets:
            bucket.free_parameters()
        assert all(weight.codes is None for weight in weights)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rounding", [None, EACH, replace(EACH, weight_gradients=True)], ids=["not", "8 bits", "all"])
def test_a_product_with_a_frozen_weight_keeps_nothing(rounding: Rounding | None) -> None:
    """Its input has the same gradient."""
    context, rows = ParallelContext(ParallelMesh(), rounding=rounding), torch.tensor([3, 8], dtype=torch.int32)
    one = LogicalTensor("weight", (64, 64), Normal(1.0), True)
    two = LogicalTensor("experts", (2, 64, 64), Normal(1.0), True)
    experts = nn.ParameterList([context.parameter(context.split(two, {0: "experts"}))])
    column = ColumnParallelLinear(context, "ffn", [context.split(one, {0: "ffn"})])
    row = RowParallelLinear(context, "ffn", context.split(one, {1: "ffn"}), None)
    runs: dict[Callable[[Tensor], Tensor], nn.Module] = {
        column: column,
        row: row,
        partial(row, unread=True): row,
        lambda input: grouped_linear(input, experts[0], ExpertRows((0, 3, 8), rows), context.products()): experts,
    }
    initialize(nn.ModuleList([column, row, experts]), 1)
    for run, module in runs.items():
        kept, gradients = list[int](), list[Tensor]()
        for trains in (True, False):
            module.requires_grad_(trains)
            input = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
            output, saved = run_and_saved(run, input)
            kept.append(len(saved))
            gradients += torch.autograd.grad(output.sum(), input)
        assert_bits_equal(*gradients)
        assert kept[0] > 0 == kept[1]


@pytest.mark.parametrize("experts", [None, 2])
def test_evaluation_rounds_no_input_of_an_activation(experts: int | None) -> None:
    """The bits are those with a backward, which keeps codes of it."""
    model = replace(MODEL, num_layers=1, num_experts=experts, add_bias_linear=experts is None)
    stage = network(model, Roundings((replace(EACH, stores_activations=True),)))
    ones, found = torch.ones(1, 4, dtype=torch.int64), []
    batch = MicroBatch(ones, ones, None, ones, torch.ones(1, 4), RandomKey(1, (2,)))
    for trains in (True, False):
        made = mock.patch.object(tiles, "quantize_reference", wraps=tiles.quantize_reference)
        with torch.set_grad_enabled(trains), made as called:
            found.append((loss_of(stage.eval(), batch), called.call_count))
    (one, more), (other, fewer) = found
    assert_bits_equal(one.detach(), other)
    assert more == fewer + 1


def run_and_saved(run: Callable[[Tensor], Tensor], input: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Run a function, and return its output with the tensors that backward is to read."""
    saved = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return run(input), saved


ENDS = ["attention.query_key_value", "attention.output", "mlp.up", "mlp.down"]


def test_layers_that_are_left_out_and_the_output_layer_are_not_rounded() -> None:
    assert rounded(network()) == [f"layers.{layer}.{end}" for layer in (0, 2) for end in ENDS]


def test_depths_are_rounded_with_their_projections() -> None:
    """Megatron-LM does so, too, whatever layers are left out."""
    depths = replace(MODEL, mtp_num_layers=1)
    found = rounded(network(depths, Roundings((None,) * 3, EACH)))
    assert found == [f"prediction.depths.0.{end}" for end in ("projection", *(f"layers.0.{end}" for end in ENDS))]
    assert not rounded(network(depths, Roundings((None,) * 3)))


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [("D-", {"indexer.query", "indexer.of_input"}), ("K-", {"decay", "gate"})],
)
def test_what_chooses_keys_and_decays_is_not_rounded(pattern: str, kept: set[str]) -> None:
    model = replace(
        MODEL,
        num_layers=2,
        hybrid_layer_pattern=pattern,
        position_embedding_type="none",
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        kv_lora_rank=8,
        kda_num_heads=2,
        kda_head_dim=8,
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=8,
        dsa_indexer_topk=2,
    )
    stage = network(model, Roundings((EACH, EACH)))
    plain = {
        name.removeprefix("layers.0.attention.")
        for name, each in stage.named_modules()
        if isinstance(each, LINEAR) and not each.products.rounds
    }
    assert plain == kept | {"head.output"}


def test_experts_have_no_scale_of_a_whole_tensor() -> None:
    model = replace(MODEL, num_experts=2, moe_router_topk=1, moe_router_pre_softmax=True)
    for name, rounds in (("blockwise", True), ("tensorwise", False)):
        stage = network(model, Roundings((Rounding(recipe(name)),) * 3))
        (experts, *_) = [each for each in stage.modules() if isinstance(each, Experts)]
        assert experts.products.rounds is rounds
