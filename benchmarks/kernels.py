"""The fused operations beside plain PyTorch, torch.compile and Liger-Kernel: milliseconds, and the share of a copy.

    python -m benchmarks.kernels [--only WORD] [--rivals torch compile liger]

In bf16, at sizes far beyond the caches; variants run in turns, and a figure is the median. The share is of the
bandwidth that a plain copy reaches here, over the bytes that the operation cannot but read and write. Writes
benchmarks/results/kernels.json, .csv and .svg. Rivals that are not installed are a note. `--device cpu --tokens 8`
tries the command where there is no GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bar_chart import bar_chart
from benchmarks.kernel_rivals import RIVALS, Functions, available, function_for, rival_step
from benchmarks.results import RESULTS, write_results
from megalite_kernels import cases
from megalite_kernels.cases import Case
from megalite_kernels.cross_entropy import Columns, LossOptions, gradient_, losses, statistics
from megalite_kernels.implementation import Kernels, current, use
from megalite_kernels.measure import ELEMENTS, REPEATS, Step, Traffic, case_step, copy_rate, time_interleaved, traffic

TARGET = 0.85
"""Of a copy's bandwidth, for rows of at least WIDE elements."""
CROSS_ENTROPY_TARGET = 1 / 1.25
WIDE = 4096
WIDTHS = (2048, 4096, 8192, 16384)
"""Of the norms that are compared; of other operations all are."""
VOCABULARY, LOSS_TOKENS = 131072, 8192
OURS = "megalite"


@dataclass(frozen=True)
class Row:
    operation: str
    direction: str
    implementation: str
    tokens: int
    milliseconds: float
    gigabytes_per_second: float
    of_a_copy: float
    verdict: str = ""


@dataclass(frozen=True)
class Comparison:
    """One operation, and its variants over the same inputs."""

    name: str
    tokens: int
    steps: Mapping[str, Step]
    needed: Traffic
    target: float | None
    """The share of a copy that each direction, or for the loss both together, should reach."""
    together: bool = False


# ------------------------------------------------------------------------------------------------- what is compared


def compared_cases() -> Iterator[Case]:
    """Of bf16 activations and weights, at some widths; of operations that differentiate nothing all. The cross entropy
    is compared as a whole (`of_loss`).
    """
    for case in cases.cases():
        if case.operation == "cross_entropy":
            continue
        dtypes = case.name.split()[-1]
        if "norm" in case.operation and (dtypes != "bfloat16" or case.width not in WIDTHS):
            continue
        if case.operation in ("gelu", "swiglu", "rotary") and "bfloat16" not in dtypes:
            continue
        yield case


def of_case(case: Case, rivals: Mapping[str, Functions], tokens: int | None, device: str) -> Comparison:
    torch.manual_seed(0)
    tokens = tokens or max(ELEMENTS // case.width, 1)
    inputs = case.make_inputs(tokens, device)
    steps = {OURS: case_step(case, inputs)}
    for rival, functions in rivals.items():
        if (function := function_for(case.name, functions)) is not None:
            steps[rival] = rival_step(rival, function, inputs)
    return Comparison(case.name, tokens, steps, traffic(case, inputs), TARGET if case.width >= WIDE else None)


def of_loss(rivals: Mapping[str, Functions], tokens: int | None, vocabulary: int, device: str) -> Comparison:
    """Cross entropy over the whole vocabulary: logits read once, read again and overwritten by their gradient."""
    torch.manual_seed(0)
    tokens = tokens or LOSS_TOKENS
    logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, device=device)
    labels = torch.randint(vocabulary, (tokens,), device=device)
    scales = torch.full((tokens,), 1.0 / tokens, device=device)
    columns, options = Columns(0, vocabulary, vocabulary), LossOptions()

    def ours(mark: Callable[[], None]) -> None:
        found = statistics(logits, labels, columns, options)
        losses(found, vocabulary, options)
        mark()
        gradient_(logits, labels, found[0].clone(), scales, columns, options)

    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    own = [logits.clone().requires_grad_(), labels]
    steps: dict[str, Step] = {OURS: ours}
    for rival, functions in rivals.items():
        steps[rival] = rival_step(rival, functions["cross_entropy"] if rival == "liger" else plain, own)
    name = f"cross_entropy {vocabulary} bfloat16"
    needed = Traffic(logits.nbytes, 2 * logits.nbytes)
    return Comparison(name, tokens, steps, needed, CROSS_ENTROPY_TARGET, together=True)


