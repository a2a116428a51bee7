"""Model FLOPs against counts made by hand and by torch itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config import ModelConfig
from megalite.config.layer_specs import LayerSpec
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.tasks.flops import flops_per_token, peak_flops


def model(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 24,
        "swiglu": True,
    }
    return ModelConfig(**(sizes | changes))


def test_full_attention_is_what_torch_counts_for_the_same_products() -> None:
    batch, sequence, vocabulary, sizes = 3, 10, 40, model()
    hidden = torch.randn(batch * sequence, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        for _ in range(sizes.num_layers):
            mixed = hidden @ torch.randn(16, 32 + 2 * 16, requires_grad=True)
            query, key = (mixed[:, :32].reshape(batch * 4, sequence, 8) for _ in range(2))
            context = (query @ key.transpose(1, 2)) @ key
            attended = context.reshape(-1, 32) @ torch.randn(32, 16, requires_grad=True)
            gate, up = (attended @ torch.randn(16, 24, requires_grad=True) for _ in range(2))
            hidden = (gate * up) @ torch.randn(24, 16, requires_grad=True)
        (hidden @ torch.randn(16, vocabulary, requires_grad=True)).sum().backward()
    assert flops_per_token(sizes, vocabulary, sequence, causal=False) * batch * sequence == counter.get_total_flops()


def test_causal_attention_saves_half_of_the_scores_and_nothing_else() -> None:
    full, causal = (flops_per_token(model(), 40, 10, causal=causal) for causal in (False, True))
    assert full - causal == 3 * 2 * 2 * (2 * 32 * 10) / 2


def test_every_gate_is_a_third_matrix() -> None:
    gates = [
        flops_per_token(model(swiglu=kind == "swiglu", geglu=kind == "geglu"), 40, 10) for kind in ("swiglu", "geglu")
    ]
    assert gates[0] == gates[1] > flops_per_token(model(swiglu=False), 40, 10)


def test_a_gate_of_attentions_output_is_a_matrix_as_that_of_queries() -> None:
    gated, plain = (flops_per_token(model(attention_output_gate=on), 40, 10) for on in (True, False))
    assert gated - plain == 3 * 2 * 2 * (16 * 32)


def test_a_window_leaves_what_it_lets_tokens_see() -> None:
    """A window of 4 of 10 tokens: 1 + 2 + 3 + 7 x 4 scores, by the convention without the half of the diagonal."""
    sizes = model(window_size="3,0", window_attn_skip_freq="2")
    saved = flops_per_token(model(), 40, 10) - flops_per_token(sizes, 40, 10)
    assert saved == pytest.approx(3 * 2 * (2 * 32) * (10 / 2 - (34 - 4 / 2) / 10))
    assert flops_per_token(model(window_size="9,0"), 40, 10) == flops_per_token(model(), 40, 10)
    assert flops_per_token(sizes, 40, 10, causal=False) == flops_per_token(model(), 40, 10, causal=False)


@pytest.mark.parametrize("kind", ["mixer", "feed_forward"])
def test_a_layer_that_no_formula_is_for_is_not_counted_as_another(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "layers", (LayerSpec(), LayerSpec(**{kind: "unheard of"})))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="unheard of"):
        flops_per_token(model(), 40, 10)


def test_gpt_3_needs_what_its_paper_says() -> None:
    """arXiv:2005.14165, table D.1: 3.14e23 FLOPs for 300 billion tokens, attention left out."""
    gpt_3 = model(
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        num_query_groups=96,
        kv_channels=128,
        ffn_hidden_size=49152,
        swiglu=False,
    )
    assert flops_per_token(gpt_3, 50257, 0) * 300e9 == pytest.approx(3.14e23, rel=0.01)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
    ],
)
def test_peaks_are_known_by_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_of_the_experts_only_those_that_a_token_uses_count() -> None:
    """Two of eight, a shared one with its gate, and the router; in one of two layers."""
    experts = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 10,
        "moe_layer_freq": "[0,1]",
        "moe_shared_expert_intermediate_size": 6,
        "moe_shared_expert_gate": True,
    }
    more = flops_per_token(model(**experts), 40, 10) - flops_per_token(model(), 40, 10)
    assert more == 3 * 2 * 16 * (3 * (2 * 10 + 6) + 8 + 1 - 3 * 24)
    latent = flops_per_token(model(**experts, moe_latent_size=4), 40, 10) - flops_per_token(model(**experts), 40, 10)
    assert latent == 3 * 2 * (3 * 2 * 10 * (4 - 16) + 2 * 4 * 16)


def _solved(system: list[int], right: list[int], *_: Any, **__: Any) -> int:
    """Return the operations of the solution of triangles: a product with half of each."""
    return math.prod(right) * system[-1]


def _added(total: list[int], left: list[int], right: list[int], **_: Any) -> int:
    """Return the operations of products that are added to something."""
    return 2 * math.prod(left) * right[-1]


@pytest.mark.parametrize("chunk", [8, 16])
@pytest.mark.parametrize("letter", ["M", "G"])
def test_recurrent_layers_are_what_torch_counts_for_their_products(letter: str, chunk: int) -> None:
    """The reference computes all pairs of a chunk, of which half count. Of a triangle's solution it computes half."""
    sizes: dict[str, Any] = {
        "mamba_state_dim": 10, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_chunk_size": chunk,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
        "linear_value_head_dim": 4, "linear_chunk_size": chunk,
    }  # fmt: skip
    pattern = ModelConfig(
        1, 16, 4, hybrid_layer_pattern=letter, vocab_size=128, position_embedding_type="none", **sizes
    )
    batch, sequence = 3, 64
    tokens, positions = (torch.zeros(batch, sequence, dtype=torch.int64) for _ in range(2))
    network = GPT(pattern, ParallelMesh())
    operators = torch.ops.aten
    more = {operators.linalg_solve_triangular: _solved, operators.baddbmm_: _added}
    with FlopCounterMode(display=False, custom_mapping=more) as counter, torch.no_grad():
        network({}, MicroBatch(tokens, positions, None, None, None, RandomKey(0, (0, 1, 2))))
    if letter == "M":  # 8 heads
        pairs, convolved = 2 * 10 + 8 * 4, 8 * 4 + 2 * 2 * 10
        solution, states, weights = 0, 2 * 8 * 4 * 10, 16 * (3 * 32 + 2 * 20 + 8)
    else:
        pairs, convolved = 2 * 2 * 12 + 6 * 4, 2 * 2 * 12 + 6 * 4
        solution, states, weights = 6 * (12 + 4), 3 * 6 * 12 * 4, 16 * (2 * 24 + 3 * 24 + 2 * 6)
    logits = 16 * 128
    computed = weights + chunk * pairs + chunk // 2 * solution + states + logits
    assert counter.get_total_flops() == 2 * batch * sequence * computed
    counted = weights + chunk // 2 * (pairs + solution) + states + logits + 4 * convolved
    assert flops_per_token(pattern, 128, sequence) == 3 * 2 * counted


