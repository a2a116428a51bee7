"""Time of a step that offloads, as ratios to one that does not, and of its copies beside plain ones of as many bytes.

    python -m benchmarks.offload [--rounds 9] [--layers 12]

Llama-style, hidden 512, 8 samples of 512 tokens in one micro-batch, fp32, AdamW, all threads. "Host" and device are one
memory here: copies are real, and compete for it with the computation. Rivals step in turn, round by round; a figure is
the median over rounds of the clock, with quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import TensorDataset

import megalite
from benchmarks.cpu_step import Step, llama, quartiles, ratios
from benchmarks.results import write_results
from megalite.offload.transfers import make_transfers

HIDDEN, HEADS, FFN, VOCABULARY, SEQUENCE, BATCH = 512, 8, 1376, 4096, 512, 8
COPIED = 1 << 26
"""Bytes of the copies that are timed alone."""
PLAIN = "on the device"
WAYS: Mapping[str, Mapping[str, object]] = {
    PLAIN: {},
    "optimizer": {"optimizer_cpu_offload": True},
    "optimizer, overlapped": {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    "activations": {"cpu_offloading_num_layers": -1},
    "everything": {
        "optimizer_cpu_offload": True,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "cpu_offloading_num_layers": -1,
    },
}
"""Settings of each way; -1 layers: all but the last, the most that Megatron-LM's flag takes.

Everything is all but slices of the weights, which are offloaded under ZeRO 3 only.
"""


def step_of(way: str, layers: int) -> Step:
    """Return the step of a run."""
    settings = {name: layers - 1 if value == -1 else value for name, value in WAYS[way].items()}
    tokens = torch.randint(VOCABULARY, (BATCH * 4, SEQUENCE), generator=torch.Generator().manual_seed(0))
    run = megalite.Trainer(
        llama(layers, HIDDEN, HEADS, FFN, VOCABULARY),
        dataset=TensorDataset(tokens),
        collate=lambda samples: {"tokens": torch.stack([sample[0] for sample in samples])},
        optimizer=megalite.AdamW(lr=1e-3),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        watchdog=False,
        timing_interval=0,
        quiet=True,
        **settings,
    )
    return run.step


def copies() -> dict[str, Step]:
    """Return a copy to the host and back by the engine, and by torch alone."""
    transfers, device = make_transfers(torch.device("cpu")), torch.zeros(COPIED // 4)
    host, other = transfers.on_host(COPIED // 4, torch.float32), torch.zeros(COPIED // 4)

    def by_engine() -> None:
        transfers.begin("to host", device, host).wait()
        transfers.begin("to device", host, device).wait()

    def plain() -> None:
        other.copy_(device)
        device.copy_(other)

    return {"engine": by_engine, "plain": plain}


def measure(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step in each round, the steps in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS)[1:], default=list(WAYS)[1:])
    flags = parser.parse_args(arguments)
    found = {}
    times = measure(copies(), max(flags.rounds, 9))
    found["copies / plain copies"] = ratios(times, "engine", "plain")
    print(f"copies / plain copies          {quartiles(found['copies / plain copies'])}  (target 1.2)")
    times = measure({way: step_of(way, flags.layers) for way in (PLAIN, *flags.ways)}, flags.rounds)
    print(f"a step on the device           {quartiles(times[PLAIN])} s")
    for way in flags.ways:
        found[way] = ratios(times, way, PLAIN)
        print(f"{way + ' / on the device':30} {quartiles(found[way])}" + "  (target 1.15)" * (way == "everything"))
    write_results("offload", found)


if __name__ == "__main__":
    main()
