"""The fused operations beside plain PyTorch, torch.compile and Liger-Kernel: milliseconds, and the share of a copy.

    python -m benchmarks.kernels [--only WORD] [--rivals torch compile liger]

In bf16, at sizes far beyond the caches; variants run in turns on inputs of their own, and a figure is the median, with
quartiles. A rival that computes something else is left out. The share is of the bandwidth that a plain copy reaches
here, over the bytes that the operation cannot but read and write. Writes
benchmarks/results/kernels_CARD.json, .csv and .svg. Rivals that are not installed are a note. `--device cpu --tokens 8`
tries the command where there is no GPU.

Exit code 0; 1: an operation of megalite's failed; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bar_chart import bar_chart
from benchmarks.errors import largest, relative
from benchmarks.gpu_state import card_name, sampled, summary
from benchmarks.kernel_rivals import RIVALS, Functions, available, difference, function_for, own_inputs, rival_step
from benchmarks.results import RESULTS, write_results
from megalite_kernels import cases
from megalite_kernels.case import Case
from megalite_kernels.cross_entropy import gradient_, losses, statistics
from megalite_kernels.implementation import Kernels, current, use
from megalite_kernels.loss_options import Columns, LossOptions
from megalite_kernels.measure import ELEMENTS, REPEATS, Step, Traffic, all_times, case_step, copy_rate, traffic

TARGET = 0.85
"""Share of a copy's bandwidth to reach, for rows of at least WIDE elements."""
CROSS_ENTROPY_TARGET = 1 / 1.25
WIDE = 4096
WIDTHS = (2048, 4096, 8192, 16384)
"""Widths of the norms that are compared; of other operations all are."""
VOCABULARY, LOSS_TOKENS = 131072, 8192
CHECKED_TOKENS = 16
DIFFERENT = 3e-2
"""Norm of the difference of two results that are rounded to bf16 in several places."""
OURS = "megalite"


@dataclass(frozen=True)
class Row:
    operation: str
    direction: str
    implementation: str
    tokens: int
    milliseconds: float
    lower_quartile: float
    upper_quartile: float
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
    differences: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    """Functions that return how far a rival's results are from ours, for a few tokens."""
    before: Callable[[], object] = lambda: None
    """Called before each step, outside its time."""


# ------------------------------------------------------------------------------------------------- what is compared


