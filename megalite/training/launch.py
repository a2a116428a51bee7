"""From a place among processes to a place on the mesh, once all are known to have been started alike."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from megalite.config import RunConfig
from megalite.config.run import differing_fields
from megalite.config.yaml_file import dump, load_yaml
from megalite.errors import ConfigurationError
from megalite.parallel import collectives, device
from megalite.parallel.mesh import ParallelMesh
from megalite.training.place import Place


def join(config: RunConfig, place: Place) -> ParallelMesh:
    """Take this process's place on the mesh; one process alone starts no process group.

    Raises ConfigurationError on every rank if some rank was started with other flags than rank 0.
    """
    where = device.local_device(place.local_rank)
    device.activate(where)
    mesh = ParallelMesh(
        rank=place.rank,
        world_size=place.world_size,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
        device=where,
    )
    if place.world_size > 1:
        backend = config.parallel.distributed_backend or device.default_backend(where)
        timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
        store, rank, world_size = next(dist.rendezvous("env://"))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        _compare_configurations(config, store, mesh)
    return mesh


def _compare_configurations(config: RunConfig, store: dist.Store, mesh: ParallelMesh) -> None:
    """The store and the world's group are all that ranks with different layouts have in common."""
    own = dump(config)
    if mesh.rank == 0:
        store.set("configuration/0", own)
    differs = store.get("configuration/0").decode() != own
    if differs:
        store.set(f"configuration/{mesh.rank}", own)
    urgency = torch.tensor([mesh.world_size - mesh.rank if differs else 0], device=mesh.device)
    lowest = mesh.world_size - int(collectives.all_reduce_(urgency, mesh.world(), "max").item())
    if lowest < mesh.world_size:
        theirs, first = (load_yaml(store.get(f"configuration/{rank}").decode()) for rank in (lowest, 0))
        fields = "; ".join(f"{name}: {a} there, {b} on rank 0" for name, a, b in differing_fields(theirs, first))
        raise ConfigurationError(f"rank {lowest} was started with other flags than rank 0: {fields}")


def leave(mesh: ParallelMesh) -> None:
    """Take the process group down at the end of a run."""
    mesh.close()
    if dist.is_initialized():
        dist.destroy_process_group()
