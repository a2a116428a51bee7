"""The rival of the GPU check computes what megalite does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_rival
from benchmarks.gpu_shapes import LAYERS_OF_8B, LLAMA_1B, SMALL, Shape
from benchmarks.plain_pytorch import PlainLlama
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from tests.harness.close import assert_number_close
from tests.harness.stages import loss_of


def plain(shape: Shape) -> PlainLlama:
    sizes = shape.vocabulary, shape.layers, shape.hidden, shape.heads, shape.ffn, shape.sequence
    return PlainLlama(*sizes, groups=shape.groups, tied=shape.tied)


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_weights_give_the_same_loss_and_norm(tied: bool) -> None:
    shape = replace(SMALL, tied=tied, vocabulary=256)
    config = resolve(parse_arguments(shape.flags(1).split(), lambda *_: {}).config, 1).model
    network, rival = GPT(config, ParallelMesh()), plain(shape)
    initialize(network, 1234)
    ours = dict(network.named_parameters())
    with torch.no_grad():
        for name, parameter in rival.named_parameters():
            parameter.copy_(weight_of(name, ours, shape))
    tokens = torch.randint(256, (2, shape.sequence + 1), generator=torch.Generator().manual_seed(0))
    positions, mask = torch.arange(shape.sequence).expand(2, -1), torch.ones(2, shape.sequence)
    batch = MicroBatch(tokens[:, :-1], positions, None, tokens[:, 1:], mask, RandomKey(0, (0, 1)))
    losses = loss_of(network, batch) / mask.sum(), rival(tokens[:, :-1], tokens[:, 1:])
    assert_number_close(losses[1].item(), losses[0].item(), relative=1e-6)
    norms = []
    for loss, parameters in zip(losses, (ours.values(), rival.parameters()), strict=True):
        gradients = torch.autograd.grad(loss, list(parameters))
        norms.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
    assert_number_close(norms[1], norms[0], relative=1e-5)


NAMES = {
    "embedding": "embedding.word.weight", "norm": "head.norm.weight", "output": "head.output.weights.0",
    "norms.0": "input_norm.weight", "norms.1": "mlp_norm.weight", "qkv": "attention.query_key_value.weights.0",
    "out": "attention.output.weight", "gate_up": "mlp.up.weights.0", "down": "mlp.down.weight",
}  # fmt: skip


def weight_of(name: str, ours: dict[str, torch.nn.Parameter], shape: Shape) -> torch.Tensor:
    """Return megalite's weight for the rival's parameter: there, all keys come before all values."""
    layer = re.match(r"layers\.\d+\.", name)
    prefix = "" if layer is None else layer[0]
    weight = ours[prefix + NAMES[name.removeprefix(prefix)]]
    if not name.endswith("qkv"):
        return weight
    query, key_value = weight.split([shape.hidden, weight.shape[0] - shape.hidden])
    width = shape.hidden // shape.heads
    keys, values = key_value.view(shape.groups, 2, width, shape.hidden).unbind(1)
    return torch.cat([query, keys.flatten(0, 1), values.flatten(0, 1)])


@pytest.mark.wide_except("1B")
@pytest.mark.parametrize("shape", [LLAMA_1B, *LAYERS_OF_8B], ids=["1B", "8 layers", "4 layers"])
def test_shapes_are_valid_and_those_of_llama(shape: Shape) -> None:
    config = resolve(parse_arguments(shape.flags(1).split(), lambda *_: {}).config, 1)
    with torch.device("meta"):
        rival = sum(parameter.numel() for parameter in plain(shape).parameters())
    network = GPT(config.model, ParallelMesh(device=torch.device("meta")))
    assert rival == sum(parameter.numel() for parameter in network.parameters())
    if shape == LLAMA_1B:
        assert rival == 1_235_814_400  # as published


def test_it_writes_a_line_a_step_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torch.manual_seed(0)
    gpu_rival.train(SMALL, gpu_rival.PLAIN, torch.device("cpu"), tmp_path / "steps")
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [step["iteration"] for step in steps] == list(range(1, SMALL.steps + 1))
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert all(step["iteration_time_s"] > 0 and step["grad_norm"] > 0 for step in steps)
