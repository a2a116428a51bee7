"""Rules for the tensors of recurrent layers in files of Hugging Face models."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise

from megalite.config import ModelConfig
from megalite.conversion.mapping import MappedBox, Rule, axes_of, axis_lengths, linear, norm


def in_a_row(*parts: tuple[str, str]) -> Callable[[ModelConfig], tuple[MappedBox, ...]]:
    """Return the boxes of tensors that follow each other along the first axis of a tensor of the files.

    `parts`: each one's name, and the pattern of its view of its part.
    """

    def pieces(model: ModelConfig) -> tuple[MappedBox, ...]:
        lengths = axis_lengths(model)
        rows = [math.prod(lengths[axis] for axis in axes_of(pattern)[0]) for _, pattern in parts]
        bounds = pairwise(accumulate(rows, initial=0))
        return tuple(
            MappedBox(tensor, (slice(start, stop),), pattern=pattern)
            for (tensor, pattern), (start, stop) in zip(parts, bounds, strict=True)
        )

    return pieces


# ------------------------------------------------------------------------------------------------ Mamba-2

_HEADS, _GROUPS = ("mamba_heads", "mamba_width"), ("mamba_groups", "mamba_state")
_CONVOLVED = (("x", _HEADS), ("B", _GROUPS), ("C", _GROUPS))


def mamba(block: str) -> tuple[Rule, ...]:
    """Return the rules for a Mamba-2 layer."""

    def part(name: str, axes: tuple[str, str], last: str = "") -> tuple[str, str]:
        return f"mamba.{name}", f"({' '.join(axes)}){last} -> {' '.join(axes)}{last}"

    projections = [part("z", _HEADS, " hidden"), *(part(name, axes, " hidden") for name, axes in _CONVOLVED)]
    projections.append(("mamba.dt", "mamba_heads hidden -> mamba_heads hidden"))
    taps = [part(f"conv_{name}", axes, " mamba_taps") for name, axes in _CONVOLVED]
    heads = "mamba_heads -> mamba_heads"
    return (
        Rule(f"{block}.in_proj.weight", "mamba_rows hidden -> mamba_rows hidden", in_a_row(*projections)),
        Rule(
            f"{block}.conv1d.weight",
            "mamba_channels one mamba_taps -> mamba_channels (one mamba_taps)",
            in_a_row(*taps),
        ),
        Rule(
            f"{block}.conv1d.bias",
            "mamba_channels -> mamba_channels",
            in_a_row(*(part(f"conv_{name}_bias", axes) for name, axes in _CONVOLVED)),
        ),
        *(Rule(f"{block}.{name}", heads, (MappedBox(f"mamba.{name}"),)) for name in ("A_log", "D", "dt_bias")),
        Rule(
            f"{block}.norm.weight",
            "(mamba_heads mamba_width) -> mamba_heads mamba_width",
            (MappedBox("mamba.norm.weight"),),
        ),
        Rule(
            f"{block}.out_proj.weight",
            "hidden (mamba_heads mamba_width) -> hidden mamba_heads mamba_width",
            (MappedBox("mamba.output"),),
        ),
    )


def norms(file: str, *tensors: str) -> tuple[Rule, ...]:
    """Return the rules for the norm before a half of any of several kinds, which has one name in files."""
    return tuple(rule for tensor in tensors for rule in norm(file, tensor))


# ------------------------------------------------------------------------------------------------ gated delta net

_KEYS, _VALUES = (
    "(key_heads key_width){0} -> key_heads key_width{0}",
    "(value_heads value_width){0} -> value_heads value_width{0}",
)


_PARTS = (("query", _KEYS), ("key", _KEYS), ("value", _VALUES))


def gated_delta(block: str, *projections: Rule, norm: str = "norm", output: str = "out_proj") -> tuple[Rule, ...]:
    """Return the rules for a gated delta net, with these for what projects its input, and for its convolution.

    `norm`, `output`: names of the norm of its heads, and of the output layer.
    """
    heads = "value_heads -> value_heads"
    return (
        *projections,
        *(Rule(f"{block}.{name}", heads, (MappedBox(f"gated_delta.{name}"),)) for name in ("A_log", "dt_bias")),
        Rule(f"{block}.{norm}.weight", "value_width -> value_width", (MappedBox("gated_delta.norm.weight"),)),
        Rule(
            f"{block}.{output}.weight",
            "hidden (value_heads value_width) -> hidden value_heads value_width",
            (MappedBox("gated_delta.output"),),
        ),
    )


def one_convolution(block: str) -> Rule:
    """Return the rule for a convolution of queries, keys and values in a row."""
    return Rule(
        f"{block}.conv1d.weight",
        "delta_channels one delta_taps -> delta_channels (one delta_taps)",
        in_a_row(*((f"gated_delta.conv_{name}", pattern.format(" delta_taps")) for name, pattern in _PARTS)),
    )


def matrices_apart(block: str) -> tuple[Rule, ...]:
    """Return the rules for projections that are all apart (OLMo-Hybrid)."""
    parts = [(f"{name[0]}_proj", name, pattern) for name, pattern in _PARTS] + [("g_proj", "z", _VALUES)]
    parts += [(f"{name[0]}_proj", name, "value_heads{0} -> value_heads{0}") for name in ("alpha", "beta")]
    return tuple(
        Rule(f"{block}.{file}.weight", pattern.format(" hidden"), (MappedBox(f"gated_delta.{name}"),))
        for file, name, pattern in parts
    )


def convolutions_apart(block: str) -> tuple[Rule, ...]:
    """Return the rules for a convolution each of queries, keys and values."""
    taps = "({0} {1}) one delta_taps -> {0} {1} (one delta_taps)"
    keys, values = ("key_heads", "key_width"), ("value_heads", "value_width")
    parts = (("query", keys), ("key", keys), ("value", values))
    return tuple(
        Rule(f"{block}.{name[0]}_conv1d.weight", taps.format(*axes), (MappedBox(f"gated_delta.conv_{name}"),))
        for name, axes in parts
    )


def projections_apart(block: str) -> tuple[Rule, ...]:
    """Return the rules for projections to queries, keys and values in a row, and to the rest apart (Qwen3.5)."""
    gates = (("in_proj_b", "beta"), ("in_proj_a", "alpha"))
    return (
        Rule(
            f"{block}.in_proj_qkv.weight",
            "delta_channels hidden -> delta_channels hidden",
            in_a_row(*((f"gated_delta.{name}", pattern.format(" hidden")) for name, pattern in _PARTS)),
        ),
        Rule(f"{block}.in_proj_z.weight", _VALUES.format(" hidden"), (MappedBox("gated_delta.z"),)),
        *(
            Rule(
                f"{block}.{name}.weight",
                "value_heads hidden -> value_heads hidden",
                (MappedBox(f"gated_delta.{gate}"),),
            )
            for name, gate in gates
        ),
    )


def projections_by_key_head(block: str) -> tuple[Rule, ...]:
    """Return the rules for projections that are together by heads of keys, with those of their values (Qwen3-Next)."""

    def values_of(tensor: str, start: int, stop: int, model: ModelConfig, pattern: str | None) -> list[MappedBox]:
        each = model.linear_num_value_heads // model.linear_num_key_heads
        return [
            MappedBox(f"gated_delta.{tensor}", (head, slice(start, stop)), (head * each,), pattern)
            for head in range(model.linear_num_key_heads)
        ]

    def states(model: ModelConfig) -> tuple[MappedBox, ...]:
        width, each = model.linear_key_head_dim, model.linear_num_value_heads // model.linear_num_key_heads
        query, key, value, z = 0, width, 2 * width, 2 * width + each * model.linear_value_head_dim
        pattern = "(values_by_key value_width) hidden -> values_by_key value_width hidden"
        return (
            MappedBox("gated_delta.query", (slice(None), slice(query, key))),
            MappedBox("gated_delta.key", (slice(None), slice(key, value))),
            *values_of("value", value, z, model, pattern),
            *values_of("z", z, 2 * z - value, model, pattern),
        )

    def gates(model: ModelConfig) -> tuple[MappedBox, ...]:
        each = model.linear_num_value_heads // model.linear_num_key_heads
        return (
            *values_of("beta", 0, each, model, None),
            *values_of("alpha", each, 2 * each, model, None),
        )

    return (
        Rule(
            f"{block}.in_proj_qkvz.weight",
            "(key_heads rows_by_key) hidden -> key_heads rows_by_key hidden",
            states,
        ),
        Rule(
            f"{block}.in_proj_ba.weight",
            "(key_heads gates_by_key) hidden -> key_heads gates_by_key hidden",
            gates,
        ),
    )


# ------------------------------------------------------------------------------------------------ Kimi delta attention

_KIMI_PARTS = ("query", "key", "value")
_KIMI_TAPS = "(kimi_heads kimi_width) kimi_taps -> kimi_heads kimi_width kimi_taps"


def kimi_delta(block: str, decay: str = "") -> tuple[Rule, ...]:
    """Return the rules for Kimi delta attention without its convolutions. `decay`: prefix of what makes decays."""
    heads = "(kimi_heads kimi_width) {0} -> kimi_heads kimi_width {0}"
    first = "kimi_rank hidden -> kimi_rank hidden"
    matrices = [(f"{part[0]}_proj", part, heads.format("hidden")) for part in _KIMI_PARTS]
    for letter, part, prefix in (("f", "decay", decay), ("g", "gate", "")):
        matrices.append((f"{prefix}{letter}_a_proj", f"{part}_a", first))
        matrices.append((f"{prefix}{letter}_b_proj", f"{part}_b", heads.format("kimi_rank")))
    matrices.append(("b_proj", "beta", "kimi_heads hidden -> kimi_heads hidden"))
    matrices.append(("o_proj", "output", "hidden (kimi_heads kimi_width) -> hidden kimi_heads kimi_width"))
    vectors = (
        (f"{decay}A_log", "A_log", "1 1 kimi_heads 1 -> kimi_heads"),
        (f"{decay}dt_bias", "dt_bias", "(kimi_heads kimi_width) -> kimi_heads kimi_width"),
        ("o_norm.weight", "norm.weight", "kimi_width -> kimi_width"),
    )
    named = [*((f"{file}.weight", tensor, pattern) for file, tensor, pattern in matrices), *vectors]
    return tuple(
        Rule(f"{block}.{file}", pattern, (MappedBox(f"kimi_delta.{tensor}"),)) for file, tensor, pattern in named
    )


def kimi_convolutions(block: str, *, together: bool = False) -> tuple[Rule, ...]:
    """Return the rules for its convolutions of queries, keys and values: apart, or in a row."""
    if together:
        parts = [(f"kimi_delta.conv_{part}", _KIMI_TAPS) for part in _KIMI_PARTS]
        rows = "kimi_channels one kimi_taps -> kimi_channels (one kimi_taps)"
        return (Rule(f"{block}.conv1d.weight", rows, in_a_row(*parts)),)
    taps = "(kimi_heads kimi_width) one kimi_taps -> kimi_heads kimi_width (one kimi_taps)"
    return tuple(
        Rule(f"{block}.{part[0]}_conv1d.weight", taps, (MappedBox(f"kimi_delta.conv_{part}"),)) for part in _KIMI_PARTS
    )


# ------------------------------------------------------------------------------------------------ short convolutions


def short_convolution(block: str) -> tuple[Rule, ...]:
    """Return the rules for a short convolution, with biases if the model has them."""
    projections = (MappedBox(f"short_convolution.{part}", (place,)) for place, part in enumerate(("B", "C", "x")))
    return (
        *linear(
            f"{block}.in_proj",
            ("(three channels) hidden -> three channels hidden", "(three channels) -> three channels"),
            *projections,
        ),
        *linear(
            f"{block}.conv",
            ("channels one short_taps -> channels (one short_taps)", "channels -> channels"),
            MappedBox("short_convolution.conv"),
        ),
        *linear(
            f"{block}.out_proj",
            ("hidden channels -> hidden channels", "hidden -> hidden"),
            MappedBox("short_convolution.output"),
        ),
    )
