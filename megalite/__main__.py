"""List of the commands: `python -m megalite`."""

from __future__ import annotations

import ast
from pathlib import Path

from megalite.process.output import say
from megalite.version import __version__


def commands() -> dict[str, str]:
    """Return the first line of the description of each command."""
    root = Path(__file__).parent
    found = {}
    for path in sorted([*root.glob("commands/*.py"), *root.glob("extras/*/commands/*.py")]):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.stem != "__init__":
            found[f"megalite-{path.stem.replace('_', '-')}"] = " ".join(text.split("\n\n")[0].split())
    return found


if __name__ == "__main__":
    shown = [f"  {name}\n      {what}" for name, what in commands().items()]
    say("\n".join([f"megalite {__version__}. Its commands, each of which takes --help:", "", *shown]))
