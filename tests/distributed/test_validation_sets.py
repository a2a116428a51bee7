"""Evaluations of several validation sets, and of whole ones: equal to a plain loop over their samples on any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.parallel.mesh import ParallelMesh
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from megalite.run.evaluation import evaluate
from megalite.training.data import open_data
from megalite.training.loss_terms import Totals
from tests.distributed.layout_expected import on_ranks
from tests.harness.close import assert_number_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.harness.token_files import add_document
from tests.initial_weights import Network
from tests.oracle import Oracle, loss_sum_and_count

LENGTH, VOCABULARY = 12, 29
FLAGS = f"""--fp64 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by 4
--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --seq-length {LENGTH}
--max-position-embeddings {LENGTH} --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0
--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-iters 2 --eod-mask-loss --lr 0.02 --seed 77"""
NETWORK = Network(
    layers=2, hidden=16, heads=2, groups=2, head_dim=8, ffn=24, vocabulary=VOCABULARY, std=0.2, positions=LENGTH
)
TOKENS = {"code": 11 * LENGTH + 1, "math": 2 * LENGTH + 1, "web": 8 * LENGTH + 1}
"""Tokens of each set: 11 samples, 2, and 8, so that one ends inside a batch, one is less than one and one is two."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a token file for each set."""
    folder, random = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    for name, tokens in TOKENS.items():
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for document in np.array_split(random.integers(0, VOCABULARY, tokens), 5):
                add_document(writer, document)
            writer.finish()
    return folder


def evaluation(flags: str, should_stop: Callable[[], bool] | None = None) -> Totals | None:
    """Return the means of an evaluation before the first step."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    return evaluate(gpt_trainer(config, open_data(config), mesh), should_stop=should_stop)


def sum_and_count(samples: Any, numbers: range) -> tuple[float, float]:
    """Return the loss of these samples by the oracle, added up, and the number of its tokens."""
    rows = [samples[number] for number in numbers]
    tokens, labels = (torch.stack([torch.from_numpy(row[name]) for row in rows]) for name in ("tokens", "labels"))
    logits = Oracle().logits(NETWORK.weights(77, torch.float64), tokens, torch.arange(LENGTH).expand_as(tokens))
    total, count = loss_sum_and_count(logits, labels, (tokens != VOCABULARY - 1).double())
    return total.item(), float(count)


def paths(files: Path, *names: str) -> str:
    valid = " ".join(str(files / name) for name in names)
    return f"--train-data-path {files / 'web'} --valid-data-path {valid}"


def whole_sets(files: Path) -> tuple[str, dict[str, float]]:
    """Return flags that evaluate three whole sets, and the expected means."""
    flags = f"{FLAGS} {paths(files, *TOKENS)} --multiple-validation-sets --full-validation"
    sets = open_data(resolve(parse_arguments(flags.split()).config, 1)).valid_sets
    found = {name: sum_and_count(samples, range((TOKENS[name] - 1) // LENGTH)) for name, samples in sets.items()}
    total, count = (sum(each[part] for each in found.values()) for part in (0, 1))
    return flags, {"lm_loss": total / count} | {f"lm_loss/{name}": sums / n for name, (sums, n) in found.items()}


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("", 1),
        ("--micro-batch-size 3 --global-batch-size 6", 2),
        ("--pp 2 --micro-batch-size 4", 2),
        pytest.param("--tp 2 --sequence-parallel --micro-batch-size 1", 2, marks=pytest.mark.wide),
        pytest.param("--cp 2 --micro-batch-size 3 --global-batch-size 6", 2, marks=pytest.mark.wide),
        pytest.param("--pp 2 --micro-batch-size 3 --global-batch-size 6 --num-workers 0", 4, marks=pytest.mark.wide),
        pytest.param(
            "--micro-batch-size 3 --data-parallel-shares 2:1 --global-batch-size 9", 2, marks=pytest.mark.wide
        ),
    ],
    ids=["alone", "copies", "stages", "parts", "context", "grid", "shares"],
)
def test_whole_sets_are_read_once_on_any_layout(layout: str, ranks: int, files: Path, rank_pools: RankPools) -> None:
    """No evaluation depends on --eval-iters; the last micro-batch of a set is filled up with what counts nowhere."""
    flags, expected = whole_sets(files)
    for found in on_ranks(rank_pools, ranks, evaluation, f"{flags} {layout} --eval-iters 0"):
        assert found is not None
        assert found.keys() == expected.keys()
        for name, mean in expected.items():
            assert_number_close(found[name], mean, name, 1e-10)


@pytest.mark.parametrize(
    "layout",
    ["", *(pytest.param(layout, marks=pytest.mark.wide) for layout in ("--ep 2", "--tp 2 --sequence-parallel"))],
)
def test_layers_with_experts_take_micro_batches_that_are_filled_up(
    layout: str, files: Path, rank_pools: RankPools
) -> None:
    flags = f"{FLAGS} {paths(files, *TOKENS)} --multiple-validation-sets --full-validation {EXPERTS}"
    expected = evaluation(f"{flags} --micro-batch-size 1 --global-batch-size 1")
    filled = "--micro-batch-size 7 --global-batch-size 14 --num-workers 0"
    for found in on_ranks(rank_pools, 2, evaluation, f"{flags} {filled} {layout}"):
        assert found is not None
        assert expected is not None
        for name, mean in expected.items():
            assert_number_close(found[name], mean, name, 1e-10)


def test_a_set_has_the_loss_that_it_has_alone(files: Path) -> None:
    """Without --full-validation, each set is evaluated on --eval-iters batches, and is repeated if it is short."""
    found = evaluation(f"{FLAGS} {paths(files, 'math', 'code')} --multiple-validation-sets --validation-set-names a b")
    assert found is not None
    for name, alone in (("lm_loss/a", "math"), ("lm_loss/b", "code")):
        assert {"lm_loss": found[name]} == evaluation(f"{FLAGS} {paths(files, alone)}")


def test_the_whole_of_a_blend_without_weights_is_all_its_samples_once(files: Path) -> None:
    flags, expected = whole_sets(files)
    found = evaluation(f"{flags.replace('--multiple-validation-sets', '')} --micro-batch-size 4")
    assert found is not None
    assert found.keys() == expected.keys()  # the loss by source
    for name, mean in expected.items():
        assert_number_close(found[name], mean, name, 1e-10)


def test_an_evaluation_can_be_stopped_between_sets(files: Path) -> None:
    """The evaluation asks before each batch but the first: twice in `code`, before `math`, before `web`, once in it."""
    flags, _ = whole_sets(files)
    answers = iter([False] * 5)
    assert evaluation(flags, lambda: next(answers)) is not None
    assert next(answers, None) is None
    assert evaluation(flags, iter([False, False, False, True]).__next__) is None
