"""Memory of a rank by kind: measured at the start of a run, and by formula.

The kinds are parameters, gradients, optimizer state (moments, and fp32 masters of narrower parameters), and the
activations that all micro-batches in flight keep from forward to backward. Short-lived memory (buffers of collectives,
temporaries of kernels) is not included; `peak_memory_bytes` of the metrics includes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megalite.config.model import FeedForward, LayerSpec, Mixer, ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.model.recompute import Recompute
from megalite.modules.forward_state import ForwardState
from megalite.optim.layout import ParameterGroup
from megalite.optim.optimizer import Optimizer
from megalite.optim.shard import bytes_per_element
from megalite.parallel.context import AttentionWay
from megalite.torch_internals import storage_identity


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    """Parameters, and the state of modules."""
    gradients: int
    optimizer: int
    activations: int
    """Peak of the micro-batches in flight."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def against(self, formula: Memory) -> dict[str, str]:
        """Return a line for each kind, with the measured size and that of the formula."""
        wanted = asdict(formula)
        return {kind: f"{in_words(size)}, {in_words(wanted[kind])} by formula" for kind, size in asdict(self).items()}


def in_words(number: float) -> str:
    """Return a number of bytes as text, with a readable unit."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


def measured(
    optimizer: Optimizer, forwards: Iterable[Callable[[], object]], peak: Callable[[Sequence[int]], int] = sum
) -> Memory:
    """Measure the tensors of this rank.

    Called by all ranks together. `forwards` run each chunk of the network over one micro-batch; the state of modules
    that they change is restored afterwards. `peak` computes the peak of a step from the bytes that each chunk keeps per
    micro-batch.
    """
    buckets, shards, states = optimizer.buckets, optimizer.shards, [each.values for each in optimizer.module_states]
    flat = (tensor for each in (*buckets, *optimizer.frozen) for tensor in (each.parameters, each.parameter_shard))
    parameters = _storages([*flat, *states])
    accumulators = [accumulator for bucket in buckets for accumulator in bucket.accumulators]
    gradients = _storages(tensor for a in accumulators for tensor in (*a.flats.values(), a.gradient_shard))
    kept = _storages(tensor for shard in shards for tensor in shard.tensors())
    alone = {storage: size for storage, size in kept.items() if storage not in parameters}
    with ForwardState(optimizer.module_states).unchanged():
        activations = peak([_kept(forward, parameters) for forward in forwards])
    return Memory(
        parameters=sum(parameters.values()),
        gradients=sum(gradients.values()),
        optimizer=sum(alone.values()),
        activations=activations,
    )


def _kept(forward: Callable[[], object], parameters: Container[int]) -> int:
    """Return the bytes that a forward keeps for backward, without the storages of parameters."""
    activations: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if storage_identity(tensor) not in parameters:
            activations.update(_storages([tensor]))
        return tensor.detach()  # an output that its own node keeps would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = forward()  # kept alive until all hooks have run, so that no address is used twice
    del graph
    return sum(activations.values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of the tensors, each storage once."""
    return {storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def state_bytes(optimizer: Optimizer) -> tuple[int, int, int]:
    """Calculate the bytes of parameters, gradients and optimizer state on this rank (ZeRO, arXiv:1910.02054), unpadded.

    With p, g and o bytes per element and d shards, stages 0 to 3 take p + g + o, p + g + o/d, p + g/d + o/d and
    (p + g + o)/d. o is 8 for Adam's moments in fp32, plus 4 for the masters of narrower parameters. Muon's momentum of
    a matrix takes 4, so its shards differ in size. The gradient of a tied weight has one sum per use until they are
    reduced; that of an embedding in the chunk of its output layer has memory only while it is needed (`KeptGradients`),
    which is not counted. (The precision-aware optimizer takes less, as its flags say; a master as a remainder takes 2.)
    State with a shape of its own, of a module or an update rule, is replicated on each rank.
    """
    own = [state for _, state in optimizer.own_states]
    totals = [float(sum(state.values.nbytes for state in states)) for states in (optimizer.module_states, (), own)]
    for frozen in optimizer.frozen:
        shards = frozen.shard_group.size if frozen.zero_stage == 3 else 1
        totals[0] += sum(slot.stop - slot.start for slot in frozen.slots) * frozen.parameters.itemsize / shards
    for shard in optimizer.shards:
        bucket, master = shard.bucket, shard.master.itemsize if shard.has_master else 0
        for slot in bucket.slots:
            elements = slot.stop - slot.start
            shards = bucket.shard_group.size
            totals[0] += elements * bucket.parameters.itemsize / (shards if bucket.zero_stage == 3 else 1)
            for accumulator in bucket.accumulators:
                sums = 1 / shards if bucket.zero_stage >= 2 else len(accumulator.flats)
                totals[1] += elements * bucket.gradients.itemsize * sums
            updated = max(min(slot.stop, shard.stop) - max(slot.start, shard.start), 0)
            kept = bytes_per_element(optimizer.config, ParameterGroup.of(slot.parameter), shard.parameters.dtype)
            totals[2] += updated * (kept + master)
    parameters, gradients, state_bytes = map(round, totals)
    return parameters, gradients, state_bytes


def activation_bytes(
    model: ModelConfig,
    *,
    tokens: int,
    dtype: torch.dtype,
    tensor_parallel_size: int,
    sequence_parallel: bool,
    recompute: Recompute,
    expert_tensor_parallel_size: int | None = None,
    fused_loss: bool = False,
    stage_layers: StageLayers | None = None,
    context_parallel_size: int = 1,
    attention_ways: Sequence[AttentionWay] = (AttentionWay(),),
) -> int:
    """Return the bytes that one micro-batch of `tokens` keeps for backward in a stage (None: in all), without dropout,
    document masks and window masks.

    `tokens`: the tokens of this rank. `attention_ways`: one for all layers of the network, or one per layer.

    Each layer keeps inputs, outputs and statistics of both norms, what attention keeps (`_attention`), and the two
    inner tensors of the feed-forward. A layer with experts keeps, if their loads are even, the input and the first
    inner tensor of each of a token's experts, and the router's logits. Recomputed layers keep the input of each span,
    recomputed experts nothing more than their input, and a recomputed core no log-sums; recomputed tensors are not
    counted. Added to this are the final norm, the logits (unless the loss is fused with the output layer) and a few
    numbers per token.
    """
    item, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    tp = tensor_parallel_size
    sp = tp if sequence_parallel else 1
    hidden = model.hidden_size
    statistics = wide if model.normalization == "RMSNorm" else 2 * wide
    rotary = model.rotary
    weight = hidden * wide if model.apply_layernorm_1p else 0  # 1 + weight is kept, in fp32 or wider
    norm = (2 * hidden * item + statistics) / sp + weight / tokens
    recomputed_core = recompute.attention or model.attn_logit_softcapping is not None
    of_ways = [
        _attention(model, tp, context_parallel_size, way, item, wide, recomputed_core=recomputed_core)
        for way in attention_ways
    ]
    matrices = model.activation.matrices
    feed_forward: Mapping[FeedForward, float] = {
        "dense": matrices * model.ffn_size / tp * item,
        "moe": _experts(model, expert_tensor_parallel_size or tp, item, wide) / sp
        + matrices * (model.moe_shared_expert_intermediate_size or 0) / tp * item,
    }
    if recompute.moe:
        feed_forward = {**feed_forward, "moe": 0.0}  # its input is kept by the norm before it
    more_norms = 2 * (norm - hidden * item / sp) if model.sandwich_norm else 0  # backward does not need their outputs
    shared = hidden * item / sp if model.use_parallel_residual else 0  # both norms read one tensor
    norms = 2 * norm - shared + more_norms
    stage_layers = stage_layers or StageLayers(0, model.num_layers, embedding=True, loss=True)
    layers = model.layers[stage_layers.first_layer : stage_layers.first_layer + stage_layers.layers]
    spans = recompute.spans(stage_layers.layers)

    def of_layer(number: int, layer: LayerSpec) -> float:
        attention = of_ways[(stage_layers.first_layer + number) % len(of_ways)]
        mixer: Mapping[Mixer, float] = {"attention": attention}
        return norms + mixer[layer.mixer] + feed_forward[layer.feed_forward]

    of_layers = list(itertools.starmap(of_layer, enumerate(layers)))
    kept = sum(hidden / sp * item if again else sum(of_layers[start:stop]) for start, stop, again in spans)
    logits = 0 if fused_loss else model.padded_vocab_size(tp) / tp * item
    labels = 8 + wide + wide  # log-sum and loss mask
    loss = (norm + logits + labels) if stage_layers.loss else 0
    words = (8 + 1 if rotary else 8 + 1 + 8) if stage_layers.embedding else 0
    own_base = [layer.keys_before is not None and model.window_rotary_base is not None for layer in layers]
    kinds_of_tables = {kind for start, stop, again in spans if not again for kind in own_base[start:stop]}
    tables = len(kinds_of_tables) * model.head_dim * model.rotary_percent * wide if rotary else 0
    return round(tokens * (kept + loss + words + tables))


def _attention(
    model: ModelConfig,
    tp: int,
    context_parallel_size: int,
    way: AttentionWay,
    item: int,
    wide: int,
    *,
    recomputed_core: bool,
) -> float:
    """Return the bytes per token that attention keeps, from the fused projection to the input of the output layer.

    On one rank, these are the fused projection (because of the values), the rotated queries and keys, the output of the
    core and its log-sums, which a recomputed core does not keep. Ranks that exchange heads keep what they receive, and
    the output that comes back, instead of the projection. Other context-parallel ranks keep keys and values in one
    tensor, their own or, gathered, those of all, and always the log-sums. They keep the projection only if queries are
    a view of it.
    """
    heads, groups = model.num_attention_heads / tp, max(model.kv_groups / tp, 1)
    query, key_value = heads * model.head_dim * item, groups * model.head_dim * item
    exchanging, others = way.head_ranks, context_parallel_size // way.head_ranks
    # Per token of this rank. A group that several of the exchanging ranks need is on each of them.
    received = max(groups / exchanging, 1) * exchanging * model.head_dim * item
    is_rotated, keeps_core = model.rotary or model.qk_layernorm, others > 1 or not recomputed_core
    kept = query + (heads * wide if keeps_core else 0)
    if context_parallel_size == 1 or model.qk_layernorm or (exchanging == 1 and not is_rotated):
        kept += query + 2 * key_value
    if model.qk_layernorm:
        kept += (heads + groups) * (wide if model.normalization == "RMSNorm" else 2 * wide)
    if exchanging > 1:
        kept += query + 2 * received + (query if keeps_core else 0)
    elif is_rotated:
        kept += query + (key_value if context_parallel_size == 1 else 0)
    if others > 1:
        kept += 2 * received * (others if way.gathers else 1)
    return kept


def _experts(model: ModelConfig, parts: int, item: int, wide: int) -> float:
    """Return the bytes per token that routed experts keep, each split over `parts` ranks that all receive the token.

    The router keeps logits and their shares. A choice keeps its row and the first inner tensor, six indices of 8 bytes,
    and its weight twice. Padded experts have rows for all choices that their capacity allows.
    """
    inner = (model.activation.matrices - 1) * model.expert_ffn_size
    choice = (model.hidden_size * parts + inner) * item + 6 * 8 + 2 * wide
    experts, rows = model.num_experts or 0, float(model.moe_router_topk)
    if model.moe_pad_expert_input_to_capacity and model.moe_expert_capacity_factor is not None:
        rows = min(rows * model.moe_expert_capacity_factor, experts)  # an expert takes a token once
    return rows * choice + 2 * experts * wide
