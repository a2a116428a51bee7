"""Values that move from one layout of the ranks to another."""

from __future__ import annotations

import torch

from megalite.config.parallel import MeshSizes
from megalite.extras.post_training.other_grid import OtherGrid, redistributed
from megalite.extras.post_training.teacher_network import Division
from megalite.parallel.mesh import UnconnectedMesh

RANKS, LENGTH, MICRO_BATCHES, VALUES = 16, 32, 6, 3


def test_each_value_travels_once_to_each_rank_that_needs_it() -> None:
    sent = 0
    for rank in range(RANKS):
        mesh = UnconnectedMesh(rank=rank, world_size=RANKS, tensor_parallel_size=2, pipeline_parallel_size=2)
        other = Division(OtherGrid(mesh, sizes(tp=4, cp=2)), sequence_parallel=False, last=0, length=LENGTH)
        own = Division(mesh, sequence_parallel=False, last=1, length=LENGTH)
        held, needed = other.last_states(MICRO_BATCHES, 2 * MICRO_BATCHES), own.last_states(3, 2 * MICRO_BATCHES)
        told = list[int]()
        mesh.traffic.listener = lambda kind, ranks, size, told=told: told.append(size)
        values = torch.zeros(len(held[rank].micro_batches), held[rank].tokens, VALUES)
        found = redistributed(values, held, needed, mesh)
        assert found.shape == (len(needed[rank].micro_batches), needed[rank].tokens, VALUES)
        assert needed[rank].rows == (3 * LENGTH if mesh.coordinate("pp") == 1 else 0)
        sent += sum(told)
    on_last_stage = RANKS // 2
    assert sent == on_last_stage * 3 * LENGTH * VALUES * values.itemsize


def sizes(tp: int, cp: int) -> MeshSizes:
    return MeshSizes(
        tensor_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_parallel_size=1,
        expert_parallel_size=1,
        expert_tensor_parallel_size=tp,
    )
