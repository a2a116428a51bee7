"""Check of the options of adapters and frozen weights, with those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import given, needs
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
    if model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate:
        yield "--lora-rank leaves the biases of routers as they are: give --moe-router-bias-update-rate 0"
    if model.balances_by_quantiles:
        yield "--lora-rank leaves routers as they are: drop --moe-router-load-balancing-type quantile_balancing"
    if not config.synchronization.is_plain:
        yield "--lora-rank needs one update of a step on all ranks: drop the flags of another synchronization"
    for other in given(config.checkpoint, "moe_use_upcycling resize_vocabulary"):
        yield f"{other} changes the weights that --lora-rank adapts: do it in a run before, or drop one of them"
