"""Finding of a detector, as it writes it in JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Result of a detector on a case.

    Attributes:
        verdict: whether the run is accused; unknown if the detector cannot tell from what is there.
        tensor: the first tensor or figure that it names, with its role: "gradient of NAME", "output of NAME",
            "loss of step 1"; None if it names none.
        hypothesis: what it says the program computes instead; None if it says nothing.
    """

    verdict: Literal["right", "wrong", "unknown"]
    tensor: str | None = None
    hypothesis: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the verdict is none of these."""
        if self.verdict not in ("right", "wrong", "unknown"):
            raise ValueError(f"a verdict is right, wrong or unknown, not {self.verdict!r}")
