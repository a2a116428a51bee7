"""First words of docstrings: a verb or a noun, which tells at once what something is or does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = (
    "What|Of|Whether|Where|How|That|Which|The one that|As|Like|By|For|From|Is|And|Not|None|Those|Within|Under|When|Why"
    "|Raises|With"
)
PLACES = {
    "megalite": WORDS,
    "kernels": WORDS,
    "tools": WORDS,
    "pretrain_gpt.py": WORDS,
    "tests": "That|Whether|With",
}
"""First words that docstrings must not have, by place."""


def files_of(place: str) -> list[Path]:
    return sorted((ROOT / place).rglob("*.py")) or [ROOT / place]


def riddles(path: Path, words: str) -> Iterator[str]:
    for riddle in re.finditer(rf'^\s*[rR]?"""({words})\b.*', path.read_text(), re.MULTILINE):
        yield f"{path.relative_to(ROOT)}: {riddle.group().strip()}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [riddle for place, words in PLACES.items() for path in files_of(place) for riddle in riddles(path, words)]
    assert not found, "\n".join(found)
