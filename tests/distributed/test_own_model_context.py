"""Models of one's own under context parallelism: evaluations, GPTs, random numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalite
from megalite.data.any_dataset import Batch
from megalite.modules.sequences import CONTEXT_PARALLEL
from megalite.modules.stage import ModuleStage
from megalite.parallel.mesh import UnconnectedMesh
from tests.distributed.own_model import (
    CLASSES,
    EVALUATED,
    VOCABULARY,
    WIDTH,
    Cell,
    Samples,
    Values,
    built,
    correct_classes,
    encoder_layer,
    mean_of_classes,
    share_correct,
)
from tests.distributed.own_model_run import OfRank, evaluated, message_of, run_cell
from tests.distributed.parallel_model import trainer
from tests.harness.close import assert_number_close
from tests.harness.rank_pool import RankPools


def tokens_after_the_first(outputs: Any, values: Values) -> tuple[Tensor, Tensor]:
    """Return the sum of tokens, and how many of them are not the first word of the vocabulary."""
    return values["tokens"].sum(), (values["tokens"] > 0).sum()


@pytest.mark.wide
def test_an_evaluation_of_parts_is_that_of_samples(rank_pools: RankPools) -> None:
    options = {"valid_dataset": EVALUATED, "metrics": {"share": share_correct, "tokens": tokens_after_the_first}}
    (wanted,) = rank_pools(1).run(evaluated, Cell("watched"), **options)
    assert 0 < wanted["share"] < 1
    for found in rank_pools(2).run(evaluated, Cell("watched", cp=2), **options):
        assert found.keys() == wanted.keys()
        for name, mean in wanted.items():
            assert_number_close(found[name], mean, name)


GPT = megalite.GPTConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=11, position_embedding_type="rope"
)


def gpt(layout: Mapping[str, Any], **options: Any) -> list[tuple[float, float]]:
    """Train a GPT for two steps on tokens without labels, and return losses and norms."""
    tokens = torch.randint(11, (16, 8), generator=torch.Generator().manual_seed(1))
    with megalite.Trainer(
        GPT,
        seq_length=8,
        dataset=[{"tokens": each} for each in tokens],
        micro_batch_size=4,
        global_batch_size=8,
        optimizer=megalite.AdamW(lr=0.1),
        layout=megalite.Layout(**layout),
        precision="fp64",
        quiet=True,
        **options,
    ) as run:
        records = [run.step() for _ in range(2)]
    return [(record["lm_loss"], record["grad_norm"]) for record in records]


@pytest.mark.wide
def test_a_gpt_trains_on_samples_of_its_own_that_are_cut(rank_pools: RankPools) -> None:
    (wanted,) = rank_pools(1).run(gpt, {})
    split = {"tp": 2, "sequence_parallel": True, "cp": 2}
    for ranks, layout in ((2, {"cp": 2, "zero": 3}), (4, split)):
        for found in rank_pools(ranks).run(gpt, layout):
            for numbers, expected in zip(found, wanted, strict=True):
                for number, each in zip(numbers, expected, strict=True):
                    assert_number_close(number, each)


def refused(layout: Mapping[str, Any], **options: Any) -> str:
    try:
        gpt(layout, **options)
    except megalite.MegaliteError as error:
        return str(error)
    return "nothing was refused"


def total(outputs: Any, batch: Any) -> Tensor:
    return outputs.log_probabilities.sum()


def test_a_loss_of_ones_own_for_a_gpt_is_refused(rank_pools: RankPools) -> None:
    for message in rank_pools(2).run(refused, {"cp": 2}, loss=total):
        assert message.startswith("Layout(cp=2) cuts samples, and a loss of one's own for a GPT needs whole ones")


@pytest.mark.parametrize(
    ("dims", "told"),
    [
        ({}, "Layout(cp=2) cuts samples along their sequence: give Trainer(sequence_dims=...)"),
        ({"token": 1}, "sequence_dims names 'token', and a batch has the fields 'tokens', 'target', 'labels', 'input'"),
        ({"tokens": 2}, "sequence_dims={'tokens': 2}: the field is (6, 4) in a batch: give a dimension of a tensor"),
        ({"image": 1}, "field 'image': 3 tokens of a sample cannot be cut into 4 equal chunks, two for each of cp=2"),
    ],
    ids=["none", "no field", "no dimension", "odd"],
)
def test_fields_that_cannot_be_cut_are_named(dims: dict[str, int], told: str, rank_pools: RankPools) -> None:
    for message in rank_pools(2).run(message_of, Cell("mlp", cp=2), sequence_dims=dims):
        assert message.startswith(told)


class Longer(nn.Module):
    """Model that adds a token before attention."""

    def __init__(self, context: megalite.ParallelContext) -> None:
        super().__init__()
        self.words = megalite.VocabParallelEmbedding(context, "words", 11, 8)
        self.attention = megalite.ParallelAttention(context, "attention", 8, 2)

    def forward(self, source: Tensor) -> Tensor:
        hidden = self.words(source.t())
        return self.attention(torch.cat([hidden[:1], hidden]))


def message_of_layers(**options: Any) -> str:
    try:
        with trainer("encoder-decoder", "sgd", {"cp": 2}, **options) as run:
            run.step()
    except megalite.MegaliteError as error:
        return str(error)
    return "nothing was refused"


def test_parts_that_attention_cannot_join_are_refused(rank_pools: RankPools) -> None:
    dims = {"source": 1, "target": 1, "labels": 1, "pairs": 1, "visible": 1}
    for message in rank_pools(2).run(message_of_layers, sequence_dims=dims):
        assert message.startswith("encoder.0.attention: mask (2, 1, 1, 6) does not fit 6 queries of this rank and 12 ")
    for message in rank_pools(2).run(message_of_layers, stages=[Longer]):
        assert message.startswith("each of cp=2 ranks has 7 tokens of a sample, which are not two equal chunks")


def test_plain_attention_is_refused_unless_it_gets_whole_samples(rank_pools: RankPools) -> None:
    layers = built("mlp")
    layers[3] = encoder_layer().double()
    for message in rank_pools(2).run(message_of, Cell("mlp", cp=2), stages=layers):
        assert message.startswith("self_attn of stage 3 is a MultiheadAttention, which sees only this rank's part of a")
    layers[3].self_attn.context_parallel = False
    assert rank_pools(2).run(message_of, Cell("mlp", cp=2), stages=layers) == ["", ""]


class Mixing(nn.Module):
    """Layer that mixes the tokens of a sample in another way than by a module of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)


