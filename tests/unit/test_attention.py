"""Attention in blocks against dense masks: the same blocks, results and gradients, and one compiled kernel for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megalite.model.batch import MicroBatch, first_keys, first_visible
from megalite.model.recompute import Recompute
from megalite.model.sample_mask import SampleMask
from megalite.parallel.attention_plan import Part
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite_kernels import attention as kernel
from tests.distributed.layout_expected import one_thread
from tests.harness.stages import loss_of
from tests.unit.test_parallel_model import GEMMA, VOCABULARY, network

pytestmark = pytest.mark.costly

BATCH = 2


def micro_batch(sequence: int, seed: int = 0, *, documents: bool = True) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, sequence), generator=generator)
    ends = torch.rand(BATCH, sequence, generator=generator) < 5 / sequence
    positions = torch.arange(sequence).expand(BATCH, -1)
    mask = torch.ones(BATCH, sequence, dtype=torch.float64)
    return MicroBatch(
        tokens, positions, first_keys(ends.cumsum(1)) if documents else None, tokens, mask, RandomKey(0, ())
    )


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Compile FlexAttention as for a GPU except for the last step, which leaves plain operations and gradients for a
    CPU."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *parts: None)
    compiled = torch.compile(flex_attention, backend="aot_eager")
    monkeypatch.setattr(kernel, "_flex_attention", lambda: compiled)
    return counters["stats"]


@pytest.mark.parametrize(("documents", "window"), [(True, None), (False, 200), (True, 100), (False, None)])
def test_the_blocks_are_those_in_which_something_is_seen(documents: bool, window: int | None) -> None:
    first = first_visible(micro_batch(1024, documents=documents), window).expand(BATCH, -1)
    ours = kernel.block_mask(first)
    theirs = create_block_mask(ours.mask_mod, BATCH, None, 1024, 1024, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    for row, count in enumerate(ours.full_kv_num_blocks.flatten().tolist()):
        listed = (mask.full_kv_indices.flatten(0, 2)[row, :count] for mask in (ours, theirs))
        assert torch.equal(*listed)


def heads(sequence: int, count: int, generator: torch.Generator) -> Tensor:
    """Return [batch, heads, sequence, width] with the memory layout of a layer."""
    states = torch.randn(sequence, BATCH, count, 8, dtype=torch.float64, generator=generator)
    return states.permute(1, 2, 0, 3).requires_grad_()


@pytest.mark.parametrize(
    ("groups", "cap", "scale"), [pytest.param(4, None, None, marks=pytest.mark.wide), (2, 2.0, 0.7)]
)
def test_attention_in_blocks_is_the_dense_one(
    groups: int, cap: float | None, scale: float | None, graphs: dict[str, int]
) -> None:
    """It is compiled once, for all documents and windows."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        parts = [heads(256, count, generator) for count in (4, groups, groups)]
        for window in (None, 30):
            first = first_visible(micro_batch(256, seed), window)
            masks = kernel.block_mask(first), kernel.dense_mask(first)
            found = []
            for mask in masks:
                mixed = kernel.attention(*parts, mask, scale=scale, cap=cap, dropout=None)
                found.append([mixed, *torch.autograd.grad(mixed.sin().sum(), parts)])
            for ours, reference in zip(*found, strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    assert graphs["unique_graphs"] == 1


@pytest.mark.wide
@pytest.mark.parametrize(("groups", "cap"), [(4, None), pytest.param(2, 2.0, marks=pytest.mark.wide)])
def test_the_log_sum_exp_in_blocks_is_the_dense_one(groups: int, cap: float | None, graphs: dict[str, int]) -> None:
    """Its gradient is compared, too."""
    generator = torch.Generator().manual_seed(0)
    parts = [heads(256, count, generator) for count in (4, groups, groups)]
    first = first_visible(micro_batch(256), None)
    found = []
    for mask in (kernel.block_mask(first), kernel.dense_mask(first)):
        output, lse = kernel.attention_with_lse(*parts, mask, scale=0.7, cap=cap)
        found.append([output, lse, *torch.autograd.grad(output.sin().sum() + lse.sin().sum(), parts)])
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    assert graphs["unique_graphs"] == 1


def test_a_mask_is_made_once_for_all_layers_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    made, batch = network(replace(GEMMA, attn_logit_softcapping=None)), micro_batch(12)
    given: list[Tensor] = []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", _noted(given))
    found = []
    for addend in (True, False):
        if not addend:
            monkeypatch.setattr("megalite.model.gpt.takes_addend", lambda *about: False)
        loss = loss_of(made, batch)
        found.append([loss, *torch.autograd.grad(loss, list(made.parameters()))])
    layers = len(given) // 2
    assert {each.dtype for each in given[:layers]} == {torch.float64}
    assert len({each.data_ptr() for each in given[:layers]}) == len(made.windows) < layers
    assert all(map(torch.equal, *found))


def _noted(given: list[Tensor]) -> Callable[..., Tensor]:
    """Return torch's operator, which notes its masks."""
    operator = torch.nn.functional.scaled_dot_product_attention

    def attend(*parts: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        given.append(attn_mask)
        return operator(*parts, attn_mask=attn_mask, **options)

    return attend


@pytest.mark.wide_except("recompute2")
@pytest.mark.parametrize(
    "recompute",
    [
        Recompute(),
        pytest.param(Recompute(attention=True), id="recompute1", marks=pytest.mark.wide),
        Recompute(method="uniform"),
    ],
)
def test_a_network_in_blocks_is_the_dense_one(
    recompute: Recompute, graphs: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batch = network(replace(GEMMA, kv_channels=6), recompute=recompute), micro_batch(12)
    losses, gradients = [], []
    with one_thread():
        for blocks in (False, True):
            monkeypatch.setattr("megalite.model.gpt.goes_in_blocks", lambda *about, blocks=blocks: blocks)
            monkeypatch.setattr(kernel, "BLOCK", 4)
            loss = loss_of(made, batch)
            losses.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, list(made.parameters())))
    assert graphs["unique_graphs"] > 0
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
    for ours, reference in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10 * reference.norm().item())


