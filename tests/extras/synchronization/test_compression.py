"""Compressed gradients in a run: what leaves out nothing is plain data parallelism, the rest a plain loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.synchronization import reductions
from megalite.extras.synchronization.compressed import CompressedReduction
from megalite.extras.synchronization.low_rank import LowRankReduction
from megalite.extras.synchronization.methods import make_compressor
from megalite.extras.synchronization.power import first_factor
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from tests.extras.synchronization.test_local_update import FLAGS, NETWORK, RATE, STEPS, Outcome, Tensors, loss_of, run
from tests.harness.close import assert_bits_equal, assert_number_close, assert_parameter_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.oracle import Oracle

EXACT = {
    "topk": "topk --compression-ratio 1",
    "threshold": "threshold --compression-ratio 1",
    "randomk": "randomk --compression-ratio 1",
    "powersgd": "powersgd --compression-rank 16",
}
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss"
LAYOUTS = {
    "dp 2": (2, ""),
    "dp 3": (3, "--global-batch-size 6"),
    "zero 1": (2, "--use-distributed-optimizer"),
    "tp 2": (4, "--tp 2 --sequence-parallel"),
    "pp 2": (4, "--pp 2 --overlap-grad-reduce"),
    "cp 2": (4, "--cp 2 --hidden-dropout 0"),
    "experts": (4, f"{EXPERTS} --ep 2"),
    "zb-v": (4, "--pp 2 --pipeline-schedule zb-v --num-layers 4"),
}
LOSSY = ["fp16", "bf16", "int8", "fp8", "topk", "randomk", "threshold", "signsgd", "count-sketch", "powersgd"]


@pytest.mark.wide_except("topk-dp 3", "topk-tp 2", "topk-zb-v", "threshold-zero 1", "topk-experts")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", EXACT)
def test_what_leaves_out_nothing_is_plain_data_parallelism(method: str, layout: str, rank_pools: RankPools) -> None:
    ranks, flags = LAYOUTS[layout]
    plain = rank_pools(ranks).run(run, flags, 3)
    packed = rank_pools(ranks).run(run, f"{flags} --gradient-compression {EXACT[method]}", 3)
    assert_same(packed, plain)


@pytest.mark.parametrize("flags", ["--sites 2", "--local-update diloco --local-update-period 2 --sites 2"])
def test_sites_that_leave_out_nothing_are_plain(flags: str, rank_pools: RankPools) -> None:
    plain = rank_pools(4).run(run, flags.removeprefix("--sites 2"), 4)
    packed = rank_pools(4).run(run, f"{flags} --gradient-compression {EXACT['topk']}", 4)
    for ours, theirs in zip(packed, plain, strict=True):
        for loss, other in zip(ours.losses, theirs.losses, strict=True):
            assert_number_close(loss, other, "loss", 1e-12)


def assert_same(ours: list[Outcome], theirs: list[Outcome]) -> None:
    for outcome, other in zip(ours, theirs, strict=True):
        assert outcome.losses == other.losses
        for name, (_, values) in outcome.held.items():
            assert_bits_equal(values, other.held[name][1], name)


@pytest.mark.wide_except(
    *("signsgd-", "count-sketch-", "int8---tp 2 --sequence-parallel", "topk---pp 2 --overlap-grad-reduce"),
)
@pytest.mark.parametrize(
    ("method", "flags"),
    [(method, "") for method in LOSSY]
    + [("int8", "--tp 2 --sequence-parallel"), ("topk", "--pp 2 --overlap-grad-reduce"), ("signsgd", "--sites 2")]
    + [("powersgd", "--tp 2"), ("fp8", "--use-distributed-optimizer"), ("threshold", "--no-error-feedback")],
)
def test_ranks_agree_and_learn(method: str, flags: str, rank_pools: RankPools) -> None:
    ratio = "--compression-ratio 0.2" if method in ("topk", "randomk", "threshold", "count-sketch") else ""
    rank = "--compression-rank 2" if method == "powersgd" else ""
    of_run = f"--lr 0.01 --compression-warmup-iters 1 {flags} {ratio} {rank} --gradient-compression {method}"
    found = rank_pools(4).run(run, of_run, 9)
    first = found[0]
    for outcome in found:
        assert outcome.losses == first.losses
        for name, (box, values) in outcome.held.items():
            if name in first.held and first.held[name][0] == box:
                assert_bits_equal(values, first.held[name][1], name)
    assert first.losses[-1] < first.losses[0] - 0.2


# ------------------------------------------------------------------------------------------------ plain loops


@dataclass
class Loop:
    """Two networks on one process that exchange packed gradients, with SGD or Adam by hand."""

    compressor: Any
    slots: list[list[tuple[str, int, int, int]]]  # of each bucket: name, start, stop, length of the bucket
    momentum: float | None = None  # of DGC
    warmup: int = 0  # of 1-bit Adam
    rising: int = 0  # steps over which DGC raises its sparsity

    def train(self) -> tuple[list[float], Tensors]:
        data = open_data(resolve(parse_arguments(FLAGS.split()).config, 1)).train
        drawn = UNBIASED.weights(77, torch.float64)
        weights = {name: w.requires_grad_() for name, w in drawn.items()}
        kept: dict[Any, Tensor] = {}
        exact = Oracle(activation="exact_gelu")  # which megalite computes without biases, as Megatron-LM does
        first = {name: torch.zeros_like(w) for name, w in weights.items()}
        second = {name: torch.zeros_like(w) for name, w in weights.items()}
        losses = []
        for step in range(STEPS):
            totals = [loss_of(weights, data, [4 * step + rank, 4 * step + 2 + rank], exact) for rank in range(2)]
            count = sum(c for _, c in totals)
            losses.append(sum(t.item() for t, _ in totals) / count)
            ranks = [
                dict(zip(weights, torch.autograd.grad(t / count, weights.values()), strict=True)) for t, _ in totals
            ]
            if self.warmup and step >= self.warmup:
                ranks = [{n: 0.9 * first[n] / 2 + 0.1 * g for n, g in gradients.items()} for gradients in ranks]
            packs = step >= self.warmup
            exchange = self._exchange if self.compressor is not None else self._low_rank
            summed = {n: sum(g[n] for g in ranks) for n in weights} if not packs else exchange(step, ranks, kept)
            with torch.no_grad():
                for name, weight in weights.items():
                    if not self.warmup:
                        weight -= RATE * summed[name]
                        continue
                    if packs:
                        first[name] = summed[name]
                    else:
                        first[name] = 0.9 * first[name] + 0.1 * summed[name]
                        second[name] = 0.999 * second[name] + 0.001 * summed[name] ** 2
                    frozen = second[name] / (1 - 0.999 ** min(step + 1, self.warmup))
                    weight -= RATE * first[name] / (1 - 0.9 ** (step + 1)) / (frozen.sqrt() + 1e-6)
        return losses, {name: w.detach() for name, w in weights.items()}

    def _exchange(self, step: int, ranks: list[Tensors], kept: dict[Any, Tensor]) -> Tensors:
        """Pack each rank's half slices, add them up, pack the sums, and keep what is left out, for all buckets."""
        summed: Tensors = {}
        own = self.compressor
        if self.rising:
            own = make_compressor("dgc", RATIO ** min(1.0, (step + 1) / (self.rising + 1)), torch.float64)
        for number, slots in enumerate(self.slots):
            length = slots[0][3]
            key, half = self.keys[number] + step, length // 2
            sums = torch.zeros(2, half, dtype=torch.float64)
            for rank, gradients in enumerate(ranks):
                flat = torch.zeros(length, dtype=torch.float64)
                for name, start, stop, _ in slots:
                    flat[start:stop] = gradients[name].reshape(-1)
                zero = torch.zeros_like(flat)
                velocity = zero
                if self.momentum is not None:
                    velocity = self.momentum * kept.get((number, rank, "velocity"), zero) + flat
                    flat = velocity.clone()
                flat += kept.get((number, rank), zero)
                sent = own.restore(own.pack(flat.view(2, -1), key), half, torch.float64, key)
                kept[number, rank] = self._without_padding(flat - sent.view(-1), slots, 0)
                kept[number, rank, "velocity"] = velocity.masked_fill(sent.view(-1) != 0, 0)
                sums += sent
            for part in range(2):
                sums[part] = self._without_padding(sums[part], slots, part * half)
                value = sums[part] + kept.get((number, "sum", part), torch.zeros(half, dtype=torch.float64))
                again = self.again.restore(self.again.pack(value[None], key), half, torch.float64, key)[0]
                kept[number, "sum", part] = self._without_padding(value - again, slots, part * half)
                sums[part] = self._without_padding(again.clone(), slots, part * half)
            for name, start, stop, _ in slots:
                summed[name] = sums.view(-1)[start:stop].view(ranks[0][name].shape)
        return summed

    def _low_rank(self, step: int, ranks: list[Tensors], kept: dict[Any, Tensor]) -> Tensors:
        """Sum over the ranks by PowerSGD: M is p q^T, with p = orthonormal(sum M q) and q = sum M^T p."""
        summed: Tensors = {}
        for number, slots in enumerate(self.slots):
            flats = [torch.zeros(slots[0][3], dtype=torch.float64) for _ in ranks]
            for rank, gradients in enumerate(ranks):
                for name, start, stop, _ in slots:
                    flats[rank][start:stop] = gradients[name].reshape(-1)
                flats[rank] += kept.get((number, rank), torch.zeros_like(flats[rank]))
            total = flats[0] + flats[1]
            for kind, batch in enumerate(self.matrices[number]):
                rows, columns = batch.rows, batch.columns
                first = first_factor(batch.count, columns, 2, self.keys[number] + kind, torch.float64, total.device)
                for matrix, start in enumerate(batch.starts):
                    stop = start + rows * columns
                    q = kept.get((number, kind, matrix), first[matrix])
                    own = [flat[start:stop].view(rows, columns) for flat in flats]
                    p = torch.linalg.qr(own[0] @ q + own[1] @ q).Q
                    q = own[0].T @ p + own[1].T @ p
                    kept[number, kind, matrix] = q
                    total[start:stop] = (p @ q.T).reshape(-1)
            for rank, flat in enumerate(flats):
                compressed = torch.zeros(len(flat), dtype=torch.bool)
                for batch in self.matrices[number]:
                    for start in batch.starts:
                        compressed[start : start + batch.rows * batch.columns] = True
                kept[number, rank] = torch.where(compressed, flat - total / 2, 0.0)
            for name, start, stop, _ in slots:
                summed[name] = total[start:stop].view(ranks[0][name].shape)
        return summed

    @staticmethod
    def _without_padding(values: Tensor, slots: list[tuple[str, int, int, int]], begin: int) -> Tensor:
        inside = torch.zeros(begin + len(values), dtype=torch.bool)
        for _, start, stop, _ in slots:
            inside[start:stop] = True
        return values * inside[begin:]

    again: Any = None
    keys: Any = None
    matrices: Any = None


