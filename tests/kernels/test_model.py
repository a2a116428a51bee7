"""A small network on the kernels: its loss and gradients are those of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite_kernels.implementation import Kernels, use
from tests.harness.close import assert_gradient_close, assert_number_close
from tests.harness.stages import loss_of
from tests.kernels.cells import cells, named

TOKENS, VOCABULARY = 8, 19
GPT2 = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=40, max_position_embeddings=TOKENS,
    vocab_size=VOCABULARY, make_vocab_size_divisible_by=8, init_method_std=0.2, hidden_dropout=0.1,
    attention_dropout=0.0,
)  # fmt: skip
LLAMA = replace(
    GPT2, position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
    qk_layernorm=True, untie_embeddings_and_output_weights=True, max_position_embeddings=None,
)  # fmt: skip
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "geglu": replace(GPT2, geglu=True, use_parallel_residual=True)}
OPERATIONS = ("norm", "residual_norm", "gelu", "swiglu", "rotary", "cross_entropy")
NODES = {"norm": "NormBackward", "gelu": "ActivationBackward", "swiglu": "ActivationBackward"}


def loss_and_gradients(config: ModelConfig) -> tuple[list[Tensor], set[str]]:
    """Return the loss with gradients, and the names of the nodes of its graph."""
    network = GPT(config, ParallelMesh())
    initialize(network, 1234)
    text = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    positions, mask = torch.arange(TOKENS)[None], torch.ones(1, TOKENS)
    loss = loss_of(network, MicroBatch(text[:, :-1], positions, None, text[:, 1:], mask, RandomKey(0, (0,))))
    nodes, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in network.parameters())], {node.name() for node in nodes}


@pytest.mark.wide_except("llama-residual_norm", "llama-rotary", "gpt2-cross_entropy", "geglu-swiglu")
@pytest.mark.parametrize(
    ("name", "left"),
    cells(
        named([*CONFIGS]),
        named(["none", *OPERATIONS]),
        kept=lambda name, left: (left + name) % len(CONFIGS) == 0,  # each operation is left once
    ),
)
def test_the_kernels_give_the_references_loss_and_gradients(name: str, left: str) -> None:
    """Also where one operation is left to the reference."""
    config = CONFIGS[name]
    use(Kernels("reference"))
    (expected, *gradients), nodes = loss_and_gradients(config)
    assert not nodes & set(NODES.values())
    use(Kernels("triton", to_reference=(left,) if left in OPERATIONS else ()))
    (loss, *found), nodes = loss_and_gradients(config)
    activation = "swiglu" if config.swiglu or config.geglu else "gelu"
    assert nodes & set(NODES.values()) == {NODES[operation] for operation in ("norm", activation) if operation != left}
    assert_number_close(loss.item(), expected.item(), relative=5e-7)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    for ours, theirs in zip(found, gradients, strict=True):
        # fp32: other roundings in one operation change the inputs of all products after it, 2.4e-6 on some CPUs.
        assert_gradient_close(ours, theirs, norm, relative=5e-6)
