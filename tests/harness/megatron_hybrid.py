"""Megatron-LM's own HybridModel, from the wheel megatron-core 0.19.2, on ranks without a GPU.

The wheel needs Python 3.12 (`tests/environments.py`), and is imported only in ranks. What it takes from packages that
run on GPUs alone stands here, in plain PyTorch: a scan, token by token, and a gated norm.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from tests.harness import megatron_core
from tests.harness.megatron_core import NORMS_OF_LATENTS, Core, Form, Names, network_options, transformer_config


def save(
    model: ModelConfig, args: dict[str, Any], folder: Path, tokens: Tensor, tensor_parallel_size: int, form: Form
) -> Tensor:
    """Save a network of random weights as Megatron-LM does, and return its logits."""
    stand_in()
    return megatron_core.save(model, args, folder, tokens, tensor_parallel_size, form, _build)


def load(model: ModelConfig, folder: Path, tokens: Tensor, tensor_parallel_size: int) -> tuple[Tensor, Any]:
    """Return the logits of a network loaded from a folder, all of whose tensors it must use, and the rest of it."""
    stand_in()
    return megatron_core.load(model, folder, tokens, tensor_parallel_size, _build)


def depths(
    model: ModelConfig, folder: Path, tokens: Tensor, tensor_parallel_size: int, args: dict[str, Any] | None = None
) -> Tensor:
    """Return what enters the output layer at each depth from 0 on, [depths + 1, tokens, batch, hidden].

    The network is loaded from a folder, all of whose tensors it must use; or, with the arguments of a run, saved there
    as `save` does.
    """
    stand_in()
    found: list[Tensor] = []

    def build(*arguments: Any) -> Any:
        network = _build(*arguments)
        network.mtp.register_forward_hook(lambda module, given, output: found.append(output))
        return network

    if args is None:
        megatron_core.load(model, folder, tokens, tensor_parallel_size, build)
    else:
        megatron_core.save(model, args, folder, tokens, tensor_parallel_size, "per layer", build)
    return found[-1].unflatten(0, (1 + model.depths, -1)).clone()


def _build(model: ModelConfig, tensor_parallel_size: int, names: Names) -> Any:
    """Build a network with a pattern.

    `names`: names of norms: as of Transformer Engine's fused layers, or of modules of their own.
    """
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm
    config = transformer_config(
        model,
        tensor_parallel_size,
        is_hybrid_model=True,
        deterministic_mode=True,  # the gated delta rule in PyTorch
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        mamba_state_dim=model.mamba_state_dim,
        mamba_head_dim=model.mamba_head_dim,
        mamba_num_groups=model.mamba_num_groups,
        mamba_num_heads=model.mamba_num_heads,
        linear_conv_kernel_dim=model.linear_conv_kernel_dim,
        linear_key_head_dim=model.linear_key_head_dim,
        linear_value_head_dim=model.linear_value_head_dim,
        linear_num_key_heads=model.linear_num_key_heads,
        linear_num_value_heads=model.linear_num_value_heads,
        mtp_num_layers=model.mtp_num_layers,
        mtp_use_repeated_layer=model.mtp_use_repeated_layer,
    )
    of_depths = f"/{model.mtp_hybrid_override_pattern}" * model.depths
    return HybridModel(
        config,
        stack(names == "transformer engine", model),
        hybrid_layer_pattern=f"{model.hybrid_layer_pattern}{of_depths}",
        **network_options(model, tensor_parallel_size),
    )


def stack(fused_names: bool, model: Any) -> Any:
    """Return the kinds of layers, as `hybrid_layer_specs` has them, without Transformer Engine.

    `model`: has qk_layernorm, q_lora_rank and num_experts.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    def keys(own: str, fused: str) -> dict[str, dict[str, str]]:
        return {"sharded_state_dict_keys_map": {own: fused} if fused_names else {}}

    def mixer(module: Any, submodules: Any, names: dict[str, Any], **params: Any) -> ModuleSpec:
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(module=module, params=params, submodules=submodules),
                self_attn_bda=get_bias_dropout_add,
                **names,
            ),
        )

    def feed_forward(module: Any, mlp: Any, names: dict[str, Any]) -> ModuleSpec:
        return ModuleSpec(
            module=module,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add, **names
            ),
        )

    def fused_with(matrix: str) -> dict[str, Any]:
        return keys("input_layernorm.", f"self_attention.{matrix}.layer_norm_")

    norm_of_latents = WrappedTorchNorm if model.qk_layernorm else IdentityOp
    to_latents = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
    projections = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    depth = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,  # made by the pattern
            layer_norm=WrappedTorchNorm,
        ),
    )
    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=WrappedTorchNorm,
                    mixer=ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(**projections)),
                    mamba_bda=get_bias_dropout_add,
                    **keys("norm.", "mixer.in_proj.layer_norm_"),
                ),
            ),
            gdn_layer=mixer(
                GatedDeltaNet,
                GatedDeltaNetSubmodules(out_norm=WrappedTorchNorm, **projections),
                fused_with("in_proj"),
            ),
            attention_layer=mixer(
                SelfAttention,
                SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
                ),
                fused_with("linear_qkv"),
                attn_mask_type=AttnMaskType.causal,
            ),
            mla_layer=mixer(
                MLASelfAttention,
                MLASelfAttentionSubmodules(
                    **{f"linear_{name}": ColumnParallelLinear for name in to_latents},
                    core_attention=Core,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm_of_latents if model.q_lora_rank else IdentityOp,
                    kv_layernorm=norm_of_latents,
                ),
                {"sharded_state_dict_keys_map": NORMS_OF_LATENTS if fused_names else {}},
                attn_mask_type=AttnMaskType.causal,
            ),
            mlp_layer=feed_forward(
                MLPLayer,
                functools.partial(MLP.as_mlp_submodule, submodules=matrices),
                keys("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
            ),
            moe_layer=feed_forward(
                TransformerLayer, get_moe_module_spec(use_te=False, num_experts=model.num_experts or 1), {}
            ),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth])
            ),
        ),
    )


