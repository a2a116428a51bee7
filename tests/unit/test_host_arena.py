"""The arena of the host's memory finds what CUDA would refuse."""

from __future__ import annotations

import pytest
import torch

from megalite.offload.transfers import make_transfers
from tests.harness.host_arena import host_arena


def test_only_copies_and_numbers_mix_host_and_device() -> None:
    transfers, device = make_transfers(torch.device("cpu")), torch.ones(4)
    with host_arena() as arena:
        host = transfers.on_host(4, torch.float32)
        assert arena.has(host)
        assert arena.has(host[1:] * 2)
        assert not arena.has(device + 1)
        assert arena.allocated == 16
        host.copy_(device)
        device.copy_(host)
        host.mul_(torch.tensor(2.0))
        transfers.begin("to device", host, device).wait()
        assert device.tolist() == [2.0] * 4
        mixed = r"aten::add.Tensor mixes tensors of the host \[\(4,\)\] and of the device \[\(4,\)\]"
        with pytest.raises(AssertionError, match=mixed):
            host + device
        with pytest.raises(AssertionError, match="aten::add_"):
            device += host * 2
