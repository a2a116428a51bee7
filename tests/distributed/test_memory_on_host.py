"""Bytes on the host and on the device of runs that offload, to the byte, and the refusal of what a host cannot hold."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError
from megalite.offload.activations import Place
from megalite.offload.transfers import Direction
from megalite.optim.host_memory import bytes_on_host
from megalite.parallel.mesh import ParallelMesh
from megalite.process import host
from megalite.tasks.gpt_task import GPTTask
from megalite.tasks.memory import Memory
from megalite.tasks.summary import measured_memory
from megalite.training import builder
from megalite.training.data import open_data
from megalite.training.trainer import Trainer
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools

FLAGS = """--mock-data --tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 4 --num-layers 2
--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 --max-position-embeddings 16
--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 2
--train-iters 2 --lr 0.01 --optimizer-cpu-offload"""
EIGHT = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype fp8"
REMAINDERS = "--bf16 --use-precision-aware-optimizer --store-param-remainders --exp-avg-dtype bf16"
MEAN = f"{REMAINDERS} --ema-decay 0.9"
ZERO = {
    0: "",
    1: "--use-distributed-optimizer",
    2: "--data-parallel-sharding-strategy optim_grads",
    3: "--data-parallel-sharding-strategy optim_grads_params",
}
PER_ELEMENT = {
    "": (4, 4, 8),
    "--bf16": (2, 4, 12),
    REMAINDERS: (2, 4, 2 + 2 + 4),
    MEAN: (2, 4, 2 + 2 + 4 + 4),
    EIGHT: (2, 4, 4 + 2 + 2 * 4 / 256),
}
"""Bytes of a parameter, of its gradient, and of its state with the master and the mean."""
CASES = [
    *((zero, precision, fraction) for zero in (0, 3) for precision in ("", "--bf16") for fraction in (0.0, 0.3, 1.0)),
    *((zero, precision, 0.3) for zero in (1, 2) for precision in (MEAN, EIGHT)),
    *((zero, precision, 1.0) for zero in (1, 3) for precision in (REMAINDERS, EIGHT)),
]


def made(flags: str) -> Trainer:
    config = resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, dist.get_world_size())
    pp = config.parallel.pipeline_model_parallel_size
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), pipeline_parallel_size=pp)
    return gpt_trainer(config, open_data(config), mesh)


def measured(flags: str) -> tuple[Memory, int, list[int], dict[str, object]]:
    """Return the memory of a rank, what was expected on the host, the elements of its shards, and the start's table."""
    expected: list[int] = []
    with mock.patch.object(builder, "require_room_on_host", lambda needed, *_: expected.append(needed)):
        trainer = made(flags)
    task = trainer.task
    assert isinstance(task, GPTTask)
    shards = [shard.stop - shard.start for shard in trainer.optimizer.shards]
    return measured_memory(trainer, task), *expected, shards, task.summary(trainer)  # type: ignore[return-value]


@pytest.mark.wide_except("1")
@pytest.mark.parametrize("part", range(2))
def test_bytes_are_those_of_the_formula(part: int, rank_pools: RankPools) -> None:
    for zero, precision, fraction in CASES[part::2]:
        for memory, expected, shards, lines in rank_pools(2).run(
            measured, f"{ZERO[zero]} {precision} --optimizer-offload-fraction {fraction}"
        ):
            parameter, gradient, state = PER_ELEMENT[precision]
            assert memory.host == expected
            assert ("  host" in lines) == (fraction > 0)
            per_element = parameter + gradient + state
            offloaded = memory.host / per_element
            of_blocks = 12 * len(shards)  # scales of blocks that are not full
            assert fraction * sum(shards) - of_blocks <= offloaded <= fraction * sum(shards) + 256 + of_blocks
            assert memory.optimizer == pytest.approx((sum(shards) - offloaded) * state, abs=8 * of_blocks)
            if fraction == 1.0:
                assert memory.optimizer == 0
            if precision != EIGHT:  # to the byte
                assert memory.optimizer * per_element == (sum(shards) * per_element - memory.host) * state


def test_slices_on_the_host_are_no_memory_of_the_device(rank_pools: RankPools) -> None:
    for precision, (parameter, gradient, state) in PER_ELEMENT.items():
        if precision == EIGHT:
            continue
        for memory, expected, shards, _ in rank_pools(2).run(measured, f"{ZERO[3]} {precision} --parameter-offload"):
            assert memory.host == expected == sum(shards) * (parameter + gradient + state)
            assert (memory.parameters, memory.gradients, memory.optimizer) == (0, sum(shards) * gradient, 0)


