"""Options of the layout: how the run is split over ranks, and when they communicate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, get_args

from megalite.config.fields import PositiveInt, at_most, needs
from megalite.config.layer_patterns import MOST_LAYERS
from megalite.config.layer_specs import LETTERS, kinds_with_core

if TYPE_CHECKING:
    from megalite.config.model import ModelConfig

ContextParallelWay = Literal["p2p", "all_gather", "allgather", "a2a", "a2a+p2p"]
Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""Values of data-parallel-sharding-strategy, by the ZeRO stage."""
ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]


CHUNKS_PER_RANK = 16
"""Chunks per rank with cp-balance documents: enough for the busiest rank to have less than 1.05 x the mean work."""


@dataclass(frozen=True)
class Shape:
    """Assignment of a schedule's stages to the ranks."""

    chunks: int | None = 1
    """Stages per rank; None: two or more."""
    v_shaped: bool = False
    """True if every other round of stages is assigned to the ranks in reverse order."""


SHAPES: Mapping[str, Shape] = {
    "gpipe": Shape(),
    "1f1b": Shape(),
    "interleaved-1f1b": Shape(chunks=None),
    "zb-h1": Shape(),
    "zb-v": Shape(chunks=2, v_shaped=True),
}


class MeshSizes(TypedDict):
    """Sizes of the axes of both views of a mesh, named as in `ParallelMesh`."""

    tensor_parallel_size: int
    context_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel_size: int
    expert_tensor_parallel_size: int


