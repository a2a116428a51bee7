"""Check of what only a GPU can show: that kernels are right, how fast, and that it trains the same model as the CPU.

    benchmarks/gpu_check.sh [--only kernels training ...] [--minutes 9]

Parts, the most telling first: every kernel against float64; attention in blocks and weight gradients against wider
ones, and the time of torch's operators for it; layers with experts: their grouped products, how often the host waits,
DeepEP against all-to-all; context parallelism: attention by parts, its time beside whole attention, the losses of each
way, how much of a ring's communication is hidden; the compression of gradients against a copy of them; codes of few
bits against the CPU's, their products against the emulation's, and training with them against the CPU's and bf16's; a
model of one's own against the CPU; training of Llama-3.2-1B in bf16, and of layers of Llama 3 8B at two depths, with
the kernels, in other ways and in plain PyTorch, in turn; the kernels beside their rivals; bits after a resume; in
float64 the losses of ten steps on every layout against the CPU's; time and memory of one rank of published layouts.
What is measured is written as it comes, for each part to a file of its own,
benchmarks/results/gpu_check_PART_CARD.json, and what is not done after --minutes is left out: --only takes the parts
one by one. Fails where numbers are wrong or what is megalite's cannot run; what is slow, or a rival that fails, is
told. `--device cpu` tries what can be tried without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    gpu_as_rank,
    gpu_lowbits,
    gpu_offload,
    gpu_own_model,
    gpu_rounded_training,
    gpu_scaled_products,
    gpu_speed,
    kernels,
)
from benchmarks.gpu_compression import COPIES, compare_with_copy
from benchmarks.gpu_context import LOSS_TOLERANCE, check_parts, compare_overlap, compare_ways, time_parts
from benchmarks.gpu_experts import (
    ALLOWED,
    FLEX_TOLERANCE,
    PRODUCT_TOLERANCE,
    check_grouped_products,
    compare_flex,
    host_waits,
)
from benchmarks.gpu_numbers import check_side_by_side
from benchmarks.gpu_operations import (
    WEIGHT_GRADIENT_TOLERANCE,
    check_attention,
    check_weight_gradients,
    time_fused_attention,
)
from benchmarks.gpu_shapes import LAYERS_OF_8B, LLAMA_1B, SMALL, Shape
from benchmarks.gpu_state import card_name
from benchmarks.gpu_training import TOLERANCE, check_checkpoints, compare
from benchmarks.results import PACKAGES, RESULTS, versions
from megalite_kernels.cases import cases
from megalite_kernels.recipes import recipe
from megalite_kernels.scaled_products import refusal

NO_TIME = "no time was left"


@dataclass
class Report:
    """Findings of a part so far; each addition is written at once."""

    directory: Path
    device: str
    deadline: float = math.inf
    """Time of the monotonic clock at which the rest is left out."""
    part: str = "part"
    header: Mapping[str, object] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """One file for each part and kind of GPU."""
        return self.directory / f"gpu_check_{self.part}_{self.card}.json"

    @property
    def card(self) -> str:
        """Kind of GPU, as a part of the name of a file."""
        return card_name(torch.cuda.get_device_name() if self.gpu and torch.cuda.is_available() else self.device)

    def tell(self, part: str, row: object, words: str) -> None:
        """Add a row to a part's."""
        print(f"{part}: {words}", flush=True)
        self.found.setdefault(part, []).append(row)
        self.write()

    def fail(self, what: str) -> None:
        """Add what is wrong."""
        self.wrong.append(what)
        self.write()

    def warn(self, what: str) -> None:
        """Add what is slower than it should be."""
        self.slow.append(what)
        self.write()

    def write(self) -> None:
        """In the place of what was written before, which stays whole until then."""
        self.directory.mkdir(parents=True, exist_ok=True)
        new, path = self.path.with_suffix(".new"), self.path
        new.write_text(
            json.dumps({**self.header, **self.found, "wrong": self.wrong, "slow": self.slow}, indent=1) + "\n"
        )
        new.replace(path)

    @property
    def left_out(self) -> list[str]:
        """Return the reasons for which rows are missing, each once."""
        rows = [row for rows in self.found.values() for row in rows if isinstance(row, dict)]
        rows += [value for row in rows for value in row.values() if isinstance(value, dict)]
        return list(dict.fromkeys(str(row["left out"]) for row in rows if "left out" in row))

    @property
    def is_empty(self) -> bool:
        """True if the part has begun with nothing."""
        return self.found.get(self.part) == [{"left out": NO_TIME}]

    @property
    def minutes(self) -> float:
        """Left."""
        return (self.deadline - time.monotonic()) / 60

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.gpu else 1


