"""Layouts that differ from another in one thing, and what each change would buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from megalite.config.parallel import STRATEGIES, ScheduleName
from megalite.errors import MegaliteError
from megalite.extras.planner.layouts import RECOMPUTE, Layout
from megalite.extras.planner.plan import Plan, Planner

_SIZES = {
    "tensor": "TP",
    "pipeline": "PP",
    "context": "CP",
    "expert": "EP",
    "chunks": "VP",
    "micro_batch": "micro-batch",
}

_SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2))


@dataclass(frozen=True)
class Neighbour:
    """Plan of a layout with one change."""

    change: str
    plan: Plan


def neighbours(planner: Planner, plan: Plan) -> list[Neighbour]:
    """Return the plans of all valid layouts with one change, the fastest first."""
    parallel, known, found = plan.config.parallel, [plan.config], []
    overlapped = replace(parallel, overlap_grad_reduce=True, overlap_param_gather=parallel.zero_stage > 0)
    configs = [(words, partial(planner.on, layout, plan.config)) for words, layout in changes(plan.layout)]
    configs.append(("with overlap of DP messages", partial(replace, plan.config, parallel=overlapped)))
    for words, config in configs:
        try:
            other = planner.plan(config())
        except MegaliteError:  # its sizes do not divide
            continue
        if other.config not in known:
            known.append(other.config)
            found.append(Neighbour(words, other))
    return sorted(found, key=lambda each: each.plan.step.seconds)


def changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield layouts with one change, with the change as text. Data-parallel ranks take what is left over."""
    for axis, name in _SIZES.items():
        size = getattr(layout, axis)
        for other in (size // 2, size * 2):
            if other > 0 and size > 0 and (other * 2 == size or other == size * 2):
                yield f"{name} {size} -> {other}", _with_size(layout, axis, other)
    if layout.tensor > 1:
        yield f"{'without' if layout.sequence else 'with'} SP", replace(layout, sequence=not layout.sequence)
    for stage in range(len(STRATEGIES)):
        if abs(stage - layout.zero) == 1:
            yield f"ZeRO {layout.zero} -> {stage}", replace(layout, zero=stage)
    for recompute in RECOMPUTE:
        if recompute != layout.recompute:
            yield f"recompute {layout.recompute} -> {recompute}", replace(layout, recompute=recompute)
    if layout.pipeline > 1:
        for schedule, chunks in _SCHEDULES:
            if schedule != layout.schedule:
                changed = replace(layout, schedule=schedule, chunks=chunks)
                yield f"schedule {layout.schedule} -> {schedule}{' with VP 2' if chunks > 1 else ''}", changed


def _with_size(layout: Layout, axis: str, size: int) -> Layout:
    changed = replace(layout, **{axis: size})  # type: ignore[arg-type]
    if axis == "tensor":
        own = layout.expert_tensor == layout.tensor
        sequence = size > 1 and (layout.sequence or layout.tensor == 1)
        return replace(changed, sequence=sequence, expert_tensor=size if own else layout.expert_tensor)
    if axis == "pipeline" and (size == 1 or layout.pipeline == 1):
        return replace(changed, chunks=1, schedule="1f1b")
    if axis == "chunks" and not layout.schedule.startswith("zb"):
        return replace(changed, schedule="interleaved-1f1b" if size > 1 else "1f1b")
    return changed
