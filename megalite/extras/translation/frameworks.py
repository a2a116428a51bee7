"""Words of Horovod and TensorFlow in a Python script, each with what takes its place; the script is not executed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from megalite.extras.translation.report import Report

_WORD = re.compile(r"\b(hvd|tf\.distribute)(?:\.experimental)?\.([A-Za-z_][\w.]{0,80})")
_REST = "the rest of the script: keep its model and its data, and give them to megalite.Trainer (docs/library.md)"


def translate(text: str) -> Report | None:
    """Return a report on each word of these programs, in the order of the script; None if it has none."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        table = tomllib.load(file)
    report, found = Report(), set[str]()
    for number, line in enumerate(text.splitlines(), 1):
        for program, name in _WORD.findall(line.partition("#")[0]):
            answers, words = table[program], name.split(".")
            word = next((each for each in (".".join(words[:2]), words[0]) if each in answers), name)
            answer = answers.get(word, "not translated: docs/migration.md and docs/library.md say what there is")
            if f"{program}.{word}" not in found:
                lines = {"not": report.refused, "nothing:": report.idle}.get(answer.split()[0], report.changed)
                lines.append(f"{program}.{word} (line {number}): {answer}")
            found.add(f"{program}.{word}")
    report.refused += [_REST] if found else []
    return report if found else None
