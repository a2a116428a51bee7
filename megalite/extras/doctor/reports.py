"""Reports of the ranks: traits of each, the state of the node from its first rank, and what rank 0 concludes from
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megalite.config import RunConfig
from megalite.errors import MegaliteError
from megalite.extras.doctor.bandwidth import Timing
from megalite.extras.doctor.consistency import Traits, fingerprints
from megalite.extras.doctor.findings import Finding, Options
from megalite.extras.doctor.network import Listener, ReachedFrom, own_address
from megalite.extras.doctor.node import NodeState, examine_node
from megalite.extras.doctor.run_directory import Seen, look
from megalite.process.place import Place
from megalite.storage import open_directory


@dataclass(frozen=True)
class Roll:
    """Ranks that have connected, and the values that rank 0 sends to all of them."""

    nodes: Mapping[str, Sequence[int]]
    """The ranks of each node, rank 0's node first."""
    token: str
    """Token by which ranks recognize each other at a port."""
    probe: tuple[str, str] | None
    """Name and text of rank 0's file in the run directory."""

    @property
    def ranks(self) -> list[int]:
        """Return all ranks that have connected, in order."""
        return sorted(rank for ranks in self.nodes.values() for rank in ranks)

    def node_of(self, rank: int) -> str:
        return next(node for node, ranks in self.nodes.items() if rank in ranks)


@dataclass
class Report:
    """Findings of a rank so far."""

    traits: Traits
    problem: str
    """Reason that its flags are not those of a run."""
    doing: str = ""
    """Present task; empty at the end."""
    state: NodeState | None = None
    """State of the node, if this rank is its first; the following fields, too, are for first ranks only."""
    findings: list[Finding] = field(default_factory=list)
    files: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the data files."""
    directory: Seen | None = None
    address: tuple[str, int] | None = None

    @staticmethod
    def of_json(values: dict[str, Any]) -> Report:
        """Return a report from its fields in JSON."""
        kinds = {"state": NodeState, "directory": Seen}
        made = {name: kind(**values[name]) for name, kind in kinds.items() if values[name] is not None}
        return Report(**values | made | {"findings": [Finding(**each) for each in values["findings"]]})

    def examine_node(self, roll: Roll, config: RunConfig | None, gpus: int | None, backend: str, host: str) -> None:
        """Examine the node whose first rank this is; file systems and drivers may hang. `host`: rank 0's."""
        with self._at("asking for its address", "it has no address for other nodes: "):
            listener = Listener(own_address(backend, host), roll.token)
            self.address = str(listener.server_address[0]), listener.port
        if config is not None:
            with self._at("reading the data"):
                self.files = fingerprints(config.data)
        with self._at("checking its GPUs, memory and limits"):
            self.state, found = examine_node(gpus, ranks=len(roll.ranks), data_files=len(self.files))
            self.findings += found
        if config is not None and config.checkpoint.save is not None and roll.probe is not None:
            with self._at("checking the run directory"):
                self.directory = look(open_directory(config.checkpoint.save), *roll.probe)

    @contextmanager
    def _at(self, doing: str, failing: str = "") -> Iterator[None]:
        self.doing = doing
        try:
            yield
        except (MegaliteError, OSError) as error:
            self.findings.append(Finding("sick", f"{failing}{error}"))
        self.doing = ""


@dataclass
class Found:
    """Facts that rank 0 has learnt so far; on other ranks little of it is filled in."""

    place: Place
    backend: str
    options: Options
    save: str | None
    """Run directory, if there is a run that has one."""
    roll: Roll
    findings: list[Finding]
    """Findings from before the reports were requested."""
    reports: Mapping[int, Report] = field(default_factory=dict)
    checkpoint_size: int | None = None
    reached: ReachedFrom = field(default_factory=dict)
    measured: Sequence[int] | None = None
    """Ranks that finished timing messages; None: timing was not requested."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Failures of timing, by rank."""
    timings: Sequence[Timing] = ()
    stopped: bool = False
    """True if rank 0 was requested to end meanwhile."""

    @property
    def world_size(self) -> int:
        """Number of ranks that were started."""
        return self.place.world_size

    @property
    def firsts(self) -> dict[int, str]:
        """Return the first rank of each node, with the node."""
        return {ranks[0]: node for node, ranks in self.roll.nodes.items()}

    @property
    def nodes(self) -> dict[str, Report]:
        """Return the reports of the nodes' first ranks that have examined their nodes."""
        reports = {node: self.reports[rank] for rank, node in self.firsts.items() if rank in self.reports}
        return {node: report for node, report in reports.items() if report.state is not None}

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        return {node: report.address for node, report in self.nodes.items() if report.address is not None}

    @property
    def clocks(self) -> dict[str, float]:
        """Return the seconds by which the clock of each node that has reached rank 0's node is ahead of its clock."""
        first = next(iter(self.roll.nodes))
        reached = {node: others[first] for node, others in self.reached.items() if first in others}
        return {node: -each.clock for node, each in reached.items() if not each.problem}

    @property
    def can_measure(self) -> bool:
        """Tell whether all ranks are connected, have valid flags of a run, and can reach one another."""
        complete = len(self.reports) == self.world_size and len(self.addresses) == len(self.roll.nodes)
        apart = any(each.problem for others in self.reached.values() for each in others.values())
        unready = any(report.doing or report.problem for report in self.reports.values())
        return self.options.max_bytes > 0 and self.world_size > 1 and complete and not apart and not unready
