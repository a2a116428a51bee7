"""The oracle: GPT-2 and Llama as one writes them down, on one process, for every layout to be compared with.

It imports nothing of megalite, so that no mistake can be shared, and takes its weights by global logical name:

    embedding.word [vocabulary, hidden]                 embedding.position [positions, hidden] (learned positions only)
    layers.{i}.input_norm.weight|bias [hidden]          layers.{i}.mlp_norm.weight|bias [hidden]
    layers.{i}.attention_output_norm|mlp_output_norm.weight|bias [hidden] (sandwich norms, and norms behind alone)
    layers.{i}.attention.query [heads, head_dim, hidden]         ...query_bias [heads, head_dim]
    layers.{i}.attention.key_value [groups, 2, head_dim, hidden] ...key_value_bias [groups, 2, head_dim]
    layers.{i}.attention.gate [heads, head_dim, hidden]          ...gate_bias [heads, head_dim] (gated output only)
    layers.{i}.attention.sink [heads] (learned sinks only)
    layers.{i}.attention.query_norm|key_norm.weight|bias [head_dim] (qk-norm only)
    layers.{i}.attention.output [hidden, heads, head_dim]        ...output_bias [hidden]
    layers.{i}.mlp.gate_up [2, ffn, hidden] (gated) or mlp.up [ffn, hidden]     ...gate_up_bias|up_bias
    layers.{i}.mlp.down [hidden, ffn]                            ...down_bias [hidden]
    final_norm.weight|bias [hidden]                     output [vocabulary, hidden] (untied only)

Layers with experts: experts_oracle.py. Recurrent layers: mixers_oracle.py. Rotary positions: rotary_oracle.py. Latent
attention: latent_oracle.py.

What a weight's presence or shape tells (biases, qk-norm, tying, numbers of heads, of layers) is not said again.
Everything is computed in the dtype of the weights; rotary angles in float64. What is dropped: `dropout_rule.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dropout_rule import Dropout as Dropout
from tests.experts_oracle import Experts, Inputs, Record
from tests.latent_oracle import Latents
from tests.mixers_oracle import Mixers
from tests.sparse_oracle import Choices

Weights = Mapping[str, Tensor]
Halves = tuple[
    int | None, int | None
]  # numbers in the names of a layer's attention and feed-forward; None: it has none
RECURRENT = {"M": "mamba", "G": "gated_delta", "L": "short_convolution", "K": "kimi_delta"}
"""Letters of layers that are not halves of a GPT's block."""


@dataclass(frozen=True)
class Routing:
    """Inputs of the routers besides the hidden states, and what they did, by the name of the layer's weights."""

    biases: Mapping[str, Tensor] = field(default_factory=dict)
    padding: Tensor | None = None  # [batch, sequence], true for tokens that fill up a sample
    records: dict[str, Record] = field(default_factory=dict)
    replayed: Mapping[str, Tensor] = field(default_factory=dict)  # [batch, sequence, topk], -1 for the router's choice
    offsets: Mapping[str, Tensor] = field(default_factory=dict)  # of quantile balancing
    choices: Choices = field(default_factory=Choices)  # of indexers


NOTHING_DROPPED = Dropout(0, (), 0.0, 0.0)


