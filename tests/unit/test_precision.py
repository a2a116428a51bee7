"""Computations in fp32 or wider, whatever the precision of the model: tests in float64 cannot detect a wrong precision.

Results for inputs in bf16 and fp16 must equal those of float64 for the same numbers, rounded once, at sizes where
another rounding is visible.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import parse_arguments
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.inference import network as inference
from megalite.model import attention as attention_layer
from megalite.model.batch import LayerContext, MicroBatch
from megalite.model.gpt import GPT
from megalite.model.head import LM_LOSS
from megalite.model.layer_kinds import make_norm
from megalite.model.rotary import rotary_tables
from megalite.model.router import Z_LOSS, Router
from megalite.optim.buckets import DataParallel, make_buckets
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel import placement
from megalite.parallel.context import ParallelContext
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.grouped import ExpertRows, activated_grouped_linear
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter, ProductGradient, RowsGradient
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.training.batches import to_micro_batches
from megalite.training.builder import data_parallel, make_stages
from megalite.training.loss_terms import counted
from megalite_kernels import cross_entropy, norm
from megalite_kernels.attention import attention
from megalite_kernels.exact_sum import sums_of_squares
from megalite_kernels.loss_options import Columns, LossOptions
from megalite_kernels.rotary import rotary_embedding
from tests.harness.close import assert_rounded_once
from tests.harness.stages import LOSS, as_stage
from tests.oracle import Oracle

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
MESH = ParallelMesh()
MODEL = ModelConfig(
    num_layers=1, hidden_size=64, num_attention_heads=1, vocab_size=11, make_vocab_size_divisible_by=1,
    position_embedding_type="rope", max_position_embeddings=1 << 14, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaves(*parts: Tensor) -> list[Tensor]:
    return [part.detach().clone().requires_grad_() for part in parts]


# ---------------------------------------------------------------------------------------------------- norms


@each_dtype
@pytest.mark.parametrize("centered", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("shape", [(4, 4096), (300, 64)], ids=["wide", "many tokens"])
def test_norms(shape: tuple[int, int], centered: bool, dtype: torch.dtype) -> None:
    parts = [numbers(*shape).add_(3.0), numbers(shape[1], seed=2), *([numbers(shape[1], seed=3)] * centered)]
    given, gradient = [part.to(dtype) for part in parts], numbers(*shape, seed=4).to(dtype)
    ours, wide = leaves(*given), leaves(*(part.double() for part in given))
    found = norm.norm(ours[0], ours[1], ours[2] if centered else None, 1e-5)
    exact = (F.layer_norm if centered else F.rms_norm)(wide[0], wide[0].shape[1:], *wide[1:], eps=1e-5)
    assert_rounded_once(found, exact, "output")
    gradients = torch.autograd.grad(found, ours, gradient), torch.autograd.grad(exact, wide, gradient.double())
    for name, mine, theirs in zip(("input", "weight", "bias"), *gradients, strict=False):
        assert_rounded_once(mine, theirs, f"gradient of the {name}")


@each_dtype
def test_a_norms_weight_around_one_keeps_its_digits(dtype: torch.dtype) -> None:
    config = replace(MODEL, normalization="RMSNorm", apply_layernorm_1p=True)
    layer = make_norm(config)(ParallelContext(MESH, dtype=dtype), "norm", 512)
    layer.weight.allocate()
    with torch.no_grad():
        layer.weight.copy_(0.01 * numbers(512))
    given = numbers(8, 512, seed=2).to(dtype)
    weight = 1.0 + layer.weight.detach().double()
    assert_rounded_once(layer(given), F.rms_norm(given.double(), (512,), weight, eps=config.norm_epsilon))


@each_dtype
def test_the_scale_of_embeddings_is_rounded_to_the_weights(dtype: torch.dtype) -> None:
    """Round as Gemma was trained; in bf16 the root of 48 is 6.9375."""
    config = replace(MODEL, hidden_size=48, scale_embeddings=True)
    network = GPT(config, MESH, dtype=dtype)
    initialize(network, seed=1)
    tokens = torch.arange(11)[None]
    assert network.embedding is not None
    found = network.embedding(tokens, tokens, RandomKey(1, ()), ())[:, 0]
    scale = {torch.bfloat16: 6.9375, torch.float16: 6.9296875}[dtype]
    assert_rounded_once(found, network.embedding.word.weight.detach()[:11].double() * scale)


# ---------------------------------------------------------------------------------------------------- rotary positions

POSITIONS = torch.tensor([[0, 1, 255, 257, 511, 1023, 2049, 4097, 8191, 8193, 131071]])
ROTARIES: dict[str, tuple[dict[str, Any], Oracle]] = {
    "plain": ({}, Oracle()),
    "another base": ({"rotary_base": 5e5, "rotary_percent": 0.5}, Oracle(rotary_base=5e5)),
    "linear": ({"rotary_seq_len_interpolation_factor": 3.0}, Oracle(interpolation=3.0)),
    "llama 3": ({"use_rope_scaling": True, "rotary_base": 5e5}, Oracle(use_rope_scaling=True, rotary_base=5e5)),
    "yarn": (
        {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": 16.0,
            "yarn_original_max_position_embeddings": 4096,
        },
        Oracle(position_embedding_type="yarn", yarn_factor=16.0, yarn_original=4096),
    ),
}


def exact_tables(oracle: Oracle, positions: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    angles = positions.t()[..., None, None].double() * oracle.rotary_frequencies(pairs)
    return angles.cos() * oracle.rotary_amplitude(), angles.sin() * oracle.rotary_amplitude()


def assert_tables_are_near(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], positions: Tensor) -> None:
    """Allow some roundings of the angle to fp32, which grow with the position."""
    bounds = 3e-7 * (1.0 + positions.t()[..., None, None])
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        assert ((ours.double() - theirs).abs() <= 1.5 * bounds).all()


@each_dtype
@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_angles(name: str, dtype: torch.dtype) -> None:
    changes, oracle = ROTARIES[name]
    config = replace(MODEL, **changes)
    pairs = int(config.head_dim * config.rotary_percent) // 2
    assert_tables_are_near(rotary_tables(config, POSITIONS, dtype), exact_tables(oracle, POSITIONS, pairs), POSITIONS)


@each_dtype
def test_a_model_turns_by_the_exact_angles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(query: Tensor, key: Tensor, *tables: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        seen.append(tables)
        return rotary_embedding(query, key, *tables, interleaved=interleaved)

    monkeypatch.setattr(attention_layer, "rotary_embedding", spy)
    network = GPT(MODEL, MESH, dtype=dtype)
    initialize(network, seed=1)
    tokens = torch.zeros_like(POSITIONS)
    network({}, MicroBatch(tokens, POSITIONS, None, None, None, RandomKey(1, ())))
    ((cosine, sine),) = seen
    assert_tables_are_near((cosine, sine), exact_tables(Oracle(), POSITIONS, 32), POSITIONS)


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_rotations(interleaved: bool, dtype: torch.dtype) -> None:
    angles = 10.0 * numbers(40, 2, 1, 24, seed=2)
    query, key = leaves(numbers(40, 2, 3, 64).to(dtype), numbers(40, 2, 1, 64, seed=3).to(dtype))
    wide = leaves(query.double(), key.double())
    outputs = rotary_embedding(query, key, angles.cos(), angles.sin(), interleaved=interleaved)
    cosine, sine = angles.cos().double(), angles.sin().double()
    for ours, exactly, theirs in zip(outputs, wide, (query, key), strict=True):
        halves = exactly[..., :48].unflatten(-1, (24, 2) if interleaved else (2, 24))
        first, second = halves.unbind(-1 if interleaved else -2)
        turned = torch.stack(
            (first * cosine - second * sine, second * cosine + first * sine), -1 if interleaved else -2
        )
        exact = torch.cat((turned.flatten(-2), exactly[..., 48:]), -1)
        assert_rounded_once(ours, exact, "output")
        gradient = numbers(*exact.shape, seed=5).to(dtype)
        (mine,) = torch.autograd.grad(ours, theirs, gradient, retain_graph=True)
        assert_rounded_once(mine, torch.autograd.grad(exact, exactly, gradient.double())[0], "gradient")


# ---------------------------------------------------------------------------------------------------- softmax, losses


@each_dtype
@pytest.mark.parametrize("cap", [20.0, None], ids=["capped", "plain"])
def test_softmax_of_attention(cap: float | None, dtype: torch.dtype) -> None:
    """Queries that pick a channel of the keys, so that products are exact, and values that show the probabilities."""
    channels = torch.arange(64) % 32
    query = F.one_hot(channels, 32).to(dtype).view(1, 1, 64, 32)
    key, value = (8.0 * numbers(1, 1, 64, 32)).to(dtype), torch.eye(64, dtype=dtype).view(1, 1, 64, 64)
    found = attention(query, key, value, None, scale=0.7, cap=cap, dropout=None)
    scores = 0.7 * key[0, 0, :, channels].double().t()
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    exact = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).view(1, 1, 64, 64)
    if cap is not None:
        assert_rounded_once(found, exact)
    else:  # torch's own may round the probabilities before it divides them by their sum, too
        assert (found.double() - exact).norm() <= 2.0 * (exact.to(dtype).double() - exact).norm()


TERMS = {
    "plain": LossOptions(),
    "all terms": LossOptions(label_smoothing=0.1, z_loss=1e-2, soft_cap=20.0),
}


@each_dtype
@pytest.mark.parametrize("name", TERMS)
def test_losses_of_tokens(name: str, dtype: torch.dtype) -> None:
    options = TERMS[name]
    logits, labels = (4.0 * numbers(40, 1000)).to(dtype), torch.arange(40) * 25
    ours, wide = leaves(logits, logits.double())
    found = vocab_parallel_cross_entropy(ours * 1.0, labels, MESH.world(), 1000, options)
    capped = wide if options.soft_cap is None else options.soft_cap * torch.tanh(wide / options.soft_cap)
    exact = F.cross_entropy(capped, labels, reduction="none", label_smoothing=options.label_smoothing)
    exact = exact + options.z_loss * capped.logsumexp(-1) ** 2
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=3e-6, atol=3e-6)
    weights = numbers(40, seed=2)
    (mine,) = torch.autograd.grad((found * weights).sum(), ours)
    assert_rounded_once(mine, torch.autograd.grad((exact * weights.double()).sum(), wide)[0], "gradient")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_of_a_vocabulary_are_merged_in_fp32(ranks: int) -> None:
    logits, labels = (4.0 * numbers(20, 12 * ranks)).bfloat16(), torch.arange(20) % (12 * ranks)
    columns = [Columns.of_rank(rank, 12, 12 * ranks) for rank in range(ranks)]
    options = LossOptions(label_smoothing=0.1)
    parts = zip(logits.chunk(ranks, 1), columns, strict=True)
    found = cross_entropy.combined(
        torch.stack([cross_entropy.statistics(part.contiguous(), labels, c, options) for part, c in parts])
    )
    wide = logits.double()
    exact = torch.stack([wide.logsumexp(1), wide.gather(1, labels[:, None])[:, 0], wide.sum(1)])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-5)


# ---------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("kind", [None, "fp32", "fp64"])
def test_logits_of_experts(kind: Any) -> None:
    """Round the product to the model's precision by default; weights and losses are computed in fp32 in any case."""
    config = replace(
        MODEL, hidden_size=512, num_experts=8, moe_z_loss_coeff=1.0, init_method_std=0.1, moe_router_dtype=kind
    )
    router = Router(config, ParallelContext(MESH, dtype=torch.bfloat16), 0)
    initialize(router, seed=1)
    hidden, weight, layout = numbers(40, 1, 512).bfloat16(), router.weight.detach(), SequenceLayout.whole(40)
    routing = router(hidden, LayerContext(None, None, {}, RandomKey(1, ()), layout, layout.runs))
    given, rounded = hidden.flatten(0, 1), F.linear(hidden, weight).flatten(0, 1).double()
    exact = rounded if kind is None else F.linear(given.double(), weight.double())
    torch.testing.assert_close(routing.experts, exact.topk(2).indices)
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights.double(), exact.topk(2).values.softmax(-1), rtol=2e-6, atol=0.0)
    tolerance = 1e-12 if kind == "fp64" else 2e-6
    torch.testing.assert_close(
        routing.terms[Z_LOSS].double(), exact.logsumexp(-1).square().sum(), rtol=tolerance, atol=0.0
    )


