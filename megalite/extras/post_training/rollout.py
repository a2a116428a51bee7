"""Generation with the weights that are being trained, under the layout of their training: no copy of the weights.

    rollouts = generate(chunks, engine, optimizer, prompts, max_new_tokens=..., eod=..., sampling=Sampling())
    batch = to_micro_batches(rollouts, micro_batch_size=..., sequence_length=..., dtype=..., device=...)

Data-parallel ranks have prompts of their own. Under ZeRO 3, the weights of a rank's stages are gathered for the whole
generation, because data-parallel ranks generate different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.errors import ConfigurationError
from megalite.extras.post_training.log_probabilities import TokenOutputs, evaluating
from megalite.inference import generation
from megalite.inference.generation import Finish
from megalite.inference.network import Network
from megalite.inference.sampling import Sampling
from megalite.model.batch import MicroBatch
from megalite.model.cache import StageCache
from megalite.model.gpt import GPT, messages
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.pipeline.engine import PipelineEngine


@dataclass(frozen=True)
class Rollout:
    """Prompt, and the tokens that were generated after it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """New tokens; the last one is the end of document if the sequence ended by it."""
    log_probabilities: Tensor
    """Log-probability of each new token under the network at temperature 1, [new tokens], in fp32 or wider."""
    sampling_log_probabilities: Tensor
    """The same under the distribution that it was sampled from. Zeros for greedy generation."""
    finish: Finish


class TrainedNetwork(Network):
    """Stages that are being trained, with the links of their pipeline, for generation."""

    def __init__(self, chunks: Sequence[GPT], engine: PipelineEngine[MicroBatch]) -> None:
        """Raise ConfigurationError if the ranks of a pipeline cannot generate without the others."""
        stage = next((chunk for chunk in chunks if chunk.head is not None), chunks[-1])
        super().__init__(stage, engine.links)
        self.parts, self.stages = chunks, engine.stages
        self._sending: list[Pending] = []
        if self.mesh.size("cp") > 1:
            raise ConfigurationError(
                "generation needs whole samples: train with --context-parallel-size 1, or generate from a checkpoint"
            )
        experts = self.config.num_experts is not None
        if experts and not set(self.mesh.ranks("ep", "etp")) <= set(self.mesh.ranks("tp")):
            raise ConfigurationError(
                "generation needs each data-parallel rank to have all experts, because the ranks generate different "
                "numbers of tokens: train with an --expert-model-parallel-size that divides the "
                "--tensor-model-parallel-size, or generate from a checkpoint"
            )

    @property
    def batches(self) -> int:
        """Number of batches in progress at once. A rank with several stages finishes one before it begins the next."""
        return 1 if len(self.parts) > 1 else self.mesh.size("pp")

    def run(self, tokens: Tensor, positions: Tensor, cache: StageCache | None = None) -> Tensor:
        """Run this rank's stages, and return the output of the last one, whole if it is the last of the network."""
        rank, whole = self.mesh.coordinate("pp"), tokens.shape[1]
        split = self.stage.shard[1]
        if spare := -whole % split:  # sequence parallelism needs as many tokens on each rank: repeat the last
            tokens, positions = (torch.cat([each, each[:, -1:].expand(-1, spare)], 1) for each in (tokens, positions))
        micro_batch = MicroBatch(tokens, positions, first_keys=None, labels=None, loss_mask=None, key=RandomKey(0, ()))
        shape = {"sequence": tokens.shape[1] // split, "batch": len(tokens)}
        passed = messages(self.config, self.stages.count, dtype=self.stage.dtype, **shape)
        hidden = tokens
        for number, chunk in zip(self.stages.of_rank(rank), self.parts, strict=True):
            arrived = hidden if number else None
            if number and (source := self.stages.place(number - 1)[0]) != rank:
                (spec,) = passed[number - 1]
                buffer = torch.empty(spec.shape or (), dtype=spec.dtype, device=self.mesh.device)
                arrived = self.links.receive(buffer, source).wait(f"stage {number} waited for hidden states")
            hidden, _ = chunk.hidden_states(arrived, micro_batch, cache)
            if chunk.head is None and (peer := self.stages.place(number + 1)[0]) != rank:
                for sent in self._sending:
                    sent.wait(f"stage {number} waited until its hidden states had arrived")
                self._sending = [self.links.send(hidden.contiguous(), peer)]
        if self.stage.head is None:
            return hidden
        return collectives.all_gather(hidden, self.stage.context.group("heads"))[:whole] if split > 1 else hidden


def generate(
    chunks: Sequence[GPT],
    engine: PipelineEngine[MicroBatch],
    optimizer: Optimizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eod: int,
    sampling: Sampling,
    numbers: Sequence[int] | None = None,
    batch_size: int | None = None,
    stop: Callable[[int, Sequence[int]], bool] | None = None,
    vocab_size: int | None = None,
) -> list[Rollout]:
    """Return a rollout for each prompt, on all ranks of the pipeline. All ranks call it together, without dropout.

    Args:
        prompts: the prompts of this data-parallel rank, at least one.
        eod: the token that ends a sequence, and belongs to it; -1 for none.
        numbers: the number of each prompt among those of all ranks. The tokens depend on it and on the sampling's seed,
            not on the layout, except for rounding. None: the ranks take turns.
        batch_size, stop, vocab_size: as in `megalite.inference.generation.generate`.

    Raises ConfigurationError if the layout cannot generate, or a prompt is not valid.
    """
    network, mesh = TrainedNetwork(chunks, engine), chunks[0].mesh
    if numbers is None:
        numbers = range(mesh.coordinate("dp"), mesh.coordinate("dp") + len(prompts) * mesh.size("dp"), mesh.size("dp"))
    tokens: list[list[int]] = [[] for _ in prompts]
    scores: list[list[tuple[float, float]]] = [[] for _ in prompts]
    ends: list[Finish] = ["length"] * len(prompts)

    def ended(index: int, sequence: Sequence[int]) -> bool:
        return sequence[-1] == eod or (stop is not None and stop(index, sequence))

    with optimizer.gathered_parameters(), evaluating(chunks):
        for index, event in generation.generate(
            network,
            prompts,
            max_new_tokens=max_new_tokens,
            ends=(),  # `ended` keeps the token that ends a sequence
            sampling=sampling,
            batch_size=batch_size,
            stop=ended,
            vocab_size=vocab_size,
            numbers=numbers,
            scored=lambda index, own, sampled: scores[index].append((own, sampled)),
        ):
            if isinstance(event, int):
                tokens[index].append(event)
            else:
                ends[index] = event
    dtype = torch.promote_types(network.stage.dtype, torch.float32)
    rollouts = []
    for prompt, new, pairs, finish in zip(prompts, tokens, scores, ends, strict=True):
        own, sampled = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).to(dtype).unbind(1)
        rollouts.append(Rollout(tuple(prompt), tuple(new), own, sampled, finish))
    return rollouts


