"""The oracle against torch's own functions, and against facts that hold for any weights."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.dropout_rule
import tests.experts_oracle
import tests.oracle
import tests.prediction_oracle
import tests.rotary_oracle
from tests.oracle import Oracle, loss_sum_and_count

HEADS, HEAD_DIM, HIDDEN, FFN, VOCABULARY, POSITIONS, LAYERS = 4, 6, 24, 20, 11, 16, 2
BATCH, SEQUENCE = 2, 9

GPT2 = Oracle()
LLAMA = Oracle(normalization="RMSNorm", activation="swiglu", position_embedding_type="rope")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * 0.3


def block_weights(groups: int, gated: bool, bias: bool, query_key_norm: bool) -> dict[str, Tensor]:
    weights = {
        "attention.query": random(HEADS, HEAD_DIM, HIDDEN),
        "attention.key_value": random(groups, 2, HEAD_DIM, HIDDEN),
        "attention.output": random(HIDDEN, HEADS, HEAD_DIM),
        ("mlp.gate_up" if gated else "mlp.up"): random(2, FFN, HIDDEN) if gated else random(FFN, HIDDEN),
        "mlp.down": random(HIDDEN, FFN),
    }
    if bias:
        for name in ("attention.query", "attention.key_value", "mlp.gate_up" if gated else "mlp.up"):
            weights[name + "_bias"] = random(*weights[name].shape[:-1])
        weights |= {"attention.output_bias": random(HIDDEN), "mlp.down_bias": random(HIDDEN)}
    norms = {"input_norm": HIDDEN, "mlp_norm": HIDDEN}
    norms |= {"attention.query_norm": HEAD_DIM, "attention.key_norm": HEAD_DIM} if query_key_norm else {}
    for name, size in norms.items():
        weights[name + ".weight"] = 1 + random(size)
        if bias:
            weights[name + ".bias"] = random(size)
    return weights


def random_weights(
    oracle: Oracle, groups: int = HEADS, tied: bool = True, query_key_norm: bool = False
) -> dict[str, Tensor]:
    """Return weights of GPT-2 or Llama by logical name; biases if the normalization is LayerNorm."""
    torch.manual_seed(0)
    bias = oracle.normalization == "LayerNorm"
    weights = {"embedding.word": random(VOCABULARY, HIDDEN), "final_norm.weight": 1 + random(HIDDEN)}
    if bias:
        weights["final_norm.bias"] = random(HIDDEN)
    if oracle.position_embedding_type == "learned_absolute":
        weights["embedding.position"] = random(POSITIONS, HIDDEN)
    if not tied:
        weights["output"] = random(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        block = block_weights(groups, oracle.activation == "swiglu", bias, query_key_norm)
        weights |= {f"layers.{layer}.{name}": weight for name, weight in block.items()}
    return weights


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and positions."""
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(SEQUENCE).expand(BATCH, -1)


def test_it_is_short_and_imports_torch_alone() -> None:
    assert imported(tests.oracle) == {"__future__", "collections", "dataclasses", "functools", "math", "tests", "torch"}
    assert imported(tests.dropout_rule) == {"__future__", "collections", "dataclasses", "functools", "torch"}
    experts = {"__future__", "collections", "dataclasses", "math", "torch"}
    assert imported(tests.experts_oracle) == experts
    assert imported(tests.prediction_oracle) == {"__future__", "collections", "dataclasses", "tests", "torch"}
    assert imported(tests.rotary_oracle) == {"__future__", "dataclasses", "math", "torch"}
    assert len(Path(tests.oracle.__file__).read_text().splitlines()) <= 330


def imported(module: ModuleType) -> set[str]:
    source = Path(str(module.__file__)).read_text()
    return {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }


