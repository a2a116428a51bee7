"""A layer with experts on one process, compared with the oracle: outputs, losses, counts and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext, MicroBatch
from megalite.model.layer_kinds import make_moe
from megalite.model.moe import MoE
from megalite.model.router import ENTROPY, Z_LOSS, Router
from megalite.model.router import Routing as Routed
from megalite.model.sinkhorn import expert_factors
from megalite.parallel.adapter import freeze
from megalite.parallel.context import ParallelContext
from megalite.parallel.dispatch import Dispatcher, PaddedRows
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.state import end_step
from megalite.tasks.experts import expert_loads
from tests.experts_oracle import Experts, Record
from tests.harness.close import assert_bits_equal
from tests.harness.poison import poisoned_memory
from tests.oracle import Oracle, Routing

SEQUENCE, BATCH, HIDDEN, EXPERTS = 6, 3, 8, 4
LAYER = "layers.0.moe."


@dataclass(frozen=True)
class Case:
    """Options of megalite's layer, and the same of the oracle's."""

    options: dict[str, Any] = field(default_factory=dict)
    experts: Experts = field(default_factory=lambda: Experts(topk=2))
    activation: str = "swiglu"
    padding: bool = False
    router: float | None = None  # replaces all weights of the router
    bias: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    replayed: bool = False


SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid"}
ROOTS: dict[str, Any] = {"moe_router_score_function": "sqrtsoftplus"}
SINKHORN: dict[str, Any] = {"moe_router_load_balancing_type": ("sinkhorn",)}
CASES = {
    "softmax of the chosen": Case(),
    "softmax of all": Case({"moe_router_pre_softmax": True}, Experts(2, "pre_softmax")),
    "sigmoid": Case(SIGMOID, Experts(2, "sigmoid")),
    "sigmoid of one": Case(SIGMOID | {"moe_router_topk": 1}, Experts(1, "sigmoid")),
    "roots of softplus": Case(ROOTS, Experts(2, "sqrtsoftplus", losses={"seq_aux_loss": 0.3})),
    "roots of softplus, biased": Case(
        ROOTS | {"moe_router_enable_expert_bias": True, "moe_router_topk": 1},
        Experts(1, "sqrtsoftplus", bias_rate=1e-3),
        bias=(0, 0.5, 0, 0.2),
    ),
    "scaled": Case({"moe_router_topk_scaling_factor": 2.5}, Experts(2, scaling=2.5)),
    "all experts": Case({"moe_router_topk": 4}, Experts(4)),
    "groups": Case(
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_group_scores": 1},
        Experts(2, groups=(2, 1, 1)),
    ),
    "groups by the sum of two": Case(
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, Experts(2, groups=(2, 1, 2))
    ),
    "biased to one": Case(
        SIGMOID | {"moe_router_enable_expert_bias": True, "moe_router_topk": 1},
        Experts(1, "sigmoid", bias_rate=1e-3),
        bias=(0, 0, 100, 0),
    ),
    "equal logits": Case({}, Experts(2), router=0.0),
    "capacity 1": Case({"moe_expert_capacity_factor": 0.1}, Experts(2, capacity_factor=0.1, losses={"aux_loss": 0.3})),
    "equal logits over capacity": Case(
        {"moe_expert_capacity_factor": 0.5}, Experts(2, capacity_factor=0.5), router=0.0
    ),
    "capacity for all": Case({"moe_expert_capacity_factor": 99.0}, Experts(2, capacity_factor=99.0)),
    "dropped by position": Case(
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
        Experts(2, capacity_factor=0.5, drop_policy="position"),
        padding=True,
    ),
    "padded experts": Case(
        {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": True},
        Experts(2, capacity_factor=0.75),
        padding=True,
    ),
    "biases": Case({"add_bias_linear": True, "swiglu": False}, activation="gelu"),
    "padded experts with biases": Case(
        {
            "add_bias_linear": True,
            "moe_expert_capacity_factor": 0.75,
            "moe_pad_expert_input_to_capacity": True,
            "moe_shared_expert_intermediate_size": 12,
        },
        Experts(2, capacity_factor=0.75),
    ),
    "shared experts": Case({"moe_shared_expert_intermediate_size": 12}),
    "gated shared experts": Case({"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True}),
    "latent width": Case({"moe_latent_size": 5, "moe_shared_expert_intermediate_size": 12}),
    "latent width, with biases": Case(
        {"moe_latent_size": 5, "add_bias_linear": True, "swiglu": False}, activation="gelu"
    ),
    "loss per micro-batch": Case({}, Experts(2, losses={"aux_loss": 0.3}), padding=True),
    "loss per sequence": Case({}, Experts(2, losses={"seq_aux_loss": 0.3}), padding=True),
    "loss over steps": Case({}, Experts(2, losses={"global_aux_loss": 0.3}), padding=True),
    "loss of sigmoids": Case(SIGMOID, Experts(2, "sigmoid", losses={"seq_aux_loss": 0.3, "aux_loss": 0.2})),
    "z-loss": Case({"moe_z_loss_coeff": 0.2}, Experts(2, z_loss=0.2), padding=True),
    "even choices": Case(
        SINKHORN | {"moe_router_pre_softmax": True}, Experts(2, "pre_softmax", evened_samples=BATCH), padding=True
    ),
    "even choices of one": Case(
        SINKHORN | SIGMOID | {"moe_router_topk": 1, "moe_z_loss_coeff": 0.2, "moe_expert_capacity_factor": 0.9},
        Experts(1, "sigmoid", evened_samples=BATCH, z_loss=0.2, capacity_factor=0.9),
    ),
    "even choices, replayed": Case(
        SINKHORN | {"moe_router_pre_softmax": True},
        Experts(2, "pre_softmax", evened_samples=BATCH),
        padding=True,
        replayed=True,
    ),
    "even by offsets": Case(
        {"moe_router_load_balancing_type": ("quantile_balancing",)},
        Experts(2, quantile_ema=0.0),
        padding=True,
        offset=(0.5, -0.5, 0.25, -0.25),
    ),
    "wide logits": Case({"moe_router_dtype": "fp64"}),
    "replayed": Case(
        {"moe_router_pre_softmax": True},
        Experts(2, "pre_softmax", losses={"aux_loss": 0.3}),
        padding=True,
        replayed=True,
    ),
    "replayed over capacity": Case(
        SIGMOID | {"moe_expert_capacity_factor": 0.75}, Experts(2, "sigmoid", capacity_factor=0.75), replayed=True
    ),
}


def config(case: Case) -> ModelConfig:
    losses = case.experts.losses
    plain: dict[str, Any] = {"swiglu": True, "add_bias_linear": False, "num_experts": EXPERTS}
    if losses:
        plain |= {"moe_router_load_balancing_type": tuple(losses), "moe_aux_loss_coeff": tuple(losses.values())}
    return ModelConfig(2, HIDDEN, 2, ffn_hidden_size=10, init_method_std=0.5, **plain | case.options)


def padding_of(case: Case) -> Tensor | None:
    """Return which tokens are padding, [batch, sequence]: some of the first sample, and all of the last."""
    return torch.arange(SEQUENCE) >= torch.tensor([[4], [SEQUENCE], [0]]) if case.padding else None


def replayed_of(case: Case) -> Tensor | None:
    """Return choices at random, [batch, sequence, topk]; in the second sample, the router chooses for some tokens."""
    if not case.replayed:
        return None
    scores = torch.rand(BATCH, SEQUENCE, EXPERTS, generator=torch.Generator().manual_seed(5))
    chosen = scores.argsort(-1)[..., : case.experts.topk]
    chosen[1, 2:4] = -1
    return chosen


def layer_of(case: Case) -> MoE:
    layer = make_moe(config(case), ParallelContext(ParallelMesh(), dtype=torch.float64), 0)
    initialize(layer, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=generator)
        if case.router is not None:
            layer.router.weight.fill_(case.router)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.values.copy_(torch.tensor(case.bias))
        if layer.router.quantile_offset is not None:
            layer.router.quantile_offset.values.copy_(torch.tensor(case.offset))
    return layer


def run(case: Case, layer: MoE, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return output [batch, sequence, hidden], the weighted loss terms, and the terms."""
    layout, padding = SequenceLayout.whole(SEQUENCE), padding_of(case)
    rows = None if padding is None else padding.t()
    replayed, choices = replayed_of(case), dict[int, Tensor]()
    if replayed is not None:
        replayed = replayed.transpose(0, 1)[:, :, None]
    key = RandomKey(0, ())
    context = LayerContext(None, None, {}, key, layout, layout.runs, padding=rows, replayed=replayed, choices=choices)
    output, sums = layer(hidden.transpose(0, 1), context)
    tokens = torch.empty(BATCH, SEQUENCE)
    batch = MicroBatch(tokens, tokens, None, None, None, key, padding=padding)
    if replayed is not None:
        recorded = replayed[:, :, 0].int()
        if rows is not None:
            recorded = recorded.masked_fill(rows[:, :, None], -1)
        chosen = torch.where(recorded < 0, -1, choices[0])
        assert torch.equal(chosen, recorded)
        assert (choices[0][2:4, 1] >= 0).all()  # the router's own choices are recorded, too
    terms = Router.loss_terms(config(case))
    assert set(sums) == {term.name for term in terms}
    loss = sum(term.weight * sums[term.name] / term.count(batch) for term in terms)
    return output.transpose(0, 1), torch.as_tensor(loss), sums


