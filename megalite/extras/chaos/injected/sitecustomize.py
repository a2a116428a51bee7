"""Start of each Python process of a disturbed command: load `injection.py`, by its path and without importing megalite.

Python imports the first module of this name that it finds. Then the next one, if the environment has one of its own, is
run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run(name: str, path: Path | str) -> None:
    """Execute a file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if name == "_megalite_chaos":
        module.install(os.environ["MEGALITE_CHAOS"])


def _next_of_this_name() -> str | None:
    """Return the `sitecustomize.py` that Python would have taken without this folder."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    return None if spec is None else spec.origin


if os.environ.get("MEGALITE_CHAOS"):
    _run("_megalite_chaos", _HERE.parent / "injection.py")
if (_other := _next_of_this_name()) is not None:
    _run("sitecustomize", _other)
