"""The choice of experts and their weights, kernels and reference, against rules that are written out in Python."""

from __future__ import annotations

import decimal
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import Kernels, use
from megalite_kernels.routing import choose_experts, routing_probabilities, routing_weights
from megalite_kernels.routing_rule import RoutingRule
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import nan_is_written

SIZES = named([(8, 4), (20, 4), (7, 1), (1, 1)], lambda sizes: "-".join(map(str, sizes)))  # experts, groups of them
CHOICES = ["triton", "reference"]
IMPLEMENTATIONS = pytest.mark.parametrize("choice", CHOICES)
SCORE: dict[str, dict[str, object]] = {
    "softmax": {}, "pre_softmax": {"pre_softmax": True}, "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
}  # fmt: skip
SCORES = pytest.mark.parametrize("score", SCORE.values(), ids=SCORE)


def logits_of(tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + experts)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64).mul_(2.0).to(dtype)


def scores_of(row: list[float], rule: RoutingRule) -> list[float]:
    if rule.score_function == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in row]
    if rule.score_function == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(z))) for z in row]
    if rule.pre_softmax:
        return [math.exp(z - max(row)) / sum(math.exp(other - max(row)) for other in row) for z in row]
    return row


def choice_of(row: list[float], bias: list[float], rule: RoutingRule) -> list[int]:
    """Return the experts of one token, by sorting pairs of score and number."""
    scores = [score + added for score, added in zip(scores_of(row, rule), bias, strict=True)]
    members = len(row) // rule.groups

    def score_of_group(group: int) -> float:
        return sum(sorted(scores[group * members : (group + 1) * members])[-rule.group_scores :])

    groups = sorted(range(rule.groups), key=lambda group: (-score_of_group(group), group))[: rule.group_topk]
    open_experts = [expert for expert in range(len(row)) if expert // members in groups]
    return sorted(open_experts, key=lambda expert: (-scores[expert], expert))[: rule.topk]


def weights_of(row: list[float], experts: list[int], rule: RoutingRule) -> list[float]:
    scores = scores_of(row, rule)
    chosen = [scores[expert] for expert in experts]
    if rule.score_function == "softmax" and not rule.pre_softmax:
        chosen = [math.exp(score) / sum(map(math.exp, chosen)) for score in chosen]
    if rule.score_function != "softmax" and rule.topk > 1:
        chosen = [score / sum(chosen) for score in chosen]
    return [rule.scaling_factor * score for score in chosen]


def rules(experts: int, groups: int, score: dict[str, object]) -> list[RoutingRule]:
    found = [RoutingRule(topk, **score) for topk in sorted({1, min(2, experts), experts})]  # type: ignore[arg-type]
    if groups > 1:
        members = experts // groups
        for group_topk, group_scores in ((1, 1), (groups - 1, 2)):
            topk = min(3, group_topk * members)
            limits = {"groups": groups, "group_topk": group_topk, "group_scores": min(group_scores, members)}
            found.append(RoutingRule(topk, scaling_factor=2.5, **limits, **score))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("sizes", "biased", "score", "choice"),
    cells(
        SIZES,
        {"": False, "bias": True},
        SCORE,
        named(CHOICES),
        kept=lambda sizes, biased, score, choice: (sizes + biased + score + choice) % 2 == 0,
    ),
)
def test_experts_are_chosen_by_the_rule(
    sizes: tuple[int, int], biased: bool, score: dict[str, object], choice: str
) -> None:
    experts, groups = sizes
    use(Kernels(choice))  # type: ignore[arg-type]
    logits = logits_of(11, experts)
    bias = torch.linspace(-0.3, 0.4, experts) if biased else None
    for rule in rules(experts, groups, score):
        expected = [
            choice_of(row, [0.0] * experts if bias is None else bias.tolist(), rule) for row in logits.double().tolist()
        ]
        assert choose_experts(logits, bias, rule).tolist() == expected, rule