def test_scores_in_blocks_are_not_computed_twice() -> None:
    first = first_visible(micro_batch(128), None)
    assert kernel.keeps_scores(kernel.dense_mask(first), 2.0)
    assert not kernel.keeps_scores(kernel.block_mask(first), 2.0)
    assert not kernel.keeps_scores(None, None)


def test_blocks_are_for_gpus_and_what_flex_attention_does() -> None:
    gpu = torch.device("cuda")
    assert kernel.goes_in_blocks(gpu, torch.bfloat16, 4096, 128, 0.0)
    for device, dtype, sequence, width, dropout in (
        (torch.device("cpu"), torch.float32, 4096, 128, 0.0),
        (gpu, torch.float64, 4096, 128, 0.0),
        (gpu, torch.float32, 4000, 128, 0.0),
        (gpu, torch.float32, 4096, 8, 0.0),
        (gpu, torch.float32, 4096, 192, 0.0),
        (gpu, torch.float32, 4096, 128, 0.1),
    ):
        assert not kernel.goes_in_blocks(device, dtype, sequence, width, dropout)


def test_first_visible() -> None:
    batch = replace(micro_batch(6), first_keys=first_keys(torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]])))
    assert first_visible(batch, None).tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6]
    assert first_visible(batch, 1).tolist() == [[0, 0, 2, 2, 3, 5], [0, 0, 1, 2, 3, 4]]
    assert first_visible(replace(batch, first_keys=None), 2).tolist() == [[0, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize("documents", [False, True])
def test_a_part_of_a_sample_is_masked_as_the_whole_is(documents: bool) -> None:
    """Compare the masks of chunks with rows and columns of the mask of all tokens, with a window and without."""
    made, whole = network(GEMMA), micro_batch(12, documents=documents)
    layout = SequenceLayout(12, ((range(3), range(9, 12)), (range(3, 6), range(6, 9))), rank=1)
    for window in (None, 2):
        expected = kernel.dense_mask(first_visible(whole, window)).expand(BATCH, -1, -1, -1)
        mask = made._mask(replace(whole, layout=layout), window)
        assert isinstance(mask, SampleMask)
        assert torch.equal(mask.of_whole.expand(BATCH, -1, -1, -1), expected)
        for keys in (range(3), range(3, 6), range(6, 9)):
            found = mask.of_part(Part(slice(3, 6), slice(0, 3), "masked"), layout.runs, (keys,))
            assert torch.equal(found, expected[:, :, 6:9, keys.start : keys.stop])


def test_a_part_of_a_sample_goes_in_blocks_where_each_run_of_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("megalite.model.gpt.goes_in_blocks", lambda *about: asked.append(about[2]))
    for of_ranks in (((range(12),),), ((range(4), range(8, 12)), (range(4, 8),))):
        network(GEMMA)._mask(replace(micro_batch(12, documents=False), layout=SequenceLayout(12, of_ranks)), 2)
    assert asked == [12, 4]


MASKS = [(True, None), (False, 200), (True, 100), (False, None)]
RUNS = [(range(256, 384), range(512, 640)), (range(128, 256),), (range(64, 320),)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("runs", "documents", "window"),
    [
        pytest.param(
            runs, documents, window, id=f"runs{i}-{documents}-{window}", marks=[pytest.mark.wide] * (i != j or i == 1)
        )
        for i, runs in enumerate(RUNS)
        for j, (documents, window) in enumerate(MASKS)
    ],
)
def test_a_part_of_a_sample_is_masked_in_blocks_as_the_whole_is(
    documents: bool, window: int | None, runs: tuple[range, ...], graphs: dict[str, int]
) -> None:
    """The blocks of queries need not have the positions of blocks of keys."""
    whole, places = micro_batch(768, documents=documents), SequenceLayout(768, (runs,)).places(torch.device("cpu"))
    first = first_visible(whole, window).expand(BATCH, -1)[:, places]
    ours = kernel.block_mask(first, places, 768)
    theirs = create_block_mask(ours.mask_mod, BATCH, None, len(places), 768, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    generator = torch.Generator().manual_seed(0)
    parts = [heads(tokens, 2, generator) for tokens in (len(places), 768, 768)]
    found = []
    for mask in (ours, kernel.dense_mask(first, places, torch.arange(768))):
        output, lse = kernel.attention_with_lse(*parts, mask, scale=None, cap=None)
        found.append([output, lse, *torch.autograd.grad(output.sin().sum() + lse.sin().sum(), parts)])
    for in_blocks, reference in zip(*found, strict=True):
        torch.testing.assert_close(in_blocks, reference, rtol=1e-10, atol=1e-12)
