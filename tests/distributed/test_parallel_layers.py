"""Models of parallel layers on several ranks: any layout trains them as plain torch does in one process, in float64."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed.layout_expected import assemble
from tests.distributed.own_model_run import OfRank
from tests.distributed.parallel_layers_run import evaluated, refusal, run, without_own_initial_values
from tests.distributed.parallel_model import MODELS, RATE, Trained, initial, plainly, samples
from tests.harness.close import assert_gradient_close, assert_number_close, assert_parameter_close
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

SPLIT = {"tp": 2, "sequence_parallel": True}
ONE_RANK_PER_EXPERT = {"expert_tensor_parallel_size": 1}


class Cell(NamedTuple):
    ranks: int
    model: str
    optimizer: str
    layout: Mapping[str, Any]
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        options = {**self.layout, **self.options}
        return "-".join([self.model, self.optimizer, *(f"{name}={value}" for name, value in options.items())])


QUICK = [
    Cell(2, "encoder-decoder", "sgd", {"tp": 2}),
    Cell(4, "encoder-decoder", "clipped", {**SPLIT, "pp": 2, "schedule": "zb-v", "stages_per_rank": 2}),
    Cell(4, "encoder-decoder", "clipped", {**SPLIT, "dp": 2, "zero": 3, "overlap": True}),
    Cell(4, "encoder-decoder", "adamw", {**SPLIT, "dp": 2, "zero": 3, "overlap": True}, {"frozen": True}),
    Cell(2, "experts", "clipped", {"ep": 2, "zero": 3}),
    Cell(2, "experts", "adamw", {**SPLIT, "ep": 2}, ONE_RANK_PER_EXPERT),
    Cell(4, "experts", "sgd", {"pp": 2, "dp": 2, "ep": 2, "zero": 2}, {"recompute": True}),
    Cell(2, "encoder-decoder", "clipped", {"cp": 2, "zero": 3}),
    Cell(4, "encoder-decoder", "sgd", {"cp": 2, "pp": 2, "schedule": "zb-h1", "zero": 1}),
    Cell(3, "experts", "clipped", {"cp": 3}),
    Cell(4, "experts", "adamw", {**SPLIT, "cp": 2, "ep": 4, "zero": 1}, ONE_RANK_PER_EXPERT),
    Cell(4, "rotary", "clipped", {**SPLIT, "cp": 2}, {"cp_comm_type": ("p2p",)}),
    Cell(4, "encoder-decoder", "adamw", {**SPLIT, "pp": 2, "zero": 1}, {"adapted": True}),
]
REST = [
    Cell(1, "rotary", "clipped", {}),
    Cell(4, "rotary", "clipped", {"tp": 2, "cp": 2}),
    Cell(2, "rotary", "clipped", {"cp": 2}, {"cp_comm_type": ("a2a",)}),
    Cell(3, "rotary", "clipped", {"cp": 3, "zero": 3}, {"cp_comm_type": ("p2p",)}),
    Cell(1, "encoder-decoder", "adamw", {}),
    Cell(2, "encoder-decoder", "sgd", {"dp": 2, "zero": 3}, {"adapted": True}),
    Cell(2, "rotary", "clipped", {"tp": 2}, {"adapted": True}),
    Cell(1, "experts", "adamw", {}),
    Cell(2, "encoder-decoder", "adamw", SPLIT, {"recompute": True}),
    Cell(4, "encoder-decoder", "adamw", {"tp": 2, "pp": 2, "stages_per_rank": 2, "zero": 1}),
    Cell(4, "experts", "clipped", {**SPLIT, "dp": 2, "ep": 2, "zero": 1}),
    Cell(4, "encoder-decoder", "adamw", {**SPLIT, "cp": 2}, {"recompute": True}),
    Cell(3, "encoder-decoder", "clipped", {"pp": 3, "zero": 1}),
    Cell(4, "encoder-decoder", "adamw", {"pp": 2, "dp": 2, "zero": 2}, {"recompute": True}),
    Cell(4, "encoder-decoder", "sgd", {**SPLIT, "pp": 2, "schedule": "zb-h1"}),
    Cell(4, "encoder-decoder", "clipped", {"tp": 2, "dp": 2, "zero": 2}),
    Cell(
        4, "encoder-decoder", "clipped", {**SPLIT, "pp": 2, "schedule": "zb-v", "stages_per_rank": 2}, {"frozen": True}
    ),
    Cell(4, "experts", "clipped", {**SPLIT, "pp": 2}),
    Cell(4, "experts", "adamw", {"ep": 4, "zero": 3, "overlap": True}),
    *(
        Cell(8, "encoder-decoder", "clipped", {**split, "pp": 2, "dp": 2, "zero": zero})
        for split in (SPLIT, {"tp": 2})
        for zero in range(4)
    ),
    *(Cell(8, "experts", "adamw", {**SPLIT, "pp": 2, "dp": 2, "ep": 2, "zero": zero}) for zero in (1, 3)),
    Cell(3, "encoder-decoder", "adamw", {"cp": 3, "zero": 2, "overlap": True}),
    Cell(4, "encoder-decoder", "sgd", {"cp": 2, "tp": 2}),
    Cell(8, "encoder-decoder", "clipped", {**SPLIT, "cp": 2, "pp": 2, "stages_per_rank": 2, "zero": 3}),
    Cell(8, "encoder-decoder", "adamw", {"cp": 2, "dp": 4, "instances": 2, "zero": 3}),
    Cell(8, "experts", "clipped", {**SPLIT, "cp": 2, "pp": 2, "ep": 2, "zero": 3}),
    Cell(8, "experts", "sgd", {"cp": 2, "dp": 2, "pp": 2, "ep": 4}),
]


def expected(
    model: str, optimizer: str, ranks: list[OfRank], *, frozen: bool = False, adapted: bool = False
) -> Trained:
    parameters = assemble(rank.parameters for rank in ranks)
    shapes = tuple((name, tuple(each.shape)) for name, each in parameters.items())
    return _expected(model, optimizer, shapes, frozen, adapted)


@functools.cache
def _expected(
    model: str, optimizer: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], frozen: bool, adapted: bool
) -> Trained:
    return plainly(model, optimizer, dict(sorted(shapes)), frozen=frozen, adapted=adapted)


def assert_parameters(ranks: list[OfRank], wanted: Trained) -> None:
    parameters = assemble(rank.parameters for rank in ranks)
    for name, parameter in wanted.parameters.items():
        # Only rounding is the gradient of a key's bias, and Adam makes whole steps of it.
        relative = 1e-7 if name.endswith("key_bias") else 1e-10
        assert_parameter_close(parameters[name], parameter, RATE, name, relative)


def check(rank_pools: RankPools, cell: Cell) -> None:
    ranks = rank_pools(cell.ranks).run(run, cell.model, cell.optimizer, cell.layout, **cell.options)
    part = {name: cell.options.get(name, False) for name in ("frozen", "adapted")}
    wanted = expected(cell.model, cell.optimizer, ranks, **part)
    for rank in ranks:
        for step, losses in enumerate(wanted.losses):
            assert rank.losses[step].keys() == losses.keys()
            for name, loss in losses.items():
                assert_number_close(rank.losses[step][name], loss, f"{name} of step {step}")
            assert_number_close(rank.norms[step], wanted.norms[step], f"gradient norm of step {step}")
    gradients = assemble(rank.gradients for rank in ranks)
    assert gradients.keys() == wanted.gradients.keys()
    norm = torch.stack([each.norm() for each in wanted.gradients.values()]).norm().item()
    for name, gradient in wanted.gradients.items():
        assert_gradient_close(gradients[name], gradient, norm, f"gradient of {name}")
    assert_parameters(ranks, wanted)


@pytest.mark.parametrize("cell", wide_except(QUICK, [QUICK[number] for number in (1, 5, 11)]), ids=str)
def test_parallel_layers_train_as_plain_torch(cell: Cell, rank_pools: RankPools) -> None:
    check(rank_pools, cell)


@pytest.mark.wide
@pytest.mark.parametrize("cell", REST, ids=str)
def test_parallel_layers_train_as_plain_torch_on_more_layouts(cell: Cell, rank_pools: RankPools) -> None:
    check(rank_pools, cell)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param(
            *("encoder-decoder", (4, {**SPLIT, "pp": 2}, {}), (2, {"dp": 2, "zero": 3}, {})), marks=pytest.mark.wide
        ),
        pytest.param("encoder-decoder", (2, {"pp": 2}, {}), (2, {"tp": 2}, {}), marks=pytest.mark.wide),
        ("experts", (2, {"ep": 2, "zero": 1}, {}), (2, SPLIT, ONE_RANK_PER_EXPERT)),
        pytest.param(
            *("encoder-decoder", (3, {"cp": 3, "zero": 3}, {}), (4, {"cp": 2, "pp": 2}, {})), marks=pytest.mark.wide
        ),
    ],
    ids=["fewer ranks", "tensor-parallel ranks", "experts", "context-parallel ranks"],
)
def test_a_run_goes_on_under_another_layout(
    model: str, before: tuple[int, Any, Any], after: tuple[int, Any, Any], rank_pools: RankPools, tmp_path: Path
) -> None:
    for steps, (ranks, layout, options) in enumerate((before, after), 1):
        found = rank_pools(ranks).run(run, model, "adamw", layout, steps, save=tmp_path, **options)
    wanted = expected(model, "adamw", found)
    for rank in found:
        assert len(rank.losses) == 1
        for name, loss in wanted.losses[1].items():
            assert_number_close(rank.losses[0][name], loss, name)
    assert_parameters(found, wanted)


@pytest.mark.wide  # tests/distributed/test_layouts_steps.py has such matrices of a GPT
def test_muon_updates_matrices_that_ranks_have_parts_of(rank_pools: RankPools) -> None:
    for model in MODELS:
        alone = assemble(rank.parameters for rank in rank_pools(1).run(run, model, "muon", {}))
        wanted = Trained([], [], {}, alone)
        assert_parameters(rank_pools(2).run(run, model, "muon", {**SPLIT, "zero": 1}), wanted)
        moved = {name for name, each in alone.items() if "key_bias" not in name}
        before = {name: initial(name, torch.Generator(), alone[name].shape).double() for name in moved}
        assert all((alone[name] - before[name]).abs().max() > RATE / 100 for name in moved)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [pytest.param(1, {}, marks=pytest.mark.wide), pytest.param(2, SPLIT, marks=pytest.mark.wide), (2, {"cp": 2})],
    ids=["alone", "split", "cut"],
)
def test_evaluations_have_the_terms_of_experts(ranks: int, layout: Mapping[str, Any], rank_pools: RankPools) -> None:
    shapes = {name: each.shape for name, each in assemble(rank_pools(1).run(_shapes)).items()}
    weights = {name: initial(name, torch.Generator(), shape).double() for name, shape in shapes.items()}
    values = {name: torch.stack([each[name] for each in samples()]) for name in samples()[0]}
    wanted = MODELS["experts"].plain(weights, values)
    for found in rank_pools(ranks).run(evaluated, "experts", layout):
        assert found.keys() == wanted.keys()
        for name, term in wanted.items():
            assert_number_close(found[name], term.item(), name)


def _shapes() -> Any:
    return run("experts", "sgd", {}, steps=0).parameters


def test_initial_values_are_equal_under_every_layout(rank_pools: RankPools) -> None:
    for model in MODELS:
        alone = assemble(rank_pools(1).run(without_own_initial_values, model, {}))
        apart = assemble(rank_pools(2).run(without_own_initial_values, model, SPLIT))
        assert alone.keys() == apart.keys()
        for name, values in alone.items():
            if "plain" not in name and "mix" not in name:
                torch.testing.assert_close(apart[name], values, rtol=0, atol=0, msg=name)
            if name.endswith("bias") or "norm" in name:
                assert values.unique().tolist() == [float(name.endswith("norm.weight"))], name
        assert 0.01 < alone["target.words.weight"].std() < 0.03


def test_experts_on_ranks_with_the_same_tokens_are_refused(rank_pools: RankPools) -> None:
    for message in rank_pools(2).run(refusal, "experts", {"tp": 2}):
        assert message.startswith("block.0.experts: experts on several tensor-parallel ranks need Layout(sequence_par")
