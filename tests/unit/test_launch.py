"""Backends that the ranks of a run cannot use: they are refused before the rendezvous."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.errors import ConfigurationError
from megalite.lifecycle.launch import locate
from megalite.parallel import device
from megalite.process.place import Place


def test_stages_on_gpus_do_not_talk_through_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "local_device", lambda local_rank: torch.device("cuda", 0))
    monkeypatch.setattr(device, "activate", lambda where: None)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, distributed_backend="gloo")
    with pytest.raises(ConfigurationError, match=r"--distributed-backend gloo cannot send from GPU to GPU.*use nccl"):
        locate(parallel, Place(rank=0, world_size=2, local_rank=0))


def test_a_sequence_is_split_over_the_ranks_that_share_it() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=3)
    assert parallel.sequence_parts == 3
    assert replace(parallel, sequence_parallel=True).sequence_parts == 6


def test_a_place_on_the_mesh_has_all_axes() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=3,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
        distributed_backend="gloo",
    )
    mesh = locate(parallel, Place(rank=5, world_size=24, local_rank=0))
    axes = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
    assert [mesh.size(axis) for axis in axes] == [2, 3, 2, 2, 1, 4, 3]
    assert parallel.data_parallel_size(24) == mesh.size("dp")
    assert 24 // parallel.expert_tensor_model_pipeline_parallel_size == mesh.size("edp")
