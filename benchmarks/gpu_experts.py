"""Layers with experts on a GPU: grouped products, how often the host waits for the device, and DeepEP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.errors import largest, relative
from benchmarks.gpu_training import train
from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.layer_kinds import make_moe
from megalite.parallel.context import ParallelContext
from megalite.parallel.deep_ep import why_unavailable
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.state import end_step
from megalite_kernels.grouped import grouped_product

PRODUCT_TOLERANCE = 4e-3  # norm of the error; bf16 rounds the result by 2e-3 to 4e-3
COUNTS = ([100, 0, 7, 1, 300, 0, 0, 104], [0, 0, 0, 512, 0, 0, 0, 0], [64] * 8)
"""Rows of each expert."""
ALLOWED = {"dropless": (1, 0), "padded": (0, 0)}
"""Number of times that the host may wait in a layer's forward and in its backward."""
FLEX_TOLERANCE = 2e-3  # of a bf16 loss: NCCL's ranks are added in fp32 and rounded, as DeepEP's are
EXPERTS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --ffn-hidden-size 1024 --seq-length 1024 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --micro-batch-size 2 "
    "--global-batch-size 32 --lr 1e-4 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --bf16 --num-experts 16 --moe-router-topk 4 "
    "--moe-aux-loss-coeff 0.01"
)


def check_grouped_products(device: str) -> float:
    """The largest error of grouped bf16 products against float64, relative to the norm of the result.

    Rows behind the groups' would be NaN where they were read; experts without rows are among the groups.
    """
    generator, errors = torch.Generator().manual_seed(1), list[float]()
    for counts in COUNTS:
        rows = torch.randn(sum(counts), 512, generator=generator).bfloat16()
        matrices = torch.randn(len(counts), 256, 512, generator=generator).bfloat16()
        offsets = (0, *accumulate(counts))
        ends = torch.tensor(offsets[1:], dtype=torch.int32, device=device)
        for wide in (matrices.transpose(1, 2), matrices.repeat(1, 2, 1)):  # as in forward and in backward
            exact = torch.cat(
                [
                    rows[start:stop].double() @ matrix.double()
                    for matrix, (start, stop) in zip(wide, pairwise(offsets), strict=True)
                ]
            )
            on_device = wide.transpose(1, 2).contiguous().to(device).transpose(1, 2)
            found = grouped_product(rows.to(device), on_device, offsets, ends)
            errors.append(relative(found.cpu(), exact))
    return largest(errors)


def _waits(run: Callable[[], Any]) -> tuple[Any, int]:
    """Run, and count the operations for which the host waits for the device, by torch's own warnings."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result, sum("synchronizing" in str(warning.message) for warning in caught)


def host_waits(padded: bool) -> tuple[int, int]:
    """Return how often the host waits in forward, with all losses and counts, and in backward, of one layer."""
    model = ModelConfig(
        2,
        1024,
        8,
        ffn_hidden_size=512,
        swiglu=True,
        num_experts=16,
        moe_router_topk=4,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        moe_aux_loss_coeff=(0.1, 0.1, 0.1),
        moe_z_loss_coeff=0.1,
        moe_expert_capacity_factor=1.25 if padded else None,
        moe_pad_expert_input_to_capacity=padded,
        moe_shared_expert_intermediate_size=512,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    layer = make_moe(model, ParallelContext(ParallelMesh(device=device), dtype=torch.bfloat16), 0).to(device)
    initialize(layer, 1)
    layout = SequenceLayout.whole(512)
    context = LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs)
    hidden = torch.randn(512, 2, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> Tensor:
        output, terms = layer(hidden, context)
        total: Tensor = output.float().sum() + sum(terms.values())
        return total

    for _ in range(2):  # compilation and cuBLAS's start wait
        forward().backward()
        end_step([layer.router.tally])
    loss, in_forward = _waits(forward)
    _, in_backward = _waits(loss.backward)
    return in_forward, in_backward


def compare_flex(gpus: int, deadline: float) -> dict[str, object]:
    """The largest relative difference between the losses with DeepEP and with all-to-all, and the steps' times."""
    if gpus < 2:
        return {"left out": "one GPU"}
    reason = why_unavailable(1024, 4, torch.bfloat16, torch.device("cuda", 0))
    if reason is not None:
        return {"left out": reason}
    ranks = 2 if gpus < 4 else 4
    found = {
        kind: train(f"{EXPERTS} --ep {ranks} --moe-token-dispatcher-type {kind}", ranks, gpu=True, deadline=deadline)
        for kind in ("alltoall", "flex")
    }
    # NaN is a word in the metrics
    losses = [[float(step["lm_loss"]) for step in steps] for steps in found.values()]
    row: dict[str, object] = {f"seconds with {kind}": steps[-1]["iteration_time_s"] for kind, steps in found.items()}
    return row | {"largest relative difference": largest(abs(a / b - 1) for a, b in zip(*losses, strict=True))}