def check_kernels(report: Report) -> None:
    """Numbers of every operation against float64."""
    for numbers in check_side_by_side(list(cases()), report.device, report.deadline):
        row = {"operation": numbers.case.name, "error over tolerance": numbers.error, "failure": numbers.failure}
        report.tell("kernels", row, str(numbers))
        if not numbers.right:
            report.fail(f"kernels: {numbers.case.name}")


def check_training(report: Report) -> None:
    """Llama-3.2-1B: tokens a second and model FLOP/s utilization, with the kernels, in other ways and of rivals."""
    shape = LLAMA_1B if report.gpu else SMALL
    _check_speed(report, [(name, shape) for name in gpu_speed.ORDER])


def check_layers(report: Report) -> None:
    """Layers of Llama 3 8B at two depths, ours and a rival's, and what one layer takes."""
    shapes = LAYERS_OF_8B if report.gpu else (SMALL, replace(SMALL, layers=1))
    _check_speed(report, [(name, shape) for name in (gpu_speed.OURS, "PyTorch") for shape in shapes])


def _check_speed(report: Report, cells: Sequence[tuple[str, Shape]]) -> None:
    row = {**gpu_speed.ceiling(report.device), "attention": gpu_speed.attention_operator(cells[0][1], report.device)}
    report.tell(report.part, row, _words(row))
    if report.gpu:
        torch.cuda.empty_cache()
    for row in gpu_speed.run_in_turn(cells, report.gpus, gpu=report.gpu, deadline=report.deadline):
        report.tell(report.part, row, _words(row))
        if "failed" in row and row["variant"] not in gpu_speed.RIVALS:
            report.fail(f"{report.part}: {row['variant']} with {row['layers']} layers failed")
        differences = row.get("largest relative difference", {})
        assert isinstance(differences, dict)
        for key, difference in differences.items():
            if not difference <= gpu_speed.TOLERANCE[key]:
                report.fail(f"{report.part}: {key} of {row['variant']} with {row['layers']} layers is another")


def check_benchmark(report: Report) -> None:
    """Milliseconds and bandwidth beside the rivals'."""
    tiny = "" if report.gpu else "--device cpu --tokens 3 --repeats 2 --rivals torch --only 2048"
    until = ["--minutes", str(report.minutes), "--results", str(report.directory)]
    code = kernels.main([*tiny.split(), *until])
    report.tell("benchmark", {"exit code": code}, f"see {report.directory / f'kernels_{report.card}.csv'}")
    if code:
        report.fail("benchmark: an operation failed")


def check_operations(report: Report) -> None:
    """Attention in blocks, weight gradients, and which of torch's operators attention takes, with the time of each."""
    row = time_fused_attention(report.device)
    report.tell("operations", {"fused attention": row}, f"fused attention: {_words(row)}")
    error = check_weight_gradients(report.device)
    report.tell("operations", {"error of weight gradients": error}, f"weight gradients: error {error:.1e}")
    if not error <= WEIGHT_GRADIENT_TOLERANCE:
        report.fail("operations: weight gradients")
    blocks = check_attention()
    report.tell("operations", {"attention in blocks": blocks}, f"attention in blocks: {blocks}")
    if not blocks["error over tolerance"] <= 1:
        report.fail("operations: attention in blocks")
    if blocks["compiled anew"]:
        report.warn(f"operations: attention in blocks was compiled anew {blocks['compiled anew']:.0f} times")


