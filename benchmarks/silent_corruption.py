"""Price of the search for silent corruption on this machine: the hash of a tensor's bits, and its copy for comparison.

    python -m benchmarks.silent_corruption [--mebibytes 64] [--rounds 15] [--device cpu]

One thread; figures are medians, on a CPU of its time. A check hashes the weights and the optimizer's state twice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megalite.extras.corruption.bit_hash import BitHash
from megalite.parallel import device


def _median(call: Callable[[], object], rounds: int, place: torch.device) -> float:
    clock, seconds = time.thread_time if place.type == "cpu" else time.perf_counter, []
    for number in range(rounds + 2):
        began = clock()
        call()
        device.synchronize(place)
        if number >= 2:
            seconds.append(clock() - began)
    return statistics.median(seconds)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    place = torch.device(arguments.device)
    values = torch.randn(arguments.mebibytes << 18, device=place)
    room, bit_hash = torch.empty_like(values), BitHash(place)
    size = values.nbytes / 1e6
    for name, call in (("hash", lambda: bit_hash.of(values)), ("copy", lambda: room.copy_(values))):
        seconds = _median(call, arguments.rounds, place)
        print(f"{name} of {arguments.mebibytes} MiB: {seconds * 1e3:.2f} ms, {seconds * 1e6 / size:.1f} us per MB")


if __name__ == "__main__":
    main()
