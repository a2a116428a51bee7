"""A step that is not finite is run again with checks: it reports the origin, and changes nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.collectives import Pending
from megalite.parallel.randomness import RandomKey
from megalite.parallel.state import states_of, tallies_of
from megalite.process.host import host_name
from megalite.training.gradients import Gradients
from megalite.training.nonfinite import locate
from tests.distributed.layout_cell import Cell, make_cell, rates
from tests.distributed.layout_expected import on_ranks
from tests.distributed.layout_run import Training, initialized_chunks, local_micro_batches, make_meshes, plant_infinity
from tests.distributed.pipeline_run import loss_of
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters
from tests.harness.wide import wide_except

MAX = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Fault:
    """Fault of a step on one rank."""

    # forward or backward (of attention), router, parameter, mask, buffer, message, gradient (a norm's, on all ranks)
    kind: str
    rank: int = 0
    layer: int = 1
    whole_layer: bool = False  # of the layer instead of attention
    sample: int | None = None  # first sample of the faulty micro-batch; None: all
    value: float = float("nan")
    transient: bool = False


class _Spoiling(torch.autograd.Function):
    """Identity, except for one element of the gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, value: float | None) -> Tensor:
        ctx.value = value
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _spoiled(gradients[0], ctx.value), None


def _spoiled(tensor: Tensor, value: float | None) -> Tensor:
    """Return a copy, with one element set to the value unless it is None."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    if value is not None:
        copy.view(-1)[-1] = value
    return copy


def _sample(arguments: tuple[Any, ...]) -> int:
    keys = (getattr(argument, "key", argument) for argument in arguments)
    return next(key.samples[0] for key in keys if isinstance(key, RandomKey))


def _layers(chunks: Iterable[GPT]) -> dict[int, nn.Module]:
    return {
        index: layer for chunk in chunks for index, layer in enumerate(chunk.layers, chunk.stage_layers.first_layer)
    }


def plant(fault: Fault, training: Training) -> Callable[[], object]:
    """Plant the fault; return a function that removes it."""
    mesh, links = training.mesh, training.engine.links
    if fault.kind == "message":
        if mesh.rank == fault.rank:
            links.receive = _receive_spoiled(links.receive, fault.value)
        return lambda: vars(links).pop("receive", None)
    layer = _layers(training.network).get(fault.layer)
    if layer is None or fault.kind == "mask":
        return lambda: None
    if fault.kind == "gradient":  # of a parameter, on every rank
        return layer.input_norm.weight.register_hook(lambda gradient: _spoiled(gradient, fault.value)).remove
    if fault.kind == "buffer":
        plant_infinity(training.network, active=mesh.rank == fault.rank)
        return lambda: plant_infinity(training.network, active=False)
    if fault.kind == "router":  # the weights of the chosen experts

        def spoil_weights(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            experts, weights, *rest = output
            return experts, _spoiled(weights, fault.value if mesh.rank == fault.rank else None), *rest

        return layer.mlp.router.register_forward_hook(spoil_weights).remove
    if fault.kind == "parameter":
        return _plant_in_parameter(fault, layer) if mesh.rank == fault.rank else lambda: None

    def spoil(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        """Run the same operations on all ranks."""
        value = fault.value if mesh.rank == fault.rank and fault.sample in (None, _sample(arguments)) else None
        first = output if isinstance(output, Tensor) else output[0]
        spoiled: Tensor = (_Spoiling.apply if fault.kind == "backward" else _spoiled)(first, value)
        return spoiled if isinstance(output, Tensor) else (spoiled, *output[1:])

    return (layer if fault.whole_layer else layer.attention).register_forward_hook(spoil).remove


def _receive_spoiled(receive: Callable[[Tensor, int], Pending], value: float) -> Callable[[Tensor, int], Pending]:
    def spoiled(tensor: Tensor, peer: int) -> Pending:
        pending = receive(tensor, peer)
        return Pending(None, lambda: _spoiled(pending.wait(), value))

    return spoiled


def _plant_in_parameter(fault: Fault, layer: nn.Module) -> Callable[[], object]:
    bucket = layer.mlp.down.weight.gradient_buffer
    place = bucket.parameter_shard if bucket.zero_stage == 3 else layer.mlp.down.weight.data.view(-1)
    before = place[0].clone()
    place[0] = fault.value
    return lambda: place[:1].copy_(before)


def _masked(fault: Fault, micro_batch: MicroBatch) -> MicroBatch:
    if micro_batch.key.samples[0] != fault.sample:
        return micro_batch
    return replace(micro_batch, loss_mask=_spoiled(micro_batch.loss_mask, fault.value))


def train(cell: Cell, faults: list[Fault | None], located: bool) -> tuple[list[str], list[bool], str]:
    """Run a step per fault or None. Return the reports on skipped steps, which steps were skipped, and a digest of the
    bits."""
    mesh = make_meshes([cell])[cell.split]
    chunks = initialized_chunks(mesh, cell)
    training = Training(mesh, cell, chunks)
    multipliers = dict.fromkeys((term.name for term in chunks[0].loss_terms), 0.01)
    optimizer, told, skips, losses = training.optimizer, [], [], []
    for number, fault in enumerate(faults):
        remove = (lambda: None) if fault is None else plant(fault, training)
        micro_batches = list(local_micro_batches(cell, number, mesh.coordinate("dp")))
        if fault is not None and fault.kind == "mask":
            micro_batches = [_masked(fault, micro_batch) for micro_batch in micro_batches]
        actions = training.schedules.training(len(micro_batches))
        optimizer.begin_step(len(micro_batches))
        sums = training.engine.run(actions, micro_batches, multipliers, optimizer)
        skips.append(optimizer.step(rates(cell, number)).skipped)
        if fault is not None and fault.transient:
            remove()
        if skips[-1] and located:
            step = Gradients(0.0, {}, cell.samples, micro_batches, actions, (), {}, multipliers, 1.0, sums, before=None)
            told.append(locate(step, number, chunks, training.engine, cell.stages, optimizer, mesh))
        remove()
        losses.append(loss_of(sums) if fault is None else 0.0)
    return told, skips, _digest(training, losses)


def _digest(training: Training, losses: list[float]) -> str:
    digest = hashlib.blake2b(repr(losses).encode())
    with unsharded_parameters(training.optimizer):
        for tensor in _kept(training):
            digest.update(tensor.detach().clone().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _kept(training: Training) -> Iterator[Tensor]:
    yield from training.network.parameters()
    yield from (state.values for state in states_of(training.network))
    yield from (tally.own for tally in tallies_of(training.network))
    for part in training.optimizer.slices():
        yield from (part.state[name] for name in sorted(part.state))


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"tp": 1, "dp": 1},
    "one micro-batch": {"tp": 1, "dp": 1, "micro_batch_size": 4},
    "tp 2": {"tp": 2, "dp": 1, "fused_loss": True},
    "tp 2, sequence parallel, recomputed": {"tp": 2, "dp": 1, "sequence_parallel": True, "recompute": "uniform"},
    "pp 2, interleaved, recomputed": {"tp": 1, "dp": 1, "pp": 2, "schedule": "interleaved-2", "recompute": "block"},
    "pp 2, zb-h1": {"tp": 1, "dp": 1, "pp": 2, "schedule": "zb-h1"},
    "pp 2, zb-v": {"tp": 1, "dp": 1, "pp": 2, "schedule": "zb-v"},
    "tp 2, pp 2, zb-h1": {"tp": 2, "dp": 1, "pp": 2, "schedule": "zb-h1", "sequence_parallel": True},
    "dp 2": {"tp": 1, "dp": 2, "overlap": "reduce"},
    "dp 2, ZeRO 1": {"tp": 1, "dp": 2, "zero": 1, "overlap": "reduce and gather"},
    "dp 2, ZeRO 2": {"tp": 1, "dp": 2, "zero": 2, "recompute": "selective"},
    "dp 2, ZeRO 3": {"tp": 1, "dp": 2, "zero": 3, "overlap": "reduce and gather", "recompute": "uniform"},
    "experts": {"tp": 1, "dp": 1, "family": "deepseek"},
    "experts by quantiles": {"tp": 1, "dp": 1, "family": "kimi"},
    "pp 2, dp 2, ZeRO 3": {"tp": 1, "dp": 2, "pp": 2, "zero": 3, "schedule": "interleaved-2"},
}
WIDE = (
    *("tp 2, sequence parallel, recomputed", "tp 2, pp 2, zb-h1", "pp 2, dp 2, ZeRO 3", "pp 2, zb-h1"),
    *(
        "tp 2",
        "one micro-batch",
        "dp 2",
        "dp 2, ZeRO 1",
        "dp 2, ZeRO 2",
        "pp 2, interleaved, recomputed",
        "experts",
        "experts by quantiles",
        "dp 2, ZeRO 3",
    ),
)
"""Layouts whose features the other layouts have separately."""


def cell_of(layout: str, **rest: Any) -> Cell:
    return make_cell(LAYOUTS[layout], optimizer="adam", dropout=0.1, **rest)


def rank_of(cell: Cell, layer: int) -> int:
    """Return the last of the ranks that have a layer."""
    stage = next(s for s, part in enumerate(cell.parts()) if part.first_layer <= layer < part.first_layer + part.layers)
    return cell.world_size // cell.pp * (cell.stages.place(stage)[0] + 1) - 1


@pytest.mark.wide_except("pp 2, zb-v")
@pytest.mark.bits
@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.wide] * (n in WIDE)) for n in LAYOUTS])
def test_the_first_module_is_told_and_the_training_goes_on_with_the_same_bits(
    layout: str, rank_pools: RankPools
) -> None:
    """A NaN on one rank: in forward of its last micro-batch, then in backward of its first; then a clean step."""
    cell = cell_of(layout)
    layer, size, samples = 2, cell.micro_batch_size, cell.samples
    rank = rank_of(cell, layer)  # of the last data-parallel replica
    forward = Fault("forward", rank, layer, sample=2 * samples - size)
    backward = Fault("backward", rank, layer, sample=2 * samples + (cell.dp - 1) * size)
    faults = [None, forward, backward, None]
    pool = rank_pools(cell.world_size)
    watched = pool.run(train, cell, faults, True)
    for told, skips, _ in watched:
        assert skips == [False, True, True, False]
        assert told == watched[0][0]
    one, two = watched[0][0]
    last = samples // cell.dp // size - 1
    for number, text, fault, micro_batch in ((1, one, forward, last), (2, two, backward, 0)):
        assert f"step {number} was skipped" in text
        assert f"NaN came first on rank {rank} (" in text
        which = f"samples {fault.sample} to {fault.sample + size - 1}" if size > 1 else f"sample {fault.sample}"
        place = f"({which}), {fault.kind}, in "
        assert f"), in micro-batch {micro_batch} {place}" in text
        assert text.endswith(f"Of the step's {samples // size} micro-batches 1 are affected")
    place = f"the output of layer {layer}, attention"
    assert f"in {place}; {place}, output was still finite" in one
    assert f"in the gradient with respect to {place}, output; the gradient with respect to {place} was still" in two
    unwatched = pool.run(train, cell, faults, False)
    assert [digest for *_, digest in watched] == [digest for *_, digest in unwatched]


def told(rank_pools: RankPools, cell: Cell, *faults: Fault) -> list[str]:
    """Return the reports of a step for each fault, without the machine's name."""
    results = on_ranks(rank_pools, cell.world_size, train, cell, list(faults), True)
    texts, skips, _ = results[0]
    assert skips == [True] * len(faults)
    assert all(other == texts for other, *_ in results)
    return [text.replace(f" ({host_name()})", "").partition(" since its gradient is not finite")[2] for text in texts]


