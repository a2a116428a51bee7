"""Copies in memory of all that each rank holds: taken between steps, sent to a partner in the background, and loaded.

A copy is taken in two phases. First the state is copied into a slot (`Copies.after_step`), while training stands still.
Then, beside the next steps, a thread computes the checksums, commits the slot, and exchanges copies with the partners.
Two slots alternate, and one is overwritten only after all ranks have committed the other: at each moment there is a
step of which every rank has a copy, its own or its partner's.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megalite.checkpoint import Candidates, TrainingState
from megalite.checkpoint.directory import iteration_of
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.plan import Region, held_regions
from megalite.checkpoint.tensors import TensorBox
from megalite.config.parallel import ParallelConfig
from megalite.config.run import TaskConfig
from megalite.config.yaml_file import dump
from megalite.errors import CheckpointError, CommunicationError, ConfigurationError, CorruptCheckpointError
from megalite.extras.recovery.choice import Choice, Taken, choose
from megalite.extras.recovery.gathered import gathered
from megalite.extras.recovery.interval import Price, interval_for
from megalite.extras.recovery.partner import Links, goes_on_without_nodes, partners_of
from megalite.extras.recovery.slot import FOLDER, Slot, Whose, byte_ranges, seal, size_of
from megalite.parallel import device
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.process.bounded import in_thread
from megalite.process.host import host_name
from megalite.process.launchers import MEMORY_FILES
from megalite.storage import AnyPath
from megalite.training.resume import ResumePoint
from megalite.training.room_on_host import full_hosts
from megalite.training.trainer import Trainer

if TYPE_CHECKING:
    from megalite.extras.recovery.survivors import SurvivorsTrainer

_GIB = 2**30
_OF_LAYOUT = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")
"""Flags beside those of the section, which change no number either (docs/invariants.md)."""
_SETTLING_SECONDS = 10.0
"""Maximum wait for a copy, after another rank has failed."""
_LAST_SECONDS = 60.0
"""Maximum wait for the last copy at the end of a run."""


def memory_copies(config: TaskConfig, mesh: ParallelMesh) -> Copies | None:
    """Return the copies in memory of this rank; None if there are to be none. Called by all ranks together.

    Raises ConfigurationError, on all ranks alike, if the map of partners makes no sense.
    """
    process, _, files = os.environ.get(MEMORY_FILES, "").partition(" ")
    own = process == str(os.getpid())  # a program that a rank starts inherits the variable
    given = config.recovery.memory_checkpoint_interval != 0 and not config.synchronization.has_servers
    if not all(all_gather_json(own and given, mesh)):
        return None
    return Copies(config, mesh, [int(number) for number in files.split(",")])


class Copies:
    """The copies of this rank, and those that it keeps for another one. All methods are called by all ranks together.

    Attributes:
        notes: lines to show when the run begins.
        interval: steps between two copies; None until it has been measured.
    """

    def __init__(self, config: TaskConfig, mesh: ParallelMesh, files: Sequence[int]) -> None:
        """Find the partners, and connect.

        `files`: descriptors of two own slots, of two for the other rank, and of one for the gradients of a step.
        """
        self._config, self._mesh = config, mesh
        slots = [Slot(number) for number in files]
        self._own, self._kept, self._unfinished = slots[:2], slots[2:4], slots[4]
        mark, replaced = secrets.randbits(63), goes_on_without_nodes(os.environ, config.recovery)
        told = all_gather_json((host_name(), replaced, mark), mesh)
        hosts = [host for host, *_ in told]
        self._replaced = any(replaced for _, replaced, _ in told)
        distance = config.recovery.memory_checkpoint_partner
        self._partners = partners_of(hosts, distance) if self._replaced else None
        self._links = None if self._partners is None else Links(self._partners, mesh)
        self._host = hosts[mesh.rank]
        parallel = config.parallel
        numbers = ParallelConfig(
            grad_reduce_in_bf16=parallel.grad_reduce_in_bf16, bitwise_elastic=parallel.bitwise_elastic
        )
        training = replace(config.training, **{name: getattr(type(config.training), name) for name in _OF_LAYOUT})
        run = _digest(dump(replace(config, parallel=numbers, training=training)))
        layout = _digest(f"{mesh.whole.world_size} {config.parallel}")
        self._whose = Whose(run, layout, mesh.whole.world_size, mesh.rank, told[0][2])
        self.notes: tuple[str, ...] = ()
        self.interval = config.recovery.memory_checkpoint_interval
        self._work: Future[float] | None = None
        """Seconds of the background work of the last copy."""
        self._taken = 0
        """Step of the last copy."""
        self._continued: Taken | None = None
        """Copy from which this start continues."""
        self._blocking = 0.0
        """Seconds for which the last copy has kept training from going on."""
        self._told = True
        self._at, self._step_seconds = 0.0, 0.0
        self._trainer: Trainer | None = None

    # ------------------------------------------------------------------------------------------------ at the start

    def load(self, build: Any, on_disk: Sequence[AnyPath]) -> tuple[Trainer, str] | None:
        """Continue from the newest step of which every rank has a copy, if it is newer than the checkpoints on disk.

        A copy whose checksums do not match is dropped, with a warning, and the choice is made again.

        Args:
            build: returns the trainer, the same one until its `cache_clear` is called.
            on_disk: the checkpoints, the newest first.

        Returns:
            the trainer and a text on where it continues; None to load from disk.
        """
        newest, failed = max(map(iteration_of, on_disk), default=0), False
        while (chosen := self._choose()) is not None and chosen.taken.step > newest:
            named = f"the copies in memory of step {chosen.taken.step}"
            fetched = chosen.fetched(self._partners, self._whose.layout.hex())
            if not self._fetch(chosen.taken, fetched or {}):
                continue
            holders = chosen.holders if fetched is None else {self._mesh.rank: self._mesh.rank}
            slots = self._slots_with(chosen.taken)
            used = {rank: slots[rank] for rank, holder in holders.items() if holder == self._mesh.rank}
            try:
                if fetched is None:
                    described, files = gathered(used, self._mesh)
                    build().load(FOLDER, described, ResumePoint(Candidates(), holders=files))
                else:
                    described = used[self._mesh.rank].manifest()
                    build().load(FOLDER, described, ResumePoint(Candidates(), alone=True))
            except CorruptCheckpointError as error:
                failed = True
                self._warn(error, named)
                if not self._drop_damaged(used.values()):
                    break
                continue
            except CheckpointError as error:
                failed = True
                self._warn(error, named)
                break
            self._continued = chosen.taken
            whose = [f"rank {rank}'s from its partner, rank {partner}" for rank, partner in (fetched or {}).items()]
            if fetched is None:
                whose = [f"of {chosen.taken.world_size} ranks, sent to those that need them now"]
            return build(), f"continues from {named}" + (f" ({'; '.join(whose)})" if whose else "")
        if failed:  # a part may have been loaded
            build.cache_clear()
        return None

    def _choose(self) -> Choice | None:
        mine = [(taken, rank) for taken, rank, _ in self._copies()]
        told = all_gather_json(mine, self._mesh)
        return choose([[(Taken(*taken), rank) for taken, rank in copies] for copies in told])

    def _copies(self) -> list[tuple[Taken, int, Slot]]:
        """Return the copies of this run that this rank has: what each is of, its rank, and its slot."""
        found = []
        for slot in (*self._own, *self._kept):
            header = slot.header()
            if header is not None and header.whose.run == self._whose.run:
                whose = header.whose
                taken = Taken(header.step, whose.mark, whose.world_size, whose.layout.hex())
                found.append((taken, whose.rank, slot))
        return found

    def _slots_with(self, taken: Taken) -> dict[int, Slot]:
        """Return the slots with a part of this copy, by the rank that the part is of."""
        return {rank: slot for each, rank, slot in reversed(self._copies()) if each == taken}  # its own before others'

    def _fetch(self, taken: Taken, fetched: Mapping[int, int]) -> bool:
        """Get the copies that ranks lack from their partners. Returns False if one of these is damaged."""
        whole, slots = True, self._slots_with(taken)
        for rank, partner in fetched.items():
            assert self._links is not None
            if self._mesh.rank == partner:
                kept = slots[rank]
                header = kept.header() if kept.is_intact() else None
                if header is None:
                    kept.discard()
                else:
                    kept.allocate(header.stop)
                self._links.give_back(kept, header)
                whole &= header is not None
            if self._mesh.rank == rank:
                others = [slot for slot in self._own if slot not in slots.values()]
                whole &= self._links.take_back(_free(others or self._own))
        told = all_gather_json(whole, self._mesh)
        if not all(told):
            ranks = ", ".join(str(rank) for rank, each in enumerate(told) if not each and rank in fetched)
            self.notes += (
                f"WARNING: the copy in memory of step {taken.step} that a partner keeps for rank {ranks} is "
                "damaged: it is not used",
            )
        return all(told)

    def _drop_damaged(self, slots: Iterable[Slot]) -> bool:
        """Drop those of this rank's copies that are damaged. Returns whether any rank has dropped one."""
        damaged = [slot for slot in slots if not slot.is_intact()]
        for slot in damaged:
            slot.discard()
        return any(all_gather_json(bool(damaged), self._mesh))

    def _drop_all_but(self, taken: Taken | None) -> None:
        """Drop all other copies: those of later steps would count as newer than what is taken from now on."""
        left = [] if taken is None else self._slots_with(taken).values()
        for slot in (*self._own, *self._kept):
            if slot not in left:
                slot.discard()

    def _warn(self, error: CheckpointError, named: str) -> None:
        text = re.sub(rf"{FOLDER}(/\d+)?", named, str(error))
        advice = " Load another checkpoint; megalite-inspect-checkpoint --verify lists all that is damaged"
        self.notes += (f"WARNING: {text.replace(advice, '')}",)

    # ------------------------------------------------------------------------------------------------ while it trains

    def begin(self, trainer: Trainer) -> None:
        """Allocate the slots, or if a host has too little memory for them and no interval was given, take no copies.

        Raises ConfigurationError, on all ranks alike, if a host has too little memory for the interval that was given.
        """
        self._drop_all_but(self._continued)
        self._trainer, self._taken = trainer, trainer.iteration
        described = Manifest(*trainer.progress(), {}, {})
        size = size_of([region.part for region in self._regions(trainer)], described)
        survivor = _survivor(trainer) if self._config.recovery.survivors_finish_step else None
        unfinished = 0 if survivor is None else size_of(survivor.kept_parts(), described)
        sizes = all_gather_json(size, self._mesh)
        other = 0 if self._links is None else sizes[self._links.source]
        if not self._has_room(2 * (size + other) + unfinished):
            return
        for slot in self._own:
            slot.allocate(size)
            device.page_lock(slot.memory, self._mesh.device)
        for slot in self._kept if self._links is not None else ():
            slot.allocate(other)
        every = "" if self.interval is None else f", every {self.interval} step{'s' * (self.interval != 1)}"
        self.notes += (f"copies in memory: {size / 2**20:,.1f} MiB on rank 0, twice, {self._partner_text()}{every}",)
        if survivor is not None:
            self._unfinished.allocate(unfinished)
            note = survivor.begin(self._unfinished, self._whose, self._continued, self)
            self.notes += () if note is None else (note,)
        self._set_clock()

    def _partner_text(self) -> str:
        if self._links is not None:
            return f"and twice on its partner, rank {self._links.partner}"
        why = "they need nodes with equal numbers of ranks, and two of them"
        if not self._replaced:
            why = (
                "this launcher replaces no lost node, as torchrun's --max-restarts does, and there are no --spare-nodes"
            )
        return f"without partners, as {why}: a lost node costs the steps since the last checkpoint on disk"

    def _regions(self, trainer: Trainer) -> list[Region]:
        """Return what this rank holds, each box once."""
        trainer.optimizer.finish_parameter_gather()
        regions = held_regions(trainer.network, trainer.optimizer)
        return list({(region.part.name, region.part.box): region for region in regions}.values())

    def _has_room(self, needed: int) -> bool:
        """Tell whether all hosts have the memory. If not, note that there are no copies, or refuse their interval."""
        full = next(full_hosts(needed, self._mesh), None)
        if full is None:
            return True
        name, _, size, limit = full
        gradients = ", with the gradients of each rank" if self._config.recovery.survivors_finish_step else ""
        why = (
            f"host {name}: copies in memory need {size / _GIB:.2f} GiB, two of each rank and two of each that has its "
            f"partner there{gradients}, and ranks may have {limit / _GIB:.2f} GiB (the limit of their control group, "
            "or what the machine has): "
        )
        advice = "divide the state among more ranks by --data-parallel-sharding-strategy (ZeRO)"
        if self.interval is not None:
            raise ConfigurationError(f"{why}give --memory-checkpoint-interval 0, or {advice}")
        self.interval = 0
        self.notes += (f"{why}there are none, and a failure costs the steps since the last checkpoint; {advice}",)
        return False

    @property
    def busy(self) -> bool:
        """Return whether this rank's last copy is still under way. Raises the error of its background work."""
        if self._work is None:
            return False
        if self._work.done():
            self._work.result()
            return False
        return True

    def after_step(self, *, busy: bool) -> str | None:
        """Take a copy if one is due, and none is under way on any rank. Returns a text to show.

        `busy`: True if any rank is `busy`.
        """
        if busy or self.interval == 0:
            return None
        trainer = self._trainer
        assert trainer is not None
        told = None
        if self.interval is None and self._work is not None:
            price = Price(self._blocking, self._work.result(), self._step_seconds)
            every = all_gather_json(interval_for(price, on_device=self._mesh.device.type == "cuda"), self._mesh)
            self.interval = max(every)
            told = f"copies in memory: every {self.interval} steps; {price.text(self.interval)}"
        now = trainer.iteration
        if self.interval is None:
            if now - self._taken == 1:  # a step as others are: the first one of a process is slower
                self._set_clock()
            elif now - self._taken >= 2:
                self._step_seconds = self._since_clock()
                self._take(trainer)
        elif now // self.interval > self._taken // self.interval:
            self._take(trainer)
        return told

    def taken(self) -> int:
        """Return the step of the last copy of this start."""
        return self._taken

    def settle(self) -> None:
        """Wait until this rank's last copy is whole. Its exchange may fail, as another rank has."""
        if self._work is not None:
            with suppress(Exception):
                self._work.result(_SETTLING_SECONDS)

    def drop_after(self, step: int) -> None:
        """Drop the copies of later steps, also one that is under way, and kept gradients: they may be wrong."""
        self._unfinished.discard()
        if self._work is not None:
            with suppress(Exception):  # whether it is whole or not, it goes
                self._work.result()
        for slot in (*self._own, *self._kept):
            header = slot.header()
            if header is not None and header.step > step:
                slot.discard()

    def figures(self) -> dict[str, float]:
        """Return the figure for the record of the step after a copy, or none."""
        blocking, self._told = 0.0 if self._told else self._blocking, True
        return {"memory_copy_s": blocking} if blocking else {}

    def _set_clock(self) -> None:
        self._at = time.perf_counter() if self._mesh.device.type == "cuda" else time.process_time()

    def _since_clock(self) -> float:
        before = self._at
        self._set_clock()
        return self._at - before

    @torch.no_grad()
    def _take(self, trainer: Trainer) -> None:
        """Copy the state into the older slot, and begin the background work."""
        began = time.perf_counter()
        progress = trainer.progress()
        regions = self._regions(trainer)
        if self._links is None and self._work is not None:  # all ranks have a new copy; no other will replace these
            for kept in self._kept:
                kept.release()
        slot = _free(self._own)
        slot.discard()
        parts = [region.part for region in regions]
        for region, where in zip(regions, byte_ranges(parts), strict=True):
            room = slot.memory[where.start : where.stop].view(region.part.dtype)
            room.copy_(region.values.flatten(), non_blocking=True)
        device.synchronize(self._mesh.device)
        self._taken, self._told = trainer.iteration, False
        self._work = in_thread(lambda: self._complete(slot, parts, progress))
        self._blocking = time.perf_counter() - began

    def _complete(
        self, slot: Slot, parts: Sequence[TensorBox], progress: tuple[TrainingState, dict[str, Any]]
    ) -> float:
        """Commit a copy, and exchange copies with the partners. Returns the seconds of the CPU."""
        began = time.thread_time()
        header = seal(slot, self._whose, parts, Manifest(*progress, {}, {}))
        if self._links is not None:
            try:
                self._links.exchange(slot, header, _free(self._kept))
            except (RuntimeError, CorruptCheckpointError) as error:  # a partner has died, or its bytes were changed
                raise CommunicationError(f"the exchange of copies in memory failed: {error}") from error
        return time.thread_time() - began

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *error: Any) -> None:
        """Complete the copy that is under way, unless the run has failed, and disconnect."""
        if error[0] is not None:
            return
        if self._work is not None:
            try:
                self._work.result(_LAST_SECONDS)
            except Exception:  # the run is complete without this copy, whose thread may still use the links
                return
        if self._links is not None:
            self._links.close()


def _survivor(trainer: Trainer) -> SurvivorsTrainer:
    from megalite.extras.recovery.survivors import SurvivorsTrainer

    assert isinstance(trainer, SurvivorsTrainer)
    return trainer


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _free(slots: Sequence[Slot]) -> Slot:
    """Return the slot to overwrite: one without a copy, or else that of the older one."""
    return min(slots, key=lambda slot: -1 if (header := slot.header()) is None else header.step)
