"""A rank's part of samples that are cut along their sequences, for context parallelism of plain modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from megalite.errors import ConfigurationError, DataError, MegaliteError
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sequence import SequenceLayout, zigzag

SequenceDims = Mapping[str | int, int]
"""The dimension of a batch's field that is a sequence, by the field's name or its place in a tuple."""
MIXES_TOKENS = (nn.MultiheadAttention, nn.RNNBase)
CONTEXT_PARALLEL = "context_parallel"
"""Attribute of a plain module: false if what it gets is not cut."""


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


def check_mixes_no_tokens(modules: Iterable[nn.Module]) -> None:
    """Check that no plain attention or recurrent layer is there, which would see a part of each sequence as all of it.

    Raises:
        MegaliteError: there is one without the attribute `context_parallel = False`.
    """
    for number, module in enumerate(modules):
        for name, part in module.named_modules():
            if isinstance(part, MIXES_TOKENS) and getattr(part, CONTEXT_PARALLEL, True):
                raise MegaliteError(
                    f"{name or type(part).__name__} of stage {number} is a {type(part).__name__}, which sees only this "
                    "rank's part of a sequence with Layout(cp=...): use megalite.ParallelAttention, or give the module "
                    "the attribute context_parallel = False if its input is whole on every rank"
                )
