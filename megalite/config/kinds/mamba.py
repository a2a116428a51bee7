"""Mamba-2 layer: costs and rules."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.kinds.kind import Kind, Split, Width, in_pattern
from megalite.config.layer_specs import MAMBA_LETTER
from megalite.config.model import ModelConfig


def _weights(model: ModelConfig) -> int:
    heads, inner = model.mamba_heads, model.mamba_heads * model.mamba_head_dim
    return model.hidden_size * (3 * inner + 2 * model.mamba_num_groups * model.mamba_state_dim + heads)


def _products(model: ModelConfig, seen: float) -> float:
    """Sum up: within a chunk, a token meets half of it on average; between chunks, each state twice."""
    heads, width, state = model.mamba_heads, model.mamba_head_dim, model.mamba_state_dim
    shared = model.mamba_num_groups * state
    met = min(model.mamba_chunk_size / 2, seen)
    convolution = model.mamba_conv_kernel_dim * (heads * width + 2 * shared)
    return _weights(model) + convolution + met * (shared + heads * width) + 2 * heads * width * state


def _problems(model: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with the sizes of Mamba-2 layers."""
    heads, width, groups = model.mamba_heads, model.mamba_head_dim, model.mamba_num_groups
    if model.mamba_num_heads is None and 2 * model.hidden_size % width:
        yield (
            f"twice --hidden-size {model.hidden_size} is not a multiple of --mamba-head-dim {width}: give "
            "--mamba-num-heads"
        )
    elif heads % groups:
        of = "" if model.mamba_num_heads is not None else f" (2 x --hidden-size / --mamba-head-dim {width})"
        yield f"--mamba-num-heads {heads}{of} is not a multiple of --mamba-num-groups {groups}"
    if model.mamba_dt_max is not None and model.mamba_dt_max < model.mamba_dt_min:
        yield f"--mamba-dt-max {model.mamba_dt_max} is less than --mamba-dt-min {model.mamba_dt_min}"


def _splits(model: ModelConfig) -> list[Split]:
    return [Split("Mamba-2 heads", model.mamba_heads, groups=("--mamba-num-groups", model.mamba_num_groups))]


def _widths(model: ModelConfig) -> list[Width]:
    heads, width, groups = model.mamba_heads, model.mamba_head_dim, model.mamba_num_groups
    name, state = "--mamba-num-groups", model.mamba_state_dim
    return [
        Width(f"the step of each of --mamba-num-heads {heads}", heads),
        Width(f"--mamba-num-heads {heads} x --mamba-head-dim {width}", heads * width),
        Width(f"{name} {groups} x --mamba-state-dim {state}", groups * state, (name, groups)),
    ]


MAMBA = Kind(
    _weights,
    _products,
    "mamba_*",
    lambda model: in_pattern("a Mamba-2 layer", MAMBA_LETTER),
    _problems,
    _splits,
    _widths,
)
