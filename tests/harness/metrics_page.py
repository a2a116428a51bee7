"""Keys of metrics.jsonl that the page on it explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def explained() -> set[str]:
    """Return the keys in the first column of the page's table; in some of them `*` stands for any text."""
    section = PAGE.read_text().partition("\n## The lines of metrics.jsonl\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| [^|]* \| (.*) \|$", section, re.MULTILINE)
    beside = [key for _, meaning in rows for key in re.findall(r"`(\w+/\*)`", meaning)]
    return {*beside, *(key for keys, _ in rows for key in re.findall(r"`([\w/*]+)`", keys))}


def undocumented(keys: Iterable[str]) -> set[str]:
    """Return which keys the table does not have."""
    known = explained()
    return {key for key in keys if not any(fnmatchcase(key, each) for each in known)}
