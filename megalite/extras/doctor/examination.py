"""Examination by all ranks together, from the first contact to the verdict: presence, traits, connections and speed.

Each part has a time limit. A rank that has not answered by then is named, and the parts that need all ranks are left
out.
"""

from __future__ import annotations

import datetime
import os
import sys
import uuid
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NoReturn

import torch.distributed as dist

from megalite.config import RunConfig
from megalite.errors import CommunicationError, MegaliteError
from megalite.extras.doctor.bandwidth import Measurement, Timing
from megalite.extras.doctor.consistency import traits
from megalite.extras.doctor.findings import Finding, Options
from megalite.extras.doctor.judgement import judge, show, write_json
from megalite.extras.doctor.network import Reached, reach_all
from megalite.extras.doctor.reports import Found, Report, Roll
from megalite.extras.doctor.roll_call import RollCall
from megalite.extras.doctor.run_directory import Probe, checkpoint_bytes
from megalite.lifecycle.failure import write_exit_code
from megalite.lifecycle.rendezvous import connect
from megalite.parallel import device
from megalite.parallel.mesh import ParallelMesh
from megalite.process.bounded import in_thread
from megalite.process.host import host_name
from megalite.process.output import say
from megalite.process.place import Place, ranks_by_value
from megalite.process.signals import StopRequest
from megalite.storage import open_directory
from megalite.torch_internals import PrefixStore

_GRACE = 5.0
"""Seconds for a rank to report that its own time limit is exceeded."""


def examine(options: Options, config: RunConfig | None, problem: str, place: Place) -> int:
    """Examine all ranks together, and show the findings on rank 0. Returns the exit code, the same on all ranks.

    `config`: the run's configuration, if there is one; `problem`: why there is none, if the flags are wrong. Raises
    CommunicationError on a rank that gets no answer from rank 0.
    """
    with StopRequest() as stop, ExitStack() as stack:
        call = RollCall(place, options.patience, stop.local_request)
        examination = Examination(options, config, problem, place, call)
        found = examination.run(stack)
        if place.rank == 0:
            found.stopped = stop.local_request() != 0
            verdict = judge(found)
            show(found, verdict)
            call.publish("exit code", verdict.exit_code)
        try:
            # This answer comes later than the others: after all the timing.
            code: int = call.receive("exit code", options.seconds + _GRACE)
        except CommunicationError as error:
            if examination.whole:
                raise
            # Reporting the error needs the process group's store, which a thread may be using.
            say(f"error on rank {call.rank}: {error}", to_error=True)
            _end(error.exit_code)
        # Rank 0 may host the store, so it waits for all ranks that answered in the last round.
        call.gather("heard", "", found.reports if found.measured is None else found.measured)
    if place.rank == 0 and options.json is not None:
        write_json(options.json, found, verdict)
    if not examination.whole:
        if place.rank == 0:
            write_exit_code(code)
        _end(code)
    return code


def _end(code: int) -> NoReturn:
    """End at once: a thread, or a group whose peers have ended, may hang when the interpreter shuts down."""
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


