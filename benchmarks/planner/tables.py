"""Tables of the page on the validation of the planner."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.planner.errors import Prediction, mean_error
from benchmarks.planner.predict import parts_of, step_of
from benchmarks.planner.published import Run, published
from megalite.extras.planner.cost import Prices
from megalite.extras.planner.memory import in_flight, memory_in_flight
from megalite.extras.planner.parts import Parts
from megalite.extras.planner.records import PartRecord, Work
from megalite.extras.planner.step import Step
from megalite.pipeline.schedules import SCHEDULES, orders_of
from megalite.pipeline.simulator import durations, simulate
from megalite.pipeline.stages import Stages

FAR = 0.15
LEAST_LAYOUTS = 3
_SCORE_BYTES = 5
_BUBBLE_LAYERS = 24
_MEMORY = ("Reducing Activation", "Zero Bubble")
_PASSES, _TRANSFER, _BUBBLE_MICRO_BATCHES = (18.522, 18.086, 9.337), 0.601, 24
"""Milliseconds of F, B and W of a micro-batch of that model, and of a message (arXiv:2401.10241, appendix)."""
_BUBBLES = {"1f1b": 0.243, "interleaved-1f1b": 0.106, "zb-h1": 0.159}  # 8 stages, 24 micro-batches, the 1.5B model


def table(header: Sequence[str], body: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in body:
        yield f"| {' | '.join(map(str, row))} |"


def by_source(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the errors of each source."""
    groups = defaultdict(list)
    for each in found:
        groups[each.run.source].append(each)
    yield from table(
        ("source", "runs", "mean error", "median", "largest"),
        (
            (
                source.replace("|", "/"),
                len(own),
                f"{mean_error(own):.1%}",
                f"{median(each.error for each in own):+.1%}",
                f"{max((each.error for each in own), key=abs):+.0%}",
            )
            for source, own in groups.items()
        ),
    )


def layout(run: Run) -> str:
    """Return the layout of a run in a few letters."""
    parallel, training = run.config.parallel, run.config.training
    chunks = run.row["vpp"].removesuffix(".0")
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
    }
    named = [f"{axis}{size}" for axis, size in sizes.items() if size > 1] + [f"VPP{chunks}"] * bool(chunks)
    return " ".join([*named, f"ZeRO{parallel.zero_stage}", f"mb{training.micro_batch_size}"])


def far_rows(found: Iterable[Prediction]) -> Iterator[str]:
    """Yield the runs whose prediction is far from the measurement."""
    yield from table(
        ("row", "program", "model", "GPUs", "layout", "sequence", "measured s", "predicted s", "error"),
        (
            (
                each.run.number + 2,
                each.run.program,
                each.run.row["model"],
                f"{each.run.world_size} x {each.run.row['gpu']}",
                layout(each.run),
                each.run.config.data.seq_length,
                f"{each.run.seconds:.3g}",
                f"{each.seconds:.3g}",
                f"{each.error:+.0%}",
            )
            for each in found
            if abs(each.error) > FAR
        ),
    )


def choices(found: Iterable[Prediction]) -> list[tuple[Prediction, Prediction, int]]:
    """Return, for each published sweep over layouts, the layout predicted fastest, that measured fastest, and how many
    there were."""
    sweeps: dict[Hashable, list[Prediction]] = defaultdict(list)
    for each in found:
        run, config = each.run, each.run.config
        same = (run.program, run.source, run.row["gpu"], run.world_size, run.row["precision"])
        sweeps[(*same, config.model, config.data.seq_length, config.training.global_batch_size)].append(each)
    chosen = []
    for sweep in sweeps.values():
        if len({layout(each.run) for each in sweep}) >= LEAST_LAYOUTS:
            fastest = min(sweep, key=lambda each: each.seconds)
            chosen.append((fastest, min(sweep, key=lambda each: each.run.seconds or math.inf), len(sweep)))
    return chosen


def sweeps(found: Iterable[Prediction]) -> Iterator[str]:
    """Yield the choices in published sweeps."""
    yield from table(
        ("source", "model", "layouts", "chosen", "measured best", "slower by"),
        (
            (
                each.run.source[:60].replace("|", "/"),
                each.run.row["model"],
                count,
                layout(each.run),
                layout(best.run),
                f"{(each.run.seconds or 0) / (best.run.seconds or 1) - 1:.1%}",
            )
            for each, best, count in choices(found)
        ),
    )


