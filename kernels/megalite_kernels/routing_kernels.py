"""Triton kernels of routing, and their launchers: see routing.py.

A program has a few tokens, with all their logits at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import as_rows
from megalite_kernels.routing_rule import LEAST_LOGIT, SMALLEST_SUM, RoutingRule

ELEMENTS = 2048  # logits per program
WARPS = 4
LOWEST: tl.constexpr = tl.constexpr(-3.4e38)  # lower than any score, and higher than what cannot be chosen
LEAST: tl.constexpr = tl.constexpr(LEAST_LOGIT)

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _score_and_slope(z: tl.tensor, SCORE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the score of a logit by itself, and its derivative."""
    if SCORE == "sigmoid":
        score = tl.sigmoid(z)
        slope = score * tl.sigmoid(-z)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus", "no kernel computes this score")
        high = tl.where(z < LEAST, LEAST, z)  # tl.maximum would drop NaN
        power = tl.exp(-tl.abs(high))
        above = 1.0 + power
        # log(1 + power) without the rounding of the sum, which matters where power is small.
        lost = above == 1.0
        logarithm = tl.where(lost, power, tl.log(above) * (power / tl.where(lost, 1.0, above - 1.0)))
        softplus = tl.where(high < 0.0, 0.0, high) + logarithm
        score = tl.sqrt(softplus) * tl.exp(0.5 * (z - high))
        slope = score * (tl.sigmoid(high) / (2.0 * softplus))
    return score, slope


@triton.jit(do_not_specialize=["tokens"])
def choose(
    logits: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SCORE: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    MEMBER_LANES: tl.constexpr,
) -> None:
    """Write the TOPK experts of TOKENS tokens. Lanes are in the order of experts, with gaps after each group."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, GROUP_LANES * MEMBER_LANES)
    group, member = lane // MEMBER_LANES, lane % MEMBER_LANES
    expert = group * (EXPERTS // GROUPS) + member
    exists = (group < GROUPS) & (member < EXPERTS // GROUPS)
    inside = (token < tokens)[:, None] & exists[None, :]
    z = tl.load(logits + token[:, None] * stride + expert[None, :], mask=inside, other=0.0).to(tl.float32)
    score = z
    if SCORE != "softmax":
        score, _ = _score_and_slope(z, SCORE)
    elif PRE_SOFTMAX:
        masked = tl.where(exists[None, :], z, float("-inf"))
        power = tl.exp(masked - tl.max(masked, 1)[:, None])
        score = power / tl.sum(power, 1)[:, None]
    if bias is not None:
        score += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)[None, :]
    score = tl.where(score != score, float("inf"), tl.where(score < LOWEST, LOWEST, score))
    score = tl.where(exists[None, :], score, float("-inf"))
    if GROUPS > 1:
        left = score.reshape(TOKENS, GROUP_LANES, MEMBER_LANES)
        members = tl.arange(0, MEMBER_LANES)[None, None, :]
        total = tl.zeros((TOKENS, GROUP_LANES), tl.float32)
        for _ in range(GROUP_SCORES):
            total += tl.max(left, 2)
            left = tl.where(members == tl.argmax(left, 2)[:, :, None], float("-inf"), left)
        lanes = tl.arange(0, GROUP_LANES)[None, :]
        total = tl.where(lanes < GROUPS, total, float("-inf"))
        open = tl.zeros((TOKENS, GROUP_LANES), tl.int32)
        for _ in range(GROUP_TOPK):
            best = lanes == tl.argmax(total, 1)[:, None]
            open = tl.where(best, 1, open)
            total = tl.where(best, float("-inf"), total)
        opened = tl.broadcast_to(open[:, :, None], (TOKENS, GROUP_LANES, MEMBER_LANES))
        score = tl.where(opened.reshape(TOKENS, GROUP_LANES * MEMBER_LANES) > 0, score, float("-inf"))
    for choice in range(TOPK):
        best = tl.argmax(score, 1)
        chosen = best // MEMBER_LANES * (EXPERTS // GROUPS) + best % MEMBER_LANES
        tl.store(experts + token * TOPK + choice, chosen.to(tl.int64), mask=token < tokens)
        score = tl.where(lane[None, :] == best[:, None], float("-inf"), score)


@triton.jit
def _weights(
    z: tl.tensor,
    chosen: tl.tensor,
    SCORE: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weights of a row of logits before scaling, and the sum by which they are divided."""
    if SCORE != "softmax":
        weight, _ = _score_and_slope(z, SCORE)
        total = tl.sum(tl.where(chosen, weight, 0.0), 1) + SMALLEST
        if NORMALIZED:
            weight = weight / total[:, None]
    else:
        if not PRE_SOFTMAX:
            z = tl.where(chosen, z, float("-inf"))
        weight = tl.exp(z - tl.max(z, 1)[:, None])
        total = tl.sum(weight, 1)
        weight = weight / total[:, None]
    return weight, total


