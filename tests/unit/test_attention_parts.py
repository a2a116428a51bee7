"""Attention to parts of the keys: merged, outputs and gradients are those of all keys, however a part is computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalite.model.context_parallel import _merge_
from megalite_kernels import attention_parts, torch_internals
from megalite_kernels.attention import Kept, attention_with_lse
from megalite_kernels.attention_parts import PartMask, attend, part_gradients

BATCH, HEADS, GROUPS, TOKENS, WIDTH = 2, 4, 2, 12, 8
SCALE = 0.7


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    counts = (HEADS, GROUPS, GROUPS, HEADS)
    return [torch.randn(BATCH, count, TOKENS, WIDTH, generator=generator).to(dtype) for count in counts]


def masks() -> dict[str, Tensor]:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    first = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 5, 5, 9, 10, 11], [0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6]])
    seen = torch.arange(TOKENS) >= first[:, :, None]
    return {"causal": causal.expand(BATCH, 1, -1, -1), "documents": (causal & seen).unsqueeze(1)}


MASKS = masks()
BORDERS = {"one": (0, 12), "two": (0, 5, 12), "four": (0, 1, 4, 6, 12)}


def reference(mask: Tensor, cap: float | None, kept: Kept | None) -> list[Tensor]:
    """Return output and gradients by plain operations in float64."""
    query, key, value, gradient = inputs()
    parts = [each.requires_grad_() for each in (query, key, value)]
    shared = [each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value)]
    scores = query @ shared[0].transpose(2, 3) * SCALE
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    probabilities = scores.masked_fill(~mask, -math.inf).softmax(-1)
    if kept is not None:
        probabilities = probabilities * kept.mask * kept.scale
    output = probabilities @ shared[1]
    return [output.detach(), *torch.autograd.grad(output, parts, gradient)]


def by_parts(mask: Tensor, borders: tuple[int, ...], cap: float | None, kept: Kept | None) -> list[Tensor]:
    query, key, value, gradient = inputs()
    output, lse = torch.zeros_like(query), torch.full(query.shape[:3], -math.inf, dtype=query.dtype)
    calls = []
    for start, stop in itertools.pairwise(borders):
        of_part = None if kept is None else Kept(kept.mask[..., start:stop], kept.scale)
        calls.append((slice(start, stop), mask[..., start:stop], of_part))
    options = {"scale": SCALE, "cap": cap}
    for own, seen, dropped in calls:
        _merge_(output, lse, *attend(query, key[:, :, own], value[:, :, own], seen, kept=dropped, **options))
    found = [torch.zeros_like(each) for each in (query, key, value)]
    for own, seen, dropped in calls:
        keys = key[:, :, own], value[:, :, own]
        of_query, *others = part_gradients(gradient, query, *keys, output, lse, seen, kept=dropped, **options)
        found[0] += of_query
        for total, one in zip(found[1:], others, strict=True):
            total[:, :, own] += one
    return [output, *found]


@pytest.mark.parametrize("written_out", [False, True], ids=["flash", "written out"])
@pytest.mark.parametrize(("cap", "dropped"), [(None, False), (1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("name", MASKS)
def test_parts_together_are_all_keys(
    name: str, borders: str, cap: float | None, dropped: bool, written_out: bool
) -> None:
    """Many queries see nothing of some part: keys of other documents, and keys in the future."""
    kept = None
    if dropped:
        drawn = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
        kept = Kept((drawn > 0.3).to(torch.uint8), 1 / 0.7)
    chosen = attention_parts.takes_flash
    with mock.patch.object(attention_parts, "takes_flash", lambda *given: not written_out and chosen(*given)):
        found = by_parts(MASKS[name], BORDERS[borders], cap, kept)
    for ours, expected in zip(found, reference(MASKS[name], cap, kept), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("written_out", [False, True], ids=["flash", "written out"])
@pytest.mark.parametrize("kind", ["all", "causal"])
def test_masks_by_name_are_those_masks(kind: PartMask, written_out: bool) -> None:
    query, key, value, _ = inputs()
    seen = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    dense = seen.tril() if kind == "causal" else seen
    with mock.patch.object(attention_parts, "takes_flash", return_value=not written_out):
        found = attend(query, key, value, kind, scale=SCALE, cap=None)
    expected = attention_with_lse(query, key, value, dense, scale=SCALE, cap=None)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_without_keys_gives_nothing(dtype: torch.dtype) -> None:
    query, key, value, _ = inputs(dtype)
    mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    mask[0, 0, 3] = mask[1, 0, 7:] = False
    output, lse = attend(query, key, value, mask, scale=SCALE, cap=None)
    nothing = ~mask.any(-1).expand(-1, HEADS, -1)
    assert lse.dtype == torch.float32
    assert torch.equal(lse == -math.inf, nothing)
    assert not output[nothing].any()


def test_backward_takes_the_merged_results() -> None:
    """Other merged results give other gradients."""
    query, key, value, gradient = inputs()
    output, lse = attend(query, key, value, "all", scale=SCALE, cap=None)
    alone = part_gradients(gradient, query, key, value, output, lse, "all", scale=SCALE, cap=None)
    other = part_gradients(gradient, query, key, value, output + 1.0, lse + 1.0, "all", scale=SCALE, cap=None)
    assert all((one - two).norm() > 0.1 * one.norm() for one, two in zip(alone, other, strict=True))


def test_outputs_are_merged_in_fp32() -> None:
    """512 equal parts: merged in bf16, the log-sum-exp would lose more than its last digits."""
    output, lse = torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -math.inf)
    for number in range(512):
        _merge_(output, lse, torch.full((1, 1, 1, 4), 1.0 + number % 2, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
    torch.testing.assert_close(lse.item(), math.log(512), rtol=1e-5, atol=0)
    torch.testing.assert_close(output, torch.full_like(output, 1.5), rtol=1e-5, atol=0)


@pytest.fixture
def cudnn() -> Iterator[list[str]]:
    """Stand-ins for cuDNN's operators, with their signatures and shapes; yields the names of those that are called."""
    called: list[str] = []
    cpu = torch.ops.aten

    def forward(query: Tensor, key: Tensor, value: Tensor, bias: None, with_lse: bool, *others: object, **scale: float):
        assert (bias, with_lse) == (None, True)
        called.append("forward")
        output, lse = cpu._scaled_dot_product_flash_attention_for_cpu(query, key, value, *others, **scale)
        nothing = query.new_empty(0)
        return output, lse.unsqueeze(-1).contiguous(), nothing, nothing, 0, 0, nothing, nothing, nothing

    def backward(gradient: Tensor, *given: Tensor, **scale: float):
        query, key, value, output, lse, seed, offset, bias, *lengths, dropout, causal = given
        assert (bias, lengths[2:]) == (None, [query.shape[2], key.shape[2]])
        assert lse.shape == (*query.shape[:3], 1)
        assert lse.is_contiguous()
        assert seed.dtype == offset.dtype == torch.int64
        called.append("backward")
        operator = cpu._scaled_dot_product_flash_attention_for_cpu_backward
        return operator(gradient, query, key, value, output, lse.squeeze(-1), dropout, causal, **scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    with mock.patch.object(torch_internals, "_takes_cudnn", return_value=True):
        yield called
    library._destroy()


def test_cudnns_operators_get_what_they_expect(cudnn: list[str]) -> None:
    """Two parts: the keys before, and a causal part; the queries of both see all keys before."""
    query, key, value, gradient = inputs()
    half = TOKENS // 2
    queries, options = query[:, :, half:], {"scale": SCALE, "cap": None}
    parts: list[tuple[slice, PartMask]] = [(slice(0, half), "all"), (slice(half, TOKENS), "causal")]
    output, lse = torch.zeros_like(queries), torch.full(queries.shape[:3], -math.inf, dtype=query.dtype)
    for own, mask in parts:
        _merge_(output, lse, *attend(queries, key[:, :, own], value[:, :, own], mask, **options))
    found = [torch.zeros_like(each) for each in (query, key, value)]
    for own, mask in parts:
        given = gradient[:, :, half:], queries, key[:, :, own], value[:, :, own], output, lse, mask
        of_query, *others = part_gradients(*given, **options)
        found[0][:, :, half:] += of_query
        for total, one in zip(found[1:], others, strict=True):
            total[:, :, own] += one
    assert cudnn == ["forward"] * 2 + ["backward"] * 2
    gradient[:, :, :half] = 0.0
    with mock.patch(f"{__name__}.inputs", return_value=[query, key, value, gradient]):
        expected = reference(MASKS["causal"], None, None)
    torch.testing.assert_close(output, expected[0][:, :, half:])
    for ours, exact in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(ours, exact)


def test_torch_is_asked_for_an_operator_that_has_a_backward() -> None:
    """Parts are computed without a graph, where torch would also take an operator that has a forward alone."""

    def operator(query: torch.Tensor, *_: object) -> SDPBackend:
        trains = torch.is_grad_enabled() and query.requires_grad
        return SDPBackend.FLASH_ATTENTION if trains else SDPBackend.CUDNN_ATTENTION

    query = mock.Mock(is_cuda=True)
    query.detach().requires_grad_.return_value = torch.zeros(1, requires_grad=True)
    with mock.patch.object(torch_internals, "operator_of_attention", side_effect=operator), torch.no_grad():
        assert not torch_internals._takes_cudnn(query, query, query, True)


def test_operators_of_cudnn_have_the_signatures_that_are_called() -> None:
    """On the meta device, which knows their shapes."""
    query, key = (torch.empty(2, heads, 16, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    with mock.patch.object(torch_internals, "_takes_cudnn", return_value=True):
        output, lse = torch_internals.flash_attention(query, key, key, None, True, SCALE)
        given = torch.empty_like(query), query, key, key, output, lse, None, True, SCALE
        found = torch_internals.flash_attention_gradients(*given)
    assert (output.shape, lse.shape, lse.dtype) == (query.shape, (2, 4, 16), torch.float32)
    assert [each.shape for each in found] == [query.shape, key.shape, key.shape]
