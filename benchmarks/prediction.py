"""CPU time of one depth of multi-token prediction, over that of what it must compute.

    python -m benchmarks.prediction [--vocabulary 1024 8192] [--rounds 9]

The network of `benchmarks/cpu_step.py`, forward and backward of one micro-batch, fp32, one thread. A depth takes what a
network with one takes longer than without. What it must compute is one block, its projection [hidden, 2 hidden], and
one output layer with its loss, each by itself. All step in turn, round by round; the figure is the median over rounds
of the ratio, with quartiles.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.cpu_step import BATCH, FFN, HEADS, HIDDEN, LAYERS, SEQUENCE, Step, llama, measure, quartiles
from benchmarks.results import write_results
from megalite.config import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.model.batch import FurtherTokens, MicroBatch
from megalite.model.gpt import GPT, HIDDEN_STATES
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.linear import ReplicatedLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter, accumulate_grad
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sharding import LogicalTensor, Normal
from megalite.training.batches import further_tokens

GOAL = 1.08
"""The most that a depth should take."""


class Sums:
    """Sums of gradients, in place of those of an optimizer."""

    deferred, frees_parameters = None, False

    def __init__(self, module: nn.Module) -> None:
        self.of: dict[int, Tensor] = {}
        for parameter in module.parameters():
            assert isinstance(parameter, Parameter)
            self.of[id(parameter)] = torch.zeros_like(parameter)
            parameter.gradient_buffer = self
            parameter.register_post_accumulate_grad_hook(_take)

    def accumulate(self, parameter: Parameter, gradient: Gradient, use: int = 0) -> None:
        gradient.add_to(self.of[id(parameter)], overwrite=False)


def _take(parameter: Tensor) -> None:
    assert isinstance(parameter, Parameter)
    if parameter.grad is not None:
        gradient, parameter.grad = parameter.grad, None
        accumulate_grad(parameter, DenseGradient(gradient))


def micro_batch(vocabulary: int, depths: int) -> MicroBatch:
    text = torch.randint(vocabulary, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels, mask = text[:, :-1], text[:, 1:], torch.ones(BATCH, SEQUENCE)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    further = FurtherTokens(*further_tokens(tokens, labels, mask, None, depths)) if depths else None
    return MicroBatch(tokens, positions, None, labels, mask, RandomKey(1, tuple(range(BATCH))), further=further)


def network_step(model: ModelConfig, part: StageLayers | None = None) -> Step:
    """Return forward and backward of a network, or of a stage of it that reads hidden states."""
    network = GPT(model, ParallelMesh(), stage_layers=part)
    initialize(network, 1)
    Sums(network)
    batch = micro_batch(model.vocab_size or 0, model.depths)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
    inputs = {} if part is None else {HIDDEN_STATES: hidden}

    def step() -> None:
        hidden.grad = None
        total(network(inputs, batch).terms.values()).backward()

    return step


def total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()


def projection_step() -> Step:
    """Return forward and backward of the projection of a depth."""
    context = ParallelContext(ParallelMesh())
    tensor = LogicalTensor("projection", (HIDDEN, 2, HIDDEN), Normal(0.02), True)
    projection = ReplicatedLinear(context, context.replicated(tensor), None)
    initialize(projection, 1)
    Sums(projection)
    generator = torch.Generator().manual_seed(3)
    joined = torch.randn(SEQUENCE, BATCH, 2 * HIDDEN, generator=generator).requires_grad_()
    gradient = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)

    def step() -> None:
        joined.grad = None
        projection(joined).backward(gradient)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {arguments.rounds} rounds, median [quartiles] of CPU time")
    found = {}
    for vocabulary in arguments.vocabulary:
        model = llama(LAYERS, HIDDEN, HEADS, FFN, vocabulary)
        steps = {
            "without": network_step(model),
            "with": network_step(replace(model, mtp_num_layers=1)),
            "block and output": network_step(model, StageLayers(LAYERS - 1, 1, embedding=False, loss=True)),
            "projection": projection_step(),
        }
        times = measure(steps, arguments.rounds, ParallelMesh())
        rounds = zip(*(times[name] for name in steps), strict=True)
        ratios = [(more - less) / (block + projection) for less, more, block, projection in rounds]
        found[str(vocabulary)] = {"seconds": times, "ratios": ratios}
        print(f"  vocabulary {vocabulary:6}: {quartiles(ratios)} of what it must compute  (goal {GOAL})", flush=True)
    write_results("prediction", {"load": os.getloadavg(), "found": found, "goal": GOAL})


if __name__ == "__main__":
    main()
