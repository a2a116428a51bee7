"""Spare nodes: a node may wait without ranks, and take the place of one that is lost or sick.

An elastic run has fewer seats where nodes are too few, and more once they are back.

The launcher numbers nodes. A *seat* is the place of a node in training: its ranks are those of the node with the seat's
number in a run without spares. Before each generation, rank 0's agent decides which node has which seat. It knows who
is alive by a process of each agent that adds to a number in the store every second. Node 0 always has seat 0: it may
host the store.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalite.extras.recovery.forks import Launched, fork_caller
from megalite.extras.recovery.lines import Lines, Message
from megalite.process.host import is_suspended
from megalite.process.place import ranks_text
from megalite.run.corruption import SICK_NODES
from megalite.small_files import parse_json, read_small_file

if TYPE_CHECKING:
    from megalite.extras.recovery.replanning import Replanning

_BETWEEN_BEATS = 1.0  # seconds
_SILENT_BEATS = 5
"""Beats that a node may miss before it counts as lost."""
_RETURNS = 3
"""Times that a run begins again because a node is back: one that comes and goes would keep it from getting on."""
_LEASE_SECONDS = 20
"""Seconds without an answer of the store after which a node ends its ranks: another one may have its seat."""


class Seats:
    """Table of who has which seat, and which nodes are absent or sick.

    Attributes:
        nodes: the node of each seat.
        absent: nodes that are lost, or have not come yet although the others have begun.
        sick: nodes that are to have no seat if there are others.
    """

    def __init__(self, nodes: int, spare: int, multiple: int = 0) -> None:
        """Give the first nodes the seats.

        Args:
            nodes: number of all nodes.
            spare: number of those without a seat.
            multiple: the number of seats may change to a multiple of this; 0: it may not.
        """
        self._most, self._multiple = nodes - spare, multiple
        self.nodes, self.absent = list(range(nodes - spare)), set[int]()
        self._all, self.sick = range(nodes), set[int]()
        self._last: int | None = None

    @property
    def missing(self) -> list[int]:
        """Return the seats whose nodes are absent."""
        return [seat for seat, node in enumerate(self.nodes) if node in self.absent]

    @property
    def free(self) -> list[int]:
        """Return the nodes that are there and have no seat, the sick ones last."""
        free = [node for node in self._all if node not in self.absent and node not in self.nodes]
        return sorted(free, key=lambda node: node in self.sick)

    def fail(self, node: int | None) -> None:
        """Note on which node a generation has failed, by no fault of another one; None if that is not known.

        A node on which two generations in a row fail is sick.
        """
        if node is not None and node == self._last:
            self.sick.add(node)
        self._last = node

    def fill(self) -> list[tuple[int, int, bool]]:
        """Give free nodes the seats of nodes that are absent, or sick.

        Returns the seats that have changed, each with the node before, and whether it is sick.
        """
        changed = []
        sick = [seat for seat, node in enumerate(self.nodes) if node in self.sick - self.absent and seat]
        for seat in (*self.missing, *sick):
            before, free = self.nodes[seat], self.free
            if free and (before in self.absent or free[0] not in self.sick):
                self.nodes[seat] = free[0]
                changed.append((seat, before, before not in self.absent))
        return changed

    @property
    def present(self) -> int:
        """Return the number of nodes that are there."""
        return sum(node not in self.absent for node in self._all)

    @property
    def room(self) -> int:
        """Return how many seats the nodes that are there can take, of an elastic run; others have what they have."""
        if not self._multiple:
            return len(self.nodes)
        return min(self._most, self.present // self._multiple * self._multiple)

    def resize(self, room: int | None = None) -> bool:
        """Have fewer or more seats, as the nodes that are there can take. Returns whether their number has changed.

        Nodes that have a seat keep one before others, and sick nodes get one last.

        Args:
            room: number of seats; None: as `room` says.
        """
        room = self.room if room is None else room
        if not room or room == len(self.nodes):
            return False
        there = [node for node in self._all if node not in self.absent]
        there.sort(key=lambda node: (node in self.sick and node > 0, node not in self.nodes))
        self.nodes = sorted(there[:room])
        return True


class Spares:
    """Nodes of a run with spare ones, as an agent knows them; only rank 0's agent knows all.

    Attributes:
        node: number of this agent's node.
        seats: which node has which seat.
        replanning: chooses layouts for nodes that are too few for one replica; None: the run ends then.
        flags: the flags of the run with such a layout; None: with its own.
    """

    def __init__(self, first: Launched, baseline: set[int]) -> None:
        """Begin to tell that this node is alive. `first`, `baseline`: as for `fork_board`."""
        place = first.place
        assert place.local_world_size is not None
        self._node_ranks = place.local_world_size
        nodes, self.node = place.world_size // self._node_ranks, place.rank // self._node_ranks
        self._needed = math.lcm(first.hello["replica_ranks"], self._node_ranks)
        """Ranks of whole nodes that hold whole replicas, of an elastic run; 0 for others."""
        self.seats = Seats(nodes, first.hello["spare_nodes"], self._needed // self._node_ranks)
        self.replanning: Replanning | None = None
        self.flags: list[str] | None = None
        self._losses = [0] * nodes
        self._hosts: dict[int, str] = {}
        self._directory = Path(first.hello["save"])
        self._caller = fork_caller(first, baseline, partial(_beat, self.node, nodes))

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._caller.lines.fileno()

    def receive(self) -> list[Message]:
        """Return which nodes are silent, or heard of again: `{"silent": NODE}` or `{"back": NODE}` each.

        Raises Ended when the process that tells it has ended.
        """
        return self._caller.lines.receive()

    def close(self) -> None:
        """Stop telling that this node is alive."""
        self._caller.close()
        if self.replanning is not None:
            self.replanning.close()

    @property
    def world_size(self) -> int:
        """Return the number of ranks that train."""
        return len(self.seats.nodes) * self._node_ranks

    @property
    def absent(self) -> set[int]:
        """Return the launcher's numbers of the ranks of absent nodes."""
        return {rank for node in self.seats.absent for rank in self._ranks_of(node)}

    def mark_present(self, ranks: Iterable[int], host: str) -> int:
        """Note that a node is there, and return its number. `ranks`: the launcher's numbers of its ranks."""
        node = min(ranks) // self._node_ranks
        self._hosts[node] = host
        self.seats.absent.discard(node)
        return node

    def mark_absent(self, ranks: Iterable[int]) -> None:
        """Note that the nodes of these ranks are not there."""
        for node in {rank // self._node_ranks for rank in ranks}:
            self.mark_lost(node)

    def mark_lost(self, node: int) -> str:
        """Note that a node is lost. Returns its name."""
        if node not in self.seats.absent:
            self._losses[node] += 1
        self.seats.absent.add(node)
        return self._name(node)

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks that train on a node; none on one that waits."""
        return list(self._ranks_of(self.seats.nodes.index(node))) if node in self.seats.nodes else []

    def growth(self, node: int) -> str:
        """Return a text on a node with which more ranks can train; "" if they cannot, or it comes and goes."""
        if self._losses[node] > _RETURNS or self.seats.room <= len(self.seats.nodes):
            return ""
        return f"{self._host(node)} is back"

    def fill(self) -> str:
        """Give free nodes the seats of absent and sick nodes. Returns a text on who takes whose place, or "".

        An elastic run begins with fewer or more seats, if the nodes that are there can take so many.
        """
        named = sick_nodes(self._directory)
        self.seats.sick.update(node for node, host in self._hosts.items() if host in named)
        told = self._resize()
        for seat, node, sick in self.seats.fill():
            why = (
                f"which {SICK_NODES} names"
                if self._host(node) in named
                else "on which ranks have failed twice in a row"
            )
            told.append(
                f"{self._host(self.seats.nodes[seat])} takes the place of {self._host(node)} "
                f"({ranks_text(self._ranks_of(seat))}), {why if sick else 'which is lost'}"
            )
        return "; ".join(told)

    def _resize(self) -> list[str]:
        """Have as many seats, and the layout, for which the nodes that are there are enough. Returns what is new."""
        plan, before, flags = self._plan or {}, self.world_size, self.flags
        if "error" in plan:
            return []
        self.flags = plan.get("flags")
        resized, told = self.seats.resize(plan.get("nodes")), []
        if resized:
            hosts = ", ".join(map(self._host, self.seats.nodes))
            told.append(f"{self.world_size} ranks instead of {before}, on {hosts}")
        if self.flags != flags:
            told.append(plan.get("text", "the layout is that of the flags again"))
        return told

    @property
    def _plan(self) -> Message | None:
        """Return the layout for the nodes that are there, or why there is none; None if they hold a whole replica."""
        if self.replanning is None or self.seats.room:
            return None
        return self.replanning.plans.get(self.seats.present)

    def awaits_plan(self) -> bool:
        """Tell whether a layout for the nodes that are there has still to be chosen, and have it chosen."""
        if self.replanning is None or self.seats.room or self._plan is not None:
            return False
        self.replanning.begin(self.seats.present)
        return True

    def missing(self) -> str:
        """Return a text on the seats that nobody can take; "" if there is none."""
        missing = self.seats.missing
        if not missing:
            return ""
        ranks = [rank for seat in missing for rank in self._ranks_of(seat)]
        hosts = ", ".join(self._host(self.seats.nodes[seat]) for seat in missing)
        verb = "is" if len(missing) == 1 else "are"
        if self._needed:
            return self._too_few(f"{hosts} {verb} lost")
        return f"{ranks_text(ranks)} cannot start: {hosts} {verb} lost, and no spare node is left"

    def _too_few(self, lost: str) -> str:
        """Return a text on what is missing of one replica. `lost`: who is."""
        needed = self._needed
        left = len(self._hosts.keys() - self.seats.absent) * self._node_ranks
        nodes = (needed - left) // self._node_ranks
        other = f"; another layout: {plan['error']}" if (plan := self._plan) else ""
        return (
            f"{lost}, and one replica of the model needs {needed} ranks: of {left} ranks that are left, "
            f"{needed - left} are missing ({nodes} node{'s' * (nodes != 1)}){other}"
        )

    def waiting(self) -> str:
        """Return a text on the nodes that wait."""
        return f"spare nodes: {', '.join(map(self._host, self.seats.free)) or 'none is left'}"

    def are_enough(self, ranks: Iterable[int]) -> bool:
        """Tell whether so many nodes have come that each seat can be taken. `ranks`: the launcher's numbers."""
        came = {rank // self._node_ranks for rank in ranks}
        return 0 in came and len(came) >= len(self.seats.nodes)

    def take_seats(self, ranks: Iterable[Launched], nodes: list[int], flags: list[str] | None) -> bool:
        """Give the ranks of this node the numbers of its seat, and their flags. Returns False if it has none.

        Args:
            nodes: the node of each seat.
            flags: those of another layout; None: the ranks have their own.
        """
        self.seats.nodes = nodes
        if self.node not in nodes:
            return False
        first = nodes.index(self.node) * self._node_ranks
        for rank in ranks:
            rank.flags = flags
            rank.trains = replace(rank.place, rank=first + rank.place.local_rank, world_size=self.world_size)
        return True

    def _ranks_of(self, place: int) -> range:
        """Return the numbers of the ranks of a node, or of a seat."""
        return range(place * self._node_ranks, (place + 1) * self._node_ranks)

    def _host(self, node: int) -> str:
        return self._hosts.get(node, f"the node of the launcher's {ranks_text(self._ranks_of(node))}")

    def _name(self, node: int) -> str:
        if node not in self.seats.nodes:
            return f"spare node {self._host(node)}"
        return f"{self._host(node)} ({ranks_text(self._ranks_of(self.seats.nodes.index(node)))})"


def sick_nodes(directory: Path) -> set[str]:
    """Return the nodes that the search for silent corruption has named in a run directory."""
    found = set[str]()
    with suppress(OSError, ValueError):
        for line in read_small_file(directory / SICK_NODES).decode().splitlines():
            with suppress(ValueError, TypeError, KeyError):  # a full disk may have cut it
                found.add(str(parse_json(line)["node"]))
    return found


def _beat(node: int, nodes: int, lines: Lines, first: Launched) -> NoReturn:
    """Tell the store every second that this node is alive. On node 0, tell the agent who does not."""
    from megalite.lifecycle.rendezvous import connect

    # As a rank that does not host the store, and does not say when it waits for it: the board does both.
    client = replace(first.place, rank=first.place.world_size, local_rank=1)
    mailbox = connect(client, first.hello["meeting_seconds"], "spares")
    mailbox = replace(mailbox, answer_seconds=_LEASE_SECONDS)
    agent, counts, silent = os.getppid(), [0] * nodes, [0] * nodes
    while True:
        if not is_suspended(agent):
            mailbox.add(f"beats of {node}", 1)
        for other in range(1, nodes) if node == 0 else ():
            count = mailbox.add(f"beats of {other}", 0)
            if count != counts[other] and silent[other] >= _SILENT_BEATS:
                lines.send({"back": other})
            silent[other] = silent[other] + 1 if count == counts[other] else 0
            counts[other] = count
            if count and silent[other] == _SILENT_BEATS:  # counted, not timed: this process may have been suspended
                lines.send({"silent": other})
        time.sleep(_BETWEEN_BEATS)
