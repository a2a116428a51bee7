"""Parameter servers (DistBelief, Dean et al. 2012): ranks that keep the weights and apply the workers' gradients.

Each server owns a slice of each bucket, with its masters and the state of the optimizer, as a ZeRO-1 rank does. A
worker sends the slices of its gradients to their servers and waits for the weights. The first server decides about the
order (`parameter_server_order.py`), and all servers do the same, so that norms over whole tensors have a meaning.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.errors import ConfigurationError
from megalite.extras.synchronization.parameter_server_order import END, PUSH, SAVE, Command, Figures, Message, Order
from megalite.optim.layout import BucketLayout, bucket_length
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending, completed, launch
from megalite.parallel.mesh import Group, ParallelMesh

HEARTBEAT_SECONDS = 30.0
"""Time after which the first server calls the others, which would otherwise take it for lost."""
_PATIENCE_MINUTES = 60 * 24 * 365
"""Time for which a server waits for a worker, which may evaluate. A worker waits for a server as in a collective."""
_NUMBERS, _ANSWER = len(fields(Message)), 3 + len(fields(Figures))
"""Numbers of a message and of an answer."""


@dataclass(frozen=True)
class Link:
    """Connection of a worker and a server. Messages go through host memory."""

    outgoing: Group
    incoming: Group

    @staticmethod
    def to(mesh: ParallelMesh, worker: int, server: int) -> Link:
        """Connect two ranks, of which this is one. All ranks make their links in the order of (worker, server)."""
        is_worker = mesh.rank == worker
        there = mesh.link(worker, server, None if is_worker else _PATIENCE_MINUTES)
        back = mesh.link(server, worker)
        return Link(there, back) if is_worker else Link(back, there)

    @property
    def peer(self) -> int:
        """Rank at the other end."""
        return self.outgoing.ranks[1]

    def send(self, tensor: Tensor) -> Pending:
        """Start to send a tensor, which must not change until the result has been waited for."""
        if not tensor.numel():
            return completed(tensor)
        group, sent = self.outgoing, tensor.cpu()
        group.record("send", tensor.nbytes)
        return Pending(launch(dist.ProcessGroup.send, group.process_group, [sent], 1, 0), sent, group)

    def receive(self, tensor: Tensor, *, timed: bool = True) -> Tensor:
        """Receive into a tensor in host memory. Only the main thread's waits may be `timed`."""
        if not tensor.numel():
            return tensor
        group = self.incoming if timed else None
        work = launch(dist.ProcessGroup.recv, self.incoming.process_group, [tensor], 0, 0)
        return Pending(work, tensor, group).wait("waited for a message from rank %d", self.peer)


def slice_of(layout: BucketLayout, server: int, servers: int) -> slice:
    """Return the elements of a bucket that a server owns, without padding: workers pad their buckets otherwise."""
    end = layout.slots[-1].stop
    length = bucket_length([(0, 0, end)], servers) // servers
    return slice(min(server * length, end), min((server + 1) * length, end))


@dataclass(frozen=True)
class Answer:
    """Answer of the first server to a worker, which has sent it the weights."""

    step: int
    """Last step that the worker has done, or that was done without it."""
    meeting: int
    """Step after which all workers meet."""
    stops: bool
    """True if a server was asked to stop."""
    figures: Figures


class Worker:
    """Side of a worker."""

    def __init__(self, optimizer: Optimizer, servers: Sequence[Link]) -> None:
        """Describe the exchange. `optimizer`: of this rank alone, for its flat buffers."""
        self.servers, self._parts = servers, []
        for number in range(len(servers)):
            parts = [(each, slice_of(each.layout, number, len(servers))) for each in optimizer.buckets]
            self._parts.append([(bucket.gradients[part], bucket.parameters[part]) for bucket, part in parts])

    def tell(self, message: Message) -> None:
        """Send a message, with the gradients of a push, to all servers."""
        numbers, pending = torch.tensor(astuple(message), dtype=torch.float64), []
        for server, parts in zip(self.servers, self._parts, strict=True):
            pending.append(server.send(numbers))
            if message.kind == PUSH and message.is_finite:
                pending += [server.send(gradients) for gradients, _ in parts]
        for sent in pending:
            sent.wait("sent gradients to ranks %s", ", ".join(str(server.peer) for server in self.servers))

    def ask(self, message: Message) -> str:
        """Send a `SAVE` or an `END`, and wait until all servers have done it. Returns what the first says of it."""
        self.tell(message)
        said = []
        for server in self.servers:
            length = int(server.receive(torch.zeros(1, dtype=torch.int64)).item())
            said.append(bytes(server.receive(torch.zeros(length, dtype=torch.uint8)).tolist()).decode())
        return said[0]

    def exchange(self, message: Message) -> Answer:
        """Push the gradients of a step, and get the weights of the next one."""
        self.tell(message)
        numbers = self.servers[0].receive(torch.zeros(_ANSWER, dtype=torch.float64)).tolist()
        for server, parts in zip(self.servers, self._parts, strict=True):
            for _, weights in parts:
                weights.copy_(server.receive(torch.empty_like(weights, device="cpu")))
        loss, count, applied, dropped, *others = numbers[3:]
        figures = Figures(loss, count, int(applied), int(dropped), *others)
        return Answer(int(numbers[0]), int(numbers[1]), bool(numbers[2]), figures)