@each_dtype
def test_the_gradient_of_an_experts_weight_is_added_up_in_fp32(dtype: torch.dtype) -> None:
    """The identity as matrix, so that the products are exact."""
    tensor = LogicalTensor("experts", (1, 256, 256), Constant(0.0), True)
    matrix = Parameter(placement.split(MESH, tensor, {0: ("ep",)}), dtype, MESH.device)
    matrix.allocate()
    with torch.no_grad():
        matrix.copy_(torch.eye(256))
    given, gradient = numbers(30, 256).to(dtype), numbers(30, 256, seed=2).to(dtype)
    scale = torch.ones(30, requires_grad=True)
    groups = ExpertRows((0, 30), torch.tensor([30], dtype=torch.int32))
    activated_grouped_linear(given, scale, lambda rows: rows * 1, matrix, groups).backward(gradient)
    assert scale.grad is not None
    exact = (given.double() * gradient.double()).sum(1)
    torch.testing.assert_close(scale.grad.double(), exact, rtol=1e-5, atol=1e-5)


@each_dtype
def test_scores_of_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some columns at a time. Of a model's own logits, which are rounded to its precision."""
    monkeypatch.setattr(inference, "_TOKENS", 6)
    network = inference.make_network(MODEL, MESH, dtype)
    initialize(network.stage, seed=1)
    with torch.no_grad():
        network.stage.head.norm.weight.mul_(20.0)
    tokens = torch.arange(22).view(2, 11) % 11
    found, logits = inference.score_tokens(network, tokens), inference.logits(network, tokens)[:, :-1]
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert found.log_probabilities.dtype == torch.float32
    torch.testing.assert_close(found.log_probabilities.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.likeliest, logits.argmax(-1))


