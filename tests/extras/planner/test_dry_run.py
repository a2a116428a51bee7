"""Dry runs against real runs of the same flags on CPUs: bytes by kind, live tensors and messages are the same."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve, validate
from megalite.errors import ConfigurationError
from megalite.extras.planner.dry_run import DryRun, dry_run
from megalite.extras.planner.recording import Recorder
from megalite.parallel.mesh import ParallelMesh
from megalite.tasks.summary import measured_memory
from megalite.training.data import open_data
from tests.distributed.test_memory import live_storages
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools

FLAGS = """--mock-data --tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 4 --num-layers 4
--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 32 --max-position-embeddings 32
--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --train-iters 2
--lr 0.01 --kernels reference"""
CHOICES = {
    "tp": ["--tp 1", "--tp 2", "--tp 2 --sequence-parallel", "--tp 4 --sequence-parallel"],
    "pp": [
        "",
        "--pp 2",
        "--pp 4 --pipeline-schedule zb-h1",
        "--pp 2 --pipeline-schedule zb-v",
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
    "cp": ["", "--cp 2", "--cp 2 --cp-comm-type all_gather"],
    "zero": [
        "",
        "--use-distributed-optimizer",
        "--data-parallel-sharding-strategy optim_grads",
        "--data-parallel-sharding-strategy optim_grads_params",
    ],
    "overlap": ["", "--overlap-grad-reduce"],
    "recompute": ["", "--recompute-activations", "--recompute-granularity full --recompute-method uniform"],
    "family": [
        "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights",
        "--group-query-attention --num-query-groups 2",
    ],
    "size": ["--micro-batch-size 1", "--micro-batch-size 2"],
    "dtype": ["--bf16", ""],
}
EXPERTS = (  # with a capacity, the number of rows does not depend on the tokens
    "--tp 2 --sequence-parallel --ep 2 --num-experts 4 --moe-router-topk 2 --moe-pad-expert-input-to-capacity "
    "--moe-expert-capacity-factor 1.0 --micro-batch-size 1 --use-distributed-optimizer"
)
COUNT = 20
IN_EVERY_RUN = (0, 1, 2, 3, 7)
"""Layouts that `make test` runs: they have experts, every kind of rank, ZeRO 1 to 3 and both precisions."""


def layouts() -> list[tuple[int, str]]:
    """Return random layouts, each with its number of ranks, that a run accepts."""
    draw, found = random.Random(4), [(4, EXPERTS)]
    while len(found) < COUNT:
        flags, ranks = " ".join(draw.choice(each) for each in CHOICES.values()), draw.choice([2, 4, 8])
        try:
            config = parse_arguments(f"{FLAGS} {flags}".split()).config
            validate(resolve(config, ranks), ranks)
        except ConfigurationError:
            continue
        found.append((ranks, flags))
    return found


def compared(flags: str) -> list[Any] | None:
    """Return a rank's memory, live bytes and messages of a real step, and those of its dry run; None if it has none.

    Every third rank has one: a dry run takes much longer than a step, and these are in different places of each axis.
    """
    gc.collect()
    gc.freeze()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = parse_arguments(f"{FLAGS} {flags}".split()).config
    config = resolve(given, ranks)
    mesh = ParallelMesh(rank=rank, world_size=ranks, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh)
    memory = measured_memory(trainer, trainer.task)  # type: ignore[arg-type]
    time.sleep(0.1)  # a gloo thread frees the tensors of a collective shortly after its end
    live = sum(live_storages().values())
    dry, of_host = dry_run_and_host(given, ranks, rank) if rank % 3 == 0 else (None, 0)
    sent: Counter[tuple[Any, ...]] = Counter()
    with trainer.loader:
        micro_batches = trainer.next_micro_batches()
        mesh.traffic.listener = lambda kind, among, size: sent.update([(kind, among, size)])
        trainer.step(micro_batches)
        mesh.traffic.listener = None
    gc.unfreeze()
    if dry is None:
        return None
    predicted = Counter({tuple(message): times for message, times in dry.total.messages.items()})
    return [memory, dry.memory, live, dry.before + of_host, sent, predicted, dry.misplaced]


def dry_run_and_host(config: RunConfig, ranks: int, rank: int) -> tuple[DryRun, int]:
    """Return a dry run, and the bytes of its tensors on the host, which a run on a CPU has beside those of its device.

    The garbage collector must have been frozen before the run that it is compared with.
    """
    of_host = []
    forget, others = Recorder.forget, live_storages()

    def count_and_forget(recorder: Recorder) -> None:
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if not each.is_meta}
        of_host.append(sum(size for storage, size in sizes.items() if storage not in others))
        forget(recorder)

    with mock.patch.object(Recorder, "forget", count_and_forget):
        return dry_run(config, ranks, rank, of_gpu=False), of_host[0]


@pytest.mark.wide_except("2-flags1")
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(*each, marks=[pytest.mark.wide] * (number not in IN_EVERY_RUN))
        for number, each in enumerate(layouts())
    ],
)
def test_a_dry_run_holds_and_sends_what_a_run_does(ranks: int, flags: str, rank_pools: RankPools) -> None:
    for memory, dry_memory, live, dry_live, sent, dry_sent, misplaced in filter(
        None, rank_pools(ranks).run(compared, flags)
    ):
        if "--num-experts" in flags:  # where no row is padding, the reference on CPUs keeps other masks
            assert memory.activations == pytest.approx(dry_memory.activations, rel=0.01)
            memory = replace(memory, activations=dry_memory.activations)
        assert memory == dry_memory
        assert live == dry_live
        assert sent == dry_sent
        assert not misplaced


@pytest.mark.wide
def test_a_dry_run_in_bf16_adds_products() -> None:
    """Into gradients in fp32, for which the meta device of torch 2.11 and 2.12 has no working kernel."""
    pytest.importorskip("triton")  # without it, a dry run is that of a CPU
    flags = FLAGS.replace("--kernels reference", "--micro-batch-size 2 --bf16")
    found = dry_run(parse_arguments(flags.split()).config, 1, 0)
    assert sum(count for operation, count in found.total.operations.items() if operation.name == "addmm") > 0


@pytest.mark.wide
@pytest.mark.parametrize("momentum", ["0", "0.9"])
def test_a_dry_run_with_torchs_kernel_of_sgd_has_its_state(momentum: str) -> None:
    """Torch has no version of this kernel for the meta device."""
    flags = f"{FLAGS} --micro-batch-size 1 --optimizer sgd --optimizer-backend torch --sgd-momentum {momentum}"
    found = dry_run(parse_arguments(flags.split()).config, 1, 0, of_gpu=False)
    assert found.memory.optimizer == (0 if momentum == "0" else found.memory.parameters)


@pytest.mark.wide_except("--fp8-format e4m3-2", "--fp8-format e4m3 --fp8-wgrad-3")
@pytest.mark.parametrize(
    ("recipe", "products"),
    [
        ("--fp8-format e4m3", 2),
        ("--fp8-format hybrid --fp8-recipe tensorwise", 2),
        ("--fp8-format e4m3 --fp8-wgrad", 3),
        pytest.param(
            *("--fp8-format e4m3 --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax", 2),
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_dry_run_in_fp8_has_as_many_floating_point_operations(recipe: str, products: int) -> None:
    """Compare with two thirds of those of layers, which have the speed of fp8, unless weight gradients are rounded."""
    pytest.importorskip("triton")
    sizes = "--micro-batch-size 2 --bf16 --hidden-size 128 --kv-channels 32 --ffn-hidden-size 256"
    given = FLAGS.replace("--hidden-size 32", "").replace("--ffn-hidden-size 48", "")
    flags = given.replace("--kernels reference", sizes)
    both = (f"{flags} {recipe[recipe.find('--num-experts') :] if 'experts' in recipe else ''}", f"{flags} {recipe}")
    plain, found = (dry_run(parse_arguments(each.split()).config, 1, 0).total for each in both)
    assert found.flops == plain.flops
    weights = 4 * (4 * 128 * 128 + 2 * 128 * 256)
    in_fp8 = sum(each.flops * count for each, count in found.operations.items() if each.dtype == "float8")
    assert in_fp8 == 2 * products * 8 * 32 * weights


def test_what_is_offloaded_is_not_on_the_device() -> None:
    """A step holds less by what the host holds, except for the layer that comes back ahead of its backward."""

    def run(flags: str) -> DryRun:
        return dry_run(parse_arguments(f"{FLAGS} --micro-batch-size 2 {flags}".split()).config, 1, 0)

    plain, offloaded = run(""), run("--cpu-offloading-num-layers 3")
    host = offloaded.memory.host
    assert plain.memory.host == 0
    assert plain.memory.activations - offloaded.memory.activations == host > 0
    of_backward = [
        max(moment.peak for moment in found.moments if str(moment.action).startswith("B of micro-batch 0"))
        for found in (plain, offloaded)
    ]
    assert host / 2 < of_backward[0] - of_backward[1] <= host
    assert not offloaded.misplaced


def test_the_summary_frees_what_it_measures() -> None:
    """Tensors that a measured forward keeps were once never freed: the activations of a micro-batch."""
    gc.freeze()
    config = resolve(parse_arguments(f"{FLAGS} --micro-batch-size 2".split()).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh())
    before = sum(live_storages().values())
    memory = measured_memory(trainer, trainer.task)  # type: ignore[arg-type]
    assert memory.activations > 0
    assert sum(live_storages().values()) == before
    gc.unfreeze()