def check_experts(report: Report) -> None:
    """Grouped products, how often the host waits for the device, and DeepEP's losses."""
    error = check_grouped_products(report.device)
    report.tell("experts", {"error of grouped products": error}, f"grouped products: error {error:.1e}")
    if not error <= PRODUCT_TOLERANCE:
        report.fail("experts: grouped products")
    for name, allowed in ALLOWED.items() if report.gpu else ():
        found = host_waits(padded=name == "padded")
        words = f"{name}: the host waits {found[0]} times in forward and {found[1]} in backward"
        report.tell("experts", {"layer": name, "waits in forward and backward": found}, words)
        if any(ours > most for ours, most in zip(found, allowed, strict=True)):
            report.warn(f"experts: {words}")
    row = compare_flex(report.gpus, report.deadline)
    report.tell("experts", {"DeepEP": row}, f"DeepEP: {row}")
    difference = row.get("largest relative difference")
    if isinstance(difference, float) and not difference <= FLEX_TOLERANCE:
        report.fail("experts: losses with DeepEP")


def check_context(report: Report) -> None:
    """Attention by parts, losses of the ways of context parallelism, and the time of a ring."""
    for name, error in check_parts(report.device).items():
        words = f"attention by parts, {name}: error {error:.2g} of what is tolerated"
        report.tell("context", {"attention by parts": name, "error over tolerance": error}, words)
        if not error <= 1:
            report.fail(f"context: attention by parts, {name}")
    row = time_parts(report.device)
    report.tell("context", {"parts beside whole": row}, f"attention by parts beside whole: {_words(row)}")
    differences = compare_ways(report.gpus, report.deadline)
    report.tell("context", {"losses": differences}, f"losses of two ranks against one: {_words(differences)}")
    for name, difference in differences.items():
        if isinstance(difference, float) and not difference <= LOSS_TOLERANCE:
            report.fail(f"context: losses by {name}")
    row = compare_overlap(report.gpus)
    report.tell("context", {"ring": row}, f"ring: {_words(row)}")


def check_compression(report: Report) -> None:
    """Compression of a bucket of gradients against a copy of it."""
    for name, copies in compare_with_copy(report.device).items():
        report.tell("compression", {"step": name, "copies": copies}, f"{name}: {copies:.2f} times as long as a copy")
        if report.gpu and name in COPIES and not copies <= COPIES[name]:
            report.warn(f"compression: {name} takes {copies:.2f} copies, and {COPIES[name]} would do")


def check_lowbits(report: Report) -> None:
    """Codes and scales against the CPU's, products against the emulation's, what both take, and training with them."""
    different = gpu_lowbits.different_codes(report.device)
    report.tell(
        "lowbits", {"bytes that differ": different}, f"bytes of codes and scales that differ: {_words(different)}"
    )
    if any(different.values()):
        report.fail("lowbits: codes or scales")
    errors = gpu_lowbits.product_errors(report.device)
    report.tell("lowbits", {"error of products": errors}, f"error of products: {_words(errors)}")
    for name, error in errors.items():
        if isinstance(error, float) and not error <= gpu_scaled_products.TOLERANCE:
            report.fail(f"lowbits: {name} product")
    check_scaled_products(report)
    for name, share in gpu_lowbits.bandwidths(report.device):
        report.tell("lowbits", {"operation": name, "bandwidth of a copy": share}, f"{name}: {share:.0%} of a copy")
        if report.gpu and not share >= gpu_lowbits.BANDWIDTH:
            report.warn(f"lowbits: {name} has {share:.0%} of a copy's bandwidth")
    times = gpu_lowbits.product_times(report.device)
    report.tell("lowbits", {"time of bf16": times}, f"time of a bf16 product: {_words(times)}")
    if report.gpu and times.get("blockwise", 0.0) > gpu_lowbits.STEP:
        report.warn(f"lowbits: a blockwise product takes {times['blockwise']:.2f} of a bf16 product's time")
    check_rounded_training(report)


