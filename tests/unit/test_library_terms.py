"""Terms by name of a GPT's loss: all that are counted are differentiated, and none is recorded alone in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megalite

TOKENS = torch.randint(8, (4, 6), generator=torch.Generator().manual_seed(0))
SAMPLES = [{"tokens": tokens} for tokens in TOKENS]


def policy(outputs: Any, batch: Any) -> Tensor:
    return -(outputs.log_probabilities * batch["loss_mask"]).sum()


def surprise(outputs: Any, batch: Any) -> Tensor:
    return outputs.log_probabilities.square().sum()


def both(outputs: Any, batch: Any) -> dict[str, Tensor]:
    return {"loss": policy(outputs, batch), "kl": surprise(outputs, batch)}


def added(outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return as one term what `both` returns as two, for `count` below."""
    sums = both(outputs, batch)
    return {"loss": sums["loss"] + 20 / 8 * sums["kl"], "accuracy": torch.tensor(3.0)}


def count(batch: Any) -> dict[str, int]:
    return {"loss": 5 * len(batch["tokens"]), "kl": 2 * len(batch["tokens"])}


def make_run(**options: Any) -> megalite.Trainer:
    config = megalite.GPTConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=8,
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return megalite.Trainer(
        config,
        seq_length=6,
        micro_batch_size=2,
        global_batch_size=4,
        optimizer=megalite.SGD(lr=0.1),
        precision="fp64",
        quiet=True,
        **options,
    )


def norm(loss: Callable[..., Any], count: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Return the record of a step by `forward_backward`."""
    with make_run() as run:
        run.forward_backward({"tokens": TOKENS}, loss, count=count)
        return run.optimizer_step()


def test_all_terms_of_a_step_that_are_counted_are_differentiated() -> None:
    record, alone = norm(both, count), norm(added, lambda batch: 5 * len(batch["tokens"]))
    assert record["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-12)
    assert record["loss"] + record["kl"] == pytest.approx(alone["loss"], rel=1e-12)
    assert alone["accuracy"] == pytest.approx(2 * 3.0 / 20)
    assert record["grad_norm"] != pytest.approx(norm(policy, None)["grad_norm"], rel=0.01)


def test_all_terms_of_a_training_that_are_counted_are_differentiated() -> None:
    with make_run(dataset=SAMPLES, valid_dataset=SAMPLES, loss=both, count=count) as run:
        found = run.evaluate()
        record = run.step()
    expected = norm(both, count)
    assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-12)
    assert found == pytest.approx({name: expected[name] for name in ("loss", "kl")}, rel=1e-12)


def test_a_term_with_a_gradient_that_is_not_counted_is_refused() -> None:
    with make_run(dataset=SAMPLES, loss=both) as run:
        with pytest.raises(megalite.MegaliteError, match=r'"kl" with a gradient.*call detach\(\)'):
            run.forward_backward({"tokens": TOKENS}, both)
        with pytest.raises(megalite.MegaliteError, match=r'"kl" with a gradient'):
            run.step()


def test_a_term_of_a_step_has_a_name_of_its_own() -> None:
    with make_run() as run, pytest.raises(megalite.MegaliteError, match="is called grad_norm"):
        run.forward_backward({"tokens": TOKENS}, both, count=lambda batch: {"grad_norm": 1})


@pytest.mark.parametrize(
    ("loss", "count", "message"),
    [
        (lambda outputs, batch: {"loss": 1.0}, None, 'returned float as "loss": return a sum, a tensor without'),
        (lambda outputs, batch: {"loss": policy(outputs, batch), "kl": 1.0}, None, 'returned float as "kl"'),
        (lambda outputs, batch: {"loss": outputs.log_probabilities}, None, r'returned a tensor \(2, 6\) as "loss"'),
        (both, lambda batch: {}, "count returned {}: return the number of items"),
        (both, lambda batch: None, "count returned NoneType for the term loss of the loss: return the number"),
        (both, lambda batch: {"loss": torch.ones(2)}, r"count returned a tensor \(2,\) for the term loss"),
    ],
)
def test_what_is_no_sum_or_no_number_is_refused(
    loss: Callable[..., Any], count: Callable[[Any], Any] | None, message: str
) -> None:
    with pytest.raises(megalite.MegaliteError, match=message):
        norm(loss, count)
    with pytest.raises(megalite.MegaliteError, match=message), make_run(dataset=SAMPLES, loss=loss, count=count) as run:
        run.step()
