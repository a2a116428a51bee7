"""Layers of other kinds than attention, with the weights of those of transformers, give their outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.recurrent_layers import kimi_twin, tensors_of
from megalite.model.batch import LayerContext
from megalite.model.kimi_delta import KimiDelta, KimiDeltaSizes
from megalite.model.short_convolution import ConvolutionSizes, ShortConvolution
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag

HIDDEN, TOKENS, BATCH = 24, 70, 2


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the layer's initial weights, with noise, by the last part of their names."""
    initialize(layer, seed=1)
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return tensors_of(layer)


def assert_agree(layer: nn.Module, twin: nn.Module) -> None:
    """Compare outputs, and gradients of the input, in fp32."""
    layout = SequenceLayout.cut(TOKENS, zigzag(1), 0)
    context = LayerContext(None, None, {}, RandomKey(0, (0,)), layout, layout.runs)
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3), requires_grad=True)
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
    found, expected = layer(hidden, context), twin(hidden.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(output, hidden, gradient)[0] for output in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution(bias: bool) -> None:
    from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv

    layer = ShortConvolution(ParallelContext(ParallelMesh()), "layer", ConvolutionSizes(HIDDEN, bias=bias))
    weights = weights_of(layer)
    twin = Lfm2ShortConv(Lfm2Config(hidden_size=HIDDEN, num_hidden_layers=1, conv_bias=bias, layer_types=["conv"]), 0)
    parts: dict[str, Tensor] = {
        "in_proj.weight": torch.cat([weights[part] for part in ("B", "C", "x")]),
        "conv.weight": weights["conv"].unsqueeze(1),
        "out_proj.weight": weights["output"],
    }
    if bias:
        parts["in_proj.bias"] = torch.cat([weights[f"{part}_bias"] for part in ("B", "C", "x")])
        parts |= {"conv.bias": weights["conv_bias"], "out_proj.bias": weights["output_bias"]}
    twin.load_state_dict(parts)
    assert_agree(layer, twin)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kimi_delta_attention(bound: float | None) -> None:
    """Decays under the bound are those of GLM-5.3."""
    sizes = KimiDeltaSizes(HIDDEN, heads=3, width=8, bound=bound)
    layer = KimiDelta(ParallelContext(ParallelMesh()), "layer", sizes)
    weights = weights_of(layer)
    assert_agree(layer, kimi_twin(weights, bound))