@dataclass(frozen=True)
class ParallelConfig:
    """Options of the layout: sizes of the parallel axes, and when the ranks communicate."""

    tensor_model_parallel_size: Annotated[PositiveInt, at_most(1_000_000)] = 1
    """Ranks that share each layer's matrices (short: --tp)."""
    pipeline_model_parallel_size: Annotated[PositiveInt, at_most(MOST_LAYERS)] = 1
    """Ranks that each hold some of the layers, as stages that micro-batches go through (short: --pp)."""
    context_parallel_size: Annotated[PositiveInt, at_most(100_000)] = 1
    """Ranks that each hold a part of every sequence (short: --cp)."""
    cp_comm_type: tuple[ContextParallelWay, ...] = ("p2p",)
    """Way in which context-parallel ranks compute attention, for all layers or one value per layer: p2p passes keys and
    values around a ring, all_gather (or allgather) gathers them, a2a exchanges heads, a2a+p2p does both."""
    hierarchical_context_parallel_sizes: tuple[PositiveInt, ...] = ()
    """Two sizes for cp-comm-type a2a+p2p: the neighbouring ranks that exchange heads, and the ranks of each ring. Their
    product is context-parallel-size."""
    cp_balance: Literal["zigzag", "documents"] = "zigzag"
    """Deal of the chunks of a sample to context-parallel ranks: zigzag gives rank r the chunks r and 2C - 1 - r of 2C;
    documents deals more and smaller chunks by the scores that the documents of each micro-batch leave."""
    cp_chunks_per_rank: PositiveInt | None = None
    """Chunks of a sample per rank with cp-balance documents; unset: 16, or fewer if seq-length needs it."""
    cp_state_exchange: Literal["scan", "chain"] = "scan"
    """Exchange of context-parallel ranks in recurrent layers: scan gathers what each rank does to states, and none
    waits for another; chain passes states on from rank to rank, with the bits of one rank if no chunk is cut."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks over which the experts of a layer are distributed (short: --ep)."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each expert's matrices (short: --etp); unset: tensor-model-parallel-size."""
    pipeline_schedule: ScheduleName | None = None
    """Order of forward and backward in a pipeline; unset: 1f1b, or interleaved-1f1b with several stages per rank."""
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    """Layers per stage if a rank has several stages; their number is derived from it."""
    num_virtual_stages_per_pipeline_rank: Annotated[PositiveInt, at_most(MOST_LAYERS)] | None = None
    """Stages per rank; unset: 2 with zb-v, or derived from the two related flags, else 1."""
    pipeline_model_parallel_layout: str | None = None
    """Contents of each stage, by letters: E embedding, t layer, m depth of mtp-num-layers (before L, in its stage), L
    output and loss, | next stage; x*n and (..)*n repeat, as in "Ett|(ttt|)*6ttL". Stages are assigned to the pipeline
    ranks in rounds. auto: such that all stages take about as long, by predicted times, or with auto:FILE by those of
    each rank that profile-pipeline wrote."""
    decoder_first_pipeline_num_layers: PositiveInt | None = None
    """Layers of the first pipeline rank; unset: as many as the others."""
    decoder_last_pipeline_num_layers: PositiveInt | None = None
    """Layers of the last pipeline rank; unset: as many as the others."""
    account_for_embedding_in_pipeline_split: bool = False
    """Give the first stage one layer less, because of the embedding."""
    account_for_loss_in_pipeline_split: bool = False
    """Give the last stage one layer less, because of the output layer and the loss."""
    mtp_standalone: bool = False
    """Give the depths of mtp-num-layers the last stage, with the loss and no layers of the network; off: they follow
    its last layers on that stage."""
    microbatch_group_size_per_virtual_pipeline_stage: PositiveInt | None = None
    """Micro-batches that go through a stage before the rank's next stage; unset: pipeline-model-parallel-size."""
    overlap_p2p_communication: bool = True
    """Overlap messages between stages with computation; off: wait for each send."""
    data_parallel_shares: str | None = None
    """Shares of the data-parallel ranks in the micro-batches of a step, such as 3:2, for devices that are not alike.
    auto: by measured times, taken anew at each save. Unset: all have as many."""
    sequence_parallel: bool = False
    """Split activations outside the matrix products along the sequence, over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state and master weights over the data-parallel ranks (ZeRO 1)."""
    data_parallel_sharding_strategy: Strategy | None = None
    """State that stays sharded over data-parallel ranks (ZeRO 0 to 3); unset: optim with use-distributed-optimizer."""
    num_distributed_optimizer_instances: PositiveInt = 1
    """Groups of data-parallel (and context-parallel) ranks that each hold all shards once (hybrid sharding)."""
    overlap_grad_reduce: bool = False
    """Overlap the reduction of gradient buckets with backward."""
    overlap_param_gather: bool = False
    """Overlap the gathering of updated parameters with the next forward."""
    ddp_bucket_size: PositiveInt | None = None
    """Parameters per bucket of the gradient reduction; unset: max(40 million, 1 million x data-parallel size) with
    overlap-grad-reduce; one bucket without it (one per block under ZeRO 2 and 3)."""
    align_grad_reduce: bool = True
    """Let all pipeline ranks start to reduce a stage together, for overlap-grad-reduce with several stages per rank."""
    device_classes: str | None = None
    """File that describes devices that are not alike, by nodes (docs/planner.md): for layouts and flags by class."""
    allow_mixed_groups: bool = False
    """Let ranks that share each layer (TP, CP, EP) have devices of several classes of device-classes."""
    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bf16 instead of fp32, which loses a part of more than 256 micro-batches; needs
    bf16."""
    bitwise_elastic: bool = False
    """Sum gradients and losses in fixed point: any number of data-parallel ranks, ZeRO stage and pipeline gives the
    same bits. Gradients are kept in fp64 (docs/bitwise_elastic.md)."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; unset: nccl on GPUs, gloo on CPUs."""
    distributed_timeout_minutes: PositiveInt = 10
    """Time that a rank waits in a collective before the run fails."""

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks among `world_size`, which `validate` has found divisible."""
        return world_size // self.model_parallel_size

    def layout(self, world_size: int) -> str:
        """Return a description of the layout on `world_size` ranks, which `validate` has found divisible."""
        tensor = f"TP {self.tensor_model_parallel_size}{' with SP' if self.sequence_parallel else ''}"
        sizes = {"CP": self.context_parallel_size, "PP": self.pipeline_model_parallel_size}
        others = "".join(f" x {axis} {size}" for axis, size in sizes.items() if size > 1)
        ep, etp = self.expert_model_parallel_size, self.mesh_sizes["expert_tensor_parallel_size"]
        otherwise = ep > 1 or etp != self.tensor_model_parallel_size
        experts = f" (experts: EP {ep} x ETP {etp})" if otherwise else ""
        return f"{tensor}{others} x DP {self.data_parallel_size(world_size)}{experts}"

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def sequence_parts(self) -> int:
        """Number of ranks that a sequence is split over between the layers' matrix products."""
        return self.context_parallel_size * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def head_ranks(self) -> Mapping[str, int]:
        """Number of context-parallel ranks that exchange heads, for each value of cp-comm-type."""
        first = self.hierarchical_context_parallel_sizes[0] if self.hierarchical_context_parallel_sizes else 1
        return {"p2p": 1, "all_gather": 1, "allgather": 1, "a2a": self.context_parallel_size, "a2a+p2p": first}

    def chunks_per_rank(self, seq_length: int) -> int | None:
        """Return the number of chunks that cp-balance documents deals to each rank; None for zigzag."""
        if self.cp_balance == "zigzag" or self.context_parallel_size == 1:
            return None
        if self.cp_chunks_per_rank is not None:
            return self.cp_chunks_per_rank
        parts = seq_length // self.context_parallel_size
        return next(count for count in range(CHUNKS_PER_RANK, 0, -1) if parts % count == 0)

    @property
    def expert_tensor_model_pipeline_parallel_size(self) -> int:
        """Number of ranks that share one replica of all experts, over all stages."""
        sizes = self.mesh_sizes
        return sizes["expert_tensor_parallel_size"] * sizes["expert_parallel_size"] * sizes["pipeline_parallel_size"]

    @property
    def ranks_needed(self) -> int:
        """Smallest number of ranks of this layout; any other number is a multiple of it."""
        return math.lcm(self.model_parallel_size, self.expert_tensor_model_pipeline_parallel_size)

    @property
    def mesh_sizes(self) -> MeshSizes:
        tensor, of_experts = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        return {
            "tensor_parallel_size": tensor,
            "context_parallel_size": self.context_parallel_size,
            "pipeline_parallel_size": self.pipeline_model_parallel_size,
            "expert_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": tensor if of_experts is None else of_experts,
        }

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        if self.data_parallel_sharding_strategy is None:
            return 1 if self.use_distributed_optimizer else 0
        return STRATEGIES.index(self.data_parallel_sharding_strategy)


