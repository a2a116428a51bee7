"""What one rank finds out by itself: what it has, and if it is the first of its node, how that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megalite.checkpoint import open_directory
from megalite.config import RunConfig
from megalite.doctor import data_files
from megalite.doctor.alike import Traits
from megalite.doctor.findings import Finding
from megalite.doctor.network import Listener, own_address
from megalite.doctor.node import NodeState, examine_node
from megalite.doctor.run_directory import Seen, look
from megalite.errors import MegaliteError


@dataclass(frozen=True)
class Roll:
    """Who has come, and what rank 0 says to all."""

    nodes: Mapping[str, Sequence[int]]
    """The ranks of each node, rank 0's node first."""
    token: str
    """By which one rank knows another at a port."""
    probe: tuple[str, str] | None
    """The name and text of rank 0's file in the run directory."""

    @property
    def ranks(self) -> list[int]:
        """All that have come, in order."""
        return sorted(rank for ranks in self.nodes.values() for rank in ranks)

    def node_of(self, rank: int) -> str:
        return next(node for node, ranks in self.nodes.items() if rank in ranks)


@dataclass
class Report:
    """What a rank has found so far."""

    traits: Traits
    problem: str
    """Why its flags are no run's."""
    doing: str = ""
    """What it is at; at the end, nothing."""
    state: NodeState | None = None
    """Of the node, if this rank is its first; and so for what follows."""
    findings: list[Finding] = field(default_factory=list)
    files: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the data."""
    directory: Seen | None = None
    address: tuple[str, int] | None = None

    @staticmethod
    def of_json(values: dict[str, Any]) -> Report:
        """The report whose fields JSON has brought."""
        kinds = {"state": NodeState, "directory": Seen}
        made = {name: kind(**values[name]) for name, kind in kinds.items() if values[name] is not None}
        return Report(**values | made | {"findings": [Finding(**each) for each in values["findings"]]})

    def examine_node(self, roll: Roll, config: RunConfig | None, gpus: int | None, backend: str) -> None:
        """Look at the node that this rank is the first of; file systems and drivers may hang."""
        with self._at("asking for its address", "it has no address for other nodes: "):
            listener = Listener(own_address(backend), roll.token)
            self.address = str(listener.server_address[0]), listener.port
        if config is not None:
            with self._at("reading the data"):
                self.files = data_files.fingerprints(config.data)
        with self._at("looking at its GPUs, memory and limits"):
            self.state, found = examine_node(gpus, ranks=len(roll.ranks), data_files=len(self.files))
            self.findings += found
        if config is not None and config.checkpoint.save is not None and roll.probe is not None:
            with self._at("looking at the run directory"):
                self.directory = look(open_directory(config.checkpoint.save), *roll.probe)

    @contextmanager
    def _at(self, doing: str, failing: str = "") -> Iterator[None]:
        self.doing = doing
        try:
            yield
        except (MegaliteError, OSError) as error:
            self.findings.append(Finding("sick", f"{failing}{error}"))
        self.doing = ""