class Across(nn.Module):
    """Layer that applies a module along [batch, features, tokens]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.double()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden.transpose(1, 2)).transpose(1, 2)


SEES_A_PART = "sees only this rank's part of a sequence with Layout"


@pytest.mark.wide_except("attention", "norm over dp")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Mixing, "Mixing calls scaled_dot_product_attention, which "),
        (lambda: Across(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), "module of stage 3 is a Conv1d, which "),
        (lambda: Across(nn.BatchNorm1d(WIDTH)), "module of stage 3 is a BatchNorm1d, which "),
        (lambda: Across(megalite.SyncBatchNorm(WIDTH, axes=("dp",))), "module of stage 3 is a SyncBatchNorm, which "),
    ],
    ids=["attention", "convolution", "norm", "norm over dp"],
)
def test_layers_that_mix_the_tokens_of_a_part_are_refused(
    make: Callable[[], nn.Module], told: str, rank_pools: RankPools
) -> None:
    layers = built("mlp")
    layers[3] = make()
    for message in rank_pools(2).run(message_of, Cell("mlp", cp=2), stages=layers):
        assert message.startswith(told + SEES_A_PART), message
    for part in layers[3].modules():
        setattr(part, CONTEXT_PARALLEL, False)
    assert rank_pools(2).run(message_of, Cell("mlp", cp=2), stages=layers) == ["", ""]


def test_batches_are_normalized_with_all_parts_of_samples(rank_pools: RankPools) -> None:
    layers = built("mlp")
    layers[3] = Across(nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), megalite.SyncBatchNorm(WIDTH)))
    (wanted,) = rank_pools(1).run(run_cell, Cell("mlp"), stages=layers)
    for found in rank_pools(2).run(run_cell, Cell("mlp", cp=2), stages=layers):
        assert_close_parts(found, wanted)


def assert_close_parts(found: OfRank, wanted: OfRank) -> None:
    for numbers, expected in zip(found.losses, wanted.losses, strict=True):
        for name, number in expected.items():
            assert_number_close(numbers[name], number, name)


class Pooled(nn.Module):
    """Classifier of samples by the mean of their tokens, which ranks compute alike."""

    def __init__(self, context: megalite.ParallelContext) -> None:
        super().__init__()
        self.context, self.words = (
            context,
            megalite.VocabParallelEmbedding(context, "words", VOCABULARY, WIDTH, std=1.0),
        )
        self.attention = megalite.ParallelAttention(context, "attention", WIDTH, 2, causal=True, std=1.0)
        torch.manual_seed(3)
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(megalite.gather_sequence(self.context, self.attention(self.words(tokens.t()))).mean(0))


def count_samples(values: Values) -> int:
    return len(values["label"])


def sum_of_classes(scores: Tensor, values: Values) -> Tensor:
    return mean_of_classes(scores, values) * len(scores)


def pooled(layout: Mapping[str, Any], **options: Any) -> list[float]:
    with megalite.Trainer(
        Pooled,
        dataset=Samples(8),
        valid_dataset=EVALUATED,
        metrics={"correct": correct_classes},
        sequence_dims={"tokens": 1},
        micro_batch_size=4,
        optimizer=megalite.SGD(lr=0.5),
        layout=megalite.Layout(**layout),
        precision="fp64",
        quiet=True,
        **options,
    ) as run:
        losses = [number for _ in range(2) for number in (run.step()["loss"], run.last_record["grad_norm"])]
        return losses + list(run.evaluate().values())


@pytest.mark.parametrize("options", [{"loss": mean_of_classes}, {"loss": sum_of_classes, "count": count_samples}])
def test_what_ranks_compute_of_whole_samples_counts_once(options: dict[str, Any], rank_pools: RankPools) -> None:
    (wanted,) = rank_pools(1).run(pooled, {}, **options)
    for found in rank_pools(2).run(pooled, {"cp": 2}, **options):
        for number, expected in zip(found, wanted, strict=True):
            assert_number_close(number, expected)


def test_ranks_drop_other_elements_of_a_sample() -> None:
    found = []
    for rank in range(2):
        mesh = UnconnectedMesh(rank=rank, world_size=2, context_parallel_size=2)
        found.append(ModuleStage(nn.Dropout(), mesh)({}, Batch(torch.ones(1, 64), range(1))).tensors["hidden"])
    assert not torch.equal(*found)
