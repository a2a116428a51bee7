"""Models of parallel layers, an encoder-decoder and one with experts, and each a second time in plain torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megalite
from megalite.library.settings import Optimizer
from megalite.parallel.parameter import Parameter

VOCABULARY, SOURCE, TARGET, WIDTH, HEADS, GROUPS, INNER = 11, 12, 24, 8, 4, 2, 12
EXPERTS, TOPK, BALANCE, Z = 4, 2, 0.03, 0.002
BASE, WINDOW, WIDE_HEAD = 100.0, 7, 4
MICRO, BATCH, STEPS, RATE, DECAY = 2, 8, 2, 0.05, 0.1

Weights = Mapping[str, Tensor]
Values = Mapping[str, Tensor]
Stages = Sequence[Callable[[megalite.ParallelContext], nn.Module]]


# ------------------------------------------------------------------------------------------------- by parallel layers


class Embed(nn.Module):
    """Embedding of tokens and of their places, in the order of the sequence."""

    def __init__(self, context: megalite.ParallelContext, name: str, length: int) -> None:
        super().__init__()
        self.words = megalite.VocabParallelEmbedding(context, f"{name}.words", VOCABULARY, WIDTH)
        self.places = megalite.VocabParallelEmbedding(context, f"{name}.places", length, WIDTH)
        self.context = context

    def embed(self, tokens: Tensor) -> Tensor:
        places = megalite.token_positions(self.context, tokens.shape[1])
        return self.words(tokens.t()) + self.places(places[:, None])


class EmbedSource(Embed):
    def forward(self, source: Tensor) -> Tensor:
        return self.embed(source)


class EmbedTarget(Embed):
    def forward(self, target: Tensor) -> Tensor:
        return self.embed(target)


class MLP(nn.Module):
    def __init__(self, context: megalite.ParallelContext, name: str) -> None:
        super().__init__()
        self.up = megalite.ColumnParallelLinear(context, f"{name}.up", WIDTH, INNER)
        self.down = megalite.RowParallelLinear(context, f"{name}.down", INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.up(hidden)))


class EncoderBlock(nn.Module):
    def __init__(self, context: megalite.ParallelContext, name: str) -> None:
        super().__init__()
        self.norm = megalite.LayerNorm(context, f"{name}.norm", WIDTH)
        self.attention = megalite.ParallelAttention(context, f"{name}.attention", WIDTH, HEADS)
        self.mlp = MLP(context, f"{name}.mlp")

    def forward(self, hidden: Tensor, visible: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), mask=visible[:, None, None])
        return hidden + self.mlp(hidden)


class EncoderEnd(EncoderBlock):
    def forward(self, hidden: Tensor, visible: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"memory": super().forward(hidden, visible)}


class DecoderBlock(nn.Module):
    """Block with a plain norm, whose parameters say that each rank has a part of the sequence.

    `masked`: attention has a mask of pairs of tokens, and attention to the encoder has none.
    """

    def __init__(self, context: megalite.ParallelContext, name: str, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.plain = nn.RMSNorm(WIDTH)
        for parameter in self.plain.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        self.norm = megalite.RMSNorm(context, f"{name}.norm", WIDTH)
        self.attention = megalite.ParallelAttention(
            context, f"{name}.attention", WIDTH, HEADS, GROUPS, causal=True, bias=False
        )
        self.cross = megalite.ParallelAttention(context, f"{name}.cross", WIDTH, HEADS, cross=True)
        self.mlp = MLP(context, f"{name}.mlp")

    def forward(self, hidden: Tensor, memory: Tensor, visible: Tensor, pairs: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.plain(hidden), mask=pairs[:, None] if self.masked else None)
        hidden = hidden + self.cross(self.norm(hidden), memory, None if self.masked else visible[:, None, None])
        return hidden + self.mlp(hidden)


class Head(nn.Module):
    """Loss of each token. A plain layer sees the whole sequence, and passes a part on."""

    def __init__(self, context: megalite.ParallelContext) -> None:
        super().__init__()
        self.context, self.mix = context, nn.Linear(TARGET, TARGET, bias=False)
        self.mix.weight.sequence_parallel = False  # type: ignore[attr-defined]
        self.norm = megalite.LayerNorm(context, "head.norm", WIDTH)
        self.scores = megalite.ColumnParallelLinear(
            context, "head.scores", WIDTH, VOCABULARY, bias=False, vocabulary=True
        )

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        whole = megalite.gather_sequence(self.context, hidden)
        mixed = megalite.split_sequence(self.context, self.mix(whole.transpose(0, 2)).transpose(0, 2))
        logits = self.scores(self.norm(mixed))
        return megalite.vocab_parallel_cross_entropy(self.context, logits, labels.t(), VOCABULARY)


class ExpertBlock(nn.Module):
    def __init__(self, context: megalite.ParallelContext, name: str, *, swiglu: bool) -> None:
        super().__init__()
        self.norm = megalite.LayerNorm(context, f"{name}.norm", WIDTH)
        self.experts = megalite.Experts(
            context, f"{name}.experts", WIDTH, INNER, EXPERTS, TOPK, swiglu=swiglu, bias=not swiglu
        )

    def forward(self, hidden: Tensor) -> megalite.StageOutput:
        mixed, sums = self.experts(self.norm(hidden))
        return megalite.StageOutput({"hidden": hidden + mixed}, sums)


class RotaryBlock(nn.Module):
    def __init__(self, context: megalite.ParallelContext, name: str, window: int | None) -> None:
        super().__init__()
        self.norm = megalite.RMSNorm(context, f"{name}.norm", WIDTH)
        self.attention = megalite.ParallelAttention(
            *(context, f"{name}.attention", WIDTH, HEADS, GROUPS),
            causal=True, head_dim=WIDE_HEAD, rotary_base=BASE, window=window,
        )  # fmt: skip

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.attention(self.norm(hidden))


def rotary() -> Stages:
    return [
        lambda context: EmbedTarget(context, "target", TARGET),
        lambda context: RotaryBlock(context, "block.0", WINDOW),
        lambda context: RotaryBlock(context, "block.1", None),
        Head,
    ]


def encoder_decoder() -> Stages:
    return [
        lambda context: EmbedSource(context, "source", SOURCE),
        lambda context: EncoderBlock(context, "encoder.0"),
        lambda context: EncoderEnd(context, "encoder.1"),
        lambda context: EmbedTarget(context, "target", TARGET),
        lambda context: DecoderBlock(context, "decoder.0", masked=False),
        lambda context: DecoderBlock(context, "decoder.1", masked=True),
        Head,
    ]


def experts() -> Stages:
    return [
        lambda context: EmbedTarget(context, "target", TARGET),
        lambda context: ExpertBlock(context, "block.0", swiglu=True),
        lambda context: ExpertBlock(context, "block.1", swiglu=False),
        Head,
    ]


# ------------------------------------------------------------------------------------------------------ in plain torch


def _norm(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    if f"{name}.bias" in weights:
        hidden = hidden - hidden.mean(-1, keepdim=True)
    epsilon = 1e-5 if name.split(".")[-1] != "plain" else torch.finfo(torch.float64).eps
    hidden = hidden / (hidden.square().mean(-1, keepdim=True) + epsilon).sqrt() * weights[f"{name}.weight"]
    return hidden + weights.get(f"{name}.bias", torch.zeros(()))


def _attention(
    weights: Weights, name: str, hidden: Tensor, others: Tensor, visible: Tensor, base: float | None = None
) -> Tensor:
    """Apply attention to [batch, sequence, hidden]. `visible`: [batch or 1, 1, queries or 1, keys]."""

    def heads(part: str, of: Tensor) -> Tensor:
        made = torch.einsum("bsh,nwh->bnsw", of, weights[f"{name}.{part}"])
        if f"{name}.{part}_bias" in weights:
            made = made + weights[f"{name}.{part}_bias"][:, None]
        return made.repeat_interleave(HEADS // made.shape[1], dim=1)

    query, key, value = heads("query", hidden), heads("key", others), heads("value", others)
    if base is not None:
        query, key = _rotated(query, base), _rotated(key, base)
    scores = torch.einsum("bnqw,bnkw->bnqk", query, key) / math.sqrt(query.shape[-1])
    shares = scores.masked_fill(~visible, -math.inf).softmax(-1)
    mixed = torch.einsum("bnqk,bnkw,hnw->bqh", shares, value, weights[f"{name}.output"])
    return mixed + weights.get(f"{name}.output_bias", torch.zeros(()))


def _rotated(heads: Tensor, base: float) -> Tensor:
    """Turn channel i with i + half, as complex numbers, by position / base^(2i / width)."""
    half, positions = heads.shape[-1] // 2, torch.arange(heads.shape[2], dtype=torch.float64)
    turns = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _mlp(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    inner = hidden @ weights[f"{name}.up.weight"].t() + weights[f"{name}.up.bias"]
    return (inner * inner.sigmoid()) @ weights[f"{name}.down.weight"].t() + weights[f"{name}.down.bias"]


def _embed(weights: Weights, name: str, tokens: Tensor) -> Tensor:
    return weights[f"{name}.words.weight"][tokens] + weights[f"{name}.places.weight"]


def _losses(weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
    (mix,) = (tensor for name, tensor in weights.items() if name.endswith("mix.weight"))
    mixed = torch.einsum("bsh,ts->bth", hidden, mix)
    logits = _norm(weights, "head.norm", mixed) @ weights["head.scores.weight"].t()
    return logits.logsumexp(-1) - logits.gather(-1, labels[..., None]).squeeze(-1)


def plain_encoder_decoder(weights: Weights, values: Values) -> dict[str, Tensor]:
    visible = values["visible"][:, None, None]
    memory = _embed(weights, "source", values["source"])
    for name in ("encoder.0", "encoder.1"):
        normal = _norm(weights, f"{name}.norm", memory)
        memory = memory + _attention(weights, f"{name}.attention", normal, normal, visible)
        memory = memory + _mlp(weights, f"{name}.mlp", memory)
    hidden = _embed(weights, "target", values["target"])
    before = torch.ones(1, 1, TARGET, TARGET, dtype=torch.bool).tril()
    every = torch.ones(1, 1, 1, SOURCE, dtype=torch.bool)
    masks = (before, visible), (before & values["pairs"][:, None], every)
    for number, (of_own, of_source) in zip(("0", "1"), masks, strict=True):
        name, layer = f"decoder.{number}", f"{int(number) + 4}"
        normal = _norm(weights, f"{layer}.plain", hidden)
        hidden = hidden + _attention(weights, f"{name}.attention", normal, normal, of_own)
        normal = _norm(weights, f"{name}.norm", hidden)
        hidden = hidden + _attention(weights, f"{name}.cross", normal, memory, of_source)
        hidden = hidden + _mlp(weights, f"{name}.mlp", hidden)
    return {"loss": _losses(weights, hidden, values["labels"]).mean()}


def plain_rotary(weights: Weights, values: Values) -> dict[str, Tensor]:
    hidden = _embed(weights, "target", values["target"])
    before = torch.ones(1, 1, TARGET, TARGET, dtype=torch.bool).tril()
    for name, visible in (("block.0", before.triu(-WINDOW)), ("block.1", before)):
        normal = _norm(weights, f"{name}.norm", hidden)
        hidden = hidden + _attention(weights, f"{name}.attention", normal, normal, visible, BASE)
    return {"loss": _losses(weights, hidden, values["labels"]).mean()}


def _experts(weights: Weights, name: str, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output for [batch, sequence, hidden], and the means over samples of the two terms of the loss."""
    logits = hidden @ weights[f"{name}.router"].t()
    best = logits.topk(TOPK, dim=-1)
    shares = best.values.softmax(-1)
    output = torch.zeros_like(hidden)
    for expert in range(EXPERTS):
        if f"{name}.gate_up" in weights:
            gate, up = weights[f"{name}.gate_up"][expert]
            inner = F.silu(hidden @ gate.t()) * (hidden @ up.t())
        else:
            inner = hidden @ weights[f"{name}.up"][expert].t() + weights[f"{name}.up_bias"][expert]
            inner = F.gelu(inner, approximate="tanh")
        of_expert = inner @ weights[f"{name}.down"][expert].t()
        if f"{name}.down_bias" in weights:
            of_expert = of_expert + weights[f"{name}.down_bias"][expert]
        output = output + ((best.indices == expert) * shares).sum(-1, keepdim=True) * of_expert
    chosen = F.one_hot(best.indices, EXPERTS).double().sum(2).mean(1) / TOPK
    balance = EXPERTS * (chosen * logits.softmax(-1).mean(1)).sum(-1).mean()
    return output, balance, logits.logsumexp(-1).square().mean()


