"""Model distributed over tensor- and pipeline-parallel ranks, for forward passes only.

    choose_layout(config, world_size, tensor_parallel_size, pipeline_parallel_size)   # before ranks connect
    network = make_network(config, mesh, dtype)                           # weights not set yet; loading.py sets them
    logits(network, tokens)                                               # [batch, sequence, vocabulary]
    score_tokens(network, tokens).log_probabilities                       # [batch, sequence - 1]

All ranks of a replica of the model call these functions together with the same tokens, and get the same result.
Sequences of different lengths are padded at the end, with any token. Later tokens do not affect the results of earlier
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig, ParallelConfig
from megalite.config.pipeline_layout import StageLayers, check_choices
from megalite.config.validate_model import uneven_widths
from megalite.errors import ConfigurationError
from megalite.model.batch import MicroBatch
from megalite.model.cache import StageCache
from megalite.model.gpt import GPT, make_chunks, messages
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending, completed
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag
from megalite.pipeline.point_to_point import Links, make_links
from megalite.pipeline.stages import Stages

_TOKENS = 1024
"""Number of tokens whose logits are in memory at once during scoring."""


class Network:
    """Stage of the model on this rank, with links to its neighbours."""

    def __init__(self, stage: GPT, links: Links) -> None:
        self.stage, self.links = stage, links
        self.mesh, self.config, self.vocab_size = stage.mesh, stage.config, stage.vocab_size
        self._sent: Pending = completed(torch.empty(0))

    def run(self, tokens: Tensor, positions: Tensor, cache: StageCache | None = None) -> Tensor:
        """Run this rank's stage on [batch, sequence] tokens, and return its output [sequence, batch, hidden].

        Under context parallelism, the output has this rank's part of the sequence (`layout`). It returns after starting
        to send the output to the next stage. Both stages then work concurrently.
        """
        rank, layout = self.mesh.coordinate("pp"), self.layout(tokens.shape[1])
        hidden = None
        if self.stage.embedding is None:
            batch, own = len(tokens), sum(map(len, layout.runs))
            passed = messages(self.config, self.mesh.size("pp"), sequence=own, batch=batch, dtype=self.stage.dtype)
            (spec,) = passed[rank - 1]
            arriving = torch.empty(spec.shape or (), dtype=spec.dtype, device=self.mesh.device)
            hidden = self.links.receive(arriving, rank - 1).wait(f"stage {rank} waited for hidden states")
        micro_batch = MicroBatch(
            layout.own(tokens),
            layout.own(positions),
            first_keys=None,
            labels=None,
            loss_mask=None,
            key=RandomKey(0, ()),
            layout=layout,
        )
        hidden, _ = self.stage.hidden_states(hidden, micro_batch, cache)
        if self.stage.head is None:
            self._sent.wait(f"stage {rank} waited until its hidden states had arrived")
            self._sent = self.links.send(hidden.contiguous(), rank + 1)
        return hidden

    @property
    def batches(self) -> int:
        """Number of batches of a generation that are in progress at once: one per stage keeps all busy."""
        return self.mesh.size("pp")

    def layout(self, sequence: int) -> SequenceLayout:
        """Return the context-parallel ranks' parts of sequences of this length, a multiple of `self.chunks`."""
        return SequenceLayout.cut(sequence, zigzag(self.mesh.size("cp")), self.mesh.coordinate("cp"))

    @property
    def chunks(self) -> int:
        """Number of equal chunks that a sequence is cut into."""
        return sum(map(len, zigzag(self.mesh.size("cp"))))

    def share(self, values: Tensor) -> Tensor:
        """Return the values of the last stage on every rank of the replica. Ranks pass zeros where they have none."""
        values = collectives.all_reduce_(values.contiguous(), self.mesh.group("pp"))
        return collectives.all_reduce_(values, self.mesh.group("cp"))


def choose_layout(
    config: ModelConfig, world_size: int, tensor_parallel_size: int | None, pipeline_parallel_size: int
) -> ParallelConfig:
    """Return the layout of one replica of the model on all ranks.

    If `tensor_parallel_size` is None, all ranks of a stage are tensor-parallel. Raises ConfigurationError if the ranks
    or the model cannot be divided in this way.
    """
    pp = pipeline_parallel_size
    tp = tensor_parallel_size if tensor_parallel_size is not None else max(world_size // max(pp, 1), 1)
    if tp < 1 or pp < 1 or tp * pp != world_size:
        raise ConfigurationError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} is not the number of ranks, "
            f"{world_size}: start {max(tp * pp, 1)} (torchrun's --nproc-per-node), or choose other sizes"
        )
    check_layout(config, tp, pp)
    return ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)