@dataclass(frozen=True)
class Oracle(Latents):
    """Options of the network that the weights do not determine; names and defaults are Megatron-LM's."""

    normalization: str = "LayerNorm"  # or RMSNorm
    activation: str = "gelu"  # (its tanh form), exact_gelu, squared_relu; swiglu, geglu, exact_geglu or quick_geglu
    glu_offset: float = 0.0  # of the up projection
    glu_limit: float = math.inf  # of the gate from above, and of the up projection on both sides
    off_by_one: bool = False  # a softmax with one more logit, 0, that has no value
    unrotated: tuple[int, ...] = ()  # numbers of the layers, or letters, without rotary positions
    windows: tuple[int | None, ...] = ()  # of each layer, how many tokens one sees, itself among them; None: all
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each layer adds
    logit_divisor: float = 1.0
    score_divisor: float | None = None  # the root of the head's width
    logit_cap: float = math.inf
    parallel_residual: bool = False  # attention and feed-forward both read the layer's input
    experts: Experts | None = None  # of the layers with a router
    pattern: str | None = (
        None  # a letter a layer: *, + or D attention, - or E feed-forward, M, G, L, K; None: both halves in each
    )
    mixers: Mixers = field(default_factory=Mixers)

    def logits(
        self,
        weights: Weights,
        tokens: Tensor,
        positions: Tensor,
        document_ids: Tensor | None = None,
        dropout: Dropout = NOTHING_DROPPED,
        routing: Routing | None = None,
    ) -> Tensor:
        """`[batch, sequence, vocabulary]` from tokens, positions and document ids, each `[batch, sequence]`.

        A token sees itself and what comes before it, in its own document if `document_ids` are given.
        """
        return self.logits_of(weights, self.normed(weights, tokens, positions, document_ids, dropout, routing))

    def logits_of(self, weights: Weights, normed: Tensor) -> Tensor:
        """The logits of hidden states behind a final norm."""
        logits = F.linear(normed, weights.get("output", weights["embedding.word"])) / self.logit_divisor
        return capped(logits, self.logit_cap)

    def normed(
        self,
        weights: Weights,
        tokens: Tensor,
        positions: Tensor,
        document_ids: Tensor | None = None,
        dropout: Dropout = NOTHING_DROPPED,
        routing: Routing | None = None,
    ) -> Tensor:
        """The hidden states behind the final norm, `[batch, sequence, hidden]`."""
        hidden = weights["embedding.word"][tokens] * self.embedding_scale
        if self.position_embedding_type == "learned_absolute":
            hidden = hidden + weights["embedding.position"][positions]
        hidden = self.run(weights, dropout.embedding(hidden), positions, document_ids, dropout, routing or Routing())
        return self.norm(weights, "final_norm", hidden)

    def letters(self, weights: Weights) -> str:
        """The letters of the layers, those of both halves of a layer in order."""
        layers = 1 + max((int(name.split(".")[1]) for name in weights if name.startswith("layers.")), default=-1)
        latents = any(".latent_attention." in name for name in weights)
        return self.pattern or ("+-" if latents else "*-") * layers

    def run(
        self,
        weights: Weights,
        hidden: Tensor,
        positions: Tensor,
        document_ids: Tensor | None,
        dropout: Dropout,
        routing: Routing,
    ) -> Tensor:
        """All layers; hidden `[batch, sequence, hidden]`."""
        sequence = positions.shape[1]
        visible = torch.ones(sequence, sequence, dtype=torch.bool).tril().expand(len(positions), 1, -1, -1)
        if document_ids is not None:
            visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
        layers = len(self.letters(weights)) // 2
        halves = halves_of(self.pattern) if self.pattern else [(number, number) for number in range(layers)]
        for place, (layer, window) in enumerate(zip(halves, self.windows or [None] * len(halves), strict=True)):
            if self.pattern is not None and (letter := self.pattern[place]) in RECURRENT:
                number = self.pattern[:place].count(letter)
                hidden = self.recurrent(weights, letter, number, hidden, document_ids, dropout)
                continue
            apart = torch.arange(sequence)[:, None] - torch.arange(sequence)
            near = visible if window is None else visible & (apart < window)
            base = self.window_rotary_base
            model = self if window is None or base is None else self.in_windows(base)
            if place in self.unrotated:
                model = replace(self, position_embedding_type="none")
            hidden = model.block(weights, layer, hidden, positions, near, dropout, routing)
        return hidden

    def in_windows(self, rotary_base: float) -> Oracle:
        """Return the oracle for layers with a window, if these have another rotary base."""
        plain = {"position_embedding_type": "rope", "interpolation": 1.0, "use_rope_scaling": False}
        return replace(self, rotary_base=rotary_base, **plain)

    def block(
        self,
        weights: Weights,
        halves: Halves,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        dropout: Dropout = NOTHING_DROPPED,
        routing: Routing | None = None,
    ) -> Tensor:
        """One layer; hidden `[batch, sequence, hidden]`, visible `[batch, 1, sequence, sequence]`."""
        read = hidden
        if (number := halves[0]) is not None:
            layer, dropped = f"layers.{number}.", functools.partial(dropout.probabilities, number)
            if layer + "latent_attention.output" in weights:
                routing = routing or Routing()
                counted = None if routing.padding is None else ~routing.padding
                shared = (positions, visible, dropped, routing.choices, counted)
                attended = self.latent_layer(weights, layer + "latent_attention", hidden, *shared)
                hidden = hidden + self.residual_scale * dropout.drop(attended, dropout.hidden, number, 8)
            else:
                normed = self.norm_of_input(weights, layer + "input_norm", hidden)
                attended = self.attention(weights, layer + "attention.", normed, positions, visible, dropped)
                if layer + "attention_output_norm.weight" in weights:
                    attended = self.norm(weights, layer + "attention_output_norm", attended)
                hidden = hidden + self.residual_scale * dropout.attended(number, attended)
        if (number := halves[1]) is not None:
            layer = f"layers.{number}."
            normed = self.norm_of_input(weights, layer + "mlp_norm", read if self.parallel_residual else hidden)
            if layer + "moe.router" in weights:
                transformed = self.moe(weights, layer + "moe.", normed, routing or Routing())
            else:
                transformed = self.mlp(weights, layer + "mlp.", normed)
            if layer + "mlp_output_norm.weight" in weights:
                transformed = self.norm(weights, layer + "mlp_output_norm", transformed)
            hidden = hidden + self.residual_scale * dropout.transformed(number, transformed)
        return hidden

    def recurrent(
        self, weights: Weights, letter: str, number: int, hidden: Tensor, documents: Tensor | None, dropout: Dropout
    ) -> Tensor:
        """One layer of a kind in `RECURRENT`, the one with this number of its kind."""
        layer, kind = f"layers.{number}.", RECURRENT[letter]
        normed = self.norm_of_input(weights, f"{layer}{kind}_norm", hidden)
        mixed = getattr(self.mixers, kind)(weights, f"{layer}{kind}.", normed, documents)
        if f"{layer}{kind}_output_norm.weight" in weights:
            mixed = self.norm(weights, f"{layer}{kind}_output_norm", mixed)
        dropped = dropout.drop(mixed, dropout.hidden, number, 4 + list(RECURRENT).index(letter))
        return hidden + self.residual_scale * dropped

    def norm_of_input(self, weights: Weights, name: str, hidden: Tensor) -> Tensor:
        """Return the input as it is where a layer has its norms behind."""
        return self.norm(weights, name, hidden) if name + ".weight" in weights else hidden

    def norm(self, weights: Weights, name: str, hidden: Tensor) -> Tensor:
        """Over the last dimensions, as many as the weight has."""
        weight, bias = weights[name + ".weight"] + float(self.norm_around_one), weights.get(name + ".bias")
        if self.normalization == "LayerNorm":
            return F.layer_norm(hidden, weight.shape, weight, bias, self.norm_epsilon)
        over = tuple(range(-weight.dim(), 0))
        return hidden * torch.rsqrt(hidden.pow(2).mean(over, keepdim=True) + self.norm_epsilon) * weight

    def attention(
        self,
        weights: Weights,
        name: str,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
        dropped: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Softmax attention written out; head h reads the keys and values of group h // (heads / groups)."""
        heads, head_dim, _ = weights[name + "query"].shape
        query = project(weights, name + "query", hidden)  # [batch, sequence, heads, head_dim]
        key, value = project(weights, name + "key_value", hidden).unbind(-2)  # [batch, sequence, groups, head_dim]
        if name + "query_norm.weight" in weights:
            query = self.norm(weights, name + "query_norm", query)
            key = self.norm(weights, name + "key_norm", key)  # over all heads together if its weight has two axes
        if self.position_embedding_type in ("rope", "yarn"):
            query, key = self.rotate(query, positions), self.rotate(key, positions)
        key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / (self.score_divisor or math.sqrt(head_dim))
        scores = self.capped(self.noted(name, scores, visible))
        scores = scores.masked_fill(~visible, -math.inf)
        if self.off_by_one or name + "sink" in weights:
            sink = weights.get(name + "sink", scores.new_zeros(heads))
            scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
        probabilities = torch.softmax(scores, dim=-1)[..., : visible.shape[-1]]
        context = torch.einsum("bhqk,bkhd->bqhd", dropped(probabilities), value)
        if name + "gate" in weights:
            context = context * torch.sigmoid(project(weights, name + "gate", hidden))
        output = F.linear(context.flatten(2), weights[name + "output"].flatten(1))
        return output + weights.get(name + "output_bias", 0)

    def mlp(self, weights: Weights, name: str, hidden: Tensor) -> Tensor:
        """The feed-forward half of a layer."""
        up = project(weights, name + ("gate_up" if self.activation.endswith("glu") else "up"), hidden)
        return F.linear(self.activate(up), weights[name + "down"]) + weights.get(name + "down_bias", 0)

    def activate(self, up: Tensor) -> Tensor:
        """The activation of `[..., 2, ffn]` with a gate, else of `[..., ffn]`."""
        if self.activation.endswith("glu"):
            gate, up = up.unbind(-2)
            up = up.clamp(-self.glu_limit, self.glu_limit) + self.glu_offset
            return ACTIVATIONS[self.activation](gate.clamp(max=self.glu_limit)) * up
        return ACTIVATIONS[self.activation](up)

    def moe(self, weights: Weights, name: str, hidden: Tensor, routing: Routing) -> Tensor:
        """The feed-forward half of a layer with experts."""
        assert self.experts is not None
        inputs = Inputs(
            routing.biases.get(name), routing.padding, routing.replayed.get(name), routing.offsets.get(name)
        )
        output = self.experts.layer(weights, name, hidden, self.activate, inputs, routing.records)
        if name + "shared.down" not in weights:
            return output
        shared = self.mlp(weights, name + "shared.", hidden)
        if name + "shared_gate" in weights:
            shared = shared * torch.sigmoid(F.linear(hidden, weights[name + "shared_gate"]))
        return output + shared


ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "exact_gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
}
ACTIVATIONS |= {"geglu": ACTIVATIONS["gelu"], "exact_geglu": ACTIVATIONS["exact_gelu"]}