WATCHED = ". It was run once more to find the cause: "


@pytest.mark.wide
@pytest.mark.parametrize("dtype", wide_except(["float64", "float32", "bfloat16", "float16"], ["float32", "bfloat16"]))
def test_nan_is_told_from_infinity_in_every_precision(dtype: str, rank_pools: RankPools) -> None:
    cell = make_cell({"tp": 1, "dp": 1}, dtype=dtype, micro_batch_size=2)
    faults = [Fault("forward", value=value) for value in (math.nan, math.inf, -math.inf)]
    place = "in the output of layer 1, attention; the output of layer 1, attention, output was still finite"
    texts = told(rank_pools, cell, *faults)
    for text, value, sample in zip(texts, ("NaN", "infinity", "infinity"), (0, 4, 8), strict=True):
        samples = f"samples {sample} to {sample + 1}"
        first = f"{value} came first on rank 0, in micro-batch 0 ({samples}), forward, {place}"
        assert text == f"{WATCHED}{first}. Of the step's 2 micro-batches 2 are affected"


def test_a_loss_mask_that_is_not_finite_is_told(rank_pools: RankPools) -> None:
    cell = make_cell({"tp": 1, "dp": 2, "pp": 2})
    (text,) = told(rank_pools, cell, Fault("mask", sample=3))
    assert "NaN came first on rank 3, in micro-batch 1 (sample 3), forward, in the sums of the loss" in text


