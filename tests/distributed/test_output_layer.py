"""Output layer and loss, fused and not fused, compared with torch on one process."""

from __future__ import annotations

import inspect
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.model.head import LossConfig, OutputLayer
from megalite.parallel import collectives
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import LogicalTensor, Normal
from tests.distributed.layout_expected import on_ranks
from tests.distributed.layout_run import several_chunks_of_logits
from tests.harness.close import assert_gradient_close
from tests.harness.rank_pool import RankPools

SEQUENCE, BATCH, HIDDEN, VOCABULARY, PADDED = 8, 3, 6, 13, 16
CAP = 2.0
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden_states() -> Tensor:
    return random(0, SEQUENCE, BATCH, HIDDEN)


def labels() -> Tensor:
    """Return labels [sequence, batch] with the memory layout of a micro-batch (transposed)."""
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1)).t()


def weights_of_tokens() -> Tensor:
    return random(2, SEQUENCE, BATCH).abs()


def output_weight() -> Tensor:
    return F.pad(random(3, VOCABULARY, HIDDEN), (0, 0, 0, PADDED - VOCABULARY))


def make_layer(tp: int, sequence_parallel: bool, loss: LossConfig, dtype: torch.dtype = torch.float64) -> OutputLayer:
    rank = dist.get_rank() if tp > 1 else 0
    mesh = ParallelMesh(rank=rank, world_size=tp, tensor_parallel_size=tp)
    tensor = LogicalTensor("output", (VOCABULARY, HIDDEN), Normal(1.0), weight_decay=True, is_embedding_or_output=True)
    context = ParallelContext(mesh, sequence_parallel and tp > 1, dtype)
    layer = OutputLayer(context, context.split(tensor, {0: "vocabulary"}, padded=PADDED), VOCABULARY, CAP, loss)
    layer.weights[0].allocate()
    layer.weights[0].data.copy_(output_weight().chunk(tp)[rank])
    return layer


def input_of(layer: OutputLayer) -> Tensor:
    """Return this rank's hidden states; not contiguous, because a caller's may not be."""
    whole = hidden_states()
    if layer.sequence_parallel:
        whole = whole.chunk(layer.group.size)[layer.group.rank]
    apart = torch.stack([whole, whole], dim=-1).to(layer.weights[0].dtype)
    return apart[..., 0].detach().requires_grad_()


def losses_and_gradients(
    tp: int, sequence_parallel: bool, loss: LossConfig, training: bool, times: int
) -> dict[str, Any]:
    """Return the results of a rank. `times`: number of backward passes through one forward pass."""
    layer = make_layer(tp, sequence_parallel, loss).train(training)
    hidden = input_of(layer)
    with several_chunks_of_logits():
        losses = layer(hidden, labels())
        for _ in range(times):
            found = torch.autograd.grad(
                (losses * weights_of_tokens()).sum(), [hidden, *layer.weights], retain_graph=True
            )
        with torch.no_grad():
            assert torch.equal(layer(hidden, labels()), losses)
    return {"losses": losses.detach(), "hidden": found[0], "weight": found[1]}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_losses_and_gradients_are_torchs(
    tp: int, sequence_parallel: bool, fused: bool, training: bool, rank_pools: RankPools
) -> None:
    """Training has label smoothing and z-loss; the soft cap belongs to the network and always applies."""
    loss = LossConfig(label_smoothing=0.1, z_loss=0.02, fused=fused)
    ranks = on_ranks(rank_pools, tp, losses_and_gradients, tp, sequence_parallel, loss, training, 2 if fused else 1)
    hidden, weight = hidden_states().requires_grad_(), output_weight().requires_grad_()
    logits = torch.tanh(hidden.flatten(0, 1) @ weight[:VOCABULARY].t() / CAP) * CAP
    smoothing, z_loss = (0.1, 0.02) if training else (0.0, 0.0)
    expected = F.cross_entropy(logits, labels().flatten(), reduction="none", label_smoothing=smoothing)
    expected = (expected + z_loss * logits.logsumexp(dim=1) ** 2).view(SEQUENCE, BATCH)
    (expected * weights_of_tokens()).sum().backward()
    for rank in ranks:
        torch.testing.assert_close(rank["losses"], expected.detach(), rtol=1e-10, atol=0)
        assert torch.equal(rank["losses"], ranks[0]["losses"])
    of_hidden = torch.cat([rank["hidden"] for rank in ranks]) if sequence_parallel else ranks[-1]["hidden"]
    assert_gradient_close(of_hidden, hidden.grad, 0.0, "hidden states")
    assert_gradient_close(torch.cat([rank["weight"] for rank in ranks]), weight.grad, 0.0, "weight")


