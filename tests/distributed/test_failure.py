"""An error ends every rank, with one message and the right exit code.

The tests use real forked processes, and torchrun itself once. Errors before there is a group:
tests/end_to_end/test_commands.py.
"""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from megalite.lifecycle import failure
from megalite.mailbox import Mailbox
from tests.harness.job import Job

PREAMBLE = """
import os, signal, sys, time
from megalite.errors import CheckpointError, ConfigurationError
from megalite.lifecycle import failure
from megalite.lifecycle.failure import run_main
rank = int(os.environ["RANK"])

class OutOfMemoryError(RuntimeError):
    pass  # as torch's
"""
GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
"""

Start = Callable[..., Job]


def write(program: str, directory: Path) -> Path:
    path = directory / "program.py"
    path.write_text(PREAMBLE + program)
    return path


@pytest.fixture
def start(spawn: Callable[..., Job], tmp_path: Path) -> Start:
    """Start a program on forked ranks: `start(program, world_size=1)`."""
    return lambda program, world_size=1: spawn([write(program, tmp_path)], world_size)


def ended(job: Job) -> tuple[list[int], str]:
    """Return the exit codes, and the stderr of all ranks together."""
    codes = job.wait(timeout=120)
    return codes, "".join(job.stderr(rank) for rank in range(job.world_size))


def ended_by_launcher(job: Job) -> str:
    """Return the stderr of all ranks together; the first failure ends the other ranks."""
    assert job.wait_as_launcher(timeout=120) != 0
    return "".join(job.stderr(rank) for rank in range(job.world_size))


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return 0", 0, ""),
        ("return 85", 85, ""),
        ("raise ConfigurationError('--tp 3 does not divide 4 heads')", 64, "error: --tp 3 does not divide 4 heads\n"),
        ("raise CheckpointError('disk full')", 93, "error: disk full\n"),
        ("raise KeyboardInterrupt", 85, "error: interrupted\n"),
        ("sys.exit(2)", 2, ""),
    ],
)
def test_one_process_ends_with_the_code_and_the_message(body: str, code: int, message: str, start: Start) -> None:
    codes, error = ended(start(f"def main():\n    {body}\nrun_main(main)"))
    assert (codes, error) == ([code], message)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            "MemoryError('Unable to allocate 2 GiB')",
            "this machine is out of memory (2 GiB were asked for): Unable to allocate 2 GiB\nBefore a run, --dry-run",
        ),
        (
            "RuntimeError('can\\'t allocate memory: you tried to allocate 1600000000000 bytes.')",
            "this machine is out of memory (1.46 TiB were asked for): can't",
        ),
        (
            "OutOfMemoryError('CUDA out of memory. Tried to')",
            "this device is out of memory: CUDA out of memory. Tried to\nBefore a run, --dry-run",
        ),
    ],
)
def test_memory_that_is_used_up_is_no_defect(error: str, told: str, start: Start) -> None:
    codes, message = ended(start(f"def main():\n    raise {error}\nrun_main(main)"))
    assert codes == [70]
    assert message.startswith(f"error: {told}")
    assert "in main" in message


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return 0", 93, "error: the output cannot be written (No space left on device): a part of it is lost\n"),
        (
            "print(*range(10**5))",
            93,
            "error: the output cannot be written (No space left on device): a part of it is lost\n",
        ),
        ("raise CheckpointError('disk full')", 93, "error: disk full\n"),
        ("raise KeyboardInterrupt", 85, "error: interrupted\n"),
    ],
)
def test_an_output_that_cannot_be_written_hides_no_other_error(
    body: str, code: int, message: str, start: Start
) -> None:
    full = "sys.stdout = open('/dev/full', 'w')\nsys.stdout.write('not written yet')\n"
    assert ended(start(f"{full}def main():\n    {body}\nrun_main(main)")) == ([code], message)


@pytest.mark.parametrize(
    ("body", "code"), [("print('hidden')\n    return 0", 0), ("raise ConfigurationError('typo in --tp')", 64)]
)
def test_a_program_without_standard_streams_ends_with_its_own_code(body: str, code: int, start: Start) -> None:
    """A shell or a supervisor may start Python with these streams closed."""
    job = start(f"def main():\n    {body}\nsys.stdout = sys.stderr = None\nrun_main(main)")
    assert job.wait(timeout=60) == [code]


def test_half_a_character_is_escaped_and_ends_no_program(start: Start) -> None:
    job = start("def main():\n    print('\\ud800')\n    return 0\nrun_main(main)")
    assert ended(job) == ([0], "")
    assert job.stdout(0) == "\\ud800\n"


def test_a_defect_shows_its_traceback(start: Start) -> None:
    (code,), error = ended(start("run_main(lambda: 1 // 0)"))
    assert code == 70
    assert "Traceback" in error
    assert error.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_an_error_that_all_ranks_meet_is_told_once_by_the_lowest(start: Start) -> None:
    program = "def main():\n    raise ConfigurationError(f'bad {rank}')\nrun_main(main)"
    assert ended(start(GROUP + program, 3)) == ([64, 64, 64], "error: bad 0\n")


def test_ranks_that_fail_because_a_peer_left_stay_silent_and_take_its_code(start: Start) -> None:
    program = """