@dataclass(frozen=True)
class RolloutBatch:
    """Micro-batch of rollouts, and the scores of its labels when they were generated.

    The loss mask of the micro-batch is 1 for labels that were generated. The scores are 0 for other labels.
    """

    micro_batch: MicroBatch
    log_probabilities: Tensor
    """[batch, sequence], at temperature 1."""
    sampling_log_probabilities: Tensor
    """[batch, sequence]."""


def to_micro_batches(
    rollouts: Sequence[Rollout],
    *,
    micro_batch_size: int,
    sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
    micro_batches: int | None = None,
) -> list[RolloutBatch]:
    """Return rollouts as micro-batches in the shape of training, in order. Missing tokens and samples are padding.

    Args:
        dtype: dtype of the network. Masks and scores have at least fp32.
        micro_batches: number of micro-batches, which must be the same on all ranks; None: as many as there are samples
            for.

    Raises ConfigurationError if a rollout, or their number, is too long.
    """
    count = -(-len(rollouts) // micro_batch_size) if micro_batches is None else micro_batches
    if len(rollouts) > count * micro_batch_size:
        raise ConfigurationError(
            f"{len(rollouts)} rollouts do not fit into {count} micro-batches of {micro_batch_size}"
        )
    rows, shape = count * micro_batch_size, (count * micro_batch_size, sequence_length)
    wide = torch.promote_types(dtype, torch.float32)
    tokens, labels = torch.zeros(2, *shape, dtype=torch.int64)
    mask, own, sampled = torch.zeros(3, *shape, dtype=wide)
    padding = torch.ones(shape, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        whole = torch.tensor(rollout.prompt + rollout.tokens)
        if (length := len(whole) - 1) > sequence_length:
            raise ConfigurationError(
                f"rollout {row} has {len(whole)} tokens, but a sample has {sequence_length + 1}: generate fewer new "
                "tokens, shorten the prompt, or train with a larger --seq-length"
            )
        tokens[row, :length], labels[row, :length] = whole[:-1], whole[1:]
        generated = slice(len(rollout.prompt) - 1, length)
        mask[row, generated], padding[row, :length] = 1.0, False
        own[row, generated], sampled[row, generated] = rollout.log_probabilities, rollout.sampling_log_probabilities
    tokens, labels, mask, own, sampled, padding = (
        each.to(device) for each in (tokens, labels, mask, own, sampled, padding)
    )
    positions = torch.arange(sequence_length, device=device).expand(shape)

    def batch(start: int) -> RolloutBatch:
        part = slice(start, start + micro_batch_size)
        key = RandomKey(0, tuple(range(start, start + micro_batch_size)))
        micro_batch = MicroBatch(
            tokens[part], positions[part], None, labels[part], mask[part], key, padding=padding[part]
        )
        return RolloutBatch(micro_batch, own[part], sampled[part])

    return [batch(start) for start in range(0, rows, micro_batch_size)]


def log_probability_difference(
    generated: Sequence[Tensor], trained: Sequence[Tensor | TokenOutputs], masks: Sequence[Tensor], mesh: ParallelMesh
) -> dict[str, float]:
    """Return figures on how much the log-probabilities of training differ from those of generation, on every rank.

    All arguments have a tensor [batch, sequence] per micro-batch; tokens with a mask of 0 do not count. `kl` estimates
    the divergence of training from generation, the mean of r - 1 - log r for the ratio r of the probabilities, which
    is never negative and has no bias if the tokens were sampled from the full distribution.
    """
    largest = total = divergence = count = 0.0
    for before, after, mask in zip(generated, trained, masks, strict=True):
        now = after.log_probabilities if isinstance(after, TokenOutputs) else after
        difference = (now.double() - before.double())[mask > 0]
        if difference.numel():
            largest = max(largest, difference.abs().max().item())
            total += difference.abs().sum().item()
            divergence += (difference.expm1() - difference).sum().item()
            count += difference.numel()
    parts = collectives.all_gather_json([largest, total, divergence, count], mesh, "dp")
    tokens = max(sum(part[3] for part in parts), 1.0)
    return {
        "log_probability_difference_max": max(part[0] for part in parts),
        "log_probability_difference_mean": sum(part[1] for part in parts) / tokens,
        "log_probability_kl": sum(part[2] for part in parts) / tokens,
    }