def test_losses_of_micro_batches_are_summed_exactly() -> None:
    """In fp32 2^24 + 1 is 2^24."""
    losses = [torch.tensor(float(2**24)), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(2.0**-20)]
    total = PipelineEngine([as_stage(lambda hidden, loss: loss, last=True)]).run(
        ProvedSchedules().prove([], [4]).evaluation(4), losses
    )[LOSS]
    assert total.dtype == torch.float64
    assert total.item() == 2**24 + 2 + 2.0**-20


def test_the_tokens_that_count_are_counted_exactly() -> None:
    """In the precision of the mask, fp32 at least, which is none of the model's."""
    tokens = np.zeros((2, 2), np.int64)
    masks = [np.array([[0.3, 1.0], [1.0, 2.0**24]], np.float32), np.array([[1.0, 0.0], [2.0**-20, 1.0]], np.float32)]
    names, rest = ("tokens", "labels", "positions"), dict.fromkeys(("document_ids", "padding", "replayed"))
    arrays: Any = [
        {**dict.fromkeys(names, tokens), **rest, "loss_mask": mask, "sample_ids": range(2, 4)} for mask in masks
    ]
    batches = to_micro_batches(arrays, 1, torch.bfloat16, torch.device("cpu"))
    for batch, mask in zip(batches, masks, strict=True):
        assert batch.loss_mask is not None
        assert torch.equal(batch.loss_mask, torch.from_numpy(mask))
        assert batch.key == RandomKey(1, (2, 3))
    expected = sum(float(value) for mask in masks for value in mask.flat)
    assert counted((LM_LOSS,), batches, torch.device("cpu"))[LOSS].item() == expected


