"""A recorded step of a trainer: what its ranks saw of the batch, of modules, of gradients and of parameters.

All readers return a `Trace`. Values are read when they are asked for, so that a trace may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from megalite.extras.verify.evidence import Evidence

Role = Literal[
    "input", "output", "input_gradient", "output_gradient", "parameter", "gradient", "parameter_after", "main_gradient"
]
"""Contents of an entry. Of a module: its inputs and outputs, and the gradients with respect to them. Of a parameter:
its values before the step and after it, and its gradient (main_gradient: as the optimizer gets it, summed)."""
OF_MODULES: tuple[Role, ...] = ("input", "output", "input_gradient", "output_gradient")
LAST = -1
"""Micro-batch of an entry that holds the last one of the step, if the program does not count them."""


@dataclass(frozen=True)
class Split:
    """Cut of a dimension of a logical tensor over ranks, of which a recorded tensor is one part."""

    dimension: int
    axis: str
    """Name of the axis of ranks: tp, cp, dp, ep, etp."""
    index: int
    count: int
    kind: Literal["block", "zigzag"] = "block"
    """zigzag: the dimension is cut into 2 x count chunks, and part i has the chunks i and 2 x count - 1 - i."""


@dataclass(frozen=True)
class Place:
    """Place of a recorded tensor in its logical tensor, as far as the trace says it.

    Attributes:
        dimensions: the meaning of each dimension, one letter each: s sequence, b batch, h features, t tokens (sequence
            and batch in one); empty if the trace does not say.
        splits: the cuts, from the outermost to the innermost.
        partial: axes of ranks over which the tensor is still to be summed.
        offset: first corner of the recorded part in the logical tensor; None if the splits tell it.
    """

    dimensions: str = ""
    splits: tuple[Split, ...] = ()
    partial: tuple[str, ...] = ()
    offset: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Entry:
    """One recorded tensor of one rank.

    Attributes:
        name: the name of the module or parameter in its program, such as decoder.layers.0.mlp.linear_fc1, without
            wrappers such as `module.` and `_orig_mod.`.
        number: the position among the arguments or results of the module; 0 for a parameter, or the number of its part
            if the rank has several.
        micro_batch: the number of the micro-batch on its rank, from 0; `LAST`; 0 for what the whole step has once.
        source: where it stands, for messages: a file, and the key in it.
        read: reads the values.
        place: None if the trace does not say it; the rules of the program then do.
    """

    rank: int
    name: str
    role: Role
    shape: tuple[int, ...]
    source: str
    read: Callable[[], Evidence]
    number: int = 0
    micro_batch: int = 0
    place: Place | None = None


@dataclass(frozen=True)
class RecordedBatch:
    """Micro-batch as a rank saw it, each [batch, tokens of this rank]. What the trace does not have is None.

    `sample_ids`: numbers of the samples among all of the run, [batch], which key megalite's dropout.
    """

    rank: int
    micro_batch: int
    tokens: Tensor
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    sample_ids: Tensor | None = None


@dataclass
class Trace:
    """Record of one step.

    Attributes:
        program: the program whose names and layouts the entries have: megalite, megatron, huggingface, torchtitan, or
            an empty text if only the names can tell.
        format: the kind of files, for messages, such as "Megatron-LM's --save-activations-interval".
        step: number of the step, from 1; None if the trace does not say it.
        coordinates: for each rank that is there, its place on each axis that is known, as (index, count). Axes: tp, pp,
            cp, dp, ep, etp, edp.
        figures: numbers of the step by name: loss, grad_norm, learning_rate, loss_scale, micro_batches, and others that
            the recorder was given. They are as the program logs them.
        notes: what was left out or assumed, a line each.
        gradients_of: how gradients of inputs were recorded. tensors: the gradient of the tensor, from all that read it.
            modules: the part that comes from this module, as `register_full_backward_hook` gives it.
        missing: ranks that the trace should have and lacks.
        dropped: steps that the folder has, too, and that were not asked for.
    """

    program: str
    format: str
    step: int | None
    coordinates: dict[int, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    batches: list[RecordedBatch] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gradients_of: Literal["tensors", "modules"] = "tensors"
    missing: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    def of(self, name: str, role: Role) -> Iterator[Entry]:
        """Yield the entries of a module or a parameter with this role."""
        return (entry for entry in self.entries if entry.name == name and entry.role == role)