@pytest.mark.parametrize("activation", ["gelu", "exact_gelu", "squared_relu"])
def test_gpt2_block_is_torchs_encoder_layer(activation: str) -> None:
    oracle = Oracle(activation=activation, norm_epsilon=1e-3)
    weights = random_weights(oracle)
    functions = {
        "gelu": lambda x: F.gelu(x, approximate="tanh"),
        "exact_gelu": F.gelu,
        "squared_relu": lambda x: F.relu(x) ** 2,
    }
    layer = torch.nn.TransformerEncoderLayer(
        HIDDEN, HEADS, FFN, 0.0, functions[activation], 1e-3, batch_first=True, norm_first=True, dtype=torch.float64
    )
    own = {name.removeprefix("layers.0."): weight for name, weight in weights.items()}
    key, value = own["attention.key_value"].unbind(1)
    key_bias, value_bias = own["attention.key_value_bias"].unbind(1)
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([x.flatten(0, 1) for x in (own["attention.query"], key, value)]),
            "self_attn.in_proj_bias": torch.cat(
                [x.flatten() for x in (own["attention.query_bias"], key_bias, value_bias)]
            ),
            "self_attn.out_proj.weight": own["attention.output"].flatten(1),
            "self_attn.out_proj.bias": own["attention.output_bias"],
            "linear1.weight": own["mlp.up"],
            "linear1.bias": own["mlp.up_bias"],
            "linear2.weight": own["mlp.down"],
            "linear2.bias": own["mlp.down_bias"],
            "norm1.weight": own["input_norm.weight"],
            "norm1.bias": own["input_norm.bias"],
            "norm2.weight": own["mlp_norm.weight"],
            "norm2.bias": own["mlp_norm.bias"],
        }
    )
    hidden, visible = random(BATCH, SEQUENCE, HIDDEN), torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    expected = layer(hidden, src_mask=~visible, is_causal=True)
    actual = oracle.block(weights, (0, 0), hidden, batch()[1], visible)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_llama_block_is_torchs_parts(groups: int) -> None:
    weights = random_weights(LLAMA, groups, query_key_norm=True)
    own = {name.removeprefix("layers.0."): weight for name, weight in weights.items()}
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13]])

    def norm(name: str, states: Tensor) -> Tensor:
        return F.rms_norm(states, states.shape[-1:], own[name + ".weight"], 1e-5)

    def rotate(states: Tensor) -> Tensor:
        """Rotate as complex numbers, [batch, heads, sequence, head_dim]."""
        frequencies = torch.tensor([10000 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)], dtype=torch.float64)
        turns = torch.polar(torch.ones((), dtype=torch.float64), positions[:, None, :, None] * frequencies)
        numbers = torch.complex(*states.chunk(2, dim=-1)) * turns
        return torch.cat((numbers.real, numbers.imag), dim=-1)

    hidden = random(BATCH, SEQUENCE, HIDDEN)
    visible = (torch.rand(BATCH, 1, SEQUENCE, SEQUENCE) < 0.5) | torch.eye(SEQUENCE, dtype=torch.bool)
    normed = norm("input_norm", hidden)
    query = torch.einsum("bsi,hdi->bhsd", normed, own["attention.query"])
    key, value = torch.einsum("bsi,gcdi->cbgsd", normed, own["attention.key_value"])
    query, key = rotate(norm("attention.query_norm", query)), rotate(norm("attention.key_norm", key))
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    expected = hidden + torch.einsum("bhsd,ihd->bsi", context, own["attention.output"])
    gate, up = torch.einsum("bsi,cfi->cbsf", norm("mlp_norm", expected), own["mlp.gate_up"])
    expected = expected + (gate * torch.sigmoid(gate) * up) @ own["mlp.down"].T
    actual = LLAMA.block(weights, (0, 0), hidden, positions, visible)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_depends_on_distance_alone_and_leaves_the_rest(interleaved: bool) -> None:
    # int(6 · 0.7) = 4 dimensions turn
    oracle = Oracle(position_embedding_type="rope", rotary_percent=0.7, rotary_interleaved=interleaved)
    states = random(BATCH, SEQUENCE, HEADS, HEAD_DIM)
    positions = batch()[1]
    near, far = oracle.rotate(states, positions), oracle.rotate(states, positions + 1000)
    scores = [torch.einsum("bqhd,bkhd->bhqk", x, x) for x in (near, far)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-9, atol=1e-12)
    assert torch.equal(near[..., 4:], states[..., 4:])
    assert torch.equal(near[:, 0], states[:, 0])
    assert not torch.allclose(near[:, 1, :, :4], states[:, 1, :, :4])


