"""An error ends every rank, with one message and the right exit code. Real processes, since they really end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

PREAMBLE = """
import os, signal, sys, time
from megalite.errors import CheckpointError, ConfigurationError
from megalite.training.failure import run_main
rank = int(os.environ.get("RANK", "0"))
"""
GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
"""


def start(program: str, rank: int = 0, world_size: int = 1, port: int = 0) -> subprocess.Popen[str]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-c", PREAMBLE + program]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_ranks(program: str, world_size: int) -> tuple[list[int], str]:
    """Exit codes, and what all ranks together wrote to stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start(program, rank, world_size, port) for rank in range(world_size)]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    return [process.returncode for process in ranks], "".join(errors)


def torchrun(program: str, directory: os.PathLike[str]) -> str:
    path = os.path.join(directory, "program.py")
    with open(path, "w") as file:
        file.write(PREAMBLE + program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    return result.stderr


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
def test_one_process_ends_with_the_code_and_the_message(body: str, code: int, message: str) -> None:
    process = start(f"def main():\n    {body}\nrun_main(main)")
    assert process.communicate(timeout=60)[1] == message
    assert process.returncode == code


def test_a_defect_shows_its_traceback() -> None:
    process = start("run_main(lambda: 1 // 0)")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 70
    assert "Traceback" in error
    assert error.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_an_error_that_all_ranks_meet_is_told_once_by_the_lowest() -> None:
    codes, errors = run_ranks(GROUP + "def main():\n    raise ConfigurationError(f'bad {rank}')\nrun_main(main)", 3)
    assert (codes, errors) == ([64, 64, 64], "error: bad 0\n")


def test_ranks_that_fail_because_a_peer_left_stay_silent_and_take_its_code() -> None:
    program = """
def main():
    dist.barrier()
    if rank > 0:
        time.sleep(0.2 * (2 - rank))  # the higher rank fails first
        raise CheckpointError(f"disk full {rank}")
    dist.all_reduce(torch.ones(1))
run_main(main)
"""
    codes, errors = run_ranks(GROUP + program, 3)
    assert (codes, errors) == ([93, 93, 93], "error on rank 1: disk full 1\n")


def test_before_there_is_a_group_the_launcher_lets_one_rank_speak(tmp_path: os.PathLike[str]) -> None:
    errors = torchrun("def main():\n    raise ConfigurationError('typo in --tp')\nrun_main(main)", tmp_path)
    assert errors.count("typo in --tp") == 1


def test_before_there_is_a_group_an_error_of_one_rank_alone_is_told(tmp_path: os.PathLike[str]) -> None:
    program = """
def main():
    if rank == 1:
        raise ConfigurationError("no GPU here")
    time.sleep(60)
run_main(main)
"""
    assert torchrun(program, tmp_path).count("error on rank 1: no GPU here\n") == 1


def test_under_a_launcher_with_a_group_one_rank_speaks_too(tmp_path: os.PathLike[str]) -> None:
    program = "def main():\n    dist.barrier()\n    raise CheckpointError('disk full')\nrun_main(main)"
    assert torchrun(GROUP + program, tmp_path).count("error: disk full\n") == 1