UNBIASED = replace(
    NETWORK, biases=False
)  # the gradient of a bias of keys is zero but for rounding, whose sign is random
RATIO = 0.1
SGD = "--optimizer sgd --sgd-momentum 0 --adam-eps 1e-8 --clip-grad 0 --weight-decay 0"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "topk": (f"{SGD} --gradient-compression topk --compression-ratio {RATIO}", {}),
    "randomk": (f"{SGD} --gradient-compression randomk --compression-ratio {RATIO}", {}),
    "int8": (f"{SGD} --gradient-compression int8", {}),
    "powersgd": (f"{SGD} --gradient-compression powersgd --compression-rank 2", {}),
    "signsgd": (f"{SGD} --gradient-compression signsgd", {}),
    "dgc": (
        f"{SGD.replace('momentum 0', 'momentum 0.8')} --gradient-compression dgc --compression-ratio {RATIO}",
        {"momentum": 0.8},
    ),
    "dgc, rising": (
        f"{SGD.replace('momentum 0', 'momentum 0.8')} --gradient-compression dgc --compression-ratio {RATIO} "
        "--compression-warmup-iters 3",
        {"momentum": 0.8, "rising": 3},
    ),
    "onebit-adam": (
        "--clip-grad 0 --weight-decay 0 --gradient-compression onebit-adam --compression-warmup-iters 4",
        {"warmup": 4},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_a_plain_loop(case: str, rank_pools: RankPools) -> None:
    flags, options = CASES[case]
    method = case.partition(",")[0]
    outcomes = rank_pools(2).run(run, f"{flags} --disable-bias-linear")
    ratio = RATIO if method in ("topk", "dgc", "randomk") else 1.0
    own = None if method == "powersgd" else make_compressor(method, ratio, torch.float64)
    loop = Loop(own, outcomes[0].slots, **options)
    loop.again = make_compressor("topk", 2 * ratio, torch.float64) if method in ("topk", "dgc") else own
    loop.keys, loop.matrices = outcomes[0].keys, outcomes[0].matrices
    losses, weights = loop.train()
    for outcome in outcomes:
        for number, (ours, theirs) in enumerate(zip(outcome.losses, losses, strict=True)):
            assert_number_close(ours, theirs, f"loss {number}", 1e-10)
        for name, (_, values) in outcome.held.items():
            assert_parameter_close(values, weights[name], RATE, name, 1e-10)


def losses_without_packing(flags: str) -> list[float]:
    """Return the losses of a run of 1-bit Adam whose messages leave out nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "make_compressor", lambda name, ratio, dtype: make_compressor("topk", 1.0, dtype))
        return run(f"{CASES['onebit-adam'][0]} {flags} --compression-warmup-iters 2", 6).losses


def test_a_tied_weight_has_the_momentum_once_whatever_the_number_of_stages(rank_pools: RankPools) -> None:
    (wanted, *_) = rank_pools(2).run(losses_without_packing, "")
    for losses in rank_pools(4).run(losses_without_packing, "--pp 2"):
        for number, (ours, theirs) in enumerate(zip(losses, wanted, strict=True)):
            assert_number_close(ours, theirs, f"loss {number}", 1e-9)


# ------------------------------------------------------------------------------------------------ skipped steps


def skipping(flags: str) -> tuple[list[bool], list[dict[str, Tensor]]]:
    """Return which of three steps are skipped, and the weights and residuals after each. Rank 1 has an infinity in the
    second one."""
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, dist.get_world_size())
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    accumulator, skipped, found = trainer.optimizer.buckets[0].accumulators[0], [], []
    begin = accumulator.reduction.begin

    def begin_with_infinity(gradients: Tensor, out: Tensor | None) -> Pending:
        if mesh.rank == 1 and trainer.iteration == 1:
            gradients[7] = math.inf
        return begin(gradients, out)

    accumulator.reduction.begin = begin_with_infinity  # type: ignore[method-assign]
    with trainer.loader:
        for _ in range(3):
            skipped.append(trainer.step().skipped)
            state = {f"{number}": b.parameters.clone() for number, b in enumerate(trainer.optimizer.buckets)}
            packers = getattr(accumulator.reduction, "packers", {})
            state |= {f"{what} {name}": kept.clone() for what, p in packers.items() for name, kept in p.state.items()}
            found.append(state)
    return skipped, found


@pytest.mark.wide_except(
    "--gradient-compression int8",
    "--gradient-compression topk",
    "--gradient-compression powersgd --compression-rank 2",
    "--local-update diloco --local-update-period 3",
)
@pytest.mark.parametrize(
    "flags",
    [
        *(f"--gradient-compression {method}" for method in ("int8", "fp8", "topk", "signsgd", "threshold")),
        "--gradient-compression powersgd --compression-rank 2",
        f"{SGD} --gradient-compression dgc",
        "--gradient-compression int8 --sites 2",
        "--local-update diloco --local-update-period 3",
    ],
)  # fmt: skip
def test_an_infinity_anywhere_skips_the_step_everywhere_and_leaves_no_trace(flags: str, rank_pools: RankPools) -> None:
    for skipped, found in rank_pools(2).run(skipping, flags):
        assert skipped == [False, True, False]
        for name, values in found[0].items():
            assert_bits_equal(found[1][name], values, name)
            assert torch.isfinite(found[2][name]).all()


def losses_and_residuals(flags: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of four steps, and the residuals of the first bucket."""
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, dist.get_world_size())
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    with trainer.loader:
        losses = [trainer.step().loss for _ in range(4)]
    reduction = trainer.optimizer.buckets[0].accumulators[0].reduction
    if isinstance(reduction, LowRankReduction):
        return losses, dict(reduction.state)
    assert isinstance(reduction, CompressedReduction)
    return losses, {name: packer.state["residual"] for name, packer in reduction.packers.items()}


