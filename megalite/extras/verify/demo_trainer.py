"""A tiny Llama that two processes train together, by tensor and sequence parallelism, and a real bug in its gradients.

With sequence parallelism, a rank's norms see only its part of the tokens, so that the gradients of their weights are to
be summed over the ranks. In GPT-NeoX they were not (issue 1257): training went on, and the loss stayed at about 8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from megalite.atomic_files import write_atomically
from megalite_trace import Place, Recorder

RANKS, LAYERS, HIDDEN, FFN, HEADS, VOCABULARY, SEQUENCE, BATCH = 2, 3, 64, 128, 4, 256, 64, 4
HEAD, EPSILON, BASE, RATE = HIDDEN // HEADS, 1e-5, 10_000.0, 3e-3
COMMAND = f"""--tensor-model-parallel-size {RANKS} --sequence-parallel
    --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} --swiglu
    --normalization RMSNorm --norm-epsilon {EPSILON} --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size {BATCH}
    --global-batch-size {BATCH} --calculate-per-token-loss --lr {RATE} --train-iters 2 --mock-data"""
"""The run, as flags of Megatron-LM."""


def gathered(part: Tensor) -> Tensor:
    """Return the tokens of all ranks, from [batch, a rank's part of the sequence, features]."""
    parts = [torch.empty_like(part) for _ in range(RANKS)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)


def scattered(term: Tensor) -> Tensor:
    """Return a rank's part of the tokens of the sum over ranks."""
    total = term.clone()
    dist.all_reduce(total)
    return total.chunk(RANKS, 1)[dist.get_rank()].contiguous()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        return gathered(part)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return scattered(gradient)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, term: Tensor) -> Tensor:
        return scattered(term)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient)


class Column(nn.Linear):
    """Linear layer of which a rank has some output features, and gives those of all tokens."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs // RANKS, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(_Gathered.apply(hidden), self.weight)


class Row(nn.Linear):
    """Linear layer of which a rank has some input features, and gives its tokens."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs // RANKS, outputs, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = _Scattered.apply(F.linear(hidden, self.weight))
        return found


def rotated(heads: Tensor) -> Tensor:
    """Return queries or keys [batch, heads, sequence, features], rotated by their positions."""
    angles = torch.arange(SEQUENCE)[:, None] * BASE ** (-torch.arange(0, HEAD, 2) / HEAD)
    first, second = heads.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (Column(HIDDEN, HIDDEN) for _ in range(3))
        self.o_proj = Row(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Column(HIDDEN, FFN), Column(HIDDEN, FFN), Row(FFN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(HIDDEN, EPSILON) for _ in range(2))
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPSILON)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class Llama(nn.Module):
    """A rank's part of the network: of attention and MLPs some features, of all else the whole, on its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))

    def split(self) -> Iterator[tuple[str, nn.Parameter, int | None]]:
        """Yield the parameters, and the dimension in which ranks have parts of them."""
        for name, parameter in self.named_parameters():
            module = self.get_submodule(name.rpartition(".")[0])
            yield name, parameter, 0 if isinstance(module, Column) else 1 if isinstance(module, Row) else None


def load(model: Llama, seed: int) -> dict[str, Tensor]:
    """Draw whole weights, take this rank's part of them, and return them all."""
    generator, whole = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    with torch.no_grad():
        for name, parameter, dimension in model.split():
            shape = [size * RANKS if at == dimension else size for at, size in enumerate(parameter.shape)]
            values = torch.randn(shape, generator=generator)
            whole[name] = 1.0 + 0.1 * values if len(shape) == 1 else values / math.sqrt(HIDDEN)
            part = whole[name] if dimension is None else whole[name].chunk(RANKS, dimension)[dist.get_rank()]
            parameter.copy_(part)
    return whole


def sum_gradients(model: Llama, with_bug: bool) -> None:
    """Sum the gradients of what each rank has whole, and which saw only the rank's tokens."""
    for name, parameter, dimension in model.split():
        if dimension is None and not (with_bug and "norm" in name):  # the bug: norms are forgotten
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, [batch, sequence] each, of frequencies that can be learned."""
    frequencies = 1.0 / torch.arange(1, VOCABULARY + 1)
    generator = torch.Generator().manual_seed(step)
    drawn = torch.multinomial(frequencies, BATCH * (SEQUENCE + 1), replacement=True, generator=generator)
    return drawn.view(BATCH, -1)[:, :-1], drawn.view(BATCH, -1)[:, 1:]


def train(folder: Path, with_bug: bool) -> None:
    """Train two steps, and write the weights before them, the trace of the first one, and the losses."""
    rank, model, losses = dist.get_rank(), Llama(), []
    weights = load(model, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    places = {name: Place(splits=[(at, "tp")]) for name, _, at in model.split() if at is not None}
    places["*:*put*"] = Place("bsh")
    axes = {"tp": (rank, RANKS)}
    recorder = Recorder(folder / "trace", model, {1}, program="huggingface", coordinates=axes, places=places)
    for step in (1, 2):
        tokens, labels = samples(step)
        with recorder.step(step):
            recorder.batch(tokens, labels)
            logits = model(tokens.chunk(RANKS, 1)[rank])
            own = F.cross_entropy(logits.flatten(0, 1), labels.chunk(RANKS, 1)[rank].flatten(), reduction="sum")
            loss = own / labels.numel()
            loss.backward()
            sum_gradients(model, with_bug)
            recorder.gradients()
            optimizer.step()
            loss = loss.detach()
            dist.all_reduce(loss)
            recorder.figures(loss=loss)
        optimizer.zero_grad()
        losses.append(float(loss))
    if rank == 0:
        write(folder, weights, losses)


def write(folder: Path, weights: dict[str, Tensor], losses: list[float]) -> None:
    """Write whole weights as a model of Hugging Face, and the losses."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": SEQUENCE,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": BASE,
        "tie_word_embeddings": False,
    }
    (folder / "checkpoint").mkdir()
    write_atomically(folder / "checkpoint" / "config.json", json.dumps(config).encode())
    save_file(weights, folder / "checkpoint" / "model.safetensors")
    write_atomically(folder / "losses.json", json.dumps(losses).encode())


def rank_of_run(rank: int, folder: Path) -> None:
    """Train as one of the ranks, without the bug and with it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    train(folder / "right", with_bug=False)
    train(folder / "wrong", with_bug=True)
    dist.destroy_process_group()


def run(folder: Path) -> tuple[list[float], list[float]]:
    """Train on processes of their own; return the losses of the steps without the bug, and with it.

    The folder gets right/ and wrong/ with a checkpoint/ and a trace/ each.
    """
    start_processes(rank_of_run, (folder,), RANKS, start_method="spawn")
    right, wrong = (json.loads((folder / name / "losses.json").read_text()) for name in ("right", "wrong"))
    return right, wrong
