"""Runs a step's list of actions over the chunks of one pipeline rank, cut from a whole network; no messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.model.batch import LayerContext, MicroBatch
from megalite.model.gpt import GPT
from megalite.optim import optimizer as optim
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DeferredGradients
from megalite.pipeline.schedules import Action
from tests.distributed.layout_cell import RECOMPUTE, Cell, model_config, optimizer_config, rates
from tests.distributed.layout_run import Held, held, local_micro_batches, perturb_constants

Observe = Callable[[Action], None]


class Chunk(nn.Module):
    """Consecutive layers of a network, with the embedding before the first and the loss behind the last."""

    def __init__(self, network: GPT, start: int, stop: int) -> None:
        super().__init__()
        self.embedding = network.embedding if start == 0 else None
        self.layers = network.layers[start:stop]
        self.head = network.head if stop == len(network.layers) else None
        self.recompute, self.vocab_size, self.tp = network.recompute, network.vocab_size, network.mesh.group("tp")
        self.context: Callable[[MicroBatch], LayerContext] = network._context

    def blocks(self) -> list[nn.Module]:
        return [block for block in (self.embedding, *self.layers, self.head) if block is not None]

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        context = self.context(batch)
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, batch.positions, batch.key)
        for start, stop, recomputed in self.recompute.spans(len(self.layers)):
            if recomputed:
                hidden = checkpoint(
                    self._run, hidden, context, start, stop, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = self._run(hidden, context, start, stop)
        if self.head is None:
            return hidden
        losses = vocab_parallel_cross_entropy(self.head(hidden), batch.labels.t(), self.tp, self.vocab_size)
        return (losses * batch.loss_mask.t()).sum()

    def _run(self, hidden: Tensor, context: LayerContext, start: int, stop: int) -> Tensor:
        for layer in list(self.layers)[start:stop]:
            hidden = layer(hidden, context)
        return hidden


@dataclass
class Rank:
    """What runs a list of actions."""

    chunks: list[Chunk]
    optimizer: Optimizer
    mesh: ParallelMesh
    network: GPT

    @staticmethod
    def build(cell: Cell, chunks: int, bucket_size: int | None = None) -> Rank:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        mesh = ParallelMesh(rank=rank, world_size=world_size, tensor_parallel_size=cell.tp)
        network = GPT(
            model_config(cell),
            mesh,
            sequence_parallel=cell.sequence_parallel,
            recompute=RECOMPUTE[cell.recompute],
            dtype=cell.torch_dtype,
        )
        initialize(network, seed=1)
        perturb_constants(network)
        layers = len(network.layers) // chunks
        cut = [Chunk(network, chunk * layers, (chunk + 1) * layers) for chunk in range(chunks)]
        options = DataParallel(
            cell.torch_gradient_dtype,
            cell.zero,
            cell.instances,
            bucket_size,
            overlap_reduce=cell.overlap != "none",
            overlap_gather=cell.overlap == "reduce and gather",
        )
        blocks = [chunk.blocks() for chunk in cut]
        optimizer = optim.make_optimizer(cut, mesh, optimizer_config(cell), options, blocks=blocks)
        return Rank(cut, optimizer, mesh, network)

    def step(self, cell: Cell, number: int, actions: Sequence[Action], observe: Observe = lambda action: None) -> float:
        """A whole step; the norm of its gradient."""
        self.execute(list(local_micro_batches(cell, number, self.mesh.coordinate("dp"))), actions, observe)
        return self.optimizer.step(rates(cell, number)).gradient_norm

    def execute(
        self, batches: Sequence[MicroBatch], actions: Sequence[Action], observe: Observe = lambda action: None
    ) -> None:
        """Up to the optimizer's step; `observe` is called behind every action."""
        self.optimizer.begin_step(len(batches))
        inputs: dict[tuple[int, int], Tensor | None] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        kept: dict[tuple[int, int], DeferredGradients] = {}
        for action in actions:
            key = action.micro_batch, action.chunk
            after = action.micro_batch, action.chunk + 1
            if action.kind == "F":
                before = outputs.get((action.micro_batch, action.chunk - 1))
                inputs[key] = None if before is None else before.detach().requires_grad_()
                outputs[key] = self.chunks[action.chunk](inputs[key], batches[action.micro_batch])
            elif action.kind == "R":
                self.optimizer.reduce(action.chunk, action.micro_batch + 1)
            elif action.kind == "W":
                kept.pop(key).add()
            else:
                taken = inputs.pop(after).grad if after in inputs else None
                if action.kind == "I":
                    with self.optimizer.deferring(action.chunk) as kept[key]:
                        outputs.pop(key).backward(taken)
                else:
                    outputs.pop(key).backward(taken)
            observe(action)

    def finals(self) -> list[Held]:
        with self.optimizer.whole_parameters():
            return held(self.network, self.mesh, lambda parameter: parameter)


@dataclass(frozen=True)
class Case:
    """A training of a cell by a list of actions."""

    cell: Cell
    chunks: int
    actions: tuple[Action, ...]


def trained(cases: Sequence[Case], steps: int = 2) -> list[tuple[list[float], list[Held]]]:
    """Of each case the norms and the final parameters. Under ZeRO 3 all weights are free behind every action."""
    found = []
    for case in cases:
        rank = Rank.build(case.cell, case.chunks, bucket_size=700 if case.cell.overlap != "none" else None)
        sharded = [bucket for bucket in rank.optimizer.buckets if bucket.stage == 3]

        def weights_are_free(action: Action, sharded: list = sharded) -> None:
            for bucket in sharded:
                assert bucket.parameters.untyped_storage().size() == 0, f"{bucket.slots[0].parameter} behind {action}"

        norms = [rank.step(case.cell, number, case.actions, weights_are_free) for number in range(steps)]
        found.append((norms, rank.finals()))
    return found


def actions(text: str, *, reduce_each: bool) -> tuple[Action, ...]:
    """From "F0 F0.1 I0.1 W0.1": kind and micro-batch, and behind a dot the chunk. Each chunk's reductions stand behind
    its last B or W, or behind each of them.
    """
    computations = []
    for word in text.split():
        number, _, chunk = word[1:].partition(".")
        computations.append(Action(word[0], int(number), int(chunk or 0)))  # type: ignore[arg-type]
    last = {action.chunk: action for action in computations if action.kind in ("B", "W")}
    found = []
    for action in computations:
        found.append(action)
        if action.kind in ("B", "W") and (reduce_each or last[action.chunk] is action):
            found.append(Action("R", action.micro_batch, action.chunk))
    return tuple(found)
