"""First words of docstrings: a verb or a noun, which tells at once what something is or does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("megalite", "kernels", "tools", "pretrain_gpt.py", "tests", "benchmarks")
RIDDLE = re.compile(
    r'^\s*[rR]?"""(What|Of|Whether|Where|How|That|Which|The one that|As|Like|By|For|From|Is|And|Not|None'
    r"|Those|Within|Under|When|Why|Raises|With)\b.*",
    re.MULTILINE,
)


def files_of(place: str) -> list[Path]:
    return sorted((ROOT / place).rglob("*.py")) or [ROOT / place]


def riddles(path: Path) -> Iterator[str]:
    for riddle in RIDDLE.finditer(path.read_text()):
        yield f"{path.relative_to(ROOT)}: {riddle.group().strip()}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [riddle for place in PLACES for path in files_of(place) for riddle in riddles(path)]
    assert not found, "\n".join(found)