@IMPLEMENTATIONS
@SCORES
def test_of_equal_scores_the_first_experts_are_chosen(score: dict[str, object], choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    equal = torch.zeros(5, 12)
    assert choose_experts(equal, None, RoutingRule(5, **score)).tolist() == [[0, 1, 2, 3, 4]] * 5  # type: ignore[arg-type]
    limited = RoutingRule(4, groups=4, group_topk=2, group_scores=2, **score)  # type: ignore[arg-type]
    assert choose_experts(equal, None, limited).tolist() == [[0, 1, 2, 3]] * 5
    pairs = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]])
    assert choose_experts(pairs, None, RoutingRule(3, **score)).tolist() == [[1, 3, 2]]  # type: ignore[arg-type]
    tied_groups = torch.tensor([[1.0, 0.0, 2.0, 2.0, 2.0, 2.0]])
    limited = RoutingRule(2, groups=3, group_topk=1, group_scores=2, **score)  # type: ignore[arg-type]
    assert choose_experts(tied_groups, None, limited).tolist() == [[2, 3]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("score", [{"pre_softmax": True}, {"score_function": "sigmoid"}], ids=["softmax", "sigmoid"])
def test_experts_are_chosen_by_logit_where_scores_are_rounded(score: dict[str, object], choice: str) -> None:
    """The scores of the last two are equal in fp32: 0 as a part of the softmax, 1 as a sigmoid."""
    logits = torch.tensor([[300.0, 20.0, 40.0], [300.0, 40.0, 20.0]])
    use(Kernels(choice))  # type: ignore[arg-type]
    assert choose_experts(logits, None, RoutingRule(2, **score)).tolist() == [[0, 2], [0, 1]]  # type: ignore[arg-type]


@IMPLEMENTATIONS
def test_a_logit_that_is_no_number_still_chooses_experts_that_exist(choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    logits = logits_of(3, 5)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    with nan_is_written():
        experts = choose_experts(logits, None, RoutingRule(3))
    assert experts[1, 0] == 3
    assert experts[2].tolist() == [0, 1, 2]
    assert all(len({*row}) == 3 and max(row) < 5 for row in experts.tolist())


@pytest.mark.parametrize(
    ("sizes", "score", "choice"),
    cells(SIZES, SCORE, named(CHOICES), kept=lambda sizes, score, choice: (sizes + score + choice) % 2 == 0),
)
def test_weights_and_gradients_are_the_rules(sizes: tuple[int, int], score: dict[str, object], choice: str) -> None:
    experts, groups = sizes
    use(Kernels(choice))  # type: ignore[arg-type]
    for rule in rules(experts, groups, score):
        logits = logits_of(5, experts).requires_grad_()
        chosen = choose_experts(logits, None, rule)
        found = routing_weights(logits, chosen, rule)
        expected = [
            weights_of(row, its, rule) for row, its in zip(logits.double().tolist(), chosen.tolist(), strict=True)
        ]
        torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
        incoming = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        (gradient,) = torch.autograd.grad(found, logits, incoming)
        use(Kernels("reference"))
        wide = logits.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(routing_weights(wide, chosen, rule), wide, incoming.double())
        use(Kernels(choice))  # type: ignore[arg-type]
        # Eight roundings of fp32; near one, the sigmoid's complement loses some digits.
        assert (gradient.double() - exact).norm() <= 4e-6 * max(exact.norm(), 1e-3), rule


def test_the_references_gradient_is_that_of_differences() -> None:
    for score in SCORE.values():
        rule = RoutingRule(2, scaling_factor=1.5, **score)  # type: ignore[arg-type]
        logits = logits_of(4, 6, torch.float64).requires_grad_()
        chosen = choose_experts(logits, None, rule)
        assert torch.autograd.gradcheck(lambda own: routing_weights(own, chosen, rule), logits)  # noqa: B023


@IMPLEMENTATIONS
def test_recorded_experts_have_weights_too(choice: str) -> None:
    """Routing that is replayed need not be what the logits would choose."""
    use(Kernels(choice))  # type: ignore[arg-type]
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    weights = routing_weights(logits, torch.tensor([[0, 2]]), RoutingRule(2))
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[0.0, 2.0]]), -1))


@IMPLEMENTATIONS
def test_no_tokens_choose_nothing(choice: str) -> None:
    use(Kernels(choice))  # type: ignore[arg-type]
    logits = torch.empty(0, 8, requires_grad=True)
    experts = choose_experts(logits, None, RoutingRule(2))
    assert experts.shape == (0, 2)
    routing_weights(logits, experts, RoutingRule(2)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 8)


@IMPLEMENTATIONS
def test_square_roots_of_softplus_are_exact_for_small_and_large_logits(choice: str) -> None:
    """The softplus itself is 0 in fp32 for the smallest, where its root would have no slope."""
    use(Kernels(choice))  # type: ignore[arg-type]
    rule = RoutingRule(1, "sqrtsoftplus")
    values = [-170.0, -104.5, -87.0, -40.5, -40.0, -17.0, -3.0, 0.0, 3.0, 21.0, 39.0, 41.0, 300.0]
    logits = torch.tensor(values)[:, None].requires_grad_()
    found = routing_weights(logits, torch.zeros(len(values), 1, dtype=torch.int64), rule)
    (slopes,) = torch.autograd.grad(found.sum(), logits)
    with decimal.localcontext(prec=200):
        powers = [decimal.Decimal(value).exp() for value in values]
        scores = [(1 + power).ln().sqrt() for power in powers]
        exact = [power / (1 + power) / (2 * score) for power, score in zip(powers, scores, strict=True)]
    for ours, theirs in ((found, scores), (slopes, exact)):
        assert ours.flatten().tolist() == pytest.approx([float(each) for each in theirs], rel=1e-6, abs=0.0)


def test_shares_sum_to_one() -> None:
    logits = logits_of(5, 6, torch.float64)
    scores = {"sigmoid": torch.sigmoid(logits), "sqrtsoftplus": F.softplus(logits).sqrt(), "softmax": logits.exp()}
    for function, expected in scores.items():
        shares = routing_probabilities(logits, function)  # type: ignore[arg-type]
        torch.testing.assert_close(shares, expected / expected.sum(-1, keepdim=True))