def weights_of(layer: MoE) -> dict[str, Tensor]:
    return {
        piece.tensor.name: piece.view(parameter).detach().clone().requires_grad_()
        for parameter, piece in named_pieces(layer)
    }


def computed_by_oracle(case: Case, weights: dict[str, Tensor], hidden: Tensor) -> tuple[Tensor, Record]:
    """Return the layer's output, and what its router did."""
    replayed = replayed_of(case)
    routing = Routing(
        {LAYER: torch.tensor(case.bias)} if case.bias else {},
        padding_of(case),
        replayed={LAYER: replayed} if replayed is not None else {},
        offsets={LAYER: torch.tensor(case.offset, dtype=torch.float64)} if case.offset else {},
    )
    output = Oracle(activation=case.activation, experts=case.experts).moe(weights, LAYER, hidden, routing)
    return output, routing.records[LAYER]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_the_oracles(name: str) -> None:
    case = CASES[name]
    layer = layer_of(case)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gradient = torch.randn(hidden.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights = weights_of(layer)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected, record = computed_by_oracle(case, weights, theirs)
    even = [torch.full((EXPERTS,), 1 / EXPERTS)]
    expected_loss = case.experts.loss([record], BATCH, even)
    with poisoned_memory():
        output, loss, _ = run(case, layer, ours)
        ((output * gradient).sum() + loss).backward()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-12, atol=1e-12)
    ((expected * gradient).sum() + expected_loss).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)
    for parameter, piece in named_pieces(layer):
        assert parameter.grad is not None, piece.tensor.name
        wanted = weights[piece.tensor.name].grad
        wanted = torch.zeros_like(weights[piece.tensor.name]) if wanted is None else wanted
        torch.testing.assert_close(piece.view(parameter.grad), wanted, rtol=1e-11, atol=1e-12)
    assert layer.router.tally.own[: 2 * EXPERTS + 1].tolist() == counts(record)
    if layer.router.quantile_offset is not None:
        offset = layer.router.quantile_offset.values.clone()
        end_step([layer.router.tally])
        assert_bits_equal(layer.router.quantile_offset.values, case.experts.next_offset(offset, record), "offset")


