"""Private functions of torch that megalite uses: they exist, do what is expected, and are used in one file only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.sgd import sgd

from megalite import torch_internals as internals
from megalite_kernels import torch_internals as of_kernels

ROOT = Path(__file__).parents[2]
INTERNALS = [ROOT / package / "torch_internals.py" for package in ("megalite", "kernels/megalite_kernels")]
PRIVATE = re.compile(
    r"(?<!\")\b(torch|dist|c10d)(\.[a-z]\w*)*\._(?!_)\w"
    r"|\btorch\.ops\.aten\b|\.(_saved_|_cdata\b|_is_view\b|_make_subclass\b)|from torch.*\b_[A-Z]"
)
VERSION = f"torch {torch.__version__}"


def test_it_stands_in_one_file_of_each_package() -> None:
    for folder in ("megalite", "kernels", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            if path not in INTERNALS:
                lines = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
                assert not lines, f"{path} uses what torch keeps private: {lines}"


def test_a_group_of_its_own_name_is_made_and_listed(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert isinstance(internals.default_store(), dist.Store), VERSION
        group = internals.new_process_group(0, (0,), lambda store: f"ours #{store.add('count', 1)}", None)
        assert group.group_name == "ours #1", VERSION
        members = [members for each, members in internals.groups_and_members() if each is group]
        assert members == [{0: 0}], VERSION
        before = internals.sequence_number(group)
        dist.all_reduce(torch.ones(1), group=group)
        assert internals.sequence_number(group) == before + 1, VERSION
        assert any("ours #1" in str(records) for records in internals.flight_records()), VERSION
    finally:
        dist.destroy_process_group()


def test_a_product_of_another_dtype_is_added_on_meta() -> None:
    internals.mend_products_on_meta()
    target, factor = torch.zeros(3, 3, device="meta"), torch.zeros(3, 3, dtype=torch.bfloat16, device="meta")
    assert torch.addmm(target, factor, factor, out_dtype=target.dtype, beta=1.0, out=target) is target, VERSION


def test_fused_sgd_runs_on_meta() -> None:
    internals.mend_sgd_on_meta()
    weights, rates = torch.zeros(3, device="meta"), {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0}
    sgd([weights], [weights], [None], fused=True, nesterov=False, maximize=False, **rates)


def test_operators_have_the_names_that_a_dispatch_mode_sees() -> None:
    seen = []

    class Names(internals.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Names():
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2))
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    assert internals.operator("mm", "out") in seen, VERSION
    assert internals.operator("bmm") in seen, VERSION


def test_a_profiler_is_noticed() -> None:
    assert not internals.is_profiling(), VERSION
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert internals.is_profiling(), VERSION


@pytest.mark.parametrize("approximate", ["silu", "none", "tanh"])
def test_gradients_of_activations_are_torchs_own(approximate: str) -> None:
    """Written into columns of a larger tensor."""
    values = torch.linspace(-3, 3, 12).view(3, 4).requires_grad_()
    incoming, whole = torch.linspace(1, 2, 12).view(3, 4), torch.zeros(3, 8)
    if approximate == "silu":
        of_kernels.silu_gradient_into(whole[:, 4:], incoming, values.detach())
        output = F.silu(values)
    else:
        of_kernels.gelu_gradient_into(whole[:, 4:], incoming, values.detach(), approximate)
        output = F.gelu(values, approximate=approximate)
    (expected,) = torch.autograd.grad(output, values, incoming)
    assert torch.equal(whole, torch.cat([torch.zeros(3, 4), expected], dim=1)), VERSION


def test_gradients_of_a_layer_norm_are_torchs_own() -> None:
    values, weight, bias = (torch.linspace(-1, 2, n).view(-1, 4).squeeze(0).requires_grad_() for n in (12, 4, 4))
    output, mean, inverse = torch.native_layer_norm(values, (4,), weight, bias, 1e-5)
    found = of_kernels.layer_norm_gradients(
        torch.ones(3, 4), values.detach(), (4,), mean, inverse, weight.detach(), bias.detach()
    )
    expected = torch.autograd.grad(output.sum(), (values, weight, bias))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), VERSION


@pytest.mark.parametrize("mask", ["all", "causal", "bias"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_and_its_gradients_are_torchs_own(mask: str, groups: int) -> None:
    """The log-sum-exp has the natural logarithm."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, heads, tokens, 8) for heads, tokens in ((4, 6), (groups, 6), (groups, 6), (4, 6)))
    *inputs, incoming = (torch.randn(shape, generator=generator) for shape in shapes)
    query, key, value = (each.requires_grad_() for each in inputs)
    bias = None
    if mask == "bias":
        seen = torch.rand(2, 1, 6, 6, generator=generator) < 0.5
        bias = torch.zeros(2, 1, 6, 6).masked_fill(~(seen | torch.eye(6, dtype=torch.bool)), -torch.inf)
    causal, scale = mask == "causal", 0.3
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=groups < 4
    )
    plain = [each.detach() for each in (query, key, value)]
    output, lse = of_kernels.flash_attention(*plain, bias, causal, scale)
    assert torch.equal(output, expected), VERSION
    scores = plain[0] @ plain[1].repeat_interleave(4 // groups, dim=1).transpose(2, 3) * scale
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf) if causal else scores
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1))
    found = of_kernels.flash_attention_gradients(incoming, *plain, output, lse, bias, causal, scale)
    of_torch = torch.autograd.grad(expected, (query, key, value), incoming)
    assert all(torch.equal(one, other) for one, other in zip(found, of_torch, strict=True)), VERSION


