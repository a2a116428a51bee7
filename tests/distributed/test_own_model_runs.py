"""Runs of models of one's own: saved and continued, evaluated, in narrow numbers, and refused with one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megalite
from tests.distributed.layout_expected import assemble
from tests.distributed.own_model import (
    EVALUATED,
    LENGTH,
    MODELS,
    WIDTH,
    Block,
    Cell,
    Samples,
    batch_of,
    built,
    correct_classes,
    plainly,
)
from tests.distributed.own_model_run import (
    Part,
    evaluated,
    evaluated_gpt,
    evaluated_over,
    frozen_bytes,
    message_of,
    part_of_run,
    run_cell,
)
from tests.harness.close import assert_bits_equal, assert_number_close
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except


def run_parts(cells: list[tuple[Cell, int]], rank_pools: RankPools, **options: Any) -> list[list[Part]]:
    """Continue a run under one layout after the other, each up to its step."""
    return [rank_pools(cell.world_size).run(part_of_run, cell, steps, **options) for cell, steps in cells]


SAVED = {
    "conv, ZeRO 2": Cell("conv", dp=2, zero=2),
    "vit, two stages, fp16": Cell("vit", pp=2, precision="fp16", clip=0.5),
    "translator, ZeRO 3, bf16": Cell("translator", dp=2, zero=3, precision="bf16", overlap=True),
}


@pytest.mark.parametrize("name", wide_except(SAVED, ["conv, ZeRO 2"]))
@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.wide), True], ids=["in order", "shuffled"])
def test_a_run_goes_on_bit_for_bit(name: str, shuffle: bool, tmp_path: Path, rank_pools: RankPools) -> None:
    cell = SAVED[name]
    options = {"shuffle": shuffle, **({"initial_loss_scale": 2.0**17} if cell.precision == "fp16" else {})}
    ((whole, *_),) = run_parts([(cell, 4)], rank_pools, **options)
    first, second = run_parts([(cell, 2), (cell, 4)], rank_pools, save=tmp_path, **options)
    assert first[0].losses + second[0].losses == whole.losses
    assert whole.losses[2:] != whole.losses[:2]
    for found, wanted in zip(second[0].ended, whole.ended, strict=True):
        assert found.digest == wanted.digest, found.name


@pytest.mark.wide  # `make test` lets a program go on so in tests/end_to_end/test_library.py
@pytest.mark.parametrize("name", ["translator", "distilled", "mlp", "vit"])
def test_a_run_goes_on_under_other_layouts(name: str, tmp_path: Path, rank_pools: RankPools) -> None:
    layouts = [
        (Cell(name, dp=2, zero=3), 2),
        (Cell(name, pp=3, schedule="interleaved-1f1b", micro_batches=3), 3),
        (Cell(name, dp=2, pp=2, zero=1, schedule="zb-v"), 4),
        (Cell(name), 5),
        (Cell(name, dp=4, zero=2, instances=2, micro_batches=1), 6),
    ]
    wanted = plainly(Cell(name), 6)
    losses: list[dict[str, float]] = []
    before: dict[str, Tensor] = {}
    for ranks in run_parts(layouts, rank_pools, save=tmp_path):
        losses += ranks[0].losses
        began = assemble(rank.began for rank in ranks)
        for tensor, values in before.items():
            assert_bits_equal(began[tensor], values, tensor)
        before = assemble(rank.ended for rank in ranks)
    for found, expected in zip(losses, wanted.losses, strict=True):
        for term, loss in expected.items():
            assert_number_close(found[term], loss, term, relative=1e-9)
    for tensor, values in wanted.parameters.items():
        tolerance = (1e-8, 1e-9) if tensor in wanted.gradients else (0.0, 0.0)  # frozen ones never change
        torch.testing.assert_close(before[tensor].view(values.shape), values, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize("overlap", wide_except([False, True], [False]))
def test_under_zero_3_a_rank_has_a_part_of_a_frozen_teacher(overlap: bool, rank_pools: RankPools) -> None:
    for dp in (2, 3):
        cell = Cell("distilled", dp=dp, zero=3, overlap=overlap)
        for whole, own, most, afterwards in rank_pools(dp).run(frozen_bytes, cell):
            assert own < 1.3 * whole / dp  # with padding
            assert most <= (2 if overlap else 1)
            assert not afterwards


@pytest.mark.wide
def test_muon_and_unused_weights_leave_frozen_ones_alone(rank_pools: RankPools) -> None:
    options = {"optimizer": megalite.Muon(lr=0.02), "allow_unused": True}
    alone = rank_pools(1).run(run_cell, Cell("distilled"), **options)
    wanted = assemble(rank.parameters for rank in alone)
    trained = assemble(rank.gradients for rank in alone)
    before = dict(nn.ModuleList(built("distilled")).named_parameters())
    found = rank_pools(2).run(run_cell, Cell("distilled", dp=2, zero=3, micro_batches=1), **options)
    for name, values in assemble(rank.parameters for rank in found).items():
        if name in trained:
            torch.testing.assert_close(values, wanted[name], rtol=1e-9, atol=1e-12, msg=name)
        else:
            assert_bits_equal(values.view(before[name].shape), before[name].detach(), name)


ZERO_3, ZB_H1 = {"dp": 2, "zero": 3}, {"pp": 2, "schedule": "zb-h1"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(ZERO_3, "fp32", id="zero3-fp32", marks=pytest.mark.wide),
        pytest.param(ZERO_3, "bf16", id="zero3-bf16"),
        pytest.param(ZERO_3, "fp16", id="zero3-fp16", marks=pytest.mark.wide),
        pytest.param(ZB_H1, "fp32", id="zb-h1-fp32", marks=pytest.mark.wide),
        pytest.param(ZB_H1, "bf16", id="zb-h1-bf16", marks=pytest.mark.wide),
        pytest.param(ZB_H1, "fp16", id="zb-h1-fp16", marks=pytest.mark.wide),
    ],
)
def test_narrow_numbers_train_nearly_the_same(layout: dict[str, Any], precision: str, rank_pools: RankPools) -> None:
    cell = Cell("vit", precision=precision, **layout)
    wanted, options = plainly(cell), {"initial_loss_scale": 2.0**14} if precision == "fp16" else {}
    for result in rank_pools(2).run(run_cell, cell, **options):
        for found, losses in zip(result.losses, wanted.losses, strict=True):
            for term, loss in losses.items():
                assert_number_close(found[term], loss, term, relative=1e-5 if precision == "fp32" else 0.03)
        for norm, expected in zip(result.norms, wanted.norms, strict=True):
            assert_number_close(norm, expected, relative=1e-4 if precision == "fp32" else 0.1)  # without the scale


def expected_evaluation(cell: Cell, steps: int = 1, dataset: Samples = EVALUATED) -> dict[str, float]:
    """Return the means over all samples after these steps, in evaluation mode."""
    trained = plainly(cell, steps)
    network = nn.ModuleList(built(cell.model)).eval()
    network.load_state_dict({**network.state_dict(), **trained.parameters, **trained.buffers})
    model, values = MODELS[cell.model], batch_of(range(len(dataset)), dataset)
    with torch.no_grad():
        output, _ = model.run(list(network), values)
        sums, counts = model.sums(list(network), values), model.counts(values)
    found = {name: each.item() / counts[name] for name, each in sums.items()}
    return {**found, "correct": correct_classes(output, values).item() / len(dataset)}


@pytest.mark.wide
@pytest.mark.parametrize(
    "cell",
    [
        Cell("conv", dp=3, zero=2),
        pytest.param(Cell("vit", dp=2, pp=2, zero=3, schedule="interleaved-1f1b"), marks=pytest.mark.wide),
        Cell("vit", pp=4, schedule="zb-v", micro_batches=4),
    ],
    ids=str,
)
def test_evaluation_is_of_all_samples_and_reduced_once(cell: Cell, rank_pools: RankPools) -> None:
    wanted, options = expected_evaluation(cell), {"valid_dataset": EVALUATED, "metrics": {"correct": correct_classes}}
    for found in rank_pools(cell.world_size).run(evaluated, cell, **options):
        assert found.keys() == wanted.keys()
        for name, mean in wanted.items():
            assert_number_close(found[name], mean, name, relative=1e-9)


@pytest.mark.wide_except("vit-dp2-pp1-zero3-adamw")
@pytest.mark.parametrize(
    "cell",
    [
        Cell("conv"),
        Cell("vit", dp=2, zero=3),
        Cell("conv", dp=3),
        pytest.param(Cell("vit", dp=3, zero=3, overlap=True), marks=pytest.mark.wide),
        Cell("conv", pp=2),
        pytest.param(Cell("vit", dp=2, pp=2, zero=3, schedule="zb-v"), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_an_evaluation_has_each_sample_once(cell: Cell, rank_pools: RankPools) -> None:
    sizes = [41, 2]  # of batches of 24: the last of 41 needs micro-batches of three sizes; 2 leave the third rank none
    options = {"eval_global_batch_size": 24, "metrics": {"correct": correct_classes}}
    of_ranks = rank_pools(cell.world_size).run(evaluated_over, cell, sizes, **options)
    for number, size in enumerate(sizes):
        wanted = expected_evaluation(cell, 0, Samples(size, first=1000))
        for found in of_ranks:
            assert found[number].keys() == wanted.keys()
            for name, mean in wanted.items():
                assert_number_close(found[number][name], mean, f"{name} of {size}", relative=1e-12)


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 3}, {"pp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_an_evaluation_of_a_gpt_has_each_sample_once(layout: dict[str, Any], rank_pools: RankPools) -> None:
    (wanted,) = rank_pools(1).run(evaluated_gpt, 1)
    for found in rank_pools(2).run(evaluated_gpt, 4, **layout):
        assert_number_close(found["lm_loss"], wanted["lm_loss"], relative=1e-12)


def test_declared_messages_have_one_size(rank_pools: RankPools) -> None:
    cell, declared = Cell("mlp", pp=2), [(megalite.TensorSpec("hidden", (6, LENGTH, WIDTH), torch.float64),)]
    wanted = expected_tokens(18)
    for found, _ in rank_pools(2).run(evaluated_over, cell, [20, 18], messages=declared):
        assert_number_close(found["loss"], wanted, relative=1e-12)
    for message in rank_pools(2).run(message_of, cell, messages=declared, valid_dataset=Samples(5)):
        assert message.startswith("the dataset of evaluations has 5 samples, fewer than one batch of all ranks, 6")


def expected_tokens(size: int) -> float:
    """Return the loss of the network "mlp" at the start."""
    model, values = MODELS["mlp"], batch_of(range(size), Samples(size, first=1000))
    return model.sums(built("mlp"), values)["loss"].item() / model.counts(values)["loss"]


def test_statistics_may_be_averaged_over_ranks(rank_pools: RankPools) -> None:
    """The mean over ranks of what each has seen is that of a batch of all of them."""
    cell = Cell("conv", dp=3, micro_batches=1)
    seen = [MODELS["conv"].layers() for _ in range(3)]
    for rank in range(3):
        seen[rank] = built("conv")
        MODELS["conv"].run(seen[rank], batch_of(range(4 * rank, 4 * rank + 4)))
    wanted = torch.stack([layers[1].running_mean for layers in seen]).mean(0)
    of_ranks = rank_pools(3).run(run_cell, cell, 1, buffers={"1.running_*": "average"})
    found = assemble(rank.buffers for rank in of_ranks)
    torch.testing.assert_close(found["1.running_mean"], wanted, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(found["4.running_mean"], seen[0][4].running_mean, rtol=1e-12, atol=0.0)
    assert found["1.num_batches_tracked"].item() == 1


def drawn(name: str, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return 0.1 * torch.randn(shape, generator=generator) + 0.01 * len(name)


def test_initial_values_are_drawn_alike_on_any_layout(rank_pools: RankPools) -> None:
    layouts = [Cell("mlp"), Cell("mlp", dp=2, zero=3), Cell("mlp", pp=2, schedule="zb-v"), Cell("mlp", pp=3)]
    one, *others = [
        assemble(part.began for part in rank_pools(cell.world_size).run(part_of_run, cell, 1, initial=drawn))
        for cell in layouts
    ]
    assert abs(one["3.up.weight"].std().item() - 0.1) < 0.03
    for other in others:
        assert other.keys() == one.keys()
        for name, values in one.items():
            assert_bits_equal(other[name], values, name)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Block(), Block()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.used(hidden)


def with_branches() -> list[nn.Module]:
    layers = built("mlp")
    layers[2] = Branches().double()
    return layers


@pytest.mark.wide
@pytest.mark.parametrize("zero", [0, 3])
def test_parameters_that_are_not_used_are_named(zero: int, rank_pools: RankPools) -> None:
    for message in rank_pools(2).run(message_of, Cell("mlp", dp=2, zero=zero), stages=with_branches()):
        assert message.startswith("2.unused.down.bias received 0 of the ")
        assert "give Trainer(allow_unused=True)" in message


@pytest.mark.wide
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "zero": 3, "overlap": True}, {"pp": 2}], ids=str)
def test_parameters_that_are_not_used_may_be_allowed(layout: dict[str, Any], rank_pools: RankPools) -> None:
    cell = Cell("mlp", optimizer="sgd", **layout)
    ranks = rank_pools(2).run(run_cell, cell, 1, stages=with_branches(), allow_unused=True)
    gradients = assemble(rank.gradients for rank in ranks)
    assert not gradients["2.unused.up.weight"].any()
    assert gradients["2.used.up.weight"].any()