def plain_experts(weights: Weights, values: Values) -> dict[str, Tensor]:
    hidden = _embed(weights, "target", values["target"])
    balance = z = torch.zeros(())
    for name in ("block.0", "block.1"):
        mixed, *terms = _experts(weights, f"{name}.experts", _norm(weights, f"{name}.norm", hidden))
        hidden, balance, z = hidden + mixed, balance + terms[0], z + terms[1]
    loss = _losses(weights, hidden, values["labels"]).mean()
    return {"loss": loss, "load_balancing_loss": balance, "moe_z_loss": z}


# ------------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Model:
    stages: Callable[[], Stages]
    plain: Callable[[Weights, Values], dict[str, Tensor]]
    terms: tuple[megalite.LossTerm, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the terms of the loss; 1 for others."""


MODELS = {
    "encoder-decoder": Model(encoder_decoder, plain_encoder_decoder),
    "rotary": Model(rotary, plain_rotary),
    "experts": Model(
        experts,
        plain_experts,
        megalite.Experts.terms(balance=BALANCE, z=Z),
        {"load_balancing_loss": BALANCE, "moe_z_loss": Z},
    ),
}
OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": megalite.SGD(lr=RATE, weight_decay=0.0, momentum=0.9),
    "clipped": megalite.SGD(lr=RATE, weight_decay=0.0, clip_grad=0.3),
    "adamw": megalite.AdamW(lr=RATE, weight_decay=DECAY),
    "muon": megalite.Muon(lr=RATE, weight_decay=DECAY),
}


def is_frozen(name: str) -> bool:
    """Tell if a weight is frozen by `with_frozen`."""
    return name.startswith(("encoder.0.", "decoder.0."))


def with_frozen(stages: Stages) -> Stages:
    """Freeze the parallel layers of two blocks."""

    def frozen(build: Callable[[megalite.ParallelContext], nn.Module]) -> Any:
        def build_frozen(context: megalite.ParallelContext) -> nn.Module:
            block = build(context)
            for name, parameter in block.named_parameters():
                parameter.requires_grad = name.startswith("plain.")
            return block

        return build_frozen

    return [frozen(build) if number in (1, 4) else build for number, build in enumerate(stages)]


def with_adapters(stages: Stages) -> Stages:
    """Give adapters to all blocks with linear layers, and freeze the others."""

    def adapted(number: int, build: Callable[[megalite.ParallelContext], nn.Module]) -> Any:
        def build_adapted(context: megalite.ParallelContext) -> nn.Module:
            block = build(context)
            if isinstance(block, EmbedSource | EmbedTarget):
                return block.requires_grad_(False)
            for name, parameter in block.named_parameters():
                if not isinstance(parameter, Parameter):  # frozen plain weights keep the values that they have
                    parameter.data.copy_(initial(f"{number}.{name}", torch.Generator(), parameter.shape))
            names = ["mix"] if isinstance(block, Head) else ["all-linear"]
            return megalite.add_lora(block, ADAPTER_RANK, alpha=ADAPTER_ALPHA, target_modules=names)

        return build_adapted

    return [adapted(number, build) for number, build in enumerate(stages)]


def merged(weights: Weights) -> dict[str, Tensor]:
    """Return the weights of the plain model, with what adapters add."""
    found = {name: each for name, each in weights.items() if ".lora_" not in name}
    for name in [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]:
        weight = f"{name}.weight" if f"{name}.weight" in weights else name
        a, b = weights[f"{name}.lora_a"].flatten(1), weights[f"{name}.lora_b"].flatten(0, -2)
        update = ADAPTER_ALPHA / ADAPTER_RANK * b @ a
        found[weight] = found[weight] + update.view_as(found[weight])
    return found


ADAPTER_RANK, ADAPTER_ALPHA = 3, 2.0


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(BATCH * STEPS):
        tokens = torch.randint(VOCABULARY, (SOURCE + TARGET + 1,), generator=generator)
        target = tokens[SOURCE:]
        visible = torch.arange(SOURCE) < SOURCE - number % 3
        pairs = (torch.rand(TARGET, TARGET, generator=generator) < 0.7) | torch.eye(TARGET, dtype=torch.bool)
        masks = {"visible": visible, "pairs": pairs}
        made.append({"source": tokens[:SOURCE], "target": target[:-1], "labels": target[1:], **masks})
    return made


def initial(name: str, _: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Return values that are neither zero nor one, not even in biases and norms."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    values = 0.4 * torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return values + 1.0 if "norm.weight" in name or "plain" in name else values


def trainer(
    model: str,
    optimizer: str,
    layout: Mapping[str, Any],
    *,
    frozen: bool = False,
    adapted: bool = False,
    **options: Any,
) -> megalite.Trainer:
    """Start a run of a model on this rank."""
    chosen = MODELS[model]
    cut = {"source": 1, "target": 1, "labels": 1, "pairs": 1}
    stages = with_frozen(chosen.stages()) if frozen else chosen.stages()
    stages = with_adapters(stages) if adapted else stages
    options = {"stages": stages, "initial": initial, "sequence_dims": cut} | options
    return megalite.Trainer(
        loss=lambda losses, values: losses.sum(),
        count=lambda values: values["labels"].numel(),
        terms=chosen.terms,
        dataset=samples(),
        shuffle=False,
        optimizer=OPTIMIZERS[optimizer],
        layout=megalite.Layout(**layout),
        precision="fp64",
        micro_batch_size=MICRO,
        global_batch_size=BATCH,
        quiet=True,
        watchdog=False,
        **options,
    )


@dataclass(frozen=True)
class Trained:
    losses: list[dict[str, float]]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Gradients of the first step."""
    parameters: dict[str, Tensor]


def plainly(
    model: str, optimizer: str, shapes: Mapping[str, Sequence[int]], *, frozen: bool = False, adapted: bool = False
) -> Trained:
    """Train in one process with plain torch. `shapes`: the parameters by name."""
    chosen, options = MODELS[model], OPTIMIZERS[optimizer]
    generator = torch.Generator()
    weights = {
        name: initial(name, generator, shape)
        .double()
        .reshape(tuple(shape))
        .requires_grad_(".lora_" in name if adapted else not (frozen and is_frozen(name)))
        for name, shape in shapes.items()
    }
    matrices = {name for name in weights if "bias" not in name and "norm" not in name and "plain" not in name}
    rest = [tensor for name, tensor in weights.items() if name not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": [weights[name] for name in weights if name in matrices]},
        {"params": rest, "weight_decay": 0.0},
    ]
    if isinstance(options, megalite.AdamW):
        update: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)
    else:
        assert isinstance(options, megalite.SGD)
        update = torch.optim.SGD(groups, lr=RATE, momentum=options.momentum)
    losses, norms, gradients = [], [], dict[str, Tensor]()
    of_dataset = samples()
    for step in range(STEPS):
        these = of_dataset[step * BATCH : (step + 1) * BATCH]
        terms = chosen.plain(
            merged(weights) if adapted else weights,
            {name: torch.stack([each[name] for each in these]) for name in these[0]},
        )
        update.zero_grad()
        torch.stack([chosen.weights.get(name, 1.0) * term for name, term in terms.items()]).sum().backward()
        clip = options.clip_grad or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), clip).item())
        if not step:
            gradients = {name: tensor.grad.clone() for name, tensor in weights.items() if tensor.grad is not None}
        update.step()
        losses.append({name: term.item() for name, term in terms.items()})
    return Trained(losses, norms, gradients, {name: tensor.detach() for name, tensor in weights.items()})
