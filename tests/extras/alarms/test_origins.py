"""Origins of samples: the documents whose tokens they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.data.fields import FieldsDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.extras.alarms.origins import origin
from megalite.parallel.mesh import ParallelMesh
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import open_data
from megalite.training.trainer import Trainer
from tests.end_to_end.runs import GPT2, Run, losses, words
from tests.extras.alarms.test_alarms import ledger, steps_of
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.token_files import add_document

NULL = words("--tokenizer-type NullTokenizer --vocab-size 60 --split 100,0,0 --no-report")


def write(prefix: Path, documents: list[list[int]], parts: int = 1) -> Path:
    """Write a token file whose documents have these tokens, each in so many sequences."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for tokens in documents:
            lengths = [len(part) for part in np.array_split(tokens, parts)]
            add_document(writer, tokens, lengths)
        writer.finish()
    return prefix


def trainer(*flags: object) -> Trainer:
    config = resolve(parse_arguments([*NULL, *GPT2, *map(str, flags)]).config, 1)
    return gpt_trainer(config, open_data(config), ParallelMesh())


def task(*flags: object) -> GPTTask:
    found = trainer(*flags).task
    assert isinstance(found, GPTTask)
    return found


def test_documents_are_those_whose_tokens_a_sample_has(tmp_path: Path) -> None:
    """Each document of two blended files has a token of its own."""
    tokens = {"a": range(25), "b": range(30, 55)}
    files = [write(tmp_path / name, [[each] * (9 + each) for each in own], 2) for name, own in tokens.items()]
    run = task("--data-path", 0.3, files[0], 0.7, files[1], "--train-iters", 20)
    for sample in range(80):
        fields = run.data.train[sample]
        seen = {int(token) for token in (*fields["tokens"], *fields["labels"])}
        file = files[min(seen) >= 30]
        text = origin(run, sample)
        assert text.endswith(f" of {file}")
        named = text.removesuffix(f" of {file}").removeprefix("documents ").removeprefix("document ")
        found: list[int] = []
        for part in named.split(", "):
            low, _, high = part.partition(" to ")
            found += range(int(low), int(high or low) + 1)
        assert found == sorted(token % 30 for token in seen)


@pytest.mark.wide_except("--num-workers 2 --async-save")
@pytest.mark.parametrize("flags", ["--pipeline-model-parallel-size 2", "--num-workers 2 --async-save"])
def test_a_pretraining_goes_back_and_names_the_document(flags: str, run: Run, tmp_path: Path) -> None:
    """All documents but one are alike; it is that of a sample of step 21."""
    plain = [[number % 3] * 16 for number in range(200)]
    options = [*words("--train-iters 26 --seed 3 --data-path"), write(tmp_path / "text", plain)]
    samples = task(*options).data.train
    assert isinstance(samples, FieldsDataset)
    assert isinstance(samples.tokens, GPTDataset)
    (spiky,) = samples.tokens.document_index[samples.tokens.sample_index[samples.tokens.shuffle_index[81], :1]]
    noise = np.random.default_rng(1).integers(3, 60, 16).tolist()
    write(tmp_path / "text", [noise if number == spiky else tokens for number, tokens in enumerate(plain)])
    alarms = "--check-for-spiky-loss --spiky-loss-factor 1.3 --spiky-loss-window 5 --spiky-loss-policy rewind"
    save = ["--save", tmp_path / "run", "--save-interval", 6]
    options += words("--lr 3e-2 --hidden-dropout 0.05")
    run(*NULL, *GPT2, *options, *save, *words(alarms), *words(flags), world_size=2, data=())
    lines = ledger(tmp_path / "run")
    assert [(line["step"], line["samples"]) for line in lines] == [(19, [[80, 83]])]
    highest = lines[0]["why"].partition("its rows: ")[2].partition(";")[0]
    assert highest.startswith("sample 81 (loss ")
    assert str(spiky) in highest
    assert highest.endswith(f" of {tmp_path / 'text'})")
    assert steps_of(tmp_path / "run") == list(range(1, 27))
    other = trainer(*options)
    other.left_out = [(80, 83)]
    with other.loader:
        expected = [other.step().loss for _ in range(26)]
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-3)
