"""Exchange of tokens with the ranks of their experts by DeepEP (github.com/deepseek-ai/DeepEP), which is optional.

DeepEP's kernels copy the tokens of bf16 networks over NVLink and RDMA. They find the rows of each rank themselves, so
`Dispatcher` need not sort and count them. The order of rows and of sums is the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.mesh import Group

_MOST_CHOICES = 32
"""Most experts of a token that DeepEP's kernels take."""
_LIMITS = ("num_cpu_timeout_secs", "num_gpu_timeout_secs")


def why_unavailable(hidden: int, choices: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why this process cannot use DeepEP for tokens of this width; None if it can.

    Args:
        choices: number of experts of a token, and parts of experts, that it is sent to.
    """
    if device.type != "cuda":
        return "DeepEP needs a GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "DeepEP needs an H100 or a newer GPU"
    if dtype != torch.bfloat16 or hidden % 8:
        return "DeepEP needs --bf16 and a --hidden-size (or --moe-latent-size) that is a multiple of 8"
    if choices > _MOST_CHOICES:
        return f"DeepEP needs --moe-router-topk x --expert-tensor-parallel-size of at most {_MOST_CHOICES}"
    if torch.are_deterministic_algorithms_enabled():
        return "DeepEP does not run with --deterministic-mode; its order of sums is always the same here"
    try:
        library = importlib.import_module("deep_ep")
    except ModuleNotFoundError:
        return "DeepEP is not installed (github.com/deepseek-ai/DeepEP)"
    except (ImportError, AssertionError, OSError, RuntimeError) as error:  # its check of NCCL's library, or its build
        return f"DeepEP cannot be imported: {type(error).__name__}: {error}"
    return None if hasattr(library, "ElasticBuffer") else "the installed DeepEP is older than version 2"


def _buffer(group: Group, tokens: int, hidden: int, choices: int) -> Any:
    """Return a buffer of a group of ranks for at least this many tokens. All ranks of the group call it together.

    All layers share a buffer. It may still be in use by backward when more tokens need a larger one.
    """
    fitting = [size for size in group.buffers if size[0] >= tokens and size[1:] == (hidden, choices)]
    sizes = min(fitting, default=(tokens, hidden, choices))
    if not fitting:
        # DeepEP's own limits are shorter than ranks may have to wait for each other, as while one of them compiles.
        seconds = {} if group.timeout is None else dict.fromkeys(_LIMITS, int(group.timeout.total_seconds()))
        group.buffers[sizes] = importlib.import_module("deep_ep").ElasticBuffer(
            group.process_group,
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=choices,
            deterministic=True,
            allow_multiple_reduction=False,  # one sum over the ranks, not one per node that is rounded in between
            explicitly_destroy=True,
            **seconds,
        )
    return group.buffers[sizes]


Waiting = Callable[[], tuple[Tensor, ...]]
"""Function that waits for the end of a transfer and returns its results."""


class DeepEPExchange:
    """Exchange of one layer's tokens with the ranks of their experts: the four transfers of forward and backward.

    Attributes:
        numbers: [received tokens, choices], int64: each received token's experts on this rank, counted from this rank's
            first; -1 for none. Set by `send`, as is `counts`.
        counts: number of received tokens for each expert of this rank.
    """

    numbers: Tensor
    counts: list[int]

    def __init__(self, choices: Tensor, experts: int, group: Group) -> None:
        """Prepare an exchange.

        Args:
            choices: [tokens, choices], int64: the number of each chosen expert; -1 for none.
            experts: number of experts of all ranks, of which each rank has as many consecutive ones.
        """
        self.choices, self.experts, self.group = choices.contiguous(), experts, group

    def send(self, tokens: Tensor, weights: Tensor) -> Waiting:
        """Send tokens [tokens, hidden] with their fp32 weights [tokens, choices] to the ranks of their experts.

        Each rank receives a token once, sorted by the sending rank and the token's position there.
        """
        (count, hidden), choices = tokens.shape, self.choices.shape[1]
        self._buffer = _buffer(self.group, count, hidden, choices)
        rows, self.numbers, of_choices, self._handle, event = self._buffer.dispatch(
            tokens.contiguous(),
            topk_idx=self.choices,
            topk_weights=weights.contiguous(),
            num_experts=self.experts,
            async_with_compute_stream=True,
        )
        self.counts = self._handle.num_recv_tokens_per_expert_list
        return _after(event, rows, of_choices)

    def send_gradients(self, rows: Tensor, weights: Tensor) -> Waiting:
        """Send the gradients of `send`'s results back, and add those of a token up."""
        tokens, of_choices, event = self._buffer.combine(
            rows.contiguous(), self._handle, topk_weights=weights.contiguous(), async_with_compute_stream=True
        )
        return _after(event, tokens, of_choices)

    def add_up(self, outputs: Tensor) -> Waiting:
        """Send an output per received token back, and add those of a token up: [tokens, hidden] on its own rank."""
        total, _, event = self._buffer.combine(outputs.contiguous(), self._handle, async_with_compute_stream=True)
        return _after(event, total)

    def add_up_gradients(self, gradient: Tensor) -> Waiting:
        """Send the gradient of `add_up`'s result to each rank that has one of the token's experts."""
        handle = self._handle
        rows, *_, event = self._buffer.dispatch(
            gradient.contiguous(), handle=handle, num_sms=handle.num_sms, async_with_compute_stream=True
        )
        return _after(event, rows)


def _after(event: Any, *results: Tensor) -> Waiting:
    def wait() -> tuple[Tensor, ...]:
        event.current_stream_wait()
        return results

    return wait