class Server:
    """Side of a server. A thread per worker receives its messages, and notices if it ends without one."""

    def __init__(
        self,
        optimizer: Optimizer,
        workers: Sequence[Link],
        order: Order,
        told_to_stop: Callable[[], int] = lambda: 0,
    ) -> None:
        """Allocate memory for the gradients of each worker.

        Args:
            optimizer: of the servers, which are ZeRO-1 shards.
            workers: the links to the workers, in rank order.
            order: the order of updates, which the first server asks.
            told_to_stop: returns the signal by which this server was told to end the run, or 0.

        Raises:
            ConfigurationError: this server owns no weights.
        """
        self.optimizer, self.workers, self.order, self._told_to_stop = optimizer, workers, order, told_to_stop
        self.group, self._device = optimizer.mesh.world(), optimizer.mesh.device
        self._stops = False
        self._own = []
        for bucket in optimizer.buckets:
            part = slice_of(bucket.layout, self.group.rank, self.group.size)
            own = slice(part.stop - part.start)
            self._own.append((bucket.gradient_shard[own], bucket.parameter_shard[own]))
        if not any(len(gradients) for gradients, _ in self._own):  # workers would not wait for its answers
            raise ConfigurationError(f"--num-servers {self.group.size}: some would own no weights: give fewer")
        self._gradients = [[torch.empty_like(g, device="cpu") for g, _ in self._own] for _ in workers]
        self._arrived: dict[int, Message] = {}
        self._inbox: queue.Queue[tuple[int, Message | BaseException]] = queue.Queue()

    def serve(self, save: Callable[[Message], str]) -> int:
        """Serve until all workers have ended. Returns their exit code. `save`: saves a checkpoint, and says so."""
        for worker in range(len(self.workers)):
            threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        while True:
            command, said = self._command(), ""
            while not set(command.apply + command.answer) <= set(self._arrived):
                self._take(None)
            if command.kind != PUSH:
                said = save(self._arrived[0]) if command.kind == SAVE else ""
                self.order.arrived.clear()
            if command.apply:
                self._apply(command.apply)
            for worker in command.answer:
                message = self._arrived.pop(worker)
                if command.kind == PUSH:
                    self._answer(worker)
                else:
                    self._say(worker, said)
            if command.kind == END:
                return int(message.step)

    def _listen(self, worker: int) -> None:
        """Receive a worker's messages. It sends the next one after all servers' answers: memory may be used again."""
        link = self.workers[worker]
        try:
            while True:
                message = Message(*link.receive(torch.zeros(_NUMBERS, dtype=torch.float64), timed=False).tolist())
                if message.kind == PUSH and message.is_finite:
                    for gradients in self._gradients[worker]:
                        link.receive(gradients, timed=False)
                self._inbox.put((worker, message))
                if message.kind == END:
                    return
        except BaseException as error:
            self._inbox.put((worker, error))

    def _take(self, seconds: float | None) -> None:
        """Take the next message, if there is one before the time is over."""
        try:
            worker, message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        if isinstance(message, BaseException):
            raise message
        self._arrived[worker] = message
        if self.group.rank == 0:
            self.order.arrive(worker, message)

    def _command(self) -> Command:
        """Return what all servers do next, as the first one decides."""
        count, command = len(self.workers), Command()
        if self.group.rank == 0:
            until = time.monotonic() + HEARTBEAT_SECONDS
            while (found := self.order.next()) is None and (left := until - time.monotonic()) > 0.0:
                self._take(min(left, self.order.seconds_left()))
            command = found or command
        numbers = [0] * (2 * count + 2)
        for offset, chosen in ((0, command.apply), (count, command.answer)):
            for worker in chosen:
                numbers[offset + worker] = 1
        numbers[-2:] = command.kind, self._told_to_stop()
        shared = collectives.all_reduce_(torch.tensor(numbers, device=self._device), self.group).tolist()
        self._stops = self._stops or shared[-1] > 0
        apply, answer = (tuple(w for w in range(count) if shared[start + w]) for start in (0, count))
        return Command(apply, answer, shared[-2])

    @torch.no_grad()
    def _apply(self, workers: tuple[int, ...]) -> None:
        """Make one update of the gradients of some workers, added in rank order, over the count of their tokens."""
        finite = [worker for worker in workers if self._arrived[worker].is_finite]
        count = sum(self._arrived[worker].count for worker in finite)
        norm, is_applied = float("nan"), False
        if finite:
            for number, (gradients, _) in enumerate(self._own):
                first, *others = (self._gradients[worker][number].to(self._device) for worker in finite)
                gradients.copy_(first)
                for other in others:
                    gradients.add_(other)
                gradients.mul_(0.0) if count == 0.0 else gradients.div_(count)
            result = self.optimizer.measure()
            norm, is_applied = result.gradient_norm, not result.skipped
            if is_applied:
                by = self._arrived[workers[0]]
                rates = Rates(by.learning_rate, by.token_table_learning_rate, by.weight_decay)
                self.optimizer.update(rates, norm)
        if self.group.rank == 0:
            self.order.applied(workers, norm, is_applied)

    def _answer(self, worker: int) -> None:
        """Send a worker the weights, and from the first server what it has decided."""
        link, pending = self.workers[worker], []
        if self.group.rank == 0:
            step, figures = self.order.answered(worker)
            numbers = [step, self.order.meeting, self._stops, *astuple(figures)]
            pending.append(link.send(torch.tensor(numbers, dtype=torch.float64)))
        pending += [link.send(weights) for _, weights in self._own]
        for sent in pending:
            sent.wait("sent weights to rank %d", link.peer)

    def _say(self, worker: int, text: str) -> None:
        link, encoded = self.workers[worker], list(text.encode())
        link.send(torch.tensor([len(encoded)])).wait()
        link.send(torch.tensor(encoded, dtype=torch.uint8)).wait()
