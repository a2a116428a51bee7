"""Figures of the device that a rank computes on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.parallel.device import host_memory, moved, peak_memory_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_peak_of_memory_is_in_bytes() -> None:
    """The system counts it in pages of a few processors at a time: hence the tolerance."""
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(peak, rel=0.005)


def test_the_host_does_not_wait_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is from page-locked memory to a GPU, and none on a CPU."""
    calls: list[object] = []
    tensor = torch.arange(3)
    assert moved(tensor, torch.device("cpu")) is tensor
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("page-locked") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: calls.append((args, kwargs)) or self)
    gpu = torch.device("cuda", 1)
    moved(tensor, gpu)
    assert calls == ["page-locked", ((gpu,), {"non_blocking": True})]


def test_memory_is_page_locked_as_long_as_a_view_of_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = set[int]()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.add(address) or 0, cudaHostUnregister=locked.remove
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    values = host_memory(64, torch.device("cuda", 0)).view(torch.float32)
    part = values[4:].detach()
    address = values.data_ptr()
    del values
    assert locked == {address}
    del part
    assert not locked
