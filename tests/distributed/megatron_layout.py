"""Megatron-LM's own distribution of layers over pipeline stages, from the wheel that `megatron_data` describes."""

from __future__ import annotations

import warnings
from typing import Any

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def stages(cases: list[dict[str, Any]]) -> list[list[tuple[int, int]] | str]:
    """Return first layer and layers of each stage, in order, or an error message, for options of a
    `TransformerConfig`."""
    return [_answer(_stages, case) for case in cases]


def letters(layouts: list[str]) -> list[list[str] | str]:
    """Return the contents of the stages of each layout string, or an error message."""
    return [_answer(_letters, layout) for layout in layouts]


def _answer(function: Any, argument: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(argument)
        except (AssertionError, ValueError) as complaint:
            return f"{complaint}" or "refused"


def _stages(options: dict[str, Any]) -> list[tuple[int, int]]:
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(hidden_size=16, num_attention_heads=4, pipeline_dtype=torch.float32, **options)
    chunks, ranks = config.virtual_pipeline_model_parallel_size or 1, config.pipeline_model_parallel_size
    held = []
    for chunk in range(chunks):
        for rank in range(ranks):
            if config.pipeline_model_parallel_layout is not None:  # its own functions need the rank of the process
                names = [kind.name for kind in config.pipeline_model_parallel_layout.layout[rank][chunk]]
                held.append((sum(layers for _, layers in held), names.count("decoder")))
            else:
                number = chunk if config.virtual_pipeline_model_parallel_size else None
                first = get_transformer_layer_offset(config, number, rank)
                held.append((first, get_num_layers_to_build(config, number, rank)))
    return held


def _letters(layout: str) -> list[str]:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    parsed = PipelineParallelLayerLayout.parse_str_to_list(layout)
    return ["".join(LETTERS[kind.name] for kind in stage) for stage in parsed]
