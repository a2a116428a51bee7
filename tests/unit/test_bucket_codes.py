"""Codes that ZeRO 3 gathers in place of values: how many bytes, how long they are kept, and who has values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from torch import nn

from megalite.checkpoint.loading import _writable
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.optim.buckets import Bucket, DataParallel, make_buckets
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.rounded_products import Rounding, Roundings, kept_codes
from megalite_kernels.recipes import recipe
from megalite_kernels.weight_parts import Matrices

MODEL = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=2, max_position_embeddings=4, vocab_size=8)


def made(gathers_codes: bool, name: str = "blockwise", mesh: ParallelMesh | None = None) -> tuple[GPT, list[Bucket]]:
    """Return a network in bf16 whose middle layer is not rounded, and its buckets under ZeRO 3."""
    each, mesh = Rounding(recipe(name), gathers_codes=gathers_codes), mesh or UnconnectedMesh(world_size=2)
    network = GPT(MODEL, ParallelMesh(), dtype=torch.bfloat16, roundings=Roundings((each, None, each)))
    initialize(network, 1)
    return network, make_buckets([network], mesh, DataParallel(torch.float32, zero_stage=3), blocks=[network.blocks()])


def gather(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.begin_parameter_gather()
        bucket.finish_parameter_gather()


def free(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.free_parameters()


def coded(network: GPT) -> Iterator[nn.Parameter]:
    return (each for each in network.parameters() if getattr(each, "coded", None) is not None)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_half_of_the_bytes_are_sent(name: str) -> None:
    """The weights of rounded layers take a byte for an element, and the rest of the network as many as before."""
    sent = dict[bool, dict[str, int]]()
    for gathers_codes in (False, True):
        mesh = UnconnectedMesh(world_size=2)
        network, buckets = made(gathers_codes, name, mesh)
        heard = sent[gathers_codes] = {"all-gather": 0, "all-reduce": 0}
        mesh.traffic.listener = lambda kind, ranks, size, heard=heard: heard.update({kind: heard[kind] + size})
        gather(buckets)
    weights = sum(each.numel() for each in coded(network))
    assert weights == 2 * 12 * MODEL.hidden_size**2
    assert sent[False] == {"all-gather": sent[True]["all-gather"] + weights, "all-reduce": 0}
    tiles = 2 * 4 if name == "tensorwise" else 2 * (2 + 1 + 2 + 2)
    assert sent[True]["all-reduce"] == 4 * tiles


def test_products_find_codes_and_others_no_numbers() -> None:
    """Also within a step, which keeps codes that are made of values."""
    network, buckets = made(True)
    up = network.layers[0].mlp.up.weights[0]  # type: ignore[union-attr]
    assert up.isnan().all()
    gather(buckets)
    with kept_codes([network]):
        assert up.codes.forward.codes.shape == up.shape
        assert up.isnan().all()
        assert network.layers[1].mlp.up.weights[0].isfinite().all()  # type: ignore[union-attr]
    assert up.codes is not None
    free(buckets)
    assert up.codes is None
    assert all(not bucket.parameters.untyped_storage().nbytes() for bucket in buckets)


def test_a_step_makes_codes_once_and_the_next_one_anew() -> None:
    _, buckets = made(True)
    (bucket, *_) = (each for each in buckets if each.codes is not None)
    weight = bucket.slots[0].parameter

    def scale_of() -> float:
        gather([bucket])
        scale: float = weight.codes.forward.scales.max().item()  # type: ignore[index]
        free([bucket])
        return scale

    with mock.patch.object(Matrices, "codes", autospec=True, side_effect=Matrices.codes) as counted:
        first = scale_of()
        bucket.begin_uses()
        assert [scale_of() for _ in range(3)] == [first] * 3
        assert counted.call_count == 2 * len(bucket.slots)
        bucket.end_uses()
        bucket.parameter_shard.mul_(4)
        assert scale_of() == 4 * first  # as an evaluation
        bucket.parameter_shard.mul_(4)
        bucket.begin_uses()
        assert scale_of() == 16 * first


def test_a_load_gives_their_values_no_memory() -> None:
    each = Rounding(recipe("blockwise"), gathers_codes=True)
    network = GPT(MODEL, ParallelMesh(), dtype=torch.bfloat16, roundings=Roundings((each,) * 3))
    initialize(network, 1)
    config, options = OptimizerConfig(lr=1e-3), DataParallel(torch.float32, zero_stage=3)
    optimizer = make_optimizer([network], UnconnectedMesh(world_size=2), config, options, blocks=[network.blocks()])
    with _writable(network, optimizer):
        assert all(weight.isnan().all() for weight in coded(network))
    assert {weight.untyped_storage().nbytes() for weight in coded(network)} == {2}
