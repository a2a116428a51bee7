"""Late data-parallel ranks, which leave out the micro-batches of a step that they have not begun when others are done.

A pipeline is the ranks of one data-parallel index. Its leader, the first rank of its first stage, measures the time
since the count of the step's tokens, a collective that all leaders leave at about the same moment: no clocks are
compared. The leader that is done first votes in the store of the process group. Before each micro-batch, the others
look for this vote, and decide for their pipelines, whose ranks wait for the decision before they begin the micro-batch:
a dependency that they have anyway, since it is computed on the first stage first, and by all its ranks together.

A micro-batch that is left out is not computed; its messages travel as zeros, and its gradients count as arrived. The
loss is divided by the count of the others.
"""

from __future__ import annotations

import re
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from megalite.config.run import TaskConfig
from megalite.errors import ConfigurationError
from megalite.mailbox import Mailbox
from megalite.optim.layout import BucketShardSpec
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.optim.synchronization import Synchronization
from megalite.parallel import collectives
from megalite.parallel.device import finish_stream
from megalite.parallel.stage import LossTerm, TermSums
from megalite.pipeline.engine import RunningStep, StepObserver
from megalite.pipeline.schedules import Action, Kind
from megalite.storage import AnyPath
from megalite.torch_internals import default_store
from megalite.training import loss_terms
from megalite.training.gradients import Gradients, undone_by_error
from megalite.training.ledger import Decision, ranges
from megalite.training.loss_terms import Totals
from megalite.training.metrics import StepMetrics
from megalite.training.task import Task
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import OPTIMIZER, Sections

_FLAG = "--drop-stragglers-after"
_COMPUTATIONS = ("F", "B", "I", "W")
_MEDIAN_OF = 16
"""Number of a pipeline's last whole steps whose median time is the unit of the limit."""
_LEFT_OUT = "left_out_samples"
_VOTE = re.compile(r"(\d{1,9}\.\d{6}) (\d{1,9}\.\d{6})", re.ASCII)
_VOTE_IN = "the vote in step {} since the start"
_DECISION = "the decision of pipeline {1} on micro-batch {2} in step {0} since the start"
_IS_LATE = ["on time", "late"]  # texts of a decision
_LONGEST = 1800.0  # seconds for a decision and for an answer of the store, where collectives have no limit


@dataclass(frozen=True)
class Vote:
    """Message of the pipeline that is done first: its seconds in the step, and the median of its last steps."""

    seconds: float
    median: float


class Board:
    """Texts of a run in a mailbox: the vote of each step, and the decisions of each pipeline's leader.

    They come from other ranks, and none is taken that has another form.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        """Use a mailbox, whose prefix no other run or attempt has, and whose time limit is also that of a decision."""
        self._mailbox = mailbox
        self._stale: list[str] = []
        self._written: list[str] = []

    def vote(self, step: int, vote: Vote) -> None:
        """Vote, unless another has been first."""
        self._written.append(_VOTE_IN.format(step))
        self._mailbox.first(_VOTE_IN.format(step), f"{vote.seconds:.6f} {vote.median:.6f}")

    def first(self, step: int) -> Vote | None:
        """Return the vote of a step; None if there is none yet."""
        text = self._mailbox.look(_VOTE_IN.format(step))
        return None if text is None else self._mailbox.parsed(_VOTE_IN.format(step), text, _parse_vote)

    def decide(self, step: int, pipeline: int, micro_batch: int, *, is_late: bool) -> None:
        """Tell the other ranks of a pipeline whether it leaves out the micro-batch and what follows."""
        key = _DECISION.format(step, pipeline, micro_batch)
        self._mailbox.put(key, _IS_LATE[is_late])
        self._written.append(key)

    def decided(self, step: int, pipeline: int, micro_batch: int) -> bool:
        """Wait for the leader's decision. Raises CommunicationError if it does not come."""
        key = _DECISION.format(step, pipeline, micro_batch)
        text = self._mailbox.get(key, self._mailbox.answer_seconds, f"{key} did not come")
        return bool(self._mailbox.parsed(key, text, _IS_LATE.index))

    def forget(self) -> None:
        """Delete what this rank wrote before the last step, whose readers may still wait for it."""
        for key in self._stale:
            self._mailbox.delete(key)
        self._stale, self._written = self._written, []


def _parse_vote(text: str) -> Vote:
    if (found := _VOTE.fullmatch(text)) is None:
        raise ValueError("a vote is two numbers")
    return Vote(*map(float, found.groups()))


class OrderedReduction(Reduction):
    """Sum of a bucket's gradients that knows its place among those of the first backward.

    All data-parallel ranks start their reductions in the same order: in a backward it is that of autograd.
    """

    def __init__(self, numbers: Iterator[int], spec: BucketShardSpec, groups: ReductionGroups) -> None:
        """Describe the sum. `numbers`: gives each reduction of this rank its place."""
        super().__init__(spec, groups)
        self._numbers = numbers

    def begin(self, gradients: Tensor, out: Tensor | None) -> collectives.Pending:
        """Start to sum [length] over the shard group."""
        self.order = self.order or next(self._numbers)
        return super().begin(gradients, out)


