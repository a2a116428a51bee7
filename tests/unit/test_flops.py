"""Model FLOPs against counts made by hand and by torch itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config import ModelConfig
from megalite.config.layer_specs import LayerSpec
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
