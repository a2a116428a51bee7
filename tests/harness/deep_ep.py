"""Stand-in for DeepEP 2 on the CPU: the calls and the contract of `ElasticBuffer` that megalite uses, over gloo.

Results are NaN, or -1, until their event has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class _Handle:
    here: Tensor
    """[ranks, tokens], bool: the tokens that have an expert on this rank."""
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    num_sms: int = 24


class _Event:
    """Event that fills in the results when it is waited for."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self.fill = fill

    def current_stream_wait(self) -> None:
        self.fill()


def _late(*values: Tensor) -> tuple[list[Tensor], _Event]:
    results = [torch.full_like(value, torch.nan if value.is_floating_point() else -1) for value in values]

    def fill() -> None:
        for result, value in zip(results, values, strict=True):
            result.copy_(value)

    return results, _Event(fill)


class ElasticBuffer:
    """Buffer of a group of ranks."""

    made: ClassVar[list[tuple[int, int, int]]] = []
    """Sizes of the buffers of this process that are not destroyed."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        deterministic: bool,
        allow_multiple_reduction: bool,
        explicitly_destroy: bool,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
    ) -> None:
        assert deterministic
        assert not allow_multiple_reduction
        assert explicitly_destroy
        assert num_topk <= 32
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.tokens, self.hidden, self.topk = self.sizes = num_max_tokens_per_rank, hidden, num_topk
        self.seconds = num_cpu_timeout_secs, num_gpu_timeout_secs
        self.made.append(self.sizes)

    def destroy(self) -> None:
        self.made.remove(self.sizes)

    def dispatch(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_sms: int = 0,
        async_with_compute_stream: bool = False,
        handle: _Handle | None = None,
    ) -> tuple[Any, ...]:
        self._check(x, self.tokens)
        assert async_with_compute_stream
        rows = self._gathered(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            assert num_sms == handle.num_sms
            (received,), event = _late(rows[handle.here])
            return received, None, None, handle, event
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_experts is not None
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape == (len(x), self.topk)
        assert topk_idx.is_contiguous()
        assert topk_weights.is_contiguous()
        assert num_experts % self.size == 0
        local = num_experts // self.size
        numbers = self._gathered(topk_idx) - self.rank * local
        numbers[(numbers < 0) | (numbers >= local)] = -1
        here = (numbers >= 0).any(dim=2)
        counts = torch.bincount(numbers[numbers >= 0], minlength=local).tolist()
        results, event = _late(rows[here], self._gathered(topk_weights)[here])
        return results[0], numbers[here], results[1], _Handle(here, topk_idx.clone(), counts), event

    def combine(
        self,
        x: Tensor,
        handle: _Handle,
        topk_weights: Tensor | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[Any, ...]:
        self._check(x, int(handle.here.sum()))
        assert async_with_compute_stream
        weights = x.new_zeros(len(x), self.topk, dtype=torch.float32) if topk_weights is None else topk_weights
        assert weights.dtype == torch.float32
        assert weights.shape == (len(x), self.topk)
        (total, of_choices), event = _late(self._added(x, handle), self._added(weights, handle))
        return total, None if topk_weights is None else of_choices, event

    def _check(self, x: Tensor, most: int) -> None:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] == self.hidden
        assert len(x) <= most

    def _gathered(self, own: Tensor) -> Tensor:
        gathered = own.new_empty(self.size, *own.shape)
        dist.all_gather(list(gathered), own, group=self.group)
        return gathered

    def _added(self, rows: Tensor, handle: _Handle) -> Tensor:
        sent = rows.new_zeros(*handle.here.shape, rows.shape[1])
        sent[handle.here] = rows
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        total = received[0].float()
        for other in received[1:]:
            total = total + other
        return total.to(rows.dtype)
