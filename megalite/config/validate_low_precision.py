"""Check of the options of matrix products in few bits, with those of other sections; and what a start tells of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from megalite.config.fields import needs
from megalite.config.kinds.kind import Width
from megalite.config.kinds.table import widths
from megalite.config.low_precision import BLOCKS, RecipeName
from megalite.config.run import RunConfig


def low_precision_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    chosen, model, parallel = config.low_precision, config.model, config.parallel
    if chosen.fp8_format is None:
        names, instead = "fp8_recipe fp8_wgrad fp8_param_gather activation_func_fp8_input_store", "--fp8-format"
        yield from needs(chosen, names, instead if chosen.fp4_format is None else f"{instead} in place of --fp4-format")
    if not chosen.first_last_layers_bf16:
        names = "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        yield from needs(chosen, names, "--first-last-layers-bf16")
    elif not any(chosen.is_rounded(layer, model.num_layers) for layer in range(model.num_layers)) and chosen.recipe:
        yield f"--first-last-layers-bf16 leaves none of {model.layers_flag} to {chosen.flag}: drop it, or leave fewer"
    if chosen.recipe is None:
        return
    flag, block = chosen.flag, BLOCKS[chosen.recipe]
    if None not in (chosen.fp8_format, chosen.fp4_format):
        yield "--fp8-format and --fp4-format are two ways to multiply: choose one"
    if chosen.fp8_format == "hybrid" and chosen.recipe == "mxfp8":
        yield f"--fp8-format hybrid with {flag}: training diverges with gradients in e5m2: give e4m3"
    if config.training.fp16:
        yield f"--fp16 with {flag}: small gradients would be lost twice: train in --bf16"
    if (parts := config.training.mlp_chunks_for_training) > 1 and (chosen.recipe == "tensorwise" or chosen.fp8_wgrad):
        named = flag if chosen.recipe == "tensorwise" else "--fp8-wgrad"
        yield f"{named} with --mlp-chunks-for-training {parts}: each part would have its own scales: drop one of them"
    if chosen.fp8_param_gather:
        yield from _gather_problems(config)
    tensor = parallel.tensor_model_parallel_size
    if tensor > 1:
        for width in widths(model):
            yield from width.problems(flag, block, tensor, "--tensor-model-parallel-size")
    if model.num_experts is not None and chosen.recipe != "tensorwise":
        width = Width(f"--moe-ffn-hidden-size {model.expert_ffn_size}", model.expert_ffn_size)
        if (ranks := parallel.mesh_sizes["expert_tensor_parallel_size"]) > 1:
            yield from width.problems(flag, block, ranks, "--expert-tensor-parallel-size")


def _gather_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each reason why codes cannot be gathered in place of weights."""
    stage, recipe = config.parallel.zero_stage, config.low_precision.recipe
    if stage != 3:
        yield (
            "--fp8-param-gather needs --data-parallel-sharding-strategy optim_grads_params (ZeRO 3), not ZeRO "
            f"{stage}: ranks of the other stages keep weights, and round them where they are"
        )
    if recipe == "mxfp8":
        yield (
            "--fp8-param-gather with --fp8-recipe mxfp8: its two products have codes of their own, together as many "
            "bytes as weights in bf16: give --fp8-recipe blockwise, or drop it"
        )
    if config.adapters.use_dora:
        yield "--fp8-param-gather with --use-dora: lengths of rows follow from the values of weights: drop one of them"


def low_precision_notes(config: RunConfig) -> tuple[str, ...]:
    """Return what a start tells of products in few bits."""
    chosen, found = config.low_precision, []
    if chosen.fp8_recipe is None and chosen.fp4_format is None:
        found.append(
            f"note: {chosen.flag}, since no recipe is given: Megatron-LM's default, delayed, would follow the layout"
        )
    if chosen.fp8_wgrad and chosen.recipe != "tensorwise":
        block, samples = BLOCKS[cast(RecipeName, chosen.recipe)], config.training.micro_batch_size
        run = _run(config)
        same = "and is one, as on each layout that has the same numbers"
        found.append(
            f"note: --fp8-wgrad: blocks of {block} of weight gradients run along tokens: {run} consecutive tokens of a "
            f"sample on a rank x --micro-batch-size {samples} = {run * samples}, which should be a multiple of {block}"
            f", {same if run * samples % block == 0 else 'and is none: another layout has other numbers'}"
        )
    elif not chosen.fp8_wgrad and config.adapters.lora_rank is None:
        way = "" if chosen.fp8_format is None else ": --fp8-wgrad does it"
        found.append(
            f"note: {chosen.flag}: weight gradients are products of rounded inputs and of gradients that are not, "
            f"which Megatron-LM rounds, too{way}"
        )
    if config.model.num_experts is not None and chosen.recipe == "tensorwise":
        found.append(
            f"note: {chosen.flag}: experts multiply in {config.training.dtype}, since their rows come from "
            "micro-batches of several ranks: --fp8-recipe blockwise rounds them, too"
        )
    return tuple(found)


def _run(config: RunConfig) -> int:
    """Return how many consecutive tokens of a sample a rank has at least, in some layer.

    A context-parallel rank has chunks, and with sequence parallelism tensor-parallel ranks cut what it has.
    """
    parallel, length = config.parallel, config.data.seq_length
    if (ranks := parallel.context_parallel_size) > 1:
        length //= ranks
        chunk = length // (parallel.chunks_per_rank(config.data.seq_length) or 2)
    else:
        chunk = length
    parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return math.gcd(chunk, length // parts)
