"""Log-probabilities of tokens under the network that is trained, and steps with a loss that is a function of them.

    gradients = trainer.forward_backward(with_loss(micro_batches, loss_fn), terms, Multipliers)
    figures = totals(gradients.sums, mesh)
    outputs = log_probabilities(chunks, engine, schedules.evaluation(n), micro_batches)

The labels of a micro-batch are the tokens that are scored: `log_probabilities[i, j]` is that of `labels[i, j]` after
`tokens[i, : j + 1]`. No rank gathers logits. A loss function runs on the last stage only, on all of its tensor-parallel
ranks, which must get the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.errors import ConfigurationError, MegaliteError
from megalite.model.batch import MicroBatch, TokenLoss
from megalite.model.gpt import GPT
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import TermSums
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.schedules import Action

LOSS = "loss"
"""Name of the sum of a loss function that returns only one."""


@dataclass(frozen=True)
class TokenOutputs:
    """Scores of the labels of a micro-batch, [batch, sequence], in fp32 or wider."""

    log_probabilities: Tensor
    entropies: Tensor | None = None
    """Entropy of the prediction at each position, if it was asked for."""


LossFunction = Callable[[TokenOutputs, Any], Tensor | Mapping[str, Tensor]]
"""Function of the outputs and the batch that they belong to. It returns a sum over the batch's tokens, or several sums
by name: those that are terms of the loss are differentiated; others, which need no gradient, are only recorded."""


class Multipliers(dict[str, float]):
    """Multipliers of the terms of the loss by name. All other sums are allowed: they need no gradient."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return 0.0


def with_loss(
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFunction,
    batches: Sequence[Any] | None = None,
    *,
    terms: Sequence[str] = (LOSS,),
    entropies: bool = False,
    parts: bool = False,
) -> list[MicroBatch]:
    """Return micro-batches whose loss is `loss_fn(outputs, batch)`.

    Args:
        batches: the second argument for each micro-batch; None: the micro-batch itself.
        terms: names of the sums that are terms of the loss.
        parts: the function takes the parts of samples that are cut for context-parallel ranks.

    Raises ConfigurationError if samples are cut for context-parallel ranks, or labels are missing.
    """
    for micro_batch in micro_batches:
        if (ranks := len(micro_batch.layout.of_ranks)) > 1 and not parts:
            raise ConfigurationError(
                f"a loss function needs whole samples, but they are cut for {ranks} context-parallel ranks: train with "
                "--context-parallel-size 1, and with more --tensor-model-parallel-size for long samples"
            )
        if micro_batch.labels is None:
            raise ConfigurationError("a micro-batch has no labels: give the tokens to score, one for each token")
    pairs = zip(micro_batches, micro_batches if batches is None else batches, strict=True)
    return [replace(each, token_loss=_token_loss(loss_fn, batch, terms, entropies)) for each, batch in pairs]


def _token_loss(loss_fn: LossFunction, batch: Any, terms: Sequence[str], entropies: bool) -> TokenLoss:
    """Return the user's loss function with checked sums: it raises MegaliteError if they are not those announced."""

    def sums(log_probabilities: Tensor, entropy: Tensor | None) -> TermSums:
        found = loss_fn(TokenOutputs(log_probabilities, entropy), batch)
        named = {LOSS: found} if isinstance(found, Tensor) else found
        if not isinstance(named, Mapping) or any(name not in named for name in terms):
            has = ", ".join(map(str, named)) if isinstance(named, Mapping) else type(found).__name__
            wanted = " and ".join(f'"{name}"' for name in terms)
            raise MegaliteError(
                f"the loss function returned {has or 'nothing'}: return a sum as a tensor, or a mapping of sums by "
                f"name with {wanted} among them"
            )
        for name, value in named.items():
            if not isinstance(value, Tensor) or value.dim():
                shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise MegaliteError(
                    f'the loss function returned {shown} as "{name}": return a sum, a tensor without dimensions'
                )
            if value.requires_grad and name not in terms:
                raise MegaliteError(
                    f'the loss function returned "{name}" with a gradient, and count returns no number of items for '
                    f'it: call detach() if it is only recorded, add it to "{terms[0]}", or let count return numbers '
                    "by name, so that its mean is a term of the loss, too"
                )
        return {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in named.items()}

    return TokenLoss(sums, entropies)


def totals(sums: Mapping[str, Tensor], mesh: ParallelMesh, without: Collection[str] = ()) -> dict[str, float]:
    """Return the sums of a loss function over all samples, on every rank. All ranks call it together.

    `without`: names of the network's own terms, which are partial over other ranks.
    """
    own = {name: value.item() for name, value in sums.items() if name not in without}
    found: dict[str, float] = {}
    for of_rank in collectives.all_gather_json(own, mesh, "pp", "dp"):
        for name, value in of_rank.items():
            found[name] = found.get(name, 0.0) + value
    return found


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switch modules to evaluation, without dropout, within the block."""
    before = [(module, module.training) for module in modules]
    try:
        for module, _ in before:
            module.eval()
        yield
    finally:
        for module, training in before:
            module.train(training)


def log_probabilities(
    chunks: Sequence[GPT],
    engine: PipelineEngine[MicroBatch],
    actions: Iterable[Action],
    micro_batches: Sequence[MicroBatch],
    *,
    entropies: bool = False,
    parts: bool = False,
) -> list[TokenOutputs]:
    """Return the outputs of each micro-batch on all ranks of the pipeline, without gradients and dropout.

    All ranks call it together. `actions`: the rank's list for an evaluation step of this number of micro-batches.
    `parts`: samples may be cut for context-parallel ranks, of which each gets the outputs of its part.
    Raises ConfigurationError as `with_loss` does.
    """
    first, device = chunks[0], chunks[0].mesh.device
    shapes = [micro_batch.tokens.shape for micro_batch in micro_batches]
    dtype, kinds = torch.promote_types(first.dtype, torch.float32), 1 + entropies
    found = [torch.zeros(kinds, *shape, dtype=dtype, device=device) for shape in shapes]

    def note(outputs: TokenOutputs, kept: Tensor) -> Tensor:
        kept[0] = outputs.log_probabilities
        if outputs.entropies is not None:
            kept[1] = outputs.entropies
        return kept.sum()

    with evaluating(chunks):
        engine.run(actions, with_loss(micro_batches, note, found, entropies=entropies, parts=parts))
    # All stages but the last add zeros, which change no bit.
    flat = torch.cat([values.flatten() for values in found])
    flat = collectives.all_reduce_(flat, first.mesh.group("pp"))
    apart = flat.split([values.numel() for values in found])
    whole = [part.view(kinds, *shape) for part, shape in zip(apart, shapes, strict=True)]
    return [TokenOutputs(values[0], values[1] if entropies else None) for values in whole]
