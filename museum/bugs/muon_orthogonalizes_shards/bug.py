from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from megalite.optim import muon
from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --optimizer muon"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def own_part(matrix: Tensor, group: Group) -> Tensor:
    return matrix  # zeros in the place of the others' parts, which change nothing


def wrong() -> AbstractContextManager[Any]:
    alone = SimpleNamespace(all_reduce_=own_part, all_to_all=collectives.all_to_all)
    return mock.patch.object(muon, "collectives", alone)
