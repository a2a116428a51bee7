"""Factors of learning rates that a program gives as functions: what ranks and checkpoints must agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.errors import MegaliteError
from megalite.optim.learning_rate import Factor, factor_at
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh

SECTION = "schedules"
"""Section of a checkpoint's configuration that has factors of such functions."""
_CHECKED = (0, 1, 10, 100, 1000)
"""Steps for which the ranks compare their factors."""


def check_factors(factors: Mapping[str, Factor], mesh: ParallelMesh) -> None:
    """Raise MegaliteError if a function returns other factors on another rank or at a second call.

    Called by all ranks together.
    """
    for each in factors.values():
        factor_at(each, 0)
    own, again = ({name: [_found(each, step) for step in _CHECKED] for name, each in factors.items()} for _ in "ab")
    for rank, found in enumerate(all_gather_json([own, again], mesh)):
        if any(each != own for each in found):
            raise MegaliteError(
                f"a schedule is another function on rank {rank}, or at a second call: a factor must depend on the step "
                "alone"
            )


def _found(factor: Factor, step: int) -> float | None:
    """Return the factor of a step; None if there is none, as beyond the last step of the run."""
    try:
        return factor_at(factor, step)
    except Exception:  # whatever the program's function raises there
        return None


def saved_factors(factors: Mapping[str, Factor], steps_of: Callable[[str], int]) -> dict[str, Any]:
    """Return the section of a checkpoint's configuration that has, by optimizer, the last step and its factor.

    `steps_of`: returns the number of steps of an optimizer.
    """
    found = {}
    for name, factor in factors.items():
        step = max(steps_of(name) - 1, 0)  # not the next one: a function may end with the run
        found[name] = {"step": step, "factor": factor_at(factor, step)}
    return {SECTION: found} if found else {}


def factor_notes(saved: Mapping[str, Any], factors: Mapping[str, Factor]) -> tuple[str, ...]:
    """Return a note for each function that is not the one of the run that saved a checkpoint.

    `saved`: the checkpoint's configuration.
    """
    theirs, notes = saved.get(SECTION, {}), list[str]()
    for name in sorted({*theirs, *factors}):
        if name not in factors or name not in theirs:
            which = "a function" if name in factors else "no function"
            before = "none" if name in factors else "one"
            notes.append(
                f"note: the schedule of {name} is {which} of the step here, and was {before} in the run that saved the "
                "checkpoint"
            )
            continue
        step, factor = theirs[name]["step"], theirs[name]["factor"]
        if (now := factor_at(factors[name], step)) != factor:
            notes.append(
                f"note: the schedule of {name} is {now:.6g} x lr at step {step}, and was {factor:.6g} x lr in the run "
                "that saved the checkpoint"
            )
    return tuple(notes)
