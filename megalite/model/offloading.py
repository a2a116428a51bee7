"""Choice of the layers and modules of a GPT whose saved tensors go to the host, as Megatron-LM's flags name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from torch import nn

from megalite.config.offload import MODULES_OF_EXPERTS, OffloadConfig, OffloadModule
from megalite.model.attention import Attention
from megalite.model.block import Block, run_layers
from megalite.model.gpt import GPT
from megalite.model.latent_attention import LatentAttention
from megalite.model.moe import Experts, MoE
from megalite.model.recurrent import RecurrentCore
from megalite.offload.activations import ActivationOffload, around, within_module
from megalite.offload.transfers import make_transfers

Chosen = Mapping[int, Sequence[OffloadModule]]
"""Modules of the offloaded layers of a chunk, by the layer's number in it; none: it offloads all that it saves."""


class _OffloadedCore:
    """Core of attention whose saved tensors are offloaded."""

    def __init__(self, offload: ActivationOffload, core: Any) -> None:
        self.core, self.attend = core, within_module(offload, core.__call__)

    def __call__(self, *arguments: Any) -> Any:
        return self.attend(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


def offload_layers(chunks: Sequence[GPT], options: OffloadConfig) -> ActivationOffload:
    """Let the layers of a rank's chunks offload what they save for backward, as the options say."""
    fine = options.fine_grained_activation_offloading
    chosen = chosen_modules(chunks, options) if fine else first_layers(chunks, options.cpu_offloading_num_layers)
    offload = ActivationOffload(
        make_transfers(chunks[0].mesh.device),
        chunks,
        [sorted(layers) for layers in chosen],
        ends=[number for number, chunk in enumerate(chunks) if _last(chunk) in chosen[number]],
        minimum=options.min_offloaded_tensor_size if fine else 0,
        retains=fine or options.cpu_offloading_retain_pinned_cpu_buffers,
    )
    for number, (chunk, layers) in enumerate(zip(chunks, chosen, strict=True)):
        recomputed = _recomputed(chunk)
        for index, modules in layers.items():
            if index not in recomputed:
                context = partial(offload.around_layer, number, index, everything=not modules)
                around(chunk.layers[index], context)
                for module in modules:
                    _offload_module(offload, chunk.layers[index], module)
        if recomputed & layers.keys():
            chunk.recomputed = _around_recomputation(offload, number, chunk, layers)
    return offload


def first_layers(chunks: Sequence[GPT], count: int) -> list[Chosen]:
    """Return the first layers of a rank. Of layers that are recomputed together, the first one saves their input."""
    chosen: list[Chosen] = []
    for chunk in chunks:
        own = range(min(count, len(chunk.layers)))
        count -= len(own)
        kept = set(own).difference(*(range(start + 1, stop) for start, stop, again in _spans(chunk) if again))
        if chunk.embedding is None and 0 in _recomputed(chunk):
            kept.discard(0)  # its input is that of the stage, which the engine keeps
        chosen.append(dict.fromkeys(sorted(kept), ()))
    return chosen


def chosen_modules(chunks: Sequence[GPT], options: OffloadConfig) -> list[Chosen]:
    """Return the modules of each chunk's layers: the given share of the rank's modules, the first in forward."""
    found: list[tuple[int, int, OffloadModule]] = []
    for number, chunk in enumerate(chunks):
        for start, stop, recomputed in _spans(chunk):
            for index in range(start, stop) if not recomputed else ():
                there = _modules_of(_block(chunk.layers[index]))
                chosen = [module for module in get_args(OffloadModule) if module in options.offload_modules]
                found += [(number, index, module) for module in chosen if module in there]
    # As in Megatron-LM: the number that stays is rounded down.
    staying = int(len(found) * (1 - options.activation_offload_fraction))
    going: list[dict[int, list[OffloadModule]]] = [{} for _ in chunks]
    for number, index, module in found[: len(found) - staying]:
        going[number].setdefault(index, []).append(module)
    return list(going)


def _around_recomputation(offload: ActivationOffload, number: int, chunk: GPT, chosen: Chosen) -> Callable[..., Any]:
    """Return what runs layers and offloads their input, if the first of them is among the chosen ones."""
    run, index_of = chunk.recomputed, {id(layer): index for index, layer in enumerate(chunk.layers)}

    def recomputed(function: Any, *arguments: Any) -> Any:
        # Depths of multi-token prediction are recomputed, too, and are none of the chunk's layers.
        index = index_of[id(arguments[0][0])] if function is run_layers else None
        if index is None or index not in chosen:
            return run(function, *arguments)
        with offload.around_layer(number, index, arguments[1:], everything=True):
            return run(function, *arguments)

    return recomputed


def _spans(chunk: GPT) -> list[tuple[int, int, bool]]:
    return chunk.recompute.spans(len(chunk.layers))


def _recomputed(chunk: GPT) -> set[int]:
    """Return the first of each run of layers that are recomputed together."""
    return {start for start, _, recomputed in _spans(chunk) if recomputed}


def _last(chunk: GPT) -> int:
    """Return the last layer of a chunk, or the first of those that are recomputed together with it; -1: it has none."""
    return max((start if recomputed else stop - 1 for start, stop, recomputed in _spans(chunk)), default=-1)


def _block(layer: nn.Module) -> Block:
    assert isinstance(layer, Block)
    return layer


def _modules_of(block: Block) -> Mapping[OffloadModule, nn.Module]:
    """Return the modules of a layer that may offload what they save. Recurrent layers have the parts of attention."""
    found: dict[OffloadModule, nn.Module | None] = {"attn_norm": block.input_norm, "mlp_norm": block.mlp_norm}
    mixer: Any = block.attention
    if isinstance(mixer, Attention | LatentAttention):
        first = mixer.query_key_value if isinstance(mixer, Attention) else mixer.down
        found |= {"qkv_linear": first, "core_attn": mixer, "attn_proj": mixer.output}
    elif isinstance(core := getattr(mixer, "core", None), RecurrentCore):
        found |= {"qkv_linear": mixer.input, "core_attn": core, "attn_proj": mixer.output}
    if isinstance(block.mlp, MoE):
        found |= dict.fromkeys(MODULES_OF_EXPERTS, block.mlp.experts)
    return {name: module for name, module in found.items() if module is not None}


def _offload_module(offload: ActivationOffload, layer: nn.Module, name: OffloadModule) -> None:
    """Let a module of a layer offload what it saves."""
    module = _modules_of(_block(layer))[name]
    if isinstance(module, Attention | LatentAttention):
        module.core = _OffloadedCore(offload, module.core)
    elif isinstance(module, RecurrentCore):
        module.run = within_module(offload, module.run)  # type: ignore[method-assign]
    elif name == "expert_fc1":
        assert isinstance(module, Experts)
        module.up_product = within_module(offload, module.up_product)
    elif name == "moe_act":
        assert isinstance(module, Experts)
        module.down_product = within_module(offload, module.down_product)
    else:
        around(module, lambda arguments: offload.around_module())
