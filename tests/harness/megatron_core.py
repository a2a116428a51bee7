"""Megatron-LM's own GPT and checkpoints, from the wheel megatron-core 0.16.1, on ranks without a GPU.

The wheel is installed without its dependencies (see the Makefile), and imported only in ranks.
"""

from __future__ import annotations

import contextlib
import queue
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig

Names = Literal["local", "transformer engine"]
Form = Literal["stacked", "per layer", "legacy", "own norms"]
"""Form of a checkpoint: one key for all layers; one key per layer, also with norms by themselves; one file per rank."""
NORMS_OF_LATENTS = {
    f"self_attention.{name}_layernorm.": f"self_attention.linear_{name}_up_proj.layer_norm_" for name in ("q", "kv")
}
"""Names of norms of modules of their own, and in Transformer Engine's fused layers."""
Build = Callable[[ModelConfig, int, Names], Any]
"""Function that builds a network on so many tensor-parallel ranks, whose norms have these names."""


def save(
    model: ModelConfig,
    args: dict[str, Any],
    folder: Path,
    tokens: Tensor,
    tensor_parallel_size: int,
    form: Form,
    build: Build | None = None,
) -> Tensor:
    """Save a network of random weights as Megatron-LM does, and return its logits. `build`: builds it; None: a GPT."""
    with ready(tensor_parallel_size):
        names: Names = "transformer engine" if form == "per layer" else "local"
        network = (build or _build)(model, tensor_parallel_size, names)
        torch.manual_seed(torch.distributed.get_rank())
        for name, parameter in network.named_parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
                if not getattr(parameter, "tensor_model_parallel", False):  # replicated
                    torch.distributed.broadcast(parameter, 0)
        for name, buffer in network.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        write(network, args, folder, form)
        return _logits(network, tokens)


def write(network: Any, args: dict[str, Any], folder: Path, form: Form) -> None:
    """Write a checkpoint of a network."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common: dict[str, Any] = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 7}
    if form == "legacy":
        path = folder / f"mp_rank_{torch.distributed.get_rank():02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(common | {"model": network.state_dict()}, path)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"singleton_local_shards": form == "per layer"}
        if form == "stacked":  # as newer versions do
            rank = torch.distributed.get_rank()
            common = {"common": ShardedObject("common_state", common, (1,), (0,), replica_id=rank)}
        dist_checkpointing.save(network.sharded_state_dict(metadata=metadata) | common, str(folder))


def load(
    model: ModelConfig, folder: Path, tokens: Tensor, tensor_parallel_size: int, build: Build | None = None
) -> tuple[Tensor, Any]:
    """Return the logits of a network loaded from a folder, all of whose tensors it must use, and the rest of the
    checkpoint."""
    with ready(tensor_parallel_size):
        from megatron.core import dist_checkpointing

        network = (build or _build)(model, tensor_parallel_size, "transformer engine")
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(torch.nan)
        state = {name: part for name, part in network.sharded_state_dict().items() if "_extra_state" not in name}
        loaded = dist_checkpointing.load(state, str(folder), strict="raise_all")
        common = {name: loaded.pop(name) for name in ("args", "checkpoint_version", "iteration")}
        network.load_state_dict(loaded, strict=False)
        return _logits(network, tokens), common


@torch.no_grad()
def _logits(network: Any, tokens: Tensor) -> Tensor:
    length = tokens.shape[1]
    hidden = torch.ones(1, 1, length, length).tril() < 0.5
    return network.eval()(tokens, torch.arange(length).expand_as(tokens), hidden).clone()


def _expert_options(model: ModelConfig) -> dict[str, Any]:
    if model.num_experts is None:
        return {}
    names = """moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_num_groups
        moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias
        moe_shared_expert_intermediate_size moe_shared_expert_gate""".split()  # noqa: SIM905
    return {name: getattr(model, name) for name in names} | {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": [int(layer.feed_forward == "moe") for layer in model.layers] if model.moe_layer_freq else 1,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_router_load_balancing_type": "seq_aux_loss",
    }


def _latent_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options of latent attention. Its rotation is YaRN, which is plain with a factor of 1."""
    if not model.has_latents:
        return {}
    names = """q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base rotary_scaling_factor
        mscale mscale_all_dim""".split()  # noqa: SIM905
    return {name: getattr(model, name) for name in names}