def check_scaled_products(report: Report) -> None:
    """Triton's products of blocks beside the emulation's, those of groups beside whole ones, and the time of both."""
    if problem := refusal(recipe("blockwise"), torch.device(report.device)):
        report.tell("lowbits", {"Triton's products": problem}, f"Triton's products: {problem}")
        return
    errors = gpu_scaled_products.errors(report.device)
    report.tell("lowbits", {"error of Triton's products": errors}, f"error of Triton's products: {_words(errors)}")
    for name, error in errors.items():
        if not error <= gpu_scaled_products.TOLERANCE:
            report.fail(f"lowbits: Triton's product {name}")
    different = gpu_scaled_products.different_numbers(report.device)
    words = f"numbers of groups that are not those of their own product: {_words(different)}"
    report.tell("lowbits", {"numbers of groups that differ": different}, words)
    if any(different.values()):
        report.fail("lowbits: Triton's products of groups")
    times = gpu_scaled_products.times(report.device)
    report.tell("lowbits", {"time of Triton's products": times}, f"time of Triton's products: {_words(times)}")
    if report.gpu and times["experts of bf16"] > gpu_scaled_products.SLOWEST:
        report.warn(f"lowbits: products of experts take {times['experts of bf16']:.2f} of the time of bf16's")


def check_rounded_training(report: Report) -> None:
    """Training in 8 bits beside bf16's: kept activations, losses against the CPU's, and the time of a step."""
    kept = gpu_rounded_training.kept_bytes(report.device)
    shares = {name: size / kept["bf16"] for name, size in kept.items()}
    report.tell("lowbits", {"bytes kept for backward": kept}, f"bytes kept for backward, of bf16's: {_words(shares)}")
    least = gpu_rounded_training.LEAST
    if report.gpu and shares.get(least, 0.0) > gpu_rounded_training.KEPT:
        report.warn(f"lowbits: layers with {least} keep {shares[least]:.2f} of the bytes that they keep in bf16")
    if report.gpu:
        torch.cuda.empty_cache()  # trainings are in processes of their own
    distances = gpu_rounded_training.distances(report.device, report.gpus, report.deadline)
    words = f"distance of losses from the CPU's: {_words(distances)}"
    report.tell("lowbits", {"distance of losses from the CPU's": distances}, words)
    for name in gpu_rounded_training.too_far(distances):
        report.fail(f"lowbits: losses in {name}")
    steps = gpu_rounded_training.step_times(report.device, report.deadline)
    for name, row in steps.items():
        report.tell("lowbits", {"step in": name, **row}, f"a step in {name}: {_words(row)}")
    took = steps.get("blockwise", {}).get("time of bf16")
    if report.gpu and took is not None and took > gpu_rounded_training.STEP:
        report.warn(f"lowbits: a blockwise step takes {took:.2f} of a bf16 step's time")


def check_resume(report: Report) -> None:
    """Bits after a resume from a checkpoint that was saved in the background."""
    different = check_checkpoints(min(report.gpus, 4), gpu=report.gpu, deadline=report.deadline)
    report.tell("resume", {"steps that differ": different}, f"{different} of 10 steps differ after a resume")
    if different:
        report.fail("resume: bits differ")


def check_layouts(report: Report) -> None:
    """Losses and gradient norms in float64 against the CPU's."""
    for row in compare(report.deadline):
        report.tell("layouts", row, _words(row))
        difference = row.get("largest relative difference")
        if "failed" in row or (isinstance(difference, float) and not difference <= TOLERANCE):
            report.fail(f"layouts: {row['family']} {row['optimizer']} {row['layout']}")


def check_own_model(report: Report) -> None:
    """Losses of a plain model against the CPU's, and log-probabilities of generation against training's."""
    row = gpu_own_model.compare(report.deadline)
    report.tell("own model", row, _words(row))
    if not row["largest relative difference"] <= gpu_own_model.TOLERANCE:
        report.fail("own model: losses")
    if not row["log-probability difference"] <= gpu_own_model.LOG_PROBABILITIES:
        report.fail("own model: log-probabilities")


