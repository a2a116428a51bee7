"""Check of the options of adapters and frozen weights, with those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.adapters import SHORT_NAMES, AdaptersConfig, is_target
from megalite.config.fields import flag_of, given, needs
from megalite.config.model import ModelConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.run import RunConfig


def adapter_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    adapters, model = config.adapters, config.model
    if adapters.lora_rank is None:
        names = "lora_alpha lora_dropout lora_target_modules use_rslora use_dora"
        yield from needs(adapters, names, "--lora-rank")
    if not adapters.lora_target_modules:
        yield "--lora-target-modules names nothing to adapt: give names, or leave it out for all matrices"
    flag = "--lora-rank" if adapters.lora_rank is not None else "--freeze"
    if adapters.lora_rank is None and not adapters.freeze:
        return
    if model.trains_indexers or model.trains_indexers_alone:
        yield f"{flag} and a loss or a stage of indexers, which say themselves what is trained: drop one of them"
    if model.qk_clip:
        yield f"{flag} and --qk-clip, which scales weights after each update, and these are frozen: drop one of them"
    if adapters.lora_rank is None:
        return
    if adapters.freeze:
        yield "--lora-rank freezes all weights but the adapters: drop --freeze"
    if adapters.lora_dropout and config.training.mlp_chunks_for_training > 1:
        yield "--lora-dropout does not know the places of parts of a sequence: drop it, or --mlp-chunks-for-training"
    if adapters.use_dora and adapters.lora_dropout:
        yield "--use-dora normalizes weights, which have no dropout: give --lora-dropout 0"
    yield from _of_layers(adapters, model, config.parallel)
    yield from _of_tables(adapters, model)
    if model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate:
        yield "--lora-rank leaves the biases of routers as they are: give --moe-router-bias-update-rate 0"
    if model.balances_by_quantiles:
        yield "--lora-rank leaves routers as they are: drop --moe-router-load-balancing-type quantile_balancing"
    if not config.synchronization.is_plain:
        yield "--lora-rank needs one update of a step on all ranks: drop the flags of another synchronization"
    for other in given(config.checkpoint, "moe_use_upcycling resize_vocabulary"):
        yield f"{other} changes the weights that --lora-rank adapts: do it in a run before, or drop one of them"


def _of_layers(adapters: AdaptersConfig, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line for each option that a layer which is to have adapters does not compute."""

    def adapts(names: str) -> bool:
        every = (f"layers.{layer}.{name}" for layer in range(model.num_layers) for name in names.split())
        return any(is_target(name, adapters.lora_target_modules) for name in every)

    others = "leave the flag out, or name what to adapt without them (--lora-target-modules)"
    if model.num_experts is not None and adapts("moe.gate moe.up moe.down"):
        for name in ("use_dora", "lora_dropout"):
            if getattr(adapters, name):
                yield f"{flag_of(name)}: experts (--num-experts) have plain LoRA alone: {others}"
    if adapters.lora_dropout and _latents_travel(model, parallel) and adapts("attention.key_value_up"):
        yield (
            "--lora-dropout: latents travel between the ranks of --context-parallel-size, and the adapters of "
            f"key_value_up are merged before: {others}"
        )


def _latents_travel(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Tell if context-parallel ranks send latents, and not the keys and values that are made of them."""
    if "latent_attention" not in model.kinds or parallel.context_parallel_size == 1:
        return False
    rotated, heads = model.qk_pos_emb_head_dim, model.num_attention_heads // parallel.tensor_model_parallel_size
    of_heads = 2 * heads * max(model.qk_head_dim + rotated, model.v_head_dim)
    return model.kv_lora_rank + rotated < of_heads and any(parallel.head_ranks[w] == 1 for w in parallel.cp_comm_type)


def _of_tables(adapters: AdaptersConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a line for each reason for which the embedding or the output layer cannot have the adapters."""
    untie = "--untie-embeddings-and-output-weights"
    tied = not model.untie_embeddings_and_output_weights
    for target in adapters.lora_target_modules:
        name, flag = SHORT_NAMES.get(target, target), f"--lora-target-modules {target}"
        if name not in ("word_embeddings", "output_layer"):
            continue
        if tied:
            yield f"{flag}: the embedding and the output layer are one weight: leave it out, or give {untie}"
        elif name == "word_embeddings" and model.depths:
            yield f"{flag}: depths of prediction have this weight, too: leave it out, or drop --mtp-num-layers"
        elif name == "output_layer" and model.depths and model.mtp_detach_heads:
            yield f"{flag}: --mtp-detach-heads leaves the output layer as it is: drop one of them"
        if adapters.lora_dropout:
            yield f"--lora-dropout: {target} has adapters without it alone: leave one of them out"