def context_parallel_problems(parallel: ParallelConfig, model: ModelConfig, seq_length: int) -> Iterator[str]:
    """Yield a line for each relation of context parallelism that does not hold. There are none for one rank."""
    size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if size == 1:
        return
    if parallel.cp_balance == "zigzag":
        yield from needs(parallel, "cp_chunks_per_rank", "--cp-balance documents")
    if parallel.cp_balance != "zigzag":
        yield from needs(parallel, "cp_state_exchange", "--cp-balance zigzag: a chain over more chunks waits longer")
    passing = {letter: each.kind for letter, each in LETTERS.items() if each.passes_state}
    if model.kinds.isdisjoint(passing.values()):
        *others, last = passing
        yield from needs(parallel, "cp_state_exchange", f"layers that pass a state on ({', '.join(others)} or {last})")
    chunks = parallel.chunks_per_rank(seq_length) or 2
    multiple = chunks * size * (tensor if parallel.sequence_parallel else 1)
    if seq_length % multiple:
        below = seq_length // multiple * multiple
        nearest = f"{below} and {below + multiple}" if below else f"{multiple}"
        tensor_ranks = f" x {tensor} tensor-parallel ranks" if multiple > chunks * size else ""
        yield (
            f"--seq-length {seq_length} with --context-parallel-size {size}: must be a multiple of {multiple}, for "
            f"{chunks} chunks x {size} ranks{tensor_ranks}; near it: {nearest}"
        )
    ways, sizes = parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes
    if parallel.cp_balance == "documents" and set(ways) == {"a2a"}:
        yield "--cp-balance documents changes nothing with --cp-comm-type a2a: ranks compute whole samples. Drop it"
    if len(ways) not in (1, model.num_layers):
        yield f"--cp-comm-type has {len(ways)} values: give one for all layers, or {model.num_layers}, one per layer"
    if "a2a+p2p" not in ways:
        yield from needs(parallel, "hierarchical_context_parallel_sizes", "--cp-comm-type a2a+p2p")
    elif not sizes:
        yield (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A B: A ranks exchange heads, B are "
            f"in a ring, and A x B is --context-parallel-size {size}"
        )
    elif len(sizes) != 2 or sizes[0] * sizes[1] != size:
        yield (
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}: must be two sizes whose product is "
            f"--context-parallel-size {size}: {_products(size)}"
        )
    if model.kinds.isdisjoint(kinds_with_core().difference(passing.values())):  # no attention
        return
    heads = model.num_attention_heads // tensor
    for way in dict.fromkeys(ways):
        if heads % (ranks := parallel.head_ranks[way]):
            fitting = [str(number) for number in range(1, heads + 1) if heads % number == 0]
            yield (
                f"--cp-comm-type {way} cannot divide the heads of a tensor-parallel rank ({heads}) among {ranks} "
                f"ranks: numbers of ranks that can are {', '.join(fitting)}; p2p and all_gather do not divide heads"
            )


def _products(size: int) -> str:
    """Return the pairs of sizes whose product is `size`, as text."""
    return ", ".join(f"{first} {size // first}" for first in range(1, size + 1) if size % first == 0)
