"""Rules for models with parallel layers: what is refused, and how initial values and weight decay are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megalite
from megalite.library.layers import gather_sequence, split_sequence
from megalite.modules.records import decays, give_records
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Drawn


def linear(name: str, **options: Any) -> nn.Module:
    return megalite.ColumnParallelLinear(megalite.ParallelContext(ParallelMesh()), name, 4, 6, **options)


def test_a_linear_layer_takes_a_vector_as_torchs_does() -> None:
    layer = linear("up")
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    vector = torch.ones(4, requires_grad=True)
    layer(vector).sum().backward()
    assert vector.grad is not None
    assert vector.grad.tolist() == [6.0] * 4


def test_tied_weights_of_parallel_layers_are_refused() -> None:
    layer = linear("up")
    with pytest.raises(megalite.MegaliteError, match=r"up\.weight of a parallel layer is in several places"):
        give_records([nn.ModuleList([layer, nn.Sequential(layer), _holder(layer)])], ParallelMesh())


def _holder(layer: nn.Module) -> nn.Module:
    other = nn.Module()
    other.weight = next(layer.parameters())
    return other


def test_two_layers_of_one_name_are_refused() -> None:
    with pytest.raises(megalite.MegaliteError, match=r"two parameters are called up\.weight"):
        give_records([nn.ModuleList([linear("up"), linear("up")])], ParallelMesh())


def test_plain_parameters_say_which_tokens_they_see_if_sequences_are_split() -> None:
    module = nn.ModuleList([linear("up"), nn.LayerNorm(4)])
    with pytest.raises(megalite.MegaliteError, match=r"the gradient of 1\.weight is of part of the tokens if its"):
        give_records([module], ParallelMesh(), splits_sequences=True)
    for plain, sees_part in zip(module[1].parameters(), (True, False), strict=True):
        plain.sequence_parallel = sees_part  # type: ignore[attr-defined]
    give_records([module], ParallelMesh(), splits_sequences=True)
    partial = [parameter.sharding.grad_is_partial for parameter, _ in named_pieces(module[1])]
    assert partial == [True, False]


def test_rules_of_weight_decay_and_initial_values_hold_for_parallel_layers() -> None:
    def records(**rules: Any) -> list[Any]:
        layer = linear("up")
        give_records([layer], ParallelMesh(), **rules)
        return [piece.tensor for _, piece in named_pieces(layer)]

    assert [each.weight_decay for each in records(weight_decay=decays)] == [True, False]
    assert [each.weight_decay for each in records(weight_decay=lambda name, _: "bias" in name)] == [False, True]
    drawn = [each.initial for each in records(initial=lambda name, _, shape: torch.full(shape, float(len(name))))]
    assert all(isinstance(each, Drawn) for each in drawn)
    assert [each.draw(torch.Generator()).unique().tolist() for each in drawn] == [[9.0], [7.0]]


def of_rank(rank: int, *, split: bool = False) -> megalite.ParallelContext:
    return megalite.ParallelContext(ParallelMesh(world_size=2, tensor_parallel_size=2).at(rank), split)


def test_numbers_that_ranks_cannot_divide_are_refused() -> None:
    context = of_rank(0)
    refused: dict[str, Any] = {
        r"a: out_features=5 cannot be divided over 2": lambda: megalite.ColumnParallelLinear(context, "a", 4, 5),
        r"b: in_features=3 cannot be divided over 2": lambda: megalite.RowParallelLinear(context, "b", 3, 4),
        r"c: heads=3 cannot": lambda: megalite.ParallelAttention(context, "c", 6, 3),
        r"d: kv_heads=1 cannot": lambda: megalite.ParallelAttention(context, "d", 8, 4, 1),
        r"e: 4 heads of hidden=6": lambda: megalite.ParallelAttention(context, "e", 6, 4),
        r"f: attention to another sequence": lambda: megalite.ParallelAttention(
            context, "f", 8, 4, causal=True, cross=True
        ),
    }
    for message, make in refused.items():
        with pytest.raises(megalite.MegaliteError, match=message):
            make()
    with pytest.raises(megalite.MegaliteError, match="a sequence of 5 cannot be split over 2 ranks: pad it"):
        split_sequence(of_rank(0, split=True), torch.zeros(5, 1))


def test_sequences_are_whole_without_sequence_parallelism() -> None:
    whole = torch.zeros(5, 1)
    assert split_sequence(of_rank(0), whole) is whole
    assert gather_sequence(of_rank(0), whole) is whole


@pytest.mark.parametrize("window", [None, 0, 1, 2])
def test_a_causal_mask_is_joined_with_another(window: int | None) -> None:
    torch.manual_seed(1)
    layer = megalite.ParallelAttention(
        megalite.ParallelContext(ParallelMesh(), dtype=torch.float64), "a", 8, 2, causal=True, window=window
    )
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    hidden, visible = torch.randn(4, 1, 8, dtype=torch.float64), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    torch.testing.assert_close(layer(hidden, mask=visible), layer(hidden))
    visible[..., 0] = False
    visible[..., 0, 0] = True
    torch.testing.assert_close(layer(hidden, mask=visible)[2:], layer(hidden[1:])[1:])