def check_layout(config: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raise ConfigurationError if the model cannot be divided into these sizes."""
    tp, pp = tensor_parallel_size, pipeline_parallel_size
    if problems := uneven_widths(config, tp):
        raise ConfigurationError("\n".join(problems))
    if pp > config.num_layers:
        raise ConfigurationError(
            f"{pp} stages are more than the model's {config.num_layers} layers: choose a smaller "
            "--pipeline-model-parallel-size"
        )
    check_choices(config, stage_parts(config.num_layers, pp))


def stage_parts(num_layers: int, stages: int) -> list[StageLayers]:
    """Divide the layers evenly. The last stage gets no more than any other, because it also has the output layer."""
    borders = [-(-stage * num_layers // stages) for stage in range(stages + 1)]
    return [
        StageLayers(borders[stage], borders[stage + 1] - borders[stage], stage == 0, stage == stages - 1)
        for stage in range(stages)
    ]


def make_network(config: ModelConfig, mesh: ParallelMesh, dtype: torch.dtype) -> Network:
    """Return this rank's part of the model, with unset weights. All ranks of a pipeline call it together.

    Raises ConfigurationError as `check_layout` does.
    """
    check_layout(config, mesh.size("tp"), mesh.size("pp"))
    stages, ranks = Stages(mesh.size("pp")), mesh.ranks("pp")
    part = stage_parts(config.num_layers, stages.count)[mesh.coordinate("pp")]
    (stage,) = make_chunks(config, mesh, [part], tuple(ranks[rank] for rank in stages.ends), dtype=dtype)
    stage.eval()
    return Network(stage, make_links(mesh, stages))


@torch.no_grad()
def logits(network: Network, tokens: Tensor) -> Tensor:
    """Return the logits [batch, sequence, vocabulary] of [batch, sequence] tokens, complete on every rank."""
    stage, group = network.stage, network.stage.context.group("vocabulary")
    found = torch.zeros(*tokens.shape, network.vocab_size, dtype=stage.dtype, device=network.mesh.device)
    for rows, columns, hidden in _micro_batches(network, tokens):
        if stage.head is not None:
            whole = collectives.all_gather_last(stage.head(hidden), group)
            found[rows, columns] = whole[..., : network.vocab_size].transpose(0, 1)
    return network.share(found)


@dataclass(frozen=True)
class TokenScores:
    """Scores of each token except the first, given the tokens before it. Both fields are [batch, sequence - 1]."""

    log_probabilities: Tensor
    """Natural logarithms of the probabilities, in fp32 or fp64."""
    likeliest: Tensor
    """Most likely token at each position."""


@torch.no_grad()
def score_tokens(network: Network, tokens: Tensor) -> TokenScores:
    """Return the scores of [batch, sequence] tokens."""
    stage, group = network.stage, network.stage.context.group("vocabulary")
    shape, device = (tokens.shape[0], tokens.shape[1] - 1), network.mesh.device
    scores = torch.zeros(shape, dtype=torch.promote_types(stage.dtype, torch.float32), device=device)
    likeliest = torch.zeros(shape, dtype=torch.int64, device=device)
    for rows, places, hidden in _micro_batches(network, tokens[:, :-1]):
        if stage.head is None:
            continue
        for start in range(0, len(hidden), step := max(_TOKENS // hidden.shape[1], 1)):
            columns = places[start : start + step]
            part = stage.head(hidden[start : start + step])
            likeliest[rows, columns] = _likeliest(part, group, network.vocab_size).t()
            labels = tokens[rows, 1:].to(device)[:, columns].t()
            scores[rows, columns] = -vocab_parallel_cross_entropy(part, labels, group, network.vocab_size).t()
    return TokenScores(network.share(scores), network.share(likeliest))


def _micro_batches(network: Network, tokens: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield parts of the batch: rows, and columns and hidden states of this rank. One part per stage keeps all busy."""
    device, (batch, sequence) = network.mesh.device, tokens.shape
    padded = -(-sequence // network.chunks) * network.chunks
    tokens = F.pad(tokens, (0, padded - sequence))
    positions = torch.arange(padded, device=device).clamp(max=sequence - 1).expand(tokens.shape)
    places = network.layout(padded).places(device)
    real = places < sequence
    step = -(-batch // network.mesh.size("pp"))
    for start in range(0, batch, step):
        rows = slice(start, start + step)
        hidden = network.run(tokens[rows].to(device), positions[rows])
        yield rows, places[real], hidden if padded == sequence else hidden[real]


def _likeliest(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Return the token with the largest logit over all ranks, given [..., padded vocabulary / size] logits per rank.

    If several logits are equal, the first token is returned.
    """
    tokens = group.rank * logits.shape[-1] + torch.arange(logits.shape[-1], device=logits.device)
    largest, column = logits.double().masked_fill(tokens >= vocab_size, -torch.inf).max(dim=-1)
    found = collectives.all_gather(torch.stack([largest, tokens[column].double()]).unsqueeze(0), group)
    return found[:, 1].gather(0, found[:, 0].argmax(dim=0, keepdim=True)).squeeze(0).long()
