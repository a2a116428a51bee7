"""Report of a dry run: as text, and as JSON with everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from megalite.extras.planner.dry_run import DryRun
from megalite.extras.planner.records import Message, Operation, Work
from megalite.process.output import in_words
from megalite.process.place import ranks_text

SHOWN = 12
"""Most lines of a list in the text."""


def report(found: DryRun) -> Iterator[str]:
    """Yield the lines of a report on what the rank holds, sends and computes."""
    axes = ("pp", "dp", "cp", "tp", *(("ep",) if found.coordinates["ep"] or "EP" in found.layout else ()))
    place = ", ".join(f"{axis} {found.coordinates[axis]}" for axis in axes)
    yield f"rank {found.rank} of {found.world_size} ({place}): {found.layout}"
    yield f"one step of {found.micro_batches} micro-batches, on no device; launches are those of {found.kernels}"
    yield ""
    memory = found.memory
    yield f"holds          {in_words(found.before)} between steps, {in_words(found.peak)} at the peak of the step"
    yield f"               ({in_words(found.peak_blocks)} as a GPU's allocator rounds each tensor)"
    for kind, size in asdict(memory).items():
        if kind != "host":
            yield f"  {kind:<12} {in_words(size)}"
    yield f"  highest in   {max(found.moments, key=lambda moment: moment.peak).action}"
    yield from _of_host(found)
    yield ""
    parameters = sum(_elements(each.size) for each in found.held)
    yield f"parameters     {parameters:,} in {len(found.buckets)} buckets"
    yield from _table(
        ("name", "of shape", "box", "split over", "bucket"),
        [
            (each.name, _shape(each.shape), _box(each.offset, each.size), ", ".join(each.axes) or "-", str(each.bucket))
            for each in found.held
        ],
    )
    yield ""
    total = found.total
    sent = sum(each.bytes * count for each, count in total.messages.items() if each.kind != "receive")
    yield f"sends          {in_words(sent)} in messages"
    yield from _table(("message", "times", "bytes each", "ranks"), _messages(total))
    yield ""
    yield f"computes       {total.flops / 1e12:,.2f} TFLOP in products and attention, {total.launches:,} launches"
    yield from _table(("operation", "launches", "TFLOP", "GiB moved"), _operations(total.operations))
    yield ""
    waits = sum(found.waits.values())
    yield f"the host waits {waits} times for the device" + (":" if waits else "")
    yield from _table(("times", "in"), [(str(count), place) for place, count in found.waits.items()])
    yield (
        f"and takes {found.seconds:.3f} s for the step by itself on this machine: {found.optimizer_seconds:.3f} s in "
        f"the optimizer, before it {found.host_seconds * 1e6:,.0f} microseconds a layer and micro-batch"
    )
    for where, count in found.misplaced.items():
        yield f"WRONG DEVICE: {where} uses a tensor of the host together with one of the device, {count} times"
    if any(each.name.startswith("add_rows") or "expert" in each.name for each in total.operations):
        yield "tokens are taken to be spread evenly over the experts"


def _of_host(found: DryRun) -> Iterator[str]:
    """Yield what offloading keeps on the host, copies and computes there; nothing if it keeps nothing."""
    if not found.highest_on_host:
        return
    yield f"on the host    {in_words(found.memory.host)} between steps, {in_words(found.highest_on_host)} at the peak"
    moved = found.total.host
    yield f"  copies       {in_words(moved['to host'])} to the host, {in_words(moved['to device'])} to the device"
    yield f"  operators    read and write {in_words(moved['on the host'])} there, which no launch below has"


def as_json(found: DryRun) -> dict[str, Any]:
    """Return everything that a dry run found."""
    values = asdict(replace(found, work={}))
    values["work"] = {
        phase: {
            "launches": work.launches,
            "flops": work.flops,
            "operations": [{**each._asdict(), "times": times} for each, times in work.operations.items()],
            "messages": [{**each._asdict(), "times": times} for each, times in work.messages.items()],
            "host_bytes": dict(work.host),
        }
        for phase, work in found.work.items()
    }
    return values


def _messages(work: Work) -> list[tuple[str, ...]]:
    ordered = sorted(work.messages.items(), key=lambda item: item[0].bytes * item[1], reverse=True)
    return [(each.kind, str(times), f"{each.bytes:,}", _ranks(each)) for each, times in ordered]


def _ranks(message: Message) -> str:
    ranks = message.ranks
    if len(ranks) > 2 and len({after - before for before, after in pairwise(ranks)}) == 1:
        return f"{len(ranks)}: {ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
    return f"{len(ranks)}: {ranks_text(ranks)}" if len(ranks) > 2 else f"{ranks[0]} to {ranks[1]}"


def _operations(operations: Counter[Operation]) -> list[tuple[str, ...]]:
    found: dict[str, list[float]] = {}
    for each, times in operations.items():
        name = f"{each.name} {'x'.join(map(str, each.shape))}" if each.kind != "elementwise" else each.name
        sums = found.setdefault(name, [0, 0, 0])
        for place, value in enumerate((1, each.flops, each.bytes)):
            sums[place] += value * times
    ordered = sorted(found.items(), key=lambda item: (item[1][1], item[1][2]), reverse=True)
    return [
        (name, str(times), f"{flops / 1e12:,.2f}", f"{moved / 2**30:,.2f}") for name, (times, flops, moved) in ordered
    ]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    shown = [header, *rows[:SHOWN]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    for row in shown:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(rows) > SHOWN:
        yield f"  ... and {len(rows) - SHOWN} more (all in --dry-run-json FILE)"


def _elements(size: tuple[int, ...]) -> int:
    count = 1
    for each in size:
        count *= each
    return count


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _box(offset: tuple[int, ...], size: tuple[int, ...]) -> str:
    return "[" + ", ".join(f"{at}:{at + length}" for at, length in zip(offset, size, strict=True)) + "]"
