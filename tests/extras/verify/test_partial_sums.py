"""Terms of a sum that ranks have recorded before it: compared as the sum."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import megalite_trace
from megalite.extras.verify.evidence import Evidence, Sketched, Statistics, Whole
from megalite.extras.verify.partial_sums import complete_entries
from megalite.extras.verify.trace import Entry, Place, Trace

pytestmark = pytest.mark.extra


def sketched(values: Tensor) -> Evidence:
    sketch = megalite_trace.sketch(values)
    return Sketched(
        sketch["shape"], sketch["dtype"], sketch["norm"], sketch["finite"], sketch["projections"], sketch["samples"]
    )


def statistics(values: Tensor) -> Evidence:
    return Statistics(tuple(values.shape), values.dtype, {"norm": float(values.norm())})


def trace_of(terms: dict[int, Evidence], ranks: int) -> Trace:
    trace = Trace("", "a test", 1, {rank: {"tp": (rank, ranks), "dp": (0, 1)} for rank in terms})
    for rank, evidence in terms.items():
        read = partial(_itself, evidence)
        place = Place(partial=("tp",))
        trace.entries.append(Entry(rank, "norm", "output_gradient", evidence.shape, "here", read, place=place))
    trace.entries.append(Entry(0, "norm", "output", (2,), "here", partial(_itself, Whole(torch.ones(2)))))
    return trace


def _itself(evidence: Evidence) -> Evidence:
    return evidence


@pytest.mark.parametrize("kind", [Whole, sketched], ids=["whole", "sketches"])
def test_terms_are_added_up_and_other_entries_stay(kind: type[Whole]) -> None:
    terms = [torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    said: list[str] = []
    found = list(complete_entries(trace_of({rank: kind(term) for rank, term in enumerate(terms)}, 3), said.append))
    assert not said
    (total,) = (entry for entry in found if entry.role == "output_gradient")
    assert any(entry.role == "output" for entry in found)
    truth = torch.stack([term.double() for term in terms]).sum(0)
    # fp32 projections of each term, which are added in fp64
    assert total.read().distance(truth) <= 1e-6 * float(truth.norm())
    assert total.read().distance(terms[0].double()) > 0.5 * float(truth.norm())
    assert total.place == Place()


def test_a_sum_without_one_of_its_terms_is_left_out_with_the_reason() -> None:
    terms = {rank: Whole(torch.ones(3)) for rank in range(2)}
    said: list[str] = []
    found = list(complete_entries(trace_of(dict(terms), 3), said.append))
    assert [entry.role for entry in found] == ["output"]
    assert said == ["output_gradient of norm is a sum over 3 ranks, of which some are missing"]


def test_statistics_of_terms_say_nothing_of_the_sum() -> None:
    said: list[str] = []
    found = list(complete_entries(trace_of({rank: statistics(torch.ones(3)) for rank in range(2)}, 2), said.append))
    assert [entry.role for entry in found] == ["output"]
    assert "only statistics" in said[0]