@pytest.mark.parametrize("method", ["bf16", "powersgd --compression-rank 1"])
def test_residuals_follow_the_loss_scale(method: str, rank_pools: RankPools) -> None:
    """A loss scale that is doubled after each step gives the residuals of one that stays."""
    flags = f"--fp16 --no-fp64 --gradient-compression {method} --initial-loss-scale 256 --min-loss-scale 1"
    growing = rank_pools(2).run(losses_and_residuals, f"{flags} --loss-scale-window 1")
    steady = rank_pools(2).run(losses_and_residuals, flags)
    for (losses, residuals), (others, wanted) in zip(growing, steady, strict=True):
        assert losses == pytest.approx(others, rel=1e-3)  # activations underflow less at a larger scale
        assert residuals.keys() == wanted.keys() != set()
        for name, values in residuals.items():
            assert values.norm().item() == pytest.approx(wanted[name].norm().item(), rel=0.1)


def norms(flags: str) -> tuple[float, float]:
    """Return the norm that a step logs, and that of the gradients it has applied."""
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, dist.get_world_size())
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    with trainer.loader:
        logged = trainer.step().grad_norm
    return logged, math.hypot(*(bucket.gradients.norm().item() for bucket in trainer.optimizer.buckets))


@pytest.mark.parametrize("method", ["int8", "signsgd", "topk --compression-ratio 0.1"])
def test_the_norm_is_of_what_is_applied(method: str, rank_pools: RankPools) -> None:
    for logged, applied in rank_pools(2).run(norms, f"{SGD} --gradient-compression {method}"):
        assert_number_close(logged, applied, "norm")
