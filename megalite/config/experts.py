"""Relations between the options of mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalite.config.fields import needs
from megalite.config.model import ModelConfig


def expert_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each relation between the options of experts that does not hold."""
    experts, topk = model.num_experts, model.moe_router_topk
    if experts is None:
        yield from needs(model, "moe_*", "--num-experts")
        return
    if topk > experts:
        yield f"--moe-router-topk {topk} is more than --num-experts {experts}"
    softmax = model.moe_router_score_function == "softmax"
    if "sinkhorn" in model.moe_router_load_balancing_type:
        yield from _sinkhorn(model)
    elif topk == 1 and softmax and not model.moe_router_pre_softmax:
        yield "--moe-router-topk 1 with softmax gives every token the weight 1: add --moe-router-pre-softmax"
    yield from _expert_groups(model, experts)
    if model.moe_router_enable_expert_bias and softmax:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"
    if not model.moe_router_enable_expert_bias:
        yield from needs(model, "moe_router_bias_update_rate", "--moe-router-enable-expert-bias")
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        has = f"{len(weights)} number{'s' if len(weights) > 1 else ''}"
        yield f"--moe-aux-loss-coeff has {has} for {len(kinds)} of --moe-router-load-balancing-type"
    elif len(set(kinds)) < len(kinds) or ({"none", "sinkhorn"} & set(kinds) and len(kinds) > 1):
        yield f"--moe-router-load-balancing-type {' '.join(kinds)}: give each kind once, and none or sinkhorn alone"
    elif kinds in (("none",), ("sinkhorn",)) and any(weights):
        yield f"--moe-aux-loss-coeff {weights[0]} needs another --moe-router-load-balancing-type than {kinds[0]}"
    if model.moe_expert_capacity_factor is None:
        names = "moe_token_drop_policy moe_pad_expert_input_to_capacity"
        yield from needs(model, names, "--moe-expert-capacity-factor")
    if model.moe_shared_expert_intermediate_size is None:
        names = "moe_shared_expert_gate moe_shared_expert_overlap"
        yield from needs(model, names, "--moe-shared-expert-intermediate-size")


def has_idle_softmax(model: ModelConfig) -> bool:
    """Tell whether --moe-router-pre-softmax changes nothing: sigmoid scores, which Megatron-LM takes it with, too."""
    by_sigmoid = model.moe_router_score_function == "sigmoid" and model.num_experts is not None
    return by_sigmoid and "sinkhorn" not in model.moe_router_load_balancing_type


def with_router_weights(model: ModelConfig) -> ModelConfig:
    """Return a network with the weights that Sinkhorn gives its choices, and without a softmax that has no effect."""
    if has_idle_softmax(model):
        return replace(model, moe_router_pre_softmax=False)
    if "sinkhorn" not in model.moe_router_load_balancing_type or model.num_experts is None:
        return model
    if model.moe_router_topk == 1:
        return replace(model, moe_router_score_function="sigmoid")
    return replace(model, moe_router_pre_softmax=True)


def _sinkhorn(model: ModelConfig) -> Iterator[str]:
    topk, one = model.moe_router_topk, model.moe_router_topk == 1
    scores = (model.moe_router_score_function, model.moe_router_pre_softmax)
    if scores != (("sigmoid", False) if one else ("softmax", True)):
        score = "--moe-router-score-function sigmoid" if one else "--moe-router-pre-softmax"
        sinkhorn = "--moe-router-load-balancing-type sinkhorn"
        yield f"{sinkhorn} with --moe-router-topk {topk} needs {score}, and no other score"
    names = "moe_router_enable_expert_bias moe_router_num_groups moe_router_topk_scaling_factor"
    yield from needs(model, names, "another --moe-router-load-balancing-type than sinkhorn")


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