# ---------------------------------------------------------------------------------------------------- updates


def small_network(dtype: torch.dtype) -> GPT:
    network = GPT(MODEL, MESH, dtype=dtype)
    initialize(network, seed=1)
    return network


@pytest.mark.parametrize("kind", ["dense", "product", "rows"])
def test_gradients_of_many_micro_batches_are_added_up_in_fp32(kind: str) -> None:
    """In bf16 256 + 1 is 256."""
    flags = "--bf16 --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --micro-batch-size 1 --lr 1"
    config = parse_arguments(flags.split()).config
    options = data_parallel(config, MESH, make_stages(config))
    network = small_network(torch.bfloat16)
    (bucket, *_) = make_buckets([network], MESH, options)
    parameter = next(slot.parameter for slot in bucket.slots if slot.parameter.dim() == 2)
    rows, columns = parameter.shape
    ones = torch.ones(1, rows, dtype=torch.bfloat16), torch.ones(1, columns, dtype=torch.bfloat16)
    gradients: dict[str, Gradient] = {
        "dense": DenseGradient(torch.ones_like(parameter)),
        "product": ProductGradient(*ones),
        "rows": RowsGradient(torch.arange(rows), torch.ones_like(parameter)),
    }
    bucket.begin_step(300)
    for _ in range(300):
        bucket.accumulate(parameter, gradients[kind])
    found = bucket.accumulators[0].gradient(parameter, 0)
    assert found.dtype == torch.float32
    assert (found == 300.0).all()


