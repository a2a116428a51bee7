"""Parameter servers: workers that push gradients and pull weights, against plain runs and replays of their order."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import CommunicationError
from megalite.extras.synchronization.parameter_server import Link
from megalite.extras.synchronization.parameter_server_order import END, PUSH, Command, Message, Order
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.run.run import make_synchronization
from megalite.tasks.gpt_task import GPTTask
from megalite.torch_internals import default_store
from megalite.training.data import open_data
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer
from tests.distributed.test_trainer import BATCH, NETWORK
from tests.distributed.test_trainer import FLAGS as OF_TRAINER
from tests.end_to_end.campaign import FAULTY
from tests.end_to_end.runs import (
    GPT2,
    MOCK,
    PRETRAIN,
    assert_same_checkpoint,
    ended,
    iterations,
    latest_iteration,
    losses,
    words,
)
from tests.extras.synchronization.test_local_update import adam, clone, loss_of
from tests.harness.close import assert_number_close, assert_parameter_close
from tests.harness.fault import Fault
from tests.harness.fork_server import wait_for_exit
from tests.harness.job import Job
from tests.harness.rank_pool import RankPools

STEPS, RATE = 4, 0.02
FLAGS = f"{OF_TRAINER} --lr {RATE} --min-lr 0 --lr-decay-style constant --lr-warmup-iters 0"
SERVERS = "--asynchronous parameter-server"
Tensors = dict[str, Tensor]
Event = tuple[int, int]


@dataclass
class Outcome:
    """Outcome of a run on one rank: records, weights by name, seconds of waiting, and the order of a server."""

    steps: list[StepMetrics] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    order: list[tuple[str, int, int]] = field(default_factory=list)
    waited: float = 0.0

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def made(flags: str, steps: int = STEPS) -> Trainer:
    """Return the trainer of this rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(f"{FLAGS} --train-iters {steps} {flags}".split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    synchronization = make_synchronization(config, mesh)
    task = GPTTask(config, open_data(config), synchronization.mesh)
    return synchronization.trainer(config, task, synchronization)


def run(
    flags: str,
    steps: int = STEPS,
    after: Mapping[Event, Event] = MappingProxyType({}),
    broken: Collection[Event] = (),
    name: str = "",
) -> Outcome:
    """Run steps on this rank, or serve.

    Args:
        flags: the flags of the run.
        steps: the number of steps.
        after: steps of a worker that begin a moment after one of another worker has begun, each as (worker, step).
        broken: steps whose gradients are not finite.
        name: a name of the run, if it has `after`.
    """
    trainer, rank = made(flags, steps), dist.get_rank() if dist.is_initialized() else 0
    outcome, store = Outcome(), default_store() if after else None
    if hasattr(trainer, "serve"):
        trainer.listener = lambda *event: outcome.order.append(event)
        trainer.serve()
    else:
        with trainer.loader:
            while trainer.iteration < steps:
                event = (rank, trainer.iteration + 1)
                if after:
                    store.set(f"{name}{event}", "")
                if event in after:
                    with suppress(RuntimeError):  # in a run with a fault it may never begin
                        store.wait([f"{name}{after[event]}"], timedelta(seconds=5.0))
                    time.sleep(0.5)
                gradients = trainer.forward_backward()
                if event in broken:
                    trainer.optimizer.buckets[0].gradients[0] = math.nan
                outcome.steps.append(trainer.update(gradients))
        if trainer.config.synchronization.has_servers:
            trainer.worker.ask(Message(END, 0))
        held = [(piece, parameter) for parameter, piece in named_pieces(trainer.network)]
        outcome.waited = trainer.mesh.waits.seconds
        outcome.weights = {piece.tensor.name: piece.view(p.detach()).clone() for piece, p in held}
    return outcome


def weights_of(outcomes: list[Outcome]) -> Tensors:
    """Return the weights in the end, which all workers have."""
    workers = [outcome for outcome in outcomes if outcome.weights]
    for worker in workers[1:]:
        for name, weight in worker.weights.items():
            assert torch.equal(weight, workers[0].weights[name]), name
    return workers[0].weights


@pytest.mark.bits
@pytest.mark.parametrize(
    ("servers", "rule"),
    [(1, "--optimizer sgd --adam-eps 1e-8"), (2, ""), (2, "--optimizer muon"), (3, "--optimizer lamb")],
)
def test_without_staleness_servers_make_the_steps_of_plain_data_parallelism(
    servers: int, rule: str, rank_pools: RankPools
) -> None:
    """The count of a step, 64, is a power of two: to divide by it changes no bits."""
    exact = f"--no-eod-mask-loss --seq-length 16 --max-position-embeddings 16 {rule}"
    plain = rank_pools(2).run(run, exact)
    served = rank_pools(2 + servers).run(run, f"{exact} {SERVERS} --num-servers {servers}")
    expected = weights_of(plain)
    for name, weight in weights_of(served).items():
        assert torch.equal(weight, expected[name]), name
    for ours, theirs in zip(served[0].steps, plain[0].steps, strict=True):
        assert (ours.loss, ours.grad_norm, ours.extra["staleness/max"]) == (theirs.loss, theirs.grad_norm, 0.0)


def test_counts_of_any_size_give_the_same_steps(rank_pools: RankPools) -> None:
    """Documents end at random tokens, which are left out of the loss."""
    flags = "--global-batch-size 6"
    plain = rank_pools(3).run(run, flags)
    served = rank_pools(4).run(run, f"{flags} {SERVERS}")
    for ours, theirs in zip(served[0].losses, plain[0].losses, strict=True):
        assert_number_close(ours, theirs, "loss")
    expected = weights_of(plain)
    for name, weight in weights_of(served).items():
        assert_parameter_close(weight, expected[name], RATE, name)


def test_a_gradient_that_is_not_finite_is_dropped(rank_pools: RankPools) -> None:
    """Worker 1 has NaN in step 2, and in step 3 both have."""
    outcomes = rank_pools(3).run(run, SERVERS, broken={(1, 2), (0, 3), (1, 3)})
    records = outcomes[0].steps
    assert [step.extra["dropped_gradients"] for step in records] == [0, 1, 2, 0]
    assert [step.skipped for step in records] == [False, False, True, False]
    order = [event for event in outcomes[2].order if event[0] == "answer" or event[1:] not in {(1, 2), (0, 3), (1, 3)}]
    assert_replayed(outcomes, 2, replay(order, 2, together=True))


def replay(order: list[tuple[str, int, int]], workers: int, *, together: bool, batch_size: int = BATCH) -> Tensors:
    """Return the weights after the applied gradients, each of the weights that its worker had been given before.

    `together`: the gradients of a step make one update.
    """
    flags = f"{FLAGS} --train-iters {STEPS} --global-batch-size {batch_size}"
    data = open_data(resolve(parse_arguments(flags.split()).config, 1)).train
    weights = {name: weight.requires_grad_() for name, weight in NETWORK.weights(77, torch.float64).items()}
    optimizer = adam(weights)
    held = [{name: weight.detach().clone() for name, weight in weights.items()} for _ in range(workers)]
    sums, count = [torch.zeros_like(weight) for weight in weights.values()], 0.0
    for number, (what, worker, step) in enumerate(order):
        if what == "answer":
            held[worker] = clone(weights)
            continue
        samples = [n for n in range((step - 1) * batch_size, step * batch_size) if n % workers == worker]
        own = {name: weight.clone().requires_grad_() for name, weight in held[worker].items()}
        loss, tokens = loss_of(own, data, samples)
        sums = [a + b for a, b in zip(sums, torch.autograd.grad(loss, list(own.values())), strict=True)]
        count += tokens
        following = order[number + 1] if number + 1 < len(order) else None
        if together and following is not None and following[0] == "apply" and following[2] == step:
            continue
        for weight, gradient in zip(weights.values(), sums, strict=True):
            weight.grad = gradient / count
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        sums, count = [torch.zeros_like(weight) for weight in weights.values()], 0.0
    return clone(weights)


def assert_replayed(outcomes: list[Outcome], workers: int, expected: Tensors) -> None:
    assert all(outcome.weights for outcome in outcomes[:workers])
    for name, weight in weights_of(outcomes).items():
        assert_parameter_close(weight, expected[name], RATE, name, 1e-10)


@pytest.mark.parametrize("servers", [1, 2])
def test_staleness_has_its_bound_and_updates_are_those_of_a_replay(servers: int, rank_pools: RankPools) -> None:
    flags = f"{SERVERS} --num-servers {servers} --max-staleness 2 --eval-interval 100"
    outcomes = rank_pools(2 + servers).run(run, flags, after={(1, 1): (0, 3)}, name=str(uuid4()))
    order = outcomes[2].order
    done, lags, has = [0, 0], list[int](), [0, 0]
    for what, worker, step in order:
        if what == "apply":
            lags.append(has[worker])
            done[worker] = step
        else:
            has[worker] = step - min(done)
            assert has[worker] <= 2
    assert max(lags) == 2
    assert_replayed(outcomes, 2, replay(order, 2, together=False))
    assert max(step.extra["staleness/max"] for step in outcomes[0].steps) == 2.0
    assert outcomes[0].steps[-1].extra["dropped_gradients"] == 0.0


def test_waiting_for_a_straggler_is_counted(rank_pools: RankPools) -> None:
    """Worker 1 begins step 3 half a second late."""
    outcomes = rank_pools(3).run(run, SERVERS, after={(1, 3): (0, 3)}, name=str(uuid4()))
    assert outcomes[0].waited > 0.25  # worker 1 waits, too, the longer the busier the machine; not counted, it is 0


def test_backup_workers_are_not_waited_for(rank_pools: RankPools) -> None:
    flags = f"{SERVERS} --backup-workers 1 --global-batch-size 6"
    outcomes = rank_pools(4).run(run, flags, after={(2, 1): (0, 3)}, name=str(uuid4()))
    applied = [(worker, step) for what, worker, step in outcomes[3].order if what == "apply"]
    assert [step for _, step in applied] == [step for step in range(1, STEPS + 1) for _ in range(2)]
    assert (2, 1) not in applied
    assert_replayed(outcomes, 3, replay(outcomes[3].order, 3, together=True, batch_size=6))
    records = outcomes[0].steps
    assert sum(step.extra["dropped_gradients"] for step in records) == STEPS


def test_a_straggler_is_dropped(rank_pools: RankPools) -> None:
    flags = f"{SERVERS} --drop-stragglers-after 10 --eval-interval 100"
    outcomes = rank_pools(3).run(run, flags, after={(1, 3): (0, 4)}, name=str(uuid4()))
    applied = [(worker, step) for what, worker, step in outcomes[2].order if what == "apply"]
    assert (1, 3) not in applied
    assert {(0, 1), (1, 1), (0, 2), (0, 3)} <= set(applied)
    assert_replayed(outcomes, 2, replay(outcomes[2].order, 2, together=True))
    assert outcomes[0].steps[2].extra["dropped_gradients"] == 1.0


def test_a_server_asserts_the_bound() -> None:
    order = Order(workers=2, step=0, max_staleness=1)
    for step in (1, 2):
        order.arrive(0, Message(PUSH, step))
        command = order.next()
        assert command is not None
        assert command.apply == (0,)
        assert command.answer == ((0,) if step == 1 else ())
        if command.answer:
            order.answered(0)
    with pytest.raises(RuntimeError, match="--max-staleness 1"):
        order.answered(0)


def agree_at_once() -> list[bool]:
    """Agree before the first step, with a flag that is set on rank 0."""
    trainer, agreed = made(SERVERS), list[bool]()
    if hasattr(trainer, "serve"):
        trainer.serve()
    else:
        agreed = trainer.agree([dist.get_rank() == 0, False])
        trainer.worker.ask(Message(END, 0))
    return agreed


def test_workers_agree_before_their_first_step(rank_pools: RankPools) -> None:
    """A run may continue with an evaluation, during which it is told to stop."""
    assert rank_pools(3).run(agree_at_once) == [[True, False], [True, False], []]


def test_a_late_worker_asks_for_the_meeting_at_which_the_others_wait() -> None:
    """All three have been told to stop. Two have made step 1, and wait for the third, which is late."""
    order = Order(workers=3, step=0, backup_workers=1)
    for worker in (0, 1):
        order.arrive(worker, Message(PUSH, 1, asks=True))
    assert order.next() == Command(apply=(0, 1), answer=(0, 1))
    assert [order.answered(worker)[0] for worker in (0, 1)] == [order.meeting] * 2 == [1, 1]
    order.arrive(2, Message(PUSH, 1, asks=True))
    assert order.next() == Command(answer=(2,))
    assert order.answered(2)[0] == order.meeting == 1


def test_the_norm_is_of_the_last_gradient_that_was_applied() -> None:
    order = Order(workers=2, step=0, max_staleness=1)
    for worker, norm in ((0, 1.5), (1, math.nan)):
        order.arrive(worker, Message(PUSH, 1, is_finite=math.isfinite(norm)))
        order.next()
        order.applied((worker,), norm, math.isfinite(norm))
    _, figures = order.answered(0)
    assert (figures.applied, figures.dropped, figures.gradient_norm) == (1, 1, 1.5)


def wait_longer_than_a_collective() -> None:
    """Wait for the other rank, which does not send: on rank 0 as a worker, on rank 1 as a server."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=2, timeout=timedelta(seconds=1.0))
    link = Link.to(mesh, 0, 1)
    if mesh.rank == 0:
        with pytest.raises(CommunicationError, match="waited for a message from rank 1"):
            link.receive(torch.zeros(1))
        time.sleep(1.0)
        link.send(torch.ones(1)).wait()
    else:
        assert link.receive(torch.zeros(1)).item() == 1.0


def test_a_worker_waits_for_a_server_as_in_a_collective(rank_pools: RankPools) -> None:
    """Without the watchdog nothing else ends a run whose server, or another worker, is suspended."""
    rank_pools(2).run(wait_longer_than_a_collective)


RUN = (*MOCK, *GPT2, *words("--fp64 --global-batch-size 4 --micro-batch-size 1 --adam-eps 1e-6"))


def test_checkpoints_are_those_of_a_plain_run_and_continue_bit_for_bit(
    spawn: Callable[..., Job], tmp_path: Path
) -> None:
    """A step has 64 tokens, of 4 samples, which 3 servers do not divide."""
    plain, served, both = tmp_path / "plain", tmp_path / "served", tmp_path / "both"

    def train(steps: int, directory: Path, flags: str = "", ranks: int = 2) -> str:
        course = f"--lr-decay-iters 6 --save-interval 2 --resume auto --train-iters {steps} --save {directory} {flags}"
        return ended(spawn([PRETRAIN, *RUN, *words(course)], ranks)).stdout

    train(6, plain)
    servers = f"{SERVERS} --num-servers 3 --load {plain} --ckpt-step 2"
    assert f"saved {served / 'iter_0000004'}" in train(4, served, servers, ranks=5)
    train(6, served, servers, ranks=5)
    train(6, both, f"--load {served} --ckpt-step 4")
    assert losses(served) == losses(plain)[2:]
    assert losses(both) == losses(plain)[4:]
    for step in (4, 6):
        assert_same_checkpoint(served / f"iter_{step:07d}", plain / f"iter_{step:07d}")
    assert_same_checkpoint(both / "iter_0000006", plain / "iter_0000006")


@pytest.mark.parametrize("killed", [1, 2])
def test_a_killed_worker_or_server_is_named(killed: int, spawn: Callable[..., Job]) -> None:
    job = spawn([PRETRAIN, *RUN, "--train-iters", "100000", *words(SERVERS)], 3)
    job.wait_for_output(0, " 2/100000 ")
    job.kill(killed)
    codes = job.wait()
    assert codes == [-signal.SIGKILL if rank == killed else 85 for rank in range(3)]
    said = "".join(map(job.stderr, range(3)))
    assert said.startswith(f"error: rank {killed} (process {job.ranks[killed].process.pid} on ")


def test_a_server_notices_the_end_of_a_worker_that_waits_for_it(spawn: Callable[..., Job], tmp_path: Path) -> None:
    """Worker 1 is suspended in its forward, so that worker 0 gets no answer. There is no watchdog."""
    fault = Fault("forward", 1, 3, "stop")
    flags = (*RUN, *words(f"{SERVERS} --train-iters 100000 --no-watchdog"))
    job = spawn([FAULTY, *flags], 3, FAULT=str(fault), FAULT_RECORD=str(tmp_path), LONGEST_SECONDS="120")
    deadline = time.monotonic() + 60.0
    while not fault.record(tmp_path).exists():
        assert time.monotonic() < deadline, job.stderr(1)
        time.sleep(0.05)
    time.sleep(0.5)  # until worker 0 has pushed, too
    job.kill(0)
    assert not wait_for_exit([job.ranks[2]], 20.0)
    assert job.ranks[2].exit_code == 85
    assert "waited for a message from rank 0" in job.stderr(2)


@pytest.mark.parametrize(
    ("told", "flags"), [(1, "--max-staleness 3"), (2, "--max-staleness 3"), (2, "--save-interval 1")]
)
def test_a_stop_of_a_worker_or_server_ends_all_at_the_same_step(
    told: int, flags: str, spawn: Callable[..., Job], tmp_path: Path
) -> None:
    course = f"--train-iters 100000 {SERVERS} {flags} --save {tmp_path / 'run'}"
    job = spawn([PRETRAIN, *RUN, *words(course)], 3)
    job.wait_for_output(0, " 2/100000 ")
    job.kill(told, signal.SIGTERM)
    said = ended(job, 85).stdout
    assert f"stopped after step {latest_iteration(tmp_path / 'run')}" in said


def test_a_run_whose_job_ends_soon_leaves_time_for_the_saves_of_servers(
    spawn: Callable[..., Job], tmp_path: Path
) -> None:
    flags = (*RUN, *words(f"{SERVERS} --train-iters 100000 --save {tmp_path / 'run'}"))
    soon = str(int(time.time()) + 10)
    assert "2 saves of 5.0 s" in ended(spawn([PRETRAIN, *flags], 3, SLURM_JOB_END_TIME=soon), 85).stdout


def test_servers_and_workers_fall_back_to_the_same_checkpoint(spawn: Callable[..., Job], tmp_path: Path) -> None:
    """Only servers read the moments of the newest checkpoint, in which one byte has changed."""
    directory = tmp_path / "run"

    def train(steps: int, seed: int = 1234) -> str:
        flags = f"{SERVERS} --num-servers 2 --save {directory} --resume auto --save-interval 2 --log-progress"
        job = spawn([PRETRAIN, *RUN, *words(f"{flags} --train-iters {steps} --seed {seed}")], 4)
        return ended(job, timeout=30.0).stdout

    assert "exchange" not in train(4)
    spoil(directory / "iter_0000004", "optimizer/exp_avg/embedding.word")
    said = train(6, seed=5)
    assert f"WARNING: fell back to {directory / 'iter_0000002'}: 2 steps are repeated" in said
    assert "note: sample 0, consumed before this checkpoint, is another now" in said
    assert iterations(directory) == [1, 2, 3, 4, 5, 6]
    lines = [line.split("\t")[2:] for line in (directory / "progress.txt").read_text().splitlines()]
    texts = ["begins after step 0", *(saved := ["saved iter_0000002", "saved iter_0000004"]), "finished after step 4"]
    texts += ["continues after step 2", saved[1], "saved iter_0000006", "finished after step 6"]
    assert lines == [["4 ranks", text] for text in texts]


def spoil(checkpoint: Path, name: str) -> None:
    """Change the last byte of the first box of a tensor."""
    box = json.loads((checkpoint / "manifest.json").read_text())["tensors"][name]["boxes"][0]
    data = bytearray((checkpoint / box["file"]).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    _, end = json.loads(data[8:start])[f"{name}@{','.join(map(str, box['offset']))}"]["data_offsets"]
    data[start + end - 1] ^= 1
    (checkpoint / box["file"]).write_bytes(data)
