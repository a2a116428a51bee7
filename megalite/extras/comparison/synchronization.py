"""Comparison of trainings that synchronize in different ways: their loss against bytes and against simulated time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

SHARE_OF_BYTES = 0.1
"""The bytes at which losses are compared, as a share of those of plain data parallelism."""


@dataclass(frozen=True)
class Link:
    """Slow network between the ranks.

    Attributes:
        alpha: seconds of a step that sends anything, however little.
        beta: seconds per byte.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class Curve:
    """Training under one method.

    Attributes:
        losses: the loss of each step.
        sent: the bytes of each step.
        compute: seconds of a step without messages.
        delay: the steps that run while messages are under way.
    """

    losses: Sequence[float]
    sent: Sequence[int]
    compute: float
    delay: int = 0

    def total_sent(self) -> list[int]:
        """Return the bytes that have been sent after each step."""
        return list(accumulate(self.sent))

    def times(self, link: Link) -> list[float]:
        """Return the simulated time after each step. Messages take turns on the link, also those of steps before."""
        times: list[float] = []
        arrivals: list[float] = []
        for step, sent in enumerate(self.sent):
            computed = (times[-1] if times else 0.0) + self.compute + (link.alpha if sent else 0.0)
            arrivals.append(max(computed, arrivals[-1] if arrivals else 0.0) + link.beta * sent)
            awaited = step - self.delay
            times.append(max(computed, arrivals[awaited]) if awaited >= 0 else computed)
        return times

    def loss_after(self, steps: int) -> float:
        """Return the mean loss of the last ones of these steps: of a twentieth of all."""
        count = min(steps, max(1, len(self.losses) // 20))
        return sum(self.losses[steps - count : steps]) / count if count else self.losses[0]


@dataclass(frozen=True)
class Outcome:
    """Figures of one method beside those of plain data parallelism."""

    method: str
    loss: float
    """Loss at the end."""
    loss_at_bytes: float
    """Loss when a tenth of the bytes of plain data parallelism has been sent, or at the end."""
    loss_at_time: float
    """Loss at the simulated time at which the fastest method has ended."""
    bytes_a_step: float
    fewer_bytes: float
    """Bytes of plain data parallelism, as a multiple of these."""
    compute: float
    """Seconds of a step without messages."""
    simulated: float
    """Seconds of a step with messages, over the given link."""


def compare(curves: Mapping[str, Curve], plain: str, link: Link) -> list[Outcome]:
    """Compare each method with the plain one."""
    times = {name: curve.times(link) for name, curve in curves.items()}
    all_sent = sum(curves[plain].sent)
    first = min(each[-1] for each in times.values())
    outcomes = []
    for name, curve in curves.items():
        steps, sent = len(curve.losses), curve.total_sent()
        outcomes.append(
            Outcome(
                method=name,
                loss=curve.loss_after(steps),
                loss_at_bytes=curve.loss_after(bisect_right(sent, SHARE_OF_BYTES * all_sent)),
                loss_at_time=curve.loss_after(bisect_right(times[name], first)),
                bytes_a_step=sent[-1] / steps,
                fewer_bytes=all_sent / max(1, sent[-1]),
                compute=curve.compute,
                simulated=times[name][-1] / steps,
            )
        )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of a table."""
    width = max(len("method"), *(len(each.method) for each in outcomes))
    yield f"{'method':{width}}   loss  at bytes  at time  bytes a step  fewer bytes    compute  simulated"
    for each in outcomes:
        yield (
            f"{each.method:{width}} {each.loss:6.3f} {each.loss_at_bytes:9.3f} {each.loss_at_time:8.3f} "
            f"{each.bytes_a_step:13,.0f} {each.fewer_bytes:11.1f}x {each.compute:8.3f} s {each.simulated:8.3f} s"
        )


def rows(curves: Mapping[str, Curve], link: Link) -> Iterator[tuple[str, int, float, int, float]]:
    """Yield method, step, loss, bytes and simulated seconds so far, for each step."""
    for name, curve in curves.items():
        for step, figures in enumerate(zip(curve.losses, curve.total_sent(), curve.times(link), strict=True), 1):
            yield name, step, *figures