def counts(record: Record) -> list[int]:
    """Return what a router counts: tokens per expert, choices per expert by score, and dropped choices."""
    kept, by_score = (each.sum((0, 1)).long().tolist() for each in (record.kept, record.by_score))
    return [*kept, *by_score, int(record.routed.sum() - record.kept.sum())]


@pytest.mark.parametrize("name", ["padded experts", "replayed over capacity", "loss per sequence"])
def test_figures_of_loads_are_those_of_the_oracles_choices(name: str) -> None:
    case = CASES[name]
    layer = layer_of(case)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    _, record = computed_by_oracle(case, weights_of(layer), hidden)
    output, _, sums = run(case, layer, hidden)
    output.sum().backward()
    end_step([layer.router.tally])
    chunk: Any = SimpleNamespace(numbered_layers=lambda: [(0, SimpleNamespace(mlp=layer))])
    figures = expert_loads([chunk], 1, ParallelMesh())
    loads, choices = record.kept.sum((0, 1)), record.routed.sum()
    assert 0 < loads.min() < loads.max()
    assert (case.experts.capacity_factor is not None) == bool(choices > loads.sum())
    assert figures == {
        "max_expert_load/layer_0": pytest.approx((loads.max() / loads.mean()).item(), rel=1e-12),
        "min_expert_load/layer_0": pytest.approx((loads.min() / loads.mean()).item(), rel=1e-12),
        "dropped_assignments": pytest.approx((1 - loads.sum() / choices).item(), rel=1e-12),
    }
    entropy = -(record.shares * record.shares.clamp(min=1e-300).log()).sum()
    torch.testing.assert_close(sums[ENTROPY], entropy.detach(), rtol=1e-12, atol=0.0)


