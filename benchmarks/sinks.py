"""Seconds of a step with all sinks on, over those of a step with none.

A step is `--step-ms` of matrix products and the writing of its record: to `metrics.jsonl` alone, and to all sinks, in
blocks that alternate, in one process. Prints medians and quartiles of blocks, and of the ratios of pairs. W&B is
offline, MLflow writes files, and the collector of OpenTelemetry is not there. The process of services lives through all
blocks, so that what it takes of the cores is in both: its own seconds are the last line.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megalite.extras.sinks.curves import Curves
from megalite.extras.sinks.description import Description
from megalite.extras.sinks.link import ServiceProcess
from megalite.extras.sinks.tensorboard_events import TensorBoardEvents
from megalite.training.metrics import MetricsWriter, Sink, StepMetrics

CONFIGURATION = """
reporting: {wandb_project: p, wandb_entity: null, wandb_exp_name: null, wandb_save_dir: null,
            otel_service_name: null, prometheus_textfile: null}
parallel: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, context_parallel_size: 1}
"""
SERVICES = ("wandb", "mlflow", "opentelemetry", "prometheus")


def record(iteration: int) -> StepMetrics:
    """Return the record of a step."""
    speed = dict.fromkeys(("tokens_per_second", "tokens_per_second_per_device", "model_tflops_per_device", "mfu"), 0.5)
    norms = {f"grad_norm/group {number}": 0.5 for number in range(8)}
    return StepMetrics(
        iteration,
        8 * iteration,
        512 * iteration,
        {"lm_loss": 2.5},
        0.1,
        1e-4,
        1.0,
        False,
        0.5,
        speed,
        1,
        0,
        extra=norms,
    )


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)

    def products(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            matrix @ matrix
        return time.perf_counter() - begin

    count = max(1, int(options.step_ms / 1000 / (min(products(100) for _ in range(10)) / 100)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "WANDB_MODE": "offline",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        }

        def sinks() -> Sequence[Sink]:
            services = ServiceProcess(Description(SERVICES, name, 0, CONFIGURATION, 1), print)
            return TensorBoardEvents(folder / "tensorboard", CONFIGURATION, Curves(0)), services

        writers = MetricsWriter(folder / "none.jsonl"), MetricsWriter(folder / "all.jsonl", open_sinks=sinks)
        time.sleep(30)  # the libraries are imported meanwhile
        iteration = 0
        seconds: tuple[list[float], list[float]] = ([], [])
        own: tuple[list[float], list[float]] = ([], [])
        for block in range(options.blocks):
            for which in (0, 1) if block % 2 else (1, 0):
                begin, writing = time.perf_counter(), 0.0
                for _ in range(options.steps):
                    products(count)
                    iteration += 1
                    started = time.perf_counter()
                    writers[which].write(record(iteration))
                    writing += time.perf_counter() - started
                seconds[which].append((time.perf_counter() - begin) / options.steps)
                own[which].append(writing / options.steps)
        ratios = [on / off for off, on in zip(*seconds, strict=True)]
        for what, values, unit in (
            ("step with none, ms", seconds[0], 1e3),
            ("step with all, ms", seconds[1], 1e3),
            ("writing with none, us", own[0], 1e6),
            ("writing with all, us", own[1], 1e6),
            ("ratio", ratios, 1.0),
        ):
            low, middle, high = (unit * value for value in statistics.quantiles(values, n=4))
            print(f"{what:22} median {middle:.4g}, quartiles {low:.4g} and {high:.4g}")
        for writer in writers:
            writer.close()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"process of services, without those that it starts: {used.ru_utime + used.ru_stime:.1f} s of a core")


if __name__ == "__main__":
    main()
