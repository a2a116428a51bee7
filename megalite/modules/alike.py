"""Comparison of tensors over ranks, for what every rank must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from megalite.errors import MegaliteError
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import AsBuilt

SAME_SEED = (
    "build the same module on every rank: call torch.manual_seed with the same number before it is built, load the "
    "same weights, or give initial="
)


def check_alike(modules: Iterable[nn.Module], mesh: ParallelMesh) -> None:
    """Check that all ranks with a parameter or buffer have the same values of it. Called by all ranks together.

    Tensors that ranks draw or split by a `Sharding` are left out. All modules have their records (`give_records`).

    Raises:
        MegaliteError: a tensor differs; the message names it, and is the same on all ranks.
    """
    check_same({name: tensor for module in modules for name, tensor in _whole(module)}, mesh, SAME_SEED)


def check_same(tensors: Mapping[str, Tensor], mesh: ParallelMesh, advice: str) -> None:
    """Check that ranks have the same values under the same name. Called by all ranks together."""
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    summary = hashlib.blake2b(repr(list(digests.items())).encode(), digest_size=16).hexdigest()
    summaries = all_gather_json((mesh.coordinate("pp"), summary), mesh)
    if len({stage for stage, _ in summaries}) == len({(stage, each) for stage, each in summaries}) == 1:
        return
    # All digests travel only if they may differ: for one stage, its ranks; for several, a weight that they share.
    first: dict[str, tuple[int, str]] = {}
    for rank, own in enumerate(all_gather_json(digests, mesh)):
        for name, digest in own.items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise MegaliteError(f"{name} has other values on rank {rank} than on rank {other}: {advice}")


def check_apart(modules: Iterable[nn.Module]) -> None:
    """Check that no parameter has memory in common with another tensor: training would give each its own.

    Raises:
        MegaliteError: one does. The same parameter object in several places is one tied weight, and is allowed.
    """
    tensors: dict[int, tuple[str, Tensor]] = {}
    for number, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if (
                not is_lazy(tensor)
                and tensor.device.type != "meta"
                and tensor.untyped_storage().nbytes()
                and tensor.numel()
            ):
                tensors.setdefault(id(tensor), (f"{name} of stage {number} ({type(module).__name__})", tensor))
    places = sorted(
        ((tensor.device.type, *_addresses(tensor), name, tensor) for name, tensor in tensors.values()),
        key=lambda place: place[:3],
    )
    for (device, _, end, name, one), (other_device, start, _, other_name, other) in pairwise(places):
        if device == other_device and start < end and any(isinstance(each, nn.Parameter) for each in (one, other)):
            raise MegaliteError(
                f"{name} and {other_name} share memory and are two tensors: for a tied weight, let both modules have "
                "the same parameter (a.weight = b.weight); otherwise clone one"
            )


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one after its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _whole(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, Parameter):
            yield name, parameter
        elif isinstance((tensor := parameter.sharding.pieces[0].tensor).initial, AsBuilt):
            yield tensor.name, parameter
    yield from module.named_buffers()


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    described = f"{tuple(tensor.shape)} of {tensor.dtype}".encode()
    return hashlib.blake2b(described + values.numpy().tobytes(), digest_size=16).hexdigest()
