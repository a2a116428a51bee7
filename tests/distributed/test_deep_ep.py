"""Tokens that travel by DeepEP, on a stand-in for it: the bits of all-to-all, and where it cannot be used."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.parallel import deep_ep
from megalite.parallel.dispatch import Dispatcher, PaddedRows
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.training.data import open_data
from tests.distributed.layout_expected import on_ranks
from tests.distributed.test_dispatch import CHOICES, TOKENS, WHICH, sent_by
from tests.harness import deep_ep as stand_in
from tests.harness.close import assert_bits_equal
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools

CPU, HIDDEN, STEPS = torch.device("cpu"), 16, 2
FLAGS = f"""--bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 28 --make-vocab-size-divisible-by 4
--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
--init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 8
--train-iters {STEPS} --eval-iters 1 --lr 0.02 --lr-decay-style constant --num-experts 4 --moe-aux-loss-coeff 0.1
--moe-shared-expert-intermediate-size 8"""


@contextmanager
def installed(reason: str | None = None) -> Iterator[None]:
    """Install the stand-in, on a device that can use it if there is no reason against it."""
    with (
        mock.patch.dict(sys.modules, deep_ep=stand_in),
        mock.patch.object(deep_ep, "why_unavailable", return_value=reason),
    ):
        yield


def dispatched(experts: int, parts: int, kind: Any, which: str, capacity: int | None) -> dict[str, Any]:
    """Send bf16 tokens to experts that multiply them, and add them up; returns results and gradients."""
    mesh = ParallelMesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        expert_parallel_size=dist.get_world_size() // parts,
        expert_tensor_parallel_size=parts,
        timeout=datetime.timedelta(minutes=7),
    )
    group, own = mesh.group("ep", "etp"), sent_by(dist.get_rank(), experts, which)
    tokens = torch.cat([own.tokens, own.tokens[:, :3]], dim=1).bfloat16().requires_grad_()
    weights = own.weights.float().requires_grad_()
    dispatcher = Dispatcher(group, experts, parts, kind)
    with installed():
        padded = None if capacity is None else PaddedRows(capacity, capacity * group.size)
        arrived = dispatcher.dispatch(tokens, own.experts, weights, padded)()
        factors = torch.linspace(-1, 2, arrived.groups.offsets[-1])[:, None]
        combined = arrived.combine((arrived.rows * arrived.weights[:, None] * factors).bfloat16())
        combined.backward(torch.cat([own.tokens, own.tokens[:, :3]], dim=1).flip(0).bfloat16())
        limits = {buffer.seconds for buffer in group.buffers.values()}
        made = list(stand_in.ElasticBuffer.made)
        mesh.close()
    results = {
        "output": combined.detach(),
        "tokens": tokens.grad,
        "weights": weights.grad,
        "rows": arrived.rows.detach(),
    }
    return results | {
        "offsets": arrived.groups.offsets,
        "made": made,
        "left": stand_in.ElasticBuffer.made[:],
        "limits": limits,
    }


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("capacity", [None, TOKENS], ids=["dropless", "padded"])
@pytest.mark.parametrize(("size", "experts", "parts"), [(2, 4, 1), (2, 3, 2), (4, 8, 1), (4, 4, 2)])
def test_bits_are_those_of_all_to_all(
    size: int, experts: int, parts: int, capacity: int | None, which: str, rank_pools: RankPools
) -> None:
    """One buffer serves a group, waits as long as the run's collectives, and is destroyed with the group."""
    ways = [
        on_ranks(rank_pools, size, dispatched, experts, parts, kind, which, capacity) for kind in ("flex", "alltoall")
    ]
    for found, wanted in zip(*ways, strict=True):
        for name in ("output", "tokens", "weights", "rows"):
            assert_bits_equal(found[name], wanted[name])
        assert found["offsets"] == wanted["offsets"]
        assert found["made"] == [(TOKENS, 8, CHOICES * parts)]
        assert found["limits"] == {(420, 420)}
        assert not found["left"]


