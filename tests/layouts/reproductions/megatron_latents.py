"""Gradients of latent attention in megatron-core 0.19.2 under tensor parallelism, on CPUs.

    torchrun --nproc-per-node 1 megatron_latents.py
    torchrun --nproc-per-node 2 megatron_latents.py

Both have the same weights, input and output, and should have the same gradients. Of packages it needs torch and
megatron-core.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

LATENT, ROTATED, TOKENS, HIDDEN = 12, 4, 16, 32


class Attention(torch.nn.Module):
    """Causal attention, with values of another width than keys, which megatron-core's own has not on CPUs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def main() -> None:
    """Print the norms of the gradients."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        q_lora_rank=LATENT,
        kv_lora_rank=LATENT,
        qk_head_dim=8,
        qk_pos_emb_head_dim=ROTATED,
        v_head_dim=8,
        rope_type="rope",
        add_bias_linear=False,
        qk_layernorm=True,
        normalization="RMSNorm",
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    layer = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = Attention
    attention = build_module(layer.submodules.self_attention, config=config, layer_number=1)
    generator = torch.Generator().manual_seed(0)
    for _, weight in sorted(attention.named_parameters()):
        split = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else -1
        shape = list(weight.shape)
        if split >= 0:
            shape[split] *= ranks
        whole = torch.randn(shape, generator=generator) * 0.3
        weight.data.copy_(whole if split < 0 else whole.chunk(ranks, split)[rank])
    hidden = torch.randn(TOKENS, 2, HIDDEN, generator=generator)
    output, _ = attention(hidden, attention_mask=None)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    for weight in attention.parameters():
        weight.main_grad = weight.grad
    attention.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    _allreduce_non_tensor_model_parallel_grads(
        [attention], config, tp_group=parallel_state.get_tensor_model_parallel_group()
    )
    own = attention.linear_kv_down_proj.weight.grad
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own)
    latent, rotated = torch.cat(parts).split([LATENT, ROTATED])
    norms = (attention.q_layernorm.weight.main_grad, attention.kv_layernorm.weight.main_grad)
    if rank == 0:
        print(
            f"TP {ranks}: output {output.norm():.6f}; gradients: rows of the latent {latent.norm():.6f}, of the "
            f"rotated key {rotated.norm():.6f}; q_layernorm {norms[0].norm():.6f}, kv_layernorm {norms[1].norm():.6f}"
        )


if __name__ == "__main__":
    main()
