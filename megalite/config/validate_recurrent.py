"""Rules of recurrent layers and short convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.layer_specs import CONVOLUTION_LETTER, DELTA_LETTER, KIMI_LETTER, MAMBA_LETTER, PATTERN_FLAG
from megalite.config.model import ModelConfig


def recurrent_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each option of recurrent layers that contradicts another, or is for a layer not there."""
    variant = model.experimental_attention_variant
    if variant is None:
        yield from needs(model, "linear_attention_freq", "--experimental-attention-variant gated_delta_net")
    elif model.linear_attention_freq is None:
        yield f"--experimental-attention-variant {variant} needs --linear-attention-freq, for the layers that have it"
    kinds = model.kinds
    if not kinds:  # reported by `relation_problems`
        return
    if "mamba" not in kinds:
        yield from needs(model, "mamba_*", f"a Mamba-2 layer, {MAMBA_LETTER} in {PATTERN_FLAG}")
    else:
        yield from _mamba(model)
    if "kimi_delta" not in kinds:
        yield from needs(model, "kda_*", f"Kimi delta attention, {KIMI_LETTER} in {PATTERN_FLAG}")
    if model.kda_lower_bound is not None and not -math.inf < model.kda_lower_bound < 0:
        yield f"--kda-lower-bound {model.kda_lower_bound} is not below 0: no decay lets a state grow"
    if (chunk := model.kda_chunk_size) & (chunk - 1):
        yield f"--kda-chunk-size {chunk} is not a power of two"
    if "short_convolution" not in kinds:
        yield from needs(model, "short_conv_*", f"a short convolution, {CONVOLUTION_LETTER} in {PATTERN_FLAG}")
    names = "linear_num_* linear_key_* linear_value_* linear_conv_* linear_allow_* linear_chunk_*"
    if "gated_delta" in kinds:
        if (values := model.linear_num_value_heads) % (keys := model.linear_num_key_heads):
            yield f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}"
    elif variant is None:
        yield from needs(model, names, f"a gated delta net, {DELTA_LETTER} in {PATTERN_FLAG}")
    elif model.linear_attention_freq is not None:
        freq = f"--linear-attention-freq {model.linear_attention_freq}"
        yield from needs(model, names, f"a gated delta net, but {freq} leaves all layers attention")


def _mamba(model: ModelConfig) -> Iterator[str]:
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


def uneven_recurrent_widths(model: ModelConfig, ranks: int) -> Iterator[str]:
    """Yield a line for each kind of recurrent layer whose heads so many tensor-parallel ranks cannot share."""
    kinds, flag = model.kinds, f"--tensor-model-parallel-size {ranks}"
    sizes = []
    if "mamba" in kinds:
        sizes.append(("Mamba-2 heads", model.mamba_heads, "--mamba-num-groups", model.mamba_num_groups))
    if "gated_delta" in kinds:
        heads, keys = model.linear_num_value_heads, model.linear_num_key_heads
        sizes.append(("heads of the gated delta net", heads, "--linear-num-key-heads", keys))
    if "kimi_delta" in kinds:
        sizes.append(("heads of Kimi delta attention", model.kda_num_heads, "--kda-num-heads", model.kda_num_heads))
    if "short_convolution" in kinds:
        sizes.append(("channels of the short convolution", model.hidden_size, "--hidden-size", model.hidden_size))
    for what, heads, name, groups in sizes:
        if heads % ranks:
            yield f"{flag} does not divide the {what}, {heads}"
        elif groups % ranks and ranks % groups:
            yield f"{flag} is neither a divisor nor a multiple of {name} {groups}: ranks cannot share them evenly"
