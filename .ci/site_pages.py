"""Hooks of the documentation site (mkdocs.yml): pages from outside of docs/, and links from paths in backticks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "slurm/README.md": "slurm.md",
    "benchmarks/planner/recipes.md": "recipes.md",
    "benchmarks/planner/planner_validation.md": "planner_validation.md",
    "benchmarks/planner/memory_validation.md": "memory_validation.md",
    "benchmarks/planner/predictions.md": "predictions.md",
}
"""Pages outside of docs/, with their names on the site."""
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"`(docs/\w+\.md|" + "|".join(map(re.escape, PAGES)) + ")`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link each path of a page that stands in backticks, so that a strict build finds those that are gone."""
    markdown = markdown.replace("](docs/", "](")  # pictures
    linked, end = [], 0
    for block in _FENCED.finditer(markdown):
        linked += [_PATH.sub(_link, markdown[end : block.start()]), block.group()]
        end = block.end()
    return "".join([*linked, _PATH.sub(_link, markdown[end:])])


def _link(path: re.Match[str]) -> str:
    return f"[{path.group()}]({PAGES.get(path[1], path[1].removeprefix('docs/'))})"
