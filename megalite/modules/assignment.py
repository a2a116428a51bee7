"""Assignment of parameters to the optimizers of a run that has several, by their names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from megalite.errors import ConfigurationError
from megalite.optim.layout import unique_parameters


def assign(modules: Sequence[nn.Module], optimizers: Collection[str]) -> None:
    """Write into the record of each trained parameter the name of its optimizer.

    Args:
        modules: all stages, whose parameters have records.
        optimizers: names, each of which is also a pattern of names of parameters, or the beginning of them up to a dot.

    Raises:
        ConfigurationError: a parameter is matched by none or by several, or one matches no parameter.
    """
    found = dict.fromkeys(optimizers, 0)
    for parameter in (each for module in modules for each in unique_parameters(module) if each.requires_grad):
        pieces = parameter.sharding.pieces
        of_pieces = {tuple(each for each in optimizers if _matches(piece.tensor.name, each)) for piece in pieces}
        matching = next(iter(of_pieces)) if len(of_pieces) == 1 else ()
        if len(matching) != 1:
            name, given = pieces[0].tensor.name, ", ".join(map(repr, optimizers))
            many = (
                f"is matched by {' and '.join(map(repr, matching))}" if matching else f"is matched by none of {given}"
            )
            raise ConfigurationError(f"optimizer=...: the parameter {name} {many}, and one optimizer updates it")
        found[matching[0]] += 1
        named = tuple(replace(each, tensor=replace(each.tensor, optimizer=matching[0])) for each in pieces)
        parameter.sharding = replace(parameter.sharding, pieces=named)
    for pattern, parameters in found.items():
        if not parameters:
            raise ConfigurationError(f"optimizer=...: {pattern!r} matches no parameter that is trained")


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
