"""Order of the updates of parameter servers, without messages: what is applied, what is dropped, who is answered.

- Bounded staleness: a worker begins step c if every worker's gradient of step c - 1 - K has been applied (stale
  synchronous parallel, Ho et al. 2013). With K = 0 one update has the gradients of a step. Otherwise each gradient is
  an update of its own, when it arrives (Downpour SGD, Dean et al. 2012).
- Backup workers (Chen et al. 2016, arXiv:1604.00981), with K = 0: the first n - k gradients make a step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

PUSH, SAVE, END = 0, 1, 2
"""Kinds of messages."""


@dataclass(frozen=True)
class Message:
    """Message of a worker to all servers. It travels as numbers in float64; the gradients of a `PUSH` follow it."""

    kind: float
    step: float
    """Step of the gradients; of a `SAVE`, the last step; of an `END`, the exit code."""
    is_finite: float = True
    """False: the gradients are not finite, and do not follow."""
    meets: float = False
    """True if all workers meet after this step. Of a `SAVE`: True if it is the last one of the run."""
    asks: float = False
    """True if the worker asks for a meeting of all workers. Of a `SAVE`: True if an evaluation is left."""
    seconds: float = 0.0
    """Time that the worker has taken for the gradients."""
    loss: float = 0.0
    """Sum of the loss."""
    count: float = 0.0
    """Count of the loss: tokens. Of a `SAVE`: the consumed samples."""
    learning_rate: float = 0.0
    token_table_learning_rate: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Command:
    """Next action of all servers, by the numbers of workers in rank order."""

    apply: tuple[int, ...] = ()
    """Workers whose gradients make the next update together."""
    answer: tuple[int, ...] = ()
    """Workers that get the weights."""
    kind: int = PUSH
    """`SAVE` or `END` if all workers have sent that."""


@dataclass
class Figures:
    """Figures of what the servers have done since a worker's last answer."""

    loss: float = 0.0
    count: float = 0.0
    applied: int = 0
    """Number of gradients that have been applied."""
    dropped: int = 0
    """Number of gradients that have been dropped: late ones, and those that are not finite."""
    staleness_sum: float = 0.0
    staleness_max: float = 0.0
    gradient_norm: float = 0.0
    """Norm of the last gradient that was applied, before clipping."""


@dataclass
class Order:
    """State of the first server, which decides for all. `step`: the last step before this run."""

    workers: int
    step: int
    max_staleness: int = 0
    backup_workers: int = 0
    drop_after: float | None = None
    clock: Callable[[], float] = time.monotonic
    listener: Callable[[str, int, int], None] | None = None
    """Function that is called with "apply" or "answer", a worker and its step."""
    arrived: dict[int, Message] = field(default_factory=dict)
    """Messages that are not answered, by worker, in the order of their arrival."""
    meeting: int = 0
    """Step after which all workers meet, because one has asked for it."""

    def __post_init__(self) -> None:
        self.done = [self.step] * self.workers
        """Last step of each worker whose gradient has been applied or dropped."""
        self.figures = [Figures() for _ in range(self.workers)]
        self._settled: set[int] = set()  # those of `arrived` whose gradients have been applied or dropped
        self._lag = [0.0] * self.workers  # of the weights that each worker has
        self._begun = self.step + 1  # highest step that a worker may have begun
        self._seconds: deque[float] = deque(maxlen=8 * self.workers)
        self._deadline: float | None = None

    def arrive(self, worker: int, message: Message) -> None:
        """Take note of a message of a worker, which has no other one that is not answered."""
        self.arrived[worker] = message
        if message.kind != PUSH:
            return
        if self.max_staleness == 0 and message.step <= min(self.done):  # its step was made without it
            self._settled.add(worker)
        elif self._deadline is None and self.drop_after is not None and len(self._seconds) >= self.workers:
            self._deadline = self.clock() + self.drop_after * statistics.median_low(self._seconds)
        self._seconds.append(message.seconds)
        if message.asks and self.meeting < message.step:
            self.meeting = self._begun

    def seconds_left(self) -> float:
        """Return the time after which the step no longer waits for late workers."""
        return math.inf if self._deadline is None else max(self._deadline - self.clock(), 0.0)

    def next(self) -> Command | None:
        """Return what to do now. None: nothing, before another message arrives or the time is over."""
        kinds = [message.kind for message in self.arrived.values()]
        if len(kinds) == self.workers and kinds[0] != PUSH and len(set(kinds)) == 1:
            everyone = tuple(range(self.workers))
            return Command(answer=everyone, kind=int(kinds[0]))
        apply = self._due()
        self._settled.update(apply)
        for worker in apply:
            self.done[worker] = int(self.arrived[worker].step)
            if self.max_staleness == 0:
                self.done = [self.done[worker]] * self.workers
                self._deadline = None
        answer = tuple(sorted(worker for worker in self._settled if self._may_go_on(self.arrived[worker])))
        return Command(apply, answer) if apply or answer else None

    def _due(self) -> tuple[int, ...]:
        """Return the workers whose gradients make the next update."""
        waiting = [w for w, message in self.arrived.items() if message.kind == PUSH and w not in self._settled]
        if self.max_staleness > 0:
            return tuple(waiting[:1])
        late = self._deadline is not None and self.clock() >= self._deadline
        enough = len(waiting) >= self.workers - self.backup_workers
        return tuple(sorted(waiting)) if waiting and (enough or late) else ()

    def _may_go_on(self, message: Message) -> bool:
        """Tell whether the worker may begin its next step."""
        meets = message.meets or message.step == self.meeting
        return min(self.done) >= message.step - (0 if meets else self.max_staleness)

    def applied(self, workers: tuple[int, ...], gradient_norm: float, is_applied: bool) -> None:
        """Count the gradients of an update, or of one that was skipped."""
        every = self.workers if self.max_staleness == 0 else len(workers)
        taken = [w for w in workers if self.arrived[w].is_finite] if is_applied else []
        for figures in self.figures:
            figures.applied += len(taken)
            figures.dropped += every - len(taken)
            figures.gradient_norm = gradient_norm if taken else figures.gradient_norm
            for worker in taken:
                figures.loss += self.arrived[worker].loss
                figures.count += self.arrived[worker].count
                figures.staleness_sum += self._lag[worker]
                figures.staleness_max = max(figures.staleness_max, self._lag[worker])
        for worker in workers:
            self._tell("apply", worker)

    def answered(self, worker: int) -> tuple[int, Figures]:
        """Forget the message of a worker that gets the weights now. Returns the last step that it has, and figures.

        Raises:
            RuntimeError: the weights are staler than the bound allows.
        """
        self._tell("answer", worker)
        message, whole = self.arrived.pop(worker), min(self.done)
        self._settled.discard(worker)
        step = max(int(message.step), whole)
        if step - whole > self.max_staleness:
            raise RuntimeError(
                f"worker {worker} would begin step {step + 1} with the gradients of step {whole}: more than "
                f"--max-staleness {self.max_staleness} steps behind"
            )
        self._lag[worker], self._begun = step - whole, max(self._begun, step + 1)
        figures, self.figures[worker] = self.figures[worker], Figures()
        return step, figures

    def _tell(self, what: str, worker: int) -> None:
        if self.listener is not None:
            self.listener(what, worker, int(self.arrived[worker].step))
