"""Rules of experts beside the layout, the losses and the other options of a run."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import flag_of, needs
from megalite.config.kinds.experts import WITHOUT_LOSS, what_has_experts
from megalite.config.layer_specs import PATTERN_FLAG
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.errors import ConfigurationError


def expert_run_problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with experts beside the layout, the losses and the other options of a run."""
    model, parallel = config.model, config.parallel
    tensor, sizes = parallel.tensor_model_parallel_size, parallel.mesh_sizes
    if model.num_experts is None:
        needed = what_has_experts(model)
        yield from needs(parallel, "expert_model_parallel_size", needed)
        yield from needs(config.checkpoint, "moe_use_upcycling", needed)
        yield from needs(config.training, "moe_record_routing moe_replay_routing", needed)
        return
    if tensor > 1 and not parallel.sequence_parallel:
        yield f"--num-experts with --tensor-model-parallel-size {tensor} needs --sequence-parallel"
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if len(kinds) == len(weights) and len(kinds) > 1:  # a single one is idle
        for kind, weight in zip(kinds, weights, strict=True):
            if not weight and kind not in WITHOUT_LOSS:
                yield f"--moe-router-load-balancing-type {kind} does nothing with --moe-aux-loss-coeff 0: drop it"
    if model.hybrid_layer_pattern is not None:
        yield from needs(config.checkpoint, "moe_use_upcycling", f"the flags of a GPT, without {PATTERN_FLAG}")
    if model.moe_latent_size is not None:
        yield from needs(config.checkpoint, "moe_use_upcycling", "experts of the full width, without --moe-latent-size")
    feed_forwards = _feed_forwards(model)
    if "moe" not in feed_forwards:
        if model.hybrid_layer_pattern is not None:  # reported by `relation_problems`
            return
        yield f"--moe-layer-freq {model.moe_layer_freq} gives no layer experts: drop --num-experts"
        return
    if model.num_experts % sizes["expert_parallel_size"]:
        ranks = f"--expert-model-parallel-size {sizes['expert_parallel_size']}"
        yield f"--num-experts {model.num_experts} is not divisible by {ranks}"
    if model.expert_ffn_size % sizes["expert_tensor_parallel_size"]:
        yield from _uneven_experts(config, "dense" in feed_forwards)
    shared = model.moe_shared_expert_intermediate_size or 0
    if shared % tensor:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by --tensor-model-parallel-size {tensor}"
        )


def _uneven_experts(config: RunConfig, has_dense_layers: bool) -> Iterator[str]:
    """Yield that the ranks of an expert do not divide its width, unless the line on dense layers says the same."""
    own, parallel = config.model.moe_ffn_hidden_size, config.parallel
    width = f"{flag_of('ffn_hidden_size' if own is None else 'moe_ffn_hidden_size')} {config.model.expert_ffn_size}"
    ranks = parallel.expert_tensor_parallel_size
    if ranks is not None:
        yield f"{width} is not divisible by --expert-tensor-parallel-size {ranks}"
    elif own is not None or not has_dense_layers:
        tensor = parallel.tensor_model_parallel_size
        yield (
            f"{width} is not divisible by --tensor-model-parallel-size {tensor}: --expert-tensor-parallel-size 1 "
            "does not split experts"
        )


def _feed_forwards(model: ModelConfig) -> set[str]:
    """Return the kinds of feed-forward layers of the network; all kinds if the layers are not known."""
    try:
        return {layer.feed_forward for layer in model.all_layers if layer.feed_forward is not None}
    except ConfigurationError:  # reported by `relation_problems`
        return {"dense", "moe"}
