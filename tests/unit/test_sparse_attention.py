"""Sparse attention on one rank: the choice of keys, ties, blocks of queries, what is kept, what is counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config.kinds.table import KINDS
from megalite.inference.network import Network, make_network
from megalite.model.attention_core import LocalCore
from megalite.model.batch import MicroBatch
from megalite.model.latent_attention import LatentAttention, LatentCache
from megalite.model.sparse_attention import Blocks, SparseAttention, SparseCore
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels import indexer
from megalite_kernels.indexer import (
    Indices,
    VisibleKeys,
    add_index_gradients_,
    best_keys,
    choose_keys,
    cut,
    divergence,
    index_scores,
    mask_of,
    numbers_of,
    summed_probabilities,
)
from tests.distributed.layout_cell import Cell, model_config
from tests.unit.test_latent_attention import ROW, decoded


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made_indices(batch: int = 2, queries: int = 9, keys: int = 13, heads: int = 3, width: int = 4) -> Indices:
    return Indices(
        drawn(batch, queries, heads, width), drawn(batch, queries, heads, seed=1), drawn(batch, keys, width, seed=2)
    )


@given(
    rows=some.lists(some.lists(some.integers(-2, 2), min_size=7, max_size=7), min_size=1, max_size=6),
    count=some.integers(1, 9),
    first=some.integers(0, 3),
)
def test_the_first_of_equal_keys_are_chosen(rows: list[list[int]], count: int, first: int) -> None:
    """Whole numbers, so that most scores have an equal."""
    scores = torch.tensor([rows], dtype=torch.float64)
    visible = VisibleKeys(torch.full((1, len(rows)), first), torch.arange(len(rows))[None])
    mask = visible.mask(slice(None), 7)
    chosen = best_keys(scores, mask, count)
    for query, row in enumerate(rows):
        seen = range(first, min(query, 6) + 1)
        best = sorted(seen, key=lambda key: (-row[key], key))[:count]
        assert chosen[0, query].nonzero().flatten().tolist() == sorted(best)
    numbers = numbers_of(chosen, min(count, 7))
    assert torch.equal(mask_of(numbers, 7), chosen)
    assert (numbers[..., 1:] > numbers[..., :-1]).logical_or(numbers[..., 1:] == -1).all()


def test_scores_are_the_formula() -> None:
    indices = made_indices()
    query, weights, key = indices
    for relu in (True, False):
        found = index_scores(indices, relu=relu)
        for sample in range(2):
            for row in range(9):
                for at in range(13):
                    products = [float(query[sample, row, h] @ key[sample, at]) / math.sqrt(4) for h in range(3)]
                    products = [max(each, 0.0) if relu else each for each in products]
                    wanted = sum(float(weights[sample, row, h]) * products[h] for h in range(3))
                    assert float(found[sample, row, at]) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_of_scores_are_those_of_autograd(relu: bool) -> None:
    leaves = Indices(*(each.requires_grad_() for each in made_indices()))
    query, weights, key = leaves
    products = torch.einsum("bqhd,bkd->bqhk", query, key) / math.sqrt(4)
    scores = torch.einsum("bqh,bqhk->bqk", weights, products.relu() if relu else products)
    of_scores = drawn(2, 9, 13, seed=7)
    wanted = torch.autograd.grad(scores, leaves, of_scores)
    plain = Indices(*(each.detach() for each in leaves))
    for heads in ([slice(0, 3)], [slice(0, 2), slice(2, 3)]):
        found = Indices(*(torch.zeros_like(each) for each in plain))
        add_index_gradients_(found, plain, of_scores, relu=relu, heads=heads)
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).abs().max() < 1e-13
        assert (index_scores(plain, relu=relu, heads=heads) - scores).abs().max() < 1e-14


def test_blocks_of_queries_change_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = made_indices()
    visible = VisibleKeys(torch.zeros(1, 9, dtype=torch.int64), torch.arange(4, 13)[None])
    whole = choose_keys(indices, visible, 5, relu=True)
    for elements, rows in ((2 * 3 * 13 * 2, 1), (2 * 13 * 8, 1), (2 * 3 * 13 * 100, 9)):
        monkeypatch.setattr(indexer, "_ELEMENTS", elements)
        monkeypatch.setattr(indexer, "_ROWS", rows)
        assert torch.equal(choose_keys(indices, visible, 5, relu=True), whole)


@given(
    queries=some.integers(1, 300), heads=some.integers(1, 20), numbers=some.integers(1, 2**14), on_gpu=some.booleans()
)
def test_blocks_cover_all_and_are_small(queries: int, heads: int, numbers: int, on_gpu: bool) -> None:
    found = cut(queries, heads, numbers, torch.device("cuda" if on_gpu else "cpu"))
    assert [at for each in found.rows for at in range(each.start, each.stop)] == [*range(queries)]
    assert [at for each in found.heads for at in range(each.start, each.stop)] == [*range(heads)]
    rows, together = found.rows[0].stop, found.heads[0].stop
    most = indexer._ON_GPU if on_gpu else indexer._ELEMENTS
    assert rows * together * numbers <= most
    assert rows >= min(queries, indexer._ROWS)


def test_the_gradient_of_the_divergence_is_that_of_autograd() -> None:
    scores, target = drawn(2, 5, 7).requires_grad_(), drawn(2, 5, 7, seed=1).exp()
    mask = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 0] = True
    mask[0, 0] = False  # a query that sees no key
    target = target * mask
    counted = torch.tensor([[True, True, False, True, True], [True] * 5])
    total, gradient = divergence(scores.detach(), target, mask, counted)
    shares = target / target.sum(-1, keepdim=True).clamp_min(1e-300)
    logs = torch.log_softmax(scores.masked_fill(~mask, -1e30), dim=-1)
    wanted = (torch.xlogy(shares, shares) - shares * logs).masked_fill(~mask, 0.0).sum(-1)
    (by_autograd,) = torch.autograd.grad((wanted * counted).sum(), scores)
    assert float(total) == pytest.approx(float((wanted * counted).sum().detach()), rel=1e-12)
    assert (gradient - by_autograd).abs().max() < 1e-14


def test_summed_probabilities_of_a_query_without_keys_are_nothing() -> None:
    query, key = drawn(1, 3, 4, 5), drawn(1, 3, 6, 5, seed=1)
    mask = torch.ones(1, 4, 6, dtype=torch.bool).tril()
    mask[0, 2] = False
    found = summed_probabilities(query, key, mask, scale=0.5, cap=None)
    assert found[0].sum(-1).tolist() == pytest.approx([3.0, 3.0, 0.0, 3.0])
    assert not found.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_in_fp32_whatever_the_weights_are(dtype: torch.dtype) -> None:
    """2,048 channels: in bf16 the sum alone would be off by 1e-2."""
    indices = Indices(*(each.to(dtype) for each in made_indices(keys=40, heads=2, width=2048)))
    found = index_scores(indices, relu=True)
    wanted = index_scores(Indices(*(each.double() for each in indices)), relu=True)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def made(indexing: str, **changes: object) -> Network:
    config = model_config(Cell("llama", latents="narrow values", qk_layernorm=True, indexing=indexing))
    network = make_network(replace(config, **changes), ParallelMesh(), torch.float64)
    initialize(network.stage, 5)
    return network


@pytest.mark.parametrize("indexing", ["few", "sparse loss", "every second"])
def test_absorbed_and_written_out_are_the_same(indexing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for absorbed in (True, False):
        monkeypatch.setattr(LatentAttention, "absorbing_is_less", lambda *_, absorbed=absorbed: absorbed)
        found.append(decoded(made(indexing))[0])
    assert (found[0] - found[1]).abs().max() <= 1e-12 * found[1].abs().max()
    dense = decoded(made("more than is seen"))[0]
    assert (found[0] - dense).abs().max() > 1e-3 * dense.abs().max()  # so something was left out


def test_the_cache_has_latents_rotated_keys_and_the_indexers_keys_alone() -> None:
    network = made("every second")
    _, cache = decoded(network)
    kept = [each._kept for each in cache._layers.values() if isinstance(each, LatentCache)]
    config, widths = network.stage.config, [4, 0, 4, 0]  # every second layer has no indexer
    for each, width in zip(kept, widths, strict=True):
        assert each is not None
        assert each.numel() == len(ROW) * (config.kv_lora_rank + config.qk_pos_emb_head_dim + width)


def test_weights_are_counted() -> None:
    network = made("few")
    config, elements = network.stage.config, 0
    for parameter, piece in named_pieces(network.stage):
        if ".latent_attention." in piece.tensor.name and "norm" not in piece.tensor.name:
            elements += piece.view(parameter).numel()
    assert KINDS["sparse_attention"].weights(config) * config.num_layers == elements


def test_indexers_are_frozen_without_a_loss_and_all_else_in_the_warmup() -> None:
    def trained(indexing: str) -> set[bool]:
        network = made(indexing)
        found = {(".indexer." in name, each.requires_grad) for name, each in network.stage.named_parameters()}
        assert len(found) == 2
        return {of_indexer for of_indexer, requires_grad in found if requires_grad}

    assert trained("few") == {False, True}
    assert trained("without loss") == {False}
    assert trained("warmup") == {True}
    assert trained("indexer") == {True}
    layers = [each for each in made("every second").stage.modules() if isinstance(each, SparseAttention)]
    assert [each.indexer is None for each in layers] == [False, True, False, True]


def text_of(length: int) -> MicroBatch:
    text = torch.randint(16, (1, length + 1), generator=torch.Generator().manual_seed(1))
    return MicroBatch(
        tokens=text[:, :-1],
        positions=torch.arange(length)[None],
        first_keys=None,
        labels=text[:, 1:],
        loss_mask=torch.ones(1, length),
        key=RandomKey(0, (0,)),
    )


class _Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation returns."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        # An expanded view has no memory of its own.
        self.found = max(self.found, *(each.untyped_storage().nbytes() // each.itemsize for each in tensors), 0)
        return outputs


@pytest.mark.parametrize(
    ("indexing", "changes"),
    [
        ("few", {}),
        ("warmup", {}),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (
                ("sparse loss", {}),
                ("warmup", {"attn_logit_softcapping": 50.0}),
                ("warmup", {"attention_dropout": 0.1}),
            )
        ),
    ],
)
def test_no_array_of_queries_times_keys_is_ever_whole(
    indexing: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "_ELEMENTS", 2**12)
    length = 256
    stage = made(indexing, **changes).stage.train()
    with _Largest() as largest:
        terms = stage({}, text_of(length)).terms
        sum(each for each in terms.values() if each.requires_grad).backward()
    assert terms["indexer_loss"] > 0
    assert largest.found < length * length / 2


@pytest.mark.parametrize("indexing", ["few", "sparse loss", "warmup"])
def test_blocks_of_queries_and_heads_change_no_gradient(indexing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of 8 queries and a head, or of a query where 8 are too many."""
    network = made(indexing).stage.train()
    found = []
    for elements, rows in ((2**22, 64), (8 * 32, 8), (40, 8)):
        monkeypatch.setattr(indexer, "_ELEMENTS", elements)
        monkeypatch.setattr(indexer, "_ROWS", rows)
        network.zero_grad()
        terms = network({}, text_of(32)).terms
        sum(each for each in terms.values() if each.requires_grad).backward()
        found.append({name: each.grad for name, each in network.named_parameters() if each.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in found[0].items():
            assert (other[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


@pytest.mark.parametrize("indexing", ["warmup", "indexer"])
def test_what_is_frozen_has_no_backward(indexing: str) -> None:
    terms = made(indexing).stage.train()({}, text_of(8)).terms
    assert not terms["lm_loss"].requires_grad
    assert terms["indexer_loss"].requires_grad


def test_frozen_latents_that_travel_beside_keys_have_no_backward() -> None:
    attention = made("indexer").stage.layers[0].attention
    indices = Indices(*(each.requires_grad_() for each in made_indices(batch=1)))
    joined = attention._with_keys(drawn(13, 1, 5), indices, lambda own: own)
    assert not joined.latents.requires_grad
    assert joined.indices.key.requires_grad


@pytest.mark.parametrize("indexing", ["few", "sparse loss", "without loss"])
def test_indexers_that_are_not_finite_do_not_go_unnoticed(indexing: str) -> None:
    """Scores that are NaN have no best one, so a query would attend to nothing, without an error."""
    stage = made(indexing).stage.train()
    for name, each in stage.named_parameters():
        if ".indexer.query" in name:
            each.data.fill_(torch.nan)
    assert stage({}, text_of(8)).terms["lm_loss"].isnan()


def test_the_loss_of_indexers_is_not_computed_in_evaluation() -> None:
    stage = made("few").stage
    stage.eval()
    assert "indexer_loss" not in stage({}, text_of(8)).terms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_attention_are_in_fp32_whatever_the_weights_are(dtype: torch.dtype) -> None:
    """In bf16, scores of about 30 would be off by 6e-2, and so would be the logarithms of probabilities."""
    tokens, heads, width, cap = 64, 2, 32, 50.0
    query, key, value = (drawn(tokens, 1, heads, width, seed=seed).to(dtype) * 2 for seed in (1, 2, 3))
    local = LocalCore(range(heads), range(heads), 1.0, cap, 0.0, Site(0, "attention"), recompute=False)
    places = torch.arange(tokens)
    blocks = Blocks(places, VisibleKeys(torch.zeros(1, tokens, dtype=torch.int64), places[None]), None)
    found = SparseCore(local)(query, key, value, blocks, SequenceLayout.whole(tokens), None)
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    mask = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
    scores = cap * torch.tanh(query.double() @ key.double().transpose(2, 3) / cap)
    wanted = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    summed = summed_probabilities(query, key, mask, scale=1.0, cap=cap)
    assert (summed - wanted.sum(1)).abs().max() < 1e-4
    mixed = (wanted @ value.double()).permute(2, 0, 1, 3).flatten(2)
    # Probabilities and the output are rounded once each.
    assert (found - mixed).abs().max() <= 2 * torch.finfo(dtype).eps * value.abs().max()