def refused(flags: str, limit: int) -> tuple[str, bool]:
    """Return the message of a start on a host with this limit, and whether anything was allocated for the optimizer."""
    allocated = False

    def allocate(*_: object, **__: object) -> None:
        nonlocal allocated
        allocated = True

    with (
        mock.patch.object(host, "memory_limit", return_value=limit + dist.get_rank()),
        mock.patch.object(builder.optim, "make_optimizer", allocate),
        pytest.raises((ConfigurationError, AttributeError)) as raised,
    ):
        made(flags)
    return str(raised.value) if raised.type is ConfigurationError else "", allocated


def test_what_a_host_cannot_hold_is_refused_on_all_ranks(rank_pools: RankPools) -> None:
    """The ranks of a host share its limit, which is that of the rank that has the least."""
    ((memory, *_), (other, *_)) = rank_pools(2).run(measured, "")
    both = memory.host + other.host
    for message, allocated in rank_pools(2).run(refused, "", both - 1):
        assert not allocated
        assert f"host {host.host_name()}: 2 ranks would keep" in message
        assert "lower --optimizer-offload-fraction from 1 to 0.99 or less" in message
    assert rank_pools(2).run(refused, "", both) == [("", True)] * 2


def test_advice_leaves_the_fraction_of_slices(rank_pools: RankPools) -> None:
    for message, _ in rank_pools(2).run(refused, f"{ZERO[3]} --parameter-offload", 1000):
        assert "leave out --parameter-offload" in message


def kept_by_step(flags: str) -> tuple[int, object]:
    trainer = made(flags)
    with trainer.loader:
        metrics = trainer.step(trainer.next_micro_batches())
    return bytes_on_host(trainer.optimizer), metrics.record().get("host_memory_bytes")


def test_a_record_has_the_host_only_if_something_is_there(rank_pools: RankPools) -> None:
    for kept, recorded in rank_pools(2).run(kept_by_step, ""):
        assert kept == recorded
    for kept, recorded in rank_pools(2).run(kept_by_step, "--optimizer-offload-fraction 0"):
        assert (kept, recorded) == (0, None)


def test_a_record_has_the_buffers_of_activations_that_stay(rank_pools: RankPools) -> None:
    layers = "--optimizer-offload-fraction 0 --cpu-offloading-num-layers 1"
    for kept, recorded in rank_pools(2).run(kept_by_step, f"{layers} --cpu-offloading-retain-pinned-cpu-buffers"):
        assert kept == 0 < recorded
    for _, recorded in rank_pools(2).run(kept_by_step, layers):
        assert recorded is None


def of_activations(flags: str) -> tuple[int, int, int, int]:
    """Return what activations take: on the device more than with no layer that comes back early, by the formula and as
    it is before a backward; and on the host, by the formula and as it is after a step.
    """
    trainer = made(f"{flags} --optimizer-offload-fraction 0")
    task = trainer.task
    assert isinstance(task, GPTTask)
    assert task.offloading is not None
    offloading, memory = task.offloading, measured_memory(trainer, task)
    with mock.patch.object(offloading, "ends", []):
        more = memory.activations - measured_memory(trainer, task).activations
    arrived: Counter[tuple[int, int]] = Counter()
    places: list[Place] = []
    early, back = [], offloading.before_backward

    def begin_backward(chunk: int, micro_batch: int) -> None:
        early.append(arrived[chunk, micro_batch])
        back(chunk, micro_batch)

    def add(direction: Direction, size: int) -> None:
        if direction == "to device":
            arrived[places[-1].chunk, places[-1].micro_batch] += size

    offloading.begun, offloading.transfers.begun = lambda _, place: places.append(place), add
    with trainer.loader, mock.patch.object(offloading, "before_backward", begin_backward):
        trainer.step(trainer.next_micro_batches())
    return more, max(early), memory.host, offloading.host_bytes


@pytest.mark.parametrize(
    "flags",
    [
        "--cpu-offloading-num-layers 2 --cpu-offloading-retain-pinned-cpu-buffers",
        "--fine-grained-activation-offloading --offload-modules mlp_norm core_attn --min-offloaded-tensor-size 0",
    ],
)
def test_what_comes_back_early_is_in_the_memory_of_the_device(flags: str, rank_pools: RankPools) -> None:
    """The last rank has no computation between the forward and the backward of a micro-batch."""
    pipeline = f"--num-layers 4 --pp 2 --global-batch-size 4 {flags}"
    (more, early, *host), (none, not_early, *last) = rank_pools(2).run(of_activations, pipeline)
    assert more == early > 0 == none == not_early
    assert host[0] == host[1] > 0
    assert last[0] == last[1] > 0