def main():
    dist.barrier()
    if rank > 0:
        time.sleep(0.2 * (2 - rank))  # the higher rank fails first
        raise CheckpointError(f"disk full {rank}")
    dist.all_reduce(torch.ones(1))
run_main(main)
"""
    assert ended(start(GROUP + program, 3)) == ([93, 93, 93], "error on rank 1: disk full 1\n")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 0", 0),
        ("return 85", 85),
        ("sys.exit(64)", 64),  # as after a flag's value of the wrong type
        ("if rank: raise CheckpointError('disk full')\n    dist.all_reduce(torch.ones(1))", 93),
    ],
)
def test_the_code_that_launchers_hide_is_left_in_a_file(body: str, code: int, start: Start, tmp_path: Path) -> None:
    program = f"os.environ['MEGALITE_EXIT_FILE'] = {str(tmp_path / 'code')!r}\n{GROUP}def main():\n    {body}\n"
    start(program + "run_main(main)", 2).wait_as_launcher(timeout=120)
    assert (tmp_path / "code").read_text() == f"{code}\n"


def test_before_there_is_a_group_the_launcher_lets_one_rank_speak(start: Start) -> None:
    errors = ended_by_launcher(start("def main():\n    raise ConfigurationError('typo in --tp')\nrun_main(main)", 2))
    assert errors == "error: typo in --tp\n"


def test_before_there_is_a_group_an_error_of_one_rank_alone_is_told(start: Start) -> None:
    program = """
failure._LAUNCHER_SECONDS = 1.0  # that nothing ends it is the case, and not how long it waits for that
def main():
    if rank == 1:
        raise ConfigurationError("no GPU here")
    time.sleep(60)
run_main(main)
"""
    assert ended_by_launcher(start(program, 2)) == "error on rank 1: no GPU here\n"


@pytest.mark.wide
def test_under_a_launcher_with_a_group_one_rank_speaks_too(tmp_path: Path) -> None:
    program = "def main():\n    dist.barrier()\n    raise CheckpointError('disk full')\nrun_main(main)"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = write(GROUP + program, tmp_path)
    result = subprocess.run([*command, path], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stderr.splitlines().count("error: disk full") == 1
    assert "traceback : error: disk full\n" in result.stderr  # under the launcher's Root Cause


@pytest.mark.parametrize("report", [b"", b"x", b"-1 0 x", b"-1 " + b"9" * 5000, b"\xff \xfe"])
def test_what_a_stranger_has_put_into_the_store_is_no_report(report: bytes) -> None:
    store = HashStore()
    PrefixStore("megalite/failure/0", store).set("report", report or b" ")
    assert failure.report(Mailbox(store, 1), "a rank has died", 85) == 70


def test_a_limit_of_open_files_is_blamed_before_what_met_it() -> None:
    described = failure._describe(OSError(errno.EMFILE, "Too many open files", "anything"))
    assert re.match(r"there are too many open files \(the limit is -?\d+ per process\): raise the limit", described)
