"""Check of the offloading of activations."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.layer_specs import PATTERN_FLAG, kinds_with_core
from megalite.config.offload import MODULES_OF_EXPERTS, OffloadConfig, OffloadModule
from megalite.config.pipeline_layout import layers_of_ranks, stage_layers
from megalite.config.run import RunConfig
from megalite.small_files import shown


def activation_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each relation of the offloading of activations that does not hold."""
    offload = config.offload
    yield from offload_switch_problems(offload)
    if offload.fine_grained_activation_offloading:
        yield from _modules(config)
    if count := offload.cpu_offloading_num_layers:
        most = max(layers_of_ranks(config.model, config.parallel))
        if count >= config.model.num_layers:
            yield (
                f"--cpu-offloading-num-layers {count} must be below {config.model.layers_flag}: at least the last "
                "layer, whose backward follows, stays"
            )
        elif count > most:
            yield (
                f"--cpu-offloading-num-layers {count} is more than the {most} layers of a pipeline rank: give at most "
                f"{most}"
            )


def offload_switch_problems(offload: OffloadConfig) -> Iterator[str]:
    """Yield a line for each option whose switch is off, or that does not go with another."""
    layers = offload.cpu_offloading_num_layers
    if not layers:
        yield from needs(offload, "cpu_offloading_retain_pinned_cpu_buffers", "--cpu-offloading-num-layers")
    if not offload.fine_grained_activation_offloading:
        names = "offload_modules activation_offload_fraction min_offloaded_tensor_size"
        yield from needs(offload, names, "--fine-grained-activation-offloading")
        return
    if layers:
        yield (
            f"--cpu-offloading-num-layers {layers} offloads whole layers, and --fine-grained-activation-offloading "
            "modules: give one of the two"
        )
    if not offload.offload_modules:
        yield "--fine-grained-activation-offloading needs --offload-modules, such as core_attn attn_proj"


def _modules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with --offload-modules, or leaves them nothing to offload."""
    modules, training = config.offload.offload_modules, config.training
    of_experts = [module for module in modules if module in MODULES_OF_EXPERTS]
    kinds = {kind for layer in config.model.layers for kind in layer.kinds}
    # Of depths nothing is offloaded; without any experts, a line below says so.
    experts = "moe" in kinds or config.model.num_experts is None
    there: dict[OffloadModule, bool] = dict.fromkeys(MODULES_OF_EXPERTS, experts)
    normed = [layer for layer in config.model.layers if not layer.output_norm]
    there["attn_norm"] = any(layer.mixer is not None for layer in normed)
    there["mlp_norm"] = any(layer.feed_forward is not None for layer in normed)
    if missing := [module for module in modules if not there.get(module, bool(kinds & kinds_with_core()))]:
        pattern = shown(config.model.hybrid_layer_pattern or "")
        yield f"--offload-modules {' '.join(missing)}: {PATTERN_FLAG} {pattern} has no layer with that: leave it out"
    if "attn_proj" in modules and "core_attn" not in modules:
        yield (
            "--offload-modules attn_proj needs core_attn beside it: what the output layer saves is the core's output, "
            "which the core keeps as well"
        )
    if of_experts and config.model.num_experts is None:
        yield f"--offload-modules {' '.join(of_experts)} needs --num-experts"
    if training.recompute_granularity == "selective" and "moe" in training.recompute_modules and of_experts:
        yield (
            f"--offload-modules {' '.join(of_experts)} with --recompute-modules moe, which saves nothing of experts: "
            "leave one of the two out"
        )
    if training.mlp_chunks_for_training > 1 and "mlp_norm" in modules:
        yield (
            f"--offload-modules mlp_norm with --mlp-chunks-for-training {training.mlp_chunks_for_training}, which "
            "recomputes that norm, so that it saves nothing: leave one of the two out"
        )
    if training.recompute_granularity == "full":
        most = max(stage.layers for stage in stage_layers(config.model, config.parallel))
        if training.recompute_method == "uniform" or (training.recompute_num_layers or 0) >= most:
            yield (
                "--fine-grained-activation-offloading with --recompute-granularity full of all layers, whose modules "
                "save nothing: offload the inputs of the layers by --cpu-offloading-num-layers"
            )
    if config.kernels.compile:
        yield (
            "--fine-grained-activation-offloading with --compile, which makes one piece of a layer's modules: offload "
            "whole layers by --cpu-offloading-num-layers"
        )
