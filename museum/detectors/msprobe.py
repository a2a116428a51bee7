"""`msprobe` (mindstudio-probe 26.2): statistics of the modules of both runs, compared by its own rules.

Both run under its PrecisionDebugger, and `msprobe graph_visualize` compares them. It merges ranks of different layouts,
and marks nodes of the graph as errors. A run with such a mark is accused, at the first node that has it.

MUSEUM_MSPROBE is the Python that has it: pip install torch safetensors numpy mindstudio-probe==26.2.0
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from museum.detectors.finding import Finding
from museum.detectors.instrumented import is_plain, make_instrumented_case, other_interpreter
from museum.entries import Entry

ERROR = 1
"""Mark of a node that is wrong, in the column precision_index."""


def _interpreter() -> str:
    return other_interpreter("MUSEUM_MSPROBE", "mindstudio-probe==26.2.0")


def make_case(entry: Entry, folder: Path, *, wrong: bool) -> None:
    """Make a case whose runs have dumps in dump/, too."""
    make_instrumented_case(entry, folder, wrong=wrong, module=__name__, interpreter=_interpreter())


@contextmanager
def instrument(stage: Any, ranks: Any, output: Path) -> Iterator[None]:
    """Dump statistics of all modules in the steps."""
    from msprobe.pytorch import PrecisionDebugger  # type: ignore[import-not-found]

    config = {"task": "statistics", "dump_path": str(output / "dump"), "rank": [], "step": [], "level": "L0"}
    file = output / f"msprobe_{ranks.rank}.json"
    file.write_text(json.dumps({**config, "statistics": {"scope": [], "list": [], "data_mode": ["all"]}}))
    debugger = PrecisionDebugger(config_path=str(file))
    debugger.start(model=stage)
    yield
    debugger.stop()
    debugger.step()


def detect(case: Path) -> Finding:
    """Return the first module that is marked as an error; unknown, if msprobe cannot compare the two."""
    if not is_plain(case):
        return Finding("unknown")
    command = (case / "run" / "command.txt").read_text()
    sizes = [
        _flag(command, name)
        for name in ("nproc-per-node", "tensor-model-parallel-size", "pipeline-model-parallel-size")
    ]
    merge = [f"--{name} {size} 1" for name, size in zip(("rank_size", "tp", "pp"), sizes, strict=True)]
    paths = [case / name / "dump" / "step0" for name in ("run", "reference")]
    program = Path(_interpreter()).with_name("msprobe")
    words = f"{program} graph_visualize -tp {paths[0]} -gp {paths[1]} -o {case / 'out'} {' '.join(merge)}".split()
    subprocess.run(words, capture_output=True, check=False, timeout=600)
    files = list((case / "out").glob("*.vis.db"))
    return _first_error(files[0]) if files else Finding("unknown")


def _flag(command: str, name: str) -> int:
    found = re.search(rf"--{name} (\d+)", command)
    assert found is not None
    return int(found[1])


def _first_error(file: Path) -> Finding:
    """Return what the graph says of the run."""
    marked = (
        "SELECT node_name FROM tb_nodes WHERE data_source = 'NPU' AND precision_index = ? ORDER BY rank, node_order"
    )
    with sqlite3.connect(file) as graph:
        names = [row[0] for row in graph.execute(marked, (ERROR,))]
    modules = [found for name in names if (found := re.fullmatch(r"Module\.(.*)\.\w+\.(forward|backward)\.\d+", name))]
    if not names:
        return Finding("right")
    if not modules:
        return Finding("wrong")
    role = "output" if modules[0][2] == "forward" else "input gradient"
    return Finding("wrong", f"{role} of {modules[0][1]}")
