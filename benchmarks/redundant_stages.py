"""Price of computing each pipeline stage twice, as Bamboo does (arXiv 2204.12013), against that of copies in memory.

    python -m benchmarks.redundant_stages [--ranks 4] [--micro-batches 4 8 16] [--rounds 9] [--write]

Pipeline ranks on this machine, 1F1B, Llama-style, fp32, AdamW, one thread a rank. Each rank also holds the weights and
the optimizer's state of the next stage (the last rank those of the first), runs its forward for every micro-batch,
keeps what its backward needs until all ranks have ended theirs, gets its gradients, and updates its weights: should the
next rank die, this one has all that it had. The simulator of schedules places these forwards into idle time where they
fit; the others run at the end of the step. They are compared with the next rank's own, bit for bit, and so are the
weights at the end. Steps of three kinds take turns: plain, redundant, and followed by a copy in memory, on the rank
itself and on its partner.

Ranks share the cores of this machine, so the time of a step is computed for a core a rank: the time line of the
schedule, from the measured seconds of the CPU of each computation, and then the update. Messages take no time in it,
but the seconds of the CPU that the exchange of gradients and a copy take are added, as if nothing ran beside them. A
redundant run is taken to lose nothing at a failure but the backward of half a step's micro-batches of the lost stage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.next_stage import AGAIN, NextStage, Observer, Placement, captured, saved_bytes
from benchmarks.recovery import LLAMA_3
from benchmarks.results import RESULTS, write_results
from megalite.config.parse import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import resolve
from megalite.extras.planner.goodput import Failures
from megalite.extras.recovery.copies import Copies, memory_copies
from megalite.extras.recovery.interval import Price, interval_for
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import StageOutput
from megalite.pipeline.schedules import SCHEDULES, Action, Kind, orders_of
from megalite.pipeline.simulator import Duration, simulate
from megalite.pipeline.stages import Stages
from megalite.process.launchers import MEMORY_FILES
from megalite.run.run import make_trainer
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import open_data

SHAPE = """--mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --seq-length {sequence}
--max-position-embeddings {sequence} --num-layers {layers} --hidden-size {hidden} --num-attention-heads 8 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
--untie-embeddings-and-output-weights --pp {ranks} --micro-batch-size 1 --global-batch-size {micro_batches}
--train-iters 1000 --lr 1e-4 --eval-iters 0 --warm-restart --resume auto --memory-checkpoint-interval 1
--save {folder}"""
PLAIN, REDUNDANT, COPIED = KINDS = "plain", "redundant", "copied"
WARM_UP = 2
"""Steps of each kind before the first round."""


class Measured:
    """A rank that trains, with its own stage and the next one."""

    def __init__(self, rank: int, ranks: int, flags: str) -> None:
        config = resolve(parse_arguments(flags.split()).config, ranks)
        assert isinstance(config, RunConfig)
        self.mesh = ParallelMesh(rank=rank, world_size=ranks, **config.parallel.mesh_sizes)
        self.task = GPTTask(config, open_data(config), self.mesh)
        self.trainer = make_trainer(config, self.task, self.mesh, Path(config.checkpoint.save or ""))
        self.next, self.config = NextStage(config, self.task, rank, ranks), config
        self.seconds: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
        """Seconds by kind of step and part; parts that begin with "wall " are of the clock, others of the CPU."""
        self.copies: Copies | None = None

    def begin_copies(self) -> None:
        self.copies = memory_copies(self.config, self.mesh)
        assert self.copies is not None
        self.copies.begin(self.trainer)

    def step(self, kind: str, order: Sequence[Action], examine: Callable[[Observer], None] | None = None) -> None:
        """Run a step of a kind. The next stage's update runs after each, and counts in redundant ones alone.

        `examine`: is called once all ranks have run their lists.
        """
        trainer, seconds = self.trainer, self.seconds[kind]
        micro_batches = trainer.next_micro_batches()
        observer = Observer(self.next, micro_batches, order if kind == REDUNDANT else ())
        chunk = trainer.engine.chunks[0]
        own, chunk.run = chunk.run, captured(chunk.run, observer.outputs)

        def forward_backward() -> Any:
            gradients = trainer.forward_backward(micro_batches, observer=observer)
            observer.finish()
            return gradients

        try:
            gradients = self._timed(seconds, "computation", forward_backward)
        finally:
            chunk.run = own
        rates = trainer.rates.at(trainer.consumed_samples)
        if examine is not None:
            examine(observer)

        def exchange() -> None:
            observer.kept.clear()  # all ranks have run their backwards
            self.next.exchange_gradients(trainer)

        self._timed(seconds, "exchange", exchange)
        norm = self._timed(seconds, "update", lambda: trainer.update(gradients)).grad_norm
        self._timed(seconds, "next update", lambda: self.next.update(rates, norm))
        if kind == COPIED:
            self._timed(seconds, "copy", self._copy)
        for part, spent in observer.seconds.items():
            seconds[part].append(statistics.median(spent))

    def _timed(self, seconds: Mapping[str, list[float]], part: str, run: Callable[[], Any]) -> Any:
        """Measure a part of the step until all ranks have ended it."""
        dist.barrier()
        began, of_cpu = time.perf_counter(), time.process_time()
        result = run()
        seconds[part].append(time.process_time() - of_cpu)
        dist.barrier()
        seconds[f"wall {part}"].append(time.perf_counter() - began)
        return result

    def _copy(self) -> None:
        """Take a copy and wait until it is complete, on the partner too."""
        assert self.copies is not None
        began = time.process_time()
        self.copies.after_step(busy=False)
        self.seconds[COPIED]["copy to memory"].append(time.process_time() - began)
        while self.copies.busy:
            time.sleep(0.002)

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            kind: {part: statistics.median(values) for part, values in parts.items()}
            for kind, parts in self.seconds.items()
        }

    def forget(self) -> None:
        """Forget what was measured until now."""
        for parts in self.seconds.values():
            parts.clear()


def measure(rank: int, ranks: int, micro_batches: int, flags: str, rounds: int, files: Sequence[int]) -> dict[str, Any]:
    """Measure this rank of a connected world, and compare the next stage with the next rank's. Returns all figures.

    Raises RuntimeError if a bit of the redundant stage differs from the original.
    """
    os.environ["SLURMD_NODENAME"], os.environ[MEMORY_FILES] = (
        f"node{rank}",
        f"{os.getpid()} {','.join(map(str, files))}",
    )
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # so that lost nodes are replaced, and ranks have partners
    measured = Measured(rank, ranks, flags)
    stages = measured.trainer.schedules.stages
    orders = orders_of(SCHEDULES["1f1b"], stages, micro_batches)
    mesh, peaks, saved = measured.mesh, list[int](), list[int]()

    def examine(observer: Observer) -> None:
        _compare(mesh, "activations", _digests(observer.outputs), _digests(observer.kept))
        saved.append(saved_bytes(measured.next, observer.inputs(0), observer.micro_batches[0]))

    with measured.trainer.loader:
        for _ in range(WARM_UP):
            measured.step(PLAIN, ())
        peaks.append(_peak())
        placement = Placement.of(stages, orders, _durations(all_gather_json(measured.medians(), mesh)))
        for _ in range(WARM_UP):
            measured.step(REDUNDANT, placement.orders[rank], examine)
        peaks.append(_peak())
        measured.begin_copies()
        for _ in range(WARM_UP):
            measured.step(COPIED, ())
            measured.step(REDUNDANT, placement.orders[rank])
        peaks.append(_peak())
        measured.forget()
        for _ in range(rounds):
            for kind in KINDS:
                measured.step(kind, placement.orders[rank])
    trainer = measured.trainer
    _compare(mesh, "weights", [_digest(trainer.network.parameters())], [_digest(measured.next.chunks[0].parameters())])
    assert measured.copies is not None
    counted = {
        "parameters": sum(each.numel() for each in trainer.network.parameters()),
        "next stage": measured.next.size(),
        "activations": micro_batches * saved[0],
        "gradients sent": sum(bucket.gradient_shard.nbytes for bucket in trainer.optimizer.buckets),
        "copy": sum(region.part.size for region in measured.copies._regions(trainer)),
        "peaks": peaks,
    }
    told = all_gather_json((measured.medians(), counted), mesh)
    return figures(stages, orders, [medians for medians, _ in told], [counted for _, counted in told])


def figures(
    stages: Stages,
    orders: Sequence[Sequence[Action]],
    medians: Sequence[Mapping[str, Mapping[str, float]]],
    counted: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the figures of a pipeline, from each rank's medians and bytes."""

    def most(kind: str, *parts: str) -> float:
        return max(sum(rank[kind][part] for part in parts) for rank in medians)

    duration = _durations(medians)
    placement = Placement.of(stages, orders, duration)
    computation, following = _end(stages, orders, duration), ("update", "exchange", "next update")
    step = computation + most(PLAIN, "update")
    twice = _end(stages, placement.orders, duration) + most(REDUNDANT, *following)
    busiest = max(sum(duration(rank, action.kind) for action in order) for rank, order in enumerate(orders))
    copy = most(COPIED, "copy")
    prices = [
        Price(at_once := rank[COPIED]["copy to memory"], rank[COPIED]["copy"] - at_once,
              rank[PLAIN]["computation"] + rank[PLAIN]["update"])
        for rank in medians
    ]  # fmt: skip
    interval = max(interval_for(price, on_device=False) for price in prices)
    micro_batches = len(orders[0]) // 2
    lost = micro_batches / 2 * max(duration(rank, "B") for rank in range(stages.ranks))
    restart = json.loads((RESULTS / "recovery.json").read_text())["warm-srun"]["quantiles"]["median"]
    copies = Failures(LLAMA_3, copy, restart)
    best = max(1, round(copies.interval / step))

    def wall(kind: str, *parts: str) -> float:
        return sum(medians[0][kind][f"wall {part}"] for part in parts)

    def of_cpu(kind: str, *parts: str) -> float:
        return sum(rank[kind][part] for rank in medians for part in parts)

    own, other = ("computation", "update"), ("exchange", "next update")
    return {
        "micro_batches": micro_batches,
        "step_s": step,
        "idle_share": 1 - busiest / computation,
        "fitting_share": statistics.mean(placement.fitting),
        "keeping_weights_share": (computation + most(PLAIN, *following)) / step - 1,
        "redundant_share": twice / step - 1,
        "copy_s": copy,
        "copy_each_step_share": copy / step,
        "default_interval": interval,
        "copy_default_share": copy / (interval * step),
        "young_interval": best,
        "copy_young_share": copy / (best * step),
        "wall_redundant_share": wall(REDUNDANT, *own, *other) / wall(PLAIN, *own) - 1,
        "wall_copy_each_step_share": wall(COPIED, *own, "copy") / wall(PLAIN, *own) - 1,
        "cpu_redundant_share": of_cpu(REDUNDANT, *own, *other) / of_cpu(PLAIN, *own) - 1,
        "cpu_copy_each_step_share": of_cpu(COPIED, *own, "copy") / of_cpu(PLAIN, *own) - 1,
        "lost_redundant_s": lost,
        "restart_s": restart,
        "goodput_redundant": step / twice * math.exp(-lost * LLAMA_3),
        "goodput_copy_each_step": copies.goodput(step),
        "goodput_copy_default": copies.goodput(interval * step),
        "goodput_copy_young": copies.goodput(best * step),
        "redundancy_wins_below_s": break_even(step / twice, lost, copy, restart),
        "ranks": [{**bytes_of, **rank} for bytes_of, rank in zip(counted, medians, strict=True)],
    }


