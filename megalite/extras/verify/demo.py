"""Demonstration: a silent bug of a real trainer in a tiny one, whose loss looks fine, and what finds it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from megalite.atomic_files import require_output
from megalite.extras.verify import demo_trainer
from megalite.extras.verify.checkpoints import open_weights
from megalite.extras.verify.command import read_command
from megalite.extras.verify.page import write_page
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.verdict import Verdict
from megalite.extras.verify.verification import verify
from megalite.process.output import say

_STORY = """\
With sequence parallelism, the norms of a rank see only its part of the tokens, and the gradients of their weights are
to be summed over the tensor-parallel ranks. In GPT-NeoX they were not (issue 1257). Here is a tiny trainer with this
bug: two steps of a Llama of 3 layers on 2 processes."""
_FOUND = "input_layernorm.weight", "the sum over sequence-parallel ranks"


def demo(page: str | None, show: Callable[[str, Verdict], None]) -> int:
    """Train two steps with a bug, verify the first one, and show the verdict; return 0 if the bug was found.

    `page`: file for the page, or None. Raises ConfigurationError if it cannot be written.
    """
    if page is not None:
        require_output("--page", page)
    say(_STORY)
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as folder:
        right, losses = demo_trainer.run(Path(folder))
        say(f"Its losses look fine: {_shown(losses)}. Without the bug they are {_shown(right)}.")
        say("Now its first step is verified, from its command, its checkpoint and its trace:")
        verdict = verdict_on(Path(folder, "wrong"))
    show("demo", verdict)
    if page is not None:
        facts = [("command", " ".join(demo_trainer.COMMAND.split())), ("losses", _shown(losses))]
        write_page(verdict, Path(page), title="megalite-verify --demo", facts=facts)
        say(f"the page is {page}")
    name, hypothesis = _FOUND
    first, best = verdict.first, next(iter(verdict.hypotheses), None)
    is_found = first is not None and first.entry.name.endswith(name) and best is not None and best.explains
    return 0 if is_found and best is not None and best.text.startswith(hypothesis) else 1


def verdict_on(folder: Path) -> Verdict:
    """Return the verdict on a run of the demonstration's trainer."""
    command = read_command(demo_trainer.COMMAND)
    return verify(
        command, open_weights(str(folder / "checkpoint"), command.config.model), read_trace(folder / "trace", 1)
    )


def _shown(losses: list[float]) -> str:
    return " and ".join(f"{loss:.4f}" for loss in losses)