class Examination:
    """Part of the examination that one rank does."""

    def __init__(self, options: Options, config: RunConfig | None, problem: str, place: Place, call: RollCall) -> None:
        self._options, self._config, self._problem = options, config, problem
        self._place, self._call = place, call
        self._device = device.local_device(place.local_rank)
        chosen = None if config is None else config.parallel.distributed_backend
        self._backend = chosen or device.default_backend(self._device)
        self._save = None if config is None else config.checkpoint.save
        self._findings: list[Finding] = []
        self.whole = True
        """False while a thread that may never end is still doing work."""

    def run(self, stack: ExitStack) -> Found:
        """Run all parts in turn; the findings are on rank 0. `stack`: resources that must stay open until the end."""
        config, size = self._config, None
        if config is not None and self._save is not None and self._place.rank == 0:
            size = in_thread(lambda: checkpoint_bytes(config))
        roll = self._arrive(stack)
        found = Found(self._place, self._backend, self._options, self._save, roll, self._findings)
        self._report(found)
        if size is not None:
            found.checkpoint_size = self._result(size, "building the network without memory")
        self._reach(found)
        self._measure(found)
        return found

    def _ends(self, work: Future[Any], more_seconds: float = 0.0) -> bool:
        """Wait for work on this rank, and tell whether it ends in time."""
        ended = self._call.wait(work, more_seconds)
        self.whole = self.whole and ended
        return ended

    # ---------------------------------------------------------------------------------------------- who is there

    def _arrive(self, stack: ExitStack) -> Roll:
        """Return who has come within the patience of rank 0, which also writes a probe into the run directory.

        Raises CommunicationError on a rank that came later.
        """
        came = self._call.gather("arrival", host_name(), range(self._place.world_size))
        if self._place.rank == 0:
            probe: Probe | None = None
            if (save := self._save) is not None:
                work = in_thread(lambda: Probe(open_directory(save)))
                probe = self._result(work, f"writing to the run directory --save {save}")
            if probe is not None:
                stack.callback(probe.remove)
            name_and_text = None if probe is None else (probe.name, probe.text)
            self._call.publish("roll", asdict(Roll(ranks_by_value(came), uuid.uuid4().hex, name_and_text)))
        roll = Roll(**self._call.receive("roll", self._options.patience))
        if self._place.rank not in roll.ranks:
            raise CommunicationError(f"it came after the {self._options.patience:g} seconds of --patience")
        return roll

    def _result(self, work: Future[Any], doing: str) -> Any:
        """Return the result of rank 0's work, or None, with a finding added."""
        try:
            if self._ends(work):
                return work.result()
            self._findings.append(Finding("sick", f"{doing} does not end", host_name()))
        except (MegaliteError, OSError) as error:
            self._findings.append(Finding("wrong", f"{doing}: {error}"))
        return None

    # ---------------------------------------------------------------------------------------------- what each has

    def _report(self, found: Found) -> None:
        own = Report(traits(self._config, self._device), self._problem)
        if self._place.rank in found.firsts:
            gpus, host = self._options.gpus, self._place.host
            work = in_thread(lambda: own.examine_node(found.roll, self._config, gpus, self._backend, host))
            if self._ends(work):
                work.result()
        answers = self._call.gather("report", asdict(own), found.roll.ranks, _GRACE)
        found.reports = {rank: Report.of_json(answer) for rank, answer in answers.items()}

    # ---------------------------------------------------------------------------------------------- who reaches whom

    def _reach(self, found: Found) -> None:
        """Let the first rank of each node try to reach the other nodes, and keep the answers on rank 0."""
        roll, rank = found.roll, self._place.rank
        if rank == 0:
            self._call.publish("addresses", found.addresses)
        addresses = self._call.receive("addresses", _GRACE)
        firsts = [first for first, node in found.firsts.items() if node in addresses]
        if len(firsts) > 1 and (rank in firsts or rank == 0):
            answer = None
            if rank in firsts:
                own = roll.node_of(rank)
                work = in_thread(lambda: reach_all(addresses, own, roll.token))
                silent = {other: Reached("no answer in time") for other in addresses if other != own}
                reached = work.result() if self._ends(work) else silent
                answer = {other: asdict(each) for other, each in reached.items()}
            answers = self._call.gather("reached", answer, firsts, _GRACE)
            found.reached = {
                roll.node_of(first): {node: Reached(**each) for node, each in others.items()}
                for first, others in answers.items()
            }

    # ---------------------------------------------------------------------------------------------- how fast

    def _measure(self, found: Found) -> None:
        """Time messages between all ranks if rank 0 says that they reach each other, and keep the timings on rank 0."""
        if self._place.rank == 0:
            self._call.publish("measure", found.can_measure)
        if not self._call.receive("measure", _GRACE):
            return
        measurement = Measurement(list(found.roll.nodes.values()), self._options.max_bytes, self._options.seconds)
        work = in_thread(lambda: self._time(measurement))
        failure = ""
        if self._ends(work, self._options.seconds):
            try:
                work.result()
            except (MegaliteError, RuntimeError) as error:
                failure = f"{measurement.now}: {str(error).splitlines()[0]}"
        elif not self._call.stopping():
            failure = f"{measurement.now} does not end"
        # A collective that has failed on this rank may still keep a thread of its own.
        done = work.done() and not failure
        self.whole = self.whole and done
        answer = {"failure": failure, "timings": [asdict(each) for each in measurement.timings] if done else []}
        answers = self._call.gather("measured", answer, range(self._place.world_size), self._options.seconds + _GRACE)
        found.measured = list(answers)
        found.failures = {rank: each["failure"] for rank, each in answers.items() if each["failure"]}
        found.timings = [
            Timing(**timing | {"ranks": tuple(timing["ranks"])})
            for each in answers.values()
            for timing in each["timings"]
        ]

    def _time(self, measurement: Measurement) -> None:
        device.activate(self._device)
        timeout = datetime.timedelta(seconds=self._options.patience + self._options.seconds)
        rank, world_size = self._place.rank, self._place.world_size
        store = PrefixStore("group", connect(self._place, self._options.patience, "doctor").store)
        dist.init_process_group(self._backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        mesh = ParallelMesh(rank=rank, world_size=world_size, device=self._device, timeout=timeout)
        measurement.run(mesh)
        mesh.close()
        dist.destroy_process_group()
