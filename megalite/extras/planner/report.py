"""Report of plans: tables with the headers of NeMo and Megatron-Bridge, where the time goes, and memory by stage."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from megalite.extras.planner.cost import Cost
from megalite.extras.planner.goodput import Length
from megalite.extras.planner.intervals import rounded_dtype
from megalite.extras.planner.memory import RankMemory
from megalite.extras.planner.neighbours import Neighbour
from megalite.extras.planner.plan import GIB, Plan, Planner
from megalite.extras.planner.savings import savings
from megalite.extras.planner.scaling import Size, communication, computation, serial_fraction
from megalite.extras.planner.search import Found

ENTRIES = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "element-wise",
    "launch": "waiting for launches",
    "tensor": "TP messages",
    "context": "CP messages",
    "expert": "EP messages",
    "pipeline": "PP messages",
    "bubble": "bubble",
    "data": "DP messages",
    "optimizer": "optimizer",
    "host": "host and its copies",
}
"""Words for what takes the time of a step, by the fields of a cost."""
MEMORY = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "transient": "transient",
    "reserved": "driver",
}
_PRECISIONS = {
    "bfloat16": "BF16",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "float8": "FP8",
    "float4": "FP4",
}
_BAR = 48
_MARKS = "#=+*-."


@dataclass(frozen=True)
class Results:
    """Results of a search, with the commands that start the best plan, and the lines about its length."""

    found: Found
    starts: Sequence[str]
    notes: Sequence[str]
    length: Length
    neighbours: Sequence[Neighbour]
    sizes: Sequence[Size]


def row(plan: Plan) -> dict[str, str | int | float]:
    """Return a plan as a row of a table. The headers up to the TFLOP are those of Megatron-Bridge's tables."""
    config, layout = plan.config, plan.layout
    samples = config.training.global_batch_size or 0
    copies = config.parallel.data_parallel_size(plan.gpus)
    return {
        "#-GPUs": plan.gpus,
        "Precision": _PRECISIONS[rounded_dtype(config) or config.training.dtype],
        "GBS": samples,
        "MBS": layout.micro_batch,
        "Sequence Length": config.data.seq_length,
        "FSDP": copies * layout.context if layout.zero == 3 else 0,
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "CP": layout.context,
        "VP": layout.chunks if layout.chunks > 1 else "n/a",
        "EP": layout.expert or "n/a",
        "GA": samples // (layout.micro_batch * copies),
        "Tokens / sec / GPU": round(plan.step.tokens_per_second),
        "Model TFLOP / sec / GPU": round(plan.step.flops / 1e12),
        "SP": "yes" if layout.sequence else "no",
        "ETP": layout.expert_tensor if layout.expert else "n/a",
        "Schedule": layout.schedule if layout.pipeline > 1 else "n/a",
        "ZeRO": layout.zero,
        "Recompute": layout.recompute,
        "Step s": round(plan.step.seconds, 3),
        "Memory GiB": round(plan.memory[plan.fullest].total / GIB, 1),
        "Host GiB": round(most / GIB, 1) if (most := max(each.host for each in plan.memory)) else "n/a",
    }


