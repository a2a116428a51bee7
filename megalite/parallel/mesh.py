"""The grid of ranks, with a dense and an expert view that share the pipeline axis, and its groups."""

from __future__ import annotations

import copy
import datetime
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from megalite.errors import CommunicationError
from megalite.process.place import ranks_text
from megalite.torch_internals import Store, new_process_group

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
WORLD = "world"
"""Name under which the communication of all ranks with each other is counted."""
Kind = Literal["group", "link"]
_RING = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1, "send": 2, "receive": 0}
"""Times that each of n ranks of a ring sends n - 1 of n parts of a tensor. A message has 2 ranks: all of it is sent."""
_CLOSED: Any = object()


@dataclass
class WaitTimer:
    """Time that the host was blocked waiting for other ranks. Waits on a GPU stream do not block the host."""

    by_axis: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by the axis of the group, `Group.axis`."""

    @property
    def seconds(self) -> float:
        return sum(self.by_axis.values())


@dataclass
class Traffic:
    """Messages of this rank: what has started, its ranks and its bytes are told to a listener, if there is one."""

    listener: Callable[[str, tuple[int, ...], int], None] | None = None
    by_axis: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes that this rank has sent to others by the axis of the group, if each collective takes a ring."""

    @property
    def bytes_sent(self) -> int:
        return sum(self.by_axis.values())


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other, as seen by one of them. A group of one rank has no process group."""

    ranks: tuple[int, ...]
    rank: int
    """Index of this process in `ranks`."""
    process_group: dist.ProcessGroup | None = None
    waits: WaitTimer = field(default_factory=WaitTimer, compare=False)
    """Timer to which the time spent waiting for this group is added, under `axis`."""
    timeout: datetime.timedelta | None = None
    """Time limit of a collective; None for the backend's default."""
    buffers: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Buffers of another communication library for this group, by their sizes. `ParallelMesh.close` destroys them."""
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    axis: str = field(default=WORLD, compare=False)
    """Axis under which waits and bytes are counted."""

    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))  # no property, because each layer asks several times

    @property
    def is_connected(self) -> bool:
        """False for ranks without processes (`UnconnectedMesh`), which get and send nothing."""
        return self.process_group is not None

    def record(self, kind: str, size: int, peer: int | None = None) -> None:
        """Count a collective or a message of `size` bytes, which has started, and tell the listener of it.

        `peer`: the index in `ranks` of the one with which a message is exchanged; None: all of them take part.
        """
        ranks = self.ranks if peer is None else (self.ranks[self.rank], self.ranks[peer])
        self.traffic.by_axis[self.axis] += size * _RING[kind] * (len(ranks) - 1) // len(ranks)
        if self.traffic.listener is not None:
            self.traffic.listener(kind, ranks, size)

    def close(self) -> None:
        """Let go of the process group, so that torch's functions refuse what is sent through this group from now on."""
        if self.process_group is not None:
            object.__setattr__(self, "process_group", _CLOSED)

    def __deepcopy__(self, known: dict[int, Any]) -> Group:
        """Return the group itself: a copy of a module communicates as the module does."""
        return self