def test_interleaved_pairs_are_neighbours() -> None:
    """The same turns as of halves, channel 2i standing for i and 2i + 1 for i + half."""
    states, positions = random(BATCH, SEQUENCE, HEADS, HEAD_DIM), batch()[1] + 3
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    halves = Oracle().rotate(states[..., order], positions)
    assert torch.allclose(Oracle(rotary_interleaved=True).rotate(states, positions)[..., order], halves, atol=1e-15)


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones() -> None:
    plain = Oracle(rotary_base=500000.0).rotary_frequencies(64)
    scaled = Oracle(rotary_base=500000.0, use_rope_scaling=True, rope_scaling_factor=32.0).rotary_frequencies(64)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 2048, wavelengths > 8192
    middle = ~short & ~long
    assert min(int(part.sum()) for part in (short, long, middle)) > 2
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 32)
    smooth = (8192 / wavelengths[middle] - 1) / 3
    torch.testing.assert_close(scaled[middle], (1 - smooth) * plain[middle] / 32 + smooth * plain[middle])


def test_a_cap_bends_large_logits_alone() -> None:
    weights, plain = random_weights(LLAMA), LLAMA.logits(random_weights(LLAMA), *batch())
    capped = replace(LLAMA, logit_cap=1.0).logits(weights, *batch())
    torch.testing.assert_close(capped, torch.tanh(plain), rtol=1e-13, atol=0)
    torch.testing.assert_close(replace(LLAMA, logit_cap=1e6, score_cap=1e6).logits(weights, *batch()), plain)
    assert not torch.allclose(replace(LLAMA, score_cap=0.1).logits(weights, *batch()), plain)


def test_sandwich_norms_fix_the_size_of_what_a_layer_adds() -> None:
    weights = random_weights(LLAMA)
    hidden, visible = random(BATCH, SEQUENCE, HIDDEN), torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    small = {
        f"layers.0.{part}_output_norm.weight": torch.full((HIDDEN,), 1e-6).double() for part in ("attention", "mlp")
    }
    actual = LLAMA.block(weights | small, (0, 0), hidden, batch()[1], visible)
    assert (actual - hidden).norm() == pytest.approx(2**0.5 * 1e-6 * hidden.numel() ** 0.5, rel=0.2)
    large = {name: weight * 1e6 for name, weight in weights.items() if name.endswith(("attention.output", "down"))}
    grown = LLAMA.block(weights | small | large, (0, 0), hidden, batch()[1], visible)
    torch.testing.assert_close(grown, actual, rtol=1e-9, atol=1e-9)


def test_a_weight_around_one_is_its_distance_from_one() -> None:
    weights = random_weights(LLAMA, query_key_norm=True)
    moved = {name: weight - 1 if "norm" in name else weight for name, weight in weights.items()}
    expected = LLAMA.logits(weights, *batch())
    torch.testing.assert_close(replace(LLAMA, norm_around_one=True).logits(moved, *batch()), expected)


def test_the_scale_of_embeddings_is_that_of_their_weights() -> None:
    weights = random_weights(LLAMA, tied=False)
    scaled = weights | {"embedding.word": weights["embedding.word"] * 3}
    expected = LLAMA.logits(scaled, *batch())
    torch.testing.assert_close(replace(LLAMA, embedding_scale=3.0).logits(weights, *batch()), expected)