def break_even(speed: float, lost: float, copy: float, restart: float) -> float:
    """Return the seconds between failures at which copies, at their best interval, are as good as redundancy.

    Args:
        speed: share of a plain run's speed that a redundant one has.
        lost: seconds that a redundant run loses at a failure.
    """
    low, high = 1e-3, 1e9
    for _ in range(100):
        mean = math.sqrt(low * high)
        redundant_is_better = speed * math.exp(-lost / mean) > Failures(1 / mean, copy, restart).best
        low, high = (mean, high) if redundant_is_better else (low, mean)
    return high


def _durations(medians: Sequence[Mapping[str, Mapping[str, float]]]) -> Duration:
    """Return the measured durations; a redundant forward that was not measured takes as long as the original."""

    def duration(rank: int, kind: Kind) -> float:
        if kind == AGAIN:
            return medians[rank][REDUNDANT].get(AGAIN) or medians[(rank + 1) % len(medians)][PLAIN]["F"]
        return medians[rank][PLAIN][kind]

    return duration


def _end(stages: Stages, orders: Sequence[Sequence[Action]], duration: Duration) -> float:
    return max(own[-1].end for own in simulate(stages, orders, duration))


def _digests(outputs: Mapping[int, StageOutput]) -> list[str]:
    """Return digests of the bytes of all tensors and terms, by micro-batch."""
    return [
        _digest(tensor for part in outputs[number] for _, tensor in sorted(part.items())) for number in sorted(outputs)
    ]


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _compare(mesh: ParallelMesh, what: str, own: Sequence[str], again: Sequence[str]) -> None:
    """Raise RuntimeError, on all ranks, if what a rank has of the next stage is not what the next rank has."""
    told = all_gather_json((own, again), mesh)
    for rank, (_, found) in enumerate(told):
        if list(found) != list(told[(rank + 1) % len(told)][0]):
            raise RuntimeError(f"rank {rank}: the {what} of the next stage are not those of the next rank")