def _build(model: ModelConfig, tensor_parallel_size: int, names: Names = "local") -> Any:
    """Build a network.

    `names`: names of the norm before experts: as of a network of torch's modules, or of Transformer Engine's. The names
    of all other tensors are the same.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    config = transformer_config(model, tensor_parallel_size)
    if model.position_embedding_type == "yarn":
        config.yarn_rotary_scaling_factor = model.rotary_scaling_factor
        config.yarn_mscale, config.yarn_mscale_all_dim = model.mscale, model.mscale_all_dim
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "correction_range_round_to_int"):
            setattr(config, f"yarn_{name}", getattr(model, f"yarn_{name}"))
    spec: Any = get_gpt_layer_local_spec(
        qk_layernorm=model.qk_layernorm, normalization=model.normalization, multi_latent_attention=model.has_latents
    )
    if model.has_latents:
        latents = spec.submodules.self_attention.submodules
        latents.core_attention = Core
        if model.q_lora_rank is None:
            latents.q_layernorm = IdentityOp
        if names == "transformer engine":
            fused = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
            spec.submodules.sharded_state_dict_keys_map = NORMS_OF_LATENTS | fused
    if model.num_experts is not None:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=model.normalization)
        for layer, description in zip(model.layers, spec.layer_specs, strict=True):
            if layer.feed_forward == "moe" and names == "transformer engine":
                description.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return GPTModel(
        config,
        spec,
        **network_options(model, tensor_parallel_size),
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
    )


def network_options(model: ModelConfig, tensor_parallel_size: int) -> dict[str, Any]:
    """Return the arguments of a network beside its configuration and the kinds of its layers."""
    kind = model.position_embedding_type
    return {
        "vocab_size": model.padded_vocab_size(tensor_parallel_size),
        "max_sequence_length": model.max_position_embeddings or 0,
        "parallel_output": False,
        "share_embeddings_and_output_weights": not model.untie_embeddings_and_output_weights,
        "position_embedding_type": "rope" if model.has_latents and kind == "yarn" else kind,  # see `_latent_options`
        "rotary_percent": model.rotary_percent,
        "rotary_base": model.rotary_base,
        "seq_len_interpolation_factor": model.rotary_seq_len_interpolation_factor,
    }


def transformer_config(model: ModelConfig, tensor_parallel_size: int, **options: Any) -> Any:
    """Return the configuration of a network's layers, with further options of it."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    activation: Any = torch.nn.functional.gelu
    if model.swiglu:
        activation = torch.nn.functional.silu
    if model.squared_relu:
        from megatron.core.activations import squared_relu as activation
    return (MLATransformerConfig if model.has_latents else TransformerConfig)(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_size,
        tensor_model_parallel_size=tensor_parallel_size,
        use_cpu_initialization=True,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=activation,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        attention_output_gate=model.attention_output_gate,
        softmax_type=model.softmax_type,
        no_rope_freq=[int(not layer.rotary) for layer in model.layers] if model.no_rope_freq else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=not (model.swiglu or model.squared_relu or model.exact_gelu),
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        rotary_interleaved=model.rotary_interleaved,
        **_expert_options(model),
        **_latent_options(model),
        **options,
    )


class Core(nn.Module):
    """Causal attention with values of another width than keys, which Megatron-LM has in Transformer Engine alone."""

    def __init__(self, config: Any, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        heads = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def write_in_this_process() -> None:
    """Let the program write checkpoints in this process, instead of in forked ones."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()

    def write(transforms: Any, _: bool, rank: int, buckets: Any, results: Any) -> None:
        written = {}
        for number, bucket in enumerate(buckets):
            done, count = queue.Queue[Any](), queue.Queue[Any]()
            count.put(number)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, done, count, False)
            written[number] = done.get()[1]
        results.put(written)

    filesystem_async._process_memory = lambda: 0
    filesystem_async._get_write_results_queue = lambda: results
    filesystem_async.get_write_results_queue = lambda: results  # its name since 0.19
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)


@contextlib.contextmanager
def ready(tensor_parallel_size: int) -> Iterator[None]:
    """Replace the features of a GPU, of other packages and of other processes that it needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils

    class Tracker:
        fork = staticmethod(lambda *_: contextlib.nullcontext())
        get_states = staticmethod(dict)

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = Tracker(), True
    write_in_this_process()
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    parallel_state.initialize_model_parallel(tensor_parallel_size)
    try:
        # Compiling its fused functions would take ten seconds.
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            yield
    finally:
        parallel_state.destroy_model_parallel()