def halves_of(pattern: str) -> list[Halves]:
    """The halves of layers of one letter: *, + and D together, - and E together have numbers; others have none."""
    together = {"*": "*", "+": "+D", "D": "+D", "-": "-E", "E": "-E"}
    numbers = [sum(map(pattern[:at].count, together.get(letter, ""))) for at, letter in enumerate(pattern)]
    return [
        (number if letter in "*+D" else None, number if letter in "-E" else None)
        for letter, number in zip(pattern, numbers, strict=True)
    ]


def capped(logits: Tensor, cap: float) -> Tensor:
    """Bent so that none is beyond the cap."""
    return logits if cap == math.inf else cap * torch.tanh(logits / cap)


def project(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    """A linear map to all but the last dimension of the weight, and its bias if there is one."""
    weight = weights[name]
    return F.linear(hidden, weight.flatten(0, -2)).unflatten(-1, weight.shape[:-1]) + weights.get(name + "_bias", 0)


def loss_sum_and_count(
    logits: Tensor, labels: Tensor, loss_mask: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of cross entropy times mask, and the sum of the mask; labels and mask `[batch, sequence]`.

    Smoothing gives a share of each label's probability to all entries alike; z-loss is that of arXiv:2204.02311.
    """
    log_denominators = logits.logsumexp(-1)
    surprise = log_denominators[..., None] - logits
    of_labels = surprise.gather(-1, labels[..., None]).squeeze(-1)
    losses = (1 - label_smoothing) * of_labels + label_smoothing * surprise.mean(-1) + z_loss * log_denominators**2
    mask = loss_mask.to(losses.dtype)
    return (losses * mask).sum(), mask.sum()