def _peak() -> int:
    """Return the largest resident memory of this process until now, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    return 0


def _rank(
    rank: int, ranks: int, micro_batches: int, flags: str, rounds: int, files: Sequence[Sequence[int]], folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = measure(rank, ranks, micro_batches, flags, rounds, files[rank])
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _print(found: Mapping[str, Any]) -> None:
    def megabytes(name: str) -> str:
        return f"{max(rank[name] for rank in found['ranks']) / 1e6:,.0f}"

    def grown(number: int) -> str:
        return f"{max(rank['peaks'][number] - rank['peaks'][number - 1] for rank in found['ranks']) / 1e6:,.0f}"

    print(
        f"{found['micro_batches']} micro-batches: a step takes {found['step_s']:.3f} s with a core a rank, of which "
        f"the busiest rank waits {found['idle_share']:.0%}; {found['fitting_share']:.0%} of the redundant forwards fit "
        f"into idle time, and weights alone twice would cost {found['keeping_weights_share']:.2%}"
    )
    rows = [("stages twice", found["redundant_share"], found["lost_redundant_s"], found["goodput_redundant"])]
    for name, interval in (
        ("each_step", 1),
        ("default", found["default_interval"]),
        ("young", found["young_interval"]),
    ):
        lost = found["restart_s"] + interval * found["step_s"] / 2
        price = found[f"copy_{name}_share"]
        rows.append((f"a copy every {interval} steps", price, lost, found[f"goodput_copy_{name}"]))
    for title, price, lost, goodput in rows:
        print(f"  {title:<24} step + {price:7.2%}, a failure loses {lost:8.2f} s, goodput {goodput:.2%}")
    print(
        f"  of the clock on this machine: twice + {found['wall_redundant_share']:.1%}, a copy after every step "
        f"+ {found['wall_copy_each_step_share']:.1%}; of the CPU: + {found['cpu_redundant_share']:.1%}, "
        f"+ {found['cpu_copy_each_step_share']:.1%}"
    )
    print(
        f"  MB a rank at most: weights, gradients and state twice {megabytes('next stage')}, activations "
        f"{megabytes('activations')} (peak + {grown(1)}), {megabytes('gradients sent')} sent a step; a copy "
        f"{megabytes('copy')}, four of them in the host's memory (peak + {grown(2)})"
    )
    print(f"  redundancy is better from a failure every {found['redundancy_wins_below_s']:.1f} s on", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--write", action="store_true", help="leave the figures in benchmarks/results")
    given = parser.parse_args()
    results = []
    for micro_batches in given.micro_batches:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            flags = SHAPE.format(**{**vars(given), "micro_batches": micro_batches, "folder": folder})
            files = [[os.memfd_create("slot") for _ in range(5)] for _ in range(given.ranks)]
            arguments = given.ranks, micro_batches, flags, given.rounds, files, folder
            context = torch.multiprocessing.start_processes(_rank, arguments, nprocs=given.ranks, start_method="fork")
            assert context is None or context.join()
            results.append({"load": load, **json.loads((Path(folder) / "found.json").read_text())})
            for number in (number for numbers in files for number in numbers):
                os.close(number)
        _print(results[-1])
    if given.write:
        print(write_results("redundant_stages", {"steps": results}))


if __name__ == "__main__":
    main()