@pytest.mark.parametrize("dispatcher", wide_except(["alltoall", "allgather"], ["alltoall"]))
def test_a_router_that_is_not_finite_is_told(dispatcher: str, rank_pools: RankPools) -> None:
    """It is named, and not the experts to which the NaN travels on the other rank."""
    cell = make_cell({"dp": 2, "ep": 2, "family": "mixtral", "dispatcher": dispatcher})
    (text,) = told(rank_pools, cell, Fault("router", rank=1))
    place = "in the output of layer 1, mlp, router"
    assert text.startswith(f"{WATCHED}NaN came first on rank 1, in micro-batch 0 (sample 1), forward, {place}"), text


def test_what_is_not_finite_only_when_it_arrives_is_told(rank_pools: RankPools) -> None:
    (text,) = told(rank_pools, make_cell({"tp": 1, "dp": 1, "pp": 2}), Fault("message", rank=1))
    assert "came first on rank 1, in micro-batch 0 (sample 0), forward, in what stage 1 receives. Of" in text


@pytest.mark.parametrize("zero", [0, 3])
def test_a_parameter_that_is_not_finite_is_named(zero: int, rank_pools: RankPools) -> None:
    cell = make_cell({"tp": 1, "dp": 2, "zero": zero})
    (text,) = told(rank_pools, cell, Fault("parameter", rank=1, value=math.inf))
    name = "layers.1.mlp.down" if zero == 0 else "layers.1."
    assert text.startswith(f": before it began, parameters were already not finite, on rank 1: {name}")
    assert "(infinity). No later step can be finite" in text


