"""Errors of the backend that mean that a rank has died."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalite.errors import CommunicationError
from megalite.parallel.collectives import Pending, launch


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"),
        dist.DistBackendError("NCCL error: remote process exited"),
        dist.DistNetworkError("reset by peer"),
    ],
    ids=["gloo", "nccl", "network"],
)
def test_an_operation_that_finds_a_rank_gone_before_it_begins_says_so(error: Exception) -> None:
    pending = Pending(launch(raising, error), lambda: torch.zeros(1))
    with pytest.raises(CommunicationError, match="stage 1 waited for hidden states: another rank has ended"):
        pending.wait("stage %d waited for hidden states", 1)


def test_an_operation_with_wrong_arguments_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="tensors must have the same shape"):
        launch(raising, RuntimeError("tensors must have the same shape"))
    assert launch(max, 1, 2) == 2
