"""Loss by source in the records of steps and evaluations of a run on a blend."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.data import sources
from megalite.data.tokenizers.bytes import ByteTokenizer
from megalite.parallel.mesh import ParallelMesh
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.run.evaluation import evaluate
from megalite.training.data import open_data
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer
from tests.harness.close import assert_number_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.token_files import add_document

FLAGS = """--fp64 --tokenizer-type ByteTokenizer --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 12
--max-position-embeddings 12 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --eval-iters 2 --eval-interval 6
--lr 0.02 --split 80,20,0"""
WEIGHTS = {"web": 1.0, "code": 0.0, "math": 2.5}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("blend"), np.random.default_rng(0)
    for name in WEIGHTS:
        with IndexedDatasetWriter(folder / name, np.uint16, ByteTokenizer().identity()) as writer:
            for _ in range(50):
                document = [*random.integers(97, 123, random.integers(5, 20)).tolist(), 256]
                add_document(writer, document)
            writer.finish()
    return folder


def started(files: Path, flags: str) -> Trainer:
    blend = f"--data-path 6 {files / 'web'} 3 {files / 'code'} 1 {files / 'math'}"
    config = resolve(parse_arguments(f"{FLAGS} {blend} {flags}".split()).config, 1)
    return gpt_trainer(config, open_data(config), ParallelMesh())


def by_source(figures: dict[str, float], before: str) -> dict[str, float]:
    return {name.removeprefix(before): value for name, value in figures.items() if name.startswith(before)}


def steps(trainer: Trainer) -> list[StepMetrics]:
    with trainer.loader:
        return [trainer.step() for _ in range(6)]


def test_records_have_the_losses_of_sources_that_count(files: Path) -> None:
    trainer = started(files, "--loss-weights code=0 math=2.5")
    drawn = trainer.task.sources
    assert drawn is not None
    seen = set()
    for number, record in enumerate(steps(trainer)):
        of_samples = [drawn.names[drawn.of(sample)] for sample in range(4 * number, 4 * number + 4)]
        counts = {name: of_samples.count(name) * WEIGHTS[name] for name in set(of_samples)}
        losses = by_source(dict(record.extra), "lm_loss/")
        assert losses.keys() == {name for name, count in counts.items() if count}
        total = sum(counts[name] * losses[name] for name in losses)
        assert_number_close(record.loss, total / sum(counts.values()))
        seen.add(frozenset(losses))
    assert len(seen) > 1  # some steps have no sample of a source
    assert trainer.empty_terms.note() is None


def test_an_evaluation_has_no_weights_and_counts_bytes(files: Path) -> None:
    trainer = started(files, "--loss-weights code=0 math=2.5")
    found, plain = evaluate(trainer), evaluate(started(files, ""))
    assert found == plain
    assert found is not None
    assert by_source(dict(found), "lm_loss/").keys() == {"web", "code", "math"}
    data = open_data(trainer.config)  # type: ignore[arg-type]
    assert data.valid is not None
    assert data.valid_sources is not None
    samples = range(2 * 4)
    for name, numbers in [
        ("", samples),
        ("/code", [each for each in samples if data.valid_sources.names[data.valid_sources.of(each)] == "code"]),
    ]:
        text = sum(int((data.valid[each]["labels"] < 256).sum()) for each in numbers)
        bits = found[f"lm_loss{name}"] * 12 * len(numbers) / math.log(2)
        assert_number_close(found[f"bits_per_byte{name}"], bits / text)


def test_of_too_many_sources_nothing_is_told_and_weights_act(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--loss-weights code=0 math=2.5"
    told = [record.loss for record in steps(started(files, flags))]
    monkeypatch.setattr(sources, "MOST_SOURCES", 2)
    trainer = started(files, flags)
    records = steps(trainer)
    assert [record.loss for record in records] == told
    assert not any(by_source(dict(record.extra), "lm_loss/") for record in records)
    found = evaluate(trainer)
    assert found is not None
    assert found.keys() == {"lm_loss", "bits_per_byte"}
