"""Runs of a program under torchrun on this machine, to be measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from megalite.errors import MegaliteError
from megalite.process.programs import python, run

LAST_LINES = 12
"""Lines of a failed run that are shown if none of them is an error of megalite."""
OWN = ("pretrain_gpt.py", "megalite-pretrain")


def is_own(program: Sequence[str]) -> bool:
    """Tell whether the program is pretrain_gpt.py."""
    return Path(without_python(program)[0]).name in OWN


def without_python(program: Sequence[str]) -> list[str]:
    """Return the command without the name of the interpreter, which torchrun adds."""
    has = len(program) > 1 and Path(program[0]).name.startswith("python")
    return list(program[1:] if has else program)


def run_on(ranks: int, words: Sequence[str], metrics: Path) -> None:
    """Run a program without an interpreter's name under torchrun. Raises MegaliteError if it fails."""
    launcher = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    if not words[0].endswith(".py"):
        launcher.append("--no-python")
    with TemporaryDirectory(prefix="megalite-exit-") as folder:
        code = Path(folder) / "exit_code"
        # The same number of threads for each rank of each run. torchrun would set it for several ranks alone.
        settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = settings | dict(os.environ) | {"MEGALITE_EXIT_FILE": str(code)}
        command = [*launcher, *words, "--metrics-path", str(metrics)]
        ended = run(command, env=environment, capture_output=True, text=True, errors="replace")
        if ended.returncode:
            own = code.read_text().strip() if code.exists() else str(ended.returncode)
            raise MegaliteError(
                f"{words[0]} on {ranks} ranks ended with exit code {own}:\n{message(ended.stdout + ended.stderr)}"
            )


def message(output: str) -> str:
    """Return the lines that say why a run failed: its errors, or what came last before torchrun's report."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    report = next((number for number, line in enumerate(lines) if "failed (exitcode: " in line), len(lines))
    return "\n".join(errors[:1] or lines[max(report - LAST_LINES, 0) : report + 1])
