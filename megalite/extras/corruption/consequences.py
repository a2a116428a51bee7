"""Consequences of wrong numbers: who is named in which file, which checkpoints are suspect, and how the run ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.atomic_files import open_itself
from megalite.checkpoint.directory import TRACKER, complete
from megalite.config.corruption import CorruptionConfig
from megalite.errors import EXIT_RESUMABLE, MegaliteError
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.run.copies import Copies
from megalite.run.corruption import SICK_NODES
from megalite.storage import AnyPath, write_atomically

_SHOWN = 8
"""The most ranks in a message."""


class SilentCorruptionError(MegaliteError):
    """Replicas have different numbers. The message names ranks, nodes, and the checkpoints that may be wrong."""


class GoBackError(SilentCorruptionError):
    """Replicas have different numbers, and a run that is started again continues from before."""

    exit_code = EXIT_RESUMABLE


@dataclass(frozen=True)
class Finding:
    """Something that is wrong before the update of a step."""

    what: str
    """Text for the message."""
    why: str
    """Word for the file of sick nodes."""
    step: int
    ranks: Sequence[int]
    """Ranks that are wrong; empty if it is not known which of several are."""
    agreed: int
    """Last step whose weights were found to be right; 0: none is known to be."""


class Consequences:
    """Records a finding, and ends the run. All methods are called by all ranks together."""

    def __init__(
        self, config: CorruptionConfig, directory: AnyPath | None, mesh: ParallelMesh, copies: Copies | None
    ) -> None:
        self._config, self._directory, self._mesh, self._copies = config, directory, mesh, copies

    def end(self, finding: Finding, hosts: Sequence[str]) -> SilentCorruptionError:
        """Return the error to end with, the same on all ranks. `hosts`: the node of each rank."""
        directory, agreed = self._directory, finding.agreed
        goes_back = self._config.on_corruption == "go-back"
        told: list[str | None] = [None, None]
        with raise_on_all_ranks(self._mesh, f"recording silent corruption in {directory}"):
            if self._mesh.rank == 0 and directory is not None:
                self._record(directory, finding, hosts)
                told = self._checkpoints(directory, agreed, goes_back=goes_back)
        if goes_back and self._copies is not None:
            self._copies.drop_after(agreed)
        suspect, newest = all_gather_json(told, self._mesh)[0]
        text = f"{finding.what}. {f'Steps after {agreed}' if agreed else 'All steps so far'} may be wrong"
        if suspect:
            text += f", and so may {suspect}"
        if not goes_back:
            advice = f"write {newest} into {directory}/{TRACKER}" if newest is not None else "begin anew"
            return SilentCorruptionError(f"{text}. To go back, leave the node out, and {advice}")
        if newest is None and suspect:
            return SilentCorruptionError(f"{text}. There is no older one to go back to: remove them to begin anew")
        whence = "the beginning" if newest is None else f"step {newest}"
        whence += "" if self._copies is None else ", or to newer copies in memory"
        return GoBackError(f"{text}. They will not be loaded: --resume auto goes back to {whence}")

    def _record(self, directory: AnyPath, finding: Finding, hosts: Sequence[str]) -> None:
        """Append the ranks that are wrong to the file of sick nodes. Called by rank 0."""
        lines = "".join(
            json.dumps({"node": hosts[rank], "rank": rank, "why": finding.why, "step": finding.step}) + "\n"
            for rank in finding.ranks
        )
        if lines and isinstance(directory, Path):
            with open_itself(directory / SICK_NODES, "a", encoding="utf-8") as file:
                file.write(lines)

    def _checkpoints(self, directory: AnyPath, agreed: int, *, goes_back: bool) -> list[str | None]:
        """Return the names of the suspect checkpoints, and the step of the newest of the others. Called by rank 0.

        `goes_back`: have the next start load that one.
        """
        found = complete(directory)
        suspect = [found[step].name for step in sorted(found) if step > agreed]
        newest = max((step for step in found if step <= agreed), default=None)
        if goes_back and suspect and newest is not None:
            write_atomically(directory / TRACKER, f"{newest}\n".encode())
        return [", ".join(suspect) or None, None if newest is None else str(newest)]


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return these ranks in words, with their nodes. `hosts`: the node of each rank."""
    shown = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
