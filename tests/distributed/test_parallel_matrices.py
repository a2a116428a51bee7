"""Matrix-wise optimizers see the model's matrices, from the record alone, whatever holds them.

Muon (torch's) on whole matrices written out by hand, against the same update on the matrix views of logical tensors,
assembled from the ranks' pieces and scattered back into their fused, split and replicated parameters.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from megalite.model.gpt import GPT
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.sharding import LogicalTensor
from tests.distributed.layout_cell import Cell, make_cell, model_config
from tests.distributed.layout_expected import Tensors, assemble, run
from tests.distributed.layout_run import Held, held
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools


def muon(weight: Tensor, gradient: Tensor) -> Tensor:
    """One step of torch's Muon on one matrix."""
    parameter = weight.detach().clone().requires_grad_()
    parameter.grad = gradient.clone()
    torch.optim.Muon([parameter], lr=0.1, weight_decay=0.1).step()
    return parameter.detach()


def from_matrices(tensor: LogicalTensor, matrices: Tensor) -> Tensor:
    """The inverse of `LogicalTensor.as_matrices`, from the same pattern."""
    assert tensor.matrices is not None
    left, right = tensor.matrices.split("->")
    lengths = dict(zip(left.split(), tensor.shape, strict=True))
    used = {name: length for name, length in lengths.items() if name in re.findall(r"\w+", right)}
    return rearrange(matrices, f"{right} -> {left}", **used)


def updated_from_the_record(cell: Cell, weights: Tensors, gradients: Tensors) -> list[Held]:
    """Give this rank's pieces their part of the update of every tensor that has a matrix view."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), tensor_parallel_size=cell.tp)
    network = GPT(model_config(cell), mesh, sequence_parallel=cell.sequence_parallel, dtype=cell.torch_dtype)
    with torch.no_grad():
        for parameter, piece in named_pieces(network):
            tensor = piece.tensor
            whole = weights[tensor.name]
            if tensor.matrices is not None:
                matrices = zip(tensor.as_matrices(whole), tensor.as_matrices(gradients[tensor.name]), strict=True)
                whole = from_matrices(tensor, torch.stack([muon(w, g) for w, g in matrices]))
            piece.view(parameter).copy_(whole[piece.box.slices()])
    return held(network, mesh, lambda parameter: parameter)


def written_out(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices that the mathematics names, as views of a whole tensor."""
    kind = name.split(".")[-1]
    if kind == "query":
        return [tensor.flatten(0, 1)]
    if kind == "key_value":
        return [tensor[:, 0].reshape(-1, tensor.shape[-1]), tensor[:, 1].reshape(-1, tensor.shape[-1])]
    if kind == "output" and name != "output":
        return [tensor.flatten(1, 2)]
    if kind == "gate_up":
        return [tensor[0], tensor[1]]
    return [tensor] if kind in ("up", "down") else []


CELLS = [make_cell({"family": f, "key_values": k, "tp": 2, "dp": 1, "sequence_parallel": f == "llama"}, clip_grad=0.0)
         for f, k in (("llama", "mqa"), ("gpt2", "gqa"), ("llama", "uneven6"))]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.family}-{cell.key_values}")
def test_muon_from_the_record_is_muon_on_whole_matrices(cell: Cell, rank_pools: RankPools) -> None:
    (result,) = run(rank_pools, [cell])
    updated = assemble(rank_pools(2).run(updated_from_the_record, cell, result.initial, result.gradients))
    for name, value in result.initial.items():
        weights, gradients = written_out(name, value), written_out(name, result.gradients[name])
        expected = [muon(weight, gradient) for weight, gradient in zip(weights, gradients, strict=True)]
        if not expected:
            assert_bits_equal(updated[name], value, name)
            continue
        for actual, matrix in zip(written_out(name, updated[name]), expected, strict=True):
            assert_bits_equal(actual.contiguous(), matrix, name)
            assert not torch.equal(matrix, weights[0])
