"""What one rank finds out by itself: what it has, and if it is the first of its node, how that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalite.checkpoint import open_directory
from megalite.config import RunConfig
from megalite.doctor import alike, data_files
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
    traits: Traits
    """Rank 0's."""
    probe: tuple[str, str] | None
    """The name and text of its file in the run directory."""

    @property
    def ranks(self) -> list[int]:
        """All that have come, in order."""
        return sorted(rank for ranks in self.nodes.values() for rank in ranks)

    def node_of(self, rank: int) -> str:
        return next(node for node, ranks in self.nodes.items() if rank in ranks)


@dataclass(frozen=True)
class Report:
    """What a rank has found."""

    differing: Traits
    problem: str = ""
    """Why its flags are no run's."""
    unfinished: str = ""
    """What it was doing when its time was up."""
    state: NodeState | None = None
    """Of the node, if this rank is its first; and so for what follows."""
    findings: tuple[Finding, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the data."""
    directory: Seen | None = None
    address: tuple[str, int] | None = None

    @staticmethod
    def of_json(values: dict[str, Any]) -> Report:
        """The report whose fields JSON has brought."""
        kinds = {"state": NodeState, "directory": Seen}
        made = {name: kind(**values[name]) for name, kind in kinds.items() if values[name] is not None}
        findings = tuple(Finding(**each) for each in values["findings"])
        return Report(**values | made | {"findings": findings})


class OwnNode:
    """The rank's examination of itself, under way."""

    def __init__(self, rank: int, roll: Roll, config: RunConfig | None, problem: str, own_traits: Traits) -> None:
        self._roll, self._config, self._problem = roll, config, problem
        self._first = roll.nodes[roll.node_of(rank)][0] == rank
        self._differing = alike.differences(own_traits, roll.traits)
        self._now = ""
        self.listener: Listener | None = None

    def examine(self, gpus: int | None, backend: str) -> Report:
        """Look at everything; file systems and drivers may hang."""
        if not self._first:
            return Report(self._differing, self._problem)
        findings: list[Finding] = []
        self._now = "asking for its address"
        try:
            self.listener = Listener(own_address(backend), self._roll.token)
        except OSError as error:
            findings.append(Finding("sick", f"it has no address for other nodes: {error}"))
        self._now = "reading the data"
        files = self._files(findings)
        self._now = "looking at its GPUs, memory and limits"
        state, more = examine_node(gpus, ranks=len(self._roll.ranks), data_files=len(files))
        self._now = "looking at the run directory"
        directory = self._directory(findings)
        return Report(
            self._differing,
            self._problem,
            state=state,
            findings=(*findings, *more),
            files=files,
            directory=directory,
            address=None if self.listener is None else (str(self.listener.server_address[0]), self.listener.port),
        )

    def unfinished(self) -> Report:
        """The report in place of one that was not ready in time."""
        return Report(self._differing, self._problem, unfinished=self._now)

    def _files(self, findings: list[Finding]) -> Mapping[str, str]:
        if self._config is None:
            return {}
        try:
            return data_files.fingerprints(self._config.data)
        except MegaliteError as error:
            findings.append(Finding("sick", str(error)))
            return {}

    def _directory(self, findings: list[Finding]) -> Seen | None:
        save = None if self._config is None else self._config.checkpoint.save
        if save is None or self._roll.probe is None:
            return None
        try:
            return look(open_directory(save), *self._roll.probe)
        except MegaliteError as error:
            findings.append(Finding("sick", str(error)))
            return None