@pytest.mark.parametrize("schedule", wide_except(["1f1b", "zb-h1"], ["zb-h1"]))
def test_a_weight_gradient_that_is_not_finite_is_told(schedule: str, rank_pools: RankPools) -> None:
    """The fault is on two ranks at once."""
    cell = make_cell({"tp": 2, "dp": 1, "pp": 2, "schedule": schedule, "sequence_parallel": True})
    (text,) = told(rank_pools, cell, Fault("gradient", layer=2, value=math.inf))
    assert text.startswith(f"{WATCHED}infinity came first on ranks 2, 3, in micro-batch 0 (sample 0 on rank 2), ")
    assert "backward, in the gradient of layers.2.input_norm.weight" in text
    assert text.endswith("Of the step's 4 micro-batches 4 are affected")


@pytest.mark.wide
@pytest.mark.parametrize("zero", wide_except([0, 2], [2]))
def test_sums_that_overflow_are_told_from_what_they_are_made_of(zero: int, rank_pools: RankPools) -> None:
    """Covers sums over micro-batches, sums over ranks, and the sum for the norm."""
    large, name = Fault("gradient", value=0.75 * MAX), "layers.1.input_norm.weight"
    alone, ranks = (make_cell({"tp": 1, "dp": dp, "zero": zero}, micro_batch_size=2) for dp in (1, 2))
    (over_micro_batches,) = told(rank_pools, alone, large)
    assert "micro-batch 1 (samples 2 to 3), backward, in the sum over micro-batches" in over_micro_batches
    over_ranks, norm = told(rank_pools, ranks, large, replace(large, value=1e200))
    assert over_ranks == (
        f"{WATCHED}each rank's gradients are finite, but their sum over the ranks is not: {name} (infinity)"
    )
    assert norm == f"{WATCHED}all gradients are finite, but their norm overflows"