def test_equal_logits_choose_the_first_experts() -> None:
    layer = layer_of(CASES["equal logits"])
    run(CASES["equal logits"], layer, torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64))[0].sum().backward()
    assert layer.router.tally.own[:EXPERTS].tolist() == [BATCH * SEQUENCE, BATCH * SEQUENCE, 0, 0]


@pytest.mark.parametrize("name", ["capacity 1", "padded experts"])
def test_without_training_nothing_is_dropped_counted_or_lost(name: str) -> None:
    case = replace(CASES[name], padding=False)
    layer, dropless = layer_of(case), layer_of(CASES["softmax of the chosen"])
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    layer.eval()
    dropless.eval()
    context = LayerContext(None, None, {}, RandomKey(0, ()), SequenceLayout.whole(SEQUENCE), ())
    output, terms = layer(hidden.transpose(0, 1), context)
    assert_bits_equal(output, dropless(hidden.transpose(0, 1), context)[0], "output")
    assert not terms
    assert not layer.router.tally.own.any()


@pytest.mark.parametrize("name", ["even choices", "even choices of one"])
def test_without_training_choices_are_not_evened_out(name: str) -> None:
    case = replace(CASES[name], padding=False)
    layer = layer_of(case)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    plain = replace(case, experts=replace(case.experts, evened_samples=None, capacity_factor=None))
    expected, _ = computed_by_oracle(plain, weights_of(layer), hidden)
    assert not torch.allclose(run(case, layer, hidden)[0], expected)
    context = LayerContext(None, None, {}, RandomKey(0, ()), SequenceLayout.whole(SEQUENCE), ())
    output, _ = layer.eval()(hidden.transpose(0, 1), context)
    torch.testing.assert_close(output.transpose(0, 1), expected, rtol=1e-12, atol=1e-12)


def test_factors_of_experts_even_out_what_cannot_be_even() -> None:
    """Logits whose exponentials overflow, an expert that no token wants, no token at all, and a single one."""
    logits = torch.tensor([[200.0, 190.0, -200.0], [150.0, 145.0, -200.0], [10.0, 7.0, -200.0], [1.0, -9.0, -200.0]])
    chosen = (logits + expert_factors(logits.softmax(-1)).log()).argmax(-1)
    assert chosen.bincount(minlength=3).tolist() == [2, 2, 0]
    assert expert_factors(torch.full((4, 3), torch.nan)).isnan().all()
    one = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 0.0]])
    for rows in (one, torch.zeros(4, 3)):
        assert_bits_equal(expert_factors(rows), torch.ones(3), "factors")


def test_the_bias_rises_for_experts_with_few_tokens_exactly() -> None:
    """Beyond 2^24 tokens, one token fewer than the mean still raises the bias, and the mean leaves it."""
    layer = layer_of(CASES["biased to one"])
    assert layer.router.expert_bias is not None
    layer.router.expert_bias.values.zero_()
    mean = 2**40
    layer.router.tally.own[:EXPERTS] = torch.tensor([mean - 1, mean, mean, mean + 1])
    end_step([layer.router.tally])
    rate = config(CASES["biased to one"]).moe_router_bias_update_rate
    expected = torch.tensor([rate, 0, 0, -rate], dtype=torch.float64)  # as the layer
    assert_bits_equal(layer.router.expert_bias.values, expected, "bias")
    freeze(layer, ["*.router"])
    layer.router.tally.own[0] = 1
    end_step([layer.router.tally])
    assert_bits_equal(layer.router.expert_bias.values, expected, "bias of a frozen router")