def table(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield the lines of a table of plans. Columns that are "n/a" in all rows are left out."""
    rows = [row(plan) for plan in plans]
    shown = [name for name in rows[0] if any(each[name] != "n/a" for each in rows)]
    yield from lines_of(shown, [[str(each[name]) for name in shown] for each in rows])


def lines_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table of texts."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for each in (header, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(each, widths, strict=True)).rstrip()


def misfits(found: Found) -> Iterator[str]:
    """Yield a line for each kind of layout that does not fit."""
    for kind, each in found.misfits.items():
        yield f"{each.count:,} do not fit {kind}; the nearest is {each.layout}: {each.words}"


def time_lines(cost: Cost) -> Iterator[str]:
    """Yield what takes the time of a step, the longest first."""
    seconds = {words: getattr(cost, name) for name, words in ENTRIES.items()}
    for words, value in sorted(seconds.items(), key=lambda item: -item[1]):
        if value > 0:
            yield f"{words:<20} {value:9.3f} s {value / cost.total:6.1%}"


def memory_lines(plan: Plan) -> Iterator[str]:
    """Yield a bar of the memory for each pipeline rank, the same ones together."""
    legend = ", ".join(f"{mark} {words}" for mark, words in zip(_MARKS, MEMORY.values(), strict=True))
    yield f"memory of {plan.room / GIB:.1f} GiB ({legend})"
    for stages, memory in together(plan.memory):
        marks = "".join(
            mark * round(_BAR * size / plan.room) for mark, size in zip(_MARKS, memory.of_device, strict=True)
        )
        host = f", {memory.host / GIB:.1f} GiB on the host" if memory.host else ""
        yield f"{stages:<16} {marks:<{_BAR}} {memory.total / GIB:7.1f} GiB{host}"


def together(memory: Sequence[RankMemory]) -> list[tuple[str, RankMemory]]:
    """Return the memory of pipeline ranks; neighbours with the same memory, as it is shown, are one entry."""
    found: list[tuple[int, int, RankMemory]] = []
    for rank, each in enumerate(memory):
        if found and abs(found[-1][2].total - each.total) < 0.05 * GIB:
            found[-1] = (found[-1][0], rank, found[-1][2])
        else:
            found.append((rank, rank, each))
    return [(f"stage {first}" if first == last else f"stages {first}-{last}", each) for first, last, each in found]


def neighbour_lines(plan: Plan, neighbours: Iterable[Neighbour]) -> Iterator[str]:
    """Yield what each single change of a layout would buy."""
    rows = []
    for each in neighbours:
        other = each.plan
        change = other.step.seconds / plan.step.seconds - 1
        memory = f"{other.memory[other.fullest].total / GIB:.1f} GiB"
        words = "" if other.missing == 0 else f"does not fit: {other.too_large}"
        rows.append((f"{each.change}", f"{other.step.seconds:.3f} s", f"{change:+.1%}", memory, words))
    yield from lines_of(("change", "step", "time", "memory", ""), rows)


def explained(plan: Plan, others: Sequence[Neighbour]) -> Iterator[str]:
    """Yield where the time and the memory of a plan go, and what each change would buy."""
    yield ""
    yield f"a step of {plan.step.seconds:.3f} s ({plan.step.mfu:.1%} of the peak):"
    yield from time_lines(plan.step.cost)
    yield ""
    yield from memory_lines(plan)
    yield ""
    yield from neighbour_lines(plan, others)


def length_lines(length: Length, tokens: str | None, step: float) -> Iterator[str]:
    """Yield the days of a training of so many `tokens`, and what failures take of them. `step`: seconds of a step."""
    figures, failures = length.figures, length.failures
    if "days" in figures:
        yield f"{tokens} tokens take {figures['days']:,.1f} days at {length.speed:,.0f} tokens per second"
    if failures is None:
        return
    hourly = failures.rate * 3600
    if "goodput" not in figures:
        yield f"a failure every {3600 / hourly:,.1f} seconds: the run makes no progress"
    elif failures.rate == 0 or failures.save == 0:
        yield f"goodput {failures.best:.1%}"
    else:
        yield (
            f"a failure every {1 / hourly:,.1f} hours: goodput is {failures.best:.1%} with a checkpoint "
            f"every {failures.interval / 60:.1f} minutes (--save-interval {max(round(failures.interval / step), 1)})"
        )
    if "days_with_failures" in figures:
        yield f"with failures {figures['days_with_failures']:,.1f} days"


def scaling_lines(found: Sequence[Size]) -> Iterator[str]:
    """Yield a table of the steps, Amdahl's fraction, and where communication overtakes computation."""
    rows = []
    begin = found[0]
    for each in found:
        same, strong = "-", "-"
        if each.same is not None and begin.same is not None:
            same = f"{each.same.total:.3f}"
            strong = f"{begin.same.total * begin.gpus / (each.same.total * each.gpus):.0%}"
        weak = f"{begin.grown.total / each.grown.total:.0%}"
        exposed = "-" if each.same is None else f"{communication(each.same) / each.same.total:.0%}"
        rows.append((f"{each.gpus}", same, strong, exposed, f"{each.grown.total:.3f}", weak))
    header = ("#-GPUs", "step s, same batch", "efficiency", "messages", "step s, grown batch", "efficiency")
    yield from lines_of(header, rows)
    steps = [(each.gpus, each.same) for each in found if each.same is not None]
    if len(steps) > 1:
        fraction = serial_fraction([(gpus, cost.total) for gpus, cost in steps])
        yield f"Amdahl's serial fraction with the same batch: {fraction:.4f} of the step on {steps[0][0]} GPUs"
    over = next((gpus for gpus, cost in steps if communication(cost) > computation(cost)), None)
    yield (
        f"messages take longer than computation from {over} GPUs on"
        if over is not None
        else "messages take less time than computation on all of these"
    ) + ", with the same batch"
    if len(steps) < len(found):
        yield "-: the batch is too small to be divided among so many GPUs in this layout"


def missing(planner: Planner, found: Found) -> str:
    """Return what is missing if nothing fits, and what would save it."""
    nearest, gpus = found.nearest(planner), f"{planner.gpus:,} x {planner.cluster.gpu.name}"
    if nearest is None:
        return f"no layout fits {gpus}"
    size = f"{nearest.missing / GIB:.1f} GiB are missing ({nearest.layout}: {nearest.too_large})"
    return "\n".join([f"no layout fits {gpus}: {size}", *(f"  {line}" for line in savings(planner, nearest))])


def everything(results: Results) -> dict[str, Any]:
    """Return all that is printed, as numbers and texts."""
    return {
        "plans": list(map(as_json, results.found.plans)),
        "compared": results.found.counts["possible"],
        "misfits": misfits_as_json(results.found),
        "neighbours": list(map(neighbour_as_json, results.neighbours)),
        "scaling": [
            {
                "gpus": each.gpus,
                "seconds_same_batch": None if each.same is None else each.same.total,
                "seconds_grown_batch": each.grown.total,
            }
            for each in results.sizes
        ],
        **results.length.figures,
        "notes": list(results.notes),
        "commands": list(results.starts),
    }


def as_json(plan: Plan) -> dict[str, Any]:
    """Return everything of a plan."""
    step = plan.step
    return {
        "row": row(plan),
        "seconds": step.seconds,
        "seconds_nine_times_of_ten": [step.interval.least, step.interval.most],
        "unknown_class": step.interval.unknown,
        "seconds_by_cause": {each.name: getattr(step.cost, each.name) for each in fields(Cost)},
        "tokens_per_second_per_gpu": step.tokens_per_second,
        "model_flops_per_gpu": step.flops,
        "mfu": step.mfu,
        "memory_by_stage": [asdict(each) for each in plan.memory],
        "room": plan.room,
        "host_room": plan.host_room,
        "fits": plan.missing == 0,
        "stages": plan.config.parallel.pipeline_model_parallel_layout,
    }


def misfits_as_json(found: Found) -> dict[str, Any]:
    """Return the layouts that do not fit, by what is too large."""
    return {
        kind: {"count": each.count, "missing": each.missing, "nearest": str(each.layout), "words": each.words}
        for kind, each in found.misfits.items()
    }


def neighbour_as_json(neighbour: Neighbour) -> dict[str, Any]:
    """Return what a change of a layout would buy."""
    plan = neighbour.plan
    memory = plan.memory[plan.fullest].total
    return {"change": neighbour.change, "seconds": plan.step.seconds, "memory": memory, "fits": plan.missing == 0}


def as_csv(plans: Sequence[Plan]) -> str:
    rows, text = [row(plan) for plan in plans], io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
