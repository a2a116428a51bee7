"""A rank's part of samples that are cut along their sequences, for context parallelism of plain modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from megalite.errors import ConfigurationError, DataError, MegaliteError
from megalite.modules.batch_norm import SyncBatchNorm
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sequence import SequenceLayout, zigzag

SequenceDims = Mapping[str | int, int]
"""The dimension of a batch's field that is a sequence, by the field's name or its place in a tuple."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MIXES_TOKENS = (
    *(nn.MultiheadAttention, nn.RNNBase),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers that compute with several tokens of a sample. So do convolutions, unless their kernel has one element."""
CONTEXT_PARALLEL = "context_parallel"
"""Attribute of a module: false if what it gets is not cut, true if it joins the parts."""


def layout_of(mesh: ParallelMesh, length: int) -> SequenceLayout:
    """Return the tokens of each context-parallel rank, of samples with `length` tokens. Raises ValueError."""
    ranks = mesh.size("cp")
    return SequenceLayout.cut(length, zigzag(ranks), mesh.coordinate("cp"))


def own_part(values: Any, dims: SequenceDims, mesh: ParallelMesh) -> Any:
    """Return a batch in which the fields of `dims` are this context-parallel rank's part of them.

    Raises:
        ConfigurationError: the batch has no such field, or the field no such dimension.
        DataError: a sequence cannot be cut into equal chunks.
    """
    if not dims:
        return values
    if not isinstance(values, Mapping | tuple | list):
        raise ConfigurationError(
            f"sequence_dims={dict(dims)}: a batch is {type(values).__name__}: let collate return a mapping or a tuple"
        )
    fields: dict[Any, Any] = dict(values if isinstance(values, Mapping) else enumerate(values))
    for field, dimension in dims.items():
        if field not in fields:
            raise ConfigurationError(
                f"sequence_dims names {field!r}, and a batch has the fields {', '.join(map(repr, fields))}: name "
                "fields of a mapping, or give their places in a tuple"
            )
        fields[field] = _own(field, fields[field], dimension, mesh)
    if isinstance(values, Mapping):
        return fields
    made = fields.values()
    return type(values)(*made) if hasattr(values, "_fields") else type(values)(made)


def _own(field: str | int, value: Any, dimension: int, mesh: ParallelMesh) -> Tensor:
    """Return this rank's part of a field along its dimension of the sequence.

    Raises ConfigurationError if there is no such dimension, and DataError if it does not divide evenly.
    """
    if not isinstance(value, Tensor) or not -value.dim() <= dimension < value.dim():
        shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigurationError(
            f"sequence_dims={{{field!r}: {dimension}}}: the field is {shown} in a batch: give a dimension of a tensor"
        )
    try:
        return layout_of(mesh, value.shape[dimension]).own(value, dimension)
    except ValueError as error:
        raise DataError(
            f"field {field!r}: {error}, two for each of cp={mesh.size('cp')} ranks: pad it in collate"
        ) from error


ADVICE = (
    "which sees only this rank's part of a sequence with Layout(cp=...): use megalite.ParallelAttention, "
    'megalite.SyncBatchNorm(axes=("dp", "cp")) or megalite.gather_sequence. Give the module the attribute '
    "context_parallel = False if its input is whole on every rank, or no sequence"
)


def check_mixes_no_tokens(modules: Iterable[nn.Module]) -> None:
    """Check that no plain layer is there that would see a part of each sequence as all of it.

    Raises:
        MegaliteError: there is one without the attribute `context_parallel = False`.
    """
    for number, module in enumerate(modules):
        for name, part in module.named_modules():
            if _mixes_tokens(part) and getattr(part, CONTEXT_PARALLEL, True):
                where = f"{name or type(part).__name__} of stage {number}"
                raise MegaliteError(f"{where} is a {type(part).__name__}, {ADVICE}")


def _mixes_tokens(module: nn.Module) -> bool:
    if isinstance(module, SyncBatchNorm):
        return "cp" not in module.axes
    if isinstance(module, CONVOLUTIONS):
        return any(size > 1 for size in module.kernel_size)
    return isinstance(module, MIXES_TOKENS)


class PlainAttentionWatch(TorchFunctionMode):
    """Watch for calls of scaled_dot_product_attention by modules that do not join the parts of sequences.

    `megalite.ParallelAttention` does, and modules with `context_parallel = False` have whole ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> PlainAttentionWatch:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            register_module_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _end(self) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        joined = any(hasattr(each, CONTEXT_PARALLEL) for each in self._running)
        if func is F.scaled_dot_product_attention and not joined:
            raise MegaliteError(f"{type(self._running[-1]).__name__} calls scaled_dot_product_attention, {ADVICE}")
        return func(*args, **(kwargs or {}))
