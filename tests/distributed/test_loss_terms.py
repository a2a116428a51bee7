"""Terms of the loss besides the language model's: every layer and layout gives the same as one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.data.sampler import equal_deal
from megalite.model import gpt, layer_kinds
from megalite.model.batch import LayerContext, MicroBatch
from megalite.model.block import Block, LayerOutput
from megalite.model.mlp import MLP
from megalite.model.recompute import Recompute
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import LogicalTensor, Normal
from megalite.parallel.stage import LossTerm, TermSums
from megalite.training.data import open_data
from megalite.training.metrics import is_figure
from tests.distributed.layout_expected import on_ranks
from tests.harness.close import assert_number_close
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

STEPS, BATCH, LENGTH = 3, 4, 8
WEIGHTS = {"squares": 0.3, "inputs": 0.1, "router": 0.2}
FLAGS = f"""--fp64 --mock-data --tokenizer-type NullTokenizer --vocab-size 28 --make-vocab-size-divisible-by 4
--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
--init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size {BATCH}
--train-iters {STEPS} --eval-iters 1 --lr 0.02 --lr-decay-style constant --weight-decay 0
--optimizer sgd --eod-mask-loss"""


class WithSquares(Block):
    """Layer with a loss term: squares of its input and of its output, weighted more in later layers."""

    def __init__(self, config: Any, context: Any, layer: int, recompute: Any) -> None:
        super().__init__(config, context, layer, recompute)
        self.number = layer

    def forward(self, hidden: Tensor, branch: Tensor | None, context: LayerContext) -> LayerOutput:
        input = hidden if branch is None else hidden + branch
        inputs = input.square().sum()  # in the graph before all other operations of the layer
        output = super().forward(hidden, branch, context)
        squares = (self.number + 1) * output.branch.square().sum()
        return output._replace(terms={**output.terms, "squares": squares, "inputs": inputs})


def tokens(micro_batch: MicroBatch) -> Tensor:
    return torch.tensor(float(micro_batch.tokens.numel()))


class Routed(MLP):
    """Feed-forward layer with a router after the last product, which only a loss term uses."""

    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute) -> None:
        super().__init__(context, f"layers.{layer}.mlp", layer_kinds.feed_forward_sizes(config, config.ffn_size))
        shape, matrices = (3, config.hidden_size), "experts hidden -> 1 experts hidden"
        router = LogicalTensor(f"layers.{layer}.router", shape, Normal(0.5), True, matrices)
        self.router = context.parameter(context.replicated(router))

    @staticmethod
    def loss_terms(config: ModelConfig, context: ParallelContext) -> tuple[LossTerm, ...]:
        return tuple(LossTerm(name, tokens, weight, context.token_axes) for name, weight in WEIGHTS.items())

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
        output, terms = super().forward(hidden, context)
        return output, {**terms, "router": (hidden @ self.router.t()).logsumexp(-1).square().sum()}


@contextmanager
def layers_with_terms() -> Iterator[None]:
    kind = layer_kinds.LAYER_KINDS["dense"]._replace(make=Routed, loss_terms=Routed.loss_terms)
    with mock.patch.object(gpt, "Block", WithSquares), mock.patch.dict(layer_kinds.LAYER_KINDS, {"dense": kind}):
        yield


def trained(flags: str) -> list[tuple[float, ...]]:
    """Return each step's language-model loss, the means of the other terms, and the gradient norm."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split()).config, size)
    parallel = config.parallel
    mesh = ParallelMesh(
        rank=rank,
        world_size=size,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_parallel_size=parallel.pipeline_model_parallel_size,
    )
    with layers_with_terms():
        trainer = gpt_trainer(config, open_data(config), mesh)
        with trainer.loader:
            steps = [trainer.step() for _ in range(STEPS)]
    return [(step.loss, *(step.extra[name] for name in WEIGHTS), step.grad_norm) for step in steps]


@cache
def expected() -> list[tuple[float, ...]]:
    """Compute the same with torch alone, the complete batch at once."""
    config = resolve(parse_arguments(FLAGS.split()).config, 1)
    with layers_with_terms():
        trainer = gpt_trainer(config, open_data(config), ParallelMesh())
        network = gpt.GPT(trainer.task.model, trainer.mesh, dtype=torch.float64)
    initialize(network, config.training.seed)
    found, parameters = [], list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
    for step in range(STEPS):
        with trainer.loader:
            micro_batches = trainer.loader.micro_batches(step * BATCH, equal_deal(0, 1, BATCH))
        loss, count = (torch.zeros((), dtype=torch.float64) for _ in range(2))
        sums = dict.fromkeys(WEIGHTS, torch.zeros((), dtype=torch.float64))
        for micro_batch in micro_batches:
            output = network({}, micro_batch)
            loss = loss + output.terms["lm_loss"]
            sums = {name: total + output.terms[name] for name, total in sums.items()}
            count += micro_batch.loss_mask.sum()
        loss, means = loss / count, {name: total / (BATCH * LENGTH) for name, total in sums.items()}
        optimizer.zero_grad()
        (loss + sum(weight * means[name] for name, weight in WEIGHTS.items())).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append((loss.item(), *(mean.item() for mean in means.values()), norm.item()))
    return found


ON_REQUEST = (
    "--log-params-norm --log-num-zeros-in-grad --decoupled-lr 0.1 --untie-embeddings-and-output-weights "
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1"
)


def test_no_term_can_be_called_like_a_figure_that_flags_add() -> None:
    config = resolve(parse_arguments([*FLAGS.replace("--weight-decay 0", "").split(), *ON_REQUEST.split()]).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh())
    with trainer.loader:
        extra = trainer.step().extra
    assert len(extra) >= 4
    assert all(map(is_figure, extra))


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
LAYOUTS = {
    "alone": "",
    "recomputed": f"{RECOMPUTED} 3",
    "copies": "--use-distributed-optimizer --overlap-grad-reduce",
    "whole parameters gathered": f"--data-parallel-sharding-strategy optim_grads_params {RECOMPUTED} 1",
    "whole parameters kept for backward": "--data-parallel-sharding-strategy optim_grads_params",
    "tensors": "--tp 2",
    "parts": f"--tp 2 --sequence-parallel {RECOMPUTED} 1",
    "stages": "--pp 2",
    "four stages": f"--pp 2 --num-layers-per-virtual-pipeline-stage 1 {RECOMPUTED} 1",
}


FEW = ("alone", "whole parameters kept for backward", "four stages")


@pytest.mark.wide_except("four stages")
@pytest.mark.parametrize("layout", wide_except(LAYOUTS, FEW))
def test_a_term_of_every_layer_is_trained_on_and_recorded(layout: str, rank_pools: RankPools) -> None:
    wanted = expected()
    ranks = 1 if layout in ("alone", "recomputed") else 2
    for steps in on_ranks(rank_pools, ranks, trained, f"{FLAGS} {LAYOUTS[layout]}"):
        for number, (ours, theirs) in enumerate(zip(steps, wanted, strict=True)):
            for name, one, other in zip(("loss", *WEIGHTS, "norm"), ours, theirs, strict=True):
                assert_number_close(one, other, f"{name} of step {number}", 1e-10)
