"""Run that hangs: each rank goes to its place in a case, writes its dump from a thread, and ends when all have.

    hang_run.py CASE FOLDER DUMPS

There are no time limits: a waiting rank writes its dump when its flight recorder shows that it waits.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.point_to_point import make_links
from megalite.pipeline.stages import Stages
from megalite.watchdog.flight_recorder import snapshot
from megalite.watchdog.hang_dump import RankDump, write_dump
from megalite.watchdog.snapshot import Snapshot

WIDTH = 64


def leave_dump(rank: int, folder: Path, record: Snapshot) -> None:
    write_dump(folder, RankDump(rank, dist.get_world_size(), flight_recorder=record))


def operations(record: Snapshot) -> int:
    """Return the number of operations that the rank has begun: recorded collectives, and messages.

    torch counts a collective just before it records it, and a dump between the two would show only the number.
    """
    return sum((group.operations[-1].number if group.operations else 0) + group.messages for group in record.groups)


class Place:
    """Place that a rank of a case reaches."""

    def __init__(self, folder: Path, dumps: int) -> None:
        self.folder, self.dumps = folder, dumps
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def mesh(self, pipeline: int = 1) -> ParallelMesh:
        return ParallelMesh(rank=self.rank, world_size=self.world_size, pipeline_parallel_size=pipeline)

    def wait_in(self, wait: Callable[[], object], begins: int = 1) -> None:
        """Call `wait`, which begins `begins` operations and never ends; the dump is written after they have begun."""
        threading.Thread(target=self._leave_waiting, args=(operations(snapshot()) + begins,)).start()
        wait()
        raise AssertionError("it came to its end")

    def stay_away(self) -> None:
        """Be busy with something else."""
        self._leave(snapshot())

    def _leave_waiting(self, begun: int) -> None:
        record = snapshot()
        while operations(record) < begun or not record.waiting:
            time.sleep(0.01)
            record = snapshot()
        self._leave(record)

    def _leave(self, record: Snapshot) -> None:
        leave_dump(self.rank, self.folder, record)
        while len(list(self.folder.glob("rank_*.json"))) < self.dumps:
            time.sleep(0.01)
        os._exit(0)


def stop(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def skipped(place: Place) -> None:
    """Rank 2 skips an all-reduce."""
    world, tensor = place.mesh().world(), torch.ones(WIDTH)
    for _ in range(3):
        collectives.all_reduce_(tensor, world)
    if place.rank == 2:
        place.stay_away()
    place.wait_in(lambda: collectives.all_reduce_(tensor, world))


def other(place: Place) -> None:
    """Rank 2 gathers while the others reduce."""
    world, tensor = place.mesh().world(), torch.ones(WIDTH)
    collectives.all_reduce_(tensor, world)
    collective = collectives.all_gather if place.rank == 2 else collectives.all_reduce_
    place.wait_in(lambda: collective(tensor, world))


def sizes(place: Place) -> None:
    """Rank 3, the last to receive from gloo, expects a larger broadcast than rank 0 sends; then rank 0 stays away."""
    world = place.mesh().world()
    dist.broadcast(torch.ones(WIDTH + (place.rank == 3)), 0)
    if place.rank == 0:
        place.stay_away()
    place.wait_in(lambda: collectives.all_reduce_(torch.ones(WIDTH), world))


def stopped(place: Place) -> None:
    """Rank 1 is stopped; ranks 0 and 2 wait in their data-parallel groups, and rank 3 in its pipeline's group."""
    mesh, tensor = place.mesh(pipeline=2), torch.ones(WIDTH)
    data, stages = mesh.group("dp"), mesh.group("pp")
    collectives.all_reduce_(tensor, mesh.world())
    if place.rank == 1:
        stop(place)
    group = {0: data, 2: data, 3: stages}[place.rank]
    place.wait_in(lambda: collectives.all_reduce_(tensor, group))


def pipeline(place: Place) -> None:
    """The second of four stages skips its third micro-batch."""
    mesh = place.mesh(pipeline=4)
    links, tensor = make_links(mesh, Stages(4)), torch.ones(WIDTH)

    def forward() -> None:
        if place.rank > 0:
            links.receive(tensor, place.rank - 1).wait()
        if place.rank < 3:
            links.send(tensor, place.rank + 1).wait()

    for _ in range(2):
        forward()
    if place.rank == 1:
        place.stay_away()
    place.wait_in(forward)


def under_way(place: Place) -> None:
    """Rank 1 has begun two of five reductions, and before that one with rank 2. Then it is busy.

    Rank 0 also waits for it in another group.
    """
    mesh = place.mesh()
    world, pair = mesh.world(), mesh.group_of([0, 1]) if place.rank < 2 else None
    ahead = mesh.group_of([1, 2]) if place.rank in (1, 2) else None
    tensors = [torch.ones(WIDTH) for _ in range(5)]
    begun = [collectives.all_reduce_async_(tensor, world) for tensor in tensors[: 2 if place.rank == 1 else 5]]
    if place.rank == 1 and ahead is not None:
        begun.append(collectives.all_reduce_async_(torch.ones(1), ahead))
        place.stay_away()
    if pair is not None:
        place.wait_in(lambda: collectives.all_reduce_(torch.ones(1), pair))
    place.wait_in(lambda: [pending.wait() for pending in begun], begins=0)


def healthy(place: Place) -> None:
    """No rank hangs: all kinds of collectives and messages have ended. Torch's own dump is written, too."""
    mesh, tensor = place.mesh(pipeline=2), torch.ones(WIDTH)
    links, stage = make_links(mesh, Stages(2)), mesh.coordinate("pp")
    for group in (mesh.world(), mesh.group("dp"), mesh.group("pp")):
        collectives.all_reduce_(tensor, group)
        collectives.all_gather(tensor, group)
        collectives.reduce_scatter(tensor, group)
        sent = [torch.ones(group.rank + 1) for _ in range(group.size)]
        collectives.all_to_all(sent, range(1, group.size + 1), group)
    message = links.receive(tensor, 0) if stage else links.send(tensor, 1)
    message.wait()
    (place.folder / f"nccl_trace_rank_{place.rank}").write_bytes(_distributed_c10d._dump_fr_trace())
    place.stay_away()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](Place(Path(sys.argv[2]), int(sys.argv[3])))