@triton.jit(do_not_specialize=["tokens"])
def weigh(
    logits: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    logits_gradient: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    SCALE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SCORE: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Write the weights [tokens, TOPK] of the chosen experts. In backward, `weights` are their gradients, and the
    logits' gradient is written."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, LANES)
    present, exists = token < tokens, (lane < EXPERTS)[None, :]
    inside = present[:, None] & exists
    z = tl.load(logits + token[:, None] * stride + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    z = tl.where(exists, z, float("-inf"))
    chosen = tl.zeros((TOKENS, LANES), tl.int32)
    gradient = tl.zeros((TOKENS, LANES), tl.float32)
    for choice in range(TOPK):
        # Tokens that do not exist choose different experts, so that their arithmetic is finite.
        expert = tl.load(experts + token * TOPK + choice, mask=present, other=choice)
        hit = lane[None, :] == expert[:, None]
        chosen = tl.where(hit, 1, chosen)
        if BACKWARD:
            incoming = tl.load(weights + token * TOPK + choice, mask=present, other=0.0).to(tl.float32)
            gradient = tl.where(hit, incoming[:, None] * SCALE, gradient)
    NORMALIZED: tl.constexpr = TOPK > 1
    weight, total = _weights(z, chosen > 0, SCORE, PRE_SOFTMAX, NORMALIZED, SMALLEST)
    if not BACKWARD:
        for choice in range(TOPK):
            expert = tl.load(experts + token * TOPK + choice, mask=present, other=choice)
            found = tl.sum(tl.where(lane[None, :] == expert[:, None], weight, 0.0), 1) * SCALE
            tl.store(weights + token * TOPK + choice, found.to(weights.dtype.element_ty), mask=present)
    else:
        if SCORE != "softmax":
            if NORMALIZED:
                gradient -= tl.sum(gradient * weight, 1)[:, None]
                gradient = tl.where(chosen > 0, gradient / total[:, None], 0.0)
            _, slope = _score_and_slope(z, SCORE)
            gradient *= slope
        else:
            gradient = weight * (gradient - tl.sum(gradient * weight, 1)[:, None])
        target = logits_gradient + token[:, None] * EXPERTS + lane[None, :]
        tl.store(target, gradient.to(logits_gradient.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------- launchers


def launch_choose(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> Tensor:
    """Return the experts of each token, best first: int64 [..., topk]."""
    rows, count = as_rows(logits), logits.shape[-1]
    groups, members = triton.next_power_of_2(rule.groups), triton.next_power_of_2(count // rule.groups)
    experts = torch.empty((len(rows), rule.topk), dtype=torch.int64, device=logits.device)
    tokens = max(ELEMENTS // (groups * members), 1)
    if len(rows):
        choose[(-(-len(rows) // tokens),)](
            *(rows, bias, experts, len(rows), rows.stride(0), count, rule.topk),
            *(rule.score_function, rule.pre_softmax, rule.groups, rule.group_topk, rule.group_scores),
            *(tokens, groups, members),
            num_warps=WARPS,
        )
    return experts.view(*logits.shape[:-1], rule.topk)


class RoutingWeights(torch.autograd.Function):
    """Weights of the chosen experts, which saves the logits and the choice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, experts: Tensor, rule: RoutingRule) -> Tensor:
        ctx.save_for_backward(logits, experts)
        ctx.rule = rule
        weights = torch.empty(experts.shape, dtype=logits.dtype, device=logits.device)
        _launch_weigh(logits, experts, weights, None, rule)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, experts = ctx.saved_tensors
        logits_gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        _launch_weigh(logits, experts, gradients[0].contiguous(), logits_gradient, ctx.rule)
        return logits_gradient, None, None


def _launch_weigh(
    logits: Tensor, experts: Tensor, weights: Tensor, logits_gradient: Tensor | None, rule: RoutingRule
) -> None:
    """Write `weights`; in backward, read their gradients from it, and write `logits_gradient`."""
    rows, count = as_rows(logits), logits.shape[-1]
    lanes = triton.next_power_of_2(count)
    tokens = max(ELEMENTS // lanes, 1)
    if len(rows):
        weigh[(-(-len(rows) // tokens),)](
            *(rows, experts.contiguous(), weights, logits_gradient, len(rows), rows.stride(0)),
            *(rule.scaling_factor, count, rule.topk, rule.score_function, rule.pre_softmax),
            *(SMALLEST_SUM, logits_gradient is not None, tokens, lanes),
            num_warps=WARPS,
        )
