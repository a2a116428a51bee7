"""Room in the host's memory for what ranks keep there, which is required before any of it is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config.offload import OffloadConfig
from megalite.errors import ConfigurationError
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.process import host

_GIB = 2**30


def require_room_on_host(needed: int, offload: OffloadConfig, mesh: ParallelMesh) -> None:
    """Raise ConfigurationError, on all ranks alike, if the ranks of a host together need more memory than it lets them
    have.

    Called by all ranks together. `needed`: bytes of this rank on the host, of all that is offloaded.
    """
    if not mesh.is_connected:  # the ranks of a dry run are on no host
        return
    for full in full_hosts(needed, mesh):
        raise ConfigurationError(_too_little(*full, offload))


def full_hosts(needed: int, mesh: ParallelMesh) -> Iterator[tuple[str, int, int, int]]:
    """Yield each host with less memory than its ranks need: its name, the ranks, what they need and may have, in bytes.

    Called by all ranks together. `needed`: bytes of this rank.
    """
    hosts: dict[str, tuple[int, int, int]] = {}
    for name, size, limit in collectives.all_gather_json((host.host_name(), needed, host.memory_limit()), mesh):
        ranks, before, least = hosts.get(name, (0, 0, limit))
        hosts[name] = ranks + 1, before + size, min(limit, least)
    yield from ((name, *found) for name, found in hosts.items() if found[1] > found[2])


def _too_little(name: str, ranks: int, size: int, limit: int, offload: OffloadConfig) -> str:
    """Return the message for a host whose ranks together need `size` bytes, with the flag to change."""
    words = (
        f"host {name}: {ranks} rank{'s' * (ranks > 1)} would keep {size / _GIB:.2f} GiB in its memory, and may have "
        f"{limit / _GIB:.2f} GiB (the limit of their control group, or what the machine has): "
    )
    if offload.cpu_offloading_num_layers or offload.fine_grained_activation_offloading:
        return words + (
            "offload fewer layers by --cpu-offloading-num-layers or less of the modules by "
            "--activation-offload-fraction, lower --optimizer-offload-fraction, or take more hosts"
        )
    if offload.parameter_offload:
        return words + "leave out --parameter-offload and lower --optimizer-offload-fraction, or take more hosts"
    fraction = offload.optimizer_offload_fraction
    most = math.floor(100 * fraction * limit / size) / 100
    return words + (
        f"lower --optimizer-offload-fraction from {fraction:g} to {most:g} or less, or divide the state among more "
        "ranks by --data-parallel-sharding-strategy (ZeRO)"
    )
