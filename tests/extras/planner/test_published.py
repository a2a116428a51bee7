"""Published runs as configurations, and the arithmetic of their evaluation."""

from __future__ import annotations

import math

import pytest

from benchmarks.planner.published import published, rows


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
