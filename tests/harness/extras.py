"""Names of optional libraries that tests lack: such a test is skipped, by the name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

EXTRAS = {
    "accelerate": "accelerate",
    "jinja2": "jinja2",
    "lm_eval": "lm-eval",
    "matplotlib": "matplotlib",
    "mkdocs": "mkdocs",
    "mypy": "mypy",
    "pyarrow": "pyarrow",
    "scipy": "scipy",
    "setuptools": "setuptools",
    "spmd_types": "spmd_types",
    "tiktoken": "tiktoken",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "tree_sitter": "tree-sitter",
    "tree_sitter_bash": "tree-sitter-bash",
    "triton": "triton",
    "uv": "uv",
    "zstandard": "zstandard",
}
"""Modules that a test may import and the project does without, each with its name for pip."""


def missing_extra(error: BaseException | None, missing: frozenset[str] | None = None) -> str | None:
    """Return the name for pip of the absent library that made a test fail, if one did.

    `missing`: the modules of `EXTRAS` that are not installed; None to find out.
    """
    if missing is None:
        missing = frozenset(name for name in EXTRAS if find_spec(name) is None)
    for each in _causes(error):
        for name in missing:
            package = EXTRAS[name]
            if re.search(rf"No module named '{name}\b|\b(needs|pip install) '?{package}(?![\w-])", str(each)):
                return package
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