def test_memory_is_the_rows_and_their_first_inner_tensors() -> None:
    """At most 1.1 times topk * tokens * (hidden + 2 * ffn) numbers, with indices and the router's logits."""
    options = {"num_experts": 8, "moe_router_topk": 2, "swiglu": True, "add_bias_linear": False}
    large = ModelConfig(2, 128, 2, ffn_hidden_size=256, **options)  # type: ignore[arg-type]
    layer = make_moe(large, ParallelContext(ParallelMesh(), dtype=torch.float32), 0)
    initialize(layer, 1)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens, layout = 512, SequenceLayout.whole(512)
    hidden = torch.randn(tokens, 1, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = layer(hidden, LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs))
    kept.pop(hidden.untyped_storage().data_ptr(), None)  # the layer's input, which the norm before it keeps
    assert output.requires_grad
    assert sum(kept.values()) <= 1.1 * 2 * tokens * (128 + 2 * 256) * 4


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "received"),
    [
        (1, 1, 1, 3),  # one sequence, with at most 3 choices of an expert
        (1, 4, 1, 12),  # four ranks, each with a sequence of its own
        (4, 4, 1, 3),  # four ranks share a sequence
        (2, 2, 2, 6),  # two sequences, each on two ranks
        (4, 2, 1, 3),  # two of the four ranks of a sequence
        (8, 2, 1, 2),  # two of the eight ranks, with one token each
    ],
)
def test_experts_are_padded_to_the_capacity_of_the_sequences(tp: int, ep: int, etp: int, received: int) -> None:
    """A sequence's capacity is that of all ranks that share it. Each rank may have all of an expert's choices."""
    case, batch = CASES["padded experts"], 5
    mesh = UnconnectedMesh(
        rank=3, world_size=8, tensor_parallel_size=tp, expert_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    layer = make_moe(config(case), ParallelContext(mesh, sequence_parallel=tp > 1), 0)
    layout = SequenceLayout.whole(8)  # the capacity is 8 * 2 / 4 * 0.75
    hidden = torch.empty(8 // tp, batch, HIDDEN)
    seen = mock.Mock(side_effect=InterruptedError)
    choices = torch.zeros(len(hidden) * batch, 2, dtype=torch.int64)
    routed = mock.patch.object(
        layer.router, "forward", return_value=Routed(choices, torch.ones(choices.shape), None, {})
    )
    with routed, mock.patch.object(Dispatcher, "dispatch", seen), pytest.raises(InterruptedError):
        layer(hidden, LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs))
    assert seen.call_args.args[-1] == PaddedRows(batch * min(3, 8 // tp), batch * received)


def test_weights_of_a_wider_router_are_in_fp32() -> None:
    """Experts would compute in fp64 otherwise, which GPUs do slowly."""
    router = Router(config(CASES["wide logits"]), ParallelContext(ParallelMesh()), 0)
    initialize(router, 1)
    layout = SequenceLayout.whole(SEQUENCE)
    routing = router(
        torch.randn(SEQUENCE, BATCH, HIDDEN), LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs)
    )
    assert routing.weights.dtype == torch.float32


def test_z_loss_is_a_term_of_its_own() -> None:
    _, _, terms = run(CASES["z-loss"], layer_of(CASES["z-loss"]), torch.randn(BATCH, SEQUENCE, HIDDEN).double())
    assert terms[Z_LOSS].requires_grad


@pytest.mark.parametrize("way", ["one rank", "alltoall", "allgather"])
@pytest.mark.parametrize("name", ["softmax of the chosen", "biases", "padded experts with biases", "loss over steps"])
def test_the_host_asks_the_device_once_and_never_with_padding(name: str, way: str) -> None:
    """Run a layer on the meta device, which cannot answer: each question but that answered here is an error.

    The two ranks of a group have equal loads. Their collectives return empty tensors.
    """
    case, meta, ranks = CASES[name], torch.device("meta"), 1 if way == "one rank" else 2
    mesh = UnconnectedMesh(rank=0, world_size=ranks, expert_parallel_size=ranks, device=meta)
    options = config(case) if ranks == 1 else replace(config(case), moe_token_dispatcher_type=way)
    layer = make_moe(options, ParallelContext(mesh, dtype=torch.float32), 0)
    layer.router.tally.own = layer.router.tally.own.to(meta)
    hidden = torch.empty(SEQUENCE, BATCH, HIDDEN, device=meta, requires_grad=True)
    layout, asked = SequenceLayout.whole(SEQUENCE), list[torch.Size]()
    padding = torch.empty(SEQUENCE, BATCH, dtype=torch.bool, device=meta) if case.padding else None
    context = LayerContext(None, None, {}, RandomKey(0, ()), layout, layout.runs, padding=padding)
    tokens, local = BATCH * SEQUENCE, EXPERTS // ranks

    def answer(tensor: Tensor) -> list[Any]:
        asked.append(tensor.shape)
        if way == "alltoall":  # the tokens sent to each rank, those received, and choices of each expert, by rank
            return [[tokens] * ranks, [tokens] * ranks, *[[tokens * 2 // EXPERTS] * ranks] * local]
        return [ranks * tokens * 2 // EXPERTS] * local

    copies = mock.patch("torch.tensor", side_effect=AssertionError("a copy from the host waits for the device"))
    with copies, mock.patch.object(Tensor, "tolist", answer):  # nothing is sent: the tensors are on meta
        output, terms = layer(hidden, context)
        (output.sum() + sum(terms.values())).backward()
    shape = (2 + local, ranks) if way == "alltoall" else (local,)
    assert asked == ([] if layer.padded else [torch.Size(shape)])
    assert hidden.grad is not None