def measured(comparison: Comparison, copy: float, device: torch.device, repeats: int, notes: list[str]) -> list[Row]:
    """The rows of one operation; a rival that fails is a note."""
    steps = dict(comparison.steps)
    for rival in [rival for rival in steps if rival != OURS]:
        try:
            steps[rival](lambda: None)
        except Exception as error:
            notes.append(f"{RIVALS[rival]} {comparison.name}: {type(error).__name__}: {error}".partition("\n")[0])
            del steps[rival]
    parts = dict(zip(steps, time_interleaved(list(steps.values()), device, repeats), strict=True))
    if comparison.together:
        parts = {name: [*seconds, sum(seconds)] for name, seconds in parts.items()}
    needed = [comparison.needed.forward, comparison.needed.backward, sum(comparison.needed)]
    rows = []
    for index, direction in enumerate(("forward", "backward", "both")[: len(parts[OURS])]):
        slowest_allowed = parts["compile"][index] if "compile" in parts else math.inf
        for name, seconds in parts.items():
            rate = needed[index] / seconds[index]
            verdict = ""
            if name == OURS:
                judged = not comparison.together or direction == "both"
                target = comparison.target if judged else None
                verdict = judge(rate / copy, target, slowest_allowed / seconds[index])
            implementation = RIVALS.get(name, name)
            milliseconds, of_a_copy = seconds[index] * 1e3, rate / copy
            rows.append(
                Row(
                    comparison.name,
                    direction,
                    implementation,
                    comparison.tokens,
                    milliseconds,
                    rate / 1e9,
                    of_a_copy,
                    verdict,
                )
            )
    return rows


def judge(of_a_copy: float, target: float | None, times_faster: float) -> str:
    """In words, with what was aimed at: a share of a copy, and no more time than torch.compile takes."""
    words = []
    if target is not None:
        words.append(f"{target:.0%} of a copy {'reached' if of_a_copy >= target else 'MISSED'}")
    if math.isfinite(times_faster):
        words.append(f"{'as fast as' if times_faster >= 0.98 else 'SLOWER than'} torch.compile ({times_faster:.2f} x)")
    return ", ".join(words)


# ------------------------------------------------------------------------------------------------- what is written


def write(rows: Sequence[Row], figures: Mapping[str, Any], directory: Path) -> None:
    """All that has been measured so far."""
    write_results("kernels", {**figures, "rows": [asdict(row) for row in rows]}, directory)
    with open(directory / "kernels.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(Row.__dataclass_fields__)
        table.writerows(asdict(row).values() for row in rows)
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(f"{row.operation}, {row.direction}", {})[row.implementation] = row.of_a_copy
    title = f"Share of a copy's bandwidth ({figures['copy_gigabytes_per_second']:.0f} GB/s), {figures['device']}"
    (directory / "kernels.svg").write_text(bar_chart(title, groups, TARGET, f"{TARGET:.0%}"))


def clocks() -> str | None:
    """What the GPU runs at, and may."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit", "--format=csv"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="only operations with this in their line")
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, help="unset: as many as make a tensor far larger than the caches")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="of the cross entropy")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further operation is begun")
    parser.add_argument("--results", type=Path, default=RESULTS)
    flags = parser.parse_args(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: --device cpu --tokens 8 tries the command", file=sys.stderr)
        return 2
    use(Kernels())
    device, notes, begin = torch.device(flags.device), list[str](), time.monotonic()
    rivals = available(flags.rivals, notes)
    copy = copy_rate(device, 2**30 if flags.device == "cuda" else 2**20)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if flags.device == "cuda" else "CPU",
        "megalite": current().description(device, torch.bfloat16),
        "copy_gigabytes_per_second": copy / 1e9,
        "clocks_before": clocks(),
    }
    print(f"{figures['device']}, megalite: {figures['megalite']}, a copy: {copy / 1e9:.0f} GB/s", flush=True)
    rows: list[Row] = []
    makers: list[tuple[str, Callable[[], Comparison]]] = [
        ("cross_entropy", partial(of_loss, rivals, flags.tokens, flags.vocabulary, flags.device))
    ]
    makers += [(case.name, partial(of_case, case, rivals, flags.tokens, flags.device)) for case in compared_cases()]
    for name, make in makers:
        if flags.only not in name:
            continue
        if time.monotonic() > begin + 60 * flags.minutes:
            notes.append(f"{name}: no time was left")
            continue
        torch.compiler.reset()  # each shape is compiled for itself
        try:
            found = measured(make(), copy, device, flags.repeats, notes)
        except Exception as error:  # the others are of use
            notes.append(f"{name}: {type(error).__name__}: {error}".partition("\n")[0])
            continue
        for row in found:
            times = f"{row.milliseconds:9.3f} ms {row.gigabytes_per_second:6.0f} GB/s {row.of_a_copy:5.0%}"
            print(f"{row.operation:44} {row.direction:8} {row.implementation:13} {times} {row.verdict}", flush=True)
        rows += found
        write(rows, figures | {"notes": notes, "clocks_after": clocks()}, flags.results)
    write(rows, figures | {"notes": notes, "clocks_after": clocks()}, flags.results)
    for note in notes:
        print(f"note: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