def test_rows_that_are_looked_up_often_are_added_up_in_fp32() -> None:
    target = torch.zeros(2, 3)
    RowsGradient(torch.ones(300, dtype=torch.int64), torch.ones(300, 3, dtype=torch.bfloat16)).add_to(
        target, overwrite=True
    )
    assert target.tolist() == [[0.0] * 3, [300.0] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_squares_of_a_norm_are_added_up_in_float64(dtype: torch.dtype) -> None:
    values = torch.cat([torch.full((1,), 4096.0), numbers(100_003)]).to(dtype)
    exact = math.fsum(values.double().square().tolist())
    assert sums_of_squares(values).sum().item() == pytest.approx(exact, rel=1e-14)


CONFIGS = {
    "adam": OptimizerConfig(lr=0.0),
    "adam, megalite's": OptimizerConfig(lr=0.0, optimizer_backend="megalite"),
    "adam, remainders": OptimizerConfig(lr=0.0, use_precision_aware_optimizer=True, store_param_remainders=True),
    "sgd": OptimizerConfig(lr=0.0, optimizer="sgd"),
    "sgd, megalite's": OptimizerConfig(lr=0.0, optimizer="sgd", optimizer_backend="megalite"),
    "muon": OptimizerConfig(lr=0.0, optimizer="muon", muon_fp32_matmul_prec="high"),
}


def masters(config: OptimizerConfig, dtype: torch.dtype, gradient_dtype: torch.dtype) -> Tensor:
    """In float64, after twenty steps too small for parameters in bf16, from which all start; moments in fp32 or wider.

    Gradients are the same in each precision; they are unscaled and clipped.
    """
    network, start = small_network(dtype), small_network(torch.bfloat16)
    with torch.no_grad():
        for parameter, values in zip(network.parameters(), start.parameters(), strict=True):
            parameter.copy_(values)
    optimizer = make_optimizer([network], MESH, config, DataParallel(gradient_dtype))
    for number in range(20):
        optimizer.begin_step(1)
        for bucket in optimizer.buckets:
            for index, slot in enumerate(bucket.slots):
                gradient = 0.1 * numbers(*slot.parameter.shape, seed=100 * number + index).bfloat16()
                for use in range(len(slot.parameter.sharding.uses)):
                    bucket.accumulate(slot.parameter, DenseGradient(gradient.to(dtype)), use)
        optimizer.reduce(0, 1)
        optimizer.step(Rates(1e-5, 1e-5, weight_decay=0.1), loss_scale=3.0)
    states = (state for shard in optimizer.shards for run in shard.segments for state in run.tensors.values())
    assert {state.dtype for state in states} == {torch.promote_types(dtype, torch.float32)}
    kept = [shard.owned_masters for shard in optimizer.shards]
    return torch.cat([(each if isinstance(each, Tensor) else each.read()).double() for each in kept])


@pytest.mark.wide_except("float32-adam, remainders", "bfloat16-adam, megalite's", "bfloat16-muon")
@pytest.mark.parametrize(
    ("gradient_dtype", "name"),
    [
        pytest.param(dtype, name, id=f"{str(dtype)[6:]}-{name}", marks=[pytest.mark.wide] * ((i + j) % 2))
        for i, dtype in enumerate([torch.float32, torch.bfloat16])
        for j, name in enumerate(CONFIGS)
    ],
)
def test_updates_are_computed_and_kept_in_fp32(gradient_dtype: torch.dtype, name: str) -> None:
    found = masters(CONFIGS[name], torch.bfloat16, gradient_dtype)
    exact = masters(replace(CONFIGS[name], store_param_remainders=False), torch.float64, torch.float64)
    assert ((found - exact).abs() - 20 * 2.0**-24 * exact.abs()).max() <= 4e-8
