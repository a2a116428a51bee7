"""Entries of the museum: one folder a bug, with bug.toml (what happened, the right answer) and bug.py (its program).

bug.py has no more than the program needs, and is loaded on each rank:

- program "plain" (`museum/trainer.py`): SETTINGS, fields of `Settings`; PATCHES, functions that take the place of those
  of the trainer with the same names. RIGHT: settings of the right run, if they are others.
- programs "megatron-core" (0.19.2) and "megalite": FLAGS, RANKS, and `wrong()`, a context manager in which each rank
  runs the step. Without it, it is the program itself that is wrong, and RIGHT has the flags with which it is not.
  "megatron-core" (`museum/megatron.py`) builds the model in it, too, and enters `right()`, if there is one, for the
  right run: it mends the program. What then is in `wrong()` gives the program what no flag gives. MASKED: about two in
  five labels count in no loss.
- REFERENCE: settings or flags of the run that is compared with it; unset: the same model on one rank.
- program "megalite" has a few more: LAYOUT, STEPS_BEFORE, DATA, HUGGINGFACE (see `museum/own.py`).
"""

from __future__ import annotations

import re
import runpy
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "bugs"
PROGRAMS = ("plain", "megatron-core", "megalite")


@dataclass(frozen=True)
class Answer:
    """Right answer, as regular expressions.

    Attributes:
        tensor: of the first tensor or figure that is wrong, with its role, such as "gradient of model.norm.weight",
            "grad_norm of step 1", "sample": the whole name.
        hypothesis: of what the program computes instead: found anywhere in its text.
    """

    tensor: str
    hypothesis: str

    def is_tensor(self, name: str | None) -> bool:
        return name is not None and re.fullmatch(self.tensor, name) is not None

    def is_hypothesis(self, text: str | None) -> bool:
        return text is not None and re.search(self.hypothesis, text) is not None


@dataclass(frozen=True)
class Entry:
    """A bug of the museum.

    Attributes:
        name: that of its folder.
        title: what is wrong, in one line.
        program: the one in which it is enacted; "megatron-core" is the real program.
        reported: where: owner/repository#number, or a URL.
        happened: what happened, and who noticed it how.
        right: what is right, or how it was mended.
        is_real: the program is wrong as it is, without a patch.
        late: added after the code of `megalite-verify` was frozen, by somebody who had not seen it.
    """

    name: str
    title: str
    program: str
    reported: tuple[str, ...]
    happened: str
    right: str
    answer: Answer
    is_real: bool = False
    late: bool = False

    @property
    def bug(self) -> dict[str, Any]:
        """Names that bug.py defines, with their values."""
        return runpy.run_path(str(FOLDER / self.name / "bug.py"), run_name=f"museum.bugs.{self.name}")


def read_entry(folder: Path) -> Entry:
    """Return the entry of a folder.

    Raises:
        ValueError: a field is missing, unknown or of another kind.
    """
    given = tomllib.loads((folder / "bug.toml").read_text())
    known = {field.name for field in fields(Entry)} - {"name"}
    if unknown := given.keys() - known:
        raise ValueError(f"{folder}/bug.toml has no use for {', '.join(sorted(unknown))}")
    try:
        answer = Answer(**given.pop("answer"))
        entry = Entry(folder.name, answer=answer, **given | {"reported": tuple(given["reported"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder}/bug.toml: {error}") from None
    if entry.program not in PROGRAMS:
        raise ValueError(f"{folder}/bug.toml: program is one of {', '.join(PROGRAMS)}, not {entry.program}")
    return entry


def entries() -> list[Entry]:
    """Return all entries, by name."""
    return [read_entry(path.parent) for path in sorted(FOLDER.glob("*/bug.toml"))]
