"""Terms of the loss before the first step: what may be declared, and how it is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.model.head import LM_LOSS
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm
from megalite.training.loss_terms import counted, declared_terms, loss_multipliers, means, total_counts, total_sums


def one(_: object) -> Tensor:
    return torch.ones(())


def chunks(*terms: tuple[LossTerm, ...]) -> Any:
    """Stages that declare them."""
    return [SimpleNamespace(loss_terms=own) for own in terms]


def test_terms_are_those_that_all_stages_declare() -> None:
    """Treat terms as equal even if each stage counts by a method of its own."""
    balance, other = LossTerm("balance", lambda _: torch.ones(())), LossTerm("balance", lambda _: torch.ones(()))
    assert declared_terms(chunks((LM_LOSS, balance), (LM_LOSS, other))) == (LM_LOSS, balance)
    with pytest.raises(MegaliteError, match=r"chunk 0 lm_loss \(weight 1.0, .*\); balance .*, chunk 1 lm_loss [^;]*$"):
        declared_terms(chunks((LM_LOSS, balance), (LM_LOSS,)))
    with pytest.raises(MegaliteError, match=r"chunk 2 balance \(weight 2.0"):
        declared_terms(chunks((balance,), (balance,), (LossTerm("balance", one, 2.0),)))


def test_names_of_terms_are_their_own() -> None:
    with pytest.raises(MegaliteError, match="several terms of the loss are called balance"):
        declared_terms(chunks((LM_LOSS, LossTerm("balance", one), LossTerm("balance", one, 2.0))))


@pytest.mark.parametrize("name", ["grad_norm", "iteration", "valid_loss", "params_norm", "grad_norm/router", "extra"])
def test_a_term_is_not_called_like_a_figure_of_the_metrics(name: str) -> None:
    with pytest.raises(MegaliteError, match=f"a term of the loss is called {name}, which is the name of another"):
        declared_terms(chunks((LM_LOSS, LossTerm(name, one))))


def test_a_term_that_no_stage_returns_is_named() -> None:
    """Though a sum that is returned may be nothing, also as a negative zero."""
    terms = LM_LOSS, LossTerm("balance", one)
    loss = torch.tensor(3.0, dtype=torch.float64)
    for nothing in (0.0, -0.0):
        sums = {"lm_loss": loss, "balance": torch.tensor(nothing, dtype=torch.float64)}
        assert total_sums(terms, sums, ParallelMesh()) == {"lm_loss": 3.0, "balance": 0.0}
    with pytest.raises(MegaliteError, match="no stage returned the term of the loss that is declared as balance"):
        total_sums(terms, {"lm_loss": loss}, ParallelMesh())


def test_a_term_with_parts_is_recorded_by_these_and_not_differentiated() -> None:
    """A part that has counted nothing is not recorded; where another stage has the sum, a rank has none."""
    parts = LossTerm(
        "by source", lambda _: torch.tensor([2.0, 0.0, 1.0]), weight=0.0, parts=("loss/a", "loss/b", "loss/c")
    )
    terms = LM_LOSS, parts
    sums = {"lm_loss": torch.tensor(3.0), "by source": torch.tensor([5.0, 0.0, 1.0])}
    counts = total_counts(terms, {"lm_loss": torch.tensor(3.0), "by source": parts.count(None)}, ParallelMesh())
    assert counts == {"lm_loss": 3.0, "loss/a": 2.0, "loss/c": 1.0}
    totals = total_sums(terms, {name: total.double() for name, total in sums.items()}, ParallelMesh())
    assert totals == {"lm_loss": 3.0, "loss/a": 5.0, "loss/b": 0.0, "loss/c": 1.0}
    assert means(totals, counts) == {"lm_loss": 1.0, "loss/a": 2.5, "loss/c": 1.0}
    assert loss_multipliers(terms, counts, 6.0) == {"lm_loss": 2.0, "by source": 0.0}
    with pytest.raises(MegaliteError, match="declared as loss/a"):
        total_sums(terms, {"lm_loss": sums["lm_loss"].double()}, ParallelMesh())
    with pytest.raises(MegaliteError, match="several terms of the loss are called loss/a"):
        declared_terms(chunks((parts, LossTerm("loss/a", one))))


def test_counts_are_on_the_device_wherever_they_were_made() -> None:
    """A count may be a number of the micro-batch's on the CPU, or a sum over its mask on the device."""
    device = torch.device("meta")
    terms = [
        LossTerm("rows", lambda rows: torch.tensor(rows)),
        LossTerm("mask", lambda _: torch.ones((), device=device)),
    ]
    micro_batches: Any = [3, 4]
    counts = counted(terms, micro_batches, device)
    assert {name: (count.device, count.dtype) for name, count in counts.items()} == dict.fromkeys(
        ("rows", "mask"), (device, torch.float64)
    )
