"""Budget of lines of each room: `make lint` fails when a room has more lines than pyproject.toml allows.

A room is a folder of megalite/ or of megalite/extras/, with the folders in it. `megalite` stands for the files beside
these rooms, and `kernels` is one room. All lines of Python files count, also blank ones and comments.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = "[tool.megalite.lines]"


def lines_of_rooms(root: Path) -> Counter[str]:
    """Count the lines of each room of the clone `root`."""
    lines: Counter[str] = Counter()
    for package in ("megalite", "kernels"):
        for path in (root / package).rglob("*.py"):
            lines[_room(path.relative_to(root).parent.parts)] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def _room(folders: tuple[str, ...]) -> str:
    if folders[0] == "kernels" or folders == ("megalite", "extras"):
        return folders[0]
    return "/".join(folders[: 3 if folders[1:2] == ("extras",) else 2])


def problems(lines: Mapping[str, int], budgets: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each room over its budget or without one, and for each budget without a room."""
    for room, count in sorted(lines.items()):
        if room not in budgets:
            yield f"{room} has {count:,} lines and no budget: give it one in {TABLE} of pyproject.toml"
        elif count > budgets[room]:
            yield (
                f"{room} has {count:,} lines, and its budget in {TABLE} of pyproject.toml is {budgets[room]:,}: take "
                "lines out of it, or raise the budget in a commit that says why; nothing else raises it"
            )
    for room in sorted(budgets.keys() - lines.keys()):
        yield f"{room} has a budget in {TABLE} of pyproject.toml, and no file: take the budget out"


if __name__ == "__main__":
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["megalite"]["lines"]
    sys.exit("\n".join(problems(lines_of_rooms(ROOT), table)) or None)