def compared_cases() -> Iterator[Case]:
    """Yield cases of bf16 activations and weights, at some widths, and all of operations that differentiate nothing.

    The cross entropy is compared as a whole (`of_loss`).
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
    inputs, few = case.make_inputs(tokens, device), case.make_inputs(min(tokens, CHECKED_TOKENS), device)
    needed, steps, differences = traffic(case, own_inputs(inputs)), {OURS: case_step(case, own_inputs(inputs))}, {}
    for rival, functions in rivals.items():
        if (function := function_for(case.name, functions)) is not None:
            steps[rival] = rival_step(rival, function, own_inputs(inputs))
            differences[rival] = partial(difference, case.outputs, function, few)
    target = TARGET if case.width >= WIDE else None
    return Comparison(case.name, tokens, steps, needed, target, differences=differences)


def of_loss(rivals: Mapping[str, Functions], tokens: int | None, vocabulary: int, device: str) -> Comparison:
    """Cross entropy over the whole vocabulary: logits read once, read again and overwritten by their gradient.

    The logits are written anew before each step, because we and Liger-Kernel overwrite them.
    """
    torch.manual_seed(0)
    tokens = tokens or LOSS_TOKENS
    kept = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, device=device)
    labels = torch.randint(vocabulary, (tokens,), device=device)
    logits = kept.clone().requires_grad_()
    few = [kept[:CHECKED_TOKENS].clone().requires_grad_(), labels[:CHECKED_TOKENS]]
    options = LossOptions()

    def scales(tokens: int) -> Tensor:
        return torch.full((tokens,), 1.0 / tokens, device=device)

    def ours(logits: Tensor, labels: Tensor, scales: Tensor, mark: Callable[[], None]) -> Tensor:
        columns = Columns(0, vocabulary, vocabulary)
        found = statistics(logits, labels, columns, options)
        loss = losses(found, vocabulary, options)
        mark()
        gradient_(logits, labels, found[0].clone(), scales, columns, options)
        return loss

    def of_rival(function: Callable[..., Tensor]) -> float:
        own, theirs = (own_inputs(few) for _ in range(2))
        expected, loss = ours(own[0].detach(), own[1], scales(len(own[1])), lambda: None).mean(), function(*theirs)
        (gradient,) = torch.autograd.grad(loss, theirs[0])
        return largest([abs(loss.item() / expected.item() - 1), relative(gradient, own[0])])

    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    steps: dict[str, Step] = {OURS: partial(ours, logits.detach(), labels, scales(tokens))}
    differences = {}
    for rival, functions in rivals.items():
        function = functions["cross_entropy"] if rival == "liger" else plain
        steps[rival] = rival_step(rival, function, [logits, labels])
        differences[rival] = partial(of_rival, function)
    needed = Traffic(logits.nbytes, 2 * logits.nbytes)
    return Comparison(
        f"cross_entropy {vocabulary} bfloat16",
        tokens,
        steps,
        needed,
        CROSS_ENTROPY_TARGET,
        together=True,
        differences=differences,
        before=lambda: logits.detach().copy_(kept),
    )


def measured(comparison: Comparison, copy: float, device: torch.device, repeats: int, notes: list[str]) -> list[Row]:
    """The rows of one operation; a rival that fails or computes something else is a note."""
    steps = dict(comparison.steps)
    for rival in [rival for rival in steps if rival != OURS]:
        try:
            found = comparison.differences[rival]()
            if not found <= DIFFERENT:
                raise ValueError(f"another result than ours, by {found:.2g}")
            comparison.before()
            steps[rival](lambda: None)
        except Exception as error:
            notes.append(f"{RIVALS[rival]} {comparison.name}: {type(error).__name__}: {error}".partition("\n")[0])
            del steps[rival]
    times = all_times(list(steps.values()), device, repeats, comparison.before)
    parts = dict(zip(steps, times, strict=True))
    if comparison.together:
        parts = {name: [*each, [sum(pair) for pair in zip(*each, strict=True)]] for name, each in parts.items()}
    needed = [comparison.needed.forward, comparison.needed.backward, sum(comparison.needed)]
    rows = []
    for index, direction in enumerate(("forward", "backward", "both")[: len(parts[OURS])]):
        slowest_allowed = median(parts["compile"][index]) if "compile" in parts else math.inf
        for name, seconds in parts.items():
            lower, middle, upper = quantiles(seconds[index], n=4, method="inclusive")
            rate, verdict = needed[index] / middle, ""
            if name == OURS:
                judged = not comparison.together or direction == "both"
                target = comparison.target if judged else None
                verdict = judge(rate / copy, target, slowest_allowed / middle)
            where = comparison.name, direction, RIVALS.get(name, name), comparison.tokens
            rows.append(Row(*where, middle * 1e3, lower * 1e3, upper * 1e3, rate / 1e9, rate / copy, verdict))
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
    contents = {**figures, "rows": [asdict(row) for row in rows]}
    path = write_results("kernels", contents, directory, of=card_name(figures["device"]))
    with open(path.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(Row.__dataclass_fields__)
        table.writerows(asdict(row).values() for row in rows)
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(f"{row.operation}, {row.direction}", {})[row.implementation] = row.of_a_copy
    title = f"Share of a copy's bandwidth ({figures['copy_gigabytes_per_second']:.0f} GB/s), {figures['device']}"
    path.with_suffix(".svg").write_text(bar_chart(title, groups, TARGET, f"{TARGET:.0%}"))


def measure_all(
    makers: Sequence[tuple[str, Callable[[], Comparison]]],
    copy: float,
    device: torch.device,
    repeats: int,
    deadline: float,
    notes: list[str],
    failed: list[str],
) -> Iterator[list[Row]]:
    """Yield the rows of each operation, until the deadline of the monotonic clock. One that fails is a note, too."""
    for name, make in makers:
        if time.monotonic() > deadline:
            notes.append(f"{name}: no time was left")
            continue
        torch.compiler.reset()  # each shape is compiled for itself
        try:
            yield measured(make(), copy, device, repeats, notes)
        except Exception as error:  # the others are of use
            failed.append(name)
            notes.append(f"{name}: {type(error).__name__}: {error}".partition("\n")[0])


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
    device, notes, failed, begin = torch.device(flags.device), list[str](), list[str](), time.monotonic()
    rivals = available(flags.rivals, notes)
    copy = copy_rate(device, 2**30 if flags.device == "cuda" else 2**20)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if flags.device == "cuda" else "CPU",
        "megalite": current().description(device, torch.bfloat16),
        "copy_gigabytes_per_second": copy / 1e9,
    }
    print(f"{figures['device']}, megalite: {figures['megalite']}, a copy: {copy / 1e9:.0f} GB/s", flush=True)
    rows: list[Row] = []
    makers: list[tuple[str, Callable[[], Comparison]]] = [
        ("cross_entropy", partial(of_loss, rivals, flags.tokens, flags.vocabulary, flags.device))
    ]
    makers += [(case.name, partial(of_case, case, rivals, flags.tokens, flags.device)) for case in compared_cases()]
    makers = [(name, make) for name, make in makers if flags.only in name]
    deadline = begin + 60 * flags.minutes
    with sampled() as samples:
        for found in measure_all(makers, copy, device, flags.repeats, deadline, notes, failed):
            for row in found:
                what = f"{row.operation:44} {row.direction:8} {row.implementation:13} {row.milliseconds:9.3f} ms"
                spread = f"[{row.lower_quartile:.3f}, {row.upper_quartile:.3f}]"
                rate = f"{row.gigabytes_per_second:6.0f} GB/s {row.of_a_copy:5.0%}"
                print(what, spread, rate, row.verdict, flush=True)
            rows += found
            write(rows, figures | {"notes": notes}, flags.results)
    write(rows, figures | {"notes": notes, "gpu_meanwhile": summary(samples, 0.0, math.inf)}, flags.results)
    for note in notes:
        print(f"note: {note}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
