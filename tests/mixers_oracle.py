"""The oracle of recurrent layers: token by token, as arXiv:2405.21060, 2412.06464 and 2510.26692 define them.

It imports nothing of megalite, and takes weights by global logical name:

    layers.{i}.mamba.z|x [heads, width, hidden]    ...B|C [groups, state, hidden]    ...dt [heads, hidden]
    layers.{i}.mamba.conv_x|conv_B|conv_C [heads or groups, channels, taps]          ..._bias [same, channels]
    layers.{i}.mamba.dt_bias|A_log|D [heads]       ...norm.weight [heads, width]     ...output [hidden, heads, width]

    layers.{i}.gated_delta.query|key [key heads, width, hidden]       ...value|z [heads, value width, hidden]
    layers.{i}.gated_delta.beta|alpha [heads, hidden]                 ...conv_query|conv_key|conv_value [..., taps]
    layers.{i}.gated_delta.dt_bias|A_log [heads]   ...norm.weight [value width]      ...output [hidden, heads, width]

    layers.{i}.kimi_delta.query|key|value [heads, width, hidden]      ...beta [heads, hidden]
    layers.{i}.kimi_delta.decay_a|gate_a [width, hidden]              ...decay_b|gate_b [heads, width, width]
    layers.{i}.kimi_delta.conv_query|conv_key|conv_value [heads, width, taps]        ...dt_bias [heads, width]
    layers.{i}.kimi_delta.A_log [heads]            ...norm.weight [width]            ...output [hidden, heads, width]

    layers.{i}.short_convolution.B|C|x [channels, hidden]     ...B_bias|C_bias|x_bias|conv_bias [channels] (with biases)
    layers.{i}.short_convolution.conv [channels, taps]        ...output [hidden, channels]  ...output_bias [hidden]

Everything is in the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Mixers:
    """Options of recurrent layers that the weights do not determine."""

    least_step: float = 0.0
    largest_step: float | None = None
    strength: float = 1.0  # of a write of the gated delta net
    delta_epsilon: float = 1e-5  # of the norm of its output, and of that of Kimi delta attention
    bound: float | None = None  # of the logarithm of the decay of Kimi delta attention

    def mamba(self, weights: Weights, name: str, hidden: Tensor, documents: Tensor | None) -> Tensor:
        """Mamba-2 of `[batch, sequence, hidden]`; documents `[batch, sequence]`."""
        z, dt = _project(weights[name + "z"], hidden), _project(weights[name + "dt"], hidden)
        x, b, c = (
            _convolution(
                _project(weights[name + part], hidden),
                weights[name + "conv_" + part],
                weights[name + f"conv_{part}_bias"],
                documents,
            )
            for part in ("x", "B", "C")
        )
        heads, groups = x.shape[2], b.shape[2]
        step = F.softplus(dt + weights[name + "dt_bias"]).clamp(min=self.least_step)
        if self.largest_step is not None:
            step = step.clamp(max=self.largest_step)
        rate = -weights[name + "A_log"].exp()
        rows = []
        for row in range(len(hidden)):
            state, outputs = torch.zeros(heads, x.shape[3], b.shape[3], dtype=x.dtype), []
            for t in range(hidden.shape[1]):
                if t and documents is not None and documents[row, t] != documents[row, t - 1]:
                    state = torch.zeros_like(state)
                each = []
                for head in range(heads):
                    group = head * groups // heads
                    kept = state[head] * (step[row, t, head] * rate[head]).exp()
                    each.append(kept + step[row, t, head] * torch.outer(x[row, t, head], b[row, t, group]))
                state = torch.stack(each)
                read = [state[head] @ c[row, t, head * groups // heads] for head in range(heads)]
                outputs.append(torch.stack(read) + weights[name + "D"][:, None] * x[row, t])
            rows.append(torch.stack(outputs))
        gated = (torch.stack(rows) * F.silu(z)).flatten(2).unflatten(2, (groups, -1))
        normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        normed = normed.flatten(2) * weights[name + "norm.weight"].flatten()
        return F.linear(normed, weights[name + "output"].flatten(1))

    def gated_delta(self, weights: Weights, name: str, hidden: Tensor, documents: Tensor | None) -> Tensor:
        """Gated delta net of `[batch, sequence, hidden]`; documents `[batch, sequence]`."""
        q, k, v = (
            _convolution(_project(weights[name + part], hidden), weights[name + "conv_" + part], None, documents)
            for part in ("query", "key", "value")
        )
        z = _project(weights[name + "z"], hidden)
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        q = q / q.shape[-1] ** 0.5
        heads, key_heads = v.shape[2], k.shape[2]
        alpha, beta = (_project(weights[name + part], hidden) for part in ("alpha", "beta"))
        decay = (-weights[name + "A_log"].exp() * F.softplus(alpha + weights[name + "dt_bias"])).exp()
        beta = self.strength * torch.sigmoid(beta)
        rows = []
        for row in range(len(hidden)):
            state, outputs = torch.zeros(heads, k.shape[3], v.shape[3], dtype=v.dtype), []
            for t in range(hidden.shape[1]):
                if t and documents is not None and documents[row, t] != documents[row, t - 1]:
                    state = torch.zeros_like(state)
                each = []
                for head in range(heads):
                    of_key = k[row, t, head * key_heads // heads]
                    kept = decay[row, t, head] * state[head]
                    wrong = v[row, t, head] - of_key @ kept
                    each.append(kept + torch.outer(of_key, beta[row, t, head] * wrong))
                state = torch.stack(each)
                outputs.append(torch.stack([q[row, t, h * key_heads // heads] @ state[h] for h in range(heads)]))
            rows.append(torch.stack(outputs))
        output = torch.stack(rows)
        output = output / (output.square().mean(-1, keepdim=True) + self.delta_epsilon).sqrt()
        output = output * weights[name + "norm.weight"] * F.silu(z)
        return F.linear(output.flatten(2), weights[name + "output"].flatten(1))

    def kimi_delta(self, weights: Weights, name: str, hidden: Tensor, documents: Tensor | None) -> Tensor:
        """Kimi delta attention of `[batch, sequence, hidden]`; documents `[batch, sequence]`."""
        q, k, v = (
            _convolution(_project(weights[name + part], hidden), weights[name + "conv_" + part], None, documents)
            for part in ("query", "key", "value")
        )
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        q = q / q.shape[-1] ** 0.5
        raw, gate = (
            _project(weights[name + part + "_b"], F.linear(hidden, weights[name + part + "_a"]))
            for part in ("decay", "gate")
        )
        raw, rate = raw + weights[name + "dt_bias"], weights[name + "A_log"].exp()[:, None]
        decay = -rate * F.softplus(raw) if self.bound is None else self.bound * torch.sigmoid(rate * raw)
        beta = torch.sigmoid(_project(weights[name + "beta"], hidden))
        rows = []
        for row in range(len(hidden)):
            state, outputs = torch.zeros(*k.shape[2:], v.shape[3], dtype=v.dtype), []
            for t in range(hidden.shape[1]):
                if t and documents is not None and documents[row, t] != documents[row, t - 1]:
                    state = torch.zeros_like(state)
                kept = decay[row, t].exp()[:, :, None] * state
                wrong = v[row, t] - torch.einsum("hkv,hk->hv", kept, k[row, t])
                state = kept + torch.einsum("hk,hv->hkv", k[row, t], beta[row, t, :, None] * wrong)
                outputs.append(torch.einsum("hkv,hk->hv", state, q[row, t]))
            rows.append(torch.stack(outputs))
        output = torch.stack(rows)
        output = output / (output.square().mean(-1, keepdim=True) + self.delta_epsilon).sqrt()
        output = output * weights[name + "norm.weight"] * torch.sigmoid(gate)
        return F.linear(output.flatten(2), weights[name + "output"].flatten(1))

    def short_convolution(self, weights: Weights, name: str, hidden: Tensor, documents: Tensor | None) -> Tensor:
        """LFM2's short convolution of `[batch, sequence, hidden]`; documents `[batch, sequence]`."""
        b, c, x = (
            F.linear(hidden, weights[name + part], weights.get(name + part + "_bias")) for part in ("B", "C", "x")
        )
        mixed = _taps((b * x)[:, :, None], weights[name + "conv"][None], weights.get(name + "conv_bias"), documents)
        return F.linear(c * mixed.squeeze(2), weights[name + "output"], weights.get(name + "output_bias"))


def _project(weight: Tensor, hidden: Tensor) -> Tensor:
    return F.linear(hidden, weight.flatten(0, -2)).unflatten(-1, weight.shape[:-1])


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """Sum over the taps, then SiLU."""
    return F.silu(_taps(input, weight, bias, documents))


def _taps(input: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """Sum over the taps of `[batch, sequence, heads, channels]`; the last tap is the token itself."""
    taps, output = weight.shape[-1], torch.zeros_like(input) if bias is None else bias.expand_as(input)
    for back in range(min(taps, input.shape[1])):
        before = F.pad(input, (0, 0, 0, 0, back, 0))[:, : input.shape[1]]
        if documents is not None:
            same = F.pad(documents[:, back:] == documents[:, : documents.shape[1] - back], (back, 0))
            before = before * same[..., None, None]
        output = output + before * weight[..., taps - 1 - back]
    return output
