"""A step of every family on every class of layout has types that fit, on one rank of 16,384."""

from __future__ import annotations

import pytest
from spmd_types import rules
from spmd_types._mesh import set_current_mesh
from spmd_types._mesh_axis import MeshAxis
from spmd_types.types import PerMeshAxisLocalSpmdType as Type
from spmd_types.types import SpmdTypeError

from megalite.conversion.families import FAMILIES
from tests.rank_types.cells import CELLS, CLASSES, Layout, model_of, names_of_families, step
from tests.rank_types.checker import RULES

IN_TURN = 27  # of so many cells, `make test` has about one: each class of layout, and every other family


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=[pytest.mark.wide] * ((2 * row + column) % IN_TURN > 0))
        for row, column, family, kind in CELLS
    ],
)
def test_the_types_of_a_step_fit(family: str, kind: str) -> None:
    step(model_of(family), Layout(**CLASSES[kind]))


def test_every_family_has_a_network() -> None:
    assert set(names_of_families()) == {family.name for family in FAMILIES}


OPERATIONS = {
    "sum": (rules.all_reduce, Type.R),
    "all_gather": (rules.all_gather, Type.R),
    "reduce_scatter": (rules.reduce_scatter, Type.V),
    "all_to_all": (rules.all_to_all, Type.V),
}


@pytest.mark.parametrize("rule", OPERATIONS)
@pytest.mark.parametrize("before", Type)
def test_collectives_do_to_types_what_the_library_says(rule: str, before: Type) -> None:
    axis = MeshAxis.of(8, 1)
    operation, kind = OPERATIONS[rule]
    tensor = rules._make(2, {axis: before}, None)
    with set_current_mesh(frozenset({axis})):
        if before in RULES[rule]:
            assert operation(tensor, axis, src=before, dst=kind) is not None
            assert RULES[rule][before] is kind
        else:
            with pytest.raises(SpmdTypeError):
                operation(tensor, axis, src=before, dst=kind)
