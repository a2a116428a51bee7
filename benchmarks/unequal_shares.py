"""Time of a step of two data-parallel ranks, one of which is half as fast, with equal shares and with `auto`.

    python -m benchmarks.unequal_shares [--steps 9] [--layers 4]

The second rank waits after each forward and backward for as long as it took: a throttle, not a slower device. Each rank
has one thread. The simulator is given the measured seconds of each rank's micro-batches; what a step takes beside them
(the exchange of gradients and the update) is that of the steps with equal shares. Medians of the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as multiprocessing
from torch.utils.data import TensorDataset

import megalite
from benchmarks.cpu_step import llama
from benchmarks.results import write_results
from megalite.parallel import collectives
from megalite.pipeline import engine
from megalite.pipeline.schedules import SCHEDULES, Action, orders_of
from megalite.pipeline.simulator import durations, simulate
from megalite.pipeline.stages import Stages
from megalite.training.unequal_shares import ComputeTimes

PORT, MICRO_BATCHES, SEQUENCE, VOCABULARY = 29531, 12, 256, 1024


def throttled(execute: Any) -> Any:
    """Return the execution of an action that takes twice as long if it computes."""

    def slowly(step: Any, action: Action) -> None:
        began = time.perf_counter()
        execute(step, action)
        if action.kind in ("F", "B", "I", "W"):
            time.sleep(time.perf_counter() - began)

    return slowly


def simulated(micro_batches: int, seconds: float) -> float:
    """Return the seconds of a rank's computations by the simulator. `seconds`: those of a micro-batch."""
    orders = orders_of(SCHEDULES["1f1b"], Stages(), micro_batches)
    thirds = durations(seconds / 3, seconds / 3, seconds / 3)
    return simulate(Stages(), orders, thirds)[0][-1].end


def measure(rank: int, steps: int, layers: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
    }
    if rank == 1:
        mock.patch.object(engine._Step, "execute", throttled(engine._Step.execute)).start()
    tokens = torch.randint(VOCABULARY, (MICRO_BATCHES * 4, SEQUENCE), generator=torch.Generator().manual_seed(0))
    run = megalite.Trainer(
        llama(layers, 256, 4, 688, VOCABULARY),
        dataset=TensorDataset(tokens),
        collate=lambda samples: {"tokens": torch.stack([sample[0] for sample in samples])},
        optimizer=megalite.AdamW(lr=1e-3),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        global_batch_size=MICRO_BATCHES,
        data_parallel_shares="auto",
        watchdog=False,
        quiet=True,
    )
    trainer, take, own = run._trainer, ComputeTimes.take, list[float]()

    def kept(times: ComputeTimes) -> float:
        own.append(take(times))
        return own[-1]

    def median() -> float:
        run.step()
        return statistics.median(run.step()["iteration_time_s"] for _ in range(steps))

    with mock.patch.object(ComputeTimes, "take", kept):
        equal = median()
        before = trainer.shares.deal(MICRO_BATCHES)
        decision = trainer.balance()
        auto = median()
    found = collectives.all_gather_json(
        [own[0], len(before.numbers), len(trainer.shares.deal(MICRO_BATCHES).numbers)], trainer.mesh
    )
    run.close()
    if rank:
        return
    print(decision and decision.why)
    of_equal = max(simulated(count, seconds) for seconds, count, _ in found)
    of_auto = max(simulated(count, seconds) for seconds, _, count in found)
    rest = equal - of_equal
    figures = {
        "seconds per micro-batch by rank": [seconds for seconds, *_ in found],
        "micro-batches by rank with auto": [count for *_, count in found],
        "step with equal shares, s": equal,
        "step with auto, s": auto,
        "step with auto by the simulator, s": of_auto + rest,
        "auto / the simulator's": auto / (of_auto + rest),
        "auto / equal shares": auto / equal,
    }
    for name, value in figures.items():
        print(f"{name:40} {value:.3f}" if isinstance(value, float) else f"{name:40} {value}")
    write_results("unequal_shares", figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    multiprocessing.spawn(measure, (arguments.steps, arguments.layers), nprocs=2)


if __name__ == "__main__":
    main()
