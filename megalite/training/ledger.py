"""The ledger of a run: one JSON object per line in ledger.jsonl, for each decision that departs from the plain rule.

The plain rule is that each data-parallel rank trains on as many micro-batches as any other, and on all of its samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from megalite.data.sampler import Ranges, merged
from megalite.errors import CheckpointError
from megalite.small_files import reason
from megalite.storage import AnyPath, ObjectPath
from megalite.training.metrics import Growing, Published, StepWriter, cut


@dataclass(frozen=True)
class Decision:
    """A decision about samples.

    Attributes:
        kind: what was decided, in one word.
        source: the data-parallel ranks that it is about.
        samples: the samples that it is about.
        outcome: what became of them.
        why: the reason for a person, with numbers.
    """

    kind: str
    source: Sequence[int]
    samples: Ranges
    outcome: Literal["trained", "left out"]
    why: str

    def record(self, step: int) -> dict[str, Any]:
        """Return the line of this decision, which is one of step `step`."""
        return {"step": step, **vars(self)}


def decision_so_far(kind: str, consumed_samples: int, why: str) -> Decision:
    """Return a decision about the samples so far, which are trained on whatever comes after them."""
    return Decision(kind, (), [(0, consumed_samples - 1)] if consumed_samples else (), "trained", why)


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers of samples as ascending ranges, as long as possible."""
    return merged((number, number) for number in numbers)


class Ledger(StepWriter):
    """Writer of a run's ledger, which begins the file. One rank writes.

    Attributes:
        note: a message if the file is damaged.

    Args:
        path: the file.
        resume_iteration: lines of later steps are removed first: an earlier attempt wrote them.

    Raises:
        CheckpointError: the file cannot be read or written.
    """

    def __init__(self, path: AnyPath, resume_iteration: int) -> None:
        self.note: str | None = None
        self._path, self._fails = path, False
        self._published = Published(path) if isinstance(path, ObjectPath) else None
        with self._writing():
            file = path if self._published is None else self._published.fetch()
            assert isinstance(file, Path)
            file.parent.mkdir(parents=True, exist_ok=True)
            damaged = cut(file, lambda record: cast(int, record["step"]) <= resume_iteration, "step")
            self._lines = Growing(file)
        if damaged:
            self.note = (
                f"WARNING: {path} has {damaged} damaged line{'s' if damaged > 1 else ''}: it was changed, or could not "
                "be written. The run continues, and keeps what can be read of it"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"writing decisions to {self._path} failed: {reason(error)}. Free space, or choose another --save"
            ) from error

    def write(self, step: int, decisions: Iterable[Decision]) -> str | None:
        """Append the decisions of a step. What does not fit on a full disk is written by the next call, or by `close`.

        Returns a warning at the first failure in a row.
        """
        failed, self._fails = self._fails, False
        try:
            self._lines.append(b"".join(json.dumps(each.record(step)).encode() + b"\n" for each in decisions))
        except OSError as error:
            self._fails = True
            if not failed:
                return f"WARNING: writing decisions to {self._path} failed: {reason(error)}. They will be written later"
        return None

    def close(self) -> None:
        with self._writing():
            self._lines.close()
            if self._published is not None:
                self._published.publish()
