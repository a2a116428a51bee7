"""A checkpoint saved under any layout loads under any other, and the training continues as if never stopped.

Layouts are drawn at random in pairs, the one that saves and the one that loads. The tensors of all ranks, merged by the
parameters' `Sharding`, must have the same bits as the file, read by its documented format: weights and optimizer state.
The steps that follow must be those of the oracle, which trains without a stop (docs/invariants.md: I8, I9).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import TrainingState, manifest
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from tests.distributed.layout_cell import LAYOUT_FACTORS, MODEL_FACTORS, Cell, make_cell, rates, valid
from tests.distributed.layout_expected import Tensors, expected, on_ranks, run
from tests.distributed.layout_run import SEED, Training, assert_padding_is_zero, initialized_chunks, make_meshes
from tests.distributed.test_layouts import DROPOUT, PLAINEST
from tests.harness.checkpoints import read
from tests.harness.close import assert_bits_equal, assert_number_close, assert_parameter_close
from tests.harness.covering_array import Row, Valid
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters

BEFORE, AFTER = 1, 1
"""Steps under the layout that saves, and under the one that loads: one step reads all that was loaded."""

Target = tuple[Any, ...]
"""Values that some pair must contain: a value on one side, or two values together."""

RANKS: dict[str, tuple[Any, ...]] = {
    name: LAYOUT_FACTORS[name]
    for name in ("tp", "sequence_parallel", "pp", "schedule", "dp", "ep", "etp", "zero", "instances", "overlap")
} | {"schedule": ("1f1b", "interleaved-2", "interleaved-3", "zb-v")}
"""Factors that decide which rank has which tensors; overlap changes the buckets."""
TRAINED: dict[str, tuple[Any, ...]] = {
    name: MODEL_FACTORS[name] for name in ("family", "key_values", "qk_layernorm", "tied", "vocabulary")
} | {"optimizer": ("sgd", "adam", "muon")}
"""Factors that decide which tensors are saved."""
CROSSED = ("tp", "pp", "schedule", "zero")
"""Factors for which CI loads each value from each other value."""
ALONE = (*RANKS, *TRAINED)
"""Factors for which each value is saved, and loaded."""
TOGETHER = (("schedule", "tied"), ("zero", "optimizer"))
"""Pairs of factors for which CI saves and loads every two values: tied weights on one rank or two, each rule's state
sharded."""


ANY_SIDE: set[Target] = {
    (name, value)
    for name, values in (RANKS | TRAINED).items()
    for value in values
    if (name, value) != ("dp", 8) and name not in ("overlap", "key_values", "vocabulary")
}
"""Values that `make test` saves or loads; CI also has the others, and pairs of eight ranks."""


class _Completed(dict[str, Any]):
    """Row with the plainest values for all factors that it lacks."""

    def __missing__(self, name: str) -> Any:
        if name in RANKS or name in TRAINED:
            raise KeyError(name)
        return PLAINEST[name]


def sharding(row: Row) -> bool:
    """Tell whether a row, perhaps incomplete, can be run and has several ranks for its ZeRO stage."""
    return valid(_Completed(row)) and (row["zero"] == 0 or row["dp"] > row["instances"])


@dataclass(frozen=True)
class Pair:
    """Training that is saved and continues under another layout."""

    saving: Cell
    loading: Cell

    def __str__(self) -> str:
        return f"[{self.saving}] loaded under [{self.loading}]"

    @property
    def ranks(self) -> int:
        """Return the number of ranks for all runs: each load comes with another save and another load."""
        return self.saving.world_size + 2 * self.loading.world_size

    @property
    def most_ranks(self) -> int:
        return max(self.saving.world_size, self.loading.world_size)

    def values(self) -> set[Target]:
        """Return each factor's values, whichever side has them."""
        return {(name, getattr(cell, name)) for cell in (self.saving, self.loading) for name in ALONE}

    def met(self) -> set[Target]:
        sides = {"saving": self.saving, "loading": self.loading}
        crossed = {(name, getattr(self.saving, name), getattr(self.loading, name)) for name in CROSSED}
        met = {
            (side, *((name, getattr(cell, name)) for name in names))
            for side, cell in sides.items()
            for names in (*((name,) for name in ALONE), *TOGETHER)
        }
        return crossed | met


def to_meet(pairs_too: bool) -> set[Target]:
    factors = RANKS | TRAINED
    crossed = {(name, *values) for name in CROSSED * pairs_too for values in itertools.product(RANKS[name], repeat=2)}
    rest = {
        (side, *zip(names, values, strict=True))
        for side in ("saving", "loading")
        for names in (*((name,) for name in ALONE), *(TOGETHER * pairs_too))
        for values in itertools.product(*(factors[name] for name in names))
    }
    return crossed | rest