def test_what_a_buffer_makes_of_finite_gradients_is_told(rank_pools: RankPools) -> None:
    cell = make_cell({"tp": 2, "dp": 1}, micro_batch_size=4)
    (text,) = told(rank_pools, cell, Fault("buffer", rank=1))
    made = "every gradient was finite, but what rank 1 accumulated from it is not: layers.0.attention.output (infinity)"
    assert text == WATCHED + made


@pytest.mark.parametrize("zero", wide_except([0, 3], [3]))
def test_a_fault_that_does_not_come_again_makes_a_device_suspect(zero: int, rank_pools: RankPools) -> None:
    cell = make_cell({"tp": 1, "dp": 2, "zero": zero})
    (text,) = told(rank_pools, cell, Fault("forward", rank=1, transient=True))
    assert text.startswith(f"{WATCHED}it was finite. So suspect a device or its memory, not the model. In the first")
    gradients = "gradients of rank 1, such as " if zero == 0 else "sums of the ranks' gradients, kept by ranks 0, 1"
    assert f"first run these were not finite: the loss of rank 1; {gradients}" in text


@pytest.mark.wide
def test_of_a_compiled_layer_the_layer_is_told_and_nothing_is_compiled_again(rank_pools: RankPools) -> None:
    cell = make_cell({"tp": 1, "dp": 1}, compiled="aot_eager")
    faults = [Fault(kind, layer=2, whole_layer=True) for kind in ("forward", "backward")]
    for (forward, backward), before, after in on_ranks(rank_pools, 1, _graphs, cell, *faults):
        assert before == after > 0
        assert "forward, in the output of layer 2; the output of layer 1 was still finite" in forward
        still_finite = "the gradient with respect to the output of layer 2 was still finite"
        assert f"backward, in the gradient of layers.2.attention.output_bias; {still_finite}" in backward


def _graphs(cell: Cell, *faults: Fault) -> tuple[list[str], int, int]:
    """Return the reports, and the numbers of compiled graphs without and with the checks."""
    counters.clear()
    train(cell, list(faults), False)
    before = counters["stats"]["unique_graphs"]
    texts, *_ = train(cell, list(faults), True)
    return texts, before, counters["stats"]["unique_graphs"]


@pytest.mark.wide
def test_empty_slots_are_no_affected_micro_batches(rank_pools: RankPools) -> None:
    """Every forward of rank 0 fails: that of its micro-batch, and those of the two slots without samples."""
    cell = make_cell({"tp": 1, "dp": 2, "zero": 2}, shares=(1, 3), samples=4)
    (text,) = told(rank_pools, cell, Fault("forward", rank=0))
    assert text.endswith("Of the step's 4 micro-batches 1 are affected")