def check_as_rank(report: Report) -> None:
    """Time and memory of one rank of published layouts. One that fails is wrong: each fits an 80 GB GPU."""
    for row in gpu_as_rank.measure(gpu_as_rank.LAYOUTS if report.gpu else gpu_as_rank.SMALL, report.deadline):
        report.tell("as rank", row, _words(row))
        if "failed" in row:
            report.fail(f"as rank: {row['name']}")


def check_offload(report: Report) -> None:
    """Step time by the share on the host, the share of hidden copies, and the largest model with and without."""
    for row in gpu_offload.times(gpu=report.gpu, deadline=report.deadline):
        report.tell("offload", row, _words(row))
        difference = row.get("largest relative difference")
        if "failed" in row or (isinstance(difference, float) and not difference <= gpu_offload.TOLERANCE):
            report.fail(f"offload: {row['way']}")
    for row in gpu_offload.largest_models(gpu=report.gpu, deadline=report.deadline):
        report.tell("offload", row, _words(row))


PARTS: dict[str, Callable[[Report], None]] = {
    "kernels": check_kernels,
    "operations": check_operations,
    "experts": check_experts,
    "context": check_context,
    "compression": check_compression,
    "lowbits": check_lowbits,
    "own-model": check_own_model,
    "training": check_training,
    "layers": check_layers,
    "benchmark": check_benchmark,
    "resume": check_resume,
    "layouts": check_layouts,
    "as-rank": check_as_rank,
    "offload": check_offload,
}
ON_GPUS_ALONE = ("kernels", "operations", "layouts")
NOTHING_CHECKED = 2
"""Exit code."""


def run_part(report: Report) -> None:
    name, start = report.part, time.monotonic()
    report.write()
    if report.minutes < 0:
        report.tell(name, {"left out": NO_TIME}, "left out, no time is left")
        return
    try:
        if report.gpu:
            torch.cuda.empty_cache()  # training is in processes of its own
        PARTS[name](report)
    except (subprocess.TimeoutExpired, TimeoutError):
        report.tell(name, {"left out": NO_TIME}, "the rest is left out, no time is left")
    except Exception as error:  # whatever it is, the other parts are of use
        report.tell(name, {"failed": traceback.format_exc()}, f"failed: {type(error).__name__}: {error}")
        report.fail(f"{name}: failed")
    report.tell("seconds", {name: round(time.monotonic() - start, 1)}, f"{time.monotonic() - start:.0f} for {name}")


def _words(row: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in row.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="after which what is left is left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return NOTHING_CHECKED
    names = [name for name in flags.only if flags.device == "cuda" or name not in ON_GPUS_ALONE]
    if left_out := [name for name in flags.only if name not in names]:
        print(f"needs a GPU and was not checked: {', '.join(left_out)}", file=sys.stderr)
    if not names:
        return NOTHING_CHECKED
    header: dict[str, object] = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if flags.device == "cuda" else "CPU"
    header |= {"device": gpus, "command": ["benchmarks/gpu_check.sh", *sys.argv[1:]], "versions": versions(PACKAGES)}
    deadline = time.monotonic() + 60 * flags.minutes
    reports = [Report(flags.results, flags.device, deadline, name, header) for name in names]
    for report in reports:
        run_part(report)
    for word, found in (("SLOW", [each.slow for each in reports]), ("WRONG", [each.wrong for each in reports])):
        for what in itertools.chain(*found):
            print(f"{word}: {what}")
    for report in reports:
        if report.left_out:
            print(f"{'NOT' if report.is_empty else 'IN PART'} CHECKED: {report.part}: {', '.join(report.left_out)}")
    if any(report.wrong for report in reports):
        return 1
    checked = [report.part for report in reports if not report.is_empty]
    if not checked:
        print("gpu_check: nothing was checked", file=sys.stderr)
        return NOTHING_CHECKED
    print(f"gpu_check: nothing is wrong in what was checked of {', '.join(checked)}; see {flags.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