def random_pairs(count: int, seed: int, can_run: Valid) -> list[Pair]:
    """Return valid pairs of layouts, drawn at random."""
    generator = random.Random(seed)

    def layout(variant: Row) -> Row:
        while True:
            row = variant | {name: generator.choice(values) for name, values in RANKS.items()}
            if can_run(row):
                return row

    pairs: list[Pair] = []
    while len(pairs) < count:
        variant = {name: generator.choice(values) for name, values in TRAINED.items()}
        saving, loading = layout(variant), layout(variant)
        shared = math.lcm(saving["dp"], loading["dp"])
        samples = shared * -(-4 // shared)
        if samples <= 12:
            rest = {"samples": samples, "dropout": DROPOUT[len(pairs) % 2]}
            pairs.append(Pair(make_cell(saving, **rest), make_cell(loading, **rest)))
    return pairs


@cache
def many_pairs() -> list[Pair]:
    """Return the pairs that others are chosen from; drawing them takes a second."""
    return random_pairs(2000, 0, sharding)


def covering_pairs(missing: set[Target], met: Callable[[Pair], set[Target]], most_ranks: int = 8) -> list[Pair]:
    """Return those of many random pairs that cover the most missing targets per rank, until all are covered."""
    candidates = [(pair, met(pair)) for pair in many_pairs() if pair.most_ranks <= most_ranks]
    pairs: list[Pair] = []
    while missing:
        pair, covered = max(candidates, key=lambda candidate: len(candidate[1] & missing) / candidate[0].ranks)
        if not covered & missing:
            break  # the tests of what is met report it
        pairs.append(pair)
        missing = missing - covered
    return pairs


@cache
def both_ways() -> list[Pair]:
    """Return pairs that save and load each value: not when ranks import the module, since it takes half a second."""
    return covering_pairs(to_meet(pairs_too=False), Pair.met)


@cache
def pairwise() -> list[Pair]:
    """Return pairs that also save each value of some factors and load each other one."""
    return covering_pairs(to_meet(pairs_too=True), Pair.met)


@cache
def few_pairs() -> list[Pair]:
    """Return fewer pairs, which have each value on one side or the other."""
    return covering_pairs(ANY_SIDE, Pair.values, most_ranks=4)


def narrow_pairs() -> list[Pair]:
    """Return pairs with master weights, every other one with 16-bit state; for that, the oracle has no expected
    continuation."""
    return [
        Pair(*(replace(cell, dtype="bfloat16", narrow=number % 2 == 1) for cell in (pair.saving, pair.loading)))
        for number, pair in enumerate(both_ways()[::6])
    ]


# ------------------------------------------------------------------------------------------------- what ranks do


@dataclass(frozen=True)
class Saved:
    path: Path
    held: Tensors
    """Tensors when they were saved, as from `held`."""


BLOCK = 256
"""Bytes per block."""


@dataclass(frozen=True)
class Resumed:
    state: TrainingState
    loaded: Tensors
    """Tensors right after the load, as from `held`."""
    losses: list[float]
    gradient_norms: list[float]
    final: Tensors


def held(training: Training) -> Tensors:
    """Return this rank's part of the checkpoint's tensors by name, NaN elsewhere; padding must be zero."""
    found: Tensors = {}
    with unsharded_parameters(training.optimizer):
        assert_padding_is_zero(training.network)
        parameters = {id(p): p for p, _ in named_pieces(training.network)}.values()
        parts = [("model", parameter, parameter.detach().clone()) for parameter in parameters]
    for part in training.optimizer.slices():
        for name, values in part.state.items():
            local = torch.full((part.parameter.numel(),), torch.nan, dtype=values.dtype)
            local[part.start : part.stop] = values if isinstance(values, torch.Tensor) else values.read()
            parts.append((f"optimizer/{name}", part.parameter, local.view(part.parameter.shape)))
    for kind, parameter, local in parts:
        for piece in parameter.sharding.pieces:
            whole = torch.full(piece.tensor.shape, torch.nan, dtype=local.dtype)
            tensor = found.setdefault(f"{kind}/{piece.tensor.name}", whole)
            place, values = tensor[piece.box.slices()], piece.view(local)
            place.copy_(torch.where(place.isnan(), values, place))
    for name, state in training.optimizer.own_states:
        for piece in state.sharding.pieces:
            whole = torch.full(piece.tensor.shape, torch.nan, dtype=state.values.dtype)
            found.setdefault(f"optimizer/{name}/{piece.tensor.name}", whole)[piece.box.slices()] = piece.view(
                state.values
            )
    return found


def train_and_save(cells: Sequence[Cell], folders: Sequence[Path]) -> list[Saved]:
    meshes, answers = make_meshes(cells), []
    for cell, folder in zip(cells, folders, strict=True):
        mesh = meshes[cell.split]
        training = Training(mesh, cell, initialized_chunks(mesh, cell))
        for step in range(BEFORE):
            training.step(step)
        now, number = held(training), int(folder.name)
        save = training.save_while_training if number % 2 else training.save
        with small_blocks():
            path = save(folder, BEFORE, "torch_dist" if number % 3 == 0 else "megalite")
        answers.append(Saved(path, now))
    return answers


@contextmanager
def small_blocks() -> Iterator[None]:
    """Make these small tensors consist of several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", BLOCK)
        yield


def resume(cells: Sequence[Cell], paths: Sequence[Path]) -> list[Resumed]:
    meshes = make_meshes(cells)
    return [_resume(meshes[cell.split], cell, path) for cell, path in zip(cells, paths, strict=True)]


def _resume(mesh: ParallelMesh, cell: Cell, path: Path) -> Resumed:
    """Load into a training with other values and continue; then load again the checkpoint saved meanwhile."""
    training = Training(mesh, cell, initialized_chunks(mesh, cell, SEED + 1))
    training.optimizer.steps = 7
    for part in training.optimizer.slices():
        for values in part.state.values():
            values.fill_(7.0)
    for _, own in training.optimizer.own_states:
        own.values.fill_(7.0)
    with small_blocks():
        state = training.load(path)
    loaded = held(training)
    again = training.save(path.parent / "again", BEFORE)
    steps = [training.step(BEFORE)]
    went_on = held(training)
    steps += [training.step(step) for step in range(BEFORE + 1, BEFORE + AFTER)]
    final = {name: values for name, values in held(training).items() if name.startswith("model/")}
    training.load(again)
    assert training.step(BEFORE) == steps[0], f"[{cell}] the step after a save is another after a load"
    assert_same(held(training), went_on, f"one step after a save and after a load [{cell}]")
    return Resumed(state, loaded, [loss for loss, _ in steps], [made.gradient_norm for _, made in steps], final)


# ------------------------------------------------------------------------------------------------------- the tests


def merged(ranks: Iterable[Tensors]) -> Tensors:
    """Return the unsharded tensors; an element on several ranks must have the same bits on each."""
    whole: Tensors = {}
    for found in ranks:
        for name, tensor in found.items():
            before = whole.setdefault(name, tensor)
            both = ~before.isnan() & ~tensor.isnan()
            assert_bits_equal(tensor[both], before[both], f"copies of {name}")
            whole[name] = torch.where(before.isnan(), tensor, before)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return whole


def assert_same(actual: Tensors, wanted: Tensors, what: str) -> None:
    assert actual.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        assert_bits_equal(actual[name], tensor, f"{name} {what}")


def check(rank_pools: RankPools, pairs: Sequence[Pair], folder: Path) -> None:
    """Check pairs that load with the same world size."""
    (loading_size,) = {pair.loading.world_size for pair in pairs}
    folders = {pair: folder / str(number) for number, pair in enumerate(pairs)}
    saved: dict[Pair, list[Saved]] = {}
    for size in sorted({pair.saving.world_size for pair in pairs}):
        part = [pair for pair in pairs if pair.saving.world_size == size]
        arguments = [pair.saving for pair in part], [folders[pair] for pair in part]
        answers = on_ranks(rank_pools, size, train_and_save, *arguments)
        saved |= dict(zip(part, map(list, zip(*answers, strict=True)), strict=True))
    paths = [saved[pair][0].path for pair in pairs]
    resumed = on_ranks(rank_pools, loading_size, resume, [pair.loading for pair in pairs], paths)
    for pair, ranks in zip(pairs, zip(*resumed, strict=True), strict=True):
        try:
            assert_goes_on(pair, saved[pair], ranks)
        except AssertionError as error:
            raise AssertionError(f"{pair}: {error}") from None


def assert_goes_on(pair: Pair, saved: Sequence[Saved], resumed: Sequence[Resumed]) -> None:
    in_file = read(saved[0].path, BLOCK)
    assert_same(in_file, merged(rank.held for rank in saved), "in the file and on the ranks that saved it")
    assert_same(merged(rank.loaded for rank in resumed), in_file, "as loaded and in the file")
    first = resumed[0]
    for rank in resumed:
        assert rank.state == TrainingState(BEFORE, BEFORE * pair.saving.samples, BEFORE)
        assert rank.losses == first.losses, "ranks report different losses"
        assert rank.gradient_norms == first.gradient_norms, "ranks report different norms"
    final = merged(rank.final for rank in resumed)
    if pair.saving.dtype != "float64":
        return
    wanted = expected(replace(pair.loading.alone(), steps=BEFORE + AFTER))
    for step in range(AFTER):
        assert_number_close(first.losses[step], wanted.losses[BEFORE + step], f"loss {step} steps after the load")
        norm = wanted.gradient_norms[BEFORE + step]
        assert_number_close(first.gradient_norms[step], norm, f"gradient norm {step} steps after the load")
    for name, weight in wanted.final.items():
        rate = rates(pair.loading, 0).learning_rate
        assert_parameter_close(final[f"model/{name}"], weight, rate, f"{name} {AFTER} steps after the load")


def check_by_world_size(rank_pools: RankPools, pairs: Sequence[Pair], folder: Path) -> None:
    for size in sorted({pair.loading.world_size for pair in pairs}):
        check(rank_pools, [pair for pair in pairs if pair.loading.world_size == size], folder / str(size))


def test_every_value_is_saved_or_loaded() -> None:
    assert not ANY_SIDE.difference(*(pair.values() for pair in few_pairs()))


@pytest.mark.wide
def test_all_that_is_to_meet_meets() -> None:
    assert not to_meet(pairs_too=True).difference(*(pair.met() for pair in pairwise()))
    assert {pair.loading.world_size for pair in pairwise()} == {1, 2, 3, 4, 6, 8}


@pytest.mark.bits
def test_a_training_goes_on_under_any_layout(rank_pools: RankPools, tmp_path: Path) -> None:
    check_by_world_size(rank_pools, few_pairs(), tmp_path)


@pytest.mark.wide
@pytest.mark.bits
def test_so_does_one_in_16_bits(rank_pools: RankPools, tmp_path: Path) -> None:
    """Check the bits of weights, masters and state, and I8."""
    check_by_world_size(rank_pools, narrow_pairs(), tmp_path)


ACROSS: list[tuple[Row, Row]] = [
    ({"cp": 3, "zero": 2}, {"cp": 2, "way": "a2a", "chunks": 2}),
    ({"cp": 4, "zero": 3, "chunks": 2}, {"cp": 1}),
    ({"cp": 1}, {"cp": 2, "zero": 1}),
    ({"cp": 2, "zero": 1}, {"cp": 4, "way": "all_gather", "zero": 3}),
    ({"cp": 2, "tp": 2, "sequence_parallel": True}, {"cp": 2, "pp": 2, "zero": 1}),
]
"""Context parallelism of the run that saves, and of the one that loads."""


def across(rows: Iterable[tuple[Row, Row]]) -> list[Pair]:
    shared = {"dp": 1, "family": "llama", "documents": True}
    rest = {"optimizer": "adam", "dropout": 0.1}
    return [Pair(*(make_cell(shared | row, **rest) for row in pair)) for pair in rows]


@pytest.mark.wide
def test_so_does_one_that_cuts_its_samples_for_another_number_of_ranks(rank_pools: RankPools, tmp_path: Path) -> None:
    check_by_world_size(rank_pools, across(ACROSS[:1]), tmp_path)


@pytest.mark.wide
def test_so_does_one_that_cuts_its_samples_in_more_ways(rank_pools: RankPools, tmp_path: Path) -> None:
    check_by_world_size(rank_pools, across(ACROSS[1:]), tmp_path)


def test_so_does_one_that_cuts_its_samples_to_the_bit(rank_pools: RankPools, tmp_path: Path) -> None:
    """The run that is resumed under the same layout is the one that was not interrupted (I8)."""
    row = {"dp": 1, "family": "llama", "documents": True, "cp": 2, "chunks": 2, "zero": 1}
    cell = make_cell(row, optimizer="adam", dropout=0.1)
    (saved, *_) = rank_pools(2).run(train_and_save, [cell], [tmp_path / "0"])
    ranks = [rank for (rank,) in rank_pools(2).run(resume, [cell], [saved[0].path])]
    (unbroken,) = run(rank_pools, [replace(cell, steps=BEFORE + AFTER)])
    assert ranks[0].losses == unbroken.losses[BEFORE:]
    final = merged(rank.final for rank in ranks)
    for name, weight in unbroken.final.items():
        assert_bits_equal(final[f"model/{name}"], weight, name)


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [(1, 2), (3,), (4,), (6, 8)], ids=str)
def test_tp_pp_the_stages_of_a_rank_and_zero_are_each_loaded_from_each(
    ranks: tuple[int, ...], rank_pools: RankPools, tmp_path: Path
) -> None:
    """Check pairs that also save and load each value of all other factors."""
    check_by_world_size(rank_pools, [pair for pair in pairwise() if pair.loading.world_size in ranks], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_a_training_goes_on_under_more_layouts(seed: int, rank_pools: RankPools, tmp_path: Path) -> None:
    check_by_world_size(rank_pools, random_pairs(40, seed, lambda row: valid(_Completed(row))), tmp_path)