def test_a_graph_is_differentiated_from_its_edges() -> None:
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    unused = torch.tensor(3.0, requires_grad=True)
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in (leaf.square(), leaf.sum(), unused)]
    internals.run_backward(edges, [torch.tensor([1.0, 0.5]), torch.tensor(3.0), torch.tensor(2.0)])
    assert leaf.grad is not None, VERSION
    assert unused.grad is not None, VERSION
    assert (leaf.grad.tolist(), unused.grad.item()) == ([5.0, 5.0], 2.0), VERSION


def test_a_tensor_of_another_class_shares_its_memory() -> None:
    class Ours(nn.Parameter):
        pass

    data = torch.zeros(3)
    ours = internals.make_subclass(Ours, data)
    assert (type(ours), ours.requires_grad, ours.data_ptr()) == (Ours, True, data.data_ptr()), VERSION


def test_storages_are_told_apart() -> None:
    for device in ("cpu", "meta"):
        one, other = torch.zeros(4, device=device), torch.zeros(4, device=device)
        assert internals.storage_identity(one) == internals.storage_identity(one[2:]), VERSION
        assert internals.storage_identity(one) != internals.storage_identity(other), VERSION
        assert internals.storage_identity(one) == internals.storage_identity(one.untyped_storage()), VERSION


@pytest.mark.parametrize("of_gpu", [True, False])
def test_the_operator_of_flash_attention_has_these_arguments(of_gpu: bool) -> None:
    operator: Any = internals.flash_operator(of_gpu=of_gpu)
    names = internals.argument_names(str(operator).removeprefix("aten."))
    assert names[:5] == ["query", "key", "value", "dropout_p", "is_causal"], VERSION
    assert "scale" in names, VERSION


def test_formats_have_the_names_that_files_hold() -> None:
    rebuild, info = internals.rebuild_tensor(), internals.storage_info("file", 3, 5)
    assert (rebuild.__module__, rebuild.__name__) == ("torch._utils", "_rebuild_tensor_v2"), VERSION
    assert type(info).__module__ == "torch.distributed.checkpoint.filesystem", VERSION
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 5), VERSION


def test_the_recorder_of_memory_is_there() -> None:
    assert callable(torch.cuda.memory._record_memory_history), VERSION
    assert callable(torch.cuda.memory._dump_snapshot), VERSION
