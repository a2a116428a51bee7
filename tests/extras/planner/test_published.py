"""Published runs as configurations, and the arithmetic of their evaluation."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.planner import published as page
from benchmarks.planner.errors import Prediction, by_model
from benchmarks.planner.intervals import FEW, ClassErrors, centre, classes
from benchmarks.planner.programs import program_of
from benchmarks.planner.published import Run, published, rows
from megalite.extras.planner.intervals import FILE


def test_each_row_is_a_run_or_has_a_reason() -> None:
    runs, reasons = published()
    assert len(runs) + len(reasons) == len(rows())
    assert not {run.number for run in runs} & set(reasons)
    assert len(runs) > 500


def test_layouts_have_the_published_ranks_and_batches() -> None:
    for run in published()[0]:
        parallel, training = run.config.parallel, run.config.training
        assert run.world_size % parallel.model_parallel_size == 0
        ranks = parallel.data_parallel_size(run.world_size)
        assert (training.global_batch_size or 0) >= training.micro_batch_size * ranks
        if run.row["dp"]:
            assert ranks == int(float(run.row["dp"]))


def test_parameters_are_near_the_published_number() -> None:
    for run in published()[0]:
        if not run.row["params_b"] or run.row["experts"]:
            continue
        model = run.config.model
        query = model.num_attention_heads * model.head_dim
        layer = model.hidden_size * (2 * query + 2 * model.kv_groups * model.head_dim)
        layer += model.activation.matrices * model.hidden_size * model.ffn_size
        words = (1 + model.untie_embeddings_and_output_weights) * (model.vocab_size or 0) * model.hidden_size
        positions = (model.learned_positions or 0) * model.hidden_size
        found = (model.num_layers * layer + words + positions) / 1e9
        assert found == pytest.approx(float(run.row["params_b"]), rel=0.15), run.row["model"]
        assert math.isfinite(found)


def experts_of_bridge(**fields: str) -> dict[str, str]:
    """Return the last published row of experts of Megatron-Bridge, with other fields."""
    row = next(row for row in rows() if row["model"] == "GPT OSS 120B" and "release 26.04 " in row["source"])
    return row | fields


@pytest.mark.parametrize(
    ("release", "program"),
    [
        ("25.11", "bridge-experts"),
        ("26.02", "bridge-experts"),
        ("26.02.01", "bridge-experts-2026"),
        ("26.04", "bridge-experts-2026"),
        ("26.04.01", "bridge-experts-2026"),
        ("26.06", "bridge-experts-2026"),
        ("27.02", "bridge-experts-2026"),
    ],
)
def test_a_release_has_the_program_of_its_time(release: str, program: str) -> None:
    source = f"Megatron-Bridge docs/performance-summary.md release {release} Pre-Training Performance"
    assert program_of(experts_of_bridge(source=source)) == program


@pytest.fixture
def another_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A row that takes the place of all others."""
    row = experts_of_bridge()
    monkeypatch.setattr(page, "rows", lambda: [row])
    published.cache_clear()
    yield row
    published.cache_clear()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gpu": "A900"}, "A900"),
        ({"params_b": "671", "ffn": "18432", "experts": "256", "layers": "61", "hidden": "7168"}, "dense feed-forward"),
        ({"model": "DeepSeek-V3"}, "latent attention"),
        ({"source": "Megatron-Bridge main branch"}, "release"),
    ],
    ids=["GPU", "width", "attention", "program"],
)
def test_a_row_that_cannot_be_predicted_ends_no_validation(
    fields: dict[str, str], reason: str, another_row: dict[str, str]
) -> None:
    another_row |= fields
    runs, reasons = published()
    assert not runs
    assert reason in reasons[0]


def errors_of(errors: Callable[[Run], float]) -> dict[str, ClassErrors]:
    """Return the errors of the classes if each prediction is so many times the measured seconds."""
    timed = [run for run in published()[0] if run.seconds is not None]
    found = [Prediction(run, (run.seconds or 0) * errors(run), run.stack.factor) for run in timed]
    assert sum(len(own) for _, own in by_model(found)) == len(timed)
    return {str(name): each for name, each in classes(found).items()}


def test_intervals_are_those_of_a_class() -> None:
    """Dense runs are all a tenth too slow, and those with experts twice as long."""
    found = errors_of(lambda run: 2.0 if run.config.model.num_experts else 1.1)
    assert {"dense, 16 bits", "dense, float8", "experts, 16 bits"} <= found.keys()
    for name, each in found.items():
        assert (each.measured is None) == (each.runs < FEW), name
        if each.measured is not None and each.unmeasured is not None:
            assert each.measured.factor == pytest.approx(2.0 if name.startswith("experts") else 1.1)
            assert each.measured.covered > 0.99  # but for rounding
            assert each.unmeasured.factor > each.measured.factor


def test_an_interval_holds_the_runs_of_sources_that_gave_it_nothing() -> None:
    """Runs of one source have twice the errors of the other float8 ones, as logarithms."""
    found = errors_of(lambda run: 1.21 if "torchtitan" in run.source else 1.1)["dense, float8"]
    assert found.measured is not None
    assert found.measured.covered >= 0.9
    assert found.measured.margin >= 1.95  # without it, no run of that source would be held


def test_the_planner_has_the_intervals_of_the_page() -> None:
    """Each of them holds nine runs of ten."""
    page = (Path(__file__).parents[3] / "benchmarks" / "planner" / "planner_validation.md").read_text()
    number = r"\| ([0-9.]+) \| ([0-9.]+)% "
    rows = re.findall(
        rf"^\| (dense|experts), (\S+(?: bits)?) \| ([A-Za-z, ]+) \| \d+ \| \d+ {number}{number}", page, re.M
    )
    table = tomllib.loads(FILE.read_text())
    assert len(rows) == len(table["class"]) >= 4
    for each, (model, precision, gpus, within, held, unmeasured, held_too) in zip(table["class"], rows, strict=True):
        assert each == {
            "model": model,
            "precision": precision,
            "generations": gpus.split(", "),
            "within": float(within),
            "unmeasured": float(unmeasured),
        }
        assert min(float(held), float(held_too)) >= 90.0
    assert f"the prediction times {table['centre']:.2f}," in page
    assert table["centre"] == pytest.approx(math.exp(centre()), abs=0.005)
