"""Commands with torchrun in all shipped files: restarts must work, and so must two jobs on one machine.

torchrun's agents keep one store for all attempts unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set, and ranks of the
next attempt find the addresses of the previous one. With a single attempt this does not matter. A fixed port may be in
use by another job.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = (
    *("README.md", "AGENTS.md", "pretrain_gpt.py", "docs/**/*.md", "benchmarks/planner/*.md"),
    *("examples/*", "slurm/*", "tools/**/*.py", "megalite/**/*.py"),
)
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
COMMAND = re.compile(r"""(?<![\w-])torchrun (?=["$-])""")
QUOTED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FIXED_PORT = re.compile(r"master[-_]port[ =\"]+\d|endpoint[ =\"]+\S+:\d|MASTER_PORT(:-|=)\d")


def wrong(text: str) -> list[str]:
    """Its commands with torchrun that share a store over restarts, or take a fixed port."""
    found = FIXED_PORT.findall(text)
    whole = re.sub(r"\\+\n", " ", text)
    for command in COMMAND.finditer(whole):
        line = whole[whole.rfind("\n", 0, command.start()) + 1 :].partition("\n")[0]
        sets_store = (
            OWN_STORE in line or "--max-restarts=0" in line or f"\nexport {OWN_STORE}" in whole[: command.start()]
        )
        chooses_port = any(way in line for way in ("--standalone", "--rdzv-endpoint", "${DISTRIBUTED_ARGS[@]}"))
        if not (sets_store and chooses_port):
            found.append(line)
    return found


def test_every_command_with_torchrun_has_a_store_of_its_own_and_no_fixed_port() -> None:
    """The page on coming from other programs quotes their scripts, and what becomes of them."""
    texts = {path: path.read_text() for pattern in SHIPPED for path in ROOT.glob(pattern) if path.is_file()}
    migration = ROOT / "docs" / "migration.md"
    texts[migration] = QUOTED.sub("", texts[migration])
    assert sum("torchrun" in text for text in texts.values()) >= 10
    assert {str(path): found for path, text in texts.items() if (found := wrong(text))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --standalone --nproc-per-node 2 pretrain_gpt.py",
        f"{OWN_STORE} torchrun --nproc-per-node 2 pretrain_gpt.py",
        f"{OWN_STORE} torchrun --rdzv-endpoint=node0:29500 pretrain_gpt.py",
        "MASTER_PORT=${MASTER_PORT:-6000}",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    assert wrong(f"text\n{line}\n")