@dataclass
class _Step(StepObserver):
    """A step of this rank that may leave out micro-batches. `number`: that of the steps begun since the start."""

    trainer: LateRanksTrainer
    number: int
    inner: StepObserver | None
    border: int | None = None
    """Micro-batch from which on all are left out; None: none is."""
    why: str = ""
    began: float = 0.0
    first: Vote | None = None
    known: int = 0
    """Number of micro-batches that have been decided about."""

    def execute(self, action: Action, step: RunningStep) -> None:
        """Run an action, or what takes its place if its micro-batch is left out."""
        if action.kind == "F" and action.micro_batch >= self.known and self.border is None:
            self.known = action.micro_batch + 1
            if self._is_late(action.micro_batch):
                self.border = action.micro_batch
        action = self.taken(action)
        if self.inner is None:
            step.execute(action)
        else:
            self.inner.execute(action, step)

    def taken(self, action: Action) -> Action:
        """Return the action that is run in place of one of the list."""
        if self.border is None or action.micro_batch < self.border or action.kind not in _COMPUTATIONS:
            return action
        return action._replace(kind=cast(Kind, f"skip {action.kind}"))

    def seconds(self) -> float:
        """Return the time since all pipelines began."""
        finish_stream(self.trainer.mesh.device)
        return self.trainer.clock() - self.began

    def _is_late(self, micro_batch: int) -> bool:
        """Decide whether to leave out the rest, on the leader, or wait for its decision."""
        trainer = self.trainer
        if not trainer.leads:
            return trainer.decided(self.number, micro_batch)
        seconds, after = self.seconds(), trainer.after
        self.first = self.first or trainer.board.first(self.number)
        is_late = False
        if self.first is not None:
            first, median = self.first.seconds, self.first.median
            limit = first + after * median
            is_late = seconds > limit
            self.why = (
                f"{seconds:.3f} s before micro-batch {micro_batch}; the limit is {limit:.3f} s: the {first:.3f} s of "
                f"the first pipeline, and {after:g} x its median of {median:.3f} s"
            )
        if trainer.has_followers:
            trainer.board.decide(self.number, trainer.pipeline, micro_batch, is_late=is_late)
        return is_late