# ------------------------------------------------------------------------------------------------ instead of packages


def stand_in() -> None:
    """Let the packages be found that Mamba-2 and gated delta nets are imported with."""
    _package("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm)
    _package("mamba_ssm.ops.triton.ssd_combined", mamba_split_conv1d_scan_combined=scan, mamba_chunk_scan_combined=None)
    _package("fla.modules.convolution", causal_conv1d=None)
    _package("fla.modules.l2norm", l2norm=of_length_one)
    _package("fla.ops.gated_delta_rule", chunk_gated_delta_rule=None)


def _package(name: str, **contents: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        module = sys.modules.setdefault(path, types.ModuleType(path))
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(path, None), []
    vars(module).update(contents)


def of_length_one(heads: Tensor) -> Tensor:
    return heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class GatedNorm(nn.Module):
    """Norm of each group of channels of what a gate has multiplied already."""

    def __init__(self, channels: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.epsilon, self.group = eps, group_size
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, hidden: Tensor) -> Tensor:
        groups = hidden.unflatten(-1, (-1, self.group))
        normed = groups * (groups.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return normed.flatten(-2) * self.weight


def scan(
    inputs: Tensor,
    taps: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    rates: Tensor,
    D: Tensor,
    *,
    headdim: int,
    ngroups: int,
    activation: str,
    norm_before_gate: bool,
    **_: Any,
) -> Tensor:
    """Convolve, scan and gate the parts z, x, B, C and dt of `[batch, tokens, channels]`, token by token."""
    assert activation == "silu"
    assert not norm_before_gate
    inner = len(D) * headdim
    shared = (inputs.shape[-1] - 2 * inner - len(D)) // 2
    gate, mixed, steps = inputs.split([inner, inner + 2 * shared, len(D)], dim=-1)
    before = F.pad(mixed.transpose(1, 2), (taps.shape[-1] - 1, 0))
    mixed = F.silu(F.conv1d(before, taps.unsqueeze(1), bias, groups=len(taps))).transpose(1, 2)
    x, b, c = mixed.split([inner, shared, shared], dim=-1)
    x = x.unflatten(-1, (len(D), headdim))
    b, c = (each.unflatten(-1, (ngroups, -1)).repeat_interleave(len(D) // ngroups, dim=2) for each in (b, c))
    steps = F.softplus(steps + dt_bias)
    state, outputs = x.new_zeros(len(x), len(D), headdim, b.shape[-1]), []
    for token in range(x.shape[1]):
        write = torch.einsum("bh, bhp, bhn -> bhpn", steps[:, token], x[:, token], b[:, token])
        state = torch.exp(steps[:, token] * rates)[..., None, None] * state + write
        outputs.append(torch.einsum("bhpn, bhn -> bhp", state, c[:, token]) + D.unsqueeze(-1) * x[:, token])
    return torch.stack(outputs, 1).flatten(-2) * F.silu(gate)
