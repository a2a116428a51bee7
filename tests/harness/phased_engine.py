"""Stand-in for vLLM, with the calls that its documentation of weight transfer has."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor


class PhasedEngine:
    """Engine with the four calls of vLLM's weight transfer, whose group is a queue."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.groups: list[list[str]] = []
        self.tensors: dict[str, Tensor] = {}
        self.group = queue.Queue[Tensor]()
        self.met = threading.Barrier(2, timeout=10)

    def connect(self) -> Callable[[Tensor], object]:
        self.met.wait()
        return self.group.put

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append(f"init {request['init_info']['master_port']}")
        self.met.wait()  # returns when both ends have joined

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.calls.append("update")
        info = request["update_info"]
        self.groups.append(info["names"])
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            tensor = self.group.get(timeout=10)
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
            self.tensors[name] = tensor

    def finish_weight_update(self) -> None:
        self.calls.append("finish")
