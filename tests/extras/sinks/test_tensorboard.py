"""TensorBoard's files, read back by its own reader: Megatron-LM's names, the loss first, one trajectory."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.extras.sinks.curves import Curves
from megalite.extras.sinks.tensorboard_events import TensorBoardEvents
from megalite.training.metrics import Growing
from tests.extras.sinks.records import evaluation, step

CONFIGURATION = "training:\n  seed: 1234\n"


def written(folder: Path, *records: dict[str, Any], left_out: tuple[str, ...] = (), **options: int) -> None:
    events = TensorBoardEvents(folder, CONFIGURATION, Curves(options.get("consumed_samples", 0), left_out), **options)
    for record in records:
        events.write(record)
    events.close()


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_curves_have_megatrons_names_over_steps_and_over_samples(tmp_path: Path) -> None:
    written(tmp_path, step(1), step(2), evaluation(2, 3.75))
    assert points(tmp_path, "lm loss") == [(1, 4.5), (2, 2.25)]
    assert points(tmp_path, "lm loss validation") == [(2, 3.75)]
    assert points(tmp_path, "batch-size") == [(1, 8.0), (2, 8.0)]
    assert points(tmp_path / "samples", "lm loss vs samples") == [(8, 4.5), (16, 2.25)]
    assert points(tmp_path / "samples", "lm loss validation vs samples") == [(16, 3.75)]
    megatrons = "batch-size,grad-norm,iteration-time,learning-rate,lm loss,lm loss validation,loss-scale"
    ours = {name for name in read(tmp_path).Tags()["scalars"] if "/" not in name}
    assert ours == {*megatrons.split(","), "throughput", "mem-max-allocated-bytes", "samples vs steps"}
    over_samples = ["batch-size", "grad-norm", "learning-rate", "lm loss", "lm loss validation", "loss-scale"]
    assert set(read(tmp_path / "samples").Tags()["scalars"]) == {f"{name} vs samples" for name in over_samples}


def test_curves_of_validation_sets_have_megatrons_names(tmp_path: Path) -> None:
    of_sets = {"valid_loss/code": 2.0, "valid_perplexity/code": 7.5}
    written(tmp_path, step(1), evaluation(1, 3.75) | of_sets)
    assert points(tmp_path, "lm loss validation-code") == [(1, 2.0)]
    assert points(tmp_path, "lm loss validation-code ppl") == [(1, 7.5)]
    assert points(tmp_path / "samples", "lm loss validation-code vs samples") == [(8, 2.0)]


def test_a_page_begins_with_the_loss(tmp_path: Path) -> None:
    """TensorBoard compares slashes, underscores and digits before other characters, and these by their code."""
    more = {"load_balancing_loss": 1.0, "max_expert_load/1": 2.0, "own_figure": 3.0, "test_loss": 2.0, "critic": 1.0}
    written(tmp_path, step(1, **more), evaluation(1, 3.75))

    def order(name: str) -> list[tuple[int, str]]:
        return [(0 if re.match(r"[/_\d]", letter) else 1, letter) for letter in name]

    names = sorted(read(tmp_path).Tags()["scalars"], key=order)
    assert names[:3] == ["Loss/lm loss", "Loss/lm loss test", "Loss/lm loss validation"]
    assert "other/own_figure" in names
    assert not {"iteration", "progress/iteration"} & set(names)


def test_the_loss_of_a_model_of_ones_own_is_no_language_models(tmp_path: Path) -> None:
    record = step(1, loss=0.5)
    del record["lm_loss"], record["consumed_tokens"]
    of_evaluation = {"iteration": 1, "consumed_samples": 8, "valid_loss": 0.25}
    written(tmp_path, record, of_evaluation)
    losses = [name for name in read(tmp_path).Tags()["scalars"] if "loss" in name]
    assert sorted(losses) == ["Loss/loss", "Loss/valid_loss", "loss-scale"]


def test_the_configuration_is_a_text(tmp_path: Path) -> None:
    written(tmp_path, step(1))
    (text,) = read(tmp_path).Tensors("configuration")
    assert text.tensor_proto.string_val == [b"    training:\n      seed: 1234\n"]
    assert read(tmp_path).SummaryMetadata("configuration").plugin_data.plugin_name == "text"


def test_events_after_the_step_of_a_resume_are_superseded(tmp_path: Path) -> None:
    written(tmp_path, *(step(iteration) for iteration in range(1, 6)))
    written(tmp_path, step(4, lm_loss=2.0), iteration=3, consumed_samples=24)
    assert points(tmp_path, "lm loss") == [(1, 4.5), (2, 2.25), (3, 1.5), (4, 2.0)]
    assert points(tmp_path / "samples", "lm loss vs samples") == [(8, 4.5), (16, 2.25), (24, 1.5), (32, 2.0)]
    assert points(tmp_path, "batch-size")[-1] == (4, 8.0)


def test_less_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    records = (*(step(iteration) for iteration in (1, 2, 3, 4)), evaluation(3, 3.75))
    written(tmp_path, *records, step_interval=2, left_out=("loss_scale",))
    assert [iteration for iteration, _ in points(tmp_path, "lm loss")] == [2, 4]
    assert [size for _, size in points(tmp_path, "batch-size")] == [8.0, 8.0]
    assert [iteration for iteration, _ in points(tmp_path, "lm loss validation")] == [3]
    assert "loss-scale" not in read(tmp_path).Tags()["scalars"]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = TensorBoardEvents(tmp_path, CONFIGURATION, Curves(0))
    append = Growing.append

    def full(self: Growing, data: bytes) -> None:
        self._waiting += data
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Growing, "append", full)
    with pytest.raises(OSError, match="No space"):
        events.write(step(1))
    monkeypatch.setattr(Growing, "append", append)
    events.write(step(2))
    events.close()
    assert points(tmp_path, "lm loss") == [(1, 4.5), (2, 2.25)]
    assert points(tmp_path / "samples", "lm loss vs samples") == [(8, 4.5), (16, 2.25)]
