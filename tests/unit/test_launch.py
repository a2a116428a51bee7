"""What a run's ranks cannot talk through is refused before they meet."""

from __future__ import annotations

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.errors import ConfigurationError
from megalite.parallel import device
from megalite.process.place import Place
from megalite.training.launch import join


def test_stages_on_gpus_do_not_talk_through_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "local_device", lambda local_rank: torch.device("cuda", 0))
    monkeypatch.setattr(device, "activate", lambda where: None)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, distributed_backend="gloo")
    with pytest.raises(ConfigurationError, match=r"--distributed-backend gloo sends nothing from GPU to GPU.*use nccl"):
        join(parallel, Place(rank=0, world_size=2, local_rank=0), "the same")