def test_yarn_keeps_what_turns_often_and_divides_what_turns_seldom() -> None:
    """The paper's two ends (arXiv:2309.00071, 3.2), and between them a ramp over the pairs."""
    plain = Oracle().rotary_frequencies(64)
    oracle = Oracle(position_embedding_type="yarn", yarn_factor=16.0, yarn_original=4096, yarn_whole_pairs=False)
    scaled, turns = oracle.rotary_frequencies(64), 4096 * plain / (2 * math.pi)
    kept, divided = turns > 32, turns < 1
    torch.testing.assert_close(scaled[kept], plain[kept])
    torch.testing.assert_close(scaled[divided], plain[divided] / 16)
    between = (scaled / plain)[~kept & ~divided]
    assert min(map(len, (scaled[kept], scaled[divided], between))) > 2
    steps = between.diff()
    assert (steps < 0).all()
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    # Published for a factor of 16: sqrt(1 / t) = 0.1 ln(s) + 1.
    assert oracle.rotary_amplitude() == pytest.approx(1.2772588722239782)


@pytest.mark.parametrize("oracle", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_document_is_computed_as_if_alone(oracle: Oracle) -> None:
    weights = random_weights(oracle)
    tokens, _ = batch()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(BATCH, -1)
    document_ids = torch.tensor([[0] * 4 + [1] * 5]).expand(BATCH, -1)
    packed = oracle.logits(weights, tokens, positions, document_ids)
    alone = [oracle.logits(weights, tokens[:, part], positions[:, part]) for part in (slice(0, 4), slice(4, 9))]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("oracle", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_no_token_sees_a_later_one(oracle: Oracle) -> None:
    weights, (tokens, positions) = random_weights(oracle), batch()
    before = oracle.logits(weights, tokens, positions)
    tokens[:, 5] = (tokens[:, 5] + 1) % VOCABULARY
    after = oracle.logits(weights, tokens, positions)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).flatten(2).any(dim=2).all()


def test_tying_is_an_output_equal_to_the_embedding() -> None:
    weights = random_weights(LLAMA)
    tied = LLAMA.logits(weights, *batch())
    assert torch.equal(tied, LLAMA.logits(weights | {"output": weights["embedding.word"]}, *batch()))
    assert not torch.equal(tied, LLAMA.logits(weights | {"output": weights["embedding.word"] * 2}, *batch()))


def test_every_layer_counts() -> None:
    weights = random_weights(GPT2)
    fewer = {name: weight for name, weight in weights.items() if not name.startswith("layers.1.")}
    assert not torch.allclose(GPT2.logits(weights, *batch()), GPT2.logits(fewer, *batch()))


def test_loss_is_the_masked_cross_entropy() -> None:
    torch.manual_seed(2)
    logits, labels = random(BATCH, SEQUENCE, VOCABULARY), torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    mask = (torch.rand(BATCH, SEQUENCE) < 0.5).float()
    loss_sum, count = loss_sum_and_count(logits, labels, mask)
    expected = F.cross_entropy(logits[mask.bool()], labels[mask.bool()], reduction="sum")
    torch.testing.assert_close(loss_sum, expected, rtol=1e-13, atol=0)
    assert count.item() == mask.sum().item()
    loss_sum, _ = loss_sum_and_count(torch.zeros_like(logits), labels, torch.ones_like(mask))
    assert loss_sum.item() == pytest.approx(BATCH * SEQUENCE * math.log(VOCABULARY), rel=1e-14)


@pytest.mark.parametrize("oracle", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_gradient_is_the_slope_of_the_loss(oracle: Oracle) -> None:
    weights = random_weights(oracle, groups=2, tied=False, query_key_norm=True)
    tokens, positions = batch()
    labels, mask = tokens.roll(-1, dims=1), torch.ones(BATCH, SEQUENCE)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return loss_sum_and_count(oracle.logits(weights, tokens, positions), labels, mask)[0]

    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    gradients = dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))
    for name, weight in weights.items():
        direction = torch.randn_like(weight)
        ahead, behind = (loss(weights | {name: weight + step * direction}).item() for step in (1e-5, -1e-5))
        slope = (gradients[name] * direction).sum().item()
        assert (ahead - behind) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-6), name