def bubbles() -> Iterator[str]:
    """Yield the bubbles of the zero-bubble paper's 1.5B model, with equal stages, as the paper has them."""
    runs = [run for run in published()[0] if run.program == "zero-bubble" and run.row["global_batch"] == "144.0"]
    run, nothing = runs[0], PartRecord(Work(), Work(), 0, 0, 0, 0)
    stages = run.config.parallel.pipeline_model_parallel_size
    model = replace(run.config.model, num_layers=_BUBBLE_LAYERS)
    layers = parts_of(run).layers[:1] * _BUBBLE_LAYERS
    body = []
    for schedule, stated in _BUBBLES.items():
        chunks = _BUBBLE_LAYERS // stages if schedule == "interleaved-1f1b" else None
        parallel = replace(
            run.config.parallel,
            pipeline_schedule=schedule,
            pipeline_model_parallel_layout=None,
            num_virtual_stages_per_pipeline_rank=chunks,
        )
        config = replace(run.config, model=model, parallel=parallel)
        parts = Parts(nothing, nothing, layers, nothing)
        share = Step(config, run.world_size, parts, Prices(run.cluster, run.stack)).idle
        of_paper = simulated_bubble(schedule, stages, chunks or 1)
        points = [f"{100 * (value - stated):+.1f}" for value in (of_paper, share)]
        body.append((schedule, f"{stated:.1%}", f"{of_paper:.1%}", points[0], f"{share:.1%}", points[1]))
    yield from table(("schedule", "paper", "simulated, its times", "points", "predicted", "points"), body)


def simulated_bubble(schedule: str, ranks: int, chunks: int) -> float:
    """Return the bubble of a schedule of megalite's by the times that the paper has measured: the share of the step in
    which a rank computes nothing."""
    layout = Stages(ranks, chunks)
    forward, backward_input, backward_weight = (each / chunks for each in _PASSES)
    orders = orders_of(SCHEDULES[schedule], layout, _BUBBLE_MICRO_BATCHES, None)
    spans = simulate(layout, orders, durations(forward, backward_input, backward_weight), _TRANSFER)
    end = max(of_rank[-1].end for of_rank in spans)
    return 1 - _BUBBLE_MICRO_BATCHES * sum(_PASSES) / end


def memory() -> Iterator[str]:
    """Yield the predicted memory beside the published one, on the rank that holds most."""
    body = []
    for run in published()[0]:
        if run.memory is None or not any(part in run.source for part in _MEMORY):
            continue
        step = step_of(run, run.cluster, run.stack)
        flights = list(map(in_flight, step.orders(step.micro_batches)))
        most = max(each.total for each in memory_in_flight(run.config, run.world_size, _kept_by(run), flights))
        name, unit, size = ("zero bubble", "GB", 1e9) if "Zero" in run.source else ("Korthikanti et al.", "GiB", 2**30)
        error = most / size / run.memory - 1
        body.append((name, run.row["model"], layout(run), f"{most / size:.1f} {unit}", run.memory, f"{error:+.1%}"))
    yield from table(("source", "model", "layout", "predicted", "published", "error"), body)


def _kept_by(run: Run) -> Parts:
    """Return the records of a run's parts, with the scores that attention without fusion keeps for backward: two bytes
    of softmax, two of dropout and one of its mask, unless they are recomputed."""
    parts = parts_of(run)
    if run.stack.attention != "unfused" or run.config.training.recompute_granularity is not None:
        return parts
    layers = []
    for layer in parts.layers:
        shapes = {each.shape: count for each, count in layer.forward.operations.items() if each.kind == "attention"}
        scores = sum(count * batch * queries * keys for (batch, queries, keys, _), count in shapes.items())
        layers.append(replace(layer, kept=layer.kept + _SCORE_BYTES * scores))
    return replace(parts, layers=tuple(layers))


def unused() -> Iterator[str]:
    """Yield why rows of the table are not predicted."""
    runs, reasons = published()
    groups = defaultdict(list)
    for number, reason in reasons.items():
        groups[reason].append(number + 2)
    without_time = [run.number + 2 for run in runs if run.seconds is None]
    groups["only its memory, or FLOP/s by a convention that is not stated, is published"] += without_time
    yield from table(
        ("reason", "rows", "numbers"),
        ((reason, len(numbers), ", ".join(map(str, numbers))) for reason, numbers in groups.items()),
    )


def assumptions(runs: Iterable[Run]) -> Iterator[str]:
    """Yield what was assumed of how many rows."""
    counts: Mapping[str, list[int]] = defaultdict(list)
    for run in runs:
        for each in run.assumed:
            counts[each].append(run.number)
    yield from table(("assumed", "rows"), ((each, len(numbers)) for each, numbers in sorted(counts.items())))
