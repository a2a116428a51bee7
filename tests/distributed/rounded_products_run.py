"""Two layers with rounded products on a rank, whose operands are recorded."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.parallel import rounded_products
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.rounded_products import Rounding
from megalite.parallel.sharding import LogicalTensor, Normal
from megalite_kernels.recipes import recipe
from megalite_kernels.tile_scales import Tiles

HIDDEN, INNER, SEQUENCE = 256, 512, 8


def operands(name: str, sequence_parallel: bool, context_parallel: int = 1) -> list[tuple[Tiles, Tiles]]:
    """Return the operands of the products of a layer with split outputs and one with split inputs: those of their
    forwards, then those of the gradients of their inputs, from the last to the first."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = ParallelMesh(
        rank=dist.get_rank() if world > 1 else 0,
        world_size=world,
        tensor_parallel_size=world // context_parallel,
        context_parallel_size=context_parallel,
    )
    rounding = Rounding(recipe(name))
    context = ParallelContext(mesh, sequence_parallel, torch.float64, rounding=rounding)
    up = LogicalTensor("up", (INNER, HIDDEN), Normal(0.1), True, "out in -> 1 out in")
    down = LogicalTensor("down", (HIDDEN, INNER), Normal(0.1), True, "out in -> 1 out in")
    layers = nn.ModuleList(
        [
            ColumnParallelLinear(context, "ffn", [context.split(up, {0: "ffn"})]),
            RowParallelLinear(context, "ffn", context.split(down, {1: "ffn"}), None),
        ]
    )
    initialize(layers, 7)
    input, gradient = drawn(3), drawn(4)
    parts = context_parallel * context.shards
    part = mesh.coordinate("cp") * context.shards + context.shard
    found: list[tuple[Tiles, Tiles]] = []
    gathered: list[int] = []
    mesh.traffic.listener = lambda kind, ranks, size: gathered.append(size) if kind == "all-gather" else None

    def recorded(a: Tiles, b: Tiles, *rest: object) -> Tensor:
        found.append((stored(a), stored(b)))
        return original(a, b, *rest)  # type: ignore[arg-type]

    original = rounded_products.product
    with mock.patch.object(rounded_products, "product", recorded):
        hidden = input.chunk(parts)[part].requires_grad_()
        for layer in layers:
            hidden = layer(hidden)
        hidden.backward(gradient.chunk(parts)[part])
    if sequence_parallel:
        codes = sum(each.nbytes for each in found[0][0] if each is not None and each.dim())
        assert gathered[0] == codes, "values are gathered, not codes and scales"
    return found


def drawn(seed: int) -> Tensor:
    """Return numbers of many sizes, [sequence, batch, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (SEQUENCE, 2, HIDDEN)
    numbers, sizes = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return numbers * sizes.exp()


def stored(tiles: Tiles) -> Tiles:
    """Return tiles whose codes and scales can be compared and sent, whatever their dtypes."""
    codes, scales, outer = tiles
    narrow = codes.contiguous().view(torch.uint8)
    return Tiles(narrow, scales.contiguous().view(torch.uint8) if scales.element_size() == 1 else scales.clone(), outer)
