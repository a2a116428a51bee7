"""Files that `make lint` refuses: those that import each other in a circle, and rooms over their budget of lines."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests import rooms

CONFIGURATION = tomllib.loads((rooms.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


BACK = {
    "plain": "from planted.plain import first",
    "lazy": "def late() -> None:\n    from planted.lazy import first",
    "types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.types.first import Name",
    "straight": "",
}
"""Ways by which a file imports the one that imports it, by room."""


def test_files_that_import_each_other_are_named(tmp_path: Path) -> None:
    contracts = CONFIGURATION["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["type"] == "acyclic_siblings")
    assert contract["ancestors"] == CONFIGURATION["importlinter"]["root_packages"]
    (tmp_path / "lint.toml").write_text(
        f'[tool.importlinter]\nroot_package = "planted"\n[[tool.importlinter.contracts]]\nname = "{contract["name"]}"\n'
        f'type = "{contract["type"]}"\nancestors = ["planted"]\n'
    )
    for room, line in BACK.items():
        folder = tmp_path / "planted" / room
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()
        (folder / "first.py").write_text(f"from planted.{room} import second\n")
        (folder / "second.py").write_text(line)
    program = Path(sys.executable).with_name("lint-imports")
    command = [str(program), "--config", "lint.toml", "--no-cache"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    named = re.findall(r"No cycles are allowed in planted\.(\w+)\.", found.stdout)
    assert sorted(named) == ["lazy", "plain", "types"]
    assert len(re.findall(r"\.(?:first -> \.second|second -> \.first) ", found.stdout)) == 3


def test_a_room_over_its_budget_is_named(tmp_path: Path) -> None:
    files = {
        "megalite/errors.py": 1,
        "megalite/extras/__init__.py": 1,
        "megalite/config/model.py": 3,
        "megalite/config/deeper/part.py": 1,
        "megalite/extras/planner/commands/plan.py": 2,
        "kernels/megalite_kernels/norm.py": 1,
    }
    for name, count in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * count)
    lines = rooms.lines_of_rooms(tmp_path)
    assert lines == {"megalite": 2, "megalite/config": 4, "megalite/extras/planner": 2, "kernels": 1}
    assert not list(rooms.problems(lines, lines))
    (over,) = rooms.problems(lines, {**lines, "megalite/config": 3})
    assert over.startswith(
        "megalite/config has 4 lines, and its budget in [tool.megalite.lines] of pyproject.toml is 3:"
    )
    assert over.endswith("raise the budget in a commit that says why; nothing else raises it")
    (new,) = rooms.problems({**lines, "megalite/new": 5}, lines)
    assert new.startswith("megalite/new has 5 lines and no budget")
    (gone,) = rooms.problems(lines, {**lines, "megalite/gone": 5})
    assert gone.startswith("megalite/gone has a budget")