def trained(flags: str, reason: str | None) -> tuple[list[tuple[float, ...]], list[str], set[str], int]:
    """Train; returns losses and gradient norms, notes, the dispatchers of the layers, and the buffers made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve(parse_arguments(flags.split()).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    with installed(reason if rank == size - 1 else None):
        trainer = gpt_trainer(config, open_data(config), mesh)
        notes = [note for note in trainer.notes() if "flex" in note]
        with trainer.loader:
            steps = [trainer.step() for _ in range(STEPS)]
        kinds = {block.mlp.dispatcher.kind for chunk in trainer.chunks for block in chunk.layers}  # type: ignore[union-attr]
        buffers = len(stand_in.ElasticBuffer.made)
        mesh.close()
    return [(step.loss, step.grad_norm) for step in steps], notes, kinds, buffers


@pytest.mark.parametrize(
    "layout",
    [
        "--ep 2",
        pytest.param("--ep 2 --moe-shared-expert-overlap", marks=pytest.mark.wide),
        pytest.param("--ep 2 --recompute-granularity selective --recompute-modules moe", marks=pytest.mark.wide),
    ],
)
def test_a_run_trains_the_same(layout: str, rank_pools: RankPools) -> None:
    """Use DeepEP if all ranks have it; if one lacks it, all use all-to-all, and a note says so."""
    flags, lacking = f"{FLAGS} {layout} --moe-token-dispatcher-type", "DeepEP is not installed"
    wanted = on_ranks(rank_pools, 2, trained, f"{flags} alltoall", None)
    assert wanted == [(wanted[0][0], [], {"alltoall"}, 0)] * 2
    assert on_ranks(rank_pools, 2, trained, f"{flags} flex", None) == [(wanted[0][0], [], {"flex"}, 1)] * 2
    note = (
        "note: --moe-token-dispatcher-type flex is alltoall in this run, with the same results: on rank 1, "
        "DeepEP is not installed"
    )
    assert on_ranks(rank_pools, 2, trained, f"{flags} flex", lacking) == [(wanted[0][0], [note], {"alltoall"}, 0)] * 2


def test_a_buffer_serves_as_many_tokens_or_fewer() -> None:
    process_group = mock.Mock(rank=lambda: 0, size=lambda: 2)
    group = Group((0, 1), 0, process_group)
    with installed():
        small = deep_ep._buffer(group, 8, 64, 2)
        assert deep_ep._buffer(group, 5, 64, 2) is small
        large = deep_ep._buffer(group, 16, 64, 2)
        assert deep_ep._buffer(group, 8, 64, 2) is small
        assert deep_ep._buffer(group, 9, 64, 2) is large
        assert deep_ep._buffer(group, 5, 64, 4) not in (small, large)
        for buffer in group.buffers.values():
            buffer.destroy()


def reason_for(
    hidden: int = 64, choices: int = 32, dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] = (9, 0)
) -> str | None:
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        return deep_ep.why_unavailable(hidden, choices, dtype, torch.device("cuda"))


def test_what_it_needs_is_checked_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in)
    assert reason_for() is None
    assert deep_ep.why_unavailable(64, 2, torch.bfloat16, CPU) == "DeepEP needs a GPU"
    assert "H100" in str(reason_for(capability=(8, 0)))
    assert "--bf16" in str(reason_for(dtype=torch.float32))
    assert "--hidden-size" in str(reason_for(hidden=20))
    assert "--moe-router-topk x --expert-tensor-parallel-size of at most 32" in str(reason_for(choices=40))
    with mock.patch("torch.are_deterministic_algorithms_enabled", return_value=True):
        assert "--deterministic-mode" in str(reason_for())
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    assert reason_for() == "the installed DeepEP is older than version 2"
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "is not installed" in str(reason_for())
    monkeypatch.delitem(sys.modules, "deep_ep")
    (tmp_path / "deep_ep.py").write_text("assert False, 'Duplicate NCCL runtime'")  # as its check of NCCL's library
    monkeypatch.syspath_prepend(tmp_path)
    assert str(reason_for()) == "DeepEP cannot be imported: AssertionError: Duplicate NCCL runtime"
