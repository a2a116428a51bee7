"""Stages one after another: who does what when, and what they send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from museum.plain.ranks import Ranks
from museum.plain.settings import Settings


def schedule(settings: Settings, stage: int) -> Iterator[tuple[str, int]]:
    """Yield what a stage does in a step: forward or backward, and the number of the micro-batch."""
    count = settings.micro_batches
    ahead = count if settings.schedule == "gpipe" else min(settings.pp - 1 - stage, count)
    for number in range(count + ahead):
        if number < count:
            yield "forward", number
        if number >= ahead:
            yield "backward", number - ahead


@dataclass
class Pipe:
    """Messages between stages. Sending does not wait; `finish` does, at the end of a step."""

    ranks: Ranks
    _sent: list[tuple[Any, Tensor]] = field(default_factory=list)

    def send(self, tensor: Tensor, step: int) -> None:
        """Send a tensor to the next stage (step 1) or the one before (step -1)."""
        message = tensor.detach().contiguous()
        self._sent.append((dist.isend(message, self.ranks.pp.members[self.ranks.pp.index + step]), message))

    def receive(self, step: int) -> Tensor:
        """Receive hidden states or their gradient from a neighbouring stage."""
        settings = self.ranks.settings
        tokens = settings.sequence // settings.cp // (settings.tp if settings.sp else 1)
        found = torch.empty(settings.micro_batch, tokens, settings.hidden, dtype=settings.weight_dtype)
        dist.recv(found, self.ranks.pp.members[self.ranks.pp.index + step])
        return found

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent = []


def send_activation(hidden: Tensor, pipe: Pipe) -> None:
    """Send hidden states to the next stage."""
    pipe.send(hidden, 1)


def receive_activation(pipe: Pipe) -> Tensor:
    return pipe.receive(-1).requires_grad_()


def send_gradient(gradient: Tensor, pipe: Pipe) -> None:
    """Send the gradient of the hidden states to the stage that they came from."""
    pipe.send(gradient, -1)


def receive_gradient(pipe: Pipe) -> Tensor:
    return pipe.receive(1)