def test_a_chunk_is_no_longer_than_the_sequence() -> None:
    """Recurrent layers take as many operations for a token of any sequence of several chunks."""
    long, longer, short = (
        flops_per_token(ModelConfig(1, 1024, 4, hybrid_layer_pattern="M", mamba_chunk_size=16), 40, length)
        for length in (64, 4096, 8)
    )
    assert long == longer > short


def test_attention_over_latents_by_hand() -> None:
    """A token sees half of 10 tokens."""
    sizes = {"kv_lora_rank": 5, "qk_head_dim": 3, "qk_pos_emb_head_dim": 2, "v_head_dim": 6}
    latents = {"hybrid_layer_pattern": "++", "position_embedding_type": "none"} | sizes
    others = 16 * (5 + 2) + 5 * 4 * (3 + 6) + 4 * 6 * 16 + 4 * (3 + 2 + 6) * 5
    plain, made = 16 * 4 * 5, 16 * 7 + 7 * 4 * 5  # queries of the input, and of a latent
    assert flops_per_token(model(**latents), 40, 10) == 3 * 2 * (2 * (plain + others) + 16 * 40)
    assert flops_per_token(model(**latents, q_lora_rank=7), 40, 10) == 3 * 2 * (2 * (made + others) + 16 * 40)


def test_sparse_attention_by_hand() -> None:
    """A token of 10 attends to at most 4: to 3.2 on average. The indexer has no backward without a loss."""
    sizes = {"kv_lora_rank": 5, "qk_head_dim": 3, "qk_pos_emb_head_dim": 2, "v_head_dim": 6}
    indexer = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4}
    sparse = {"hybrid_layer_pattern": "DD", "position_embedding_type": "none"} | sizes | indexer
    matrices = 16 * 4 * 5 + 16 * (5 + 2) + 5 * 4 * (3 + 6) + 4 * 6 * 16
    chosen, seen = matrices + 4 * (3 + 2 + 6) * 3.2, matrices + 4 * (3 + 2 + 6) * 5
    of_indexer, logits = 16 * 2 * 8 + 16 * (8 + 2) + 2 * (8 + 1) * 5, 16 * 40
    expected = {
        (): 2 * (3 * (2 * chosen + logits) + 2 * of_indexer),
        (("dsa_indexer_loss_coeff", 0.1),): 2 * 3 * (2 * chosen + logits + 2 * of_indexer),
        (("dsa_indexer_loss_coeff", 0.1), ("dsa_stage", "warmup")): 2 * (2 * seen + logits + 2 * 3 * of_indexer),
    }
    for options, flops in expected.items():
        assert flops_per_token(model(**sparse, **dict(options)), 40, 10) == pytest.approx(flops), options
    shared = flops_per_token(model(**sparse, dsa_indexer_topk_freq=2), 40, 10)
    assert shared == pytest.approx(2 * (3 * (2 * chosen + logits) + of_indexer))


def test_short_convolutions_and_kimi_delta_attention_by_hand() -> None:
    kinds = {"hybrid_layer_pattern": "LK", "kda_num_heads": 3, "kda_head_dim": 8, "kda_chunk_size": 4}
    per_token = flops_per_token(model(**kinds), 40, 10)
    convolution = 4 * 16 * 16 + (3 + 2) * 16
    matrices = 16 * (4 * 24 + 2 * 8 + 3) + 2 * 8 * 24
    kimi = matrices + 4 * 3 * 24 + 5 * 2 * 24 + 3 * 24 * 8  # a token meets half a chunk, 2 tokens
    assert per_token == 3 * 2 * (convolution + kimi + 16 * 40)
