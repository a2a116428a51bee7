"""Trainers of a run with parameter servers: a worker computes gradients, a server applies them and saves checkpoints.

Workers run the loop, each at its own pace. They meet for evaluations, saves and the end, at the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from io import StringIO
from types import MappingProxyType
from typing import Any, Literal

from megalite.checkpoint import Manifest
from megalite.config.run import TaskConfig
from megalite.config.synchronization import SynchronizationConfig
from megalite.errors import CheckpointError, ConfigurationError
from megalite.extras.synchronization.parameter_server import Link, Server, Worker
from megalite.extras.synchronization.parameter_server_order import END, PUSH, SAVE, Message, Order
from megalite.optim.optimizer import StepResult
from megalite.optim.synchronization import Synchronization
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.collectives import all_gather_json, on_any_rank
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import LossTerm, TermSums
from megalite.process.signals import StopRequest
from megalite.run.loop import TrainingLoop
from megalite.storage import AnyPath
from megalite.training import loss_terms
from megalite.training.display import Display
from megalite.training.gradients import Gradients, undone_by_error
from megalite.training.loss_terms import Totals
from megalite.training.metrics import StepMetrics
from megalite.training.resume import ResumePoint
from megalite.training.task import Task
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import OPTIMIZER, Sections
from megalite.watchdog.sections import SAVE as SAVING


def _with(config: TaskConfig, strategy: Literal["no_shard", "optim"], **sections: Any) -> TaskConfig:
    """Return the configuration of a part of the run, whose buckets have the same parameters in the other part."""
    parallel = replace(
        config.parallel,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    return replace(config, parallel=parallel, **sections)


def _links(config: TaskConfig, whole: ParallelMesh) -> list[Link]:
    """Return the links to the ranks of the other role, in rank order. `whole`: the mesh of both."""
    workers = whole.world_size - config.synchronization.num_servers
    pairs = [(worker, server) for worker in range(workers) for server in range(workers, whole.world_size)]
    return [Link.to(whole, *pair) for pair in pairs if whole.rank in pair]


class _PartTrainer(Trainer):
    """Trainer of a worker or a server: what both do."""

    def load(self, path: AnyPath, described: Manifest, resume_point: ResumePoint) -> None:
        """Continue from a checkpoint, or fail, on all ranks. Rank 0 shows the notes of the first server."""
        failure: CheckpointError | None = None
        try:
            super().load(path, described, resume_point)
        except CheckpointError as error:
            failure = error
        with raise_on_all_ranks(self.mesh.whole, None):
            if failure is not None:
                raise failure
        notes = all_gather_json(self.loaded.notes, self.mesh.whole)
        self.loaded = replace(self.loaded, notes=tuple(notes[-self.config.synchronization.num_servers]))


class WorkerTrainer(_PartTrainer):
    """Trainer of a worker: its optimizer has the gradients and the weights of its own rank, and no state."""

    def __init__(
        self,
        config: TaskConfig,
        task: Task,
        synchronization: Synchronization,
        directory: AnyPath | None = None,
        sections: Sections | None = None,
    ) -> None:
        without_state = replace(config.optimizer, optimizer="sgd", sgd_momentum=0.0, optimizer_backend="auto")
        super().__init__(_with(config, "no_shard", optimizer=without_state), task, synchronization, None, sections)
        self.config, self.directory = config, directory
        trained = [term for term in self.terms if term.weight]
        if len(trained) > 1 or self.optimizer.module_states or self.optimizer.has_tallies:
            raise ConfigurationError(
                "--asynchronous parameter-server: servers know the count of one loss term, and update weights alone; "
                "this network has other terms or state, such as those of experts"
            )
        self.worker = Worker(self.optimizer, _links(config, self.mesh.whole))
        self._meets = True  # all of them begin at the same step
        self._flags: list[bool] = []
        self._server_stops = False
        self._longest_save = self._estimated_save = 0.0

    def _counts(self, terms: Sequence[LossTerm], own: TermSums) -> tuple[Totals, Totals]:
        """Return this worker's counts, and 1: its gradients are of the sum of the loss, and servers divide."""
        counts = loss_terms.total_counts(terms, own, self.optimizer.mesh)
        return counts, dict.fromkeys(counts, 1.0)

    def update(self, gradients: Gradients, figures: Mapping[str, float] = MappingProxyType({})) -> StepMetrics:
        """Push the gradients and get the weights of the next step, which may not be the following one.

        The record has the means over all gradients that the servers have applied since the last one.
        """
        rates, name = self.rates.at(self.consumed_samples), gradients.terms[0].name
        step = self.iteration + 1
        seconds = time.perf_counter() - gradients.began
        with undone_by_error(gradients.before), self.sections(OPTIMIZER):
            is_finite = not self.optimizer.complete().skipped
            answer = self.worker.exchange(
                Message(
                    PUSH,
                    step,
                    is_finite,
                    self._is_meeting(step),
                    any(self._flags),
                    seconds,
                    loss_terms.total_sums(gradients.terms, gradients.sums, self.optimizer.mesh)[name],
                    gradients.counts[name],
                    *astuple(rates),
                )
            )
        gradients.undo_forward_if(not is_finite)
        of_servers = answer.figures
        with self.sections(SAVING):
            self.task.end_step(gradients.micro_batches, updated=of_servers.applied > 0)
        while self.iteration < answer.step:
            self.consumed_samples += self.task.batch_size.at(self.consumed_samples)
            self.iteration += 1
        self._meets = self._is_meeting(self.iteration) or self.iteration == answer.meeting
        self._server_stops = answer.stops
        self.skips_in_a_row = 0 if of_servers.applied else self.skips_in_a_row + 1
        loss: Totals = {name: math.nan}
        norm, counts = math.nan, {name: of_servers.count}
        if of_servers.applied:
            loss, norm = loss_terms.means({name: of_servers.loss}, counts), of_servers.gradient_norm
            self.empty_terms.add(counts)
        extra = {
            "staleness/mean": of_servers.staleness_sum / max(of_servers.applied, 1),
            "staleness/max": of_servers.staleness_max,
            "dropped_gradients": of_servers.dropped,
            **figures,
        }
        sent, size = gradients.bytes_sent, gradients.batch_size
        seconds = time.perf_counter() - gradients.began
        return self._metrics(name, loss, StepResult({"all": norm}), rates, 1.0, size, seconds, sent, extra)

    def _is_meeting(self, step: int) -> bool:
        """Tell whether all workers meet after this step, as they know without being told."""
        intervals = (
            self.config.checkpoint.save_interval,
            self.config.training.exit_interval,
            self.config.watchdog.timing_interval,
        )
        due = any(interval and step % interval == 0 for interval in intervals)
        return due or self.evaluation_due(step) or step == self.iterations

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Keep the flags of this rank until all workers meet; then return for each whether it is set on any of them.

        The first flag asks for a stop, as servers may, too.
        """
        stop, *others = flags
        flags = [stop or self._server_stops, *others]
        self._flags = [new or kept for new, kept in zip(flags, self._flags or flags, strict=True)]
        if not self._meets:
            return [False] * len(flags)
        flags, self._flags = self._flags, []
        return on_any_rank(flags, self.mesh)

    def locate_not_finite(self) -> str | None:
        """Return None: workers do not skip the same steps, and do not run them again together."""
        return None

    def load(self, path: AnyPath, described: Manifest, resume_point: ResumePoint) -> None:
        """Continue from a checkpoint. The servers load the state of the optimizer."""
        super().load(path, described, replace(resume_point, optimizer=False))
        self.loaded = replace(self.loaded, records=None)  # steps that were done without rank 0 have no record

    def save(self, display: Display, *, last: bool) -> None:
        """Let the servers save. All workers have the same step."""
        began = time.perf_counter()
        said = self.worker.ask(
            Message(SAVE, self.iteration, meets=last, asks=self.evaluation_left, count=self.consumed_samples)
        )
        self._longest_save = max(self._longest_save, time.perf_counter() - began)
        for line in said.splitlines():
            display.message(line)

    def save_seconds(self) -> float:
        """Return the longest time for which servers have saved; before the first save, what they expect."""
        return self._longest_save or self._estimated_save

    def notes(self) -> tuple[str, ...]:
        """Return the messages of any trainer, and one on the servers."""
        servers = ", ".join(str(link.peer) for link in self.worker.servers)
        return (
            *super().notes(),
            f"parameter servers: ranks {servers}; the layout is of the {self.mesh.world_size} workers",
        )

    def learn_save_seconds(self) -> None:
        """Learn from the servers for how long they expect to save. Called by all ranks of the run together."""
        self._estimated_save = max(all_gather_json(0.0, self.mesh.whole))


class ServerTrainer(_PartTrainer):
    """Trainer of a server: its optimizer has this server's shard of the weights and of the state. It runs no steps."""

    def __init__(
        self,
        config: TaskConfig,
        task: Task,
        synchronization: Synchronization,
        directory: AnyPath | None = None,
        sections: Sections | None = None,
    ) -> None:
        plain = _with(config, "optim", synchronization=SynchronizationConfig())
        super().__init__(plain, task, synchronization, directory, sections)
        self.config, self.workers = config, _links(config, self.mesh.whole)
        self.listener: Callable[[str, int, int], None] | None = None
        """Function that is called for what the first server decides; see `Order`."""

    def prove_steps(self) -> Sequence[int]:
        """Prove a step of any number of micro-batches: a server has no samples."""
        self.schedules.prove(training=[1], evaluation=[1], mesh=self.mesh)
        return [1]

    def summary(self) -> Mapping[str, object]:
        """Return nothing: rank 0 shows the layout of the workers."""
        return {}

    def serve(self, told_to_stop: Callable[[], int] = lambda: 0) -> int:
        """Serve the workers until they end. Returns their exit code. `told_to_stop`: returns the signal, or 0."""
        chosen = self.config.synchronization
        order = Order(
            len(self.workers),
            self.iteration,
            chosen.max_staleness,
            chosen.backup_workers,
            chosen.drop_stragglers_after,
            listener=self.listener,
        )
        return Server(self.optimizer, self.workers, order, told_to_stop).serve(self._save)

    def _save(self, message: Message) -> str:
        """Save a checkpoint after the step of a message. Returns what rank 0 shows."""
        self.iteration, self.consumed_samples = int(message.step), int(message.count)
        self.evaluation_left = bool(message.asks)
        said = StringIO()
        with self.sections(SAVING), Display(None, 1, stream=said) as display:
            self.save(display, last=bool(message.meets))
            if self.checkpoints is not None and message.meets:
                self.checkpoints.settle(display)
        return said.getvalue()

    def tell_save_seconds(self) -> None:
        """Tell the workers for how long a save is expected to last. Called by all ranks of the run together."""
        all_gather_json(self.save_seconds(), self.mesh.whole)


class WorkerLoop(TrainingLoop):
    """Loop of a worker: it agrees with the others where all meet, and tells the servers when it has ended."""

    trainer: WorkerTrainer

    def run(self) -> int:
        """Train until the run ends or is asked to stop. Returns the exit code of the program."""
        self.trainer.learn_save_seconds()
        code = super().run()
        self.trainer.worker.ask(Message(END, code))
        return code

    def agreed(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any worker, where all of them meet; otherwise False."""
        return self.trainer.agree(flags)


class ServerLoop(TrainingLoop):
    """Loop of a server, which serves until the workers' loops have ended."""

    trainer: ServerTrainer

    def run(self) -> int:
        """Serve. Returns the exit code of the program, as the workers have it."""
        self.trainer.tell_save_seconds()
        with StopRequest() as stop:
            self.startup.finish(self.trainer.iteration)
            self.log_progress("continues" if self.trainer.iteration else "begins")
            code = self.trainer.serve(stop.local_request)
            if code:
                stop.answered()
        self.log_progress("stopped" if code else "finished")
        return code
