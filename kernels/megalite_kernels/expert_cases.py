"""Operations of layers with experts at the shapes used in training: routing, permutation and products of groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.case import Case, dtype_names
from megalite_kernels.grouped import add_grouped_products, grouped_product, scale_gradients_
from megalite_kernels.permutation import Permutation, group_rows, permute, unpermute
from megalite_kernels.routing import choose_experts, routing_weights
from megalite_kernels.routing_rule import RoutingRule

# Experts and rules: Mixtral's, a softmax over all experts before the choice, and DeepSeek-V3's and V4's.
ROUTING = (
    (8, RoutingRule(2)),
    (128, RoutingRule(8, pre_softmax=True)),
    (256, RoutingRule(8, "sigmoid", scaling_factor=2.5, groups=8, group_topk=4, group_scores=2)),
    (256, RoutingRule(6, "sqrtsoftplus", scaling_factor=1.5)),
)


def _routing_inputs(experts: int, rule: RoutingRule, tokens: int, device: str) -> list[Tensor]:
    """Make logits whose scores differ by more than rounding, and experts for each token."""
    order = torch.rand(tokens, experts, device=device).argsort(dim=-1)
    logits = 4.0 * order / experts - 2.0
    return [logits.requires_grad_(), order[:, : rule.topk]]


def _routing() -> Iterator[Case]:
    for experts, rule in ROUTING:
        inputs = partial(_routing_inputs, experts, rule)
        name = f"{rule.topk} of {experts} by {'pre-' * rule.pre_softmax}{rule.score_function}"
        chosen = Case("routing", f"choose_experts {name}", experts, inputs, partial(_choose, rule), indexed=True)
        yield replace(chosen, traffic=_choice_traffic)
        weigh = partial(routing_weights, rule=rule)
        yield Case("routing", f"routing_weights {name}", experts, inputs, weigh, indexed=True)


def _choose(rule: RoutingRule, logits: Tensor, experts: Tensor) -> Tensor:
    return choose_experts(logits, torch.linspace(0.0, 1e-3, logits.shape[1], device=logits.device), rule)


def _choice_traffic(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[int, int]:
    return inputs[0].nbytes + outputs[0].nbytes, 0


def _permutation_inputs(width: int, choices: int, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    """Make rows, and the places of each token among `choices` times as many rows."""
    groups = torch.rand(tokens, 4 * choices, device=device).argsort(dim=-1)[:, :choices]
    permutation = group_rows(groups, 4 * choices, rows=tokens * choices)
    return [torch.randn(tokens, width, dtype=dtype, device=device).requires_grad_(), *permutation]


def _permute(input: Tensor, *permutation: Tensor) -> Tensor:
    return permute(input, Permutation(*permutation))


def _permute_and_back(input: Tensor, *permutation: Tensor) -> Tensor:
    return unpermute(permute(input, Permutation(*permutation)), Permutation(*permutation))


def _permutations() -> Iterator[Case]:
    for width, choices, dtype in ((2048, 8, torch.bfloat16), (4096, 2, torch.float32), (7168, 8, torch.bfloat16)):
        inputs = partial(_permutation_inputs, width, choices, dtype)
        for run in (_permute, _permute_and_back):
            name = f"{run.__name__.strip('_')} {choices} times {width} {dtype_names(dtype)}"
            yield Case("permutation", name, width, inputs, run, keeps_inputs=False, indexed=True)


def _grouped_inputs(groups: int, width: int, out: int, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    """Make rows that are dealt to groups unevenly, their gradients, and the groups' matrices and sums of gradients."""
    offsets = [tokens * number // groups for number in range(groups + 1)]
    offsets[1:-1] = [(5 * offset) // 6 for offset in offsets[1:-1]]
    rows, gradients = (torch.randn(tokens, size, dtype=dtype, device=device) for size in (width, out))
    matrices = torch.randn(groups, out, width, dtype=dtype, device=device)
    sums = torch.randn(groups, out, width, device=device)
    return [rows, gradients, matrices, sums, torch.tensor(offsets[1:], dtype=torch.int32, device=device)]


def _offsets(ends: Tensor) -> list[int]:
    """Return the offsets of groups, for the references; kernels read the ends on the device."""
    return [0, *([0] * len(ends) if ends.is_meta else ends.tolist())]


def _grouped_product(rows: Tensor, gradients: Tensor, matrices: Tensor, sums: Tensor, ends: Tensor) -> Tensor:
    return grouped_product(rows, matrices.transpose(1, 2), _offsets(ends), ends)


def _grouped_product_back(rows: Tensor, gradients: Tensor, matrices: Tensor, sums: Tensor, ends: Tensor) -> Tensor:
    return grouped_product(gradients, matrices, _offsets(ends), ends)


def _sums_of_grouped_products(rows: Tensor, gradients: Tensor, matrices: Tensor, sums: Tensor, ends: Tensor) -> Tensor:
    add_grouped_products(sums, gradients, rows, _offsets(ends), ends, overwrite=False)
    return sums


def _scale_gradients(rows: Tensor, gradients: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return scale_gradients_(gradients, rows, scale), gradients


def _groups() -> Iterator[Case]:
    """Yield the products of experts, and of rows that are not aligned."""
    for groups, width, out, dtype in ((128, 2048, 1536, torch.bfloat16), (3, 200, 136, torch.float16)):
        inputs = partial(_grouped_inputs, groups, width, out, dtype)
        for run in (_grouped_product, _grouped_product_back, _sums_of_grouped_products):
            name = f"{run.__name__.strip('_')} {groups} of {width} to {out} {dtype_names(dtype)}"
            yield Case("grouped", name, width, inputs, run, keeps_inputs=False, indexed=True)
    for width, dtype in itertools.product((768, 14336), (torch.bfloat16, torch.float32)):
        inputs = partial(_scaled_inputs, width, dtype)
        yield Case("grouped", f"scale_gradients {width} {dtype_names(dtype)}", width, inputs, _scale_gradients)


def _scaled_inputs(width: int, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    rows, gradients = (torch.randn(tokens, width, dtype=dtype, device=device) for _ in range(2))
    return [rows, gradients, torch.randn(tokens, device=device)]


def expert_cases() -> Iterator[Case]:
    return itertools.chain(_routing(), _permutations(), _groups())
