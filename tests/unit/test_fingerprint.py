"""Fingerprints of frozen weights: from buckets and from files, of values and of their places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.fingerprint import _sum_of_bits, fingerprint, fingerprint_of, has_places
from megalite.config.adapters import AdaptersConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.conversion.adapters import InMemory
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.adapter import add_adapters
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import Box
from tests.unit.test_checkpoint import MODEL


def of_tensors(tensors: dict[str, Tensor], *, places: bool = True) -> str:
    return fingerprint_of(InMemory(tensors), tensors, lambda name: tensors[name].dtype, places=places)


@pytest.mark.parametrize("places", [True, False])
def test_buckets_have_the_fingerprint_of_their_whole_tensors(places: bool) -> None:
    network = GPT(MODEL, ParallelMesh())
    add_adapters(network, AdaptersConfig(lora_rank=2))
    initialize(network, 0)
    frozen = [each for each in named_pieces(network) if not each[0].requires_grad]
    whole = {piece.tensor.name: piece.view(parameter).detach().clone() for parameter, piece in frozen}
    parallel = DataParallel(torch.float32, bucket_size=500)
    optimizer = make_optimizer([network], ParallelMesh(), OptimizerConfig(lr=0.1), parallel)
    found = fingerprint(optimizer, ParallelMesh(), places=places)
    assert found == of_tensors(whole, places=places)
    assert has_places(found) is places


def test_the_order_of_elements_counts_but_in_the_first_version() -> None:
    values = torch.randn(6, 4, 5)
    others = [values.flip(0), values.flip(1), values.flip(2), values.roll(1, 0), values[[1, 0, 2, 3, 4, 5]]]
    assert len({of_tensors({"w": each}) for each in (values, *others)}) == 6
    assert len({of_tensors({"w": each}, places=False) for each in (values, *others)}) == 1
    assert of_tensors({"w": values}) != of_tensors({"v": values}) != of_tensors({"v": values.double()})
    assert not has_places(of_tensors({"w": values}, places=False))


def test_boxes_add_up_to_the_whole() -> None:
    values = torch.randn(6, 4, 5).bfloat16()
    total = torch.zeros((), dtype=torch.int64)
    for rows, columns in ((slice(0, 2), slice(0, 5)), (slice(2, 6), slice(0, 3)), (slice(2, 6), slice(3, 5))):
        part = values[rows, :, columns]
        box = Box((rows.start, 0, columns.start), tuple(part.shape))
        total += _sum_of_bits(part, values.shape, box, True)
    assert int(total) == int(_sum_of_bits(values, values.shape, Box.whole(tuple(values.shape)), True))
