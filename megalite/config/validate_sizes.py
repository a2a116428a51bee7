"""Sizes that no machine can hold, found by arithmetic before anything of them is made."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig

_BYTES = 2**44
"""Memory of a rank, in any case less: 16 TiB, a hundred times what the largest GPU has."""
_NARROWEST = 2
"""Bytes of a weight or an activation, at least."""
_MICRO_BATCHES = 100_000
"""Micro-batches of one rank in a step, which are listed."""


def size_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """A line for each size that is more than a rank can hold."""
    model, training, parallel = config.model, config.training, config.parallel
    yield from network_problems(model, parallel.model_parallel_size // parallel.context_parallel_size)
    micro_batch, length, batch = training.micro_batch_size, config.data.seq_length, training.global_batch_size
    widest = max(model.hidden_size, *(size // parallel.tensor_model_parallel_size for size in _widths(model)))
    if _NARROWEST * micro_batch * length * widest > _BYTES:
        yield (
            f"--micro-batch-size {micro_batch} x --seq-length {length} tokens of {widest} values each are more than a "
            "rank can hold"
        )
    if batch is not None and batch // (micro_batch * max(parallel.data_parallel_size(world_size), 1)) > _MICRO_BATCHES:
        yield (
            f"--global-batch-size {batch} on {world_size} ranks: more than {_MICRO_BATCHES:,} micro-batches of "
            f"--micro-batch-size {micro_batch} a step"
        )
    if (batch or 1) * (training.train_iters or 1) > 2**53:
        yield f"--train-iters {training.train_iters} of --global-batch-size {batch}: more than 2^53 samples"


def network_problems(model: ModelConfig, ranks: int = 2**13) -> Iterator[str]:
    """A line where the weights are more than can lie on so many ranks."""
    if _NARROWEST * least_parameters(model) // ranks > _BYTES:
        rows = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else None
        sizes = {
            "num-layers": model.num_layers,
            "hidden-size": model.hidden_size,
            "num-attention-heads": model.num_attention_heads,
            "kv-channels": model.kv_channels,
            "ffn-hidden-size": model.ffn_hidden_size,
            "vocab-size": model.vocab_size,
            "max-position-embeddings": rows,
        }
        flags = ", ".join(f"--{flag} {size}" for flag, size in sizes.items() if size is not None)
        holding = "a rank" if ranks == 1 else f"{ranks:,} ranks"
        yield f"{flags}: a network of {least_parameters(model):.1e} parameters, more than {holding} can hold"


def least_parameters(model: ModelConfig) -> int:
    """Parameters of a network's matrices, without padding; 0 for a vocabulary that is not known yet."""
    heads, groups = model.num_attention_heads, model.kv_groups
    layer = model.hidden_size * (2 * (heads + groups) * model.head_dim + model.activation.matrices * model.ffn_size)
    rows = (model.vocab_size or 0) * (2 if model.untie_embeddings_and_output_weights else 1)
    if model.position_embedding_type == "learned_absolute":
        rows += model.max_position_embeddings or 0
    return model.hidden_size * rows + model.num_layers * layer


def _widths(model: ModelConfig) -> tuple[int, ...]:
    """Values of a token that tensor parallelism divides."""
    return model.ffn_size, model.num_attention_heads * model.head_dim, model.vocab_size or 0