class LateRanksTrainer(Trainer):
    """Trainer of a rank that leaves out what is left of a step if it is late.

    Nobody is late in its first step, which may compile, and in which reductions learn their order; nor in a step that
    is profiled, or that a program gives other terms of the loss.
    """

    def __init__(
        self,
        config: TaskConfig,
        task: Task,
        synchronization: Synchronization,
        directory: AnyPath | None = None,
        sections: Sections | None = None,
    ) -> None:
        super().__init__(config, task, synchronization, directory, sections)
        mesh, after = self.mesh, config.synchronization.drop_stragglers_after
        assert after is not None
        self.after, self.clock = after, time.monotonic
        self.pipeline, self.begun = mesh.coordinate("dp"), 0
        self.leads = not any(mesh.coordinate(axis) for axis in ("pp", "cp", "tp"))
        self.has_followers = mesh.size("pp", "cp", "tp") > 1
        self._check()
        self._step: _Step | None = None
        self._seconds: deque[float] = deque(maxlen=_MEDIAN_OF)
        if mesh.is_connected:
            name = collectives.all_gather_json(secrets.token_hex(8), mesh)[0]
            timeout = mesh.world().timeout
            seconds = _LONGEST if timeout is None else timeout.total_seconds()
            where, prefix = f"the store of the ranks ({_FLAG})", f"late ranks {name}/"
            mailbox = Mailbox(default_store(), mesh.world_size, seconds, where, prefix=prefix)
            self.board = Board(mailbox.clone())  # waits for decisions

    def _check(self) -> None:
        """Raise ConfigurationError if data-parallel ranks meet within a micro-batch, or the loss has several terms."""
        for each in (each for chunk in self.chunks for each in chunk.inside(backward=False)):
            ranks = self.mesh.ranks(*each.group.split(" x "))
            if len({self.mesh.coordinates_of(rank)["dp"] for rank in ranks}) > 1:
                raise ConfigurationError(
                    f"{_FLAG} {self.after:g}: in every micro-batch, data-parallel ranks meet for {each.name} over "
                    f"{each.group}, so nobody is late alone: leave out the flag, or let only ranks of the same samples "
                    "meet there"
                )
        differentiated = [term for term in self.terms if term.weight]
        names = ", ".join(term.name for term in differentiated)
        if len(differentiated) != 1:
            raise ConfigurationError(
                f"{_FLAG} {self.after:g}: without the samples of late ranks, gradients of one term are divided by "
                f"another count; this network has {names}: leave out the flag, or all terms but one"
            )
        if "dp" not in differentiated[0].count_axes:
            raise ConfigurationError(
                f"{_FLAG} {self.after:g}: the count of {names} is not summed over data-parallel ranks: leave out the "
                "flag"
            )

    # ------------------------------------------------------------------------------------------------ one step

    def forward_backward(
        self,
        micro_batches: Sequence[Any] | None = None,
        terms: Sequence[LossTerm] | None = None,
        multipliers: Callable[[Totals], Totals] = dict,
        observer: StepObserver | None = None,
    ) -> Gradients:
        """Compute the gradients of one global batch, without the micro-batches for which this rank is late."""
        self.begun, self._step = self.begun + 1, None
        if self.begun > 1 and terms is None and multipliers is dict and self.mesh.is_connected:
            self._step = observer = _Step(self, self.begun, observer or self.shares.observer)
        gradients = super().forward_backward(micro_batches, terms, multipliers, observer)
        if self._step is None:
            return gradients
        if self._step.border is not None:
            return replace(gradients, actions=list(map(self._step.taken, gradients.actions)))
        if self.leads:
            self._seconds.append(self._step.seconds())
            if self._step.first is None:
                self.board.vote(self.begun, Vote(self._seconds[-1], statistics.median_low(self._seconds)))
        return gradients

    def _counts(self, terms: Sequence[LossTerm], own: TermSums) -> tuple[Totals, Totals]:
        """Return the counts over the global batch, and those by which gradients are divided at first: the same.

        Leaders leave the collective at about the same moment, and the step begins.
        """
        counts = super()._counts(terms, own)
        if self._step is not None:
            self._step.began = self.clock()
        return counts

    def decided(self, step: int, micro_batch: int) -> bool:
        """Wait for the decision of this pipeline's leader on a micro-batch."""
        began = time.perf_counter()
        is_late = self.board.decided(step, self.pipeline, micro_batch)
        self.mesh.waits.by_axis["dp"] += time.perf_counter() - began
        return is_late

    def update(self, gradients: Gradients, figures: Mapping[str, float] = MappingProxyType({})) -> StepMetrics:
        """Update the weights by the mean over the samples that were trained on. Called by all ranks together."""
        self.decisions = ()
        step, self._step = self._step, None
        if step is None:
            return super().update(gradients, figures)
        with undone_by_error(gradients.before), self.sections(OPTIMIZER):
            self.optimizer.finish_parameter_gather()  # no forward may have waited for it
            counts, left_out = self._trained(step, gradients)
            if left_out:
                self.decisions = self._gathered(step, gradients)
            self.board.forget()
        name = next(term.name for term in gradients.terms if term.weight)
        expected, true = gradients.counts[name], counts[name]
        # Gradients are of sum / expected, and the optimizer divides them by the loss scale once.
        scale = gradients.loss_scale * true / expected if true and expected else gradients.loss_scale
        figures = {**figures, _LEFT_OUT: left_out}
        metrics = super().update(replace(gradients, counts=counts, loss_scale=scale), figures)
        trained = gradients.batch_size - left_out
        throughput = self.task.throughput(trained, metrics.iteration_time_s)
        return replace(metrics, loss_scale=gradients.loss_scale, throughput=throughput)

    def _trained(self, step: _Step, gradients: Gradients) -> tuple[Totals, int]:
        """Return the counts of the loss over what all ranks have trained on, and the number of samples left out."""
        axes = next(term.count_axes for term in gradients.terms if term.weight)
        parts = self.mesh.size(*axes) // self.mesh.size("dp")  # ranks that have the same samples
        own = dict(loss_terms.counted(gradients.terms, gradients.micro_batches[: step.border], self.mesh.device))
        own[_LEFT_OUT] = torch.tensor(sum(map(len, _left_out(step, gradients))) / parts, dtype=torch.float64)
        terms = [*gradients.terms, LossTerm(_LEFT_OUT, loss_terms.no_count, count_axes=axes)]
        counts = dict(loss_terms.total_counts(terms, own, self.mesh))  # in the message of the loss
        return counts, round(counts.pop(_LEFT_OUT))

    def _gathered(self, step: _Step, gradients: Gradients) -> list[Decision]:
        """Return the decisions of all pipelines, where leaders meet: a line for each that is late."""
        own = None
        if self.leads and step.border is not None:
            numbers = [number for ids in _left_out(step, gradients) for number in ids]
            own = {"samples": ranges(numbers), "why": f"{step.why} (of {len(gradients.micro_batches)} micro-batches)"}
        found = collectives.all_gather_json(own, self.mesh, "dp")
        return [
            Decision("late", [pipeline], [(first, last) for first, last in each["samples"]], "left out", each["why"])
            for pipeline, each in enumerate(found)
            if each is not None
        ]


def _left_out(step: _Step, gradients: Gradients) -> list[Sequence[int]]:
    """Return the samples of each micro-batch that a step has left out."""
    border = len(gradients.micro_batches) if step.border is None else step.border
    return [each.sample_ids for each in gradients.micro_batches[border:]]
