"""Campaign: a run that is disturbed and restarted repeatedly, and compared with an undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.end_to_end.runs import GPT2, ROOT, assert_same_checkpoint, metrics, words
from tests.harness.fault import Fault
from tests.harness.job import Job
from tests.harness.token_files import add_document

FAULTY = ROOT / "tests" / "harness" / "faulty_training.py"
RANKS = 4
STEPS = 60
"""Steps of the run, unless something ends it earlier."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp": words("--tp 2 --sequence-parallel --use-distributed-optimizer --global-batch-size 4"),
    "pp": words(
        "--num-layers 4 --pp 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8 --async-save "
        "--use-distributed-optimizer --overlap-grad-reduce"
    ),
}
BITWISE = words("--tp 2 --use-distributed-optimizer --global-batch-size 8 --deterministic-mode --bitwise-elastic")
EXPERTS = words(
    "--num-experts 4 --ep 4 --moe-token-dispatcher-type alltoall --use-distributed-optimizer --global-batch-size 8"
)
CONTEXT = words("--cp 4 --use-distributed-optimizer --global-batch-size 4")
FLAGS = (
    *words("--tokenizer-type NullTokenizer --vocab-size 60 --split 8,2,0"),
    *GPT2,
    *words("--eval-iters 1 --eval-interval 2 --tolerated-save-failures 0 --lr-decay-style constant"),
    *words("--resume auto"),
)

DEATHS = {"kill": -signal.SIGKILL, "exit": 1, "crash": -signal.SIGSEGV}
STILL = ("stop", "hold the GIL")
HANGS = (*STILL, "loop")
REQUESTS = ("term", "usr1")
ERRORS = {"defect": 70, "data": 64}
KINDS = (*DEATHS, *HANGS, *REQUESTS, *ERRORS)

UNWATCHED = ("index build", "connected")
MEETING = ("meeting",)
START = (*MEETING, "building", "loading")
SAVE = ("writing", "commit", "saved")
STEP = ("data", "forward", "backward", "reduce", "optimizer", "agreement", "evaluation")
PHASES = (*UNWATCHED, *START, *STEP, *SAVE)
OF_RANK_0 = ("commit",)
OF_ALL = ("writing", "commit")
"""Phases in which the ranks agree on the consequence of an error."""


_OF_TORCH = re.compile(
    r"^((\[rank\d+\]:)?\[W\d.*|Exception raised from .*|frame #.*|<omitting python frames>|)\n", re.M
)