def gathers(sequence_parallel: bool) -> tuple[int, int]:
    """Return the number of gathers in forward, and in forward and backward, over several chunks."""
    layer = make_layer(2, sequence_parallel, LossConfig(fused=True))
    with (
        several_chunks_of_logits(),
        mock.patch.object(collectives, "_all_gather_single", wraps=collectives._all_gather_single) as gather,
    ):
        losses = layer(input_of(layer), labels())
        forward = gather.call_count
        with mock.patch.object(collectives, "all_reduce_"):
            losses.sum().backward()
    return forward, gather.call_count


@pytest.mark.parametrize(("sequence_parallel", "counts"), [(False, (1, 1)), (True, (2, 3))])
def test_statistics_are_gathered_once(sequence_parallel: bool, counts: tuple[int, int], rank_pools: RankPools) -> None:
    """They are gathered once for all chunks; so are split hidden states, in each direction."""
    assert rank_pools(2).run(gathers, sequence_parallel) == [counts] * 2


@pytest.mark.wide
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_they_can_be_compiled_whole(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # If an earlier test in this process has compiled layers, some products are no longer traced.
    monkeypatch.setattr(ColumnParallelLinear, "forward", inspect.unwrap(ColumnParallelLinear.forward))
    layer = make_layer(1, False, LossConfig(label_smoothing=0.1, z_loss=0.02, fused=fused))
    hidden, ids = input_of(layer), labels()
    found = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        losses = function(hidden, ids)
        found.append([losses, *torch.autograd.grad(losses.sum(), [hidden, *layer.weights])])
    assert all(torch.equal(compiled, plain) for plain, compiled in zip(*found, strict=True))


class _Largest(TorchDispatchMode):
    """Recorder of the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return output


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_logits_are_never_whole(fused: bool) -> None:
    layer = make_layer(1, False, LossConfig(fused=fused))
    hidden = torch.randn(32, 8, HIDDEN, dtype=torch.float64, requires_grad=True)
    ids = torch.zeros(32, 8, dtype=torch.int64)
    with several_chunks_of_logits(), _Largest() as largest:
        layer(hidden, ids).sum().backward()
    assert (largest.elements >= 32 * 8 * PADDED) is not fused


def test_forward_keeps_no_logits() -> None:
    layer, kept = make_layer(1, False, LossConfig(fused=True)), weakref.WeakSet()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor)
        return tensor

    hidden = input_of(layer)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = layer(hidden, labels())
    assert losses.requires_grad
    assert sorted(tensor.numel() for tensor in kept) == sorted([hidden.numel(), losses.numel(), losses.numel()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_many_chunks_add_up_in_fp32(dtype: torch.dtype) -> None:
    """A weight gradient of many chunks is as exact as a product that is rounded once: 1.5 roundings of the dtype."""
    layer, exact = make_layer(1, False, LossConfig(fused=True), dtype), make_layer(1, False, LossConfig())
    exact.weights[0].data.copy_(layer.weights[0])
    hidden = torch.randn(1, 640, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype).add_(0.5)
    ids = torch.zeros(1, 640, dtype=torch.int64)
    with several_chunks_of_logits():
        layer(hidden.requires_grad_(), ids).sum().backward()
    exact(hidden.detach().double().requires_grad_(), ids).sum().backward()
    error = (layer.weights[0].grad.double() - exact.weights[0].grad).norm() / exact.weights[0].grad.norm()
    assert error <= 1.5 * torch.finfo(dtype).eps
