"""Training step of Megatron-LM's own GPT, configured by Megatron-LM's rules from its flags; called in a rank.

This reads flags without megalite's parser: it is what megalite is compared with.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.harness.megatron_core import ready, write

_ON = ("add_bias_linear", "bias_gelu_fusion", "bias_swiglu_fusion", "masked_softmax_fusion")
_DEFAULTS: dict[str, Any] = dict.fromkeys(_ON, True) | {
    "swiglu": False,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "group_query_attention": False,
    "num_query_groups": 1,
    "num_experts": None,
    "norm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "untie_embeddings_and_output_weights": False,
    "vocab_size": None,
    "make_vocab_size_divisible_by": 128,
}
"""Megatron-LM's defaults of the arguments that are read here."""
_OFF = {"disable_bias_linear": "add_bias_linear", "no_bias_gelu_fusion": "bias_gelu_fusion"}
_OFF |= {f"no_{name}": name for name in ("bias_swiglu_fusion", "masked_softmax_fusion")}
"""Flags that turn an argument off, by that argument."""
_HOW = """moe_grouped_gemm moe_token_dispatcher_type recompute_granularity recompute_method recompute_num_layers
    attention_backend cp_comm_type apply_rope_fusion persist_layer_norm"""
"""Options that say how a network is computed, not what; some need a GPU."""
_OF_THE_RUN = re.compile(
    "(train|lr|min_lr|weight|adam|clip|decoupled|log|eval|save|load|ckpt|dist_ckpt|use_dist|async|data|split|tokenizer|"
    "vocab_file|merge|tensorboard|wandb|timing|distributed|manual_gc|overlap|exit|rerun|num_workers|no_mmap|no_load|no_ckpt|"
    "micro_batch|global_batch|step_batch|use_checkpoint|use_persistent|use_mcore|transformer_impl|no_create|mock|"
    "no_gradient_acc|no_rope_fusion|no_position_embedding|seq_length|disable_gloo|deterministic|seed|use_flash)"
)
"""Beginnings of arguments that are no part of the network, or already so in this one."""


def step(flags: Sequence[str], micro_batches: Sequence[Sequence[Tensor]], folder: Path) -> tuple[float, float]:
    """Save a network of random weights, and return the loss and the gradient norm of its first step.

    A micro-batch is tokens and labels, both [batch, sequence].
    """
    arguments = arguments_of(flags)
    with ready(1):
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        network = _build(arguments)
        torch.manual_seed(0)
        norms = [parameter for name, parameter in network.named_parameters() if re.search(r"norm\.weight", name)]
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            for norm in norms:
                norm += not arguments["apply_layernorm_1p"]
            write(network, arguments, folder, "stacked")
            for norm in norms:  # torch's norms have no form around one
                norm += arguments["apply_layernorm_1p"]
        total, count = 0.0, len(micro_batches)
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / count))
        for tokens, labels in micro_batches:
            length = tokens.shape[1]
            hidden = torch.ones(1, 1, length, length).tril() < 0.5
            positions = torch.arange(length).expand_as(tokens)
            loss = network(tokens, positions, hidden, labels=labels).float().mean() / count
            loss.backward()
            total += loss.item()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    return total, torch.stack([gradient.norm() for gradient in gradients]).norm().item()


def arguments_of(flags: Sequence[str]) -> dict[str, Any]:
    """Return Megatron-LM's arguments: those given, and those that follow from them."""
    found = dict(_DEFAULTS)
    for name, *words in (group.split() for group in " ".join(flags).removeprefix("--").split(" --")):
        name = name.replace("-", "_")
        values = [ast.literal_eval(word) if re.fullmatch(r"[\d.]+(e[+-]?\d+)?", word) else word for word in words]
        found[_OFF.get(name, name)] = name not in _OFF if not values else values[0] if len(values) == 1 else values
    hidden = found["hidden_size"]
    found.setdefault("ffn_hidden_size", int(4 * hidden * 2 / 3 / 64) * 64 if found["swiglu"] else 4 * hidden)
    if found["num_experts"] is not None:
        found.setdefault("moe_ffn_hidden_size", found["ffn_hidden_size"])
    found.setdefault("kv_channels", hidden // found["num_attention_heads"])
    found["bias_gelu_fusion"] &= found["add_bias_linear"]
    found.setdefault("add_qkv_bias", found["add_bias_linear"])
    return found


def _build(arguments: dict[str, Any]) -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    fields = {name: arguments[name] for name in TransformerConfig.__annotations__ if name in arguments}
    known = {*fields, *_DEFAULTS, "max_position_embeddings"}
    unknown = [name for name in arguments if name not in known and not _OF_THE_RUN.match(name)]
    assert not unknown, unknown
    fields["num_moe_experts"] = arguments["num_experts"]
    fields["layernorm_epsilon"] = arguments["norm_epsilon"]
    fields["bias_activation_fusion"] = arguments["bias_gelu_fusion"]
    if arguments["swiglu"]:
        fields |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
        fields["bias_activation_fusion"] = arguments["bias_swiglu_fusion"]
    if arguments["squared_relu"]:
        fields["activation_func"] = squared_relu
    if not arguments["group_query_attention"]:
        fields["num_query_groups"] = None
    fields = {name: value for name, value in fields.items() if name not in _HOW.split()}
    config = TransformerConfig(**fields, use_cpu_initialization=True, gradient_accumulation_fusion=False)
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    if config.num_moe_experts is not None:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    multiple = arguments["make_vocab_size_divisible_by"]
    return GPTModel(
        config,
        spec,
        vocab_size=-(-(arguments["vocab_size"] + 1) // multiple) * multiple,  # with the end of document
        max_sequence_length=arguments["max_position_embeddings"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        position_embedding_type=arguments["position_embedding_type"],
        rotary_percent=arguments["rotary_percent"],
        rotary_base=arguments["rotary_base"],
        rope_scaling=arguments["use_rope_scaling"],
    )
