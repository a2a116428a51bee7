"""Model whose weights are made by hand, so that it continues any text as it went on where it had the same four bytes.

embedding     [code of the byte | 0 | 0 | 0 | 0 | 0 | 1]
layer 0       head j reads the byte j + 1 positions before, by rotary positions, and writes its code to block 1 + j
layer 1       without positions: its query is the codes of the last four bytes, its key those of the four before a
              position, its value the code of the byte there, which it writes to block 5
output        the byte whose code block 5 has
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import Plan, Saver, TrainingState
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces

BEFORE = 4
"""Number of bytes that are compared."""
_CODE, _ONE = 32, 32 * (BEFORE + 2)
MODEL = ModelConfig(
    num_layers=2, hidden_size=200, ffn_hidden_size=4, num_attention_heads=BEFORE, kv_channels=BEFORE * _CODE,
    vocab_size=257, position_embedding_type="rope", no_rope_freq="[0,1]", normalization="RMSNorm",
    add_bias_linear=False, untie_embeddings_and_output_weights=True,
)  # fmt: skip


def block(number: int) -> slice:
    """Return the channels of a block of the hidden states."""
    return slice(number * _CODE, (number + 1) * _CODE)


def weights() -> dict[str, Tensor]:
    """Return the weights that are not zero, by logical name, in float64."""
    signs = torch.randint(2, (257, _CODE), generator=torch.Generator().manual_seed(0))
    codes, hidden, width = 2.0 * signs.double() - 1.0, MODEL.hidden_size, MODEL.head_dim
    embedding = torch.zeros(257, hidden, dtype=torch.float64)
    embedding[:, block(0)], embedding[:, _ONE] = codes, 1.0

    def norm(blocks: int) -> Tensor:
        """Return weights under which hidden states with so many blocks of codes stay as they are."""
        return torch.full((hidden,), math.sqrt((blocks * _CODE + 1) / hidden), dtype=torch.float64)

    def projection(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    frequencies = MODEL.rotary_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    query, key_value = projection(BEFORE, width, hidden), projection(BEFORE, 2, width, hidden)
    output = projection(hidden, BEFORE, width)
    for head in range(BEFORE):
        angles = (head + 1) * frequencies
        query[head, :, _ONE] = 500 * torch.cat((angles.cos(), -angles.sin()))
        key_value[head, 0, : width // 2, _ONE] = 1.0
        key_value[head, 1, :_CODE, block(0)] = torch.eye(_CODE)
        output[block(1 + head), head, :_CODE] = torch.eye(_CODE)
    found = {"layers.0.attention.query": query, "layers.0.attention.key_value": key_value}
    found |= {"layers.0.attention.output": output, "embedding.word": embedding, "output": projection(257, hidden)}
    query, key_value = projection(BEFORE, width, hidden), projection(BEFORE, 2, width, hidden)
    output = projection(hidden, BEFORE, width)
    for place in range(BEFORE):
        query[0, block(place), block(place)] = 40 * torch.eye(_CODE, dtype=torch.float64)
        key_value[0, 0, block(place), block(place + 1)] = torch.eye(_CODE, dtype=torch.float64)
    key_value[0, 1, :_CODE, block(0)] = torch.eye(_CODE)
    output[block(1 + BEFORE), 0, :_CODE] = torch.eye(_CODE)
    found |= {"layers.1.attention.query": query, "layers.1.attention.key_value": key_value}
    found["layers.1.attention.output"], found["output"][:, block(1 + BEFORE)] = output, codes
    return found | {
        "layers.0.input_norm.weight": norm(1),
        "layers.1.input_norm.weight": norm(1 + BEFORE),
        "final_norm.weight": norm(2 + BEFORE),
    }


def write_finding_model(
    run: Path, sees: int | None = None, *, planted: bool = True, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a run directory with the model, or with random weights, on bytes.

    `sees`: number of tokens that each one attends to in layer 1; None: all.
    """
    window = {} if sees is None else {"window_size": f"{sees - 1},0", "window_attn_skip_freq": "[0,1]"}
    model = replace(MODEL, **window)  # type: ignore[arg-type]
    network = GPT(model, ParallelMesh(), dtype=dtype)
    initialize(network, 0)
    if planted:
        made = weights()
        for parameter, piece in named_pieces(network):
            value = made.get(piece.tensor.name, torch.zeros(piece.tensor.shape))
            piece.view(parameter.detach()).copy_(value)
    optimizer = make_optimizer([network], ParallelMesh(), OptimizerConfig(lr=0.1), DataParallel(dtype))
    config = {"model": asdict(model), "data": {"tokenizer_type": "ByteTokenizer", "seq_length": 64}}
    config["training"] = {"micro_batch_size": 1, "fp64": dtype == torch.float64}
    Saver(run, optimizer, Plan.alone(optimizer), state=False).save(TrainingState(1, 1, 1), config)
    return run