class ParallelMesh:
    """The ranks of a run as a grid. Tensor-parallel ranks are adjacent (Megatron's order tp-cp-ep-dp-pp).

    The dense view is (pp, dp, cp, tp). The expert view (pp, edp, ep, etp) arranges the same ranks of a pipeline stage
    differently, for expert weights. A process makes only the groups that contain its rank, once per set of ranks. A run
    of one process does not use `torch.distributed`.
    """

    is_connected = True

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        device: torch.device | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        """Make the mesh.

        Args:
            timeout: time limit of a collective in the groups that the mesh makes; None for the backend's default.

        Raises:
            ValueError: the sizes do not divide the world size.
        """
        tp, cp, pp = tensor_parallel_size, context_parallel_size, pipeline_parallel_size
        ep, etp = expert_parallel_size, tp if expert_tensor_parallel_size is None else expert_tensor_parallel_size
        for name, size in (("tp*cp*pp", tp * cp * pp), ("etp*ep*pp", etp * ep * pp)):
            if size < 1 or world_size % size:
                raise ValueError(f"a world of {world_size} ranks cannot be divided by {name} = {size}")
        self.rank, self.world_size = rank, world_size
        self.whole: ParallelMesh = self
        """Mesh of all ranks of the run, if this is one of a part of them."""
        self.device = device or torch.device("cpu")
        sizes = {"pp": pp, "dp": world_size // (tp * cp * pp), "cp": cp, "tp": tp}
        expert_sizes = {"pp": pp, "edp": world_size // (etp * ep * pp), "ep": ep, "etp": etp}
        self._timeout = timeout
        self._views = {
            axes: torch.arange(world_size).view([view[axis] for axis in axes])
            for axes, view in ((DENSE_AXES, sizes), (EXPERT_AXES, expert_sizes))
        }
        self._sizes = self._all_sizes = sizes | expert_sizes
        self._starts = dict.fromkeys(self._sizes, 0)
        self.waits, self.traffic = WaitTimer(), Traffic()
        several = (axis for axis in ("tp", "cp", "ep", "pp", "dp") if self._sizes[axis] > 1)
        self.counted: tuple[str, ...] = (*several, WORLD) if world_size > 1 else ()
        """Axes under which communication is counted: the same on all ranks."""
        for axis in self.counted:
            self.waits.by_axis[axis], self.traffic.by_axis[axis] = 0.0, 0
        self._groups: dict[tuple[Kind, tuple[int, ...]], Group] = {}
        self._by_axes: dict[tuple[str, ...], Group] = {}
        self._coordinates = self.coordinates_of(rank)

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of `axes`."""
        return math.prod(self._sizes[axis] for axis in axes)

    def coordinate(self, axis: str) -> int:
        """Return the position of this rank along `axis`."""
        return self._coordinates[axis]

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the positions of a rank along all axes of both views."""
        coordinates: dict[str, int] = {}
        for axes in self._views:
            rest = rank
            for axis in reversed(axes):
                rest, position = divmod(rest, self._all_sizes[axis])
                coordinates[axis] = position - self._starts[axis]
        return coordinates

    def replica(self, count: int) -> ParallelMesh:
        """Return the mesh of this rank's replica: of the `count` equal blocks of data-parallel ranks, the one that has
        this rank.

        A replica has all pipeline stages. Its ranks keep their numbers.

        Raises:
            ValueError: the data-parallel sizes, dense and expert, are not divisible by the count.
        """
        inner = copy.copy(self)
        inner.world_size, inner._by_axes = self.world_size // count, {}
        inner._sizes, inner._starts = dict(self._sizes), dict(self._starts)
        number = 0
        for axis in ("dp", "edp"):
            size, rest = divmod(self._sizes[axis], count)
            if rest:
                raise ValueError(f"{count} replicas do not divide {self._sizes[axis]} ranks of the axis {axis}")
            number = self._coordinates[axis] // size
            inner._sizes[axis] = size
            inner._starts[axis] += number * size
        inner._views = {
            axes: view.narrow(1, inner._starts[axes[1]] - self._starts[axes[1]], inner._sizes[axes[1]])
            for axes, view in self._views.items()
        }
        inner._coordinates = inner.coordinates_of(self.rank)
        return inner

    def at(self, rank: int) -> ParallelMesh:
        """Return the mesh of another rank, on the meta device, to compute what it holds without communication.

        If this is the mesh of a replica, so is that.
        """
        sizes = self._all_sizes
        mesh: ParallelMesh = UnconnectedMesh(
            rank=rank,
            world_size=self.all_ranks,
            tensor_parallel_size=sizes["tp"],
            context_parallel_size=sizes["cp"],
            pipeline_parallel_size=sizes["pp"],
            expert_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
            device=torch.device("meta"),
        )
        replicas = self.all_ranks // self.world_size
        return mesh.replica(replicas) if replicas > 1 else mesh

    @property
    def all_ranks(self) -> int:
        """Number of ranks of the run, those of other replicas included."""
        return math.prod(self._all_sizes[axis] for axis in DENSE_AXES)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one only along `axes`, in rank order.

        Raises:
            ValueError: no view has all of the axes.
        """
        if unknown := [axis for axis in axes if axis not in self._sizes]:
            raise ValueError(
                f"the mesh has no axis {unknown[0]!r}: it has {DENSE_AXES} and, for experts, {EXPERT_AXES}"
            )
        view = next((view for view in self._views if set(axes) <= set(view)), None)
        if view is None:
            raise ValueError(f"axes {axes} belong to two views: one has {DENSE_AXES}, the other {EXPERT_AXES}")
        index = tuple(slice(None) if axis in axes else self._coordinates[axis] for axis in view)
        return tuple(self._views[view][index].flatten().tolist())

    def group(self, *axes: str) -> Group:
        """Return the group along `axes`. All members must request their groups in the same order.

        Its communication is counted as that of `group_of`, but for the expert-parallel ranks' under ep, and that of all
        ranks under `WORLD`.
        """
        if axes not in self._by_axes:
            group, long = self.group_of(self.ranks(*axes)), [axis for axis in EXPERT_AXES if axis in axes]
            outermost = next((axis for axis in long if self._sizes[axis] > 1), None)
            axis = WORLD if set(axes) == set(DENSE_AXES) else "ep" if outermost == "ep" else group.axis
            self._by_axes[axes] = replace(group, axis=axis)
        return self._by_axes[axes]

    def world(self) -> Group:
        return self.group(*DENSE_AXES)

    def group_of(self, ranks: Sequence[int]) -> Group:
        """Return the group of these ranks, which must include this rank.

        Its communication is counted under the outermost of the dense axes along which they differ.
        """
        return self._cached_group("group", tuple(sorted(ranks)))

    def link(self, source: int, destination: int, minutes: float | None = None) -> Group:
        """Return the group in which `source` sends to `destination`. One of them is this rank.

        The opposite direction has its own group. Both ranks must request their links in the same order. `minutes`: time
        limit of a message; None for that of collectives.
        """
        timeout = None if minutes is None else datetime.timedelta(minutes=minutes)
        return self._cached_group("link", (source, destination), timeout)

    def _cached_group(self, kind: Kind, ranks: tuple[int, ...], timeout: datetime.timedelta | None = None) -> Group:
        if (kind, ranks) not in self._groups:
            timeout = timeout or self._timeout
            process_group = self._make_process_group(kind, ranks, timeout)
            first, last = self.coordinates_of(ranks[0]), self.coordinates_of(ranks[-1])  # which differ the most
            axis = next((axis for axis in DENSE_AXES if first[axis] != last[axis]), WORLD)
            self._groups[kind, ranks] = Group(
                ranks, ranks.index(self.rank), process_group, self.waits, timeout, traffic=self.traffic, axis=axis
            )
        return self._groups[kind, ranks]

    def _make_process_group(
        self, kind: Kind, ranks: tuple[int, ...], timeout: datetime.timedelta | None
    ) -> dist.ProcessGroup | None:
        """Make a process group, on its members only. Its name has its ranks and a count, which makes it unique.

        Raises:
            CommunicationError: a member has ended or cannot be reached.
        """
        if len(ranks) == 1:
            return None
        if kind == "group" and len(ranks) == self.all_ranks:
            return dist.group.WORLD
        name = f"megalite {kind} {'-'.join(map(str, ranks))}"

        def unique_name(store: Store) -> str:
            return f"{name} #{store.add(f'{name} on {self.rank}', 1)}"

        try:
            return new_process_group(self.rank, ranks, unique_name, timeout)
        except RuntimeError as error:
            raise CommunicationError(
                f"{ranks_text(ranks)} could not connect to one another, or one of them has ended: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def __deepcopy__(self, known: dict[int, Any]) -> ParallelMesh:
        """Return the mesh itself, as for `Group`."""
        return self

    def close(self) -> None:
        """Destroy the process groups that this mesh has made, but not the default group, and let go of that, too.

        Whoever still holds a `Group` can use it no more. A process group that is held lives on with its threads: one
        of gloo's that frees a tensor while Python ends has the process aborted.
        """
        for group in self._groups.values():
            for buffer in group.buffers.values():
                buffer.destroy()
            if group.process_group is not None and group.process_group is not dist.group.WORLD:
                dist.destroy_process_group(group.process_group)
        for group in (*self._groups.values(), *self._by_axes.values()):
            group.close()
        self._groups.clear()
        self._by_axes.clear()


class UnconnectedMesh(ParallelMesh):
    """The mesh of a rank whose other ranks have no processes, used to compute what it would hold and do.

    A collective of its groups returns a tensor of the right shape at once, and receives nothing.
    """

    is_connected = False

    def _make_process_group(
        self, kind: Kind, ranks: tuple[int, ...], timeout: datetime.timedelta | None
    ) -> dist.ProcessGroup | None:
        return None