class Campaign:
    """Campaign: one run directory, and all starts of its run."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.folder, self.layout = folder, layout
        self.directory = folder / "run"
        self._starts = 0
        folder.mkdir()
        with IndexedDatasetWriter(folder / "corpus", np.uint16) as writer:
            for document in range(60):
                add_document(writer, [*(np.arange(document, document + 20) % 50), 60])
            writer.finish()

    @property
    def latest(self) -> int:
        """Return the step of the newest checkpoint, 0 without one; the tracker may not name it yet."""
        return max((int(path.name[5:]) for path in self.directory.glob("iter_" + "[0-9]" * 7)), default=0)

    @contextmanager
    def start(
        self,
        faults: str = "",
        *,
        steps: int | None = None,
        least_seconds: float = 60.0,
        longest_seconds: float = 120.0,
        store_of_rank_0: bool = False,
        step_seconds: float = 0.0,
        save_interval: int = 1,
        more: Sequence[str] = (),
    ) -> Iterator[Job]:
        """Start a job that ends by itself after some steps.

        `least_seconds` and `longest_seconds`: limits of a step, and of a start or a save. `step_seconds`: added to the
        duration of each step, to give a test time. `more`: flags of this start.
        """
        self._starts += 1
        shutil.rmtree(self.folder / "cache", ignore_errors=True)  # makes each start build its indices
        flags = ["--data-path", self.folder / "corpus", "--data-cache-path", self.folder / "cache"]
        flags += ["--train-iters", STEPS, "--save", self.directory, "--watchdog-min-seconds", least_seconds]
        flags += ["--save-interval", save_interval, *more]
        if steps is not None:
            flags += ["--exit-interval", self.latest + steps]
        environment = {"FAULT": faults, "FAULT_RECORD": str(self.folder), "LONGEST_SECONDS": str(longest_seconds)}
        environment["STEP_SECONDS"] = str(step_seconds)
        output = self.folder / f"start{self._starts}"
        with Job(
            [FAULTY, *FLAGS, *(LAYOUTS | {"ep": EXPERTS, "cp": CONTEXT, "bitwise": BITWISE})[self.layout], *flags],
            RANKS,
            output,
            environment,
            store_of_rank_0=store_of_rank_0,
        ) as job:
            yield job

    def disturb(self, fault: Fault, *, store_of_rank_0: bool = False, launcher: bool = False) -> None:
        """Start the run, with a fault; assert its end, its messages, and that no checkpoint is lost.

        `launcher`: end the other ranks as soon as one rank has ended.
        """
        before = self.latest
        hangs = fault.kind in HANGS
        with self.start(
            str(fault),
            steps=6,
            least_seconds=2.0 if hangs else 60.0,
            longest_seconds=8.0 if hangs else 120.0,
            store_of_rank_0=store_of_rank_0,
        ) as job:
            watched = fault.phase not in UNWATCHED
            if launcher or not watched:
                job.wait_as_launcher()
            codes = job.wait()
            where = f"{fault} in {job.directory}: {codes}\n" + "\n".join(map(job.stderr, range(RANKS)))
            assert fault.record(self.folder).read_text() == str(fault), where
            fault.record(self.folder).unlink()
            assert self.latest >= before, where
            assert_said(job, fault, where)
            if watched and not (launcher and fault.kind in ERRORS):  # whom the launcher ends while an error is told
                assert_codes(codes, fault, where)

    def assert_unbroken(self, *, but: str | None = None) -> None:
        """Continue for two steps, and compare with an undisturbed run of as many steps, except for one figure."""
        last = self.latest + 2
        assert last <= STEPS, "the run must be longer"
        with self.start(steps=2) as job:
            codes = job.wait()
            assert codes == [85] * RANKS, f"{self.folder}: {codes}\n" + "\n".join(map(job.stderr, range(RANKS)))
        assert self.latest == last
        whole = undisturbed(self.folder / "whole", self.layout, last)
        assert_same_checkpoint(self.directory / f"iter_{last:07d}", whole / f"iter_{last:07d}")
        ours, theirs = (
            [
                {name: value for name, value in line.items() if but is None or name.split("/")[0] != but}
                for line in metrics(directory)
            ]
            for directory in (self.directory, whole)
        )
        assert ours == theirs
        left = [*self.directory.rglob("*tmp*"), *self.directory.glob("iter_*.*")]
        assert not left, left


def assert_codes(codes: list[int], fault: Fault, where: str) -> None:
    others = [code for rank, code in enumerate(codes) if rank != fault.rank]
    if fault.kind in ERRORS:
        expected = {93, ERRORS[fault.kind]} if fault.phase in OF_ALL else {ERRORS[fault.kind]}
        assert set(codes) <= expected, where
        assert len(set(codes)) == 1, where
        return
    assert others == [85] * (RANKS - 1), where
    own = DEATHS.get(fault.kind, -signal.SIGKILL if fault.kind in STILL else 85)
    assert codes[fault.rank] == own, where


def everything_said(job: Job) -> list[str]:
    """Return the output of each rank with any, without torch's warnings about a store that ended with rank 0."""
    texts = (_OF_TORCH.sub("", job.stderr(rank)) for rank in range(RANKS))
    return [text for text in texts if text]


def assert_said(job: Job, fault: Fault, where: str) -> None:
    """Assert one message, by one rank, that names the culprit; none if the run was requested to end."""
    said = everything_said(job)
    messages = [line for text in said for line in text.splitlines() if line.startswith("error")]
    watched = fault.phase not in UNWATCHED
    if fault.kind in REQUESTS and watched:
        assert said == [], where
        return
    if not watched and fault.kind not in ERRORS:
        # Before there is a group, only the launcher notices a dead rank; and a rank that is requested to end does.
        assert len(messages) <= 1, where
        assert not any("Traceback" in text for text in said), where
        assert not messages or fault.phase == "index build" or f"rank {fault.rank} has " in said[0], where
        return
    assert len(messages) == 1, where
    assert len(said) == 1, where
    assert ("Traceback" in said[0]) == (fault.kind == "defect" and "failed on rank" not in said[0]), where
    process = job.ranks[fault.rank].process.pid
    if fault.kind in DEATHS:
        gone = f"rank {fault.rank} (process {process} on {os.uname().nodename}) has ended without a message, last seen"
        # Without a section: the rank was between two of them when it was last seen.
        assert re.search(re.escape(gone) + r' in step \d+(, "[a-z ]+")?, [\d.]+ s before: ', said[0]), where
    elif fault.kind in STILL:
        assert f"rank {fault.rank} (process {process} on {os.uname().nodename}) has not answered" in said[0], where
    elif fault.kind in ERRORS:
        by = f"error on rank {fault.rank}: " if fault.rank else "error: "
        assert said[0].startswith(by) or f"failed on rank {fault.rank}: " in said[0], where
        assert "planted" in said[0], where
    else:
        assert re.match(r"error: step \d+ hangs: rank ", said[0]), where
        assert f"rank {fault.rank} (process {process} on {os.uname().nodename}) blocks it" in said[0], where


def undisturbed(folder: Path, layout: str, steps: int) -> Path:
    """Return the run directory of an undisturbed run, saved after its last step."""
    campaign = Campaign(folder, layout)
    with campaign.start(steps=steps, save_interval=steps) as job:
        codes = job.wait()
        assert codes == [85] * RANKS, "\n".join(map(job.stderr, range(RANKS)))
    assert campaign.latest == steps
    return campaign.directory
