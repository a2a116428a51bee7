"""Layer with experts: costs and rules."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.kinds.kind import Kind, Width
from megalite.config.layer_specs import EXPERTS_LETTER, PATTERN_FLAG
from megalite.config.model import ModelConfig

WITHOUT_LOSS = {"none", "sinkhorn", "quantile_balancing"}


def _weights(model: ModelConfig) -> int:
    return _elements(model, model.num_experts or 0)


def _elements(model: ModelConfig, used: int) -> int:
    """Return the elements of so many experts, of the shared ones, and of the matrices around a latent width."""
    routed = used * model.expert_ffn_size * model.expert_hidden_size
    shared = (model.moe_shared_expert_intermediate_size or 0) * model.hidden_size
    return model.activation.matrices * (routed + shared) + 2 * (model.moe_latent_size or 0) * model.hidden_size


def _products(model: ModelConfig, seen: float) -> float:
    router = (model.num_experts or 0) + model.moe_shared_expert_gate
    return _elements(model, model.moe_router_topk) + model.hidden_size * router


def _widths(model: ModelConfig) -> list[Width]:
    shared = model.moe_shared_expert_intermediate_size
    return [] if shared is None else [Width(f"--moe-shared-expert-intermediate-size {shared}", shared)]


EXPERTS = Kind(_weights, _products, "num_experts moe_*", widths=_widths)
"""Its rules stand with --num-experts, which a GPT gives; and other ranks than tensor-parallel ones divide experts."""


def expert_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each relation between the options of experts that does not hold."""
    experts, topk = model.num_experts, model.moe_router_topk
    if experts is None:
        yield from needs(model, "moe_*", what_has_experts(model))
        return
    if topk > experts:
        yield f"--moe-router-topk {topk} is more than --num-experts {experts}"
    softmax = model.moe_router_score_function == "softmax"
    if "sinkhorn" in model.moe_router_load_balancing_type:
        yield from _sinkhorn(model)
    elif topk == 1 and softmax and not model.moe_router_pre_softmax:
        yield "--moe-router-topk 1 with softmax gives every token the weight 1: add --moe-router-pre-softmax"
    yield from _quantiles(model, experts)
    yield from _expert_groups(model, experts)
    if model.moe_router_enable_expert_bias and softmax:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid or sqrtsoftplus"
    if not model.moe_router_enable_expert_bias:
        yield from needs(model, "moe_router_bias_update_rate", "--moe-router-enable-expert-bias")
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        has = f"{len(weights)} number{'s' if len(weights) > 1 else ''}"
        yield f"--moe-aux-loss-coeff has {has} for {len(kinds)} of --moe-router-load-balancing-type"
    elif len(set(kinds)) < len(kinds) or (WITHOUT_LOSS & set(kinds) and len(kinds) > 1):
        alone = "none, sinkhorn or quantile_balancing alone"
        yield f"--moe-router-load-balancing-type {' '.join(kinds)}: give each kind once, and {alone}"
    elif WITHOUT_LOSS & set(kinds) and any(weights):
        yield f"--moe-aux-loss-coeff {weights[0]} needs another --moe-router-load-balancing-type than {kinds[0]}"
    if model.moe_expert_capacity_factor is None:
        names = "moe_token_drop_policy moe_pad_expert_input_to_capacity"
        yield from needs(model, names, "--moe-expert-capacity-factor")
    if model.moe_shared_expert_intermediate_size is None:
        names = "moe_shared_expert_gate moe_shared_expert_overlap"
        yield from needs(model, names, "--moe-shared-expert-intermediate-size")


def what_has_experts(model: ModelConfig) -> str:
    """Return what a network without experts lacks, for messages about their flags."""
    pattern = model.hybrid_layer_pattern
    lacks_letter = pattern is not None and EXPERTS_LETTER not in pattern + (model.mtp_hybrid_override_pattern or "")
    return f"a layer with experts ({EXPERTS_LETTER}) in {PATTERN_FLAG}" if lacks_letter else "--num-experts"


def _sinkhorn(model: ModelConfig) -> Iterator[str]:
    topk, one = model.moe_router_topk, model.moe_router_topk == 1
    scores = (model.moe_router_score_function, model.moe_router_pre_softmax)
    if scores != (("sigmoid", False) if one else ("softmax", True)):
        score = "--moe-router-score-function sigmoid" if one else "--moe-router-pre-softmax"
        sinkhorn = "--moe-router-load-balancing-type sinkhorn"
        yield f"{sinkhorn} with --moe-router-topk {topk} needs {score}, and no other score"
    names = "moe_router_enable_expert_bias moe_router_num_groups moe_router_topk_scaling_factor"
    yield from needs(model, names, "another --moe-router-load-balancing-type than sinkhorn")


def _quantiles(model: ModelConfig, experts: int) -> Iterator[str]:
    """Yield what is wrong with offsets by quantiles."""
    quantiles = "--moe-router-load-balancing-type quantile_balancing"
    if not model.balances_by_quantiles:
        yield from needs(model, "moe_router_quantile_balancing_ema", quantiles)
        return
    if model.moe_router_topk == experts:
        yield f"{quantiles} needs --num-experts above --moe-router-topk {experts}"
    names = "moe_router_enable_expert_bias moe_router_num_groups"
    yield from needs(model, names, "another --moe-router-load-balancing-type than quantile_balancing")


def _expert_groups(model: ModelConfig, experts: int) -> Iterator[str]:
    """Yield what is wrong with the groups of experts among which a router chooses."""
    groups, chosen, topk = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if groups is None or chosen is None:
        if groups is not None:
            yield f"--moe-router-num-groups {groups} needs --moe-router-group-topk"
        yield from needs(model, "moe_router_group_*", "--moe-router-num-groups")
        return
    if experts % groups:
        yield f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}"
    elif chosen > groups:
        yield f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}"
    elif topk > chosen * (experts // groups):
        open_experts = chosen * (experts // groups)
        of_groups = "only expert" if open_experts == 1 else f"{open_experts} experts"
        yield f"--moe-router-topk {topk} is more than the {of_groups} of the chosen groups"
    elif (scores := model.moe_router_group_scores) is None:
        if topk % chosen or topk // chosen > experts // groups:
            yield f"--moe-router-topk {topk} is not a multiple of --moe-router-group-topk {chosen}"
    elif scores > experts // groups:
        yield f"--moe-router-group-scores {scores} is more than the {experts // groups} experts of a group"
